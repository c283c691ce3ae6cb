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
    first: Array | None,
    *,
    scale: float,
) -> Array:
    """See `api.block_attention`."""
    rows, queries, heads, channel = q.shape
    kv_heads, capacity = k.shape[2:4]
    f32 = lambda a: a.astype(jnp.float32)
    out = []
    for r in range(rows):
        for i in range(queries):
            keys, values = f32(k[group, r]), f32(v[group, r])  # [kv_heads, cells, channel]
            seen = jnp.arange(capacity) < limit[r, i]
            if first is not None:
                seen &= jnp.arange(capacity) >= first[r, i]
            if own is not None:
                b = i // own.k.shape[2]
                add = lambda cells, a: jnp.concatenate([cells, jnp.moveaxis(f32(a), 1, 0)], 1)
                keys, values = add(keys, own.k[r, b]), add(values, own.v[r, b])
                seen = jnp.concatenate([seen, own.valid[r, b]])
            keys, values = (jnp.where(seen[None, :, None], a, 0.0) for a in (keys, values))
            of_kv_head = f32(q[r, i]).reshape(kv_heads, heads // kv_heads, channel)
            logits = scale * jnp.einsum(
                "hgc,htc->hgt", of_kv_head, keys, precision=lax.Precision.HIGHEST
            )
            logits = jnp.where(seen, logits, -1e30)
            w = jnp.where(seen, jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
            mixed = jnp.einsum("hgt,htc->hgc", w, values, precision=lax.Precision.HIGHEST)
            total = jnp.sum(w, axis=-1, keepdims=True)
            out.append(jnp.where(total > 0, mixed / jnp.where(total > 0, total, 1.0), 0.0))
    return jnp.stack(out).reshape(rows, queries, heads, channel).astype(q.dtype)
