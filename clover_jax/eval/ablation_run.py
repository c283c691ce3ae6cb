"""Runs ablations: one line of results.jsonl per arm and seed, trainings in folders outside.

A line that is there is not measured again; a line of another configuration stops everything. A run
that was killed goes on from its last save.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from clover_jax import checkpoint
from clover_jax.ablations import Ablation
from clover_jax.checkpoint.hf_map import BLOCK_DIFFUSION
from clover_jax.data import tasks
from clover_jax.data.pipeline import DataConfig, TaskBatches
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import NoiseConfig
from clover_jax.diffusion.generate import Generator, forbidden_ids
from clover_jax.diffusion.loss import LossConfig, as_arrays, training_loss
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.eval import harness
from clover_jax.eval.ablation_plan import Plan, Training, plans
from clover_jax.eval.backends import LocalBackend
from clover_jax.files import whole_file
from clover_jax.model.leaves import leaf_kind
from clover_jax.model.transformer import Params, param_specs
from clover_jax.params import initialise, path_name
from clover_jax.train import loop

RESULTS = "results.jsonl"
GRAM = 4  # tokens of the n-grams whose repetition is counted
_LOSS_TIME = 128  # tokens of a row of the masked loss

type Progress = Callable[[str], None]


# --- results ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Answers:
    """A task's problems, one entry each.

    Attributes:
        right: `1` or `0`.
        stopped: `1` where the answer ended by itself.
        tokens: up to and including the stop.
        forwards: previews and commits.
        experts: distinct ones per layer and preview, 0 in AR mode.
        repetition: share of the answer's 4-grams that it has had before.
    """

    right: str
    stopped: str
    tokens: tuple[int, ...]
    forwards: tuple[int, ...]
    experts: tuple[float, ...]
    repetition: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A line of results.jsonl.

    Attributes:
        ablation: id.
        arm: name.
        seed: of the training.
        hash: of `effective`.
        answers: by task.
        losses: masked loss of each batch, nats per masked token.
        seconds: that measuring took.
        commit: of the code; `+` if it was changed since.
        date: UTC.
        machine: processor, cores, JAX.
        effective: the plan.
    """

    ablation: str
    arm: str
    seed: int
    hash: str
    answers: dict[str, Answers]
    losses: tuple[float, ...]
    seconds: float
    commit: str
    date: str
    machine: str
    effective: dict[str, Any]


def read_results(path: Path) -> list[Result]:
    """The whole lines of a file; none if there is no file.

    Raises:
        CloverError: a line that is no result.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):  # a run was killed while it wrote
            break
        try:
            found.append(msgspec.json.decode(line, type=Result))
        except msgspec.MsgspecError as error:
            raise CloverError(f"{path} line {number} is no result: {error}") from None
    return found


def _append(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    with whole_file(path) as building:
        building.write_text(whole + msgspec.json.encode(result).decode() + "\n")


def check_same(path: Path, found: Sequence[Result], wanted: Sequence[Plan]) -> None:
    """Refuse results that the registry and the parent would not give.

    Raises:
        CloverError: a line of another configuration.
    """
    by_key = {(plan.arm, plan.seed): plan for plan in wanted}
    for result in found:
        plan = by_key.get((result.arm, result.seed))
        if plan is None:
            raise CloverError(
                f"{path} has arm {result.arm!r}, seed {result.seed}, which the registry has not: "
                "move the file away to run anew"
            )
        then, now = _flat(result.effective), _flat(plan.effective)
        # What the code had no field for then has its default now, or a setting says so.
        differ = sorted(key for key in then if key not in now or then[key] != now[key])
        if differ:
            raise CloverError(
                f"{path} has arm {result.arm!r}, seed {result.seed} of another configuration "
                f"({', '.join(differ[:4])}): repeat that one, or move the file away to run anew"
            )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    found = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return found


# --- running ------------------------------------------------------------------------------------


class OutOfTime(Exception):
    """The time that a call was given is over; what was done is kept."""


@dataclasses.dataclass
class Clock:
    """When to stop."""

    deadline: float | None

    def check(self) -> None:
        """Raises OutOfTime past the deadline."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTime


