"""What a prefix leaves behind: KV cells, GDN states, conv rings, and the last hidden vector."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from pallas_kernels.block_attention import KV_TILE


class DecodeCache(NamedTuple):
    """Left-aligned and right-padded: row r holds `length[r]` committed tokens.

    Cells at or past `length` cannot matter, whatever they hold. A head's cells are contiguous: a
    tile of them is one matmul operand and one copy, on every kind of machine.
    """

    k: Float[Array, "groups rows kv_heads capacity channel"]  # normed and rotated
    v: Float[Array, "groups rows kv_heads capacity channel"]
    state: Float[Array, "groups layers rows value_heads key value"]  # float32
    ring: Float[Array, "groups layers rows taps channels"]  # last K-1 pre-conv rows
    hidden: Float[Array, "rows width"]  # final-normed, of the last committed token
    length: Int[Array, " rows"]

    @property
    def capacity(self) -> int:
        """KV cells per row."""
        return self.k.shape[3]

    @property
    def rows(self) -> int:
        """Batch rows."""
        return self.length.shape[0]


ROW_AXES = DecodeCache(k=1, v=1, state=2, ring=2, hidden=0, length=0)  # pyright: ignore


def cache_shapes(cfg: ModelConfig, rows: int, capacity: int) -> DecodeCache:
    """Abstract cache. The capacity is rounded up to whole KV tiles, so that it never matters."""
    a, d, g, dtype = cfg.attention, cfg.delta, cfg.num_groups, jnp.dtype(cfg.dtype)
    cells = -(-capacity // KV_TILE) * KV_TILE
    kv = jax.ShapeDtypeStruct((g, rows, a.num_kv_heads, cells, a.head_dim), dtype)
    lead = (g, cfg.linear_per_group, rows)
    state = (*lead, d.num_value_heads, d.key_head_dim, d.value_head_dim)
    make: Any = DecodeCache  # of shapes, not arrays
    return make(
        k=kv,
        v=kv,
        state=jax.ShapeDtypeStruct(state, jnp.float32),
        ring=jax.ShapeDtypeStruct((*lead, d.conv_kernel - 1, d.conv_channels), dtype),
        hidden=jax.ShapeDtypeStruct((rows, cfg.hidden_size), dtype),
        length=jax.ShapeDtypeStruct((rows,), jnp.int32),
    )


def empty_cache(
    cfg: ModelConfig,
    rows: int,
    capacity: int,
    env: Env = Env(),  # noqa: B008
) -> DecodeCache:
    """A cache with nothing committed: zero state and ring, as at the start of a text.

    On a mesh each device makes its own part.
    """
    shapes = cache_shapes(cfg, rows, capacity)
    placed = cache_shardings(shapes, env)
    make = lambda s, at: jnp.zeros(s.shape, s.dtype, device=at)
    if placed is None:
        return jax.tree.map(lambda s: make(s, None), shapes)
    return jax.tree.map(make, shapes, placed)


def cache_shardings(shapes: DecodeCache, env: Env) -> Any:
    """Where each array of such a cache is on the mesh, a `DecodeCache` of shardings; None: no mesh.

    Rows and heads are split; where the mesh splits rows or KV heads no further, the cells are.
    """
    if env.mesh is None:
        return None
    place = lambda spec: NamedSharding(env.mesh, spec)  # pyright: ignore[reportArgumentType]
    cells = place(cell_partition(shapes.k.shape, env))
    at = lambda x, *axes: place(env.partition(axes, x.shape))
    make: Any = DecodeCache  # of shardings, not arrays
    return make(
        k=cells,
        v=cells,
        state=at(shapes.state, "group", "layer", "rows", "heads", None, None),
        ring=at(shapes.ring, "group", "layer", "rows", None, "channels"),
        hidden=at(shapes.hidden, "rows", None),
        length=at(shapes.length, "rows"),
    )


def cell_partition(shape: tuple[int, ...], env: Env) -> PartitionSpec:
    """How cached keys [groups, rows, kv_heads, capacity, channel] are split: by whole KV tiles."""
    groups, rows, kv_heads, capacity, channel = shape
    axes = ("group", "rows", "kv_heads", "cells", None)
    return env.partition(axes, (groups, rows, kv_heads, max(1, capacity // KV_TILE), channel))


def check_capacity(cfg: ModelConfig, length: int, new_tokens: int, capacity: int) -> None:
    """Refuse work that would not fit, before anything is written.

    Raises:
        CloverError: more tokens than the cache or the model's context holds.
    """
    limit = min(capacity, cfg.max_position_embeddings)
    if length + new_tokens > limit:
        raise CloverError(
            f"{length} tokens are committed and {new_tokens} more are asked for, but the context "
            f"holds {limit}: shorten the prompt or ask for fewer tokens"
        )


def take_rows(cache: DecodeCache, rows: Int[Array, " kept"]) -> DecodeCache:
    """The cache of some rows, in that order: how rows leave a running batch."""
    return jax.tree.map(lambda a, axis: jnp.take(a, rows, axis=axis), cache, ROW_AXES)


def join_rows(first: DecodeCache, second: DecodeCache) -> DecodeCache:
    """The rows of two caches of one capacity: how rows join a running batch."""
    if first.capacity != second.capacity:
        raise CloverError(
            f"cannot join caches of capacity {first.capacity} and {second.capacity}: make both "
            "with the same capacity"
        )
    join = lambda a, b, axis: jnp.concatenate([a, b], axis=axis)
    return jax.tree.map(join, first, second, ROW_AXES)


def snapshot(cache: DecodeCache) -> DecodeCache:
    """A copy that survives the donation of the original."""
    return jax.tree.map(jnp.copy, cache)


def bytes_per_token(cfg: ModelConfig) -> int:
    """KV bytes that each committed token adds to a row."""
    a = cfg.attention
    return cfg.num_groups * 2 * a.num_kv_heads * a.head_dim * jnp.dtype(cfg.dtype).itemsize


def bytes_per_row(cfg: ModelConfig) -> int:
    """Bytes of a row's GDN states and rings, whatever its length."""
    shapes = cache_shapes(cfg, 1, KV_TILE)
    size = lambda s: s.size * s.dtype.itemsize
    return size(shapes.state) + size(shapes.ring)
