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

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from clover_jax.config import BDGDNConfig, ModelConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model import on_mesh
from clover_jax.model.deltanet import (
    CleanStream,
    GDNInputs,
    GDNParams,
    PrefixState,
    gdn_inputs,
    gdn_output,
    ring_before,
    split_heads,
)
from pallas_kernels.gated_delta import boundary_state, contract, gated_delta
from pallas_kernels.state_fusion import Switches, block_conv, state_fusion
from pallas_kernels.state_fusion.contract import AXES, OUT_AXES, by_shard


def block_gdn(
    p: GDNParams,
    x: Float[Array, "rows blocks block width"],
    valid: Bool[Array, "rows blocks block"],
    source: PrefixState | CleanStream,
    index: Int[Array, "rows blocks"] | None,
    empty: Bool[Array, "rows blocks"],
    before: Int[Array, "rows blocks"] | None = None,
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
        before: for a clean stream of rows that hold several samples, how many tokens of its own
            sample lie before each block.
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
            inputs, valid, empty, index, before = args
            state = on_mesh.over_mesh(
                env,
                boundary_state,
                (source.trace, index),
                (contract.TRACE_AXES, ("rows",)),
                contract.COMMIT_OUT_AXES,
            )
            if before is not None:  # where a sample begins, that state is the last one's
                state = jnp.where(empty[:, None, None, None], 0.0, state)
            ring = ring_before(source.window, index, p.conv1d.shape[0] - 1, before)
            return operator(PrefixState(state, ring), inputs, valid, empty)

        # Mapped, so that the states of all blocks never exist at once.
        args = by_block((inputs, valid, empty, index, before))
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
    if switches.operator not in ("causal", "two_direction"):
        # A device's part of the channels must be q | k | v of its heads.
        ways, key = env.ways("heads", cfg.delta.num_key_heads), cfg.delta.num_key_heads
        deal = lambda x: x
        if ways > 1:
            deal = lambda x: by_shard(x, ways, key_channels=key * cfg.delta.key_head_dim)
        right = _right_taps(p, switches)
        args = (
            deal(prefix.ring),
            deal(inputs.qkv),
            deal(p.conv1d),
            None if right is None else deal(right),
            prefix.state,
            inputs.g,
            inputs.beta,
            p.bd_softmax_logit_scale,
            p.bd_softmax_history_bias,
            p.bd_softmax_history_c,
            valid,
            empty,
        )
        run = functools.partial(
            state_fusion,
            key_heads=key // ways,
            switches=Switches(*(getattr(switches, name) for name in Switches._fields)),
            impl=env.impl("state_fusion"),
        )
        return on_mesh.over_mesh(env, run, args, tuple(AXES.values()), OUT_AXES)
    q, k, v = split_heads(mixed_block(p, prefix.ring, inputs.qkv, switches), cfg)
    q = q * jnp.float32(cfg.delta.key_head_dim**-0.5)
    op = functools.partial(gated_delta, chunk=cfg.delta.chunk, impl=env.impl("gated_delta"))
    axes = contract.AXES[:6]
    run = lambda *args: on_mesh.over_mesh(env, op, args, axes, contract.OUT_AXES)
    rows = (q, k, v, inputs.g, inputs.beta)
    o, _ = run(*rows, prefix.state)
    if switches.operator == "two_direction":
        # The second recurrence comes from the right end and starts empty.
        mirrored = jax.tree.map(lambda a: jnp.flip(a, axis=1), rows)
        back, _ = run(*mirrored, jnp.zeros_like(prefix.state))
        o = o + jnp.flip(back, axis=1)
    return o, jnp.zeros(o.shape[:-1], jnp.float32)


def mixed_block(
    p: GDNParams,
    ring: Float[Array, "rows taps channels"],
    block: Float[Array, "rows block channels"],
    switches: BDGDNConfig,
) -> Float[Array, "rows block channels"]:
    """The convolution before SiLU: the base's taps over ring and block, and the taps ahead."""
    order = switches.right_order
    return block_conv(ring, block, p.conv1d, _right_taps(p, switches), right_order=order)


def _right_taps(p: GDNParams, switches: BDGDNConfig) -> Array | None:
    return p.conv_right_weight if switches.right_conv else None
