"""`clover train` around a run that does nothing: what it is asked, what is shown, how it stops."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_jax.train import loop
from clover_jax.train.calibrate import Residuals
from clover_jax.train.loop import Progress, RunConfig
from tests.cli.conftest import Clover

type Body = Callable[[Callable[[Progress], None]], None]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RunConfig]]:
    """The runs that were asked for; each reports twice."""
    asked: list[RunConfig] = []

    def pretrain(run: RunConfig, folder: Path, *, report: Any) -> Path:
        asked.append(run)
        report(progress(10, 20))
        report(progress(20, 20))
        return folder / "model"

    def convert(run: RunConfig, folder: Path, *, report: Any, calibrated: Any) -> Path:
        calibrated(Residuals((1, 2), np.full((3, 2), 0.5), np.full((3, 2), 0.25)))
        return pretrain(run, folder, report=report)

    monkeypatch.setattr(loop, "pretrain", pretrain)
    monkeypatch.setattr(loop, "convert", convert)
    yield asked


def progress(step: int, steps: int) -> Progress:
    metrics = {"ar_loss": 1.5, "loss": 2.25, "gradient_norm": 7.0}
    return Progress(step, steps, metrics, 1234.0, 65.0 * (steps - step))


def test_flags_become_a_pretraining_run(clover: Clover, runs: list[RunConfig], tmp_path: Path):
    arguments = (
        "--preset clover_tiny --steps 20 --rows 4 --learning-rate 0.01 --warmup 3 --seed 9 "
        "--task gcd=2 --task products=1.5 --thinking-share 0.25 --bucket 48x1 --bucket 80x2"
    )
    ran = clover("train", "pretrain", "--out", tmp_path, *arguments.split())
    assert ran.status == 0 and ran.out == f"{tmp_path / 'model'}\n"
    [run] = runs
    assert (run.kind, run.start, run.seed) == ("pretrain", "clover_tiny", 9)
    assert run.loss.diffusion == 0
    assert (run.optimiser.steps, run.optimiser.learning_rate, run.optimiser.warmup) == (20, 0.01, 3)
    assert (run.data.rows, run.data.seed) == (4, 9)
    assert run.data.buckets == ((48, 1), (80, 2))
    assert run.data.mix.weights == (("gcd", 2.0), ("products", 1.5))
    assert run.data.mix.thinking_share == 0.25


def test_a_folder_to_go_on_from(clover: Clover, runs: list[RunConfig], tmp_path: Path):
    ran = clover("train", "pretrain", "--out", tmp_path, "--checkpoint", "base")
    assert ran.status == 0
    assert (runs[0].kind, runs[0].start) == ("pretrain", "base")


def test_flags_become_a_conversion(clover: Clover, runs: list[RunConfig], tmp_path: Path):
    arguments = "--checkpoint base --diffusion 0.7 --calibration-steps 5"
    ran = clover("train", "convert", "--out", tmp_path, *arguments.split())
    assert ran.status == 0 and "0.500 -> 0.250" in ran.err
    [run] = runs
    assert (run.kind, run.start) == ("convert", "base")
    assert (run.loss.diffusion, run.calibration_steps) == (0.7, 5)


def test_piped_progress_is_lines(clover: Clover, runs: list[RunConfig], tmp_path: Path):
    lines = clover("train", "pretrain", "--out", tmp_path).err.splitlines()
    assert lines == [
        "step 10/20  ar_loss 1.500  loss 2.250  1234 tokens/s  10:50 left",
        "step 20/20  ar_loss 1.500  loss 2.250  1234 tokens/s  0:00 left",
    ]


def test_lines_come_at_intervals(clover: Clover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def pretrain(run: RunConfig, folder: Path, *, report: Any) -> Path:
        for step in range(1, 6):
            report(progress(step, 5))
        return folder

    monkeypatch.setattr(loop, "pretrain", pretrain)
    lines = clover("train", "pretrain", "--out", tmp_path).err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/5", "5/5"]


def test_interrupt_waits_for_the_next_report(
    clover: Clover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The run is not torn apart in mid-step: the exception comes out of `report`."""
    seen: list[str] = []

    def pretrain(run: RunConfig, folder: Path, *, report: Any) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("step finished")
        try:
            report(progress(1, 5))
        finally:
            seen.append("saved")
        seen.append("went on")
        return folder

    monkeypatch.setattr(loop, "pretrain", pretrain)
    before = signal.getsignal(signal.SIGINT)
    ran = clover("train", "pretrain", "--out", tmp_path)
    assert ran.status == 130
    assert seen == ["step finished", "saved"]
    assert "the same command resumes" in ran.err and "Traceback" not in ran.err
    assert signal.getsignal(signal.SIGINT) is before


def test_second_interrupt_does_not_wait(
    clover: Clover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def pretrain(run: RunConfig, folder: Path, *, report: Any) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("went on")

    monkeypatch.setattr(loop, "pretrain", pretrain)
    ran = clover("train", "pretrain", "--out", tmp_path)
    assert ran.status == 130 and "last save" in ran.err
