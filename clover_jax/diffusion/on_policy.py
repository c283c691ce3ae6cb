"""Noise that the model makes itself: what it leaves masked where decoding would go on."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from clover_jax.config import ModelConfig
from clover_jax.diffusion.corrupt import Batch, streams
from clover_jax.env import Env
from clover_jax.model.transformer import (
    Params,
    align_logits,
    before_blocks,
    forward,
    outside_layers,
    unembed,
)


def follow(
    params: Params,
    batch: Batch,
    forbidden: Bool[Array, " vocab"],
    *,
    threshold: float,
    cfg: ModelConfig,
    env: Env,
) -> Batch:
    """The batch with the masks of `block_follows` made by one step of the model.

    A following block starts as its twin in the first view. Of the masked positions those above the
    threshold become known, with their clean tokens; where none is, the surest. So the two views
    are two steps of one decoding in which every reveal is right. A block that the model finishes
    takes no part. No gradient flows through the choice.

    Args:
        params: weights.
        batch: of two views, from `corrupt.make_batch(complementary=True)`.
        forbidden: ids that no position can take.
        threshold: of the confidence.
        cfg: the model.
        env: where and how.
    """
    views = batch.block_index.shape[1] // 2
    clean, both_views = streams(batch)
    noisy = jax.tree.map(lambda a: a[:, :views], both_views)
    params = lax.stop_gradient(params)
    out = forward(params, clean, noisy, None, cfg=cfg, env=env)
    previous = before_blocks(out.hidden.clean, noisy.index, noisy.start)
    hidden = align_logits(out.hidden.noisy, previous, cfg.logits_position)
    # Block by block, so that not all logits exist at once; rows stay where they are on a mesh.
    head = outside_layers(params, cfg, env)
    by_block = lax.map(lambda h: _confidence(head, h, forbidden), jnp.moveaxis(hidden, 1, 0))
    confidence = jnp.moveaxis(by_block, 0, 1)
    confidence = jnp.where(noisy.masked, confidence, -jnp.inf)
    surest = jnp.arange(cfg.block_length)[None, None] == jnp.argmax(
        confidence, axis=-1, keepdims=True
    )
    left = noisy.masked & ~(confidence > threshold) & ~surest
    both = lambda a, b: jnp.concatenate([a, b], axis=1)
    follows = batch.block_follows
    masked = jnp.where(follows[..., None], both(noisy.masked, left), batch.block_masked)
    n_valid = jnp.where(follows & ~masked.any(-1), 0, batch.block_n_valid)
    return batch._replace(block_masked=masked, block_n_valid=n_valid)


def _confidence(
    params: Params, hidden: Float[Array, "rows block width"], forbidden: Bool[Array, " vocab"]
) -> Float[Array, "rows block"]:
    logits = jnp.where(forbidden[None, None], -jnp.inf, unembed(params, hidden))
    return jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))