def run(
    ablation: Ablation,
    parent: Path,
    folder: Path,
    trainings: Path,
    *,
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    clock: Clock,
    progress: Progress,
) -> list[Result]:
    """Measure what is missing.

    Args:
        ablation: what to run.
        parent: Clover folder that is measured, or that trainings start from.
        folder: of the ablation's results.
        trainings: parent of the trainings' folders.
        arms: only these.
        seeds: only these.
        clock: asked between arms and between a training's lines.
        progress: called with a line about what runs.

    Returns:
        All results.

    Raises:
        OutOfTime: the clock's time is over.
        CloverError: results of another configuration, or no such arm or seed.
    """
    chosen = {ablation.arm(name).name for name in arms}
    for seed in seeds:
        if seed not in ablation.seeds:
            raise CloverError(
                f"{ablation.id} has no seed {seed}: expected one of "
                f"{', '.join(map(str, ablation.seeds))}"
            )
    wanted = plans(ablation, parent)
    path = folder / RESULTS
    found = read_results(path)
    check_same(path, found, wanted)
    done = {(r.arm, r.seed) for r in found}
    for plan in wanted:
        left_out = (chosen and plan.arm not in chosen) or (seeds and plan.seed not in seeds)
        if left_out or (plan.arm, plan.seed) in done:
            continue
        clock.check()
        progress(f"{ablation.id}: {plan.arm}, seed {plan.seed}")
        model = parent
        if plan.training is not None:
            model = train(plan, parent, trainings / plan.training_hash, clock, progress)
        result = _measured(ablation, plan, model)
        _append(path, result)
        found.append(result)
    return found


def train(plan: Plan, parent: Path, folder: Path, clock: Clock, progress: Progress) -> Path:
    """Do a plan's training, or what is left of it; the model's folder."""
    assert plan.training is not None
    model = folder / "run" / "model"
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if model.exists():  # written last, and at once
            return model
        start = folder / "start"
        if not start.exists():
            _make_start(plan.training, parent, start)
        shown = time.monotonic()

        def report(line: loop.Progress) -> None:
            nonlocal shown
            if time.monotonic() - shown > 30 or line.step == line.steps:
                shown = time.monotonic()
                losses = [f"{k} {v:.3f}" for k, v in line.metrics.items() if k.endswith("loss")]
                left = f"{line.seconds_left / 60:.1f} minutes left"
                progress(f"step {line.step}/{line.steps}: {', '.join(losses)}, {left}")
            if line.step < line.steps:
                clock.check()

        asked = dataclasses.replace(plan.training.run, start=str(start.absolute()))
        return loop.train(asked, folder / "run", report=report, save_seconds=60.0)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No second process trains in the folder."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CloverError(f"another process trains in {folder}: wait for it") from None
        yield


def _make_start(training: Training, parent: Path, folder: Path) -> None:
    """The parent with an untrained block operator, or random weights with its tokenizer."""
    _, old, _ = checkpoint.load(parent, dtype="float32")
    fresh = initialise(param_specs(training.start), jax.random.key(training.run.seed))
    params = fresh
    if not training.scratch:
        params = jax.tree_util.tree_map_with_path(
            lambda path, new, was: new if leaf_kind(path_name(path)) in BLOCK_DIFFUSION else was,
            fresh,
            old,
        )
        tokens = Tokenizer.load(parent).vocab_size
        mask = training.start.mask_token_id
        assert mask is not None
        others = np.arange(tokens) != mask
        rows = np.asarray(old.embed_tokens)
        rows = jnp.asarray(rows).at[mask].set(rows[:tokens][others].mean(0))
        params = params.replace(embed_tokens=rows)
    checkpoint.save(folder, training.start, params, files_from=parent)


