"""Reports: README.md and figure.png of every ablation, and the index in experiments/README.md."""

from collections.abc import Sequence
from pathlib import Path

from clover_jax.ablations import ABLATIONS, Ablation, Arm, Metric
from clover_jax.errors import CloverError
from clover_jax.eval.ablation_run import RESULTS, Result, read_results
from clover_jax.eval.ablation_stats import (
    Difference,
    interval,
    outcomes,
    state,
    text_of,
    value,
    verdict,
)
from clover_jax.eval.card_report import require_pyplot
from clover_jax.files import whole_file

FIGURE, NOTES = "figure.png", "notes.md"
BEGIN, END = "<!-- ablations: written by `clover ablate report` -->", "<!-- end of ablations -->"
PERCENT: tuple[Metric, ...] = ("accuracy", "repetition", "stopped")
# 600 steps of 1.1 s (experiments/train_speed, 16 rows, both views), calibration and compilation.
MINUTES_PER_TRAINING = 16  # of 001 on one core, 2026-12-01

_UNITS = {
    "accuracy": "accuracy, %",
    "tpf": "TPF, all forwards",
    "tokens": "tokens",
    "experts": "experts per layer",
    "repetition": "repeated 4-grams, %",
    "stopped": "ended, %",
    "masked_loss": "masked loss, nats",
}
_MARKERS = "osD^vP*X<>"


def write(experiments: Path) -> list[Path]:
    """Write everything that the registry and the results give.

    Returns:
        The files written.

    Raises:
        CloverError: no such folder, results of another registry, or matplotlib is missing.
    """
    index = experiments / "README.md"
    if not index.exists():
        raise CloverError(f"{index} does not exist: expected the folder of the experiments")
    all_results = {a.id: _results(a, experiments) for a in ABLATIONS}
    written = []
    for ablation in ABLATIONS:
        folder = experiments / ablation.id
        folder.mkdir(exist_ok=True)
        results = all_results[ablation.id]
        if results:
            written.append(_plot(ablation, results, folder / FIGURE))
        notes = folder / NOTES
        text = readme(ablation, results, notes.read_text() if notes.exists() else "")
        written.append(_write(folder / "README.md", text))
    written.append(_write(index, _with_index(index.read_text(), all_results)))
    return written


def _results(ablation: Ablation, experiments: Path) -> list[Result]:
    """Its results, of one parent and of the registry as it is."""
    path = experiments / ablation.id / RESULTS
    results = read_results(path)
    for result in results:
        settings = ablation.settings_of(ablation.arm(result.arm), result.seed)
        if list(settings) != list(result.effective["settings"]):
            raise CloverError(
                f"{path} has arm {result.arm!r} with other settings than the registry: run it anew"
            )
    if len({result.effective["weights"] for result in results}) > 1:
        raise CloverError(f"{path} mixes parents: run it anew from one")
    return results


def readme(ablation: Ablation, results: Sequence[Result], notes: str) -> str:
    """The page of an ablation."""
    parts = [
        f"# {ablation.id}: {ablation.question}",
        f"**Expected, written before the run.** {ablation.expected}",
        f"**Verdict, computed from the results.** {_verdict(ablation, results)}",
        _how(ablation, results),
    ]
    if results:
        parts += [
            f"![{'; '.join(f'{_UNITS[y]} by {_UNITS[x]}' for x, y in ablation.axes)}]({FIGURE})",
            *(_arms_table(ablation, results, tasks) for tasks in _groups(ablation)),
            _claims_table(ablation, results),
            "Differences are paired by problem. The intervals are of one comparison each: with "
            "this many, one in twenty misses.",
        ]
    if notes:
        parts.append(f"## Notes\n\n{notes.strip()}")
    return "\n\n".join(parts) + "\n"


def _verdict(ablation: Ablation, results: Sequence[Result]) -> str:
    if results:
        return f"{verdict(ablation, results)}."
    return "None: not run."


def _how(ablation: Ablation, results: Sequence[Result]) -> str:
    command = f"`clover ablate run {ablation.id}`"
    if not results:
        if ablation.kind == "evaluate":
            return f"Run it with {command} (minutes)."
        trained = {_training_settings(ablation, arm) for arm in ablation.arms}
        runs = len(trained) * len(ablation.seeds)
        return (
            f"Run it with `clover ablate run {ablation.id} --parent DIR --minutes N`, as often as "
            f"it takes: {runs} trainings of about {MINUTES_PER_TRAINING} minutes on one core "
            "(those that other ablations share are done once). Without --parent trainings start "
            "from the causal weights of the model in the package, which blocks with the state "
            "slot have trained, too; a parent that never saw blocks is fairer."
        )
    days = sorted({r.date for r in results})
    commits = ", ".join(sorted({r.commit for r in results}))
    machines = "; ".join(sorted({r.machine for r in results}))
    weights = results[0].effective["weights"][:12]
    measure = results[0].effective["measure"]
    return (
        f"{command}: {state(ablation, results)}; {measure['n']} problems of each task, split "
        f"{measure['split']}; weights {weights}; commit {commits}; {days[0]} to {days[-1]} UTC; "
        f"{machines}. Lines of `{RESULTS}` hold every answer's figures and the whole configuration."
    )


def _training_settings(ablation: Ablation, arm: Arm) -> tuple[bool, tuple[str, ...]]:
    settings = (*ablation.settings, *arm.settings)
    return arm.scratch, tuple(s for s in settings if s.startswith(("model.", "run.")))


