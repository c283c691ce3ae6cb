"""One Mosaic kernel: a grid step owns a few key heads with their value heads and states."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.state_fusion import contract, math, xla
from pallas_kernels.state_fusion.contract import Switches
from pallas_kernels.state_fusion.transforms import transformable

LANES = 128
VMEM_BYTES = 16 * 2**20  # the default scoped limit of the generations that the tests compile for
DEPTH = 64  # of one product with the state: at 128 the parts that HIGHEST splits it into spill
STATE_BYTES = 2**19  # of one grid step: its fixed cost is about that of moving so much


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one grid step serves.

    Attributes:
        heads: key heads, each with its group of value heads; they divide all key heads, and the
            v channels start at a multiple of theirs.
    """

    heads: int

    @staticmethod
    def choose(state: tuple[int, ...], key_heads: int) -> "Tile | None":
        """The most heads whose states fit STATE_BYTES; None if v is not aligned for one head."""
        fits = [h for h in range(1, key_heads + 1) if Tile(h).reason(state, key_heads) is None]
        small = [h for h in fits if 4 * _size(state, key_heads) * h <= STATE_BYTES]
        return Tile(max(small or fits[:1])) if fits else None

    def reason(self, state: tuple[int, ...], key_heads: int) -> str | None:
        """Why this tile does not divide a call with such a state, or None."""
        _, value_heads, key, value = state
        width = self.heads * value_heads // key_heads * value
        if key_heads % self.heads:
            return f"{self.heads} heads do not divide {key_heads}"
        if 2 * key_heads * key % width:
            return (
                f"the v channels start at {2 * key_heads * key}, which is no multiple of the "
                f"{width} that a step has: its block of v would straddle heads"
            )
        return None


def _size(state: tuple[int, ...], key_heads: int) -> int:
    """Elements of the states of one key head."""
    return state[1] // key_heads * state[2] * state[3]


def state_fusion(*arrays: Any, key_heads: int, switches: Switches) -> tuple[Array, Array]:
    """See `api.state_fusion`."""
    forward = functools.partial(_forward, key_heads=key_heads, switches=switches)
    return transformable(forward, key_heads=key_heads, switches=switches)(*arrays)


def state_fusion_unsupported(
    ring: Array, block_qkv: Array, taps: Array, right_taps: Array | None, state: Array, *_: Array,
    key_heads: int, switches: Switches,
) -> str | None:  # fmt: skip
    """Why this kernel cannot serve a call, or None."""
    key, value = state.shape[2:]
    if key % LANES or value % LANES:
        return (
            f"head dims are {key} and {value}: it takes multiples of {LANES}, since a head must be "
            "whole vector lanes of q | k | v"
        )
    tile = Tile.choose(state.shape, key_heads)
    if tile is None:
        return Tile(1).reason(state.shape, key_heads)
    need = _vmem_bytes(block_qkv, state.shape, key_heads, tile)
    if need > VMEM_BYTES:
        return f"a block of {block_qkv.shape[1]} needs {need} bytes of VMEM, over {VMEM_BYTES}"
    return None


