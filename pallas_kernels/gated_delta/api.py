"""Gated delta rule: S <- e^g S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.

Per value head h, which reads key head h // (value_heads / key_heads). All arrays float32, g <= 0.
A position with g = beta = 0 leaves the state as it is, bit for bit: that is how padding is made.
The caller owns the scale of q. Qwen3.6 / Gated DeltaNet (arXiv 2412.06464).
"""

from jaxtyping import Array, Float

from pallas_kernels.gated_delta import xla
from pallas_kernels.gated_delta.xla import DeltaTrace, boundary_state
from pallas_kernels.registry import Impl, call

__all__ = ["DeltaTrace", "boundary_state", "gated_delta", "gated_delta_trace"]


def gated_delta(
    q: Float[Array, "rows time key_heads key"],
    k: Float[Array, "rows time key_heads key"],
    v: Float[Array, "rows time value_heads value"],
    g: Float[Array, "rows time value_heads"],
    beta: Float[Array, "rows time value_heads"],
    state: Float[Array, "rows value_heads key value"],
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
        chunk: chunk length of the chunked form; every value gives the same function.
        impl: `reference` is token-serial, `xla` chunked.

    Raises:
        ValueError: an implementation this op does not have.
    """
    return call(__name__, "gated_delta", impl, q, k, v, g, beta, state, chunk=chunk)


def gated_delta_trace(
    q: Float[Array, "rows time key_heads key"],
    k: Float[Array, "rows time key_heads key"],
    v: Float[Array, "rows time value_heads value"],
    g: Float[Array, "rows time value_heads"],
    beta: Float[Array, "rows time value_heads"],
    state: Float[Array, "rows value_heads key value"],
    *,
    chunk: int,
) -> tuple[Float[Array, "rows time value_heads value"], DeltaTrace]:
    """As `gated_delta`, but returns what the state after any position is built from."""
    return xla.gated_delta_trace(q, k, v, g, beta, state, chunk=chunk)
