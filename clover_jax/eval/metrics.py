"""Figures from a harness' records: accuracy, speed, repetition, and paired comparisons.

All backends are scored by the same functions of the same fields, so what a server does not tell
(passes, experts) is missing for it, and nothing else differs.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from clover_jax.eval.harness import Record
from clover_jax.eval.held_out import PairedDifference, paired_difference, wilson

REPEAT_WORDS = 3  # words of what counts as a repetition
AUP_ALPHA, AUP_POINTS = 3.0, 5.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """One backend over some tasks.

    Attributes:
        backend: its name.
        n: problems.
        accuracy: share of right answers, problems of all tasks pooled.
        low: lower end of its 95 % Wilson interval.
        high: its upper end.
        format_valid: share of answers of the task's form.
        tokens: mean tokens of an answer.
        tpf: all tokens over all forwards; None where passes are not known.
        tpf_previews: over previews only; None for AR and where passes are not known.
        tokens_per_s: all tokens over all time, prefill included, `batch` answers at once.
        experts: mean distinct experts per preview, by layer; empty where not known.
        repetition: share of the words' 3-grams that their answer has had before.
        early_stop: share of answers that stopped by themselves without having the form.
        cut: share of answers that ran into the budget.
        details: means of the verdicts' details, each over the answers that have it.
    """

    backend: str
    n: int
    accuracy: float
    low: float
    high: float
    format_valid: float
    tokens: float
    tpf: float | None
    tpf_previews: float | None
    tokens_per_s: float
    experts: tuple[float, ...]
    repetition: float
    early_stop: float
    cut: float
    details: dict[str, float]


def summarise(records: Sequence[Record]) -> Summary:
    """Of one backend's records, at least one."""
    replies, verdicts = [r.reply for r in records], [r.verdict for r in records]
    n, tokens = len(records), sum(r.tokens for r in replies)
    right = sum(v.correct for v in verdicts)
    low, high = wilson(right, n)
    known = all(r.forwards is not None for r in replies)
    forwards = sum(r.forwards or 0 for r in replies)
    previews = sum(r.previews or 0 for r in replies)
    names = sorted({name for v in verdicts for name in v.details})
    values = {name: [v.details[name] for v in verdicts if name in v.details] for name in names}
    return Summary(
        backend=records[0].backend,
        n=n,
        accuracy=right / n,
        low=low,
        high=high,
        format_valid=sum(v.format_valid for v in verdicts) / n,
        tokens=tokens / n,
        tpf=tokens / max(forwards, 1) if known else None,
        tpf_previews=tokens / previews if previews else None,
        tokens_per_s=tokens / max(sum(r.seconds for r in replies), 1e-9),
        experts=_experts(records),
        repetition=repetition([r.text for r in replies]),
        early_stop=sum(
            r.finish == "stop" and not v.format_valid
            for r, v in zip(replies, verdicts, strict=True)
        )
        / n,
        cut=sum(r.finish == "length" for r in replies) / n,
        details={name: sum(found) / len(found) for name, found in values.items()},
    )


def _experts(records: Sequence[Record]) -> tuple[float, ...]:
    """Each answer's means count as often as it had previews."""
    found = [(r.reply.experts, r.reply.previews or 0) for r in records if r.reply.experts]
    total = sum(previews for _, previews in found)
    if not total:
        return ()
    layers = range(len(found[0][0]))
    return tuple(sum(e[layer] * p for e, p in found) / total for layer in layers)


