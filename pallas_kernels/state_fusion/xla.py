"""Batched BD-GDN block softmax."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

# The state and its solve stay float32: accelerators would round the inputs.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def state_fusion(
    q: Array,
    k: Array,
    v: Array,
    read: Array,
    slot: Array,
    logit_scale: Array,
    bias: Array | None,
    valid: Array,
) -> tuple[Array, Array]:
    """See `api.state_fusion`."""
    rows, block, value_heads, width = v.shape
    key_heads = q.shape[2]
    by_group = lambda x: x.reshape(rows, block, key_heads, -1, *x.shape[3:])
    qk = _einsum("rihk,rjhk->rhij", q, k)[:, :, None]
    logits = logit_scale.reshape(1, key_heads, -1, 1, 1) * qk
    if bias is not None:
        logits = logits + bias.reshape(rows, key_heads, -1, block, block)
    logits = jnp.where(valid[:, None, None, None, :], logits, -jnp.inf)
    slot_logit = jnp.moveaxis(by_group(slot), 1, -1)  # [rows, key_heads, group, block]
    top = lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1), slot_logit))
    top = jnp.where(jnp.isfinite(top), top, jnp.float32(0))
    e = jnp.exp(logits - top[..., None])
    e_slot = jnp.exp(slot_logit - top)
    total = jnp.sum(e, axis=-1) + e_slot
    total = jnp.where(total > 0, total, jnp.float32(1))
    mixed = _einsum("rhgij,rjhgv->rihgv", e / total[..., None], by_group(v))
    share = jnp.moveaxis(e_slot / total, -1, 1)  # [rows, block, key_heads, group]
    out = share[..., None] * by_group(read) + mixed
    return out.reshape(rows, block, value_heads, width), share.reshape(rows, block, value_heads)
