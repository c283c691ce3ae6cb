"""`clover eval`: the harness' suites, infilling, HumanEval's loss, and traces."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from clover_jax.cli.commands import Eval
from clover_jax.cli.session import Session, open_session, packaged_model
from clover_jax.errors import CloverError
from clover_jax.eval import execution, harness_report, likelihood, suites
from clover_jax.eval.backends import (
    LocalBackend,
    checkpoint_of,
    endpoint_backend,
    fingerprint,
    local_backend,
    oracle_bound,
)
from clover_jax.eval.card_report import require_pyplot
from clover_jax.eval.harness import Backend, Task, run
from clover_jax.eval.infilling import ArmResult, evaluate_infill
from clover_jax.eval.traces import solve_traces
from clover_jax.files import whole_file

BACKENDS = ("ar", "block")
QUICK = (
    *BACKENDS,
    "block:threshold=0.8",
    "block:close=unsure",
    "block:close=verified,threshold=1",
)
OTHERS = 100  # problems of the suites that are not the harness'
HARNESS_ONLY = ("backend", "endpoint", "out", "task")
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
    """Prints Markdown tables or JSON lines; returns the exit status."""
    if (flags.file is None) != (flags.suite != "traces"):
        raise CloverError("--file is of --suite traces: give both, or neither")
    if flags.n is not None and flags.n < 1:
        raise CloverError(f"--n is {flags.n}: expected at least 1")
    if flags.suite in ("quick", "A", "B", "C"):
        _harness(flags, flags.suite)
        return 0
    for name in HARNESS_ONLY:
        if getattr(flags, name):
            raise CloverError(f"--{name} is given with --suite {flags.suite}: choose one")
    match flags.suite:
        case "infill":
            _infill(flags)
        case "humaneval-loss":
            _humaneval_loss(flags)
        case "traces":
            _traces(flags)
    return 0


def _harness(flags: Eval, suite: suites.Suite) -> None:
    if flags.out is not None:
        require_pyplot()  # before minutes of measuring
    if flags.oracle < 0:
        raise CloverError(f"--oracle is {flags.oracle}: expected at least 0")
    chosen = suites.suite(
        suite, n=flags.n, families=flags.task, split=flags.split, thinking=not flags.no_thinking,
        judge=flags.judge, max_tokens=flags.max_tokens or suites.MAX_TOKENS,
    )  # fmt: skip
    if flags.judge == "execution" and any(task.name == "python_function" for task in chosen):
        execution.require_confinement()
    backends = _backends(flags)
    records = run(
        chosen, backends, flags.out, seed=flags.seed,
        progress=lambda line: print(line, end="\033[K\r", file=sys.stderr),
    )  # fmt: skip
    settings = {backend.name: backend.settings() for backend in backends}
    found = harness_report.report(records, settings, _oracle(flags, backends, chosen))
    text = harness_report.markdown(found)
    if flags.out is not None:
        with whole_file(flags.out / "report.md") as building:
            building.write_text(text)
        harness_report.plot(found, flags.out / "report.png")
    if flags.json:
        for summary in found.summaries:
            _line(flags, summary, "")
    else:
        print(text, end="")


def _backends(flags: Eval) -> list[Backend]:
    usual = QUICK if flags.suite == "quick" and not flags.task else BACKENDS
    specs = flags.backend or (("ar",) if flags.mode == "ar" else usual)
    if flags.endpoint and not flags.backend:
        specs = ()
    usual_folder = flags.checkpoint or packaged_model()
    folders = [checkpoint_of(spec) or usual_folder for spec in specs]
    opened = {
        folder: (open_session(dataclasses.replace(flags, checkpoint=folder)), fingerprint(folder))
        for folder in dict.fromkeys([*folders, usual_folder] if flags.endpoint else folders)
    }
    found: list[Backend] = []
    for spec, folder in zip(specs, folders, strict=True):
        session, weights = opened[folder]
        found.append(
            local_backend(
                spec, session.generator, sampling=session.sampling, weights=weights,
                batch=flags.batch,
            )
        )  # fmt: skip
    servers = [endpoint_backend(spec, opened[usual_folder][0].tokenizer) for spec in flags.endpoint]
    return found + servers


def _oracle(flags: Eval, backends: Sequence[Backend], chosen: Sequence[Task]) -> list[str]:
    """A line for each model that some backend runs in blocks; kept in the folder."""
    path = None if flags.out is None else flags.out / "oracle.json"
    known: dict[str, Any] = _read_json(path) if path is not None and path.exists() else {}
    lines = []
    for backend in backends:
        if not (isinstance(backend, LocalBackend) and backend.mode == "block" and flags.oracle):
            continue
        own = backend.settings()
        prompts = [task.settings()["problems"] for task in chosen]
        key = json.dumps([own["weights"], own["config"], flags.oracle, prompts])
        length = backend.generator.cfg.block_length
        if key not in known:
            print("oracle bound", end="\033[K\r", file=sys.stderr)
            bound = oracle_bound(backend, chosen, flags.oracle)
            known[key] = None if bound is None else dataclasses.asdict(bound)
            if path is not None:
                with whole_file(path) as building:
                    building.write_text(json.dumps(known) + "\n")
        bound = known[key]
        if bound is not None:
            line = (
                f"Oracle (every right guess revealed, however unsure), blocks of {length}: "
                f"{bound['tpf_previews']:.2f} tokens per preview and "
                f"{100 * bound['solved'] / bound['answers']:.1f} % of {bound['answers']} reference "
                "answers without a miss."
            )
            lines += [line] if line not in lines else []
    return lines


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CloverError(f"{path} cannot be read: {error}; remove it") from None


def _infill(flags: Eval) -> None:
    execution.require_confinement()
    session = open_session(flags)
    results = evaluate_infill(
        session.generator,
        n=flags.n or OTHERS,
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
    texts = likelihood.human_eval()[: flags.n or OTHERS]
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