def repetition(texts: Sequence[str]) -> float:
    """Share of the 3-grams of blank-separated words that occurred earlier in the same text."""
    seen, repeated = 0, 0
    for text in texts:
        words = text.split()
        grams = list(zip(*(words[k:] for k in range(REPEAT_WORDS)), strict=False))
        seen, repeated = seen + len(grams), repeated + len(grams) - len(set(grams))
    return repeated / seen if seen else 0.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One backend against another on the same problems.

    Attributes:
        backend: the one.
        base: the other.
        difference: of the accuracies, with its 95 % interval (Bonett-Price), problems pooled.
        only_backend: problems that only the one solved.
        only_base: problems that only the other solved.
        p: exact two-sided McNemar test over all problems.
    """

    backend: str
    base: str
    difference: PairedDifference
    only_backend: int
    only_base: int
    p: float


def compare(records: Sequence[Record], base: Sequence[Record]) -> Comparison:
    """Two backends' records of the same problems in the same order, at least one."""
    first, second = ([r.verdict.correct for r in part] for part in (records, base))
    pairs = list(zip(first, second, strict=True))
    only_backend = sum(a and not b for a, b in pairs)
    only_base = sum(b and not a for a, b in pairs)
    return Comparison(
        backend=records[0].backend,
        base=base[0].backend,
        difference=paired_difference([(first, second)]),
        only_backend=only_backend,
        only_base=only_base,
        p=mcnemar(only_backend, only_base),
    )


def mcnemar(first: int, second: int) -> float:
    """Exact two-sided p of `first` against `second` discordant pairs (McNemar 1947, binomial)."""
    n = first + second
    tail = sum(math.comb(n, k) for k in range(min(first, second) + 1)) / 2**n
    return min(1.0, 2 * tail)


def aup(points: Sequence[tuple[float, float]], best: float) -> float:
    """Accuracy under parallelism of one decoder over its settings (d3LLM, hao-ai-lab, 2025).

    With points (TPF rho, accuracy y in %) in ascending rho, those more than 5 points below the
    decoder's own best left out:

        rho_1 y_1 + sum_i (rho_i - rho_i-1) (y_i W(y_i) + y_i-1 W(y_i-1)) / 2
        W(y) = min(exp(-3 (1 - y / best)), 1)

    A decoder of accuracy 50 % at one token per forward has 50; more is more tokens per forward at
    little loss. The first point has no weight in the source: a decoder that is never slow and
    never right can still score, so read it beside the accuracy.

    Args:
        points: (TPF, accuracy in %) by setting, at least one.
        best: highest accuracy of any decoder on the same problems, %.
    """
    own = max(y for _, y in points)
    kept = sorted(p for p in points if p[1] >= own - AUP_POINTS)
    weighted = [
        y * min(math.exp(-AUP_ALPHA * (1 - y / best)), 1.0) if best else 0.0 for _, y in kept
    ]
    area = kept[0][0] * kept[0][1]
    for i in range(1, len(kept)):
        area += (kept[i][0] - kept[i - 1][0]) * (weighted[i] + weighted[i - 1]) / 2
    return area


@dataclasses.dataclass(frozen=True)
class Series:
    """One decoder at several thresholds or schedules.

    Attributes:
        name: its first backend's.
        backends: all of them, by ascending TPF.
        aup: accuracy under parallelism.
    """

    name: str
    backends: tuple[str, ...]
    aup: float


def series(summaries: Sequence[Summary], settings: Mapping[str, Any]) -> list[Series]:
    """Backends that differ in threshold or schedule only, together; those without TPF left out.

    Args:
        summaries: of all backends.
        settings: of each backend, by name.
    """
    groups: dict[str, list[Summary]] = {}
    for s in summaries:
        if s.tpf is not None:
            own = dict(settings[s.backend])
            own["sampling"] = {
                k: v for k, v in own.get("sampling", {}).items() if k not in ("threshold", "steps")
            }
            groups.setdefault(json.dumps(own, sort_keys=True), []).append(s)
    best = 100 * max((s.accuracy for s in summaries), default=0.0)
    found = []
    for group in groups.values():
        points = [(s.tpf or 0.0, 100 * s.accuracy) for s in group]
        ordered = sorted(group, key=lambda s: s.tpf or 0.0)
        found.append(Series(group[0].backend, tuple(s.backend for s in ordered), aup(points, best)))
    return found
