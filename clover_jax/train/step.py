"""One optimiser step, and the optimiser."""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, muon

from clover_jax.config import ModelConfig
from clover_jax.diffusion.corrupt import Batch
from clover_jax.diffusion.loss import LossConfig, training_loss
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.transformer import Params
from clover_jax.params import named_leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """Warm-up, a constant rate, and a linear decay to 0 over the last part.

    Attributes:
        kind: `muon` orthogonalises the momentum of projections and experts (arXiv 2502.16982, with
            its RMS matched to AdamW's so that both kinds share one rate) and leaves the rest to
            AdamW; `adamw` for everything.
        learning_rate: peak.
        steps: of the whole run.
        warmup: steps of linear warm-up.
        decay_share: share of the steps in the final decay.
        weight_decay: on matrices only; norms, decays and other vectors have none.
        clip: largest global gradient norm.
    """

    kind: Literal["muon", "adamw"] = "muon"
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

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        decay = max(1, round(self.decay_share * self.steps))
        left = min(1.0, (self.steps - step) / decay)
        risen = min(1.0, step / self.warmup) if self.warmup else 1.0
        return self.learning_rate * max(0.0, min(left, risen))

    def make(self, rate: Array | float) -> optax.GradientTransformation:
        """The optimiser at a learning rate, which may be traced: no state depends on it."""
        if self.kind == "adamw":
            rule = optax.adam(rate, b1=0.9, b2=0.95)
        else:
            rule = muon(
                rate,
                adam_b1=0.9,
                adam_b2=0.95,
                consistent_rms=0.2,
                muon_weight_dimension_numbers=_muon_dimensions,
            )
        # Decoupled decay of our own: optax's muon would give it to norms and decays, too.
        decay = optax.add_decayed_weights(-rate * self.weight_decay, mask=_is_matrix)
        return optax.chain(optax.clip_by_global_norm(self.clip), rule, decay)

    @property
    def rule(self) -> "OptimiserConfig":
        """What a compiled step depends on: runs of other lengths and rates share their programs."""
        return dataclasses.replace(self, learning_rate=1.0, steps=1, warmup=0, decay_share=0.0)


class TrainState(NamedTuple):
    """What a run carries; with the configuration it determines all later steps."""

    params: Params
    optimiser: Any
    step: Int[Array, ""]


def init_state(params: Params, optimiser: OptimiserConfig) -> TrainState:
    """State before the first step."""
    return TrainState(params, optimiser.make(0.0).init(params), jnp.int32(0))  # pyright: ignore


@functools.partial(
    jax.jit, static_argnames=("cfg", "env", "loss", "optimiser"), donate_argnames=("state",)
)
def train_step(
    state: TrainState,
    batch: Batch,
    forbidden: Array,
    rate: Float[Array, ""],
    *,
    cfg: ModelConfig,
    env: Env,
    loss: LossConfig,
    optimiser: OptimiserConfig,
) -> tuple[TrainState, dict[str, Array]]:
    """Gradient and update; the metrics are those of `training_loss` and the gradient norm.

    `rate` is the learning rate of this step; `optimiser` is an `OptimiserConfig.rule`.
    """
    objective = functools.partial(
        training_loss, batch=batch, forbidden=forbidden, cfg=cfg, env=env, loss=loss
    )
    (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its scalars' dtypes
        updates, inner = optimiser.make(rate).update(grads, state.optimiser, state.params)  # pyright: ignore
        params: Any = optax.apply_updates(state.params, updates)  # pyright: ignore[reportArgumentType]
        metrics["gradient_norm"] = optax.tree.norm(grads)
    return TrainState(params, inner, state.step + 1), metrics


def _is_matrix(params: Any) -> Any:
    """True for leaves that weight decay acts on: projections and embeddings."""
    decayed = ("proj", "embed_tokens", "lm_head", "gate", "in_proj")
    names = named_leaves(params)
    flags = {name: any(part in name.rsplit(".", 1)[-1] for part in decayed) for name in names}
    return jax.tree.unflatten(jax.tree.structure(params), list(flags.values()))


# Input and output axes of the weights that muon takes, counted from the end: stacked layers and
# experts are batches of matrices.
_LAST_TWO = MuonDimensionNumbers(-2, -1)
_INTO_HEADS = MuonDimensionNumbers(-3, (-2, -1))
_MUON = {
    "in_proj_qkv": _LAST_TWO,
    "in_proj_z": _LAST_TWO,
    "out_proj": _LAST_TWO,
    "q_proj": _INTO_HEADS,
    "k_proj": _INTO_HEADS,
    "v_proj": _INTO_HEADS,
    "o_proj": MuonDimensionNumbers((-3, -2), -1),
    "gate_up_proj": _LAST_TWO,
    "gate_proj": _LAST_TWO,
    "up_proj": _LAST_TWO,
    "down_proj": _LAST_TWO,
}


def _muon_dimensions(params: Any) -> Any:
    """Per leaf, the axes muon works on, or None for AdamW."""
    names = named_leaves(params)
    kinds = [_MUON.get(name.rsplit(".", 1)[-1]) for name in names]
    return jax.tree.unflatten(jax.tree.structure(params), kinds)