def _vmem_bytes(block: Array, state: tuple[int, ...], key_heads: int, tile: Tile) -> int:
    """Of the double-buffered blocks, and of what stands beside them while one head is computed."""
    n, (_, value_heads, key, value) = block.shape[1], state
    channels = tile.heads * (2 * key + value_heads // key_heads * value)
    moved = 4 * tile.heads * _size(state, key_heads) + n * channels * (block.dtype.itemsize + 4)
    return 2 * moved + 4 * n * (2 * channels + 4 * max(n, LANES) + 3 * value)


def _forward(
    ring: Array, block_qkv: Array, taps: Array, right_taps: Array | None, state: Array, g: Array,
    beta: Array, logit_scale: Array, history_bias: Array, history_c: Array, valid: Array,
    empty: Array, *, key_heads: int, switches: Switches,
) -> tuple[Array, Array]:  # fmt: skip
    rows, n, _ = block_qkv.shape
    value_heads, key, value = state.shape[1:]
    tile = Tile.choose(state.shape, key_heads)
    assert tile is not None
    steps, served = key_heads // tile.heads, value_heads // key_heads * tile.heads
    k_width, v_width = tile.heads * key, served * value
    # The same array once per part: its block of the step's heads in q, k and v.
    first = {
        "q": (k_width, 0),
        "k": (k_width, steps),
        "v": (v_width, 2 * key_heads * key // v_width),
    }

    def by_row(x: Array) -> tuple[dict, dict]:
        spec = lambda width, at: pl.BlockSpec(
            (None, x.shape[1], width), lambda r, h: (r, 0, at + h)
        )
        return dict.fromkeys(first, x), {part: spec(*first[part]) for part in first}

    def taps_of(x: Array) -> tuple[dict, dict]:
        spec = lambda width, at: pl.BlockSpec((x.shape[0], width), lambda r, h: (0, at + h))
        return dict.fromkeys(first, x), {part: spec(*first[part]) for part in first}

    whole = lambda x: (x, pl.BlockSpec((None, *x.shape[1:]), lambda r, h: (r, 0, 0)))
    scalar = lambda x: (x, pl.BlockSpec(memory_space=pltpu.SMEM))
    operands = {
        "ring": by_row(ring),
        "block": by_row(block_qkv),
        "taps": taps_of(taps),
        "state": (state, pl.BlockSpec((None, served, key, value), lambda r, h: (r, h, 0, 0))),
        "valid": whole(valid.astype(jnp.float32)[:, None]),
        "logit_scale": scalar(xla.scale(logit_scale, switches)),
        "history_bias": scalar(history_bias),
        "history_c": scalar(history_c),
    }
    if right_taps is not None:
        operands["right_taps"] = taps_of(right_taps)
    if switches.block_bias == "decay":
        operands["g"] = whole(g)
    if switches.block_bias == "decay" or switches.block_value == "beta":
        operands["beta"] = whole(beta)
    if switches.empty_history == "drop":
        operands["empty"] = scalar(empty.astype(jnp.int32))

    floor = contract.floor(block_qkv, taps, right_taps, state, key_heads=key_heads)
    out, share = pl.pallas_call(
        functools.partial(_kernel, tile=tile, group=value_heads // key_heads, switches=switches),
        grid=(rows, steps),
        in_specs=[{name: spec for name, (_, spec) in operands.items()}],
        out_specs=(
            pl.BlockSpec((None, n, v_width), lambda r, h: (r, 0, h)),
            pl.BlockSpec((None, None, served, n), lambda r, h: (r, h, 0, 0)),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((rows, n, value_heads * value), jnp.float32),
            jax.ShapeDtypeStruct((rows, steps, served, n), jnp.float32),
        ),
        scratch_shapes=[
            pltpu.VMEM((n + 2 * (taps.shape[0] - 1), LANES), jnp.float32),
            {part: pltpu.VMEM((n, width), jnp.float32) for part, (width, _) in first.items()},
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=floor.flops,
            bytes_accessed=floor.bytes,
            transcendentals=rows * n * (block_qkv.shape[2] + value_heads * (n + 1)),
        ),
        name="state_fusion",
    )({name: x for name, (x, _) in operands.items()})
    return (
        out.reshape(rows, n, value_heads, value),
        jnp.moveaxis(share.reshape(rows, value_heads, n), 1, 2),
    )


def _kernel(
    refs: dict[str, Any], out: Any, share: Any, window: Any, mixed: dict[str, Any],
    *, tile: Tile, group: int, switches: Switches,
) -> None:  # fmt: skip
    """All heads of one grid step; arrays are read here, `math` computes.

    Loops over heads, not unrolled code, and the reads before the softmaxes: the scheduler overlaps
    what it can until it spills.
    """
    _, key, value = refs["state"].shape
    exists = refs["valid"][...]
    valid, column = exists > 0.0, math.as_column(exists) > 0.0
    for part, scratch in mixed.items():

        @pl.loop(0, scratch.shape[1] // LANES)
        def _(i: Array, part: str = part) -> None:
            at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
            mixed[part][:, at] = _mixed(refs, window, part, at, column, switches)

    strengths = {n: jnp.where(column, refs[n][...], 0.0) for n in ("g", "beta") if n in refs}
    empty = refs["empty"][pl.program_id(0)] > 0 if "empty" in refs else None

    @pl.loop(0, tile.heads)
    def _(a: Array) -> None:
        lanes = lambda i, width: pl.ds(pl.multiple_of(i * width, LANES), width)
        q, k = (math.unit(mixed[part][:, lanes(a, key)]) for part in ("q", "k"))
        qk = _dot(q, k, contract_last=True)
        scaled = q if switches.history_query == "unit" else q * key**-0.5

        @pl.loop(0, group)
        def _(b: Array) -> None:
            i = a * group + b
            halves = [
                _dot(
                    scaled[:, j : j + DEPTH], refs["state"][i, pl.ds(j, DEPTH)], contract_last=False
                )
                for j in range(0, key, DEPTH)
            ]
            out[:, lanes(i, value)] = functools.reduce(jnp.add, halves)

        @pl.loop(0, group)
        def _(b: Array) -> None:
            i = a * group + b
            head = pl.program_id(1) * (tile.heads * group) + i
            g, beta = (_lane(strengths[n], head) if n in strengths else None for n in ("g", "beta"))
            scalars = [refs[n][head] for n in ("logit_scale", "history_bias", "history_c")]
            read, v = out[:, lanes(i, value)], mixed["v"][:, lanes(i, value)]
            w, w_slot = math.block_weights(qk, read, g, beta, scalars, valid, empty, switches)
            if switches.block_value == "beta":
                v = v * beta
            kept = read if switches.operator == "added" else w_slot * read
            out[:, lanes(i, value)] = kept + _dot(w, v, contract_last=False)
            share[pl.ds(i, 1)] = math.as_row(w_slot)


def _mixed(
    refs: dict[str, Any], window: Any, part: str, at: Any, valid: Array, switches: Switches
) -> Array:
    """The channels `at` of q, k or v, after convolution and SiLU.

    They pass through `window`: a load at any position is one operation, while shifting a vector
    by positions is several.
    """
    load = lambda name: refs[name][part][:, at].astype(jnp.float32)
    rows = lambda x: [x[j : j + 1] for j in range(x.shape[0])]
    n, older = valid.shape[0], refs["ring"][part].shape[0]
    taps = rows(load("taps"))
    window[:older] = load("ring")
    window[older : older + n] = jnp.where(valid, load("block"), 0.0)
    if "right_taps" in refs:
        window[older + n :] = jnp.zeros((older, window.shape[1]), jnp.float32)
        right = rows(load("right_taps"))
        taps += right if switches.right_order == "next_first" else right[::-1]
    return math.conv_silu([window[j : j + n] for j in range(len(taps))], taps)


def _lane(x: Array, at: Array) -> Array:
    """Column `at` of x: a masked sum, as a dynamic lane cannot be addressed."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.sum(jnp.where(lane == at, x, 0.0), axis=1, keepdims=True)


def _dot(a: Array, b: Array, *, contract_last: bool) -> Array:
    """a b^T or a b in float32: HIGHEST, as the MXU would round its inputs to bfloat16."""
    return lax.dot_general(
        a, b, (((1,), (1 if contract_last else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip
