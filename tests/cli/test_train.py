"""`clover train` around a run that does nothing: what it is asked, what is shown, how it stops."""

import dataclasses
import os
import re
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_jax.config import canonical_json, override
from clover_jax.train import loop
from clover_jax.train.calibrate import Residuals
from clover_jax.train.loop import Progress
from clover_jax.train.run_config import RunConfig, default_run
from tests.cli.conftest import Clover
from tests.helpers.compilation import unoptimised

type Body = Callable[[Callable[[Progress], None]], None]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RunConfig]]:
    """The runs that were asked for; each reports twice."""
    asked: list[RunConfig] = []

    def train(run: RunConfig, folder: Path, *, report: Any, calibrated: Any, **_: Any) -> Path:
        asked.append(run)
        if run.calibration_steps:
            after = np.array([[0.25, 0.125], [np.nan, 0.5]])
            calibrated(Residuals((1, 2), np.full((2, 2), 0.5), after))
        report(progress(10, 20))
        report(progress(20, 20))
        return folder / "model"

    monkeypatch.setattr(loop, "train", train)
    yield asked


def progress(step: int, steps: int) -> Progress:
    metrics = {"ar_loss": 1.5, "loss": 2.25, "gradient_norm": 7.0}
    return Progress(step, steps, metrics, 1234.0, 65.0 * (steps - step))


def test_flags_become_a_pretraining_run(clover: Clover, runs: list[RunConfig], tmp_path: Path):
    settings = ("seed=9", "optimiser.steps=20", 'data.mix.weights=[["gcd",2]]')
    flags = [x for text in settings for x in ("--set", text)]
    ran = clover("train", "pretrain", "--out", tmp_path, "--preset", "clover_tiny", *flags)
    assert ran.status == 0 and ran.out == f"{tmp_path / 'model'}\n"
    [run] = runs
    assert run == override(default_run("pretrain", "clover_tiny"), settings)
    assert (run.seed, run.optimiser.steps, run.data.mix.weights) == (9, 20, (("gcd", 2.0),))


def test_a_folder_to_go_on_from(clover: Clover, runs: list[RunConfig], tmp_path: Path):
    ran = clover("train", "pretrain", "--out", tmp_path, "--checkpoint", "base")
    assert ran.status == 0
    assert runs == [default_run("pretrain", "base")]


def test_residuals_of_a_calibration_are_shown(
    clover: Clover, runs: list[RunConfig], tmp_path: Path
):
    ran = clover("train", "convert", "--out", tmp_path, "--checkpoint", "base")
    assert ran.status == 0 and runs == [default_run("convert", "base")]
    lines = [line.split() for line in ran.err.splitlines()[:3]]
    assert lines[0][-2:] == ["1", "2"]
    assert lines[1] == ["GDN", "layer", "0", "0.500", "->0.25", "0.500", "->0.12"]
    assert lines[2] == ["GDN", "layer", "1", "--", "0.500", "->0.50"]


def test_settings_of_another_run(clover: Clover, runs: list[RunConfig], tmp_path: Path):
    """`--config` takes them from its run.json; `--set` comes after; the start is this command's."""
    other = override(default_run("convert", "elsewhere"), ["seed=5", "optimiser.steps=7"])
    path = tmp_path / "run.json"
    path.write_text(canonical_json(other))
    command = ("train", "convert", "--out", tmp_path / "run", "--checkpoint", "base")
    assert clover(*command, "--config", path, "--set", "seed=6").status == 0
    assert runs == [dataclasses.replace(other, start="base", seed=6)]
    refused = clover("train", "pretrain", "--out", tmp_path / "run", "--config", path)
    assert refused.status == 2 and "expected pretrain" in refused.err
    missing = clover(*command, "--config", tmp_path / "none.json")
    assert missing.status == 2 and "none.json" in missing.err
    path.write_text("{}")
    assert clover(*command, "--config", path).status == 2
    bad = clover(*command, "--set", "optimiser.steps=0")
    assert bad.status == 2 and "steps is 0" in bad.err


def test_tensorboard_gets_every_metric(clover: Clover, runs: list[RunConfig], tmp_path: Path):
    """Read back from the event file's records, without TensorBoard."""
    from tensorboardX.proto.event_pb2 import Event

    ran = clover("train", "pretrain", "--out", tmp_path, "--tensorboard")
    assert ran.status == 0 and len(runs) == 1
    [path] = (tmp_path / "tensorboard").iterdir()
    data, at, seen = path.read_bytes(), 0, {}
    while at < len(data):  # TFRecord: length, its checksum, the event, its checksum
        (size,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + size])
        at += size + 16
        seen |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    metrics = progress(0, 0).metrics
    assert seen == {(step, name): value for step in (10, 20) for name, value in metrics.items()}


def test_tensorboard_missing(clover: Clover, runs: list[RunConfig], tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    ran = clover("train", "pretrain", "--out", tmp_path / "run", "--tensorboard")
    assert ran.status == 2 and "extra `train`" in ran.err
    assert not runs and not (tmp_path / "run").exists()


def test_piped_progress_is_lines(clover: Clover, runs: list[RunConfig], tmp_path: Path):
    lines = clover("train", "pretrain", "--out", tmp_path).err.splitlines()
    assert lines == [
        "step 10/20  ar_loss 1.500  loss 2.250  1234 tokens/s  10:50 left",
        "step 20/20  ar_loss 1.500  loss 2.250  1234 tokens/s  0:00 left",
    ]


def test_lines_come_at_intervals(clover: Clover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def train(run: RunConfig, folder: Path, *, report: Any, **_: Any) -> Path:
        for step in range(1, 6):
            report(progress(step, 5))
        return folder

    monkeypatch.setattr(loop, "train", train)
    lines = clover("train", "pretrain", "--out", tmp_path).err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/5", "5/5"]


def test_interrupt_waits_for_the_next_report(
    clover: Clover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The run is not torn apart in mid-step: the exception comes out of `report`."""
    seen: list[str] = []

    def train(run: RunConfig, folder: Path, *, report: Any, **_: Any) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("step finished")
        try:
            report(progress(1, 5))
        finally:
            seen.append("saved")
        seen.append("went on")
        return folder

    monkeypatch.setattr(loop, "train", train)
    before = signal.getsignal(signal.SIGINT)
    ran = clover("train", "pretrain", "--out", tmp_path)
    assert ran.status == 130
    assert seen == ["step finished", "saved"]
    assert "the same command resumes" in ran.err and "Traceback" not in ran.err
    assert signal.getsignal(signal.SIGINT) is before


def test_second_interrupt_does_not_wait(
    clover: Clover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def train(run: RunConfig, folder: Path, *, report: Any, **_: Any) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("went on")

    monkeypatch.setattr(loop, "train", train)
    ran = clover("train", "pretrain", "--out", tmp_path)
    assert ran.status == 130 and "last save" in ran.err


@pytest.mark.slow
def test_a_dry_run_prints_and_writes_nothing(clover: Clover, model: Path, tmp_path: Path):
    with unoptimised():
        ran = clover(
            "train", "convert", "--checkpoint", model, "--out", tmp_path / "run", "--dry-run",
            "--set", "data.rows=2", "--set", "data.buckets=[[16,1]]", "--set", "optimiser.steps=7",
        )  # fmt: skip
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert "optimiser.steps=7" in lines and "data.buckets=[[16,1]]" in lines
    assert any(re.match(r"batch: clean 2 x 16, blocks 2 x 2 x \d+$", line) for line in lines)
    assert any(line.startswith("memory ") and "optimiser" in line for line in lines)
    assert not (tmp_path / "run").exists()
