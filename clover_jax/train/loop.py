"""Runs that can be interrupted: pre-training, conversion of a checkpoint, fine-tuning.

A run lives in a folder of its own:

    run.json        what was asked for; a resumed run must ask for the same
    calibration.json  residuals of the block operator, before and after
    source/         not in pre-training: the Clover folder it started from, after calibration
    tokenizer/      pre-training from nothing only: trained on the first samples
    checkpoints/    orbax; parameters, optimiser, step
    log.jsonl       one line of metrics per logged step
    model/          the Hugging Face folder, written when the run is complete

Batches are pure functions of the step, so a resumed run takes the very same steps.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool

from clover_jax import checkpoint
from clover_jax.config import ModelConfig, canonical_json
from clover_jax.data import bpe, tasks
from clover_jax.data.pipeline import TaskBatches
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.loss import as_arrays, training_loss
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.transformer import Params, param_specs, restack, unstack
from clover_jax.params import initialise
from clover_jax.presets import PRESETS
from clover_jax.train.calibrate import Residuals, calibrate
from clover_jax.train.run_config import LOG_EVERY, RunConfig
from clover_jax.train.step import TrainState, init_state, train_step

ENV = Env(moe_tile=128)  # a batch gives every expert hundreds of rows
VALIDATION_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Progress:
    """One line of a run's log."""

    step: int
    steps: int
    metrics: dict[str, float]
    tokens_per_second: float
    seconds_left: float


Report = Callable[[Progress], None]
Evaluate = Callable[[ModelConfig, Params, Tokenizer], dict[str, float]]


class _Start(NamedTuple):
    """Where the steps begin."""

    cfg: ModelConfig
    params: Params
    files: Path  # tokenizer and other files that the model folder gets


def train(
    run: RunConfig,
    folder: Path,
    *,
    report: Report,
    calibrated: Callable[[Residuals], None] = lambda _: None,
    evaluate: Evaluate | None = None,
    save_seconds: float = 120.0,
) -> Path:
    """Do a run, or what is left of it.

    Args:
        run: what to do.
        folder: the run's own.
        report: called with every line of the log.
        calibrated: called with the residuals if the block operator was calibrated.
        evaluate: scores of a model, where `run.evaluation` asks for them.
        save_seconds: time between checkpoints.

    Returns:
        The model folder.

    Raises:
        CloverError: the start cannot be loaded, or the folder belongs to another run.
    """
    start = _base(run, folder) if run.kind == "pretrain" else _clover(run, folder, calibrated)
    return _run(run, folder, start, report, evaluate, save_seconds)


def _base(run: RunConfig, folder: Path) -> _Start:
    """A preset without block operator, mask token and coreset (a Qwen3.6 model), or a folder."""
    if run.start not in PRESETS:
        files = Path(run.start)
        if not files.is_dir():
            raise CloverError(
                f"start is {run.start!r}: expected a checkpoint folder or one of "
                f"{', '.join(PRESETS)}"
            )
        checkpoint.inspect(files).require_loadable()
        _claim(run, folder)
        cfg, params, _ = checkpoint.load(files, dtype="float32")
        return _Start(cfg, params, files)
    cfg = _base_of_preset(run.start)
    _claim(run, folder)
    files = folder / "tokenizer"
    if not (files / "tokenizer_config.json").exists():
        _train_tokenizer(run, cfg, files)
    return _Start(cfg, initialise(param_specs(cfg), jax.random.key(run.seed)), files)


def _base_of_preset(name: str) -> ModelConfig:
    preset = PRESETS[name]()
    cfg = preset.replace(bd_gdn=None, mask_token_id=None, **{"moe.coreset": None})
    if cfg.vocab_size < bpe.SMALLEST_VOCAB:
        raise CloverError(
            f"preset {name} has vocab_size {cfg.vocab_size}: expected at least "
            f"{bpe.SMALLEST_VOCAB}, to hold a tokenizer of bytes"
        )
    return cfg


