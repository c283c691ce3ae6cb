"""One harness: the same prompts, budgets and scoring for every way to answer them.

A `Task` is problems, a judge and a budget. A `Backend` answers questions: our model in AR or block
mode, or a server (`backends.py`). `run` asks every backend every problem and keeps one line per
problem and backend in `results.jsonl`, with the seed and the final token ids; a run that was
interrupted goes on where it stopped, and a folder refuses results of another configuration, but
takes in further backends. `metrics.py` sums the records up, `harness_report.py` shows them.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from clover_jax.errors import CloverError
from clover_jax.files import whole_file

RUN_FILE, RESULTS_FILE = "run.json", "results.jsonl"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """One prompt, a user's message, and what a judge needs to know to score the answer."""

    prompt: str
    reference: Any


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Judgement of one answer.

    Attributes:
        correct: it is right.
        format_valid: it has the form that the task asks for.
        details: further shares between 0 and 1, by name, such as questions right of eight.
    """

    correct: bool
    format_valid: bool
    details: dict[str, float] = dataclasses.field(default_factory=dict)


type Judge = Callable[[Sequence[Problem], Sequence[str]], list[Verdict]]


@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts, a verifier and a budget.

    Attributes:
        name: row of the tables; part of every record.
        problems: in a fixed order.
        judge: scores the answers' texts; with `thinking` a text holds what closes the thoughts.
        max_tokens: an answer is cut there.
        thinking: the prompt leaves the think block open.
    """

    name: str
    problems: tuple[Problem, ...]
    judge: Judge
    max_tokens: int
    thinking: bool = False

    def __post_init__(self) -> None:
        if not self.problems or self.max_tokens < 1:
            raise CloverError(
                f"task {self.name} has {len(self.problems)} problems and a budget of "
                f"{self.max_tokens} tokens: expected at least one of each"
            )

    def settings(self) -> dict[str, Any]:
        """What its results depend on, the problems by a digest."""
        text = json.dumps([(p.prompt, repr(p.reference)) for p in self.problems])
        return {
            "n": len(self.problems),
            "max_tokens": self.max_tokens,
            "thinking": self.thinking,
            "problems": hashlib.sha256(text.encode()).hexdigest()[:16],
        }


@dataclasses.dataclass(frozen=True)
class Question:
    """What a backend is asked: a problem's prompt under its task's budget.

    `index` is the problem's place in its task; draws depend on (seed, index) only.
    """

    prompt: str
    max_tokens: int
    thinking: bool
    seed: int
    index: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What came back.

    Attributes:
        text: without control tokens; what closes the thoughts is in it.
        prompt_ids: final token ids of the prompt; None where a server does not tell.
        token_ids: of the answer, up to and including the stop; None where a server does not tell.
        finish: `stop`, `length`, or what else the backend says.
        tokens: of the answer; 0 where a server does not count them.
        previews: denoising passes; None where they are not known.
        forwards: previews and commits (AR: one per token but the first); None if not known.
        seconds: this answer's share of the time of its batch, prefill included, compilation not.
        experts: mean distinct experts per preview, by layer; empty where they are not known.
    """

    text: str
    prompt_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...] | None
    finish: str
    tokens: int
    previews: int | None
    forwards: int | None
    seconds: float
    experts: tuple[float, ...] = ()


@runtime_checkable
class Backend(Protocol):
    """A way to answer."""

    @property
    def name(self) -> str:
        """Row of the tables; unique in a run."""
        ...

    @property
    def batch(self) -> int:
        """Questions answered together."""
        ...

    def settings(self) -> dict[str, Any]:
        """What its answers depend on, as JSON values: a folder's results are of one setting."""
        ...

    def answer(self, questions: Sequence[Question]) -> list[Reply]:
        """One reply per question, in order; at most `batch` questions."""
        ...


@dataclasses.dataclass(frozen=True)
class Record:
    """One problem answered by one backend: a line of `results.jsonl`."""

    backend: str
    task: str
    index: int
    seed: int
    reply: Reply
    verdict: Verdict


