"""Runs that can be interrupted: pre-training, conversion of a checkpoint, fine-tuning.

A run lives in a folder of its own:

    run.json        what was asked for; a resumed run must ask for the same
    calibration.json  residuals of the block operator, before and after
    source/         not in pre-training: the Clover folder it started from, after calibration
    tokenizer/      pre-training from nothing only: trained on the first samples
    checkpoints/    orbax; parameters, optimiser, step, position in the data
    log.jsonl       one line of metrics per logged step
    adapter/        LoRA only: what was trained, as a PEFT folder
    model/          the Hugging Face folder, written when the run is complete; with an average of
                    the weights if the optimiser keeps one

Batches are pure functions of the step, so a resumed run takes the very same steps.
"""

import dataclasses
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool

from clover_jax import checkpoint
from clover_jax.config import ModelConfig, canonical_json
from clover_jax.data import bpe, tasks
from clover_jax.data.pipeline import Batches, TaskBatches
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import forbidden_ids
from clover_jax.diffusion.loss import training_loss
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.files import whole_file
from clover_jax.model import lora
from clover_jax.model.placement import (
    first_process_first,
    first_process_says,
    initialised,
    on_host,
    place,
    place_rows,
    replicate,
    to_host,
)
from clover_jax.model.transformer import Params, restack, unstack
from clover_jax.presets import PRESETS
from clover_jax.train.calibrate import Residuals, calibrate
from clover_jax.train.run_config import LOG_EVERY, RunConfig
from clover_jax.train.step import TrainState, init_state, train_step

MOE_TILE = 128  # a batch gives every expert hundreds of rows
MOE_CHUNK = 2048  # tokens of a row: a device may get all that its group holds
ENV = Env(moe_tile=MOE_TILE, moe_chunk=MOE_CHUNK)
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
    lost: Callable[[Counter[str]], None] = lambda _: None,
    evaluate: Evaluate | None = None,
    save_seconds: float = 120.0,
    env: Env = ENV,
) -> Path:
    """Do a run, or what is left of it; the mesh may be another one than before.

    Where a job has several processes, all of them call this with one mesh over all devices and one
    folder on a file system that they share; the first one writes it.

    Args:
        run: what to do.
        folder: the run's own.
        report: called with every line of the log.
        calibrated: called with the residuals if the block operator was calibrated.
        lost: called with what of the traces the run does not read, by reason, if it is anything.
        evaluate: scores of a model, where `run.evaluation` asks for them.
        save_seconds: time between checkpoints.
        env: where to run; how to rematerialise is the run's own.

    Returns:
        The model folder.

    Raises:
        CloverError: the start cannot be loaded, or the folder belongs to another run.
    """
    env = dataclasses.replace(env, remat=run.remat)
    if run.kind == "pretrain":
        start = _base(run, folder, env)
    else:
        start = _clover(run, folder, env, calibrated)
    return _run(run, folder, start, report, lost, evaluate, save_seconds, env)


def _base(run: RunConfig, folder: Path, env: Env) -> _Start:
    """A preset without block operator, mask token and coreset (a Qwen3.6 model), or a folder."""
    if run.start not in PRESETS:
        files = Path(run.start)
        if not files.is_dir():
            raise CloverError(
                f"start is {run.start!r}: expected a checkpoint folder or one of "
                f"{', '.join(PRESETS)}"
            )
        _check_data(run, files)
        _claim(run, folder)
        cfg, params, _ = checkpoint.load(files, dtype="float32", env=env)
        return _Start(cfg, params, files)
    if run.data is None:
        raise CloverError(
            f"a model from nothing ({run.start}) gets its tokenizer from the tasks: expected data, "
            "not traces"
        )
    cfg = base_of_preset(run.start)
    run.data.noise.every_length(cfg.block_length)
    _claim(run, folder)
    files = folder / "tokenizer"
    with first_process_first() as first:
        if first and not (files / "tokenizer_config.json").exists():
            _train_tokenizer(run, cfg, files)
    return _Start(cfg, initialised(cfg, _key(run), env), files)


def base_of_preset(name: str) -> ModelConfig:
    """The config of a preset's autoregressive base.

    Raises:
        CloverError: its vocabulary cannot hold a tokenizer of bytes.
    """
    preset = PRESETS[name]()
    cfg = preset.replace(bd_gdn=None, mask_token_id=None, **{"moe.coreset": None})
    if cfg.vocab_size < bpe.SMALLEST_VOCAB:
        raise CloverError(
            f"preset {name} has vocab_size {cfg.vocab_size}: expected at least "
            f"{bpe.SMALLEST_VOCAB}, to hold a tokenizer of bytes"
        )
    return cfg


def _clover(
    run: RunConfig, folder: Path, env: Env, calibrated: Callable[[Residuals], None]
) -> _Start:
    """A Clover folder, or a Qwen3.6 one with a block operator added; calibrated if asked for."""
    source = folder / "source"
    if not source.exists():
        _check_data(run, Path(run.start))
    _claim(run, folder)
    with first_process_first() as first:
        if first and not source.exists():
            _make_source(run, folder, source, calibrated)
    cfg, params, _ = checkpoint.load(source, dtype="float32", env=env)
    return _Start(cfg, params, source)


