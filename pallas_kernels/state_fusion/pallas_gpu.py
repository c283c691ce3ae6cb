"""One Mosaic GPU kernel (Hopper): a block owns 64 or all value channels of one value head.

Every product is a float32 multiply-add in registers, since wgmma rounds its inputs: a matrix that
many positions share (the keys, the state, the values) stays in registers, transposed where its
long side is summed, and the positions pass by one after the other.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.state_fusion import math, xla
from pallas_kernels.state_fusion.contract import Switches
from pallas_kernels.state_fusion.transforms import transformable

ROWS = 64  # positions and value channels come in the 64 rows of a warpgroup's layout
SMEM_BYTES = 227 * 1024
MATRIX = plgpu.Layout.WGMMA
# Of a matrix that lies transposed in memory: pairs of rows are neighbours there.
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one block serves.

    Attributes:
        value: value channels of its head.
    """

    value: int

    def __post_init__(self) -> None:
        if self.value % ROWS:
            raise ValueError(f"Tile.value is {self.value}: expected a multiple of {ROWS}")

    @staticmethod
    def choose(value: int, switches: Switches) -> "Tile":
        """The fewest, so that one row fills as many multiprocessors as it can.

        All of them where the slot's logit is the norm of the read.
        """
        return Tile(value if switches.history_logit == "read_norm" else ROWS)


def state_fusion(*arrays: Any, key_heads: int, switches: Switches) -> tuple[Array, Array]:
    """See `api.state_fusion`."""
    forward = functools.partial(_forward, key_heads=key_heads, switches=switches)
    return transformable(forward, key_heads=key_heads, switches=switches)(*arrays)


def state_fusion_unsupported(
    ring: Array, block_qkv: Array, taps: Array, right_taps: Array | None, state: Array, *_: Array,
    key_heads: int, switches: Switches,
) -> str | None:  # fmt: skip
    """Why this kernel cannot serve a call, or None."""
    n, (key, value) = block_qkv.shape[1], state.shape[2:]
    if key not in (64, 128) or value not in (64, 128):
        return (
            f"head dims are {key} and {value}: it takes 64 and 128, whole rows of a warpgroup's "
            "layout that leave registers free"
        )
    if n > ROWS:
        return f"the block has {n} positions: it takes at most {ROWS}, which its registers hold"
    scratch = jax.tree.leaves(_scratch(block_qkv, taps, key, Tile.choose(value, switches)))
    need = sum(s.size * s.dtype.itemsize for s in scratch)
    if need > SMEM_BYTES:
        return f"it needs {need} bytes of shared memory, over {SMEM_BYTES}: bfloat16 inputs fit"
    return None


def _scratch(block: Array, taps: Array, key: int, tile: Tile) -> dict[str, Any]:
    """Shared memory of one block: what is fetched, then what it computes."""
    older, f32 = taps.shape[0] - 1, jnp.float32
    widths = {"q": key, "k": key, "v": tile.value}
    of = lambda rows, dtype: {p: jax.ShapeDtypeStruct((rows, w), dtype) for p, w in widths.items()}
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, f32)
    return {
        "window": of(ROWS + 2 * older, block.dtype),
        "taps": of(2 * older + 1, taps.dtype),
        "state": shape(key, tile.value),
        "q": shape(ROWS, key),
        "v": shape(ROWS, ROWS),
        "weights": shape(ROWS, ROWS),
        "share": shape(ROWS),
        "c": shape(ROWS),
        "out": shape(ROWS, tile.value),
    }


