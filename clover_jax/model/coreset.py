"""The coreset: the few experts that a whole block shares in a preview.

Per batch row, block and layer: routing mass is pooled over the block's valid positions, experts
are taken in descending mass (ties: lower id) until their share reaches top_p, including the one
that crosses it, and never fewer than top-k. Positions then take their top-k inside it. It holds a
subset of the experts that the unrestricted block touches (dMoE, arXiv 2605.30876).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from clover_jax.config import CoresetConfig


def coreset(
    probs: Float[Array, "*rows block experts"],
    chosen: Bool[Array, "*rows block experts"],
    valid: Bool[Array, "*rows block"],
    *,
    cfg: CoresetConfig,
    top_k: int,
) -> tuple[Bool[Array, "*rows experts"], Float[Array, "*rows"]]:
    """The experts of each block's coreset, and how near the crossing was.

    Args:
        probs: router softmax over all experts.
        chosen: each position's unrestricted top-k.
        valid: positions that exist; the others have no say.
        cfg: pooled mass and share.
        top_k: least size.

    Returns:
        Membership, and min over experts of |cumulative share - top_p|, a decision margin.
    """
    mass = probs if cfg.mass == "softmax" else jnp.where(chosen, probs, 0.0)
    mass = jnp.where(valid[..., None], mass, 0.0)
    pooled = jnp.sum(mass, axis=-2) if cfg.pool == "sum" else jnp.max(mass, axis=-2)
    experts = pooled.shape[-1]
    sorted_mass, order = lax.top_k(pooled, experts)  # stable: ties go to the lower id
    total = jnp.sum(pooled, axis=-1, keepdims=True)
    share = jnp.cumsum(sorted_mass, axis=-1) / jnp.where(total > 0, total, jnp.float32(1))
    before = jnp.concatenate([jnp.zeros_like(share[..., :1]), share[..., :-1]], axis=-1)
    rank = jnp.arange(experts, dtype=jnp.int32)
    kept = (before < jnp.float32(cfg.top_p)) & (sorted_mass > 0)
    kept = kept | (rank < top_k).reshape(*(1,) * (kept.ndim - 1), experts)
    member = jnp.any(
        (order[..., None] == rank.reshape(*(1,) * order.ndim, experts)) & kept[..., None], axis=-2
    )
    # Rounding can move the crossing, or swap the last expert that is in with the first that is not.
    crossing = jnp.min(jnp.abs(share - jnp.float32(cfg.top_p)), axis=-1)
    step = sorted_mass[..., :-1] - sorted_mass[..., 1:]
    last = kept[..., :-1] & ~kept[..., 1:]
    swap = jnp.min(jnp.where(last, step / jnp.where(total > 0, total, jnp.float32(1)), jnp.inf), -1)
    return member, jnp.minimum(crossing, swap)
