"""The op as a Hopper kernel (Mosaic GPU) over the cached cells, and a combine in plain jnp.

Grid: query tiles x (row, KV head) x splits of the prefix; with few rows the splits are what fills
the card. In a block one warpgroup streams K and V tiles into shared memory (TMA) and one or two
others compute 64 matmul rows each (wgmma, bfloat16 in, float32 out). Each split writes its
(top, total, mixed). The own block is added by the combine, which exists anyway: its few rows, of
any number, never fill a wgmma tile.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.block_attention import xla
from pallas_kernels.block_attention.math import LOWEST, MASKED, Part, finish, fold, merge, unfold
from pallas_kernels.compat import pl, plgpu, wgmma_add
from pallas_kernels.gradient import with_gradient_of

CELLS = 64  # KV cells of a tile
ROWS = 64  # of one compute warpgroup: the smallest wgmma
PROCESSORS = 132  # streaming multiprocessors of H100 and H200
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the work is cut; chosen by `choose_tiles`.

    Attributes:
        warpgroups: that compute, 1 or 2; ROWS matmul rows each.
        stages: K and V tiles in flight.
        splits: of the longest prefix; a shorter one uses fewer, of `least` tiles or more.
        least: tiles of a split.
        channel: head dim.
    """

    warpgroups: int
    stages: int
    splits: int
    least: int
    channel: int

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2) or min(self.stages, self.splits, self.least) < 1:
            raise ValueError(f"{self}: warpgroups are 1 or 2, the other counts positive")

    @property
    def m(self) -> int:
        """Matmul rows of a block."""
        return ROWS * self.warpgroups


