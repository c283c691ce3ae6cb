"""K4: a run that is killed at any moment goes on as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from clover_jax import checkpoint
from clover_jax.params import named_leaves

CODE = """
import dataclasses, sys
from pathlib import Path
from clover_jax.presets import PRESETS
from clover_jax.train import loop
from tests.train.test_loop import RUN, SMALL

PRESETS["small"] = lambda: SMALL
run = dataclasses.replace(RUN, optimiser=dataclasses.replace(RUN.optimiser, steps=60))
loop.train(run, Path(sys.argv[1]), report=lambda p: print(p.step, flush=True), save_seconds=0.0)
"""


def start(folder: Path, cache: Path) -> subprocess.Popen:
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_run_ends_like_one_that_was_not(tmp_path: Path):
    """SIGKILL twice, each at a random moment after a line, mostly while a save is written."""
    cache, rng = tmp_path / "cache", random.Random(0)
    whole = start(tmp_path / "whole", cache)
    assert whole.wait(timeout=300) == 0
    kills = 0
    for _ in range(2):
        process = start(tmp_path / "killed", cache)
        assert process.stdout is not None
        if process.stdout.readline():
            time.sleep(rng.random() * 0.1)
            kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills
    last = start(tmp_path / "killed", cache)
    assert last.wait(timeout=300) == 0
    for name in ("log.jsonl", "model/model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    leaves = named_leaves(checkpoint.load(tmp_path / "killed" / "model")[1])
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in leaves.values())
