"""`clover train`: a progress line, and Ctrl-C between two steps."""

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from clover_jax.cli.commands import TrainConvert, TrainPretrain
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.data import tasks
from clover_jax.data.pipeline import DataConfig
from clover_jax.diffusion.loss import LossConfig
from clover_jax.errors import CloverError
from clover_jax.train import loop
from clover_jax.train.calibrate import Residuals
from clover_jax.train.step import OptimiserConfig

FOLLOW_ABOVE = 0.9  # below the sampler's 0.95: states a little further on than it meets
PLAIN_SECONDS = 10  # between lines in a pipe


def train(flags: TrainPretrain | TrainConvert) -> int:
    """Starts or resumes a run; returns the exit status."""
    run = run_config(flags)
    keep_compiled_programs()
    with _deferred_interrupt() as check, _reporter() as show:

        def report(progress: loop.Progress) -> None:
            show(progress)
            check()

        if isinstance(flags, TrainPretrain):
            model = loop.pretrain(run, flags.out, report=report)
        else:

            def calibrated(residuals: Residuals) -> None:
                before, after = np.nanmean(residuals.before), np.nanmean(residuals.after)
                print(f"calibrated: relative residual {before:.3f} -> {after:.3f}", file=sys.stderr)
                check()

            model = loop.convert(run, flags.out, report=report, calibrated=calibrated)
    print(model)
    return 0


def run_config(flags: TrainPretrain | TrainConvert) -> loop.RunConfig:
    """The run that the flags ask for.

    Raises:
        CloverError: a value out of range.
    """
    weights = tuple(_pair(text, "--task", "=", str, float) for text in flags.task)
    buckets = tuple(_pair(text, "--bucket", "x", int, int) for text in flags.bucket)
    mix = tasks.Mix(weights or tasks.MIX.weights, thinking_share=flags.thinking_share)
    data = DataConfig(mix=mix, rows=flags.rows, seed=flags.seed)
    if buckets:
        data = dataclasses.replace(data, buckets=buckets)
    pretrain = isinstance(flags, TrainPretrain)
    if not pretrain:
        data = dataclasses.replace(data, frontier_share=flags.frontier_share)
    return loop.RunConfig(
        kind="pretrain" if pretrain else "convert",
        start=str(flags.checkpoint or flags.preset) if pretrain else str(flags.checkpoint),
        data=data,
        loss=LossConfig(
            diffusion=0.0 if pretrain else flags.diffusion,
            follow_above=FOLLOW_ABOVE if data.frontier_share else None,
        ),
        optimiser=OptimiserConfig(
            learning_rate=flags.learning_rate,
            steps=flags.steps,
            warmup=flags.warmup,
            decay_share=flags.decay_share,
        ),
        seed=flags.seed,
        calibration_steps=0 if pretrain else flags.calibration_steps,
    )


def _pair(text: str, flag: str, sign: str, first: Any, second: Any) -> tuple[Any, Any]:
    left, _, right = text.partition(sign)
    try:
        return first(left), second(right)
    except ValueError:
        raise CloverError(
            f"{flag} is {text!r}: expected two values with {sign!r} between"
        ) from None


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
