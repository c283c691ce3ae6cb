"""Rows through the gated MLPs of the experts they chose."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul import contract
from pallas_kernels.registry import Impl, call


def expert_glu(
    x: Float[Array, "rows width"],
    expert: Int[Array, "rows k"],
    weight: Float[Array, "rows k"],
    valid: Bool[Array, " rows"],
    w_in: Float[Array, "experts width gate_up"],
    w_out: Float[Array, "experts hidden width"],
    *,
    tile: int,
    impl: Impl,
) -> Float[Array, "rows width"]:
    """sum over j of weight[r, j] · (silu(gate) · up) @ w_out[e], e = expert[r, j].

    (gate | up) = x[r] @ w_in[e]. The sum is float32 and runs in the order of the ids, which the
    router gives ascending. It reads the experts that some valid row chose and no other: a coreset
    needs no argument here, it changes what the rows chose. Differentiable in x, weight, w_in and
    w_out; the gradient of an expert that no valid row chose is exactly 0 (qwen36 section 3.5; case
    E1).

    Args:
        x: rows, of the experts' dtype.
        expert: each row's experts. An id outside [0, experts) is no expert of this call and adds
            nothing: a device that holds a part of the experts passes `expert - first`.
        weight: float32.
        valid: the other rows touch no expert and get 0.
        w_in: of the last axis the first half is the gate.
        w_out: down projections.
        tile: rows that one read of an expert serves. 1 runs every chosen expert by itself, without
            sorting: right for one row. Take it from what one row of the batch brings, never from
            the batch, so that a row's program does not depend on its neighbours. Kernels round it
            up to what their matmul unit takes.
        impl: implementation; `auto` chooses.

    Raises:
        ValueError: an argument that breaks `contract.check`, or an implementation that cannot
            serve the call.
    """
    contract.check(x, expert, weight, valid, w_in, w_out, tile)
    return call(__name__, "expert_glu", impl, x, expert, weight, valid, w_in, w_out, tile=tile)
