"""The operator's mathematics on the 2-D arrays of one head; no reference to memory.

Shapes are [positions, channels] of one head, columns [n, 1] and rows [1, n] of positions.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.state_fusion.contract import Switches


def conv_silu(shifted: Sequence[Array], taps: Sequence[Array]) -> Array:
    """silu(sum_j shifted[j] taps[j]); shifted[j][t] is position t + j of the window."""
    return silu(functools.reduce(jnp.add, [x * t for x, t in zip(shifted, taps, strict=True)]))


def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    return x / (1.0 + jnp.exp(-x))


def unit(x: Array) -> Array:
    """x rsqrt(sum x² + 1e-6)."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6)


def as_row(column: Array) -> Array:
    """[n, 1] -> [1, n]: a masked sum, as a transpose of one lane is not a vector operation."""
    return jnp.sum(jnp.where(_diagonal(column.shape[0]), column, 0.0), axis=0, keepdims=True)


def as_column(row: Array) -> Array:
    """[1, n] -> [n, 1]."""
    return jnp.sum(jnp.where(_diagonal(row.shape[1]), row, 0.0), axis=1, keepdims=True)


def cumsum(column: Array) -> Array:
    """Inclusive sums [1, n] of a column [n, 1]."""
    n = column.shape[0]
    earlier = _iota(n, 0) <= _iota(n, 1)
    return jnp.sum(jnp.where(earlier, column, 0.0), axis=0, keepdims=True)


def block_weights(
    qk: Array,
    read: Array,
    g: Array | None,
    beta: Array | None,
    scalars: Sequence[Array],
    valid: Array,
    empty: Array | None,
    switches: Switches,
) -> tuple[Array, Array]:
    """The softmax of one value head.

    Args:
        qk: q_i . k_j.
        read: S^T q.
        g: log decays, a column, 0 where not valid; None where the switches do not ask for it.
        beta: write strengths, a column, 0 where not valid; or None, likewise.
        scalars: factor of q . k, history_bias and history_c.
        valid: a row.
        empty: whether the prefix is empty; or None, likewise.
        switches: which formula.

    Returns:
        Weights of the block, and of the slot as a column.
    """
    logit_scale, bias, factor = scalars
    if switches.history_logit == "read_norm":
        score = jnp.log(1.0 + jnp.sqrt(jnp.sum(read * read, axis=1, keepdims=True) + 1e-12))
    else:
        length = jnp.sum(jnp.where(valid, 1.0, 0.0), axis=1, keepdims=True)
        score = jnp.log(jnp.maximum(length, 1.0))
    slot = jnp.broadcast_to(bias + factor * score, (qk.shape[0], 1))
    logits = logit_scale * qk
    if g is not None and beta is not None:
        c = cumsum(g)
        logits = logits - jnp.abs(as_column(c) - c) + as_row(jnp.log(beta + 1e-6))
        slot = slot + as_column(c)
    if switches.operator != "state_slot":
        slot = jnp.full_like(slot, -jnp.inf)
    elif empty is not None:
        slot = jnp.where(empty, -jnp.inf, slot)
    logits = jnp.where(valid, logits, -jnp.inf)
    top = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), slot)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    e, e_slot = jnp.exp(logits - top), jnp.exp(slot - top)
    total = jnp.sum(e, axis=1, keepdims=True) + e_slot
    total = jnp.where(total > 0.0, total, 1.0)
    return e / total, e_slot / total


def _iota(n: int, axis: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (n, n), axis)


def _diagonal(n: int) -> Array:
    return _iota(n, 0) == _iota(n, 1)
