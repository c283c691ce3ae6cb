"""BD-GDN: the operator of the GDN layers in a preview (clover.md A, B; DESIGN 4).

For rows t = 0 .. n-1 of a block, per value head h (key head h // group):

    c_t  = silu( sum_{j<K} in[t+j] taps[j] + sum_{d=1..K-1} block[t+d] right[d-1] )
    q,k  = l2norm per head;  v as is
    l_ij = logit_scale[h] (q_i . k_j)                    every valid j, both directions
    l_ih = history_bias[h] + history_c[h] log(n_valid)   the history slot
    w    = softmax([l_ih, l_i0 .. l_i,n-1]);  o_i = w_h (S^T q_i) + sum_j w_j v_j
    out  = out_proj(gated_rmsnorm(o, z))

`in` is the prefix's ring followed by the block; S is the clean state. Both are read, never written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from clover_jax.config import BDGDNConfig, ModelConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.deltanet import (
    CleanStream,
    GDNInputs,
    GDNParams,
    PrefixState,
    causal_conv,
    gdn_inputs,
    gdn_output,
    ring_before,
    split_heads,
)
from clover_jax.model.norm import over_last_axis
from pallas_kernels.gated_delta import boundary_state, gated_delta
from pallas_kernels.state_fusion import state_fusion


def block_gdn(
    p: GDNParams,
    x: Float[Array, "rows blocks block width"],
    valid: Bool[Array, "rows blocks block"],
    source: PrefixState | CleanStream,
    index: Int[Array, "rows blocks"] | None,
    empty: Bool[Array, "rows blocks"],
    *,
    cfg: ModelConfig,
    env: Env,
) -> tuple[
    Float[Array, "rows blocks block width"],
    Float[Array, "rows blocks block value_heads value"],
    Float[Array, "rows blocks block value_heads"],
]:
    """The block operator for every block of every row.

    Args:
        p: layer weights.
        x: normed inputs.
        valid: positions that exist.
        source: the prefix itself (one block per row), or the clean stream of the same pass.
        index: for a clean stream, how many of its rows lie before each block.
        empty: whether a block has no prefix at all.
        cfg: the operator and its switches.
        env: implementation choices.

    Returns:
        The output, the values before the gated norm, and the history slot's share.
    """
    if cfg.bd_gdn is None:
        raise CloverError("config bd_gdn is null: this model has no block operator to preview with")
    inputs = gdn_inputs(p, x, valid)
    by_block = lambda tree: jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tree)
    operator = functools.partial(_one_block, p, cfg=cfg, env=env)
    if isinstance(source, PrefixState):
        first = lambda tree: jax.tree.map(lambda a: a[:, 0], tree)
        o, share = operator(source, first(inputs), valid[:, 0], empty[:, 0])
        o, share = o[:, None], share[:, None]
    else:

        def at_boundary(args: tuple) -> tuple[Array, Array]:
            inputs, valid, empty, index = args
            prefix = PrefixState(
                boundary_state(source.trace, index),
                ring_before(source.window, index, p.conv1d.shape[0] - 1),
            )
            return operator(prefix, inputs, valid, empty)

        # Mapped, so that the states of all blocks never exist at once.
        args = by_block((inputs, valid, empty, index))
        o, share = lax.map(at_boundary, args, batch_size=env.boundary_batch)
        o, share = by_block((o, share))
    return gdn_output(p, o, inputs.z, cfg), o, share


def _one_block(
    p: GDNParams,
    prefix: PrefixState,
    inputs: GDNInputs,
    valid: Bool[Array, "rows block"],
    empty: Bool[Array, " rows"],
    *,
    cfg: ModelConfig,
    env: Env,
) -> tuple[Array, Array]:
    switches = cfg.bd_gdn
    assert switches is not None
    q, k, v = split_heads(block_conv(p, prefix.ring, inputs.qkv, switches), cfg)
    scaled_q = q * jnp.float32(cfg.delta.key_head_dim**-0.5)
    if switches.operator in ("causal", "two_direction"):
        run: Any = functools.partial(
            gated_delta, chunk=cfg.delta.chunk, impl=env.impl("gated_delta")
        )
        rows = (scaled_q, k, v, inputs.g, inputs.beta)
        o, _ = run(*rows, prefix.state)
        if switches.operator == "two_direction":
            # The second recurrence comes from the right end and starts empty.
            mirrored = jax.tree.map(lambda a: jnp.flip(a, axis=1), rows)
            back, _ = run(*mirrored, jnp.zeros_like(prefix.state))
            o = o + jnp.flip(back, axis=1)
        return o, jnp.zeros(o.shape[:-1], jnp.float32)

    history_q = q if switches.history_query == "unit" else scaled_q
    group = cfg.delta.num_value_heads // cfg.delta.num_key_heads
    read = jnp.einsum(
        "rhkv,rihk->rihv",
        prefix.state,
        jnp.repeat(history_q, group, axis=2),
        precision=lax.Precision.HIGHEST,
    )
    slot, bias = _slot_logit(p, read, valid, switches), None
    if switches.block_bias == "decay":
        c = jnp.moveaxis(jnp.cumsum(inputs.g, axis=1), 1, 2)  # [rows, value_heads, block]
        strength = jnp.where(valid[..., None], jnp.log(inputs.beta + jnp.float32(1e-6)), 0.0)
        bias = -jnp.abs(c[..., :, None] - c[..., None, :])
        bias = bias + jnp.moveaxis(strength, 1, 2)[..., None, :]
        slot = slot + jnp.moveaxis(c, 1, 2)
    if switches.operator in ("no_history", "added"):
        slot = jnp.full_like(slot, -jnp.inf)
    elif switches.empty_history == "drop":
        slot = jnp.where(empty[:, None, None], -jnp.inf, slot)
    if switches.block_value == "beta":
        v = v * inputs.beta[..., None]
    scale = {
        "plain": lambda s: s,
        "exp": jnp.exp,
        "softplus": jax.nn.softplus,
    }[switches.logit_scale](p.bd_softmax_logit_scale)
    o, share = state_fusion(q, k, v, read, slot, scale, bias, valid, impl=env.impl("state_fusion"))
    return (o + read if switches.operator == "added" else o), share


def block_conv(
    p: GDNParams,
    ring: Float[Array, "rows taps channels"],
    block: Float[Array, "rows block channels"],
    switches: BDGDNConfig,
) -> Float[Array, "rows block channels"]:
    """The convolution before SiLU: the base's taps over ring and block, and the taps ahead."""
    out = causal_conv(jnp.concatenate([ring, block], axis=1), p.conv1d)
    if not switches.right_conv:
        return out
    taps = p.conv_right_weight.shape[0]
    right = (
        p.conv_right_weight if switches.right_order == "next_first" else p.conv_right_weight[::-1]
    )
    # Rows past the block's end add nothing.
    ahead = jnp.pad(block[:, 1:], ((0, 0), (0, taps), (0, 0)))
    return out + causal_conv(ahead, right)


def _slot_logit(
    p: GDNParams,
    read: Float[Array, "rows block value_heads value"],
    valid: Bool[Array, "rows block"],
    switches: BDGDNConfig,
) -> Float[Array, "rows block value_heads"]:
    if switches.history_logit == "log_length":
        length = jnp.maximum(jnp.sum(valid, axis=1, dtype=jnp.int32), 1).astype(jnp.float32)
        score = jnp.broadcast_to(jnp.log(length)[:, None, None], read.shape[:-1])
    else:
        score = jnp.log1p(jnp.sqrt(jnp.sum(read * read, axis=-1) + jnp.float32(1e-12)))
    bias, c = p.bd_softmax_history_bias, p.bd_softmax_history_c
    return over_last_axis(bias, score) + over_last_axis(c, score) * score