def _measured(ablation: Ablation, plan: Plan, model: Path) -> Result:
    began = time.monotonic()
    cfg, params, _ = checkpoint.load(model, dtype="float32")
    expected = plan.model if plan.training is None else plan.training.start
    if plan.training is not None and cfg != expected:
        raise CloverError(f"{model} is not the model that was to be trained: remove its folder")
    tokenizer = Tokenizer.load(model)
    losses = _masked_losses(plan, params, tokenizer) if plan.measure.loss_batches else ()
    generator = Generator(plan.model, params, tokenizer=tokenizer, env=Env(rows="batched"))
    m = plan.measure
    backend = LocalBackend(plan.arm, generator, m.mode, plan.sampler, plan.weights, m.batch)
    answers = _answers(plan, backend)
    return Result(
        ablation=ablation.id,
        arm=plan.arm,
        seed=plan.seed,
        hash=plan.hash,
        answers=answers,
        losses=losses,
        seconds=round(time.monotonic() - began, 1),
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        machine=_machine(),
        effective=plan.effective,
    )


def _answers(plan: Plan, backend: LocalBackend) -> dict[str, Answers]:
    asked = [plan.measure.task(name) for name in plan.measure.tasks]
    records = harness.run(asked, [backend], None)
    found = {}
    for name in plan.measure.tasks:
        own = [record for record in records if record.task == name]
        replies = [record.reply for record in own]
        experts = [float(np.mean(reply.experts or (0.0,))) for reply in replies]
        found[name] = Answers(
            right="".join(str(int(record.verdict.correct)) for record in own),
            stopped="".join(str(int(reply.finish == "stop")) for reply in replies),
            tokens=tuple(reply.tokens for reply in replies),
            forwards=tuple(reply.forwards or 0 for reply in replies),
            experts=tuple(round(x, 2) for x in experts),
            repetition=tuple(round(repetition(reply.token_ids or ()), 4) for reply in replies),
        )
    return found


def repetition(tokens: Sequence[int]) -> float:
    """Share of the 4-grams that stand earlier in the same answer, 0 if it has none."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


_loss = jax.jit(training_loss, static_argnames=("cfg", "env", "loss"))


def _masked_losses(plan: Plan, params: Params, tokenizer: Tokenizer) -> tuple[float, ...]:
    """Cross entropy of masked tokens of held-out samples, the same masks in every arm."""
    cfg, m = plan.model, plan.measure
    known = [task for task in m.tasks if task in tasks.TASKS]
    data = DataConfig(
        rows=16,
        buckets=((_LOSS_TIME, _LOSS_TIME // cfg.block_length),),
        noise=NoiseConfig(complementary=False),
        mix=tasks.Mix(tuple((task, 1.0) for task in known), 1.0),
    )
    batches = TaskBatches(tokenizer, data, block=cfg.block_length, split=m.split)
    forbidden = forbidden_ids(cfg, tokenizer)
    values = []
    for i in range(m.loss_batches):
        batch = as_arrays(batches.batch(i))
        _, parts = _loss(
            params, batch, jnp.asarray(forbidden), cfg=cfg, env=loop.ENV, loss=LossConfig()
        )
        values.append(round(float(parts["diffusion_loss"]), 5))
    return tuple(values)


def _commit() -> str:
    here = Path(__file__).parent.parent
    git = lambda *args: subprocess.run(
        ["git", "-C", str(here), *args], capture_output=True, text=True, check=False
    ).stdout.strip()
    with contextlib.suppress(OSError):  # no git
        changed = git("status", "--porcelain", "--", ".", "../pallas_kernels")
        return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")
    return "unknown"


def _machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    where = jax.default_backend()
    return f"{platform.machine()}, {cores} cores, JAX {jax.__version__} on {where}"
