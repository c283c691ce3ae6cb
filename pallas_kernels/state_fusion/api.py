"""One softmax over a block's positions and a history slot read from the clean state.

    l_ij = logit_scale[h] (q_i . k_j) + bias[h, i, j]      every valid j, both directions
    w    = softmax([slot_i, l_i0 .. l_i,n-1])              one softmax, fp32
    o_i  = w_slot (S^T q_i)  +  sum_j w_j v_j              S is read, never written

Per value head h, which reads key head h // (value_heads / key_heads). All arrays float32. A slot
of -inf drops the history; a row without a valid position and with a slot of -inf gives 0.
"""

from jaxtyping import Array, Bool, Float

from pallas_kernels.registry import Impl, call


def state_fusion(
    q: Float[Array, "rows block key_heads key"],
    k: Float[Array, "rows block key_heads key"],
    v: Float[Array, "rows block value_heads value"],
    read: Float[Array, "rows block value_heads value"],
    slot: Float[Array, "rows block value_heads"],
    logit_scale: Float[Array, " value_heads"],
    bias: Float[Array, "rows value_heads block block"] | None,
    valid: Bool[Array, "rows block"],
    *,
    impl: Impl,
) -> tuple[Float[Array, "rows block value_heads value"], Float[Array, "rows block value_heads"]]:
    """The block's outputs and the share w_slot of the history slot.

    Args:
        q: l2-normalised queries.
        k: l2-normalised keys.
        v: block values.
        read: S^T q of every position, the value of the history slot.
        slot: logit of the history slot.
        logit_scale: factor of q . k.
        bias: added to the block's logits, or None.
        valid: positions that exist; the others are nobody's key.
        impl: `reference` goes row by row, `xla` is batched.

    Raises:
        ValueError: an implementation this op does not have.
    """
    return call(__name__, "state_fusion", impl, q, k, v, read, slot, logit_scale, bias, valid)
