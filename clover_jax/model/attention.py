"""Gated full attention (qwen36 section 3.3): per-head q and k norms, partial RoPE, sigmoid gate."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from clover_jax.config import ModelConfig
from clover_jax.model.norm import rms_norm
from clover_jax.model.rope import apply_rope
from clover_jax.params import ParamSpec, normal, zeros


@struct.dataclass
class AttentionParams:
    """Weights of one attention layer. q_proj holds, per head, the query then the gate."""

    q_proj: Any  # [d, heads, 2 channel]
    k_proj: Any  # [d, kv_heads, channel]
    v_proj: Any  # [d, kv_heads, channel]
    o_proj: Any  # [heads, channel, d]
    q_norm: Any  # [channel]
    k_norm: Any  # [channel]


def attention_specs(cfg: ModelConfig) -> AttentionParams:
    """Specs of one attention layer."""
    a, d, w = cfg.attention, cfg.hidden_size, normal(cfg.initializer_range)
    head_norm = ParamSpec((a.head_dim,), (None,), zeros, jnp.float32)
    kv = ParamSpec((d, a.num_kv_heads, a.head_dim), ("embed", "kv_heads", None), w, cfg.dtype)
    return AttentionParams(
        q_proj=ParamSpec((d, a.num_heads, 2 * a.head_dim), ("embed", "heads", None), w, cfg.dtype),
        k_proj=kv,
        v_proj=kv,
        o_proj=ParamSpec((a.num_heads, a.head_dim, d), ("heads", None, "embed"), w, cfg.dtype),
        q_norm=head_norm,
        k_norm=head_norm,
    )


def attention_inputs(
    p: AttentionParams,
    x: Float[Array, "*rows time width"],
    rope: tuple[Array, Array],
    *,
    cfg: ModelConfig,
) -> tuple[
    Float[Array, "*rows time heads channel"],
    Float[Array, "*rows time kv_heads channel"],
    Float[Array, "*rows time kv_heads channel"],
    Float[Array, "*rows time heads channel"],
]:
    """Rotated q and k, raw v, and the gate, which is neither normed nor rotated."""
    q, gate = jnp.split(jnp.einsum("...td,dhc->...thc", x, p.q_proj), 2, axis=-1)
    k = jnp.einsum("...td,dhc->...thc", x, p.k_proj)
    v = jnp.einsum("...td,dhc->...thc", x, p.v_proj)
    q = rms_norm(q, p.q_norm, eps=cfg.rms_norm_eps)
    k = rms_norm(k, p.k_norm, eps=cfg.rms_norm_eps)
    return apply_rope(q, *rope), apply_rope(k, *rope), v, gate


def attention_output(
    p: AttentionParams,
    mixed: Float[Array, "*rows time heads channel"],
    gate: Float[Array, "*rows time heads channel"],
) -> Float[Array, "*rows time width"]:
    """o_proj(mixed · sigmoid(gate))."""
    return jnp.einsum("...thc,hcd->...td", mixed * jax.nn.sigmoid(gate), p.o_proj)
