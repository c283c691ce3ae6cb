"""Other frameworks on the same weights, as runners that a benchmark takes turns with.

Each reads (prefill) and writes (greedy, one token at a time) when it is asked, and times itself
inside, so that neither the pipe nor the conversion of a prompt counts.
"""

import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from clover_jax.checkpoint.gguf_export import export_gguf
from clover_jax.checkpoint.report import NormStorage
from clover_jax.errors import CloverError
from clover_jax.verify.llama import LlamaContext
from clover_jax.verify.oracle import SCRIPTS
from pallas_kernels.worker import Worker, WorkerError, running

RivalName = Literal["hf", "llama.cpp"]


class Written(NamedTuple):
    """A greedy answer and the seconds it took, the prompt not counted."""

    ids: list[int]
    seconds: float


@runtime_checkable
class Rival(Protocol):
    """A framework with the model loaded."""

    name: str
    versions: dict[str, str]

    def prefill(self, ids: Sequence[int]) -> float:
        """Seconds of one pass over the ids that gives the last one's logits."""
        ...

    def write(self, prompt: Sequence[int], count: int) -> Written:
        """`count` greedy tokens after the prompt."""
        ...


@contextmanager
def opened(
    names: Sequence[RivalName],
    folder: Path,
    *,
    oracle_python: Path,
    threads: int,
    capacity: int,
    norms: NormStorage | None = None,
) -> Iterator[list[Rival]]:
    """The named frameworks with the folder's causal trunk in float32; closed at the end.

    `capacity` is the most tokens that will be read and written from one start, `norms` how the
    files store norms (`checkpoint.load`).

    Raises:
        CloverError: one of them is not installed, or cannot load the folder.
    """
    with ExitStack() as stack:
        make: dict[str, Callable[[], Any]] = {
            "hf": lambda: _transformers(folder, oracle_python, threads),
            "llama.cpp": lambda: _llama(folder, norms, threads, capacity),
        }
        yield [stack.enter_context(make[name]()) for name in names]


class _Transformers:
    name = "hf"

    def __init__(self, worker: Worker) -> None:
        self._worker, self.versions = worker, worker.greeting

    def prefill(self, ids: Sequence[int]) -> float:
        return self._worker.ask(prefill=list(ids))["seconds"]

    def write(self, prompt: Sequence[int], count: int) -> Written:
        return Written(**self._worker.ask(prompt=list(prompt), decode=count))


@contextmanager
def _transformers(folder: Path, python: Path, threads: int) -> Iterator[Rival]:
    script = SCRIPTS / "hf_speed.py"
    try:
        with running(python, script, folder.absolute(), "--threads", threads) as worker:
            yield _Transformers(worker)
    except WorkerError as error:
        raise CloverError(
            f"--oracle-python: {error}; {SCRIPTS / 'README.md'} says how to make that environment"
        ) from None


class _Llama:
    name = "llama.cpp"

    def __init__(self, path: Path, threads: int, capacity: int) -> None:
        self._context = LlamaContext(path, capacity=capacity, threads=threads)
        self.versions = {"inferna": importlib.metadata.version("inferna")}

    def prefill(self, ids: Sequence[int]) -> float:
        self._context.clear()
        began = time.perf_counter()
        self._context.read(list(ids), [len(ids) - 1])
        return time.perf_counter() - began

    def write(self, prompt: Sequence[int], count: int) -> Written:
        self._context.clear()
        logits = self._context.read(list(prompt), [len(prompt) - 1])
        answer: list[int] = []
        began = time.perf_counter()
        for step in range(count):
            answer.append(int(np.argmax(logits[-1])))
            if step + 1 < count:
                logits = self._context.read(answer[-1:], [0])
        return Written(answer, time.perf_counter() - began)


@contextmanager
def _llama(folder: Path, norms: NormStorage | None, threads: int, capacity: int) -> Iterator[Rival]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.gguf"
        export_gguf(folder, path, type="f32", norms=norms)
        yield _Llama(path, threads, capacity)


def cores() -> int:
    """Cores this process may use: every framework is given as many threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
