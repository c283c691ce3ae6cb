"""What a run would do and need, without doing it: shapes, sizes, and the compiler's memory."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clover_jax import checkpoint
from clover_jax.config import ModelConfig
from clover_jax.diffusion.corrupt import make_batch
from clover_jax.model import lora
from clover_jax.model.transformer import param_specs, unstack
from clover_jax.params import abstract, count, num_bytes
from clover_jax.presets import PRESETS
from clover_jax.train.loop import ENV, base_of_preset
from clover_jax.train.run_config import RunConfig
from clover_jax.train.step import init_state, train_step


class Shapes(NamedTuple):
    """One row size of a batch."""

    clean: tuple[int, int]  # rows, tokens
    noisy: tuple[int, int, int] | None  # rows, blocks of all views, block; None without blocks


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run's sizes; bytes are of one device that holds everything.

    Attributes:
        total: parameters of the model.
        trained: numbers that are trained.
        shapes: of every row size.
        weights_bytes: what is trained, and what an adapter leaves as it is.
        optimiser_bytes: its state, and an average of the weights.
        work_bytes: activations, gradients and other temporaries of a step of the largest row size,
            by the compiler.
        flops: of that step, by the compiler (loop bodies count once).
        steps: of the run.
        largest_tokens: clean tokens of a full batch of the largest row size.
    """

    total: int
    trained: int
    shapes: tuple[Shapes, ...]
    weights_bytes: int
    optimiser_bytes: int
    work_bytes: int
    flops: float
    steps: int
    largest_tokens: int


def plan(run: RunConfig) -> Plan:
    """Compile a step of the largest row size for this machine, and read off what it needs.

    Raises:
        CloverError: the start does not exist or cannot be loaded.
    """
    cfg = _config(run)
    params: Any = abstract(param_specs(cfg.replace(dtype="float32")))
    weights = params if run.remat else jax.eval_shape(unstack, params)
    adapt = lambda w: lora.init(w, run.lora, jax.random.key(0))  # pyright: ignore
    trained = weights if run.lora is None else jax.eval_shape(adapt, weights)
    state = jax.eval_shape(lambda t: init_state(t, run.optimiser), trained)
    rows, shapes, batch = run.rows, [], None
    for time, blocks in rows.buckets[-1:] if rows.packed else rows.buckets:
        batch = make_batch(
            [()] * rows.rows, time=time, blocks=blocks, block=cfg.block_length, pad_id=0, seed=0,
            epoch=0, noise=rows.noise, packed=rows.packed,
        )  # fmt: skip
        noisy = batch.block_tokens.shape if run.loss.diffusion else None
        shapes.append(Shapes(batch.tokens.shape, noisy))
    compiled = train_step.lower(
        state,
        jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch)),
        jax.ShapeDtypeStruct((cfg.vocab_size,), jnp.bool_),
        jax.ShapeDtypeStruct((), jnp.float32),
        None if run.lora is None else weights,
        cfg=cfg,
        env=dataclasses.replace(ENV, remat=run.remat),
        loss=run.loss,
        optimiser=run.optimiser.rule,
        lora=run.lora,
        accumulate=run.accumulate,
        compute_dtype=run.compute_dtype,
    ).compile()
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis()
    inner = num_bytes((state.optimiser, state.ema))
    kept = num_bytes(state.params) + (num_bytes(weights) if run.lora is not None else 0)
    return Plan(
        total=count(weights),
        trained=count(state.params),
        shapes=tuple(shapes),
        weights_bytes=kept,
        optimiser_bytes=inner,
        work_bytes=memory.temp_size_in_bytes,
        flops=cost["flops"],
        steps=run.optimiser.steps,
        largest_tokens=shapes[-1].clean[0] * shapes[-1].clean[1],
    )


def _config(run: RunConfig) -> ModelConfig:
    """The config of the run's model; nothing is loaded."""
    if run.kind == "pretrain" and run.start in PRESETS:
        return base_of_preset(run.start)
    cfg = checkpoint.inspect(Path(run.start)).require_loadable()
    if run.kind == "pretrain" or cfg.bd_gdn is not None:
        return cfg
    mask = cfg.vocab_size - 1 if cfg.mask_token_id is None else cfg.mask_token_id
    return checkpoint.clover_config(cfg, mask)
