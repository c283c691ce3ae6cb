"""Token-serial gated delta rule for Hopper (Mosaic GPU).

The tensor cores take no float32 operands, so the state is moved by the recurrence itself, in
registers: exact float32 on the plain units. One warpgroup owns 64 value channels of one head of
one row; it reads that part of the state once, goes over the tokens, and writes it once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.gated_delta import xla
from pallas_kernels.gated_delta.math import read_out, token_update
from pallas_kernels.gradient import with_gradient_of

VALUES = 64  # rows of a warpgroup's register tile
# How a warpgroup holds its [key, value] part of the state: a warp has 16 value channels, a thread
# two of them at every fourth key, so that sums over the keys are local but for two shuffles.
_STATE = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (8, 16), (8, 8), (4, 1))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
_KEY, _VALUE = _STATE.reduce(1), _STATE.reduce(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tokens fetched at once, while the ones before are computed."""

    tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= 32:
            raise ValueError(f"tokens is {self.tokens}: expected 1 to 32")

    @classmethod
    def choose(cls, time: int) -> "Tiles | None":
        """16, so that two blocks fit on a multiprocessor, or 8; else all of a call up to 32."""
        whole = next((t for t in (16, 8) if time % t == 0), time)
        return cls(tokens=whole) if whole <= 32 else None


def gated_delta(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    begins: Array | None, *, chunk: int,
) -> tuple[Array, Array]:  # fmt: skip
    """See `api.gated_delta`; the chunk length is the gradient's."""
    formula = functools.partial(xla.gated_delta, begins=begins, chunk=chunk)
    return with_gradient_of(formula, _run)(q, k, v, g, beta, state, length)


def commit_state(
    k: Array, v: Array, g: Array, beta: Array, state: Array, count: Array, *, chunk: int
) -> Array:
    """See `api.commit_state`; the chunk length is the gradient's."""
    formula = functools.partial(xla.commit_state, chunk=chunk)
    run = lambda *args: _run(None, *args)[1]
    return with_gradient_of(formula, run)(k, v, g, beta, state, count)


def gated_delta_unsupported(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, length: Any,
    begins: Any = None,
    *, chunk: int,
) -> str | None:  # fmt: skip
    """Why this call cannot be served, or None."""
    if begins is not None:
        return "begins is given: this kernel does not start samples inside a row; 'xla' does"
    return commit_state_unsupported(k, v, g, beta, state, length, chunk=chunk)


def commit_state_unsupported(
    k: Any, v: Any, g: Any, beta: Any, state: Any, count: Any, *, chunk: int
) -> str | None:
    """Why this call cannot be served, or None."""
    del chunk
    time, (key, value) = k.shape[1], state.shape[2:]
    if key != 128 or value % VALUES:
        return (
            f"heads have {key} key and {value} value channels: a warpgroup holds 128 x {VALUES} of "
            f"the state in registers, so they must be 128 and a multiple of {VALUES}"
        )
    if Tiles.choose(time) is None:
        return f"time is {time}: above 32 positions it must be a multiple of 8"
    return None


def _run(
    q: Array | None, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None
) -> tuple[Array | None, Array]:
    """Read-outs, given queries, and the last state."""
    rows, time, key_heads, key = k.shape
    heads, value = v.shape[2:]
    group = heads // key_heads
    tiles = Tiles.choose(time)
    assert tiles is not None
    tokens = tiles.tokens
    if length is None:
        length = jnp.full((rows,), time, jnp.int32)
    # Few bytes: decay and strength of a head's tokens side by side.
    gates = jnp.stack([jnp.exp(g), beta], axis=-1)
    gates = jnp.moveaxis(gates, 1, 2)  # [rows, heads, time, 2]

    def kernel(*operands: Any) -> None:
        refs = list(operands)
        q_ref = refs.pop(0) if q is not None else None
        k_ref, v_ref, gate_ref, start_ref, length_ref = refs[:5]
        out_ref = refs[5] if q is not None else None
        state_ref, state_tile, out_tile, barrier = refs[-4:]
        r, h, part = (lax.axis_index(name) for name in ("rows", "heads", "parts"))
        channels, valid = pl.ds(part * VALUES, VALUES), length_ref[r]

        def write(step: Any) -> None:
            assert out_ref is not None
            plgpu.commit_smem()
            place = out_ref.at[r, pl.ds(step * tokens, tokens), h, channels]
            plgpu.copy_smem_to_gmem(out_tile.at[step % 2], place)

        def tile(index: Any, *refs: Any) -> Array:
            *q_tile, k_tile, v_tile, s = refs
            (step,) = index
            count = jnp.minimum(valid - step * tokens, tokens)
            if q_tile:  # the tile before the last has left its buffer
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)

            def token(t: Any, s: Array) -> Array:
                row = lambda ref, layout: plgpu.load(ref.at[t], layout=layout, optimized=False)
                at = (r, h, step * tokens + t)
                k, v = row(k_tile, _KEY), row(v_tile, _VALUE)
                s = token_update(k, v, gate_ref[*at, 0], gate_ref[*at, 1], s)
                if q_tile:
                    out_tile[step % 2, t] = read_out(row(q_tile[0], _KEY), s)
                return s

            s = lax.fori_loop(0, count, token, s)
            if q_tile:
                _zero(out_tile.at[step % 2], count, tokens)
                write(step)
            else:  # all threads have read their tokens before the next ones land on them
                plgpu.commit_smem()
            return s

        plgpu.copy_gmem_to_smem(start_ref.at[r, h, :, channels], state_tile, barrier)
        plgpu.barrier_wait(barrier)
        keys = plgpu.BlockSpec((tokens, key), lambda i: (i, 0))
        values = plgpu.BlockSpec((tokens, VALUES), lambda i: (i, part))
        key_refs = [x.at[r, :, h // group] for x in (q_ref, k_ref) if x is not None]
        steps = pl.cdiv(valid, tokens)
        s = plgpu.emit_pipeline(
            tile,
            grid=(steps,),
            in_specs=[keys] * len(key_refs) + [values],
            max_concurrent_steps=2,
            init_carry=plgpu.load(state_tile, layout=_STATE, optimized=False),
        )(*key_refs, v_ref.at[r, :, h])

        if out_ref is not None:  # tiles past the length: nothing is read

            @pl.loop(steps, time // tokens)
            def _(step: Any) -> None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                _zero(out_tile.at[step % 2], 0, tokens)
                write(step)

        state_tile[...] = s
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state_tile, state_ref.at[r, h, :, channels])
        plgpu.wait_smem_to_gmem(0)

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    outputs = ([] if q is None else [f32(rows, time, heads, value)]) + [f32(*state.shape)]
    results = plgpu.kernel(
        kernel,
        out_type=outputs,
        scratch_types=[
            plgpu.SMEM((key, VALUES), jnp.float32),
            plgpu.SMEM((2, tokens, VALUES), jnp.float32),
            plgpu.Barrier(),
        ],
        grid=(rows, heads, value // VALUES),
        grid_names=("rows", "heads", "parts"),
        kernel_name="gated_delta" if q is not None else "gated_delta_commit",
    )(*([] if q is None else [q]), k, v, gates, state, length)
    return (results[0] if q is not None else None), results[-1]


def _zero(tile: Any, start: Any, stop: Any) -> None:
    @pl.loop(start, stop)
    def _(t: Any) -> None:
        tile[t] = plgpu.layout_cast(jnp.zeros((VALUES,), jnp.float32), _VALUE)