def _forward(
    ring: Array, block_qkv: Array, taps: Array, right_taps: Array | None, state: Array, g: Array,
    beta: Array, logit_scale: Array, history_bias: Array, history_c: Array, valid: Array,
    empty: Array, *, key_heads: int, switches: Switches,
) -> tuple[Array, Array]:  # fmt: skip
    rows, n, _ = block_qkv.shape
    value_heads, key, value = state.shape[1:]
    older, tile = taps.shape[0] - 1, Tile.choose(value, switches)
    padded = lambda x, before: jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (before, ROWS - n)])
    # Vectors of positions come padded: whole rows of the layout.
    by_head = lambda x: padded(jnp.moveaxis(jnp.where(valid[..., None], x, 0.0), 1, 2), 0)
    exists = padded(valid.astype(jnp.float32), 0)
    operands = {
        "ring": ring,
        "block": block_qkv,
        "taps": taps,
        "state": state,
        "valid": exists,
        # Which rows of the window count; what stands beside them was never written.
        "window_valid": jnp.pad(exists, [(0, 0), (older, older)], constant_values=((0, 0), (1, 0))),
        "logit_scale": xla.scale(logit_scale, switches),
        "history_bias": history_bias,
        "history_c": history_c,
    }
    if right_taps is not None:
        operands["right_taps"] = right_taps
    if switches.block_bias == "decay":
        operands["g"] = by_head(g)
    if switches.block_bias == "decay" or switches.block_value == "beta":
        operands["beta"] = by_head(beta)
    if switches.empty_history == "drop":
        operands["empty"] = empty.astype(jnp.int32)

    shapes = _scratch(block_qkv, taps, key, tile)
    fetched = 3 * (3 if right_taps is None else 4)
    out, share = plgpu.kernel(
        functools.partial(_kernel, n=n, key_heads=key_heads, tile=tile, switches=switches),
        out_type=(
            jax.ShapeDtypeStruct((rows, n, value_heads * value), jnp.float32),
            jax.ShapeDtypeStruct((rows, value_heads, ROWS), jnp.float32),
        ),
        grid=(rows, value_heads, value // tile.value),
        grid_names=("row", "head", "part"),
        scratch_types=[
            jax.tree.map(lambda s: plgpu.SMEM(s.shape, s.dtype), shapes),
            plgpu.Barrier(num_arrivals=fetched),
            plgpu.Barrier(num_arrivals=1),
        ],
        # The layouts are all given here: inferring them finds none for a transposed load.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="state_fusion",
    )(operands)
    out = out.reshape(rows, n, value_heads, value)
    return out, jnp.moveaxis(share[..., :n], 1, 2)


def _kernel(
    gmem: dict[str, Any], out: Any, share: Any, smem: dict[str, Any], inputs: Any, states: Any,
    *, n: int, key_heads: int, tile: Tile, switches: Switches,
) -> None:  # fmt: skip
    """One value head of one row, one part of its value channels."""
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    key, value_heads = smem["state"].shape[0], gmem["state"].shape[1]
    value = gmem["state"].shape[3]
    key_head = head // (value_heads // key_heads)
    first = {
        "q": key_head * key,
        "k": (key_heads + key_head) * key,
        "v": 2 * key_heads * key + head * value + part * tile.value,
    }
    _fetch(gmem, smem, inputs, row, first)
    columns = pl.ds(part * tile.value, tile.value)
    plgpu.copy_gmem_to_smem(gmem["state"].at[row, head, :, columns], smem["state"], states)

    plgpu.barrier_wait(inputs)
    mixed = functools.partial(_mixed, gmem, smem, row, switches=switches)
    smem["q"][...] = _unit(mixed("q", pl.ds(0, key)))
    k = _unit(mixed("k", pl.ds(0, key)))
    plgpu.commit_smem()

    @pl.loop(0, n)
    def _(i: Array) -> None:
        smem["weights"][i] = _times_row(k, smem["q"].at[i], MATRIX)

    plgpu.barrier_wait(states)
    for start in range(0, tile.value, ROWS):
        part_of = pl.ds(start, ROWS)
        state = plgpu.load(
            smem["state"].at[:, part_of].transpose((1, 0)), layout=TRANSPOSED, optimized=False
        )

        @pl.loop(0, n)
        def _(i: Array, state: Array = state, part_of: Any = part_of) -> None:
            read = _times_row(state, smem["q"].at[i], TRANSPOSED)
            read = read if switches.history_query == "unit" else read * key**-0.5
            smem["out"][i, part_of] = read

    plgpu.commit_smem()
    _softmax(gmem, smem, row, head, switches)

    @pl.when(part == 0)
    def _() -> None:
        share[row, head] = _vector(smem["share"], MATRIX.reduce(1))

    for start in range(0, tile.value, ROWS):
        part_of = pl.ds(start, ROWS)
        v = mixed("v", part_of)
        if switches.block_value == "beta":
            v = v * _down(_vector(gmem["beta"].at[row, head], MATRIX.reduce(1)), v.shape)
        smem["v"][...] = v
        plgpu.commit_smem()
        v = plgpu.load(smem["v"].transpose((1, 0)), layout=TRANSPOSED, optimized=False)

        @pl.loop(0, n)
        def _(i: Array, v: Array = v, part_of: Any = part_of) -> None:
            read = _vector(smem["out"].at[i, part_of], TRANSPOSED.reduce(1))
            kept = read if switches.operator == "added" else smem["share"][i] * read
            smem["out"][i, part_of] = kept + _times_row(v, smem["weights"].at[i], TRANSPOSED)

        plgpu.commit_smem()

    at = pl.ds(head * value + part * tile.value, tile.value)
    plgpu.copy_smem_to_gmem(smem["out"].at[pl.ds(0, n)], out.at[row, :, at])
    plgpu.wait_smem_to_gmem(0)


def _fetch(
    gmem: dict[str, Any], smem: dict[str, Any], barrier: Any, row: Array, first: dict[str, Array]
) -> None:
    """Start the copies of q, k and v of this head: ring, block and taps."""
    older, n = gmem["ring"].shape[1], gmem["block"].shape[1]
    for part, start in first.items():
        window, taps = smem["window"][part], smem["taps"][part]
        at = pl.ds(start, window.shape[1])
        copy = functools.partial(plgpu.copy_gmem_to_smem, barrier=barrier)
        copy(gmem["ring"].at[row, :, at], window.at[pl.ds(0, older)])
        copy(gmem["block"].at[row, :, at], window.at[pl.ds(older, n)])
        copy(gmem["taps"].at[:, at], taps.at[pl.ds(0, older + 1)])
        if "right_taps" in gmem:
            copy(gmem["right_taps"].at[:, at], taps.at[pl.ds(older + 1, older)])


def _mixed(
    gmem: dict[str, Any], smem: dict[str, Any], row: Array, part: str, columns: Any,
    *, switches: Switches,
) -> Array:  # fmt: skip
    """q, k or v after convolution and SiLU, [ROWS, columns]."""
    window, taps = smem["window"][part], smem["taps"][part]
    older = (taps.shape[0] - 1) // 2
    ahead = older if "right_taps" in gmem else 0
    order = range(older + 1, older + 1 + ahead)
    order = [*range(older + 1), *(order if switches.right_order == "next_first" else order[::-1])]
    total = None
    for j, tap in enumerate(order):
        x = plgpu.load(window.at[pl.ds(j, ROWS), columns], layout=MATRIX, optimized=False)
        x = x.astype(jnp.float32)
        exists = _vector(gmem["window_valid"].at[row, pl.ds(j, ROWS)], MATRIX.reduce(1))
        x = jnp.where(_down(exists, x.shape) > 0.0, x, 0.0)
        weight = _vector(taps.at[tap, columns], MATRIX.reduce(0)).astype(jnp.float32)
        x = x * _across(weight, x.shape)
        total = x if total is None else total + x
    assert total is not None
    return math.silu(total)


def _softmax(
    gmem: dict[str, Any], smem: dict[str, Any], row: Array, head: Array, switches: Switches
) -> None:
    """Logits -> weights in place, and the slot's share."""
    shape, columns = (ROWS, ROWS), MATRIX.reduce(0)
    logits = plgpu.load(smem["weights"], layout=MATRIX, optimized=False)
    logits = gmem["logit_scale"][head] * logits
    valid = _across(_vector(gmem["valid"].at[row], columns), shape)
    if switches.history_logit == "read_norm":
        read = plgpu.load(smem["out"], layout=MATRIX, optimized=False)
        score = jnp.log(1.0 + jnp.sqrt(jnp.sum(read * read, axis=1) + 1e-12))
    else:
        score = jnp.log(jnp.maximum(jnp.sum(valid, axis=1), 1.0))
    slot = gmem["history_bias"][head] + gmem["history_c"][head] * score
    if switches.block_bias == "decay":
        g = _across(_vector(gmem["g"].at[row, head], columns), shape)
        iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX)
        c = jnp.sum(jnp.where(iota(1) <= iota(0), g, 0.0), axis=1)
        smem["c"][...] = c
        plgpu.commit_smem()
        distance = jnp.abs(_down(c, shape) - _across(_vector(smem["c"], columns), shape))
        strength = jnp.log(_vector(gmem["beta"].at[row, head], columns) + 1e-6)
        logits = logits - distance + _across(strength, shape)
        slot = slot + c
    if switches.operator != "state_slot":
        slot = jnp.full_like(slot, -jnp.inf)
    elif switches.empty_history == "drop":
        slot = jnp.where(gmem["empty"][row] > 0, -jnp.inf, slot)
    w, w_slot = _weights(jnp.where(valid > 0.0, logits, -jnp.inf), slot)
    smem["weights"][...] = w
    smem["share"][...] = w_slot
    plgpu.commit_smem()


def _weights(logits: Array, slot: Array) -> tuple[Array, Array]:
    """One softmax over a slot [rows] and a block [rows, block]; nothing but -inf gives zeros."""
    top = jnp.maximum(jnp.max(logits, axis=1), slot)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    e, e_slot = jnp.exp(logits - _down(top, logits.shape)), jnp.exp(slot - top)
    total = jnp.sum(e, axis=1) + e_slot
    total = jnp.where(total > 0.0, total, 1.0)
    return e / _down(total, logits.shape), e_slot / total


def _unit(x: Array) -> Array:
    """x rsqrt(sum x² + 1e-6)."""
    return x * _down(lax.rsqrt(jnp.sum(x * x, axis=1) + 1e-6), x.shape)


def _times_row(matrix: Array, vector: Any, layout: Any) -> Array:
    """sum_j matrix[:, j] vector[j], of a matrix in registers and a row of shared memory."""
    factor = _across(_vector(vector, layout.reduce(0)), matrix.shape)
    return jnp.sum(matrix * factor, axis=1)


def _vector(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _down(column: Array, shape: tuple[int, ...]) -> Array:
    """A value per row, over the columns."""
    return lax.broadcast_in_dim(column, shape, (0,))


def _across(row: Array, shape: tuple[int, ...]) -> Array:
    """A value per column, over the rows."""
    return lax.broadcast_in_dim(row, shape, (1,))
