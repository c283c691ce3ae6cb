"""`clover train`: a progress line, and Ctrl-C between two steps."""

import contextlib
import dataclasses
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from clover_jax.cli.commands import TrainConvert, TrainPretrain, TrainSft
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.cli.devices import env_of
from clover_jax.cli.session import packaged_model
from clover_jax.config import ModelConfig, from_canonical_json, override, replace
from clover_jax.data.pipeline import TraceConfig
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import Generator
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.eval.held_out import evaluate as measure
from clover_jax.eval.traces import solve_traces
from clover_jax.model.transformer import Params
from clover_jax.train import loop
from clover_jax.train.calibrate import Residuals
from clover_jax.train.plan import Plan, plan
from clover_jax.train.run_config import Evaluation, RunConfig, default_run

PLAIN_SECONDS = 10  # between lines in a pipe


def train(flags: TrainPretrain | TrainConvert | TrainSft) -> int:
    """Starts or resumes a run; returns the exit status."""
    run = run_config(flags)
    keep_compiled_programs()
    if flags.dry_run:
        print("\n".join([*setting_lines(run), "", *_plan_lines(plan(run))]))
        return 0
    env = env_of(flags, moe_tile=loop.MOE_TILE, moe_chunk=loop.MOE_CHUNK)
    board = flags.out / "tensorboard" if flags.tensorboard else None
    with _deferred_interrupt() as check, _reporter() as show, _tensorboard(board) as chart:

        def report(progress: loop.Progress) -> None:
            show(progress)
            chart(progress)
            check()

        def calibrated(residuals: Residuals) -> None:
            print("\n".join(_residual_lines(residuals)), file=sys.stderr)
            check()

        def lost(counts: Counter[str]) -> None:
            said = ", ".join(f"{n} {reason}" for reason, n in counts.items())
            print(f"traces: {said} (traces.buckets holds more)", file=sys.stderr)

        model = loop.train(
            run,
            flags.out,
            report=report,
            calibrated=calibrated,
            lost=lost,
            evaluate=None if run.evaluation is None else _evaluator(run, run.evaluation, env),
            env=env,
        )
    print(model)
    return 0


def run_config(flags: TrainPretrain | TrainConvert | TrainSft) -> RunConfig:
    """The run that the flags ask for.

    Raises:
        CloverError: a setting that does not exist, or a value out of range.
    """
    traces = None
    if isinstance(flags, TrainPretrain):
        kind, start = "pretrain", str(flags.checkpoint or flags.preset)
    elif isinstance(flags, TrainConvert):
        kind, start = "convert", str(flags.checkpoint)
    else:
        kind, start = "sft", str(flags.checkpoint or packaged_model())
        held_out = None if flags.held_out is None else str(flags.held_out)
        traces = TraceConfig(train=str(flags.data), val=held_out)
    run = default_run(kind, start, traces=traces)
    if flags.config is not None:
        run = from_canonical_json(_read(flags.config), RunConfig)
        if run.kind != kind:
            raise CloverError(f"--config {flags.config} is of a {run.kind} run: expected {kind}")
        files = {} if traces is None else {"traces.train": traces.train, "traces.val": traces.val}
        run = replace(run, start=start, **files)
    return override(run, flags.set)


def setting_lines(config: Any, prefix: str = "") -> list[str]:
    """Every setting as `--set` takes it."""
    lines = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            lines += setting_lines(value, f"{name}.")
        else:
            lines.append(f"{name}={_setting(value)}")
    return lines


def _setting(value: Any) -> str:
    """JSON, but a bare word where that cannot be taken for JSON."""
    text = msgspec.json.encode(value).decode()
    if not isinstance(value, str):
        return text
    try:
        msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
    return text


