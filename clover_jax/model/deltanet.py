"""Gated DeltaNet, the causal path (qwen36: in_proj -> conv -> SiLU -> delta rule -> gated norm)."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.model import on_mesh
from clover_jax.model.norm import gated_rms_norm, l2_norm, over_last_axis
from clover_jax.params import (
    ParamSpec,
    inverse_softplus_step,
    log_uniform_decay,
    normal,
    ones,
    zeros,
)
from pallas_kernels.gated_delta import DeltaTrace, contract, gated_delta, gated_delta_trace


@struct.dataclass
class GDNParams:
    """Weights of one GDN layer; the last four exist in Clover only."""

    in_proj_qkv: Any  # [d, q|k|v channels]
    in_proj_z: Any  # [d, value channels]
    in_proj_a: Any  # [d, value_heads]
    in_proj_b: Any  # [d, value_heads]
    conv1d: Any  # [K, channels]; tap K-1 falls on the current row
    A_log: Any  # [value_heads]
    dt_bias: Any  # [value_heads]
    norm: Any  # [value]
    out_proj: Any  # [value channels, d]
    conv_right_weight: Any = None  # [K-1, channels]
    bd_softmax_logit_scale: Any = None  # [value_heads]
    bd_softmax_history_bias: Any = None  # [value_heads]
    bd_softmax_history_c: Any = None  # [value_heads]


class GDNInputs(NamedTuple):
    """Projections of some rows; pads are zeroed, with g = beta = 0."""

    qkv: Float[Array, "*rows time channels"]  # pre-conv
    z: Float[Array, "*rows time value_channels"]
    g: Float[Array, "*rows time value_heads"]
    beta: Float[Array, "*rows time value_heads"]


class PrefixState(NamedTuple):
    """Where a block stands: the clean state and the ring of the prefix before it."""

    state: Float[Array, "rows value_heads key value"]
    ring: Float[Array, "rows taps channels"]


class CleanStream(NamedTuple):
    """What the state and ring before any position of a causal pass are built from."""

    trace: DeltaTrace
    window: Float[Array, "rows window channels"]  # ring of the pass's start | its pre-conv rows


def gdn_specs(cfg: ModelConfig) -> GDNParams:
    """Specs of one GDN layer."""
    d, hidden, w = cfg.delta, cfg.hidden_size, normal(cfg.initializer_range)
    f32, taps = jnp.float32, normal(d.conv_kernel**-0.5)
    heads = lambda init: ParamSpec((d.num_value_heads,), ("heads",), init, f32)
    block = {}
    if cfg.bd_gdn is not None:
        block = {
            "conv_right_weight": ParamSpec(
                (d.conv_kernel - 1, d.conv_channels), (None, "channels"), zeros, cfg.dtype
            ),
            "bd_softmax_logit_scale": heads(ones),
            "bd_softmax_history_bias": heads(zeros),
            "bd_softmax_history_c": heads(ones),
        }
    return GDNParams(
        in_proj_qkv=ParamSpec((hidden, d.conv_channels), ("embed", "channels"), w, cfg.dtype),
        in_proj_z=ParamSpec((hidden, d.value_dim), ("embed", "channels"), w, cfg.dtype),
        in_proj_a=ParamSpec((hidden, d.num_value_heads), ("embed", "heads"), w, cfg.dtype),
        in_proj_b=ParamSpec((hidden, d.num_value_heads), ("embed", "heads"), w, cfg.dtype),
        conv1d=ParamSpec((d.conv_kernel, d.conv_channels), (None, "channels"), taps, cfg.dtype),
        A_log=heads(log_uniform_decay),
        dt_bias=heads(inverse_softplus_step),
        norm=ParamSpec((d.value_head_dim,), (None,), ones, f32),
        out_proj=ParamSpec((d.value_dim, hidden), ("channels", "embed"), w, cfg.dtype),
        **block,
    )


def gdn_inputs(
    p: GDNParams, x: Float[Array, "*rows time width"], valid: Bool[Array, "*rows time"]
) -> GDNInputs:
    """Project, then silence the pads: they must not pass the conv nor decay the state."""
    keep = valid[..., None]
    qkv = jnp.where(keep, x @ p.in_proj_qkv, jnp.zeros((), x.dtype))
    a, b = (x @ w for w in (p.in_proj_a, p.in_proj_b))
    step = jax.nn.softplus(a.astype(jnp.float32) + over_last_axis(p.dt_bias, a))
    g = -over_last_axis(jnp.exp(p.A_log), a) * step
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    return GDNInputs(qkv, x @ p.in_proj_z, jnp.where(keep, g, 0.0), jnp.where(keep, beta, 0.0))


def causal_conv(
    window: Float[Array, "*rows window channels"],
    taps: Float[Array, "taps channels"],
    position: Int[Array, "*rows time"] | None = None,
) -> Float[Array, "*rows time channels"]:
    """out[t] = sum_j window[t + j] taps[j], in float32; the window starts with K-1 older rows.

    Given its position in its sample, a row is mixed with no row of the sample before.
    """
    kernel = taps.shape[0]
    time = window.shape[-2] - kernel + 1
    window, taps = window.astype(jnp.float32), taps.astype(jnp.float32)
    out = jnp.zeros((*window.shape[:-2], time, window.shape[-1]), jnp.float32)
    for j in range(kernel):
        x = window[..., j : j + time, :]
        if position is not None:
            x = jnp.where((position >= kernel - 1 - j)[..., None], x, 0.0)
        out = out + x * over_last_axis(taps[j], out)
    return out


def split_heads(
    mixed: Float[Array, "*rows time channels"], cfg: ModelConfig
) -> tuple[
    Float[Array, "*rows time key_heads key"],
    Float[Array, "*rows time key_heads key"],
    Float[Array, "*rows time value_heads value"],
]:
    """Conv output -> SiLU -> l2-normalised q and k, plain v; all float32."""
    d = cfg.delta
    key_dim = d.num_key_heads * d.key_head_dim
    q, k, v = jnp.split(jax.nn.silu(mixed), [key_dim, 2 * key_dim], axis=-1)
    heads = lambda x, n: x.reshape(*x.shape[:-1], n, -1)
    return (
        l2_norm(heads(q, d.num_key_heads)),
        l2_norm(heads(k, d.num_key_heads)),
        heads(v, d.num_value_heads),
    )


def gdn_output(
    p: GDNParams,
    o: Float[Array, "*rows time value_heads value"],
    z: Float[Array, "*rows time value_channels"],
    cfg: ModelConfig,
) -> Float[Array, "*rows time width"]:
    """Gated norm per head, then the output projection."""
    gated = gated_rms_norm(o, z.reshape(o.shape), p.norm, eps=cfg.rms_norm_eps)
    return gated.reshape(z.shape) @ p.out_proj


def causal_gdn(
    p: GDNParams,
    x: Float[Array, "rows time width"],
    valid: Bool[Array, "rows time"],
    prefix: PrefixState,
    position: Int[Array, "rows time"] | None = None,
    *,
    cfg: ModelConfig,
    env: Env,
    boundaries: bool = False,
) -> tuple[
    Float[Array, "rows time width"],
    Float[Array, "rows time value_heads value"],
    PrefixState,
    CleanStream | None,
]:
    """The base's layer from the state and ring of the prefix.

    Of rows that hold several samples, `position` is that of each token in its own: state and
    convolution start anew at 0. Then the prefix must be empty, and the ring returned is no one's.

    Returns:
        The output, the read-outs before the gated norm, the state and ring after the last valid
        row, and with `boundaries` what the state before any other row is built from.
    """
    inputs = gdn_inputs(p, x, valid)
    window = jnp.concatenate([prefix.ring, inputs.qkv], axis=1)
    q, k, v = split_heads(causal_conv(window, p.conv1d, position), cfg)
    q = q * jnp.float32(cfg.delta.key_head_dim**-0.5)
    n_valid = jnp.sum(valid, axis=1, dtype=jnp.int32)
    begins = None if position is None else position == 0
    args = (q, k, v, inputs.g, inputs.beta, prefix.state, n_valid, begins)
    op, out_axes = (
        (gated_delta_trace, contract.TRACE_OUT_AXES)
        if boundaries
        else (gated_delta, contract.OUT_AXES)
    )
    run = functools.partial(op, chunk=cfg.delta.chunk, impl=env.impl("gated_delta"))
    o, state, *trace = on_mesh.over_mesh(env, run, args, contract.AXES, out_axes)
    stream = CleanStream(trace[0], window) if boundaries else None
    ring = ring_before(window, n_valid, p.conv1d.shape[0] - 1)
    return gdn_output(p, o, inputs.z, cfg), o, PrefixState(state, ring), stream


def ring_before(
    window: Float[Array, "rows window channels"],
    index: Int[Array, " rows"],
    taps: int,
    before: Int[Array, " rows"] | None = None,
) -> Float[Array, "rows taps channels"]:
    """The `taps` pre-conv rows before position `index` of the pass; zero past the last `before`."""
    step = jnp.arange(taps, dtype=jnp.int32)[None]
    ring = jnp.take_along_axis(window, (index[:, None] + step)[..., None], axis=1)
    if before is None:
        return ring
    return jnp.where((step >= taps - before[:, None])[..., None], ring, jnp.zeros((), ring.dtype))
