"""Mosaic GPU kernels for Hopper (wgmma): gate and up with silu, then down.

wgmma's M side is 64 wide whatever the call, and a tile has 8 to 64 rows: so the weights stand on
the M side and the rows on the N side (the product is transposed), and no tensor core time goes to
padding. Two kernels, not one: fused, a tile would be one block's work, and the eight experts of a
single row would keep 8 of 132 multiprocessors busy.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.gradient import with_gradient_of
from pallas_kernels.grouped_matmul.layout import through_tiles
from pallas_kernels.grouped_matmul.xla import batched

SWIZZLE = 64  # bfloat16 elements of a 128-byte swizzle, and wgmma's M
TILES = (8, 16, 32, 64)
SMEM_OF_TWO = (
    110 << 10
)  # so that two blocks share a multiprocessor: one fetches, one starts or ends
_TRANSFORMS = (plgpu.TilingTransform((8, SWIZZLE)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Block sizes of one product [columns of w, depth] @ [depth, tile].

    Attributes:
        tile: rows, wgmma's N.
        columns: columns of the weights that one block computes, all weights together.
        depth: of the sum, per pipeline stage.
        stages: in flight.
    """

    tile: int
    columns: int
    depth: int
    stages: int

    def __post_init__(self) -> None:
        if self.tile not in TILES or self.columns % SWIZZLE or self.depth % SWIZZLE:
            raise ValueError(f"{self} is not in whole wgmma and swizzle units")
        if self.smem > 227 << 10:
            raise ValueError(f"{self} takes {self.smem} bytes of shared memory of {227 << 10}")

    @property
    def smem(self) -> int:
        """Bytes of the stages and of the result."""
        inputs = self.stages * self.depth * (self.columns + self.tile)
        return 2 * (inputs + self.columns * self.tile)


def tiling(tile: int, depth: int, columns: int) -> Tiling:
    """Stages as deep as two blocks on a multiprocessor allow, at least two."""
    tile = next((t for t in TILES if t >= tile), TILES[-1])
    step = 2 * SWIZZLE if depth % (2 * SWIZZLE) == 0 else SWIZZLE
    stages = (SMEM_OF_TWO - 2 * columns * tile) // (2 * step * (columns + tile))
    stages = max(2, min(6, stages, depth // step))
    return Tiling(tile=tile, columns=columns, depth=step, stages=stages)


def expert_glu_unsupported(
    x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array, *, tile: int
) -> str | None:
    """Why these kernels cannot serve the call, or None."""
    width, hidden = x.shape[1], w_out.shape[1]
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}; wgmma multiplies bfloat16 (float32 would be rounded to TF32)"
    if width % SWIZZLE or hidden % SWIZZLE:
        return f"width {width} and hidden width {hidden} must be multiples of {SWIZZLE}"
    return None


def expert_glu(
    x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array, *, tile: int
) -> Array:
    """See `api.expert_glu`."""
    into = tiling(tile, x.shape[1], 2 * SWIZZLE)
    back = tiling(tile, w_out.shape[1], SWIZZLE * (2 if x.shape[1] % (2 * SWIZZLE) == 0 else 1))
    run = with_gradient_of(batched, lambda *args: _launch(*args, into=into, back=back))
    return through_tiles(run, x, expert, weight, valid, w_in, w_out, tile=into.tile)


def _weights(block: Any) -> Any:
    """An expert's weights [columns, depth] as wgmma takes them, from a stage [depth, columns].

    This is where int8 or int4 weights and their group scales would become bfloat16: wgmma takes its
    M side from registers too.
    """
    return block.transpose((1, 0))


def _products(rows: Any, weights: list[Any], sizes: Tiling, columns: int) -> list[Array]:
    """w.T @ rows.T of each w, [columns, tile] in float32; refs in device memory."""

    def scope(*sums: Any) -> list[Array]:
        def step(_: Any, x: Any, *blocks: Any) -> None:
            for total, block in zip(sums, blocks, strict=True):
                plgpu.wgmma(total, _weights(block), x.transpose((1, 0)))
            plgpu.wgmma_wait(0)

        spec = lambda shape, index: plgpu.BlockSpec(shape, index, transforms=_TRANSFORMS)
        plgpu.emit_pipeline(
            step,
            grid=(rows.shape[1] // sizes.depth,),
            in_specs=[
                spec((sizes.tile, sizes.depth), lambda s: (0, s)),
                *(spec((sizes.depth, columns), lambda s: (s, 0)) for _ in weights),
            ],
            max_concurrent_steps=sizes.stages,
        )(rows, *weights)
        return [total[...] for total in sums]

    return pl.run_scoped(scope, *(plgpu.ACC((columns, sizes.tile), jnp.float32) for _ in weights))


def _store(product: Array, smem: Any, out: Any) -> None:
    """[columns, tile] to `out` [tile, columns] in device memory."""
    turned = smem.transpose((1, 0))
    turned[...] = plgpu.layout_cast(product.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, out)
    plgpu.wait_smem_to_gmem(0)


def _launch(
    x: Array,
    w_in: Array,
    w_out: Array,
    tile_expert: Array,
    used: Array,
    *,
    into: Tiling,
    back: Tiling,
) -> Array:
    tiles, tile, width = x.shape
    hidden = w_out.shape[1]

    def gate_up(tile_expert: Any, used: Any, x: Any, w: Any, h: Any, smem: Any) -> None:
        t, block = jax.lax.axis_index("tile"), jax.lax.axis_index("block")

        @pl.when(t < used[0])
        def _() -> None:
            rows, columns = pl.ds(t * tile, tile), pl.ds(block * SWIZZLE, SWIZZLE)
            here = w.at[tile_expert[t]]
            halves = [here.at[:, pl.ds(first + block * SWIZZLE, SWIZZLE)] for first in (0, hidden)]
            gate, up = _products(x.at[rows], halves, into, SWIZZLE)
            _store(gate / (1.0 + jnp.exp(-gate)) * up, smem, h.at[rows, columns])

    def down(tile_expert: Any, used: Any, h: Any, w: Any, y: Any, smem: Any) -> None:
        t, block = jax.lax.axis_index("tile"), jax.lax.axis_index("block")

        @pl.when(t < used[0])
        def _() -> None:
            rows, columns = pl.ds(t * tile, tile), pl.ds(block * back.columns, back.columns)
            here = w.at[tile_expert[t]].at[:, columns]
            (product,) = _products(h.at[rows], [here], back, back.columns)
            _store(product, smem, y.at[rows, columns])

    def call(body: Any, name: str, out: int, columns: int, *args: Array) -> Array:
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((tiles * tile, out), x.dtype),
            grid=(tiles, out // columns),
            grid_names=("tile", "block"),
            scratch_types=[plgpu.SMEM((tile, columns), x.dtype, transforms=_TRANSFORMS)],
            kernel_name=name,
        )(tile_expert, used[None], *args)

    h = call(gate_up, "expert_glu_gate_up_gpu", hidden, SWIZZLE, x.reshape(-1, width), w_in)
    y = call(down, "expert_glu_down_gpu", width, back.columns, h, w_out)
    return y.reshape(x.shape)