def _make_source(
    run: RunConfig, folder: Path, source: Path, calibrated: Callable[[Residuals], None]
) -> None:
    """The folder that a conversion starts from; it is made on one device."""
    start = Path(run.start)
    if checkpoint.inspect(start).require_loadable().bd_gdn is None:
        checkpoint.convert(start, folder / "uncalibrated", overwrite=True)
        start = folder / "uncalibrated"
    cfg, params, _ = checkpoint.load(start, dtype="float32")
    residuals = None
    if run.calibration_steps:
        batches = _batches(run, Tokenizer.load(start), cfg, "train")
        examples = [batches.batch(step) for step in range(run.calibration_steps)]
        params, residuals = calibrate(params, examples, cfg=cfg, env=ENV)
        (folder / "calibration.json").write_text(residuals.to_json())
    checkpoint.save(source, cfg, params, files_from=start)
    shutil.rmtree(folder / "uncalibrated", ignore_errors=True)
    if residuals is not None:
        calibrated(residuals)


def _claim(run: RunConfig, folder: Path) -> None:
    """Make the folder this run's own, or check that it is."""
    with first_process_first() as first:
        if first:
            _claim_alone(run, folder)


def _claim_alone(run: RunConfig, folder: Path) -> None:
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
    elif folder.exists() and any(not p.match("run.json.*.part") for p in folder.iterdir()):
        raise CloverError(f"{folder} is not empty and holds no run: choose another folder")
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CloverError(f"cannot make the folder {folder}: {error.strerror}") from None
        with whole_file(path) as building:
            building.write_text(asked)


def _train_tokenizer(run: RunConfig, cfg: ModelConfig, folder: Path) -> None:
    assert run.data is not None  # `_base` has checked it
    mix, seed = run.data.mix, run.data.seed
    items = (tasks.item_at(mix, seed, "train", i) for i in range(8000))
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
    lost: Callable[[Counter[str]], None],
    evaluate: Evaluate | None,
    save_seconds: float,
    env: Env,
) -> Path:
    cfg, params, files = start
    tokenizer = Tokenizer.load(files)
    batches = _batches(run, tokenizer, cfg, "train")
    if batches.lost:
        lost(batches.lost)
    forbidden = forbidden_ids(cfg, tokenizer)
    # Committed to devices as a restored state is, so that both take one compiled step.
    own = lambda tree: place(tree, cfg, env)
    weights = params if run.remat or env.mesh is not None else unstack(params)
    frozen = None if run.lora is None else own(weights)
    trained = weights if run.lora is None else lora.init(weights, run.lora, _key(run))
    steps = _Steps(run, batches, tokenizer, cfg, env, replicate(forbidden, env), frozen)
    state = own(jax.jit(init_state, static_argnums=1)(trained, run.optimiser))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with first_process_first() as first:
        if first:
            _discard_unfinished(folder / "checkpoints")
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        state = _restore(manager, state, batches)
        log = _Log(folder / "log.jsonl", int(to_host(state.step, env)))
        saved = time.monotonic()
        for state, line in steps.take(state):  # noqa: B020 (the generator keeps the first)
            if evaluate is not None and _is_evaluated(run, line.step):
                line.metrics.update(evaluate(cfg, steps.weights(state), tokenizer))
            log.append(line.step, line.metrics)
            late = first_process_says(time.monotonic() - saved > save_seconds)
            due = line.step == line.steps or late
            try:
                report(line)
            except BaseException:  # an interrupt: keep what was reported
                # Several processes may be interrupted at different lines, and save together only.
                due = jax.process_count() == 1
                raise
            finally:
                if due:
                    data = ocp.args.JsonSave(batches.get_state())
                    kept = ocp.args.Composite(state=ocp.args.StandardSave(state), data=data)
                    manager.save(line.step, args=kept)
                    saved = time.monotonic()
    final = steps.validate(state)
    if final:
        report(Progress(run.optimiser.steps, run.optimiser.steps, final, 0.0, 0.0))
        log.append(run.optimiser.steps, final)
    if run.lora is not None:
        adapter = jax.tree.map(on_host, state.params if state.ema is None else state.ema)
        with first_process_first() as first:
            if first:
                checkpoint.save_adapter(
                    folder / "adapter", cfg, adapter, run.lora, base=run.start, overwrite=True
                )
    model = folder / "model"
    weights = restack(steps.weights(state), cfg)
    checkpoint.save(model, cfg, weights, dtype="bfloat16", files_from=files, overwrite=True)
    return model


_merged = jax.jit(lora.merge, static_argnames="lora")


def _key(run: RunConfig) -> Array:
    return jax.random.key(run.seed)


def _is_evaluated(run: RunConfig, step: int) -> bool:
    e = run.evaluation
    return e is not None and (step % e.every == 0 or step == run.optimiser.steps)


