"""Online softmax over KV tiles anchored at cell 0."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.block_attention.contract import KV_TILE
from pallas_kernels.block_attention.math import Part, add_keys, finish, fold, nothing, unfold


def block_attention(
    q: Array,
    k: Array,
    v: Array,
    group: Any,
    limit: Array,
    own: Any,
    first: Array | None,
    *,
    scale: float,
    differentiable: bool,
) -> Array:
    """See `api.block_attention`."""
    part = attention_part(
        q, k, v, group, limit, own, first, scale=scale, differentiable=differentiable
    )
    return unfold(finish(part), q.shape[1]).astype(q.dtype)


def attention_part(
    q: Array,
    k: Array,
    v: Array,
    group: Any,
    limit: Array,
    own: Any,
    first: Array | None,
    *,
    scale: float,
    differentiable: bool,
) -> Part:
    """See `api.attention_part`."""
    rows, _, heads, channel = q.shape
    kv_heads, capacity = k.shape[2:4]
    folded = fold(q.astype(jnp.float32), kv_heads)
    per_head = lambda a: jnp.repeat(a, heads // kv_heads, axis=1)[..., None]  # [rows, m, 1]
    limit_m, first_m = per_head(limit), None if first is None else per_head(first)
    part = nothing(*folded.shape) if own is None else own_part(folded, own, scale)
    tile = min(KV_TILE, capacity)
    tiles = capacity // tile

    def add_tile(t: Any, part: Part) -> Part:
        start = jnp.asarray(t, jnp.int32) * tile
        at = (jnp.asarray(group, jnp.int32), 0, 0, start, 0)
        shape = (1, rows, kv_heads, tile, channel)
        cell = start + jnp.arange(tile, dtype=jnp.int32)
        used = (cell[None] < jnp.max(limit, axis=1, keepdims=True))[:, None, :, None]
        k_tile, v_tile = (
            jnp.where(used, lax.dynamic_slice(a, at, shape)[0].astype(jnp.float32), 0.0)
            for a in (k, v)
        )
        seen = cell[None, None] < limit_m
        if first_m is not None:
            seen &= cell[None, None] >= first_m
        return add_keys(part, folded, k_tile, v_tile, seen[:, None], scale=scale, precision=None)

    if tiles == 1:
        part = add_tile(0, part)
    elif differentiable:
        part, _ = lax.scan(lambda c, t: (add_tile(t, c), None), part, jnp.arange(tiles))
    else:
        used_tiles = jnp.minimum((jnp.max(limit) + (tile - 1)) // tile, tiles)
        part = lax.fori_loop(0, used_tiles, add_tile, part)
    return part


def own_part(folded: Array, own: Any, scale: float) -> Part:
    """Attention over the block itself of queries as `fold` gives them, [rows, kv_heads, m, c]."""
    by_block = (*folded.shape[:2], own.valid.shape[1], -1, folded.shape[-1])
    q = folded.reshape(by_block)
    seen = own.valid[:, None, :, None, :]  # [rows, 1, blocks, 1, block]
    k, v = (
        jnp.where(seen[..., 0, :, None], jnp.moveaxis(a, 3, 1).astype(jnp.float32), 0.0)
        for a in (own.k, own.v)
    )
    part = add_keys(nothing(*q.shape), q, k, v, seen, scale=scale, precision=None)
    return Part(*(a.reshape(*folded.shape[:3], -1) for a in part))
