"""Chunked gated delta rule for TPUs (Mosaic).

Grid (row, key heads, chunk), chunks in order. A step holds a chunk of a few key heads and of the
value heads that read them; their states stay in VMEM from the first chunk to the last, so they are
read and written once. Chunks past a row's length are neither fetched nor computed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.gated_delta import xla
from pallas_kernels.gated_delta.math import (
    as_column,
    chunked_flops,
    decay_between,
    decay_from_start,
    decay_to_end,
    dot,
    inverse_unit_lower,
    numbers,
    strict_lower,
)
from pallas_kernels.gradient import with_gradient_of

LANES, SUBLANES = 128, 8
VMEM = 15 << 20  # bytes that the blocks of two grid steps may take, of the default 16 MiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """What a grid step holds.

    Attributes:
        chunk: positions; they are the rows of every matrix.
        key_heads: key heads, with the value heads that read them. In memory the heads of a
            position are neighbours, the sublanes of a tile: so 8 of them, or all.
    """

    chunk: int
    key_heads: int

    def __post_init__(self) -> None:
        if self.chunk % SUBLANES or not SUBLANES <= self.chunk <= LANES:
            raise ValueError(
                f"chunk is {self.chunk}: expected a multiple of {SUBLANES} up to {LANES}"
            )

    @classmethod
    def choose(cls, k: Any, chunk: int) -> "Tiles":
        """For these keys: the caller's chunk, or all of a shorter call; as few heads as tile."""
        time, heads = k.shape[1:3]
        return cls(
            chunk=min(chunk, -(-time // SUBLANES) * SUBLANES),
            key_heads=heads if heads % SUBLANES else SUBLANES,
        )


def gated_delta(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    begins: Array | None, *, chunk: int,
) -> tuple[Array, Array]:  # fmt: skip
    """See `api.gated_delta`."""
    run = functools.partial(_run, tiles=Tiles.choose(k, chunk), trace=False)
    formula = functools.partial(xla.gated_delta, begins=begins, chunk=chunk)
    return with_gradient_of(formula, run)(q, k, v, g, beta, state, length)


def gated_delta_trace(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    begins: Array | None, *, chunk: int,
) -> tuple[Array, Array, tuple[Array, ...]]:  # fmt: skip
    """See `api.gated_delta_trace`."""
    tiles = Tiles.choose(k, chunk)

    def run(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Any) -> Any:
        out, state, before, v_new = _run(q, k, v, g, beta, state, length, tiles=tiles, trace=True)
        k, g = xla.silence(length, k, g)
        split = functools.partial(xla.split_time, chunk=tiles.chunk)
        return out, state, (before, split(k), v_new, split(g))

    def formula(*args: Any) -> Any:  # chunks as the kernel cuts them: they are in the result
        padded = [xla.split_time(x, tiles.chunk) for x in args[:5]]
        padded = [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in padded]
        out, *rest = xla.gated_delta_trace(*padded, *args[5:], begins, chunk=tiles.chunk)
        return out[:, : args[0].shape[1]], *rest

    return with_gradient_of(formula, run)(q, k, v, g, beta, state, length)


def commit_state(
    k: Array, v: Array, g: Array, beta: Array, state: Array, count: Array, *, chunk: int
) -> Array:
    """See `api.commit_state`."""
    run = functools.partial(_run, None, tiles=Tiles.choose(k, chunk), trace=False)
    formula = functools.partial(xla.commit_state, chunk=chunk)
    return with_gradient_of(formula, lambda *args: run(*args)[0])(k, v, g, beta, state, count)


def gated_delta_unsupported(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, length: Any,
    begins: Any = None,
    *, chunk: int,
) -> str | None:  # fmt: skip
    """Why this call cannot be served, or None."""
    if begins is not None:
        return "begins is given: this kernel does not start samples inside a row; 'xla' does"
    return commit_state_unsupported(k, v, g, beta, state, length, chunk=chunk)


gated_delta_trace_unsupported = gated_delta_unsupported


def commit_state_unsupported(
    k: Any, v: Any, g: Any, beta: Any, state: Any, count: Any, *, chunk: int
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
    tiles = Tiles.choose(k, chunk)
    heads = tiles.key_heads * (v.shape[2] // k.shape[2])
    tokens = tiles.chunk * (2 * tiles.key_heads * key + 3 * heads * value)
    if (need := 2 * 4 * (tokens + 3 * heads * key * value)) > VMEM:
        return (
            f"a grid step of {tiles.key_heads} key and {heads} value heads and {tiles.chunk} "
            f"positions takes {need} bytes of vector memory: at most {VMEM}; a shorter chunk fits"
        )
    return None


def _run(
    q: Array | None, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    *, tiles: Tiles, trace: bool,
) -> tuple[Array, ...]:  # fmt: skip
    """(read-outs if there are queries), last state, (states before chunks, V' if `trace`)."""
    rows, time, key_heads, key = k.shape
    heads, value = v.shape[2:]
    group, chunk = heads // key_heads, tiles.chunk
    chunks, own_heads = -(-time // chunk), tiles.key_heads * group
    if length is None:
        length = jnp.full((rows,), time, jnp.int32)
    # Few bytes: laid out so that the gates of one head and chunk are a row.
    gates = jnp.stack([xla.split_time(x, chunk) for x in xla.silence(length, g, beta)], axis=2)
    gates = jnp.swapaxes(gates, 3, 4)  # [rows, chunks, 2, heads, chunk]

    # A block that stands where the last one stood is not fetched again.
    last = lambda c, length, r: jnp.minimum(c, jnp.maximum(pl.cdiv(length[r], chunk) - 1, 0))
    tokens = lambda heads, width: pl.BlockSpec(
        (None, chunk, heads, width), lambda r, h, c, length: (r, last(c, length, r), h, 0)
    )
    written = pl.BlockSpec((None, chunk, own_heads, value), lambda r, h, c, _: (r, c, h, 0))
    states = pl.BlockSpec((None, own_heads, key, value), lambda r, h, c, _: (r, h, 0, 0))
    before = pl.BlockSpec((None, None, own_heads, key, value), lambda r, h, c, _: (r, c, h, 0, 0))
    gate_spec = pl.BlockSpec(
        (None, None, 2, own_heads, chunk),
        lambda r, h, c, length: (r, last(c, length, r), 0, h, 0),
    )
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    keys = tokens(tiles.key_heads, key)
    inputs = [(k, keys), (v, tokens(own_heads, value)), (gates, gate_spec), (state, states)]
    outputs = [(f32(*state.shape), states)]
    if q is not None:
        inputs.insert(0, (q, keys))
        outputs.insert(0, (f32(rows, time, heads, value), written))
    if trace:
        outputs.append((f32(rows, chunks, heads, key, value), before))
        outputs.append((f32(rows, chunks * chunk, heads, value), written))
    reads = 1 if q is None else 2
    results = pl.pallas_call(
        functools.partial(_kernel, queries=q is not None, trace=trace),
        out_shape=[shape for shape, _ in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, key_heads // tiles.key_heads, chunks),
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=_Scratch.shapes(chunk, key, value, group, reads),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=chunked_flops(rows, time, heads, group, key, value, chunk=chunk, reads=reads),
            bytes_accessed=sum(4 * x.size for x, _ in (*inputs, *outputs)),
            transcendentals=rows * heads * chunks * (chunk + 3) * chunk,
        ),
        name="gated_delta_commit" if q is None else "gated_delta",
    )(length, *(x for x, _ in inputs))
    *rest, last_one = results
    return *rest, xla.split_time(last_one, chunk) if trace else last_one


class _Scratch(NamedTuple):
    """VMEM of a grid step: what lives across its loops, as registers would spill."""

    numbers: Any  # [2, chunk, chunk]
    valid: Any  # [chunk, 1]: 1 before the length
    kq: Any  # [reads, chunk, key]: keys of a key head, and its queries
    alike: Any  # [reads, chunk, chunk]: kq k^T
    read: Any  # [group, reads, chunk, value]: kq S
    goal: Any  # [group, chunk, value]: beta (v - e^c (k S)), then V'
    a: Any  # [group, chunk, chunk]
    decay: Any  # [group, chunk, chunk]: D
    k_end: Any  # [group, chunk, key]: e^{c_C - c} k

    @classmethod
    def shapes(cls, chunk: int, key: int, value: int, group: int, reads: int) -> "_Scratch":
        vmem = lambda *shape: pltpu.VMEM(shape, jnp.float32)
        return cls(
            numbers=pltpu.VMEM((2, chunk, chunk), jnp.int32),
            valid=vmem(chunk, 1),
            kq=vmem(reads, chunk, key),
            alike=vmem(reads, chunk, chunk),
            read=vmem(group, reads, chunk, value),
            goal=vmem(group, chunk, value),
            a=vmem(group, chunk, chunk),
            decay=vmem(group, chunk, chunk),
            k_end=vmem(group, chunk, key),
        )


def _kernel(length_ref: Any, *operands: Any, queries: bool, trace: bool) -> None:
    """One chunk of one row and some key heads; refs in the order of `_run`."""
    fields = len(_Scratch._fields)
    refs, scratch = list(operands[:-fields]), _Scratch(*operands[-fields:])
    q_ref = refs.pop(0) if queries else None  # [chunk, key_heads, key]
    k_ref, v_ref, gate_ref, start_ref = refs[:4]  # ..., [chunk, heads, value], [2, heads, chunk]
    refs = refs[4:]
    out_ref = refs.pop(0) if queries else None  # [chunk, heads, value]
    state_ref = refs.pop(0)  # [heads, key, value]; the same block for all chunks
    before_ref, new_ref = refs if trace else (None, None)
    chunk = k_ref.shape[0]
    c = pl.program_id(2)
    left = length_ref[pl.program_id(0)] - c * chunk

    @pl.when(c == 0)
    def _() -> None:
        state_ref[...] = start_ref[...]
        scratch.numbers[...] = numbers(chunk)

    if before_ref is not None:
        before_ref[...] = state_ref[...]

    @pl.when(left > 0)
    def _() -> None:
        _chunk(q_ref, k_ref, v_ref, gate_ref, out_ref, state_ref, new_ref, scratch, left)

    @pl.when(left <= 0)
    def _() -> None:
        for ref in (out_ref, new_ref):
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)


def _chunk(
    q_ref: Any, k_ref: Any, v_ref: Any, gate_ref: Any, out_ref: Any, state_ref: Any, new_ref: Any,
    scratch: _Scratch, left: Any,
) -> None:  # fmt: skip
    """The heads of a step one after the other, in loops short enough to stay in registers."""
    key_heads, at, kq, alike = k_ref.shape[1], scratch.numbers, scratch.kq, scratch.alike
    group = v_ref.shape[1] // key_heads

    def keep(ref: Any, head: Any) -> Array:
        # Past the length may stand anything, and past the array's end anything does.
        return jnp.where(scratch.valid[...] > 0, ref[:, head], 0.0)

    scratch.valid[...] = (at[0, :, :1] < left).astype(jnp.float32)

    @pl.loop(0, key_heads)
    def _(key_head: Any) -> None:
        kq[0] = keep(k_ref, key_head)
        if q_ref is not None:
            kq[1] = keep(q_ref, key_head)

        @pl.loop(0, kq.shape[0])
        def _(which: Any) -> None:
            alike[which] = dot(kq[which], kq[0], contract=(1, 1))

        g_of = lambda head: gate_ref[0, pl.ds(head, 1)]
        beta_of = lambda head: gate_ref[1, pl.ds(head, 1)]

        @pl.loop(0, group)
        def _(member: Any) -> None:
            @pl.loop(0, kq.shape[0])
            def _(which: Any) -> None:
                scratch.read[member, which] = dot(kq[which], state_ref[key_head * group + member])

        @pl.loop(0, group)
        def _(member: Any) -> None:
            head = key_head * group + member
            read = scratch.read.at[member]
            error = keep(v_ref, head) - decay_from_start(g_of(head), at) * read[0]
            scratch.goal[member] = as_column(beta_of(head), at) * error
            scratch.k_end[member] = decay_to_end(g_of(head), at) * kq[0]
            if out_ref is not None:
                out_ref[:, head] = decay_from_start(g_of(head), at) * read[1]

        @pl.loop(0, group)
        def _(member: Any) -> None:
            scratch.decay[member] = decay_between(g_of(key_head * group + member), at)

        @pl.loop(0, group)
        def _(member: Any) -> None:
            beta = as_column(beta_of(key_head * group + member), at)
            a = beta * alike[0] * scratch.decay[member]
            scratch.a[member] = strict_lower(a, at)

        @pl.loop(0, group)
        def _(member: Any) -> None:
            head = key_head * group + member
            v_new, inverse = scratch.goal, inverse_unit_lower(scratch.a.at[member], at)
            v_new[member] = dot(inverse, scratch.goal[member])
            if out_ref is not None:
                scores = alike[1] * scratch.decay[member]
                out_ref[:, head] += dot(scores, v_new[member])
            if new_ref is not None:
                new_ref[:, head] = v_new[member]
            whole = jnp.exp(jnp.sum(g_of(head), axis=1, keepdims=True))
            written = dot(scratch.k_end[member], v_new[member], contract=(0, 0))
            state_ref[head] = whole * state_ref[head] + written
