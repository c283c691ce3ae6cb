"""One dense fp32 softmax over cached cells and own block."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def block_attention(
    q: Array,
    k: Array,
    v: Array,
    group: Any,
    limit: Array,
    own: Any,
    *,
    scale: float,
    differentiable: bool,
) -> Array:
    """See `api.block_attention`."""
    del differentiable
    rows, queries, heads, _ = q.shape
    out = jnp.zeros((rows, queries, heads, v.shape[-1]), jnp.float32)
    for r in range(rows):
        for i in range(queries):
            cells = jnp.arange(k.shape[2]) < limit[r, i]
            keys = jnp.where(cells[:, None, None], k[group, r].astype(jnp.float32), 0.0)
            values = jnp.where(cells[:, None, None], v[group, r].astype(jnp.float32), 0.0)
            if own is not None:
                b = i // own.k.shape[2]
                seen = own.valid[r, b]
                keys = jnp.concatenate([keys, own.k[r, b].astype(jnp.float32)])
                values = jnp.concatenate([values, own.v[r, b].astype(jnp.float32)])
                cells = jnp.concatenate([cells, seen])
            for h in range(heads):
                kv = h // (heads // k.shape[3])
                logits = scale * jnp.matmul(
                    keys[:, kv], q[r, i, h].astype(jnp.float32), precision=lax.Precision.HIGHEST
                )
                w = jnp.exp(logits - jnp.max(jnp.where(cells, logits, -jnp.inf)))
                w = jnp.where(cells, w, 0.0)
                mixed = jnp.matmul(w, values[:, kv], precision=lax.Precision.HIGHEST)
                total = jnp.sum(w)
                out = out.at[r, i, h].set(jnp.where(total > 0, mixed / total, 0.0))
    return out.astype(q.dtype)