def _clover(run: RunConfig, folder: Path, calibrated: Callable[[Residuals], None]) -> _Start:
    """A Clover folder, or a Qwen3.6 one with a block operator added; calibrated if asked for."""
    source = folder / "source"
    start = Path(run.start)
    if not source.exists():
        checkpoint.inspect(start).require_loadable()
    _claim(run, folder)
    if not source.exists():
        if checkpoint.inspect(start).require_loadable().bd_gdn is None:
            checkpoint.convert(start, folder / "uncalibrated", overwrite=True)
            start = folder / "uncalibrated"
        cfg, params, _ = checkpoint.load(start, dtype="float32")
        batches = TaskBatches(Tokenizer.load(start), run.data, block=cfg.block_length)
        if run.calibration_steps:
            examples = [batches.batch(step) for step in range(run.calibration_steps)]
            params, residuals = calibrate(params, examples, cfg=cfg, env=ENV)
            (folder / "calibration.json").write_text(residuals.to_json())
            calibrated(residuals)
        checkpoint.save(source, cfg, params, files_from=start)
        shutil.rmtree(folder / "uncalibrated", ignore_errors=True)
    cfg, params, _ = checkpoint.load(source, dtype="float32")
    return _Start(cfg, params, source)


def _claim(run: RunConfig, folder: Path) -> None:
    """Make the folder this run's own, or check that it is."""
    asked = canonical_json(run)
    path = folder / "run.json"
    if path.exists():
        if path.read_text() != asked:
            raise CloverError(
                f"{folder} holds another run (see {path}): repeat its settings to resume it, or "
                "choose another folder"
            )
    elif folder.exists() and not folder.is_dir():
        raise CloverError(f"{folder} is a file: choose another folder for the run")
    elif folder.exists() and any(folder.iterdir()):
        raise CloverError(f"{folder} is not empty and holds no run: choose another folder")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(asked)


def _train_tokenizer(run: RunConfig, cfg: ModelConfig, folder: Path) -> None:
    items = (tasks.item_at(run.data.mix, run.data.seed, "train", i) for i in range(8000))
    texts = (
        f"user\n{item.prompt}\nassistant\n\n{item.thinking}\n\n{item.answer}\n" for item in items
    )
    learnt = bpe.train_bpe(texts, cfg.vocab_size)
    bpe.write_tokenizer(folder, learnt, model_max_length=cfg.max_position_embeddings)


def _run(
    run: RunConfig,
    folder: Path,
    start: _Start,
    report: Report,
    evaluate: Evaluate | None,
    save_seconds: float,
) -> Path:
    cfg, params, files = start
    tokenizer = Tokenizer.load(files)
    env = dataclasses.replace(ENV, remat=run.remat)
    batches = TaskBatches(tokenizer, run.data, block=cfg.block_length)
    forbidden = np.arange(cfg.vocab_size) >= tokenizer.vocab_size
    if tokenizer.mask_id is not None:
        forbidden[tokenizer.mask_id] = True
    steps = _Steps(run, batches, cfg, env, jnp.asarray(forbidden))
    # Committed to a device as a restored state is, so that both take one compiled step.
    state = init_state(params if run.remat else unstack(params), run.optimiser)
    state = jax.device_put(state, jax.devices()[0])
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    _discard_unfinished(folder / "checkpoints")
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        state = _restore(manager, state)
        log = _Log(folder / "log.jsonl", int(state.step))
        saved = time.monotonic()
        for state, line in steps.take(state):  # noqa: B020 (the generator keeps the first)
            if evaluate is not None and _is_evaluated(run, line.step):
                line.metrics.update(evaluate(cfg, state.params, tokenizer))
            log.append(line.step, line.metrics)
            due = line.step == line.steps or time.monotonic() - saved > save_seconds
            try:
                report(line)
            except BaseException:  # an interrupt: keep what was reported
                due = True
                raise
            finally:
                if due:
                    manager.save(line.step, args=ocp.args.StandardSave(state))
                    saved = time.monotonic()
    final = steps.validate(state)
    report(Progress(run.optimiser.steps, run.optimiser.steps, final, 0.0, 0.0))
    log.append(run.optimiser.steps, final)
    model = folder / "model"
    checkpoint.save(
        model,
        cfg,
        restack(state.params, cfg),
        dtype="bfloat16",
        files_from=files,
        overwrite=True,
    )
    return model


