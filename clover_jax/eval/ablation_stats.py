"""What an ablation's results say: metrics, paired differences with 95 % intervals, verdicts.

Arms share their problems, so differences are paired by problem. Shares (`accuracy`, `stopped`) of
one seed have the interval of Bonett and Price, which stays honest near 0 and 1; everything else the
percentiles of a bootstrap over problems, the same ones for every seed. Where a claim rests on
trainings with several seeds, the interval also holds the t interval over the seeds' differences,
and fewer than three seeds decide nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from clover_jax.ablations import Ablation, Claim, Metric
from clover_jax.eval.ablation_run import Result
from clover_jax.eval.held_out import paired_difference

SEEDS_TO_CLAIM = 3
RESAMPLES = 2000
_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided, by number of seeds

type Outcome = Literal["confirmed", "refuted", "undecided", "not run"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Arm minus base.

    Attributes:
        value: mean over tasks and seeds.
        low: lower end of the 95 % interval.
        high: its upper end.
        seeds: that both arms have.
    """

    value: float
    low: float
    high: float
    seeds: int


def state(ablation: Ablation, results: Sequence[Result]) -> str:
    """How much of an ablation was run."""
    total = len(ablation.arms) * len(ablation.seeds)
    if not results:
        return "not run"
    return "done" if len(results) == total else f"{len(results)} of {total} runs"


def value(results: Sequence[Result], metric: Metric, tasks: Sequence[str] = ()) -> float:
    """A metric of one arm: the mean over its seeds of the mean over tasks."""
    return float(np.mean([_statistic(_columns(r, metric, tasks)) for r in results]))


def interval(
    results: Sequence[Result], metric: Metric, tasks: Sequence[str] = ()
) -> tuple[float, float]:
    """A 95 % bootstrap interval of `value`, over the problems."""
    columns = [_columns(r, metric, tasks) for r in results]
    low, high = np.percentile(_resampled([columns], lambda c: c[0]), (2.5, 97.5))
    return float(low), float(high)


def difference(
    arm: Sequence[Result], base: Sequence[Result], metric: Metric, tasks: Sequence[str] = ()
) -> Difference | None:
    """Paired difference of a metric; None if the arms have no seed in common."""
    firsts, seconds = {r.seed: r for r in arm}, {r.seed: r for r in base}
    seeds = sorted(firsts.keys() & seconds.keys())
    if not seeds:
        return None
    first = [_columns(firsts[seed], metric, tasks) for seed in seeds]
    second = [_columns(seconds[seed], metric, tasks) for seed in seeds]
    by_seed = [_statistic(a) - _statistic(b) for a, b in zip(first, second, strict=True)]
    mean = float(np.mean(by_seed))
    if metric in ("accuracy", "stopped") and len(seeds) == 1:
        pairs = [
            ((a[:, 0] > 0).tolist(), (b[:, 0] > 0).tolist())
            for a, b in zip(first[0], second[0], strict=True)
        ]
        paired = paired_difference(pairs)
        low, high = paired.low, paired.high
    else:
        low, high = np.percentile(_resampled([first, second], lambda c: c[0] - c[1]), (2.5, 97.5))
    if len(seeds) > 1:
        half = _T95[min(len(seeds), max(_T95))] * np.std(by_seed, ddof=1) / np.sqrt(len(seeds))
        low, high = min(low, mean - half), max(high, mean + half)
    return Difference(mean, float(low), float(high), len(seeds))


def _columns(result: Result, metric: Metric, tasks: Sequence[str]) -> list[np.ndarray]:
    """Per task [problems, 2]: numerators and denominators, whose sums' ratio is the statistic."""
    if metric == "masked_loss":
        losses = np.asarray(result.losses)
        return [np.stack([losses, np.ones_like(losses)], -1)] if len(losses) else []
    found = []
    for task, answers in result.answers.items():
        if tasks and task not in tasks:
            continue
        shares = metric in ("accuracy", "stopped")
        name = {"accuracy": "right", "tpf": "tokens"}.get(metric, metric)
        entries = getattr(answers, name)
        above = np.array(list(entries) if shares else entries, float)
        below = np.maximum(answers.forwards, 1) if metric == "tpf" else np.ones_like(above)
        found.append(np.stack([above, below], -1))
    return found


def _statistic(columns: Sequence[np.ndarray]) -> float:
    """Tasks count alike."""
    return float(np.mean([c[:, 0].sum() / c[:, 1].sum() for c in columns])) if columns else np.nan


def _resampled(sides: Sequence[Sequence[Sequence[np.ndarray]]], combine) -> np.ndarray:
    """Bootstrap values of a function of each side's mean over seeds; problems drawn together."""
    draw = np.random.default_rng(0)
    total = np.zeros(RESAMPLES)
    tasks = len(sides[0][0])
    for task in range(tasks):
        n = len(sides[0][0][task])
        chosen = draw.integers(0, n, (RESAMPLES, n))
        ratios = []
        for side in sides:
            sums = [columns[task][chosen].sum(1) for columns in side]
            ratios.append(np.mean([s[:, 0] / s[:, 1] for s in sums], axis=0))
        total += combine(ratios) / tasks
    return total


def outcome(claim: Claim, found: Difference | None, seeds_needed: int) -> Outcome:
    """Whether an interval decides a claim."""
    if found is None or np.isnan(found.value):
        return "not run"
    if found.seeds < seeds_needed:
        return "undecided"
    low, high = found.low, found.high
    if claim.direction == "same":
        inside = -claim.margin <= low and high <= claim.margin
        outside = low > claim.margin or high < -claim.margin
        return "confirmed" if inside else "refuted" if outside else "undecided"
    if claim.direction == "lower":
        low, high = -high, -low
    return "confirmed" if low > 0 else "refuted" if high < 0 else "undecided"


def outcomes(
    ablation: Ablation, results: Sequence[Result]
) -> list[tuple[Claim, Difference | None, Outcome]]:
    """Every claim with what the results say."""
    of = lambda name: [r for r in results if r.arm == name]
    needed = min(SEEDS_TO_CLAIM, len(ablation.seeds))
    found = []
    for claim in ablation.claims:
        d = difference(of(claim.arm), of(claim.base), claim.metric, claim.tasks)
        found.append((claim, d, outcome(claim, d, needed)))
    return found


def text_of(claim: Claim) -> str:
    """A claim in words."""
    relation = "like that of" if claim.direction == "same" else f"{claim.direction} than with"
    where = f" on {', '.join(claim.tasks)}" if claim.tasks else ""
    return f"{NAMES[claim.metric]}{where} with {claim.arm} {relation} {claim.base}"


NAMES = {
    "accuracy": "accuracy",
    "tpf": "tokens per forward",
    "tokens": "tokens of an answer",
    "experts": "experts per layer",
    "repetition": "repeated 4-grams",
    "stopped": "answers that end",
    "masked_loss": "masked loss",
}


def verdict(ablation: Ablation, results: Sequence[Result]) -> str:
    """One line from the results."""
    found = outcomes(ablation, results)
    by = lambda kind: [text_of(claim) for claim, _, decided in found if decided == kind]
    parts = [f"{len(by('confirmed'))} of {len(found)} expectations hold"]
    parts += [
        f"{kind}: {'; '.join(by(kind))}" for kind in ("refuted", "undecided", "not run") if by(kind)
    ]
    return ". ".join(parts)