def run(
    tasks: Sequence[Task],
    backends: Sequence[Backend],
    out: Path | None,
    *,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Record]:
    """Ask every backend every problem that `out` has no answer to.

    Args:
        tasks: with different names.
        backends: with different names.
        out: a folder of this run's own, or None to keep nothing.
        seed: of random draws.
        progress: called with a line about what runs.

    Returns:
        All records of these tasks and backends, in the order backend, task, index.

    Raises:
        CloverError: a name is there twice, `out` holds results of another configuration, or a
            backend cannot answer.
    """
    for kind, names in (("task", [t.name for t in tasks]), ("backend", [b.name for b in backends])):
        twice = [name for name in names if names.count(name) > 1]
        if twice or not names:
            said = f"{twice[0]!r} twice" if twice else "none"
            raise CloverError(f"{kind}s of a run: {said}; expected one or more, each with its name")
    store = _Store(out, tasks, backends, seed)
    for backend in backends:
        for task in tasks:
            _answer(task, backend, store, seed, progress)
    return [
        store.records[backend.name, task.name, i]
        for backend in backends
        for task in tasks
        for i in range(len(task.problems))
    ]


def _answer(
    task: Task, backend: Backend, store: "_Store", seed: int, progress: Callable[[str], None]
) -> None:
    for start in range(0, len(task.problems), backend.batch):
        # Whole batches, always cut at the same places: an answer's last bits may depend on what
        # is computed with it.
        part = range(start, min(start + backend.batch, len(task.problems)))
        missing = [i for i in part if (backend.name, task.name, i) not in store.records]
        if not missing:
            continue
        progress(f"{backend.name}: {task.name} {start}/{len(task.problems)}")
        problems = [task.problems[i] for i in part]
        replies = backend.answer(
            [
                Question(p.prompt, task.max_tokens, task.thinking, seed, i)
                for i, p in zip(part, problems, strict=True)
            ]
        )
        verdicts = task.judge(problems, [reply.text for reply in replies])
        store.add(
            [
                Record(backend.name, task.name, i, seed, reply, verdict)
                for i, reply, verdict in zip(part, replies, verdicts, strict=True)
                if i in missing
            ]
        )


def read_records(out: Path) -> list[Record]:
    """The records of a run's folder; a last line that a crash cut off is left out.

    Raises:
        CloverError: no results, or not of a harness.
    """
    path = out / RESULTS_FILE
    try:
        lines = path.read_bytes().splitlines(keepends=True)
        return [msgspec.json.decode(line, type=Record) for line in lines if line.endswith(b"\n")]
    except OSError as error:
        raise CloverError(f"{path} cannot be read: {error}") from None
    except msgspec.MsgspecError as error:
        raise CloverError(
            f"{path} holds a line that is no result ({error}): choose another folder"
        ) from None


class _Store:
    """Records, and on disk what they are records of."""

    def __init__(
        self, out: Path | None, tasks: Sequence[Task], backends: Sequence[Backend], seed: int
    ) -> None:
        self.records: dict[tuple[str, str, int], Record] = {}
        self._path = None if out is None else out / RESULTS_FILE
        if out is None or self._path is None:
            return
        run: dict[str, Any] = {
            "version": VERSION,
            "seed": seed,
            "tasks": {t.name: t.settings() for t in tasks},
            "backends": {b.name: b.settings() for b in backends},
        }
        run = json.loads(json.dumps(run))  # as it will be read back
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CloverError(f"{out} cannot be a folder of results: {error}") from None
        if (out / RUN_FILE).exists():
            run = _joined(out / RUN_FILE, run)
        with whole_file(out / RUN_FILE) as building:
            building.write_text(json.dumps(run, indent=1) + "\n")
        if not self._path.exists():
            return
        found = read_records(out)
        with whole_file(self._path) as building:  # without a line that a crash cut off
            building.write_bytes(b"".join(map(_line, found)))
        self.records = {(r.backend, r.task, r.index): r for r in found}

    def add(self, records: Sequence[Record]) -> None:
        if self._path is not None:
            try:
                with self._path.open("ab") as file:
                    file.write(b"".join(map(_line, records)))
            except OSError as error:
                raise CloverError(f"{self._path} cannot be written: {error}") from None
        self.records |= {(r.backend, r.task, r.index): r for r in records}


def _line(record: Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def _joined(path: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """What the folder holds with this run's backends and tasks added, if nothing contradicts."""
    try:
        known = json.loads(path.read_bytes())
        before = {name: dict(known[name]) for name in ("tasks", "backends")}
        fixed = {name: known[name] for name in ("version", "seed")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CloverError(f"{path} is not of a harness run ({error!r}): choose another") from None
    clash = [name for name, value in fixed.items() if value != run[name]]
    clash += [
        f"{kind[:-1]} {name}"
        for kind, found in before.items()
        for name, value in run[kind].items()
        if found.get(name, value) != value
    ]
    if clash:
        raise CloverError(
            f"{path.parent} holds results of other settings ({', '.join(clash)}): repeat the "
            "command that made it, or choose another folder"
        )
    return {**fixed, **{kind: found | run[kind] for kind, found in before.items()}}
