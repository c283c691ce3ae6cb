"""Short Python functions from a model, judged by running them.

Every program runs in a process of its own: a fork of an isolated interpreter (`-I -S`, no
environment, in an empty folder) that has closed every descriptor, left root, and set limits of CPU
time, memory, file size (0), new processes (0) and open files (0). Programs get a table of harmless
builtins, no imports, and no name that leads from an object to its class or frame. They see inputs,
never the expected outputs.

**This is no security boundary.** It stops accidents and lazy tricks. Code that finds its way to the
interpreter's own objects still makes system calls with the rights of the user who started it
(`nobody` if that was root): it can delete that user's files, signal the user's processes, and read
what is in its own memory. Against an adversary add a container or virtual machine without network
or secrets, with a read-only root, a user of its own, a seccomp filter and a cgroup memory limit.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clover_jax.errors import CloverError

_WORKER = Path(__file__).with_name("execution_worker.py")
_GRACE = 10.0  # seconds past the program's after which the worker itself counts as lost


def require_confinement() -> None:
    """Refuse systems whose limits would not confine a program.

    Raises:
        CloverError: this is not Linux.
    """
    if sys.platform != "linux":
        raise CloverError(
            "programs are only run on Linux, whose limits confine them, and this is "
            f"{sys.platform}: functions can be judged by the interpreter (--judge interpreter)"
        )


@dataclass(frozen=True)
class Limits:
    """What one program may use, all its calls together.

    Attributes:
        cpu_seconds: whole seconds of CPU time; this is what ends a loop.
        wall_seconds: time on the clock, for what waits without computing.
        memory_bytes: address space, the interpreter's own 20 MB included.
        output_bytes: of its results as JSON.

    Raises:
        CloverError: a limit that is not positive.
    """

    cpu_seconds: int = 1
    wall_seconds: float = 10.0
    memory_bytes: int = 256 * 2**20
    output_bytes: int = 64 * 2**10

    def __post_init__(self) -> None:
        if min(self.cpu_seconds, self.wall_seconds, self.memory_bytes, self.output_bytes) <= 0:
            raise CloverError(f"{self}: expected limits above 0")


@dataclass(frozen=True)
class Program:
    """A source and the calls to make.

    Attributes:
        source: Python.
        function: the name of a function in it.
        inputs: its one argument, call by call, as JSON has it.
    """

    source: str
    function: str
    inputs: Sequence[Any]


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        status: `ran` all its calls, or did not.
        kind: of an error: the exception's name (`Refused`: a forbidden name), the signal's, or
            `output` for results that are too long or no JSON.
        outputs: what the calls returned; empty unless it ran.
    """

    status: Literal["ran", "error", "timeout", "memory"]
    kind: str = ""
    outputs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """`passed`, `wrong`, `error` (its kind as in `Outcome`), `timeout` or `memory`."""

    status: Literal["passed", "wrong", "error", "timeout", "memory"]
    kind: str = ""


def judge(
    programs: Sequence[Program], expected: Sequence[Sequence[Any]], limits: Limits = Limits()
) -> list[Verdict]:
    """Run programs and compare what they return with what is expected, program by program.

    Raises:
        CloverError: see `execute`.
    """
    outcomes = execute(programs, limits)
    return [
        Verdict("passed" if list(o.outputs) == list(want) else "wrong")
        if o.status == "ran"
        else Verdict(o.status, o.kind)
        for o, want in zip(outcomes, expected, strict=True)
    ]


def execute(programs: Sequence[Program], limits: Limits = Limits()) -> list[Outcome]:
    """Run programs one after the other.

    Raises:
        CloverError: this is not Linux, or programs cannot be confined here.
    """
    require_confinement()
    outcomes = []
    with contextlib.ExitStack() as stack:  # of one worker at a time
        worker = stack.enter_context(_worker(limits))
        for program in programs:
            outcome = worker.ask(program, limits.wall_seconds + _GRACE)
            if outcome is None:  # a program that got hold of it: go on with a new one
                stack.close()
                worker = stack.enter_context(_worker(limits))
            outcomes.append(outcome or Outcome("timeout"))
    return outcomes


class _Worker:
    """A running `execution_worker`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def ask(self, program: Program, seconds: float) -> Outcome | None:
        """Its outcome; None if it takes too long, or ends the worker."""
        job = {"source": program.source, "function": program.function}
        line = json.dumps({**job, "inputs": list(program.inputs)}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(line)
            self._stdin.flush()
        answer, deadline = b"", time.monotonic() + seconds
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._stdout], [], [], left)[0]:
                return None
            part = os.read(self._stdout.fileno(), 65536)
            if not part:
                return None
            answer += part
        told = json.loads(answer)
        if told["status"] == "unconfined":
            raise CloverError(
                f"programs cannot be confined here: {told['kind']}; run as a user other than root, "
                "or use the interpreter as judge"
            )
        return Outcome(told["status"], told.get("kind", ""), tuple(told.get("outputs", ())))


@contextlib.contextmanager
def _worker(limits: Limits) -> Iterator[_Worker]:
    numbers = dataclasses.astuple(limits)
    with tempfile.TemporaryDirectory(prefix="clover-execution-") as empty:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WORKER), *map(str, numbers)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={}, cwd=empty, start_new_session=True,
        )  # fmt: skip
        try:
            worker = _Worker(process)
            proof = worker.ask(Program("def f(x):\n    return x", "f", [1]), 60.0)
            if proof != Outcome("ran", outputs=(1,)):
                raise CloverError(
                    f"{sys.executable} ran no program under {limits} ({proof}): raise the limits, "
                    "or use the interpreter as judge"
                )
            yield worker
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
