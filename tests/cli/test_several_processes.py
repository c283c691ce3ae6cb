"""`clover generate` as two processes that find each other, as under srun."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

RUN = "import sys; from clover_jax.cli import main; sys.exit(main())"
ASKED = ("generate", "two cats and three ants", "--mesh", "2x2x2", "--json", "--max-tokens", "3")


def ids(said: str) -> list[int]:
    return json.loads(said)["token_ids"]


def slurm(index: int, job: int) -> dict[str, str]:
    """What srun sets and JAX reads."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
    }


@pytest.mark.slow
def test_two_processes_of_a_slurm_job_answer_as_one(model: Path, clover, tmp_path: Path):
    """Four devices each; every process reads its slices, the first one prints."""
    job = random.SystemRandom().randrange(2**12)  # the port depends on it
    run = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, *ASKED, "--checkpoint", model, "--distributed", "auto"],
            env={
                **os.environ,
                **slurm(index, job),
                "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
                "JAX_PLATFORMS": "cpu",
                "XDG_CACHE_HOME": str(tmp_path / str(index)),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=300) for process in run]
    finally:
        for process in run:
            process.kill()
            process.communicate()
    assert [process.returncode for process in run] == [0, 0], said
    assert said[1][0] == ""
    alone = clover(*ASKED, "--checkpoint", model)
    assert ids(said[0][0]) == ids(alone.out)
