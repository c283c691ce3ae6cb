"""A job of two processes with four devices each: it trains, loses one, and goes on elsewhere."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from clover_jax.cli.devices import env_of
from clover_jax.cli.flags import DeviceFlags
from clover_jax.env import Env
from clover_jax.presets import PRESETS
from clover_jax.train import loop
from tests.train.test_loop import RUN, SMALL

pytestmark = pytest.mark.slow

MODEL = SMALL.replace(dtype="float32")  # roundings of bfloat16 differ from mesh to mesh
WORKER = """
import sys
from pathlib import Path
import jax
from clover_jax.cli import devices
from clover_jax.cli.flags import DeviceFlags
from clover_jax.env import Env
from clover_jax.presets import PRESETS
from clover_jax.train import loop
from tests.train.test_processes import MODEL, long_run

PRESETS["small"] = lambda: MODEL
devices.HEARTBEAT_SECONDS = 10
flags = DeviceFlags(mesh="2x2x2", rules="fsdp", distributed=sys.argv[2])
with devices.joined(flags):
    env = devices.env_of(flags)
    folder = Path(sys.argv[1])
    # The first process's clock decides when all of them save.
    save_seconds = 0.0 if jax.process_index() == 0 else 1e9
    loop.train(
        long_run(10_000), folder, report=lambda p: None, save_seconds=save_seconds, env=env
    )
"""


def long_run(steps: int):
    return dataclasses.replace(RUN, optimiser=dataclasses.replace(RUN.optimiser, steps=steps))


def start(command: list[str], address: str, index: int) -> subprocess.Popen:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    return subprocess.Popen(
        [sys.executable, *command, f"{address},2,{index}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_address() -> str:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return f"localhost:{s.getsockname()[1]}"


class Lost(NamedTuple):
    """A run of two processes, of which the second was killed."""

    folder: Path
    status: int
    said: str


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lost]:
    folder, address = tmp_path_factory.mktemp("job") / "run", free_address()
    first, second = (start(["-c", WORKER, str(folder)], address, i) for i in range(2))
    try:
        deadline = time.monotonic() + 300
        while not list(folder.glob("checkpoints/*0/commit_success.txt")):
            assert time.monotonic() < deadline and first.poll() is None, first.communicate()[1]
            time.sleep(0.2)
        second.send_signal(signal.SIGKILL)
        said = first.communicate(timeout=120)[1]
        yield Lost(folder, first.returncode, said)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_lost_process_ends_the_job_and_is_named(lost: Lost):
    assert lost.status != 0
    assert "another task died" in lost.said
    assert re.search(r"tasks are unhealthy \(stopped sending heartbeats\):\s*1\b", lost.said)


class Enough(Exception):
    """Raised by a report: the run stops as if it was interrupted."""


def run_to(folder: Path, steps: int, env: Env) -> list[dict]:
    """The log of the run, taken to this step in this process."""

    def report(progress: loop.Progress) -> None:
        if progress.step >= steps:
            raise Enough

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "small", lambda: MODEL)
        with pytest.raises(Enough):
            loop.train(long_run(10_000), folder, report=report, save_seconds=1e6, env=env)
    return lines(folder)


def test_it_goes_on_from_there_on_another_mesh(lost: Lost, tmp_path: Path):
    """In one process, with what is left of the run; its first lines are those of one device."""
    before = lines(lost.folder)
    kept = max(int(p.parent.name) for p in lost.folder.glob("checkpoints/*/commit_success.txt"))
    after = run_to(lost.folder, kept + 10, env_of(DeviceFlags(mesh="1x4x2")))
    assert after[: kept // 10] == before[: kept // 10]
    assert [line["step"] for line in after] == list(range(10, kept + 11, 10))
    alone = run_to(tmp_path / "alone", 10, loop.ENV)
    for name, value in alone[0].items():
        assert after[0][name] == pytest.approx(value, rel=1e-4), name
