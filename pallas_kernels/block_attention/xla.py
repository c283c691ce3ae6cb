"""Online softmax over KV tiles anchored at cell 0, and its backward pass over the same tiles."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.block_attention.contract import KV_TILE
from pallas_kernels.block_attention.math import (
    Part,
    add_keys,
    finish,
    fold,
    keys_gradient,
    nothing,
    unfold,
)


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
) -> Array:
    """See `api.block_attention`."""
    part = attention_part(q, k, v, group, limit, own, first, scale=scale)
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
) -> Part:
    """See `api.attention_part`."""
    heads, kv_heads = q.shape[2], k.shape[2]
    folded = fold(q.astype(jnp.float32), kv_heads)
    per_head = lambda a: jnp.repeat(a, heads // kv_heads, axis=1)[:, None, :, None]
    limit = per_head(limit)
    first = jnp.zeros_like(limit) if first is None else per_head(first)
    part = nothing(*folded.shape) if own is None else own_part(folded, own, scale)
    return _add_cells(scale, part, folded, k, v, jnp.asarray(group, jnp.int32), limit, first)


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


# --- cells, tile by tile ------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_cells(
    scale: float,
    part: Part,
    folded: Array,
    k: Array,
    v: Array,
    group: Any,
    limit: Array,
    first: Array,
) -> Part:
    """The part that has also seen the cells first .. limit - 1, each [rows, 1, m, 1].

    Reverse mode keeps the queries, the cells and the largest logits, and makes the weights of a
    tile again (FlashAttention-2, arXiv 2307.08691): nothing of it grows with queries x cells.
    """

    def add_tile(t: Any, part: Part) -> Part:
        k_tile, v_tile, seen = _tile(t, k, v, group, limit, first)
        return add_keys(part, folded, k_tile, v_tile, seen, scale=scale, precision=None)

    return _over_tiles(k, limit, add_tile, part)


def _forward(scale: float, part: Part, folded: Array, *cells: Array) -> tuple[Part, Any]:
    after: Any = _add_cells(scale, part, folded, *cells)
    return after, (part.top, after.top, folded, *cells)


def _backward(scale: float, saved: Any, d: Part) -> tuple[Any, ...]:
    top_before, top, folded, k, v, group, limit, first = saved
    shrink = jnp.exp(top_before - top)
    d_part = Part(jnp.zeros_like(d.top), shrink * d.total, shrink * d.mixed)

    def add_tile(t: Any, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dq, dk, dv = sums
        k_tile, v_tile, seen = _tile(t, k, v, group, limit, first)
        more = keys_gradient(top, d, folded, k_tile, v_tile, seen, scale=scale)
        write = lambda whole, tile: lax.dynamic_update_slice(
            whole, tile[None].astype(whole.dtype), _place(t, k, group)
        )
        return dq + more[0], write(dk, more[1]), write(dv, more[2])

    start = (jnp.zeros_like(folded), jnp.zeros_like(k), jnp.zeros_like(v))
    dq, dk, dv = _over_tiles(k, limit, add_tile, start)
    return d_part, dq, dk, dv, None, None, None


_add_cells.defvjp(_forward, _backward)


def _over_tiles(k: Array, limit: Array, body: Callable[..., Any], start: Any) -> Any:
    """`body(t, carry)` for the tiles below the largest limit; without a loop if there is one."""
    tile = min(KV_TILE, k.shape[3])
    tiles = k.shape[3] // tile
    if tiles == 1:
        return body(0, start)
    used = jnp.minimum((jnp.max(limit) + (tile - 1)) // tile, tiles)
    return lax.fori_loop(0, used, body, start)


def _place(t: Any, k: Array, group: Any) -> tuple[Any, ...]:
    return group, 0, 0, jnp.asarray(t, jnp.int32) * min(KV_TILE, k.shape[3]), 0


def _tile(
    t: Any, k: Array, v: Array, group: Any, limit: Array, first: Array
) -> tuple[Array, Array, Array]:
    """Tile `t`: keys and values, float32 [rows, kv_heads, tile, channel], and who sees them."""
    at, tile = _place(t, k, group), min(KV_TILE, k.shape[3])
    cell = at[3] + jnp.arange(tile, dtype=jnp.int32)
    used = cell[None, None, :, None] < jnp.max(limit, axis=2, keepdims=True)
    cut = lambda a: lax.dynamic_slice(a, at, (1, *a.shape[1:3], tile, a.shape[4]))[0]
    k_tile, v_tile = (jnp.where(used, cut(a).astype(jnp.float32), 0.0) for a in (k, v))
    cell = cell[None, None, None]
    return k_tile, v_tile, (first <= cell) & (cell < limit)
