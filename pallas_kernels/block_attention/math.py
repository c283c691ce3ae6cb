"""What every implementation computes: one step of the online softmax, on plain arrays.

The query heads of one KV head are folded into the rows of the matmul, so that a cell is read once
for all of them: row m = (query i, head j of the group) = i · group + j.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

MASKED = -1e30  # the logit of an unseen key; finite: an infinity minus itself is NaN
LOWEST = -5e29  # where the running maximum starts: exp(MASKED - LOWEST) is exactly 0


class Part(NamedTuple):
    """Attention over some of the keys, before the division."""

    top: Float[Array, "*batch m 1"]  # largest logit seen, at least LOWEST
    total: Float[Array, "*batch m 1"]  # sum of exp(logit - top)
    mixed: Float[Array, "*batch m channel"]  # sum of exp(logit - top) · value


def fold(
    q: Float[Array, "rows queries heads channel"], kv_heads: int
) -> Float[Array, "rows kv_heads m channel"]:
    """Queries of one KV head as the rows of one matrix."""
    rows, queries, heads, channel = q.shape
    q = q.reshape(rows, queries, kv_heads, heads // kv_heads, channel)
    return jnp.moveaxis(q, 2, 1).reshape(rows, kv_heads, -1, channel)


def unfold(
    x: Float[Array, "rows kv_heads m channel"], queries: int
) -> Float[Array, "rows queries heads channel"]:
    """Inverse of `fold`."""
    rows, kv_heads, _, channel = x.shape
    x = x.reshape(rows, kv_heads, queries, -1, channel)
    return jnp.moveaxis(x, 1, 2).reshape(rows, queries, -1, channel)


def nothing(*shape: int) -> Part:
    """The part of no keys, for queries of shape [*batch, m, channel]."""
    stats = (*shape[:-1], 1)
    zeros = jnp.zeros(stats, jnp.float32)
    return Part(jnp.full(stats, LOWEST, jnp.float32), zeros, jnp.zeros(shape, jnp.float32))


def add_keys(
    part: Part,
    q: Float[Array, "*batch m channel"],
    k: Float[Array, "*batch t channel"],
    v: Float[Array, "*batch t channel"],
    seen: Bool[Array, "..."],
    *,
    scale: float,
    precision: Any,
) -> Part:
    """The part that has also seen these keys; `seen` broadcasts to [*batch, m, t].

    Matmuls take the operands' dtype and accumulate in float32. Masked before the exponential; what
    an unseen key holds cannot matter, an unseen value must be finite. `top` has no gradient: it is
    a scale of `total` and `mixed` that the division takes out again, so any number would do.
    """
    logits = jnp.where(seen, scale * _dot(q, k, -1, precision), MASKED)
    top = jnp.maximum(part.top, jnp.max(logits, axis=-1, keepdims=True))
    top = lax.stop_gradient(top)
    shrink = jnp.exp(part.top - top)
    w = jnp.exp(logits - top)  # 0 where unseen
    return Part(
        top,
        shrink * part.total + jnp.sum(w, axis=-1, keepdims=True),
        shrink * part.mixed + _dot(w.astype(v.dtype), v, -2, precision),
    )


def keys_gradient(
    top: Float[Array, "*batch m 1"],
    d: Part,
    q: Float[Array, "*batch m channel"],
    k: Float[Array, "*batch t channel"],
    v: Float[Array, "*batch t channel"],
    seen: Bool[Array, "..."],
    *,
    scale: float,
) -> tuple[
    Float[Array, "*batch m channel"],
    Float[Array, "*batch t channel"],
    Float[Array, "*batch t channel"],
]:
    """What these keys add to the gradient of q, and their own and their values' gradients.

    Args:
        top: of the part after all keys.
        d: gradient of that part.
        q: queries.
        k: keys.
        v: values.
        seen: as in `add_keys`.
        scale: factor of q . k.
    """
    turned = lambda a: jnp.swapaxes(a, -1, -2)
    w = jnp.exp(jnp.where(seen, scale * _dot(q, k, -1, None), MASKED) - top)
    d_logits = scale * w * (d.total + _dot(d.mixed, v, -1, None))
    return (
        _dot(d_logits, k, -2, None),
        _dot(turned(d_logits), q, -2, None),
        _dot(turned(w), d.mixed, -2, None),
    )


def finish(part: Part) -> Float[Array, "*batch m channel"]:
    """The weighted mean; zero for a query that saw no key."""
    return part.mixed / jnp.where(part.total > 0, part.total, 1.0)


def merge(parts: Part) -> Part:
    """The union of parts over disjoint keys, stacked on the first axis.

    A part without keys (total 0) may leave `mixed` unwritten.
    """
    top = jnp.max(parts.top, axis=0)
    weight = jnp.exp(parts.top - top[None])
    mixed = jnp.where(parts.total > 0, weight * parts.mixed, 0.0)
    return Part(top, jnp.sum(weight * parts.total, axis=0), jnp.sum(mixed, axis=0))


def _dot(a: Array, b: Array, b_axis: int, precision: Any) -> Array:
    batch = tuple(range(a.ndim - 2))
    contract = ((a.ndim - 1,), (b.ndim + b_axis,))
    return lax.dot_general(
        a, b, (contract, (batch, batch)), precision=precision, preferred_element_type=jnp.float32
    )
