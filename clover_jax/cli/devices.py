"""The devices of a command: its mesh, and the other processes that run it."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax

from clover_jax.cli.flags import DeviceFlags
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.sharding import PRESETS, make_mesh, parse_mesh

# A process that has said nothing for this long is lost, and the others end with it.
HEARTBEAT_SECONDS = 30
_JOB = re.compile(r"([^,\s]+:\d+),(\d+),(\d+)")


@contextlib.contextmanager
def joined(flags: Any) -> Iterator[None]:
    """Connects this process to its job, if it is in one; only the first process prints.

    Raises:
        CloverError: no job is found, or the text is none.
    """
    text = flags.distributed if isinstance(flags, DeviceFlags) else None
    if text is None:
        yield
        return
    options: dict[str, Any] = {}
    if text != "auto":
        job = _JOB.fullmatch(text)
        if job is None or not int(job[3]) < int(job[2]):
            raise CloverError(
                f"--distributed is {text!r}: expected auto, or address, number of processes and "
                "this one's index, such as localhost:9876,2,0"
            )
        options = {
            "coordinator_address": job[1],
            "num_processes": int(job[2]),
            "process_id": int(job[3]),
        }
    # Gloo, which connects processes on CPU, tells collectives apart by their order alone.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS, **options)
    except (ValueError, RuntimeError) as error:
        raise CloverError(
            f"--distributed {text} does not connect: {error}; start one process per machine with "
            "srun, mpirun or a Kubernetes job, or name the job yourself"
        ) from None
    try:
        with _own_stdout():
            if jax.process_index() == 0:
                yield
            else:
                with (
                    open(os.devnull, "w") as nowhere,
                    contextlib.redirect_stdout(nowhere),
                    contextlib.redirect_stderr(nowhere),
                ):
                    yield
    finally:
        jax.distributed.shutdown()


@contextlib.contextmanager
def _own_stdout() -> Iterator[None]:
    """Standard output for what Python prints: Gloo's own lines go to standard error."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        with (
            open(os.dup(before), "w", encoding=sys.stdout.encoding) as own,
            contextlib.redirect_stdout(own),
        ):
            yield
    finally:
        os.dup2(before, 1)
        os.close(before)


def env_of(flags: DeviceFlags, **settings: Any) -> Env:
    """The mesh that the flags ask for.

    Raises:
        CloverError: it cannot be made of the devices that are here.
    """
    if flags.mesh is None:
        if jax.process_count() > 1:
            raise CloverError(
                f"--mesh is not given, and the job has {jax.process_count()} processes with "
                f"{jax.device_count()} devices: give a mesh over all of them"
            )
        return Env(**settings)
    mesh = make_mesh(*parse_mesh(flags.mesh))
    if jax.process_count() > 1 and mesh.size != jax.device_count():
        raise CloverError(
            f"--mesh {flags.mesh} has {mesh.size} devices: expected all {jax.device_count()} that "
            "the job has"
        )
    return Env(mesh=mesh, rules=PRESETS[flags.rules], **settings)
