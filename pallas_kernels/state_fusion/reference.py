"""The operator row by row and head by head, in the formula's own order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def state_fusion(
    ring: Array, block_qkv: Array, taps: Array, right_taps: Array | None, state: Array, g: Array,
    beta: Array, logit_scale: Array, history_bias: Array, history_c: Array, valid: Array,
    empty: Array, *, key_heads: int, switches: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """See `api.state_fusion`."""
    s, older, n = switches, taps.shape[0] - 1, block_qkv.shape[1]
    value_heads, key, value = state.shape[1:]
    right = jnp.zeros_like(taps[:older]) if right_taps is None else right_taps
    right = right if s.right_order == "next_first" else right[::-1]
    dot = lambda a, b: jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    unit = lambda x: x * lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + jnp.float32(1e-6))

    def row(args: tuple) -> tuple[Array, Array]:
        ring, block, state, g, beta, valid, empty = args
        block = jnp.where(valid[:, None], block, jnp.zeros((), block.dtype))
        g, beta = (jnp.where(valid[:, None], x, 0.0) for x in (g, beta))
        nothing = jnp.zeros_like(block, shape=(older, block.shape[1]))
        window = jnp.concatenate([ring, block, nothing]).astype(jnp.float32)
        every = jnp.concatenate([taps.astype(jnp.float32), right.astype(jnp.float32)])
        mixed = jax.nn.silu(sum(window[j : j + n] * tap[None] for j, tap in enumerate(every)))
        q, k, v = jnp.split(mixed, [key_heads * key, 2 * key_heads * key], axis=1)
        c = jnp.cumsum(g, axis=0)

        def head(h: Array) -> tuple[Array, Array]:
            part = lambda x, i, width: lax.dynamic_slice_in_dim(x, i * width, width, axis=1)
            at = h // (value_heads // key_heads)
            qh, kh, vh = unit(part(q, at, key)), unit(part(k, at, key)), part(v, h, value)
            scaled = qh if s.history_query == "unit" else qh * jnp.float32(key**-0.5)
            read = dot(scaled, state[h])
            score = jnp.log(jnp.maximum(jnp.sum(valid.astype(jnp.float32)), 1.0))
            if s.history_logit == "read_norm":
                score = jnp.log1p(jnp.sqrt(jnp.sum(read * read, axis=1) + jnp.float32(1e-12)))
            slot = jnp.broadcast_to(history_bias[h] + history_c[h] * score, (n,))
            how = {"plain": lambda x: x, "exp": jnp.exp, "softplus": jax.nn.softplus}
            logits = how[s.logit_scale](logit_scale[h]) * dot(qh, kh.T)
            if s.block_bias == "decay":
                distance = jnp.abs(c[:, h][:, None] - c[:, h][None])
                logits = logits - distance + jnp.log(beta[:, h] + jnp.float32(1e-6))[None]
                slot = slot + c[:, h]
            if s.operator != "state_slot":
                slot = jnp.full_like(slot, -jnp.inf)
            elif s.empty_history == "drop":
                slot = jnp.where(empty, -jnp.inf, slot)
            logits = jnp.where(valid[None], logits, -jnp.inf)
            logits = jnp.concatenate([slot[:, None], logits], axis=1)
            top = jnp.max(logits, axis=1, keepdims=True)
            e = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0))
            total = jnp.sum(e, axis=1, keepdims=True)
            w = e / jnp.where(total > 0, total, 1.0)
            vh = vh * beta[:, h][:, None] if s.block_value == "beta" else vh
            kept = read if s.operator == "added" else w[:, :1] * read
            return kept + dot(w[:, 1:], vh), w[:, 0]

        out, share = lax.map(head, jnp.arange(value_heads, dtype=jnp.int32))
        return jnp.moveaxis(out, 0, 1), share.T

    return lax.map(row, (ring, block_qkv, state, g, beta, valid, empty))