def _groups(ablation: Ablation) -> list[tuple[str, ...]]:
    """Sets of tasks that claims look at apart."""
    return list(dict.fromkeys(claim.tasks for claim in ablation.claims))


def _arms_table(ablation: Ablation, results: Sequence[Result], tasks: tuple[str, ...]) -> str:
    shown: list[Metric] = ["accuracy", "tpf", "tokens", "experts", "repetition", "stopped"]
    if any(result.losses for result in results):
        shown.append("masked_loss")
    seeds = len(ablation.seeds) > 1
    rows = [["arm", *(["seeds"] if seeds else []), *(_UNITS[m] for m in shown)]]
    for arm in ablation.arms:
        own = [r for r in results if r.arm == arm.name]
        cells = [_shown(metric, value(own, metric, tasks)) if own else "-" for metric in shown]
        rows.append([arm.name, *([str(len(own))] if seeds else []), *cells])
    title = f"On {', '.join(tasks or results[0].answers)}:"
    return f"{title}\n\n{_table(rows)}"


def _claims_table(ablation: Ablation, results: Sequence[Result]) -> str:
    rows = [["expected", "difference (95 %)", "outcome"]]
    for claim, found, decided in outcomes(ablation, results):
        margin = f" (within {_shown(claim.metric, claim.margin)})" if claim.margin else ""
        rows.append([text_of(claim) + margin, _difference(claim.metric, found), decided])
    return _table(rows)


def _difference(metric: Metric, found: Difference | None) -> str:
    if found is None:
        return "-"
    value, low, high = (
        _shown(metric, x, signed=True) for x in (found.value, found.low, found.high)
    )
    return f"{value} ({low} to {high})"


def _shown(metric: Metric, x: float, *, signed: bool = False) -> str:
    digits = {"masked_loss": 4, "tpf": 2}.get(metric, 1)
    return f"{100 * x if metric in PERCENT else x:{'+' if signed else ''}.{digits}f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def _plot(ablation: Ablation, results: Sequence[Result], path: Path) -> Path:
    """Every arm as a point with its intervals, one panel for each group of tasks."""
    pyplot = require_pyplot()
    groups = _groups(ablation)
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(8, 4.6), layout="constrained", squeeze=False
    )
    for axes, tasks, metrics in zip(panels[0], groups, ablation.axes, strict=True):
        x_metric, y_metric = metrics
        lines: dict[str, list[tuple[float, float]]] = {}
        for arm in ablation.arms:
            own = [r for r in results if r.arm == arm.name]
            if not own:
                continue
            x, y = (_scaled(m, value(own, m, tasks)) for m in metrics)
            lines.setdefault(arm.line or arm.name, []).append((x, y))
            low, high = (_scaled(y_metric, v) for v in interval(own, y_metric, tasks))
            place = list(lines).index(arm.line or arm.name)
            axes.errorbar(
                x, y, yerr=[[max(0.0, y - low)], [max(0.0, high - y)]], color=f"C{place}",
                alpha=0.35, capsize=2,
            )  # fmt: skip
            if arm.point:
                axes.annotate(
                    arm.point, (x, y), (4, 4), textcoords="offset points", fontsize=8,
                    color=f"C{place}",
                )  # fmt: skip
        for place, (name, points) in enumerate(lines.items()):
            marker = _MARKERS[place % len(_MARKERS)]
            # A lone arm is hollow: another's point may lie under it.
            face, size = ("none", 9) if len(points) == 1 else (f"C{place}", 6)
            axes.plot(
                *zip(*points, strict=True), marker=marker, color=f"C{place}", label=name,
                markerfacecolor=face, markersize=size, zorder=4 if len(points) == 1 else 3,
            )  # fmt: skip
        axes.set(xlabel=_UNITS[x_metric], ylabel=_UNITS[y_metric])
        if tasks:
            axes.set_title(", ".join(tasks), fontsize=9)
        axes.margins(x=0.12)
        axes.grid(alpha=0.3)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    with whole_file(path) as building:
        figure.savefig(building, dpi=110, format="png")
    pyplot.close(figure)
    return path


def _scaled(metric: Metric, x: float) -> float:
    return 100 * x if metric in PERCENT else x


def _with_index(text: str, all_results: dict[str, list[Result]]) -> str:
    rows = [["ablation", "question", "state", "verdict", "figure"]]
    for ablation in ABLATIONS:
        results = all_results[ablation.id]
        picture = f'<img src="{ablation.id}/{FIGURE}" width="240">' if results else "-"
        rows.append(
            [f"[{ablation.id}]({ablation.id}/README.md)", ablation.question,
             state(ablation, results), verdict(ablation, results) if results else "-", picture]
        )  # fmt: skip
    section = f"{BEGIN}\n{_table(rows)}\n{END}"
    before, found, rest = text.partition(BEGIN)
    if not found:
        return f"{text.rstrip()}\n\n## Ablations\n\n{section}\n"
    _, closed, after = rest.partition(END)
    if not closed:
        raise CloverError(f"experiments/README.md has {BEGIN!r} without {END!r}: restore it")
    return f"{before}{section}{after}"


def _write(path: Path, text: str) -> Path:
    with whole_file(path) as building:
        building.write_text(text)
    return path