def choose_tiles(m: int, pairs: int, channel: int) -> Tiles:
    """Two warpgroups share each KV tile where there are rows for them; splits fill the card.

    The number of splits does not follow the capacity, so neither do the bits of a result. Four
    tiles per split keep the partial results (4 bytes per row and channel) below the KV they cover.
    """
    warpgroups = 1 if m <= ROWS else 2
    blocks = pairs * -(-m // (ROWS * warpgroups))
    return Tiles(
        warpgroups=warpgroups,
        stages=2,
        splits=max(1, PROCESSORS // blocks),
        least=4,
        channel=channel,
    )


def block_attention_unsupported(
    q: Array, k: Array, v: Array, group: Any, limit: Array, own: Any, first: Any = None, **_: Any
) -> str | None:
    """Why this kernel cannot serve the call, or None."""
    if first is not None:
        return "first is given: this kernel sees every cell below the limit; 'xla' serves it"
    channel, capacity = q.shape[3], k.shape[3]
    if q.dtype != jnp.bfloat16:
        return f"q is {q.dtype}: wgmma would round it, this kernel takes bfloat16 only"
    if channel % 64 or channel > 256:
        return f"head dim {channel}: this kernel takes 64, 128, 192 and 256"
    if capacity % CELLS:
        return f"capacity {capacity} is not a multiple of its KV tile of {CELLS} cells"
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


def _forward(
    q: Array, k: Array, v: Array, group: Any, limit: Array, own: Any, *, scale: float
) -> Array:
    rows, queries, heads, channel = q.shape
    groups, _, kv_heads, capacity, _ = k.shape
    folded = fold(q, kv_heads)
    m, pairs = folded.shape[2], rows * kv_heads
    tiles = choose_tiles(m, pairs, channel)
    query_tiles = pl.cdiv(m, tiles.m)
    pad = query_tiles * tiles.m - m
    limit_m = jnp.repeat(jnp.minimum(limit, capacity), heads // kv_heads, axis=1)
    limit_m = jnp.pad(limit_m, ((0, 0), (0, pad)))
    top = jnp.max(limit_m.reshape(rows, query_tiles, tiles.m), axis=2)
    padded = jnp.pad(folded, ((0, 0), (0, 0), (0, pad), (0, 0)))
    splits = min(tiles.splits, pl.cdiv(capacity // CELLS, tiles.least))
    partial = lambda *shape: jax.ShapeDtypeStruct((splits, pairs, *shape), jnp.float32)
    cells = (groups * pairs, capacity, channel)  # in place: a reshape of leading axes moves nothing
    tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = lambda *shape: plgpu.SMEM(shape, q.dtype, transforms=tiling)
    stats = plgpu.SMEM((tiles.warpgroups, ROWS), jnp.float32)
    parts = plgpu.kernel(
        functools.partial(_kernel, tiles=tiles, kv_heads=kv_heads, scale=scale),
        out_type=(
            partial(query_tiles * tiles.m),
            partial(query_tiles * tiles.m),
            partial(query_tiles * tiles.m, channel),
        ),
        grid=(query_tiles, pairs, splits),
        grid_names=("query_tile", "pair", "split"),
        num_threads=tiles.warpgroups + 1,
        thread_name="wg",
        scratch_types=dict(
            q_smem=smem(tiles.warpgroups, ROWS, channel),
            w_smem=smem(tiles.warpgroups, ROWS, CELLS),
            k_smem=smem(tiles.stages, CELLS, channel),
            v_smem=smem(tiles.stages, CELLS, channel),
            limit_smem=plgpu.SMEM((tiles.warpgroups, ROWS), jnp.int32),
            top_smem=stats,
            total_smem=stats,
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=tiles.warpgroups),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
            free=plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
            cleaned=plgpu.Barrier(num_arrivals=tiles.warpgroups),
        ),
        kernel_name="block_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(
        group.reshape(1),
        top,
        limit_m,
        padded.reshape(pairs, -1, channel),
        k.reshape(cells),
        v.reshape(cells),
    )
    whole = lambda a: a.reshape(splits, rows, kv_heads, query_tiles * tiles.m, -1)[..., :m, :]
    part = merge(Part(*(whole(a) for a in parts)))
    if own is not None:
        both = (part, xla.own_part(folded.astype(jnp.float32), own, scale))
        part = merge(Part(*(jnp.stack(pair) for pair in zip(*both, strict=True))))
    return unfold(finish(part), queries).astype(q.dtype)


def _kernel(group: Any, top: Any, limit: Any, q: Any, k: Any, v: Any, top_out: Any,
            total_out: Any, mixed_out: Any, *, tiles: Tiles, kv_heads: int, scale: float,
            **memory: Any) -> None:  # fmt: skip
    """One split of one query tile of one KV head of one row."""
    query_tile, pair, split = (lax.axis_index(a) for a in ("query_tile", "pair", "split"))
    wg = lax.axis_index("wg")
    row = pair // kv_heads
    end = top[row, query_tile]
    needed = pl.cdiv(end, CELLS)
    length = jnp.maximum(pl.cdiv(needed, tiles.splits), tiles.least)
    first = split * length
    steps = jnp.clip(needed - first, 0, length)

    @pl.when(wg < tiles.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        at = pl.ds(query_tile * tiles.m + wg * ROWS, ROWS)
        mine = {name: ref.at[wg] for name, ref in memory.items() if name in PER_WARPGROUP}
        plgpu.copy_gmem_to_smem(q.at[pair, at], mine["q_smem"], mine["loaded"])
        plgpu.copy_gmem_to_smem(limit.at[row, at], mine["limit_smem"], mine["loaded"])
        plgpu.barrier_wait(mine["loaded"])
        part = _attend(memory, mine, first, steps, end, tiles=tiles, scale=scale)
        mine["top_smem"][...] = part.top * (1 / LOG2E)
        mine["total_smem"][...] = part.total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine["top_smem"], top_out.at[split, pair, at])
        plgpu.copy_smem_to_gmem(mine["total_smem"], total_out.at[split, pair, at])

        @pl.when(steps > 0)  # else the combine does not look at it
        def _() -> None:
            mixed_out.at[split, pair, at][...] = part.mixed

        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == tiles.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        source = group[0] * lax.axis_size("pair") + pair

        def copy(step: Any, slot: Any) -> None:
            at = (source, pl.ds((first + step) * CELLS, CELLS))
            for ref, to in ((k, memory["k_smem"]), (v, memory["v_smem"])):
                plgpu.copy_gmem_to_smem(ref.at[at], to.at[slot], memory["ready"].at[slot])

        for slot in range(tiles.stages):
            pl.when(slot < steps)(functools.partial(copy, slot, slot))

        @pl.loop(0, steps)
        def _(step: Any) -> None:  # the last ones too: a barrier must not outlive its block
            slot = lax.rem(step, tiles.stages)
            plgpu.barrier_wait(memory["free"].at[slot])
            following = step + tiles.stages
            pl.when(following < steps)(lambda: copy(following, slot))


PER_WARPGROUP = ("q_smem", "w_smem", "limit_smem", "top_smem", "total_smem", "loaded")


def _attend(
    memory: dict, mine: dict, first: Any, steps: Any, end: Any, *, tiles: Tiles, scale: float
) -> Part:
    """A warpgroup's 64 rows over this split's tiles; `top` in units of log 2."""
    per_row = plgpu.Layout.WGMMA.reduce(1)
    full = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), per_row)
    zeros = jnp.zeros((ROWS, tiles.channel), jnp.float32)

    def scores(acc: Any, slot: Any) -> Array:
        plgpu.wgmma(acc, mine["q_smem"], memory["k_smem"].at[slot].transpose((1, 0)))
        return acc[...]

    def step(i: Any, part: Part) -> Part:
        slot = lax.rem(i, tiles.stages)
        cell, values = (first + i) * CELLS, memory["v_smem"].at[slot]
        plgpu.barrier_wait(memory["ready"].at[slot])
        pl.when(cell + CELLS > end)(
            functools.partial(_clean, values, memory["cleaned"], end - cell, tiles)
        )
        logits = pl.run_scoped(
            functools.partial(scores, slot=slot),
            plgpu.WGMMAAccumulatorRef((ROWS, CELLS), jnp.float32),
        )
        limit = plgpu.load(mine["limit_smem"], layout=per_row)
        top, shrink, weights = _weights(part.top, logits, limit, cell, scale)
        total = shrink * part.total + jnp.sum(weights, axis=1)
        mine["w_smem"][...] = weights.astype(jnp.bfloat16)
        plgpu.commit_smem()
        old = part.mixed * _across(shrink, part.mixed.shape)
        mixed = wgmma_add(old, mine["w_smem"], values)
        plgpu.barrier_arrive(memory["free"].at[slot])
        return Part(top, total, mixed)

    start = Part(full(LOWEST), full(0.0), plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))
    return lax.fori_loop(0, steps, step, start)


def _weights(
    top: Array, logits: Array, limit: Array, cell: Any, scale: float
) -> tuple[Array, Array, Array]:
    """The new top, what shrinks the sums under the old one, and this tile's weights."""
    cells = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA) + cell
    seen = cells < _across(limit, logits.shape)
    logits = jnp.where(seen, logits * (scale * LOG2E), MASKED)
    new = jnp.maximum(top, jnp.max(logits, axis=1))
    return new, jnp.exp2(top - new), jnp.exp2(logits - _across(new, logits.shape))


def _across(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _clean(values: Any, cleaned: Any, used: Any, tiles: Tiles) -> None:
    """Zero the values past the limit, as 0 times NaN is NaN; each warpgroup some channels."""
    width = 64
    wg = lax.axis_index("wg")

    def clean(part: int) -> None:
        there = values.at[:, pl.ds(part * width, width)]
        cells = plgpu.broadcasted_iota(jnp.int32, (CELLS, width), 0, layout=plgpu.Layout.WGMMA)
        kept = plgpu.load(there, layout=plgpu.Layout.WGMMA)
        there[...] = jnp.where(cells < used, kept, jnp.zeros_like(kept))

    for part in range(tiles.channel // width):
        pl.when(wg == part % tiles.warpgroups)(functools.partial(clean, part))
    plgpu.commit_smem()
    plgpu.barrier_arrive(cleaned)
    plgpu.barrier_wait(cleaned)
