"""One optimiser step, and the optimiser."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, muon

from clover_jax.config import ModelConfig
from clover_jax.diffusion.corrupt import Batch
from clover_jax.diffusion.loss import LossConfig, Totals, batch_totals, training_loss
from clover_jax.diffusion.on_policy import follow
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.leaves import choose, known_kinds, leaf_kind, matrix_axes
from clover_jax.model.lora import Adapter, LoRAConfig, merge
from clover_jax.model.placement import constrain_state
from clover_jax.model.transformer import Params, param_specs
from clover_jax.params import named_leaves, path_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """Warm-up, then a rate that falls to 0; clipping, decay, averaging.

    Attributes:
        kind: `muon` orthogonalises the momentum of projections and experts (arXiv 2502.16982, with
            its RMS matched to AdamW's so that both kinds share one rate) and leaves the rest to
            AdamW; `adamw` for everything.
        learning_rate: peak.
        steps: of the whole run.
        schedule: after the warm-up: `linear` keeps the rate and lets it fall in a line over the
            last part, `cosine` lets it fall from its peak on in half a cosine.
        warmup: steps of linear warm-up.
        decay_share: share of the steps in the final decay (`linear` only).
        weight_decay: on matrices only; norms, decays and other vectors have none.
        clip: largest global gradient norm.
        ema: the state also holds an average of what is trained, in float32: after each step
            ema · average + (1 - ema) · new. None: no average.
        freeze: leaves that stay as they are in the first `freeze_steps` steps, named as in
            `leaves.choose`: ("mlp.gate",) is the router. They get neither gradient nor decay.
        freeze_steps: how many steps that is.
    """

    kind: Literal["muon", "adamw"] = "muon"
    learning_rate: float
    steps: int
    schedule: Literal["linear", "cosine"] = "linear"
    warmup: int = 50
    decay_share: float = 0.3
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float | None = None
    freeze: tuple[str, ...] = ()
    freeze_steps: int = 0

    def __post_init__(self) -> None:
        ranges = {  # smallest allowed value, or None for any positive one; largest
            "learning_rate": (None, math.inf),
            "steps": (1, math.inf),
            "warmup": (0, math.inf),
            "decay_share": (0, 1),
            "weight_decay": (0, math.inf),
            "clip": (None, math.inf),
            "freeze_steps": (0, math.inf),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not (value > 0 if least is None else value >= least) or not value <= most:
                raise CloverError(
                    f"optimiser {name} is {value}: expected a number "
                    f"{'above 0' if least is None else f'from {least}'}"
                    f"{'' if most == math.inf else f' to {most}'}"
                )
        if self.ema is not None and not 0 <= self.ema < 1:
            raise CloverError(
                f"optimiser ema is {self.ema}: expected a number from 0 to below 1, or none"
            )
        if bool(self.freeze) != bool(self.freeze_steps):
            raise CloverError(
                f"optimiser freeze is {self.freeze} and freeze_steps {self.freeze_steps}: expected "
                "both or neither"
            )
        choose(self.freeze, known_kinds(), "optimiser freeze")

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        risen = min(1.0, step / self.warmup) if self.warmup else 1.0
        if self.schedule == "cosine":
            past = (step - self.warmup) / max(1, self.steps - self.warmup)
            left = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, past))))
        else:
            decay = max(1, round(self.decay_share * self.steps))
            left = min(1.0, (self.steps - step) / decay)
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
        return dataclasses.replace(
            self, learning_rate=1.0, steps=1, schedule="linear", warmup=0, decay_share=0.0
        )


class TrainState(NamedTuple):
    """What a run carries; with the configuration it determines all later steps."""

    params: Params | Adapter  # what is trained
    optimiser: Any
    step: Int[Array, ""]
    ema: Any = None  # like params, float32; None without an average


def init_state(params: Params | Adapter, optimiser: OptimiserConfig) -> TrainState:
    """State before the first step.

    Raises:
        CloverError: the optimiser freezes a leaf that is not trained.
    """
    choose(optimiser.freeze, {_trained_kind(n) for n in named_leaves(params)}, "optimiser freeze")
    ema = None
    if optimiser.ema is not None:  # copies: a step donates both
        ema = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
    inner = optimiser.make(0.0).init(params)  # pyright: ignore[reportArgumentType]
    return TrainState(params, inner, jnp.int32(0), ema)


@functools.partial(
    jax.jit,
    static_argnames=("cfg", "env", "loss", "optimiser", "lora", "accumulate", "compute_dtype"),
    donate_argnames=("state",),
)
def train_step(
    state: TrainState,
    batch: Batch,
    forbidden: Array,
    rate: Float[Array, ""],
    frozen: Params | None = None,
    *,
    cfg: ModelConfig,
    env: Env,
    loss: LossConfig,
    optimiser: OptimiserConfig,
    lora: LoRAConfig | None = None,
    accumulate: int = 1,
    compute_dtype: Literal["float32", "bfloat16"] | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Gradient and update; the metrics are those of `training_loss` and the gradient norm.

    Args:
        state: donated. It holds weights, or with `lora` an adapter.
        batch: from `corrupt.make_batch`.
        forbidden: ids that no position can take.
        rate: learning rate of this step.
        frozen: with `lora`, the weights that the adapter changes; they are kept.
        cfg: the model.
        env: where and how.
        loss: weights of its terms.
        optimiser: an `OptimiserConfig.rule`.
        lora: the adapter's config; None trains all weights.
        accumulate: the rows run in this many parts, one after the other, for less memory. The loss
            is that of the whole batch (T2), but the router terms are means over the parts.
        compute_dtype: of the pass; what is trained keeps its own dtype (float32 masters). Norms,
            router, decays and block-softmax parameters stay float32. None: as the weights are.

    Raises:
        CloverError: weights without their adapter's config or the reverse, or rows that do not
            divide into the parts.
    """
    if (lora is None) != (frozen is None):
        raise CloverError("a step takes frozen weights and lora together, or neither of them")
    if compute_dtype is not None:
        cfg = cfg.replace(dtype=compute_dtype)

    def weights(trained: Any) -> Params:
        params = trained if lora is None or frozen is None else merge(frozen, trained, lora)
        return params if compute_dtype is None else _cast(params, cfg)

    def gradient(batch: Batch, loss: LossConfig, totals: Totals | None) -> tuple[Any, Any]:
        objective = lambda trained: training_loss(
            weights(trained), batch, forbidden, cfg=cfg, env=env, loss=loss, totals=totals
        )
        (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        return metrics, grads

    if accumulate == 1:
        metrics, grads = gradient(batch, loss, None)
    else:
        parts = _split_rows(batch, accumulate)
        if loss.diffusion and loss.follow_above is not None:  # the totals are those of its masks
            params, threshold = weights(state.params), loss.follow_above
            parts = lax.map(
                lambda b: follow(params, b, forbidden, threshold=threshold, cfg=cfg, env=env), parts
            )
            loss = dataclasses.replace(loss, follow_above=None)
        totals = batch_totals(parts, loss, accumulate)
        metrics, grads = _sum_over(lambda part: gradient(part, loss, totals), parts)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    grads = _held_back(grads, state.step, optimiser)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its scalars' dtypes
        updates, inner = optimiser.make(rate).update(grads, state.optimiser, state.params)  # pyright: ignore
        updates = _held_back(updates, state.step, optimiser)
        params: Any = optax.apply_updates(state.params, updates)  # pyright: ignore[reportArgumentType]
        metrics["gradient_norm"] = optax.tree.norm(grads)
    new = TrainState(params, inner, state.step + 1, _averaged(state.ema, params, optimiser))
    return constrain_state(new, cfg, env), metrics


def _split_rows(batch: Batch, parts: int) -> Any:
    """The batch in parts, on a new leading axis; part i has the rows i, i + parts, ...

    Not runs of rows: those that are spread over devices stay where they are.
    """
    rows = batch.tokens.shape[0]
    if parts < 1 or rows % parts:
        raise CloverError(f"accumulate is {parts}: expected a divisor of the batch's {rows} rows")
    split = lambda a: jnp.swapaxes(a.reshape(rows // parts, parts, *a.shape[1:]), 0, 1)
    return jax.tree.map(split, batch)


def _sum_over(of: Callable[[Any], Any], parts: Any) -> Any:
    """The sum of a tree over the parts, in float32, one part at a time."""
    shapes = jax.eval_shape(of, jax.tree.map(lambda a: a[0], parts))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)
    add = lambda total, part: (
        jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, of(part)),
        None,
    )
    return lax.scan(add, zero, parts)[0]


def _cast(params: Params, cfg: ModelConfig) -> Params:
    """The weights, stacked or not, in the dtypes of the config's specs."""
    dtypes = {leaf_kind(n): s.dtype for n, s in named_leaves(param_specs(cfg)).items()}
    return jax.tree_util.tree_map_with_path(
        lambda path, p: p.astype(dtypes[leaf_kind(path_name(path))]), params
    )


def _held_back(tree: Any, step: Int[Array, ""], optimiser: OptimiserConfig) -> Any:
    """Gradients or updates, zero where a leaf is still frozen."""
    if not optimiser.freeze:
        return tree
    kinds = {_trained_kind(n) for n in named_leaves(tree)}
    frozen = choose(optimiser.freeze, kinds, "optimiser freeze")
    live = step >= optimiser.freeze_steps

    def one(path: tuple[Any, ...], leaf: Array) -> Array:
        if _trained_kind(path_name(path)) not in frozen:
            return leaf
        return jnp.where(live, leaf, jnp.zeros((), leaf.dtype))

    return jax.tree_util.tree_map_with_path(one, tree)


def _averaged(ema: Any, params: Any, optimiser: OptimiserConfig) -> Any:
    if optimiser.ema is None:
        return None
    old, new = jnp.float32(optimiser.ema), jnp.float32(1 - optimiser.ema)
    return jax.tree.map(lambda e, p: old * e + new * p.astype(jnp.float32), ema, params)


def _trained_kind(path: str) -> str:
    """The kind of the weight that a trained leaf is, or that an adapter's leaf changes."""
    return leaf_kind(path).removesuffix(".lora_A").removesuffix(".lora_B")


def _is_matrix(params: Any) -> Any:
    """True for leaves that weight decay acts on: projections, embeddings, adapters' factors."""
    decayed = ("proj", "embed_tokens", "lm_head", "gate", "in_proj", "lora_")
    names = named_leaves(params)
    flags = {name: any(part in name.rsplit(".", 1)[-1] for part in decayed) for name in names}
    return jax.tree.unflatten(jax.tree.structure(params), list(flags.values()))


_NOT_MUON = ("lm_head", "in_proj_a", "in_proj_b", "shared_expert_gate")


def _muon_dimensions(params: Any) -> Any:
    """Per leaf, the axes muon works on, or None for AdamW."""
    axes = [_muon_axes(name) for name in named_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), axes)


def _muon_axes(path: str) -> MuonDimensionNumbers | None:
    axes = matrix_axes(path)
    if axes is None or path.endswith(_NOT_MUON):
        return None
    ends = tuple(range(-sum(axes), 0))
    return MuonDimensionNumbers(ends[: axes.inputs], ends[axes.inputs :])
