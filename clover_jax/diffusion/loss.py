"""Training loss: AR on the clean stream + weight · diffusion on the noisy blocks + router terms.

Every sum is divided by its total weight over the global batch, so that a batch may be split over
devices or accumulated without changing the loss.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from clover_jax.config import ModelConfig
from clover_jax.diffusion.corrupt import Batch, streams
from clover_jax.diffusion.on_policy import follow
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.stack import StackStats
from clover_jax.model.transformer import (
    Params,
    align_logits,
    before_blocks,
    forward,
    outside_layers,
    unembed,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the loss terms.

    Attributes:
        ar: next-token loss of the clean stream.
        diffusion: masked-token loss of the blocks; 0 leaves the blocks out of the pass.
        diffusion_weighting: `unit`, or `inverse_t` divides a block's terms by its masked share
            (the likelihood bound).
        certainty: entropy of the masked positions that are predicted right (confidence-aware
            parallel training, LLaDA2.0, arXiv 2512.15745): makes right answers surer, and so more
            of them pass the threshold. It also makes a model surer than it is right.
        follow_above: confidence above which a block that follows another has become known; None
            where no block follows.
        balance: router load balance, per layer: experts · sum_e f_e P_e, `top_k` when balanced.
        router_z: squared logsumexp of the router logits (ST-MoE, arXiv 2202.08906).
        chunk: rows of logits that exist at once.
    """

    ar: float = 1.0
    diffusion: float = 0.3
    diffusion_weighting: Literal["unit", "inverse_t"] = "unit"
    certainty: float = 0.0
    follow_above: float | None = None
    balance: float = 0.01
    router_z: float = 0.0001
    chunk: int = 4096

    def __post_init__(self) -> None:
        for name in ("ar", "diffusion", "certainty", "balance", "router_z"):
            if not 0 <= getattr(self, name) < math.inf:
                raise CloverError(
                    f"loss {name} is {getattr(self, name)}: expected a number of at least 0"
                )
        if self.follow_above is not None and not 0 <= self.follow_above <= 1:
            raise CloverError(
                f"loss follow_above is {self.follow_above}: expected a confidence from 0 to 1"
            )
        if self.chunk < 1:
            raise CloverError(f"loss chunk is {self.chunk}: expected at least 1")


class Totals(NamedTuple):
    """What the sums over a part of a batch are divided by, so that the parts add up to the batch.

    Router terms have no such total: each part gives its share of their mean over the parts.
    """

    ar: Float[Array, ""]  # weight of the whole batch's next-token targets
    diffusion: Float[Array, ""]  # weight of its masked positions
    parts: int


class CrossEntropy(NamedTuple):
    """Weighted sums over some positions."""

    loss: Float[Array, ""]  # nats
    correct: Float[Array, ""]
    weight: Float[Array, ""]
    entropy: Float[Array, ""]  # nats, of the correct positions; 0 if not asked for


