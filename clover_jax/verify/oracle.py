"""Runs the torch oracles: scripts of their own, under a Python of their own."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from safetensors.flax import save_file

from clover_jax.errors import CloverError
from clover_jax.verify.trace import Tensors, read_trace
from pallas_kernels.worker import last_words, own_environment

SCRIPTS = Path(__file__).parent / "oracles"


def run_oracle(
    script: str, python: Path, folder: Path, request: Tensors, *options: str
) -> tuple[Tensors, dict[str, Any]]:
    """What an oracle writes for a request.

    Args:
        script: name of a file in `oracles`.
        python: interpreter that has torch and transformers.
        folder: checkpoint.
        request: its input tensors.
        options: further arguments.

    Returns:
        The trace and its writer's versions.

    Raises:
        CloverError: there is no such interpreter, or the oracle fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked, answer = Path(scratch) / "request.safetensors", Path(scratch) / "trace.safetensors"
        save_file({name: jnp.asarray(a) for name, a in request.items()}, asked)
        command = [python, SCRIPTS / script, folder.absolute(), asked, answer, *options]
        try:
            ran = subprocess.run(
                [str(word) for word in command],
                env=own_environment(),
                capture_output=True,
                text=True,
            )
        except OSError as error:
            raise CloverError(
                f"--oracle-python {python} cannot be run: {error.strerror}; "
                f"{SCRIPTS / 'README.md'} says how to make that environment"
            ) from None
        if ran.returncode or not answer.exists():
            raise CloverError(f"the oracle {script} failed: {last_words(ran.stderr)}")
        return read_trace(answer)
