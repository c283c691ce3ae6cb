"""The operator batched over rows and heads; what runs on CPU, and every kernel's gradient."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.state_fusion.contract import Switches

# Float32 products stay float32: accelerators would round the inputs.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def state_fusion(
    ring: Array, block_qkv: Array, taps: Array, right_taps: Array | None, state: Array, g: Array,
    beta: Array, logit_scale: Array, history_bias: Array, history_c: Array, valid: Array,
    empty: Array, *, key_heads: int, switches: Switches,
) -> tuple[Array, Array]:  # fmt: skip
    """See `api.state_fusion`."""
    rows, n, _ = block_qkv.shape
    value_heads, key, value = state.shape[1:]
    group = value_heads // key_heads
    existing = jnp.where(valid[..., None], block_qkv, jnp.zeros((), block_qkv.dtype))
    order = switches.right_order
    mixed = jax.nn.silu(block_conv(ring, existing, taps, right_taps, right_order=order))
    q, k, v = jnp.split(mixed, [key_heads * key, 2 * key_heads * key], axis=-1)
    q, k = (_unit(x.reshape(rows, n, key_heads, key)) for x in (q, k))
    v = v.reshape(rows, n, key_heads, group, value)
    g, beta = (_by_head(jnp.where(valid[..., None], x, 0.0), key_heads) for x in (g, beta))
    logit_scale, history_bias, history_c = (
        x.reshape(1, key_heads, group, 1) for x in (logit_scale, history_bias, history_c)
    )

    scaled = q if switches.history_query == "unit" else q * jnp.float32(key**-0.5)
    # As batches of one head each: an einsum over the group would first copy the state to [key,
    # group, value] on CPU; q is small.
    per_head = jnp.moveaxis(scaled, 2, 1)[:, :, None]
    per_head = jnp.broadcast_to(per_head, (rows, key_heads, group, n, key))
    by_head = state.reshape(rows, key_heads, group, key, value)
    read = _einsum("rhgik,rhgkv->rhgiv", per_head, by_head)
    slot = history_bias + history_c * _score(read, valid, switches)
    logits = scale(logit_scale, switches)[..., None] * _einsum("rihk,rjhk->rhij", q, k)[:, :, None]
    if switches.block_bias == "decay":
        c = lax.cumsum(g, axis=3)
        logits = logits - jnp.abs(c[..., :, None] - c[..., None, :])
        logits = logits + jnp.log(beta + jnp.float32(1e-6))[..., None, :]
        slot = slot + c
    if switches.operator != "state_slot":
        slot = jnp.full_like(slot, -jnp.inf)
    elif switches.empty_history == "drop":
        slot = jnp.where(empty[:, None, None, None], -jnp.inf, slot)

    share, w = _softmax(slot, jnp.where(valid[:, None, None, None], logits, -jnp.inf))
    if switches.block_value == "beta":
        v = v * jnp.moveaxis(beta, 3, 1)[..., None]
    kept = read if switches.operator == "added" else share[..., None] * read
    out = kept + _einsum("rhgij,rjhgv->rhgiv", w, v)
    out = jnp.moveaxis(out, 3, 1).reshape(rows, n, value_heads, value)
    return out, jnp.moveaxis(share, 3, 1).reshape(rows, n, value_heads)


def scale(logit_scale: Array, switches: Switches) -> Array:
    """The factor of q . k that a stored scale stands for."""
    how = {"plain": lambda s: s, "exp": jnp.exp, "softplus": jax.nn.softplus}
    return how[switches.logit_scale](logit_scale)


def block_conv(
    ring: Array, block: Array, taps: Array, right_taps: Array | None, *, right_order: str
) -> Array:
    """See `api.block_conv`: all taps in one pass over [ring | block | nothing]."""
    n = block.shape[1]
    window, every = [ring, block], [taps.astype(jnp.float32)]
    if right_taps is not None:
        window.append(jnp.zeros_like(ring))
        right = right_taps.astype(jnp.float32)
        every.append(right if right_order == "next_first" else right[::-1])
    window = jnp.concatenate(window, axis=1).astype(jnp.float32)
    every = jnp.concatenate(every)[:, None, None]
    return functools.reduce(
        jnp.add, [window[:, j : j + n] * every[j] for j in range(every.shape[0])]
    )


def _unit(x: Array) -> Array:
    """x rsqrt(sum x² + 1e-6); the 1e-6 is the base's, inside the root."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(1e-6))


def _by_head(x: Array, key_heads: int) -> Array:
    """[rows, n, value_heads] -> [rows, key_heads, group, n]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], key_heads, -1), 1, 3)


def _score(read: Array, valid: Array, switches: Switches) -> Array:
    """What history_c multiplies, [rows, key_heads, group, n]."""
    if switches.history_logit == "read_norm":
        return jnp.log1p(jnp.sqrt(jnp.sum(read * read, axis=-1) + jnp.float32(1e-12)))
    length = jnp.maximum(jnp.sum(valid, axis=1, dtype=jnp.int32), 1).astype(jnp.float32)
    return jnp.broadcast_to(jnp.log(length)[:, None, None, None], read.shape[:-1])


def _softmax(slot: Array, logits: Array) -> tuple[Array, Array]:
    """One softmax over a slot [...] and a block [..., n]; nothing but -inf gives zeros."""
    top = lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1), slot))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    e, e_slot = jnp.exp(logits - top[..., None]), jnp.exp(slot - top)
    total = jnp.sum(e, axis=-1) + e_slot
    total = jnp.where(total > 0, total, 1.0)
    return e_slot / total, e / total[..., None]
