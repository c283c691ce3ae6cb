"""Gated delta rule: S <- e^g S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.

Per value head h, which reads key head h // (value_heads / key_heads). All arrays float32, g <= 0.
A position with g = beta = 0 leaves the state as it is, bit for bit: that is how a caller pads.
Positions at or past a row's `length` are pads whatever they hold; kernels skip whole chunks of
them. Where `begins`, S is emptied first: samples packed in one row do not see each other. The
caller owns the scale of q. Qwen3.6 / Gated DeltaNet (arXiv 2412.06464).
"""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gated_delta import xla
from pallas_kernels.gated_delta.contract import DeltaTrace, check
from pallas_kernels.registry import Impl, call

__all__ = ["DeltaTrace", "boundary_state", "commit_state", "gated_delta", "gated_delta_trace"]


def gated_delta(
    q: Float[Array, "rows time key_heads key"],
    k: Float[Array, "rows time key_heads key"],
    v: Float[Array, "rows time value_heads value"],
    g: Float[Array, "rows time value_heads"],
    beta: Float[Array, "rows time value_heads"],
    state: Float[Array, "rows value_heads key value"],
    length: Int[Array, " rows"] | None = None,
    begins: Bool[Array, "rows time"] | None = None,
    *,
    chunk: int,
    impl: Impl,
) -> tuple[Float[Array, "rows time value_heads value"], Float[Array, "rows value_heads key value"]]:
    """Read-outs of every position and the state after the last one.

    Args:
        q: l2-normalised and scaled queries.
        k: l2-normalised keys.
        v: values.
        g: log decay, <= 0.
        beta: write strength in [0, 1].
        state: state before the first position.
        length: positions of each row that exist, 0 <= length <= time; None: all of them. The
            read-outs of the others are 0.
        begins: where a sample begins: it starts from an empty state, nothing before it is kept,
            `state` included. None: nowhere, and no such thing is compiled.
        chunk: chunk length of the chunked form; every value gives the same function.
        impl: `reference` is token-serial, `xla` and `pallas_tpu` chunked, `pallas_gpu`
            token-serial in registers, for short calls.

    Raises:
        ValueError: an array that is not as described, or an implementation that cannot serve the
            call.
    """
    check(chunk, length, q=q, k=k, v=v, g=g, beta=beta, state=state)
    return call(__name__, "gated_delta", impl, q, k, v, g, beta, state, length, begins, chunk=chunk)


def gated_delta_trace(
    q: Float[Array, "rows time key_heads key"],
    k: Float[Array, "rows time key_heads key"],
    v: Float[Array, "rows time value_heads value"],
    g: Float[Array, "rows time value_heads"],
    beta: Float[Array, "rows time value_heads"],
    state: Float[Array, "rows value_heads key value"],
    length: Int[Array, " rows"] | None = None,
    begins: Bool[Array, "rows time"] | None = None,
    *,
    chunk: int,
    impl: Impl,
) -> tuple[
    Float[Array, "rows time value_heads value"],
    Float[Array, "rows value_heads key value"],
    DeltaTrace,
]:
    """As `gated_delta`, and what the state after any position is built from (`boundary_state`)."""
    check(chunk, length, q=q, k=k, v=v, g=g, beta=beta, state=state)
    out, state, trace = call(
        __name__, "gated_delta_trace", impl, q, k, v, g, beta, state, length, begins, chunk=chunk
    )
    return out, state, DeltaTrace(*trace)


def boundary_state(
    trace: DeltaTrace, count: Int[Array, " rows"]
) -> Float[Array, "rows value_heads key value"]:
    """The state after the first `count` positions of each row, 0 <= count <= its length.

    That of the sample of the last of them: a sample that begins right after them starts empty.

    S_t = e^{c_t} S_0 + sum_{s<=t} e^{c_t - c_s} k_s V'_s^T, from the chunk that holds t.
    """
    return xla.boundary_state(trace, count)


def commit_state(
    k: Float[Array, "rows time key_heads key"],
    v: Float[Array, "rows time value_heads value"],
    g: Float[Array, "rows time value_heads"],
    beta: Float[Array, "rows time value_heads"],
    state: Float[Array, "rows value_heads key value"],
    count: Int[Array, " rows"],
    *,
    chunk: int,
    impl: Impl,
) -> Float[Array, "rows value_heads key value"]:
    """The state after the first `count` positions of each row, without queries and read-outs.

    For a block of which only a part is accepted: from its stored k, v, g and beta the state moves
    to any accepted length, and the layer is not computed again.

    Args:
        k: l2-normalised keys.
        v: values.
        g: log decay, <= 0.
        beta: write strength in [0, 1].
        state: state before the first position.
        count: accepted positions, 0 <= count <= time; what the others hold cannot matter.
        chunk: chunk length of the chunked form; every value gives the same function.
        impl: as in `gated_delta`.

    Raises:
        ValueError: as `gated_delta`.
    """
    check(chunk, count, k=k, v=v, g=g, beta=beta, state=state)
    return call(__name__, "commit_state", impl, k, v, g, beta, state, count, chunk=chunk)
