"""`clover eval`: the card's table."""

import dataclasses
import sys
from pathlib import Path

import msgspec

from clover_jax.cli.commands import Eval
from clover_jax.cli.session import open_session
from clover_jax.data.tasks import TASKS
from clover_jax.errors import CloverError
from clover_jax.eval.held_out import Result
from clover_jax.eval.held_out import evaluate as measure
from clover_jax.eval.traces import solve_traces

HEADER = (
    "| task | mode | n | accuracy | 95 % | format | tokens | TPF previews | TPF |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def evaluate(flags: Eval) -> int:
    """Prints one row per task, as a Markdown table or JSON lines; returns the exit status."""
    if flags.traces is not None:
        return _traces(flags, flags.traces)
    unknown = [task for task in flags.task if task not in TASKS]
    if unknown:
        raise CloverError(f"--task is {unknown[0]!r}: expected one of {', '.join(TASKS)}")
    session = open_session(flags)
    if not flags.json:
        print(HEADER, flush=True)
    for task in flags.task or TASKS:
        result = measure(
            session.generator,
            task,
            n=flags.n,
            split=flags.split,
            thinking=not flags.no_thinking,
            mode=flags.mode,
            sampling=session.sampling,
            max_tokens=flags.max_tokens or 160,
            batch=flags.batch,
            progress=lambda done, task=task: print(f"{task}: {done}", end="\r", file=sys.stderr),
        )
        line = (
            msgspec.json.encode(dataclasses.asdict(result)).decode() if flags.json else _row(result)
        )
        print(line, flush=True)
    return 0


def _traces(flags: Eval, path: Path) -> int:
    session = open_session(flags)
    result = solve_traces(
        session.generator,
        path,
        mode=flags.mode,
        sampling=session.sampling,
        max_tokens=flags.max_tokens or 160,
        batch=flags.batch,
    )
    if flags.json:
        print(msgspec.json.encode(dataclasses.asdict(result)).decode())
    else:
        turns = ", ".join(f"{n} after turn {i + 1}" for i, n in enumerate(result.right))
        print(
            f"{result.mode}: {100 * result.solved:.1f} % of {result.n} traces solved "
            f"({100 * result.low:.1f}-{100 * result.high:.1f}; right: {turns}), "
            f"TPF {result.tpf:.2f}"
        )
    return 0


def _row(r: Result) -> str:
    previews = "-" if r.tpf_previews is None else f"{r.tpf_previews:.2f}"
    return (
        f"| {r.task} | {r.mode} | {r.n} | {100 * r.accuracy:.1f} % "
        f"| {100 * r.low:.1f}-{100 * r.high:.1f} | {100 * r.format_valid:.0f} % "
        f"| {r.tokens:.1f} | {previews} | {r.tpf:.2f} |"
    )
