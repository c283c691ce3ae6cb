"""BD-GDN block softmax, row by row and head by head."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


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
    rows, block, value_heads, _ = v.shape
    group = value_heads // q.shape[2]
    out, share = [], []
    for r in range(rows):
        for h in range(value_heads):
            qh, kh = q[r, :, h // group], k[r, :, h // group]
            logits = logit_scale[h] * jnp.matmul(qh, kh.T, precision=lax.Precision.HIGHEST)
            if bias is not None:
                logits = logits + bias[r, h]
            logits = jnp.where(valid[r][None, :], logits, -jnp.inf)
            logits = jnp.concatenate([slot[r, :, h][:, None], logits], axis=1)
            top = jnp.max(logits, axis=1, keepdims=True)
            e = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, jnp.float32(0)))
            total = jnp.sum(e, axis=1, keepdims=True)
            w = jnp.where(total > 0, e / jnp.where(total > 0, total, jnp.float32(1)), 0.0)
            mixed = jnp.matmul(w[:, 1:], v[r, :, h], precision=lax.Precision.HIGHEST)
            out.append(w[:, :1] * read[r, :, h] + mixed)
            share.append(w[:, 0])
    stack = lambda xs: jnp.stack(xs).reshape(rows, value_heads, block, *xs[0].shape[1:])
    return jnp.moveaxis(stack(out), 1, 2), jnp.moveaxis(stack(share), 1, 2)
