"""`clover eval`: the card's table, infilling, HumanEval's loss, and traces."""

import dataclasses
import sys
from typing import Any

import msgspec

from clover_jax.cli.commands import Eval
from clover_jax.cli.session import Session, open_session
from clover_jax.data.tasks import TASKS
from clover_jax.errors import CloverError
from clover_jax.eval import execution, likelihood
from clover_jax.eval.held_out import Result
from clover_jax.eval.held_out import evaluate as measure
from clover_jax.eval.infilling import ArmResult, evaluate_infill
from clover_jax.eval.traces import solve_traces

HEADER = (
    "| task | mode | n | accuracy | 95 % | format | tokens | TPF previews | TPF |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
INFILL_HEADER = (
    "| hole filled by | n | runs right | 95 % | exact | forwards | gain of right context (95 %) |\n"
    "|---|---|---|---|---|---|---|"
)
TRACES_HEADER = (
    "| mode | traces | solved | 95 % | right after turn 1, 2, ... | TPF |\n"
    "|---|---|---|---|---|---|"
)
LOSS_HEADER = "| loss | nats/token | bits/byte |\n|---|---|---|"


def evaluate(flags: Eval) -> int:
    """Prints a Markdown table or JSON lines; returns the exit status."""
    unknown = [task for task in flags.task if task not in TASKS]
    if unknown:
        raise CloverError(f"--task is {unknown[0]!r}: expected one of {', '.join(TASKS)}")
    if flags.task and flags.suite != "tasks":
        raise CloverError(f"--task is given with --suite {flags.suite}: choose one")
    if (flags.file is None) != (flags.suite != "traces"):
        raise CloverError("--file is of --suite traces: give both, or neither")
    if flags.n < 1:
        raise CloverError(f"--n is {flags.n}: expected at least 1")
    match flags.suite:
        case "tasks":
            _tasks(flags)
        case "infill":
            _infill(flags)
        case "humaneval-loss":
            _humaneval_loss(flags)
        case "traces":
            _traces(flags)
    return 0


def _tasks(flags: Eval) -> None:
    chosen = flags.task or TASKS
    if flags.judge == "execution" and "python_function" in chosen:
        execution.require_confinement()
    session = open_session(flags)
    _header(flags, HEADER)
    for task in chosen:
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
            judge=flags.judge,
            progress=lambda done, task=task: _progress(task, done),
        )
        _line(flags, result, _row(result))


def _infill(flags: Eval) -> None:
    execution.require_confinement()
    session = open_session(flags)
    results = evaluate_infill(
        session.generator,
        n=flags.n,
        split=flags.split,
        length=flags.hole,
        place=flags.place,
        sampling=session.sampling,
        batch=flags.batch,
        progress=_progress,
    )
    _header(flags, INFILL_HEADER)
    for result in results:
        _line(flags, result, _infill_row(result))


def _humaneval_loss(flags: Eval) -> None:
    texts = likelihood.human_eval()[: flags.n]
    session: Session = open_session(flags)
    report = likelihood.loss_on(
        session.generator,
        texts,
        draws=flags.draws,
        seed=flags.seed,
        progress=lambda done: _progress("solutions", done),
    )
    _header(flags, LOSS_HEADER)
    rows = [f"| causal | {report.ar_nats_per_token:.3f} | {report.ar_bits_per_byte:.3f} |"]
    if report.bound_bits_per_byte is not None:
        error = "" if report.bound_error is None else f" ± {report.bound_error:.3f}"
        rows.append(
            f"| diffusion bound, {report.draws} draws | {report.bound_nats_per_token:.3f} "
            f"| {report.bound_bits_per_byte:.3f}{error} |"
        )
    _line(flags, report, "\n".join(rows))
    print(
        f"{report.texts} solutions of {report.tokens} tokens and {report.bytes} bytes; "
        f"{report.left_out} do not fit the context",
        file=sys.stderr,
    )


def _progress(what: str, done: int) -> None:
    print(f"{what}: {done}", end="\r", file=sys.stderr)


def _header(flags: Eval, header: str) -> None:
    if not flags.json:
        print(header, flush=True)


def _line(flags: Eval, result: Any, row: str) -> None:
    fields = dataclasses.asdict(result)
    print(msgspec.json.encode(fields).decode() if flags.json else row, flush=True)


def _traces(flags: Eval) -> None:
    assert flags.file is not None
    session = open_session(flags)
    result = solve_traces(
        session.generator,
        flags.file,
        mode=flags.mode,
        sampling=session.sampling,
        max_tokens=flags.max_tokens or 160,
        batch=flags.batch,
    )
    _header(flags, TRACES_HEADER)
    turns = ", ".join(map(str, result.right))
    _line(
        flags,
        result,
        f"| {result.mode} | {result.n} | {100 * result.solved:.1f} % "
        f"| {100 * result.low:.1f}-{100 * result.high:.1f} | {turns} | {result.tpf:.2f} |",
    )


def _row(r: Result) -> str:
    previews = "-" if r.tpf_previews is None else f"{r.tpf_previews:.2f}"
    return (
        f"| {r.task} | {r.mode} | {r.n} | {100 * r.accuracy:.1f} % "
        f"| {100 * r.low:.1f}-{100 * r.high:.1f} | {100 * r.format_valid:.0f} % "
        f"| {r.tokens:.1f} | {previews} | {r.tpf:.2f} |"
    )


def _infill_row(r: ArmResult) -> str:
    gain = "-"
    if r.gain is not None:
        gain = (
            f"{100 * r.gain.difference:+.1f} ({100 * r.gain.low:+.1f} to {100 * r.gain.high:+.1f})"
        )
    return (
        f"| {r.arm} | {r.n} | {100 * r.right:.1f} % | {100 * r.low:.1f}-{100 * r.high:.1f} "
        f"| {100 * r.exact:.1f} % | {r.forwards:.2f} | {gain} |"
    )