def _is_evaluated(run: RunConfig, step: int) -> bool:
    e = run.evaluation
    return e is not None and (step % e.every == 0 or step == run.optimiser.steps)


def _discard_unfinished(folder: Path) -> None:
    """Removes checkpoints that have no commit mark: a crash or a cut-off copy left them."""
    for step in folder.glob("[0-9]*"):
        if step.name.isdigit() and not (step / "commit_success.txt").exists():
            shutil.rmtree(step)


def _restore(manager: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """The newest checkpoint, or the given state if there is none."""
    latest = manager.latest_step()
    if latest is None:
        return state
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    try:
        restored: Any = manager.restore(latest, args=ocp.args.StandardRestore(abstract))
        return restored
    except (ValueError, OSError) as error:
        raise CloverError(
            f"{manager.directory}/{latest} cannot be read: {error}; delete it to go on from the "
            "checkpoint before it"
        ) from None


class _Log:
    """A run's log without the lines that its steps from `step` on will write again."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(x for x in lines if _is_before(json.loads(x), step)))

    def append(self, step: int, metrics: dict[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


def _is_before(line: dict[str, Any], step: int) -> bool:
    return line["step"] <= step and "val_loss" not in line


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The steps of a run, and its validation."""

    run: RunConfig
    batches: TaskBatches
    cfg: ModelConfig
    env: Env
    forbidden: Bool[Array, " vocab"]

    def take(self, state: TrainState) -> Iterator[tuple[TrainState, Progress]]:
        """All remaining steps, `LOG_EVERY` at a time, with a line averaged over them."""
        optimiser = self.run.optimiser
        total = optimiser.steps
        pending: list[dict[str, Any]] = []
        tokens, began, first = 0, time.monotonic(), int(state.step)
        for step in range(first, total):
            batch = self.batches.batch(step)
            state, metrics = train_step(
                state,
                as_arrays(batch),
                self.forbidden,
                jnp.float32(optimiser.rate(step)),
                cfg=self.cfg,
                env=self.env,
                loss=self.run.loss,
                optimiser=optimiser.rule,
            )
            pending.append(metrics)
            tokens += int(batch.n_valid.sum())
            if (step + 1) % LOG_EVERY == 0 or step + 1 == total:
                # Read the device every `LOG_EVERY` steps only, so that it never waits for the host.
                read = jax.device_get(pending)
                mean = {k: float(np.mean([m[k] for m in read])) for k in read[0]}
                elapsed = time.monotonic() - began
                left = elapsed / (step + 1 - first) * (total - step - 1)
                line = Progress(step + 1, total, mean, tokens / elapsed, left)
                pending = []
                yield state, line

    def validate(self, state: TrainState) -> dict[str, float]:
        """Mean metrics of a few batches of the `val` split."""
        loss = jax.jit(training_loss, static_argnames=("cfg", "env", "loss"))
        batches = TaskBatches(
            self.batches.tokenizer, self.run.data, block=self.cfg.block_length, split="val"
        )
        read = [
            jax.device_get(
                loss(
                    state.params,
                    as_arrays(batches.batch(i)),
                    self.forbidden,
                    cfg=self.cfg,
                    env=self.env,
                    loss=self.run.loss,
                )[1]
            )
            for i in range(VALIDATION_BATCHES)
        ]
        return {f"val_{k}": float(np.mean([m[k] for m in read])) for k in read[0]}
