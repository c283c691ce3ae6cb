"""One optimiser step, and the optimiser."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from clover_jax.config import ModelConfig
from clover_jax.diffusion.corrupt import Batch
from clover_jax.diffusion.loss import LossConfig, training_loss
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.transformer import Params
from clover_jax.params import named_leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """AdamW with warm-up, a constant rate, and a linear decay to 0 over the last part.

    Attributes:
        learning_rate: peak.
        steps: of the whole run.
        warmup: steps of linear warm-up.
        decay_share: share of the steps in the final decay.
        weight_decay: on matrices only; norms, decays and other vectors have none.
        clip: largest global gradient norm.
    """

    learning_rate: float
    steps: int
    warmup: int = 50
    decay_share: float = 0.3
    weight_decay: float = 0.05
    clip: float = 1.0

    def __post_init__(self) -> None:
        ranges = {  # smallest allowed value, or None for any positive one; largest
            "learning_rate": (None, math.inf),
            "steps": (1, math.inf),
            "warmup": (0, math.inf),
            "decay_share": (0, 1),
            "weight_decay": (0, math.inf),
            "clip": (None, math.inf),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not (value > 0 if least is None else value >= least) or not value <= most:
                raise CloverError(
                    f"optimiser {name} is {value}: expected a number "
                    f"{'above 0' if least is None else f'from {least}'}"
                    f"{'' if most == math.inf else f' to {most}'}"
                )

    def schedule(self) -> optax.Schedule:
        """Learning rate by step."""
        decay = max(1, round(self.decay_share * self.steps))
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, self.learning_rate, max(1, self.warmup)),
                optax.constant_schedule(self.learning_rate),
                optax.linear_schedule(self.learning_rate, 0.0, decay),
            ],
            [self.warmup, max(self.warmup, self.steps - decay)],
        )

    def make(self) -> optax.GradientTransformation:
        """The optimiser."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(
                self.schedule(), b1=0.9, b2=0.95, weight_decay=self.weight_decay, mask=_is_matrix
            ),
        )


class TrainState(NamedTuple):
    """What a run carries; with the configuration it determines all later steps."""

    params: Params
    optimiser: Any
    step: Int[Array, ""]


def init_state(params: Params, optimiser: OptimiserConfig) -> TrainState:
    """State before the first step."""
    return TrainState(params, optimiser.make().init(params), jnp.int32(0))  # pyright: ignore


@functools.partial(
    jax.jit, static_argnames=("cfg", "env", "loss", "optimiser"), donate_argnames=("state",)
)
def train_step(
    state: TrainState,
    batch: Batch,
    forbidden: Array,
    *,
    cfg: ModelConfig,
    env: Env,
    loss: LossConfig,
    optimiser: OptimiserConfig,
) -> tuple[TrainState, dict[str, Array]]:
    """Gradient and update; the metrics are those of `training_loss` and the gradient norm."""
    objective = functools.partial(
        training_loss, batch=batch, forbidden=forbidden, cfg=cfg, env=env, loss=loss
    )
    (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its scalars' dtypes
        updates, inner = optimiser.make().update(grads, state.optimiser, state.params)  # pyright: ignore
        params: Any = optax.apply_updates(state.params, updates)  # pyright: ignore[reportArgumentType]
        metrics["gradient_norm"] = optax.tree.norm(grads)
    return TrainState(params, inner, state.step + 1), metrics


def _is_matrix(params: Any) -> Any:
    """True for leaves that weight decay acts on: projections and embeddings."""
    decayed = ("proj", "embed_tokens", "lm_head", "gate", "in_proj")
    names = named_leaves(params)
    flags = {name: any(part in name.rsplit(".", 1)[-1] for part in decayed) for name in names}
    return jax.tree.unflatten(jax.tree.structure(params), list(flags.values()))