def training_loss(
    params: Params,
    batch: Batch,
    forbidden: Bool[Array, " vocab"],
    *,
    cfg: ModelConfig,
    env: Env,
    loss: LossConfig,
    totals: Totals | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss and its parts, one forward over both streams.

    Args:
        params: weights.
        batch: from `corrupt.make_batch`.
        forbidden: ids that no position can take; they are outside the softmax.
        cfg: the model.
        env: where and how.
        loss: weights.
        totals: of the batch that this is a part of (`batch_totals`); None: it is the whole batch.
            Then loss and metrics are this part's summands.
    """
    if loss.diffusion and loss.follow_above is not None:
        batch = follow(params, batch, forbidden, threshold=loss.follow_above, cfg=cfg, env=env)
    clean, noisy = streams(batch)
    out = forward(params, clean, noisy if loss.diffusion else None, None, cfg=cfg, env=env)
    head = outside_layers(params, cfg, env)
    entropy = lambda hidden, targets, weight, certainty: cross_entropy(
        head, hidden, targets, weight, forbidden, chunk=loss.chunk, certainty=certainty, env=env
    )
    ar = entropy(out.hidden.clean[:, :-1], batch.tokens[:, 1:], batch.target_weight[:, 1:], False)
    share = jnp.float32(1 if totals is None else 1 / totals.parts)
    balance, z = (share * term for term in router_losses(out.stats, cfg))
    per_weight = lambda x, weight: x / jnp.where(weight > 0, weight, jnp.float32(1))
    ar_weight = ar.weight if totals is None else totals.ar
    ar_loss = per_weight(ar.loss, ar_weight)
    total = loss.ar * ar_loss + loss.balance * balance + loss.router_z * z
    parts = {
        "ar_loss": ar_loss,
        "ar_accuracy": per_weight(ar.correct, ar_weight),
        "router_balance": balance,
        "router_z": z,
    }
    if loss.diffusion:
        previous = before_blocks(out.hidden.clean, batch.block_index, batch.block_start)
        hidden = align_logits(out.hidden.noisy, previous, cfg.logits_position)
        weight = block_weight(batch, loss)
        diffusion = entropy(hidden, batch.block_tokens, weight, loss.certainty > 0)
        diffusion_weight = diffusion.weight if totals is None else totals.diffusion
        diffusion_loss = per_weight(diffusion.loss, diffusion_weight)
        total = total + loss.diffusion * diffusion_loss
        if loss.certainty:
            parts["certainty"] = per_weight(diffusion.entropy, diffusion_weight)
            total = total + loss.certainty * parts["certainty"]
        parts |= {
            "diffusion_loss": diffusion_loss,
            "diffusion_accuracy": per_weight(diffusion.correct, diffusion_weight),
        }
        if out.stats.history_share is not None:
            parts["history_share"] = share * jnp.mean(out.stats.history_share)
    return total, {"loss": total, **parts}


def batch_totals(batch: Batch, loss: LossConfig, parts: int) -> Totals:
    """The totals of a batch in `parts` parts; its arrays may have further leading axes.

    Blocks that follow the model must have followed it (`on_policy.follow`).
    """
    diffusion = jnp.sum(block_weight(batch, loss))
    return Totals(jnp.sum(batch.target_weight[..., 1:]), diffusion, parts)


def block_weight(batch: Batch, loss: LossConfig) -> Float[Array, "*rows blocks block"]:
    """Weight of each block position's diffusion loss: masked or substituted ones of real blocks."""
    exists = (batch.block_n_valid > 0)[..., None]
    asked = exists & (batch.block_masked | (batch.block_shown != batch.block_tokens))
    weight = jnp.where(asked, batch.block_weight, 0.0)
    if loss.diffusion_weighting == "inverse_t":
        n = jnp.maximum(batch.block_n_valid, 1)[..., None].astype(jnp.float32)
        masks = jnp.sum(batch.block_masked.astype(jnp.float32), axis=-1, keepdims=True)
        weight = weight * n / jnp.maximum(masks, jnp.float32(1))
    return weight


def cross_entropy(
    params: Params,
    hidden: Float[Array, "rows *time width"],
    targets: Int[Array, "rows *time"],
    weight: Float[Array, "rows *time"],
    forbidden: Bool[Array, " vocab"],
    *,
    chunk: int,
    env: Env,
    certainty: bool = False,
) -> CrossEntropy:
    """Weighted cross entropy, `chunk` positions at a time, recomputed in the backward pass.

    With `certainty` also the weighted entropy of the positions whose best token is the target. On a
    mesh each part of the rows has chunks of its own, so no device sees another's.
    """
    ways = env.ways("rows", hidden.shape[0])
    n = targets.size // ways
    size = min(chunk, n)
    pads = ((0, 0), (0, -n % size))

    def chunked(x: Array, *inner: int) -> Array:  # [chunks, ways, size, ...]
        x = jnp.pad(x.reshape(ways, n, *inner), (*pads, *((0, 0) for _ in inner)))
        x = jnp.moveaxis(x.reshape(ways, -1, size, *inner), 1, 0)
        return env.constrain(x, None, "rows", None, *(None for _ in inner))

    @jax.checkpoint
    def part(args: tuple[Array, Array, Array]) -> CrossEntropy:
        hidden, targets, weight = args
        out = forbidden[None, None]
        logits = jnp.where(out, -jnp.inf, unembed(params, hidden))
        own = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        total = jax.nn.logsumexp(logits, axis=-1)
        loss = jnp.where(weight > 0, total - own, 0.0)
        correct = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
        entropy = jnp.zeros_like(loss)
        if certainty:
            finite = jnp.where(out, 0.0, logits)
            entropy = total - jnp.sum(jax.nn.softmax(logits, axis=-1) * finite, axis=-1)
        return CrossEntropy(
            jnp.sum(weight * loss),
            jnp.sum(weight * correct),
            jnp.sum(weight),
            jnp.sum(weight * correct * entropy),
        )

    parts = (chunked(hidden, hidden.shape[-1]), chunked(targets), chunked(weight))
    return jax.tree.map(jnp.sum, lax.map(part, parts))


def router_losses(stats: StackStats, cfg: ModelConfig) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean over layers of the balance term and the z term, over valid positions only.

    Balance is experts · sum_e f_e P_e with f_e the share of positions that use expert e and P_e its
    mean probability, per layer: pooling layers would hide one layer's collapse. Perfect: top_k.
    """
    r = stats.router
    n = jnp.maximum(jnp.sum(r.assigned, axis=(1, 2)) / cfg.moe.top_k, 1.0)  # positions, per layer
    used = jnp.sum(r.assigned, axis=1) / n[:, None]
    prob = jnp.sum(r.prob, axis=1) / n[:, None]
    balance = cfg.moe.num_experts * jnp.sum(lax.stop_gradient(used) * prob, axis=-1)
    return jnp.mean(balance), jnp.mean(jnp.sum(r.z, axis=1) / n)


def as_arrays(batch: Batch) -> Any:
    """The batch on the default device."""
    return jax.tree.map(jnp.asarray, batch)
