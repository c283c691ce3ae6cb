"""Online softmax over KV tiles anchored at cell 0."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

KV_TILE = 128
MASKED = -1e30  # finite, so that a fully masked tile leaves the running maximum as it is


def block_attention(
    q: Array,
    k: Array,
    v: Array,
    group: Any,
    limit: Array,
    own: Any,
    *,
    scale: float,
    differentiable: bool,
) -> Array:
    """See `api.block_attention`."""
    rows, queries, heads, channel = q.shape
    capacity, kv_heads = k.shape[2], k.shape[3]
    q32 = scale * q.astype(jnp.float32).reshape(rows, queries, kv_heads, -1, channel)
    stats = (rows, kv_heads, heads // kv_heads, queries)
    carry = (
        jnp.full(stats, MASKED, jnp.float32),
        jnp.zeros(stats, jnp.float32),
        jnp.zeros((*stats, channel), jnp.float32),
    )
    if own is not None:
        blocks, block = own.valid.shape[1:]
        q_own = q32.reshape(rows, blocks, block, kv_heads, -1, channel)
        logits = jnp.einsum("rbihgc,rbjhc->rhgbij", q_own, own.k.astype(jnp.float32))
        logits = jnp.where(own.valid[:, None, None, :, None, :], logits, MASKED)
        top = jnp.max(logits, axis=-1)
        w = jnp.where(own.valid[:, None, None, :, None, :], jnp.exp(logits - top[..., None]), 0.0)
        mixed = jnp.einsum("rhgbij,rbjhc->rhgbic", w, own.v.astype(jnp.float32))
        carry = (
            top.reshape(stats),
            jnp.sum(w, axis=-1).reshape(stats),
            mixed.reshape(*stats, channel),
        )

    tile = min(KV_TILE, capacity)
    if capacity % tile:
        raise ValueError(f"capacity {capacity} is not a multiple of the KV tile {KV_TILE}")
    tiles = capacity // tile

    def add_tile(t: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        top, total, mixed = carry
        start = jnp.asarray(t, jnp.int32) * tile
        at = (jnp.asarray(group, jnp.int32), 0, start, 0, 0)
        shape = (1, rows, tile, kv_heads, channel)
        k_tile = lax.dynamic_slice(k, at, shape)[0].astype(jnp.float32)
        v_tile = lax.dynamic_slice(v, at, shape)[0].astype(jnp.float32)
        cell = start + jnp.arange(tile, dtype=jnp.int32)
        seen = cell[None, None] < limit[..., None]  # [rows, queries, tile]
        used = jnp.any(seen, axis=1)[..., None, None]
        logits = jnp.einsum("rqhgc,rthc->rhgqt", q32, jnp.where(used, k_tile, 0.0))
        logits = jnp.where(seen[:, None, None], logits, MASKED)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
        shrink = jnp.exp(top - new_top)
        w = jnp.where(seen[:, None, None], jnp.exp(logits - new_top[..., None]), 0.0)
        mixed_tile = jnp.einsum("rhgqt,rthc->rhgqc", w, jnp.where(used, v_tile, 0.0))
        return (
            new_top,
            shrink * total + jnp.sum(w, axis=-1),
            shrink[..., None] * mixed + mixed_tile,
        )

    if tiles == 1:
        carry = add_tile(0, carry)
    elif differentiable:
        carry, _ = lax.scan(lambda c, t: (add_tile(t, c), None), carry, jnp.arange(tiles))
    else:
        used_tiles = jnp.minimum((jnp.max(limit) + (tile - 1)) // tile, tiles)
        carry = lax.fori_loop(0, used_tiles, add_tile, carry)
    _, total, mixed = carry
    out = mixed / jnp.where(total > 0, total, jnp.float32(1))[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(rows, queries, heads, channel).astype(q.dtype)
