"""The card's cells as Markdown tables and pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clover_jax.data import tasks
from clover_jax.errors import CloverError
from clover_jax.eval.card import ARMS, BASE_ARM, THRESHOLD, Arm, Cell, thinks
from clover_jax.eval.held_out import PairedDifference, paired_difference, wilson

STEPS_SHOWN = 12
MEAN = "mean A1-A6"


def markdown(cells: Mapping[str, Any]) -> str:
    """All tables."""
    parts = [
        ("Accuracy, %, and its difference to " + BASE_ARM, _accuracy(cells)),
        ("Tokens per forward (all forwards / previews only)", _tpf(cells)),
        ("Tokens until the stop, mean (answers that stopped, %)", _lengths(cells)),
    ]
    if any(key.startswith("replay/") for key in cells):
        parts += [
            ("Reference answers replayed: sampler and oracle", _oracle(cells)),
            ("Calibration by denoising step", _calibration(cells, "steps")),
            ("Calibration by confidence, all masked positions", _calibration(cells, "bins")),
            ("Accuracy against TPF over thresholds, " + MEAN, _frontier(cells)),
            ("Expert use, share of routed positions", _experts(cells)),
        ]
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(cells: Mapping[str, Any], kind: str, arm: str, task: str) -> Cell:
    return msgspec.convert(cells[f"{kind}/{arm}/{task}"], Cell)


def _arms(cells: Mapping[str, Any]) -> list[str]:
    return [arm.name for arm in ARMS if f"answers/{arm.name}/{tasks.TASKS[0]}" in cells]


def _label(task: str) -> str:
    return task + (", thinking" if thinks(task) else "")


def mean_accuracy(cells: Mapping[str, Any], kind: str, arm: str) -> float:
    """Of the families with a scratchpad, which the card lets think."""
    found = [_cell(cells, kind, arm, task).accuracy for task in tasks.SCRATCHPAD_TASKS]
    return float(np.mean(found))


def mean_tpf(cells: Mapping[str, Any], kind: str, arm: str) -> float:
    """Over all forwards, of the families with a scratchpad, which count alike."""
    return float(np.mean([_cell(cells, kind, arm, t).tpf for t in tasks.SCRATCHPAD_TASKS]))


def _difference(cells: Mapping[str, Any], arm: str, families: Sequence[str]) -> PairedDifference:
    return paired_difference(
        [
            (_cell(cells, "answers", arm, t).solved, _cell(cells, "answers", BASE_ARM, t).solved)
            for t in families
        ]
    )


def _accuracy(cells: Mapping[str, Any]) -> str:
    arms = _arms(cells)

    def entry(arm: str, accuracy: float, families: Sequence[str]) -> str:
        if arm == BASE_ARM or BASE_ARM not in arms:
            return f"{100 * accuracy:.1f}"
        d = _difference(cells, arm, families)
        low, high = 100 * d.low, 100 * d.high
        return f"{100 * accuracy:.1f} ({100 * d.difference:+.1f}; {low:.1f} to {high:.1f})"

    rows = []
    for task in tasks.TASKS:
        found = {arm: _cell(cells, "answers", arm, task) for arm in arms}
        n = len(found[arms[0]].right)
        rows.append(
            [_label(task), str(n), *(entry(a, c.accuracy, [task]) for a, c in found.items())]
        )
    means = [entry(a, mean_accuracy(cells, "answers", a), tasks.SCRATCHPAD_TASKS) for a in arms]
    rows.append([f"**{MEAN}**", "", *means])
    return _table(["task", "n", *arms], rows)


def _tpf(cells: Mapping[str, Any]) -> str:
    arms = [a for a in _arms(cells) if _cell(cells, "answers", a, tasks.TASKS[0]).previews]
    rows = []
    for task in tasks.TASKS:
        found = [_cell(cells, "answers", arm, task) for arm in arms]
        rows.append([_label(task), *(f"{c.tpf:.2f} / {c.tpf_previews:.2f}" for c in found)])
    means = [f"{mean_tpf(cells, 'answers', a):.2f}" for a in arms]
    rows.append([f"**{MEAN}**", *means])
    return _table(["task", *arms], rows)


def _lengths(cells: Mapping[str, Any]) -> str:
    arms = _arms(cells)
    rows = []
    for task in tasks.TASKS:
        found = [_cell(cells, "answers", arm, task) for arm in arms]
        shown = [f"{np.mean(c.tokens):.1f} ({100 * c.stopped / len(c.right):.0f})" for c in found]
        rows.append([_label(task), *shown])
    return _table(["task", *arms], rows)


def _oracle(cells: Mapping[str, Any]) -> str:
    rows = []
    for task in tasks.TASKS:
        own, best = (cells[f"replay/{rule}/{task}"] for rule in ("threshold", "oracle"))
        share = lambda r: f"{100 * r['solved'] / r['answers']:.1f}"
        rows.append(
            [_label(task), str(own["answers"]), share(own), f"{own['tpf_previews']:.2f}",
             share(best), f"{best['tpf_previews']:.2f}"]
        )  # fmt: skip
    head = ["task", "answers", f"all right at {THRESHOLD}, %", "TPF previews",
            "no miss by the oracle, %", "TPF previews, oracle"]  # fmt: skip
    return _table(head, rows)


def _calibration(cells: Mapping[str, Any], kind: str) -> str:
    """Pooled over all families."""
    found = [cells[f"replay/threshold/{task}"][kind] for task in tasks.TASKS]
    rows = []
    for i in range(min(max(map(len, found)), STEPS_SHOWN)):
        at = [f[i] for f in found if i < len(f)]
        n = sum(count for count, _, _ in at)
        if n:
            mean = lambda j, at=at, n=n: sum(cell[0] * cell[j] for cell in at) / n
            name = str(i + 1) if kind == "steps" else f"{i / 10:.1f}-{(i + 1) / 10:.1f}"
            rows.append([name, str(n), f"{mean(1):.3f}", f"{mean(2):.3f}"])
    first = "step" if kind == "steps" else "confidence"
    return _table([first, "tokens", "mean confidence", "share right"], rows)


def _curve(cells: Mapping[str, Any], arm: Arm) -> list[tuple[float, float, float]]:
    """(threshold, mean TPF, mean accuracy) of an arm."""
    points = [(t, f"{arm.name}, {t}") for t in arm.frontier]
    return [
        (t, mean_tpf(cells, "frontier", at), mean_accuracy(cells, "frontier", at))
        for t, at in points
    ]


def _with_frontier(cells: Mapping[str, Any]) -> list[Arm]:
    return [arm for arm in ARMS if arm.frontier and arm.name in _arms(cells)]


def _frontier(cells: Mapping[str, Any]) -> str:
    rows = [
        [arm.name, f"{threshold:g}", f"{100 * accuracy:.1f}", f"{tpf:.2f}"]
        for arm in _with_frontier(cells)
        for threshold, tpf, accuracy in _curve(cells, arm)
    ]
    return _table(["arm", "threshold", "accuracy, %", "TPF, all forwards"], rows)


def _experts(cells: Mapping[str, Any]) -> str:
    share = np.asarray(cells["experts"])
    effective = np.exp(-np.sum(share * np.log(np.maximum(share, 1e-12)), axis=1))
    rows = [
        [str(i), f"{100 * s.min():.2f} %", f"{100 * s.max():.1f} %", f"{e:.1f} of {share.shape[1]}"]
        for i, (s, e) in enumerate(zip(share, effective, strict=True))
    ]
    return _table(["layer", "least used", "most used", "effective experts (e^entropy)"], rows)


def require_pyplot() -> Any:
    """Matplotlib without a screen.

    Raises:
        CloverError: it is not installed.
    """
    try:
        import matplotlib
        from matplotlib import pyplot
    except ImportError:
        raise CloverError(
            "pictures need matplotlib: install clover-jax with its extra `experiments`"
        ) from None
    matplotlib.use("agg")
    return pyplot


def plot(cells: Mapping[str, Any], runs: Mapping[str, Path], out: Path) -> list[Path]:
    """`frontier.png`, `experts.png` and, for run folders by name, `loss.png`.

    Raises:
        CloverError: matplotlib is missing, or a run has no log.
    """
    pyplot = require_pyplot()
    drawn = []
    if runs:
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for name, folder in runs.items():
            for key, curve in _curves(folder).items():
                axes.plot(*zip(*curve, strict=True), label=f"{name}: {key}")
        axes.set(xlabel="step", ylabel="training loss, nats per token", yscale="log")
        axes.legend(fontsize=8)
        drawn.append((figure, "loss.png"))
    if "experts" in cells:
        share = 100 * np.asarray(cells["experts"])
        figure, axes = pyplot.subplots(figsize=(8, 3), layout="constrained")
        image = axes.imshow(np.sort(share)[:, ::-1], aspect="auto", vmin=0)
        axes.set(xlabel="expert, by use in its layer", ylabel="layer")
        figure.colorbar(image, label="routed positions, %")
        drawn.append((figure, "experts.png"))
        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        for arm in _with_frontier(cells):
            thresholds, x, y = zip(*_curve(cells, arm), strict=True)
            at = f"{arm.name}, {thresholds[0]}"
            n = sum(len(_cell(cells, "frontier", at, t).right) for t in tasks.SCRATCHPAD_TASKS)
            low, high = zip(*(wilson(round(n * p), n) for p in y), strict=True)
            errors = [np.subtract(y, low) * 100, np.subtract(high, y) * 100]
            axes.errorbar(
                x, 100 * np.asarray(y), yerr=errors, marker="o", capsize=3, label=arm.name
            )
            for threshold, a, b in zip(thresholds, x, y, strict=True):
                axes.annotate(
                    f"{threshold:g}", (a, 100 * b), (4, 5), textcoords="offset points", fontsize=7
                )
        base = mean_accuracy(cells, "answers", BASE_ARM)
        axes.plot([1], [100 * base], "s", label=f"{BASE_ARM} (all problems)")
        axes.set(xlabel="tokens per forward, all forwards", ylabel=f"accuracy, %, {MEAN}")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left")
        drawn.append((figure, "frontier.png"))
    for figure, name in drawn:
        figure.savefig(out / name, dpi=110)
        pyplot.close(figure)
    return [out / name for _, name in drawn]


def _curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    path = folder / "log.jsonl"
    if not path.exists():
        raise CloverError(f"{path} does not exist: expected the folder of a training run")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for key in ("ar_loss", "diffusion_loss"):
            if key in line:
                found.setdefault(key.removesuffix("_loss"), []).append((line["step"], line[key]))
    return found