def _discard_unfinished(folder: Path) -> None:
    """Removes checkpoints that have no commit mark: a crash or a cut-off copy left them."""
    for step in folder.glob("[0-9]*"):
        if step.name.isdigit() and not (step / "commit_success.txt").exists():
            shutil.rmtree(step)


def _batches(run: RunConfig, tokenizer: Tokenizer, cfg: ModelConfig, split: str) -> Batches:
    if run.data is not None:
        return TaskBatches(tokenizer, run.data, block=cfg.block_length, split=split)
    assert run.traces is not None
    from clover_jax.data.trace_batches import TraceBatches  # grain, of the extra `train`

    return TraceBatches(tokenizer, run.traces, block=cfg.block_length, split=split)


def _check_data(run: RunConfig, start: Path) -> None:
    """Raises what is wrong with a folder or with the run's files before anything is written."""
    cfg = checkpoint.inspect(start).require_loadable()
    only_train = run.traces is not None and run.traces.val is None
    for split in ("train",) if only_train else ("train", "val"):
        _batches(run, Tokenizer.load(start), cfg, split)


def _restore(manager: ocp.CheckpointManager, state: TrainState, batches: Batches) -> TrainState:
    """The newest checkpoint, or the given state if there is none; the data goes to its position."""
    latest = manager.latest_step()
    if latest is None:
        return state
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    try:
        kept = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()
        )
        restored: Any = manager.restore(latest, args=kept)
    except (ValueError, OSError) as error:
        raise CloverError(
            f"{manager.directory}/{latest} cannot be read: {error}; delete it to go on from the "
            "checkpoint before it"
        ) from None
    batches.set_state(restored.data)
    return restored.state


class _Log:
    """A run's log without the lines that its steps from `step` on will write again."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        if jax.process_index():
            return
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A run that was killed may have left a part of its last line.
        whole = (line for line in lines if line.endswith("\n"))
        with whole_file(path) as building:
            building.write_text("".join(x for x in whole if _is_before(json.loads(x), step)))

    def append(self, step: int, metrics: dict[str, float]) -> None:
        if jax.process_index():
            return
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


def _is_before(line: dict[str, Any], step: int) -> bool:
    return line["step"] <= step and "val_loss" not in line


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The steps of a run, and its validation."""

    run: RunConfig
    batches: Batches
    tokenizer: Tokenizer
    cfg: ModelConfig
    env: Env
    forbidden: Bool[Array, " vocab"]
    frozen: Params | None  # what an adapter changes

    def weights(self, state: TrainState) -> Params:
        """The model as it is to be used: averaged if there is an average, adapted if adapted."""
        trained = state.params if state.ema is None else state.ema
        if self.run.lora is None or self.frozen is None:
            return jax.tree.map(lambda new, p: new.astype(p.dtype), trained, state.params)
        return _merged(self.frozen, trained, lora=self.run.lora)

    def take(self, state: TrainState) -> Iterator[tuple[TrainState, Progress]]:
        """All remaining steps, `LOG_EVERY` at a time, with a line averaged over them."""
        optimiser = self.run.optimiser
        total = optimiser.steps
        pending: list[dict[str, Any]] = []
        tokens, began, first = 0, time.monotonic(), int(to_host(state.step, self.env))
        for step in range(first, total):
            batch = self.batches.batch(step)
            state, metrics = train_step(
                state,
                place_rows(batch, self.env),
                self.forbidden,
                replicate(np.float32(optimiser.rate(step)), self.env),
                self.frozen,
                cfg=self.cfg,
                env=self.env,
                loss=self.run.loss,
                optimiser=optimiser.rule,
                lora=self.run.lora,
                accumulate=self.run.accumulate,
                compute_dtype=self.run.compute_dtype,
            )
            pending.append(metrics)
            tokens += int(batch.n_valid.sum())
            if (step + 1) % LOG_EVERY == 0 or step + 1 == total:
                # Read the device every `LOG_EVERY` steps only, so that it never waits for the host.
                read = to_host(pending, self.env)
                mean = {k: float(np.mean([m[k] for m in read])) for k in read[0]}
                elapsed = time.monotonic() - began
                left = elapsed / (step + 1 - first) * (total - step - 1)
                line = Progress(step + 1, total, mean, tokens / elapsed, left)
                pending = []
                yield state, line

    def validate(self, state: TrainState) -> dict[str, float]:
        """Mean metrics of a few batches of the `val` split, if there is one."""
        if self.run.traces is not None and self.run.traces.val is None:
            return {}
        loss = jax.jit(training_loss, static_argnames=("cfg", "env", "loss"))
        batches = _batches(self.run, self.tokenizer, self.cfg, "val")
        weights = self.weights(state)
        read = [
            to_host(
                loss(
                    weights,
                    place_rows(batches.batch(i), self.env),
                    self.forbidden,
                    cfg=self.cfg,
                    env=self.env,
                    loss=self.run.loss,
                )[1],
                self.env,
            )
            for i in range(VALIDATION_BATCHES)
        ]
        return {f"val_{k}": float(np.mean([m[k] for m in read])) for k in read[0]}
