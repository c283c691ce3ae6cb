"""The operator of a GDN layer in a preview: convolution, block softmax, read of the clean state.

For positions t = 0 .. n-1 of a block and value head h, whose key head is h // group:

    c_t  = silu( sum_{j<K} in[t+j] taps[j] + sum_{d=1..K-1} block[t+d] right_taps[d-1] )
    q,k  = l2norm per head;  v as is
    l_ij = logit_scale[h] (q_i . k_j)                   every valid j, both directions
    l_ih = history_bias[h] + history_c[h] log(n_valid)  the history slot
    w    = softmax([l_ih, l_i0 .. l_i,n-1]);  o_i = w_h (S^T q_i) + sum_j w_j v_j

`in` is the ring followed by the block; nothing follows the block. S is the clean state of the
prefix, read and never written. What stands at a position that is not valid is nobody's input: its
channels, g and beta are read as 0, and it is no key. Everything is float32 inside; conv inputs and
taps may be bfloat16 and are converted first. The release
names the parts (right taps, softmax, history slot); `contract.Switches` lists the readings of what
it leaves open.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float, Float32

from pallas_kernels.registry import Impl, call
from pallas_kernels.state_fusion import contract, xla
from pallas_kernels.state_fusion.contract import Switches


def state_fusion(
    ring: Float[Array, "rows older channels"],
    block_qkv: Float[Array, "rows block channels"],
    taps: Float[Array, "taps channels"],
    right_taps: Float[Array, "older channels"] | None,
    state: Float32[Array, "rows value_heads key value"],
    g: Float32[Array, "rows block value_heads"],
    beta: Float32[Array, "rows block value_heads"],
    logit_scale: Float32[Array, " value_heads"],
    history_bias: Float32[Array, " value_heads"],
    history_c: Float32[Array, " value_heads"],
    valid: Bool[Array, "rows block"],
    empty: Bool[Array, " rows"],
    *,
    key_heads: int,
    switches: Switches,
    impl: Impl,
) -> tuple[
    Float32[Array, "rows block value_heads value"], Float32[Array, "rows block value_heads"]
]:
    """The block's outputs before the gated norm, and the share w_h of the history slot.

    Differentiable in every float argument.

    Args:
        ring: pre-conv channels q | k | v of the K-1 positions before the block.
        block_qkv: those of the block.
        taps: K taps of each channel; the last falls on the position itself.
        right_taps: K-1 taps over the positions ahead; None: there are none.
        state: S, the clean state.
        g: log decays of the block, read by `block_bias="decay"` alone.
        beta: write strengths, read by `block_bias="decay"` and `block_value="beta"` alone.
        logit_scale: factor of q . k.
        history_bias: of the slot's logit.
        history_c: factor of the slot's score.
        valid: positions that exist.
        empty: rows without a prefix, read by `empty_history="drop"` alone.
        key_heads: how many heads q and k have.
        switches: which formula.
        impl: `reference` goes row by row and head by head, `xla` is batched, `pallas_tpu` and
            `pallas_gpu` are one kernel each that reads the state once.

    Raises:
        ValueError: shapes, dtypes or switches outside the contract, or an implementation that
            cannot serve the call; the text says why.
    """
    contract.check(ring, block_qkv, taps, right_taps, state, key_heads=key_heads, switches=switches)
    arrays = (ring, block_qkv, taps, right_taps, state, g, beta)
    scalars = (logit_scale, history_bias, history_c, valid, empty)
    return call(
        __name__, "state_fusion", impl, *arrays, *scalars, key_heads=key_heads, switches=switches
    )


def block_conv(
    ring: Float[Array, "rows older channels"],
    block: Float[Array, "rows block channels"],
    taps: Float[Array, "taps channels"],
    right_taps: Float[Array, "older channels"] | None,
    *,
    right_order: Literal["next_first", "next_last"],
) -> Float32[Array, "rows block channels"]:
    """The operator's convolution alone, before SiLU, for rivals of the operator.

    Every position exists here: the caller zeroes those that do not.
    """
    return xla.block_conv(ring, block, taps, right_taps, right_order=right_order)
