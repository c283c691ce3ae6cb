"""Chunked gated delta rule for TPUs (Mosaic).

Grid (row, key head, chunk), chunks in order. A step holds a chunk of one key head and of the value
heads that read it; their states stay in VMEM from the first chunk to the last, so they are read
and written once. Chunks past a row's length are neither fetched nor computed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.gated_delta import xla
from pallas_kernels.gated_delta.math import chunk_update, chunked_flops, dot, with_gradient_of

LANES, SUBLANES = 128, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Positions per grid step: the caller's chunk, or all of a shorter call in whole sublanes."""

    chunk: int

    def __post_init__(self) -> None:
        if self.chunk % SUBLANES or not SUBLANES <= self.chunk <= LANES:
            raise ValueError(
                f"chunk is {self.chunk}: expected a multiple of {SUBLANES} up to {LANES}"
            )

    @classmethod
    def choose(cls, time: int, chunk: int) -> "Tiles":
        """Shorter chunks waste the matrix unit, longer ones the inverse (chunk^2 a position)."""
        return cls(chunk=min(chunk, -(-time // SUBLANES) * SUBLANES))


def gated_delta(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    *, chunk: int,
) -> tuple[Array, Array]:  # fmt: skip
    """See `api.gated_delta`."""
    run = functools.partial(_run, tiles=Tiles.choose(k.shape[1], chunk), trace=False)
    formula = functools.partial(xla.gated_delta, chunk=chunk)
    return with_gradient_of(formula, run)(q, k, v, g, beta, state, length)


def gated_delta_trace(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    *, chunk: int,
) -> tuple[Array, Array, tuple[Array, ...]]:  # fmt: skip
    """See `api.gated_delta_trace`."""
    tiles = Tiles.choose(k.shape[1], chunk)

    def run(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Any) -> Any:
        out, state, before, v_new = _run(q, k, v, g, beta, state, length, tiles=tiles, trace=True)
        k, g = xla.silence(length, k, g)
        split = functools.partial(xla.split_time, chunk=tiles.chunk)
        return out, state, (before, split(k), v_new, split(g))

    def formula(*args: Array) -> Any:  # chunks as the kernel cuts them: they are in the result
        padded = [xla.split_time(x, tiles.chunk) for x in args[:5]]
        padded = [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in padded]
        out, *rest = xla.gated_delta_trace(*padded, *args[5:], chunk=tiles.chunk)  # pyright: ignore
        return out[:, : args[0].shape[1]], *rest

    return with_gradient_of(formula, run)(q, k, v, g, beta, state, length)


def commit_state(
    k: Array, v: Array, g: Array, beta: Array, state: Array, count: Array, *, chunk: int
) -> Array:
    """See `api.commit_state`."""
    run = functools.partial(_run, None, tiles=Tiles.choose(k.shape[1], chunk), trace=False)
    formula = functools.partial(xla.commit_state, chunk=chunk)
    return with_gradient_of(formula, lambda *args: run(*args)[0])(k, v, g, beta, state, count)


def gated_delta_unsupported(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    *, chunk: int,
) -> str | None:  # fmt: skip
    """Why this call cannot be served, or None."""
    return commit_state_unsupported(k, v, g, beta, state, length, chunk=chunk)


gated_delta_trace_unsupported = gated_delta_unsupported


def commit_state_unsupported(
    k: Array, v: Array, g: Array, beta: Array, state: Array, count: Array | None, *, chunk: int
) -> str | None:
    """Why this call cannot be served, or None."""
    key, value = state.shape[2:]
    if key % LANES or value % LANES:
        return (
            f"heads have {key} key and {value} value channels: a block is cut out of the heads of "
            f"a position, so both must be multiples of {LANES}"
        )
    if chunk % SUBLANES or chunk > LANES:
        return f"chunk is {chunk}: it must be a multiple of {SUBLANES}, at most {LANES}"
    return None


def _run(
    q: Array | None, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    *, tiles: Tiles, trace: bool,
) -> list[Array]:  # fmt: skip
    """[read-outs if there are queries], last state, [states before chunks, V' if `trace`]."""
    rows, time, key_heads, key = k.shape
    heads, value = v.shape[2:]
    group, chunk = heads // key_heads, tiles.chunk
    chunks = -(-time // chunk)
    if length is None:
        length = jnp.full((rows,), time, jnp.int32)

    # Few bytes: laid out so that a step gets the gates of its heads as rows.
    gates = jnp.stack([xla.split_time(x, chunk) for x in xla.silence(length, g, beta)], axis=2)
    gates = gates.reshape(rows, chunks, 2, chunk, key_heads, group)
    gates = gates.transpose(0, 4, 1, 5, 2, 3)  # [rows, key_heads, chunks, group, 2, chunk]
    flat = lambda x: x.reshape(rows, time, -1)  # heads are neighbours in a position's channels

    # A block that stands where the last one stood is not fetched again.
    last = lambda c, length, r: jnp.minimum(c, jnp.maximum(pl.cdiv(length[r], chunk) - 1, 0))
    tokens = lambda width: pl.BlockSpec(
        (None, chunk, width), lambda r, h, c, length: (r, last(c, length, r), h)
    )
    written = lambda width: pl.BlockSpec((None, chunk, width), lambda r, h, c, _: (r, c, h))
    one_state = pl.BlockSpec((None, group, key, value), lambda r, h, c, _: (r, h, 0, 0))
    gate_spec = pl.BlockSpec(
        (None, None, None, group, 2, chunk),
        lambda r, h, c, length: (r, h, last(c, length, r), 0, 0, 0),
    )
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    inputs = [*([] if q is None else [(flat(q), tokens(key))]), (flat(k), tokens(key)),
              (flat(v), tokens(group * value)), (gates, gate_spec), (state, one_state)]  # fmt: skip
    outputs = [*([] if q is None else [(f32(rows, time, heads * value), written(group * value))]),
               (f32(*state.shape), one_state)]  # fmt: skip
    if trace:
        before = pl.BlockSpec((None, None, group, key, value), lambda r, h, c, _: (r, c, h, 0, 0))
        outputs += [(f32(rows, chunks, heads, key, value), before),
                    (f32(rows, chunks * chunk, heads * value), written(group * value))]  # fmt: skip
    flops = chunked_flops(
        rows, time, heads, group, key, value, chunk=chunk, reads=1 if q is None else 2
    )
    results = list(pl.pallas_call(
        functools.partial(_kernel, queries=q is not None, trace=trace),
        out_shape=[shape for shape, _ in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, key_heads, chunks),
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            bytes_accessed=sum(4 * x.size for x, _ in (*inputs, *outputs)),
            transcendentals=rows * heads * chunks * (chunk + 3) * chunk,
        ),
        name="gated_delta_commit" if q is None else "gated_delta",
    )(length, *(x for x, _ in inputs)))
    per_head = lambda x: x.reshape(*x.shape[:-1], heads, value)
    if q is not None:
        results[0] = per_head(results[0])
    if trace:
        results[-1] = per_head(results[-1]).reshape(rows, chunks, chunk, heads, value)
    return results


def _kernel(length_ref: Any, *refs: Any, queries: bool, trace: bool) -> None:
    """One chunk of one row and key head; refs in the order of `_run`."""
    refs = list(refs)
    q_ref = refs.pop(0) if queries else None  # [chunk, key]
    k_ref, v_ref, gate_ref, start_ref = refs[:4]  # [chunk, key], [chunk, group * value], ...
    refs = refs[4:]
    out_ref = refs.pop(0) if queries else None  # [chunk, group * value]
    state_ref = refs.pop(0)  # [group, key, value]; the same block for all chunks
    before_ref, new_ref = refs if trace else (None, None)
    chunk, value = k_ref.shape[0], state_ref.shape[2]
    c = pl.program_id(2)
    left = length_ref[pl.program_id(0)] - c * chunk

    @pl.when(c == 0)
    def _() -> None:
        state_ref[...] = start_ref[...]

    if before_ref is not None:
        before_ref[...] = state_ref[...]

    @pl.when(left > 0)
    def _() -> None:
        # Past the length may stand anything, and past the array's end anything does.
        valid = lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) < left
        keep = lambda ref: jnp.where(valid, ref[...], 0.0)
        k, v = keep(k_ref), keep(v_ref)
        kq = k if q_ref is None else jnp.concatenate([k, keep(q_ref)])
        alike = dot(kq, k, contract=(1, 1))
        for head in range(state_ref.shape[0]):
            channels = slice(head * value, (head + 1) * value)
            g, beta = gate_ref[head, :1], gate_ref[head, 1:]
            out, v_new, state = chunk_update(kq, alike, v[:, channels], g, beta, state_ref[head])
            state_ref[head] = state
            if out_ref is not None:
                out_ref[:, channels] = out
            if new_ref is not None:
                new_ref[:, channels] = v_new

    @pl.when(left <= 0)
    def _() -> None:
        for ref in (out_ref, new_ref):
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)
