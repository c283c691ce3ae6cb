"""The op as one TPU kernel (Mosaic): online softmax over KV tiles that the pipeline streams in.

Grid: rows x KV heads x query tiles x KV tiles, the last in sequence; a query tile's (top, total,
mixed) stay in VMEM from its first KV tile to its last. There is no split over the prefix: a TPU
core runs its grid one step after the other, so a split would only add partial results to write
and read. For the same reason the own block is added here, as the first keys of a query tile: then
nothing but the result leaves the core.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.block_attention import xla
from pallas_kernels.block_attention.contract import KV_TILE
from pallas_kernels.block_attention.math import Part, add_keys, finish, fold, nothing, unfold
from pallas_kernels.compat import pl, pltpu
from pallas_kernels.gradient import with_gradient_of

VMEM = 15 << 20  # of the 16 MB that Mosaic lets a kernel use unless asked for more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of one grid step.

    Attributes:
        queries: query positions; with an own block, exactly one block.
        cells: KV cells. More of them cost VMEM, fewer of them cost grid steps (about 0.35 us).
        group: query heads per KV head.
        channel: head dim.
        itemsize: bytes of an operand's element.
    """

    queries: int
    cells: int
    group: int
    channel: int
    itemsize: int

    def __post_init__(self) -> None:
        if self.cells % 128 or min(self.queries, self.cells) < 1:
            raise ValueError(
                f"tile of {self.queries} queries and {self.cells} cells: cells must be a "
                "positive multiple of 128 and queries positive"
            )

    @property
    def m(self) -> int:
        """Rows of the matmuls."""
        return self.queries * self.group

    @property
    def chunk_m(self) -> int:
        """Rows whose logits are in registers at once: 64 x 512 of them fill half of the file.

        A float32 matmul keeps its operands in three bfloat16 parts: v6e spills at 16 rows of it.
        """
        sizes = (64, 32, 16, 8) if self.itemsize == 2 else (8,)
        return next((c for c in sizes if self.m % c == 0), self.m)

    @property
    def chunk_t(self) -> int:
        """Cells of such a chunk."""
        return min(self.cells, 512 if self.itemsize == 2 else 128)

    @property
    def vmem(self) -> int:
        """Bytes: operands and result twice (the pipeline), the carried part and the limits."""
        m, c = (-(-size // 128) * 128 for size in (self.m, self.channel))
        streamed = 2 * self.itemsize * (2 * m * c + 2 * self.cells * c)
        return streamed + 4 * m * (c + 3 * 128)


def choose_tiles(
    queries: int, block: int | None, group: int, channel: int, capacity: int, itemsize: int
) -> Tiles:
    """About 512 matmul rows, then as many cells (to 1024) as VMEM holds.

    512 rows are 512 operations per byte of KV read, past the ridge of v5e (240) and v5p (166).
    """
    if block is None:  # about equal tiles of whole chunks
        step = 64 // math.gcd(64, group)
        block = -(-queries // -(-queries * group // 512))
        block = min(queries, -(-block // step) * step)
    # No 256: whatever the capacity, a prefix is cut into the same chunks.
    sizes = [t for t in (1024, 512, 128) if t <= max(capacity, 128)]
    tiles = [
        Tiles(queries=block, cells=t, group=group, channel=channel, itemsize=itemsize)
        for t in sizes
    ]
    return next((t for t in tiles if t.vmem <= VMEM), tiles[-1])


def block_attention_unsupported(
    q: Array, k: Array, v: Array, group: Any, limit: Array, own: Any, first: Any = None, **_: Any
) -> str | None:
    """Why this kernel cannot serve the call, or None."""
    if first is not None:
        return "first is given: this kernel sees every cell below the limit; 'xla' serves it"
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype}: this kernel takes bfloat16 or float32"
    tiles = _tiles(q, k, own)
    if own is not None and own.valid.shape[1] > 1 and tiles.m % 16:
        return (
            f"{own.valid.shape[1]} blocks of {tiles.queries} queries x {tiles.group} heads are "
            f"tiles of {tiles.m} rows: several blocks must be whole sublanes (a multiple of 16)"
        )
    if tiles.vmem > VMEM:
        return (
            f"{tiles.queries} queries x {tiles.group} heads of {tiles.channel} channels need "
            f"{tiles.vmem} bytes of VMEM for the smallest KV tile, the limit is {VMEM}"
        )
    return None


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
    forward = functools.partial(_forward, scale=scale)
    formula = functools.partial(xla.block_attention, first=first, scale=scale)
    arrays = (q, k, v, jnp.asarray(group, jnp.int32), limit, own)
    return with_gradient_of(formula, forward)(*arrays)


def _tiles(q: Array, k: Array, own: Any) -> Tiles:
    queries, heads, channel = q.shape[1:]
    block = None if own is None else own.valid.shape[2]
    kv_heads, capacity = k.shape[2:4]
    return choose_tiles(queries, block, heads // kv_heads, channel, capacity, q.dtype.itemsize)


def _forward(
    q: Array, k: Array, v: Array, group: Any, limit: Array, own: Any, *, scale: float
) -> Array:
    rows, queries, _, channel = q.shape
    kv_heads, capacity = k.shape[2:4]
    tiles = _tiles(q, k, own)
    query_tiles = pl.cdiv(queries, tiles.queries)
    limit = jnp.minimum(limit, capacity)
    padded = jnp.pad(limit, ((0, 0), (0, query_tiles * tiles.queries - queries)))
    top = jnp.max(padded.reshape(rows, query_tiles, tiles.queries), axis=2)
    # A dynamic grid: KV tiles past the longest row are no steps at all.
    kv_tiles = jnp.maximum(pl.cdiv(jnp.max(top), tiles.cells), 1)
    cells = pl.BlockSpec(
        (None, None, None, tiles.cells, channel),
        lambda r, h, i, t, group, top: (group[0], r, h, tile_to_copy(t, top[r, i], tiles.cells), 0),
    )
    rows_of = pl.BlockSpec(
        (None, None, tiles.m, channel), lambda r, h, i, t, group, top: (r, h, i, 0)
    )
    lanes = -(-tiles.m // 128) * 128
    limits = jnp.repeat(padded, tiles.group, axis=1).reshape(rows, query_tiles, 1, tiles.m)
    limits = jnp.pad(limits, ((0, 0),) * 3 + ((0, lanes - tiles.m),))
    per_tile = lambda *shape: pl.BlockSpec(
        (None, None, *shape), lambda r, h, i, t, group, top: (r, i, 0, 0)
    )
    operands = [fold(q, kv_heads), limits.astype(jnp.float32), k, v]
    specs = [rows_of, per_tile(1, lanes), cells, cells]
    if own is not None:
        block = own.valid.shape[2]
        own_cells = pl.BlockSpec(
            (None, None, None, block, channel), lambda r, h, i, t, group, top: (r, i, h, 0, 0)
        )
        operands += [jnp.moveaxis(own.k, 3, 2), jnp.moveaxis(own.v, 3, 2)]
        operands += [own.valid[:, :, None].astype(jnp.int32)]
        specs += [own_cells, own_cells, per_tile(1, block)]
    m = queries * tiles.group
    out = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, kv_heads, query_tiles, kv_tiles),
            in_specs=specs,
            out_specs=rows_of,
            scratch_shapes=[
                pltpu.VMEM((tiles.m, 1), jnp.float32),
                pltpu.VMEM((tiles.m, 1), jnp.float32),
                pltpu.VMEM((tiles.m, channel), jnp.float32),
                pltpu.VMEM((tiles.m, 1), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, kv_heads, m, channel), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=_cost(q, k, tiles),
        name="block_attention",
    )(group.reshape(1), top, *operands)
    return unfold(out, queries)


def tile_to_copy(t: Any, top: Any, cells: int) -> Any:
    """The KV tile of step t; past a row's limit the one already there, so nothing is copied."""
    return jnp.minimum(t, jnp.maximum(pl.cdiv(top, cells) - 1, 0))


def _kernel(group: Any, top: Any, q: Any, limits: Any, k: Any, v: Any, *refs: Any,
            tiles: Tiles, scale: float) -> None:  # fmt: skip
    """One KV tile of one query tile, in chunks whose logits stay in registers."""
    *own, out, part_top, part_total, part_mixed, limit = refs
    r, i, t = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    start, end = t * tiles.cells, top[r, i]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    add = functools.partial(add_keys, scale=scale, precision=precision)

    def load(m: Any) -> Part:
        return Part(part_top[m, :], part_total[m, :], part_mixed[m, :])

    def store(m: Any, part: Part) -> None:
        part_top[m, :], part_total[m, :], part_mixed[m, :] = part

    def for_rows(body: Callable[[Any], None]) -> None:
        @pl.loop(0, tiles.m // tiles.chunk_m)
        def _(a: Any) -> None:
            body(pl.ds(pl.multiple_of(a * tiles.chunk_m, tiles.chunk_m), tiles.chunk_m))

    def first(m: Any) -> None:
        part = nothing(tiles.chunk_m, tiles.channel)
        if own:
            own_k, own_v, valid = own
            part = add(part, q[m, :], own_k[...], own_v[...], valid[...] != 0)
        store(m, part)

    @pl.when(t == 0)
    def _() -> None:
        # Limits come one per lane (128 times fewer bytes); the mask wants one per sublane.
        limit[...] = jnp.broadcast_to(limits[...], (128, limits.shape[1])).T[: tiles.m, :1]
        for_rows(first)

    def add_chunk(size: int, b: Any, *, masked: bool = False) -> None:
        at = pl.multiple_of(b * size, size)
        c = pl.ds(at, size)
        cell = lambda shape, axis: start + at + lax.broadcasted_iota(jnp.int32, shape, axis)

        def one(m: Any) -> None:
            values = v[c, :]
            if masked:
                values = jnp.where(cell(values.shape, 0) < end, values, jnp.zeros_like(values))
            seen = cell((tiles.chunk_m, size), 1).astype(jnp.float32) < limit[m, :]
            store(m, add(load(m), q[m, :], k[c, :], values, seen))

        for_rows(one)

    here = jnp.clip(end - start, 0, tiles.cells)
    large, small = tiles.chunk_t, KV_TILE
    pl.loop(0, here // large)(functools.partial(add_chunk, large))
    pl.loop(here // large * (large // small), here // small)(functools.partial(add_chunk, small))
    pl.when(here % small > 0)(lambda: add_chunk(small, here // small, masked=True))

    def last(m: Any) -> None:
        out[m, :] = finish(load(m)).astype(out.dtype)

    pl.when(t == pl.num_programs(3) - 1)(lambda: for_rows(last))


def _cost(q: Array, k: Array, tiles: Tiles) -> Any:
    """For a full cache: the compiler schedules by it, the length is not known to it."""
    rows, queries, heads, channel = q.shape
    cells = rows * k.shape[2] * k.shape[3] * channel * q.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * rows * queries * heads * k.shape[3] * channel,
        bytes_accessed=2 * pl.cdiv(queries, tiles.queries) * cells + 2 * q.size * q.dtype.itemsize,
        transcendentals=rows * queries * heads * k.shape[3],
    )