def _plan_lines(found: Plan) -> list[str]:
    gigabytes = lambda n: f"{n / 1e9:.3f} GB"
    shape = lambda s: " x ".join(map(str, s))
    total = found.weights_bytes + found.optimiser_bytes + found.work_bytes
    return [
        f"{found.total:,} parameters, {found.trained:,} trained",
        *(
            f"batch: clean {shape(s.clean)}"
            + ("" if s.noisy is None else f", blocks {shape(s.noisy)}")
            for s in found.shapes
        ),
        f"memory {gigabytes(total)}: weights {gigabytes(found.weights_bytes)}, optimiser "
        f"{gigabytes(found.optimiser_bytes)}, the largest step's work "
        f"{gigabytes(found.work_bytes)} (compiled for {jax.default_backend()})",
        f"{found.steps} steps, at most {found.largest_tokens:,} clean tokens and "
        f"{found.flops / 1e9:.1f} GFLOP each",
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CloverError(f"--config {path} cannot be read: {error}") from None


def _evaluator(run: RunConfig, evaluation: Evaluation, env: Env) -> loop.Evaluate:
    """Accuracy and tokens per forward of both modes, by the sampler that serves."""
    tasks = evaluation.tasks if run.data is not None else ()
    held_out = None if run.traces is None or run.traces.val is None else Path(run.traces.val)
    serving = Env(mesh=env.mesh, rules=env.rules)
    usual: dict[str, Any] = {"max_tokens": evaluation.max_tokens, "batch": evaluation.batch}

    def evaluate(cfg: ModelConfig, params: Params, tokenizer: Tokenizer) -> dict[str, float]:
        generator = Generator(cfg, params, tokenizer=tokenizer, env=serving)
        found: dict[str, float] = {}
        for mode in ("ar",) if cfg.bd_gdn is None else ("ar", "block"):
            for task in tasks:
                result = measure(
                    generator,
                    task,
                    n=evaluation.n,
                    split="val",
                    thinking=True,
                    mode=mode,
                    sampling=SamplerConfig(),
                    **usual,
                )
                found[f"eval_{mode}_{task}"] = result.accuracy
                if mode == "block":
                    found[f"eval_tpf_{task}"] = result.tpf
            if held_out is not None:
                solved = solve_traces(
                    generator, held_out, mode=mode, sampling=SamplerConfig(), **usual
                )
                found[f"eval_{mode}_traces"] = solved.solved
                if mode == "block":
                    found["eval_tpf_traces"] = solved.tpf
        return found

    return evaluate


def _residual_lines(residuals: Residuals) -> list[str]:
    """Per layer and block length, before and after."""
    cell = lambda a, b: "--" if np.isnan(a) or np.isnan(b) else f"{a:.3f} ->{b:.2f}"
    line = lambda name, cells: f"{name:<34}" + "".join(f"{x:>15}" for x in cells)
    rows = enumerate(zip(residuals.before, residuals.after, strict=True))
    return [
        line("calibrated: relative residual at n", residuals.lengths),
        *(line(f"GDN layer {i}", map(cell, before, after)) for i, (before, after) in rows),
    ]


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits until the run can save; a second one does not wait.

    Yields:
        A function that raises the KeyboardInterrupt that waits, if one does.
    """
    asked = False

    def handle(_number: int, _frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt("stopped at once; the same command resumes from the last save")
        asked = True
        print(
            "\nstopping after this part of the run; Ctrl-C again to stop at once", file=sys.stderr
        )

    def check() -> None:
        if asked:
            raise KeyboardInterrupt("stopped and saved: the same command resumes this run")

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _reporter() -> Iterator[Callable[[loop.Progress], None]]:
    """A bar in a terminal, else a line from time to time."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _PlainReport()
        return
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda p: bar.update(task, completed=p.step, total=p.steps, description=_figures(p))


@contextlib.contextmanager
def _tensorboard(folder: Path | None) -> Iterator[Callable[[loop.Progress], None]]:
    """Writes every metric as a scalar; what a resumed run does again replaces what was there."""
    if folder is None:
        yield lambda _: None
        return
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise CloverError(
            "--tensorboard needs the package tensorboardX: install the extra `train`"
        ) from None
    with contextlib.ExitStack() as stack:
        writer = None

        def chart(progress: loop.Progress) -> None:
            nonlocal writer
            if writer is None:  # the first line says where a resumed run goes on
                writer = SummaryWriter(str(folder), purge_step=progress.step)
                stack.callback(writer.close)
            for name, value in progress.metrics.items():
                writer.add_scalar(name, value, progress.step)

        yield chart


class _PlainReport:
    """Prints the first line, the last one, and one every `PLAIN_SECONDS` between."""

    def __init__(self) -> None:
        self._printed = -float("inf")

    def __call__(self, progress: loop.Progress) -> None:
        now = time.monotonic()
        if now - self._printed >= PLAIN_SECONDS or progress.step == progress.steps:
            self._printed = now
            print(f"step {progress.step}/{progress.steps}  {_figures(progress)}", file=sys.stderr)


def _figures(progress: loop.Progress) -> str:
    losses = [
        f"{name} {value:.3f}" for name, value in progress.metrics.items() if name.endswith("loss")
    ]
    speed = f"{progress.tokens_per_second:.0f} tokens/s"
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    return "  ".join([*losses, speed, f"{minutes}:{seconds:02} left"])
