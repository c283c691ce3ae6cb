"""A program under a Python of its own, with which a benchmark takes turns."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class WorkerError(RuntimeError):
    """The program cannot be started, or has ended; the text says why."""


class Worker:
    """It answers a line of JSON per line of JSON, the first unasked: what it is.

    Attributes:
        greeting: that first line.
    """

    def __init__(self, process: subprocess.Popen[str], complaints: Any) -> None:
        self._process, self._complaints = process, complaints
        self.greeting = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Its answer.

        Raises:
            WorkerError: it ended; the text is the exception that ended it.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the missing answer says why
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._complaints.seek(0)
            raise WorkerError(last_words(self._complaints.read()))
        return json.loads(line)


def last_words(complaints: str) -> str:
    """Of what a program wrote to standard error, the exception that ended it (or its last line)."""
    lines = complaints.strip().splitlines() or ["it ended without a word"]
    frames = [i for i, line in enumerate(lines) if line.startswith("  ")]
    after = lines[frames[-1] + 1 :] if frames else []
    return "\n".join(after or lines[-1:])


def own_environment() -> dict[str, str]:
    """Another Python's environment is its own: our paths must not leak into it."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


@contextmanager
def running(python: Path, script: Path, *options: object) -> Iterator[Worker]:
    """`script` under `python`; it ends with the block.

    Raises:
        WorkerError: there is no such interpreter, or the script ends before it says what it is.
    """
    command = [str(word) for word in (python, script, *options)]
    with tempfile.TemporaryFile("w+") as complaints:
        try:
            process = subprocess.Popen(
                command, env=own_environment(), text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=complaints,
            )  # fmt: skip
        except OSError as error:
            raise WorkerError(f"{python} cannot be run: {error.strerror}") from None
        try:
            yield Worker(process, complaints)
        finally:
            process.kill()
            process.wait()
