"""A harness run as Markdown tables and one picture."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clover_jax.eval.card_report import require_pyplot
from clover_jax.eval.harness import Record
from clover_jax.eval.held_out import wilson
from clover_jax.eval.metrics import Comparison, Series, Summary, compare, series, summarise

NOTES = """\
Accuracy pools all problems (95 %: Wilson). TPF is tokens per forward over all forwards, then over
previews only; tokens/s includes prefill, a batch at once. Experts: mean distinct ones per preview
and layer. Repeated: share of word 3-grams that the answer had before. Early stop: stopped without
the task's form; cut: ran into the budget."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run's records say.

    Attributes:
        summaries: by backend, in the order of the run.
        comparisons: of the others with the first backend.
        series: decoders with their accuracy under parallelism.
        by_task: (right, problems) by backend, then task.
        oracle: lines about the oracle bound.
    """

    summaries: tuple[Summary, ...]
    comparisons: tuple[Comparison, ...]
    series: tuple[Series, ...]
    by_task: dict[str, dict[str, tuple[int, int]]]
    oracle: tuple[str, ...] = ()


def report(
    records: Sequence[Record], settings: Mapping[str, Any], oracle: Sequence[str] = ()
) -> Report:
    """Sum up `harness.run`'s records.

    Args:
        records: the same problems for every backend.
        settings: of each backend, by name.
        oracle: lines about the oracle bound.
    """
    groups: dict[str, list[Record]] = {}
    for r in records:
        groups.setdefault(r.backend, []).append(r)
    by_task: dict[str, dict[str, tuple[int, int]]] = {}
    for r in records:
        tasks = by_task.setdefault(r.backend, {})
        right, n = tasks.get(r.task, (0, 0))
        tasks[r.task] = (right + r.verdict.correct, n + 1)
    base, *others = groups.values()
    summaries = tuple(map(summarise, groups.values()))
    return Report(
        summaries=summaries,
        comparisons=tuple(compare(other, base) for other in others),
        series=tuple(series(summaries, settings)),
        by_task=by_task,
        oracle=tuple(oracle),
    )


def markdown(found: Report) -> str:
    """All tables."""
    parts = [
        _table(
            ["backend", "n", "accuracy", "95 %", "form", "tokens", "TPF", "previews", "tokens/s",
             "experts", "repeated", "early stop", "cut"],
            [_row(s) for s in found.summaries],
        ),
        NOTES,
    ]  # fmt: skip
    if found.comparisons:
        parts.append(
            _table(
                ["against " + found.comparisons[0].base, "difference, points", "95 %",
                 "solved by it alone / by the other", "McNemar p"],
                [_comparison(c) for c in found.comparisons],
            )
        )  # fmt: skip
    if found.series:
        parts.append(
            _table(
                ["decoder", "settings, by TPF", "AUP"],
                [[s.name, ", ".join(s.backends), f"{s.aup:.1f}"] for s in found.series],
            )
        )
    names = list(found.by_task)
    tasks = list(found.by_task[names[0]])
    share = lambda cell: f"{100 * cell[0] / cell[1]:.0f} %"
    parts.append(
        _table(
            ["task", "n", *names],
            [
                [
                    t,
                    str(found.by_task[names[0]][t][1]),
                    *(share(found.by_task[b][t]) for b in names),
                ]
                for t in tasks
            ],
        )
    )
    details = sorted({name for s in found.summaries for name in s.details})
    if details:
        rows = [
            [
                d,
                *(
                    f"{100 * s.details[d]:.1f} %" if d in s.details else "-"
                    for s in found.summaries
                ),
            ]
            for d in details
        ]
        parts.append(_table(["share", *names], rows))
    return "\n\n".join([*parts, *found.oracle]) + "\n"


def _row(s: Summary) -> list[str]:
    number = lambda x: "-" if x is None else f"{x:.2f}"
    experts = f"{sum(s.experts) / len(s.experts):.1f}" if s.experts else "-"
    return [
        s.backend, str(s.n), f"{100 * s.accuracy:.1f} %", f"{100 * s.low:.1f}-{100 * s.high:.1f}",
        f"{100 * s.format_valid:.0f} %", f"{s.tokens:.1f}", number(s.tpf), number(s.tpf_previews),
        f"{s.tokens_per_s:.0f}", experts, f"{100 * s.repetition:.1f} %",
        f"{100 * s.early_stop:.0f} %", f"{100 * s.cut:.0f} %",
    ]  # fmt: skip


def _comparison(c: Comparison) -> list[str]:
    d = c.difference
    return [
        c.backend, f"{100 * d.difference:+.1f}", f"{100 * d.low:+.1f} to {100 * d.high:+.1f}",
        f"{c.only_backend} / {c.only_base}", f"{c.p:.2g}",
    ]  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(found: Report, path: Path) -> None:
    """Accuracy against tokens per forward, and accuracy by task.

    Raises:
        CloverError: matplotlib is missing.
    """
    pyplot = require_pyplot()
    names = list(found.by_task)
    tasks = list(found.by_task[names[0]])
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, max(4.0, 1.4 + 0.3 * len(tasks))), layout="constrained"
    )
    colour = {name: f"C{i}" for i, name in enumerate(names)}
    at = {s.backend: s for s in found.summaries}
    for one in found.series:
        points = [at[name] for name in one.backends]
        left.plot(
            [s.tpf for s in points], [100 * s.accuracy for s in points], color="0.8", zorder=0
        )
    for s in found.summaries:
        if s.tpf is not None:
            error = [[100 * (s.accuracy - s.low)], [100 * (s.high - s.accuracy)]]
            left.errorbar(
                [s.tpf], [100 * s.accuracy], yerr=error, marker="o", capsize=3,
                color=colour[s.backend],
            )  # fmt: skip
    left.set(xlabel="tokens per forward, all forwards", ylabel="accuracy, % (95 %)", ylim=(0, 100))
    left.grid(alpha=0.3)
    for k, name in enumerate(names):
        shift = (k - (len(names) - 1) / 2) * 0.7 / len(names)
        cells = [found.by_task[name][t] for t in tasks]
        y = [i + shift for i in range(len(tasks))]
        x = [100 * a / n for a, n in cells]
        ends = [wilson(a, n) for a, n in cells]
        error = [
            [max(0.0, v - 100 * low) for v, (low, _) in zip(x, ends, strict=True)],
            [max(0.0, 100 * high - v) for v, (_, high) in zip(x, ends, strict=True)],
        ]
        right.errorbar(
            x, y, xerr=error, fmt="o", markersize=4, linewidth=1, color=colour[name], label=name
        )
    right.set(xlabel="accuracy, % (95 %)", xlim=(-2, 102), yticks=range(len(tasks)))
    right.set_yticklabels(tasks)
    right.invert_yaxis()
    right.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(4, len(names)), fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
