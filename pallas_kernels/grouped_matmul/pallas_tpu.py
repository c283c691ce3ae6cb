"""Mosaic kernel for TPUs: both matmuls of an expert in one pass over its weights.

Grid (tiles, parts of the hidden width); the tiles' experts are known before the grid starts
(scalar prefetch), so a block's index says which expert to fetch. Tiles are sorted by expert: with
the whole hidden width in one part, the next tile of the same expert finds its weights in VMEM.
Beyond the last used tile all indices stay where they are, so nothing is fetched.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.gradient import with_gradient_of
from pallas_kernels.grouped_matmul.layout import through_tiles
from pallas_kernels.grouped_matmul.math import part_of_glu
from pallas_kernels.grouped_matmul.xla import batched

LANES = 128
SUBLANES = {jnp.dtype(jnp.float32): 8, jnp.dtype(jnp.bfloat16): 16}  # rows of one register tile
VMEM_LIMIT = 32 << 20  # over the default 16 MB, under the 128 MB of v5e, v5p and v6e


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Block sizes.

    Attributes:
        tile: rows of a tile.
        part: columns of the hidden width that one grid step takes.
        vmem: bytes of the double-buffered blocks and the accumulator.
    """

    tile: int
    part: int
    vmem: int

    def __post_init__(self) -> None:
        if self.part % LANES or self.vmem > VMEM_LIMIT * 7 // 8:
            raise ValueError(f"{self} does not fit {VMEM_LIMIT} bytes of VMEM in whole lanes")


def tiling(rows: int, width: int, hidden: int, dtype: Any, tile: int) -> Tiling | None:
    """The largest part that fits; None if not even one lane tile does.

    Where an expert cannot have two tiles, keeping its weights gains nothing and a part is at most a
    quarter of the hidden width: the first fetch and the last product, which overlap with nothing,
    are a part long.
    """
    size, least = jnp.dtype(dtype).itemsize, SUBLANES[jnp.dtype(dtype)]
    tile = -(-tile // least) * least
    most = max(LANES, hidden // 4) if rows <= tile else hidden
    # HIGHEST keeps three bfloat16 parts of every operand, which spill registers: at width 2048 the
    # schedule for v5e has 2250 spill slots with 512 columns and still 214 with 128 (jax 0.11).
    most = LANES if size == 4 else most
    for part in range(most // LANES * LANES, 0, -LANES):
        vmem = 2 * size * (3 * width * part + 2 * tile * width) + 4 * tile * (width + 3 * part)
        if hidden % part == 0 and vmem <= VMEM_LIMIT * 7 // 8:
            return Tiling(tile=tile, part=part, vmem=vmem)
    return None


def expert_glu_unsupported(
    x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array, *, tile: int
) -> str | None:
    """Why this kernel cannot serve the call, or None."""
    width, hidden = x.shape[1], w_out.shape[1]
    if x.dtype not in SUBLANES:
        return f"x is {x.dtype}; it takes float32 and bfloat16"
    if width % LANES or hidden % LANES:
        return f"width {width} and hidden width {hidden} must be multiples of {LANES}"
    if tiling(x.shape[0], width, hidden, x.dtype, tile) is None:
        return f"{LANES} columns of width {width} and a tile of {tile} rows exceed {VMEM_LIMIT} B"
    return None


def expert_glu(
    x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array, *, tile: int
) -> Array:
    """See `api.expert_glu`."""
    sizes = tiling(x.shape[0], x.shape[1], w_out.shape[1], x.dtype, tile)
    assert sizes is not None  # `expert_glu_unsupported` said so
    run = with_gradient_of(batched, lambda *args: _launch(*args, sizes=sizes))
    return through_tiles(run, x, expert, weight, valid, w_in, w_out, tile=sizes.tile)


def held(
    t: Any, part: Any, tile_expert: Any, used: Any, *, parts: int
) -> tuple[Array, Array, Array]:
    """(tile, expert, part) in VMEM at a grid step; what does not change is not fetched again."""
    last = jnp.minimum(t, jnp.maximum(used[0] - 1, 0))
    return last, tile_expert[last], jnp.where(t < used[0], part, parts - 1)


def _weights(block: Any) -> Array:
    """An expert's weights as the matmul takes them, from a block as memory holds it.

    This is where int8 or int4 weights and their group scales would become the matmul's dtype.
    """
    return block[0]


def _kernel(
    tile_expert: Any, used: Any, x: Any, gate: Any, up: Any, down: Any, y: Any, total: Any
) -> None:
    del tile_expert  # the index maps read it
    t, part = pl.program_id(0), pl.program_id(1)

    @pl.when(t < used[0])
    def _() -> None:
        @pl.when(part == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += part_of_glu(x[...], _weights(gate), _weights(up), _weights(down))

        @pl.when(part == pl.num_programs(1) - 1)
        def _() -> None:
            y[...] = total[...].astype(y.dtype)


def _launch(
    x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array, *, sizes: Tiling
) -> Array:
    tiles, tile, width = x.shape
    experts, hidden, _ = w_out.shape
    parts = hidden // sizes.part

    def weights(shape: tuple[int, ...], axis: int, first: int) -> pl.BlockSpec:
        def index(*args: Any) -> tuple[Array | int, ...]:
            _, expert, part = held(*args, parts=parts)
            return (expert, 0, part + first) if axis == 2 else (expert, part + first, 0)

        return pl.BlockSpec(shape, index)

    rows = pl.BlockSpec((tile, width), lambda *args: (held(*args, parts=parts)[0], 0))
    into, back = (1, width, sizes.part), (1, sizes.part, width)
    y = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tiles, parts),
            in_specs=[rows, weights(into, 2, 0), weights(into, 2, parts), weights(back, 1, 0)],
            out_specs=rows,
            scratch_shapes=[pltpu.VMEM((tile, width), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((tiles * tile, width), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        # As if every tile were used and every expert were read: what it does is known at run time.
        cost_estimate=pl.CostEstimate(
            flops=6 * tiles * tile * width * hidden,
            bytes_accessed=x.dtype.itemsize
            * (3 * min(tiles, experts) * width * hidden + 2 * tiles * tile * width),
            transcendentals=tiles * tile * hidden,
        ),
        name="expert_glu_tpu",
    )(tile_expert, used[None], x.reshape(-1, width), w_in, w_in, w_out)
    return y.reshape(x.shape)
