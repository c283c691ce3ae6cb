"""A report as tables and as a heat map."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from clover_jax.errors import CloverError
from clover_jax.eval.card_report import require_pyplot
from clover_jax.verify.compare import Report, Tap
from clover_jax.verify.endpoint import EndpointRow


def tables(report: Report) -> list[Table | Text]:
    """What people read: errors by layer and tap, the worst of each tap, logits, the verdict."""
    shown: list[Table | Text] = [_head(report)]
    if any(tap.layer is not None for tap in report.taps):
        shown.append(_by_layer(report))
    if report.taps or report.running:
        shown.append(_worst(report))
    if report.logits:
        shown.append(_logits(report))
    for r, row in enumerate(report.continuation):
        line = f"greedy continuation of row {r}: {row.equal} of {row.tokens} tokens equal"
        if row.margin is not None:
            line += f", then a difference at a margin of {row.margin:.1e}"
        shown.append(Text(line, style="" if row.ok else "red"))
    shown.append(_verdict(report))
    return shown


def _table(title: str, *names: str) -> Table:
    """An empty table; words stand left, numbers right."""
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name in ("tap", "read as") else "right")
    return table


def _head(report: Report) -> Text:
    sides = "\n".join(
        f"{side}: " + ", ".join(f"{k} {v}" for k, v in versions.items())
        for side, versions in report.versions.items()
    )
    return Text(
        f"against {report.against}: {report.rows} rows of {report.length} tokens, "
        f"{report.dtype}, matmul precision {report.precision}\n{sides}"
    )


def _verdict(report: Report) -> Text:
    if report.ok:
        return Text("inside all limits", style="green")
    first = report.first_diverging
    if first is None:
        return Text("past the limits: logits or continuation", style="bold red")
    return Text(f"past the limits, first at {first.where}", style="bold red")


def _cell(tap: Tap) -> Text:
    return Text(f"{tap.relative_rms:.0e}", style="" if tap.ok else "red")


def columns(report: Report) -> list[str]:
    """Tap names in the order of the computation."""
    names: list[str] = []
    for tap in (*report.taps, *report.running):
        if tap.layer is not None and tap.tap not in names:
            names.append(tap.tap)
    return names


def by_layer(report: Report) -> dict[int, dict[str, Tap]]:
    """Layer -> tap name -> tap."""
    found: dict[int, dict[str, Tap]] = {}
    for tap in (*report.taps, *report.running):
        if tap.layer is not None:
            found.setdefault(tap.layer, {})[tap.tap] = tap
    return found


def _by_layer(report: Report) -> Table:
    first = report.first_diverging
    names = ("layer", *(name.replace("_", " ") for name in columns(report)))
    table = _table("relative RMS error, each tap fed their input", *names)
    for layer, taps in by_layer(report).items():
        cells = [_cell(taps[n]) if n in taps else Text("-") for n in columns(report)]
        style = "red" if first is not None and first.layer == layer else ""
        table.add_row(Text(str(layer), style=style), *cells)
    return table


def _worst(report: Report) -> Table:
    names = ("tap", "layer", "max abs", "relative RMS", "limit", "differing", "near-ties")
    table = _table("worst of each tap", *names)
    named: dict[str, list[Tap]] = {}
    for tap in (*report.taps, *report.running):
        kind = "grad.*" if tap.tap.startswith("grad.") else tap.tap
        named.setdefault(kind, []).append(tap)
    for name, taps in named.items():
        worst = max(taps, key=lambda t: (not t.ok, t.relative_rms))
        where = "-" if worst.layer is None else str(worst.layer)
        table.add_row(
            worst.tap if name == "grad.*" else name,
            where,
            f"{worst.max_abs:.1e}",
            f"{worst.relative_rms:.1e}",
            f"{worst.limit:.0e}",
            str(sum(t.differing for t in taps)),
            str(sum(t.near_ties for t in taps)),
            style="" if all(t.ok for t in taps) else "red",
        )
    return table


def _logits(report: Report) -> Table:
    table = _table(
        "logits", "read as", "positions", "KL mean", "KL p99", "KL max", "max abs",
        "largest logit", "top-1", "differing", "near-ties",
    )  # fmt: skip
    for row in report.logits:
        table.add_row(
            row.path,
            str(row.positions),
            *(f"{x:.1e}" for x in (row.kl_mean, row.kl_p99, row.kl_max, row.max_abs)),
            f"{row.peak:.1f}",
            f"{100 * row.top1:.2f} %",
            str(row.differing),
            str(row.near_ties),
            style="" if row.ok else "red",
        )
    return table


def endpoint_table(url: str, rows: Sequence[EndpointRow], limit: float) -> Table:
    """Log-probabilities of a server against ours, one line per prompt."""
    table = _table(
        f"|log-probability of {url} - ours|, nats, limit {limit:g}",
        "prompt tokens", "of them compared", "completion tokens", "mean", "max", "at position",
        "not our best",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            *(str(n) for n in (row.prompt, row.compared_prompt, row.compared)),
            f"{row.mean_gap:.1e}",
            f"{row.max_gap:.1e}",
            str(row.worst),
            str(row.not_greedy),
            style="" if row.ok else "red",
        )
    return table


def draw(report: Report, path: Path) -> None:
    """Heat map of layer by tap: by how many powers of ten an error is below or past its limit.

    Raises:
        CloverError: matplotlib is missing, there is nothing to draw, or the file cannot be written.
    """
    rows, names = by_layer(report), columns(report)
    if not rows:
        raise CloverError("there are no taps to draw: only logits were compared")
    pyplot = require_pyplot()
    grid = np.full((len(rows), len(names)), np.nan)
    for y, taps in enumerate(rows.values()):
        for x, name in enumerate(names):
            if name in taps:
                error = min(max(taps[name].relative_rms, 1e-12), 1e6)
                grid[y, x] = np.log10(error / taps[name].limit)
    figure, axes = pyplot.subplots(figsize=(1.5 + 0.55 * len(names), 1.8 + 0.28 * len(rows)))
    image = axes.imshow(grid, cmap="RdYlGn_r", vmin=-2, vmax=2, aspect="auto")
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_yticks(range(len(rows)), [str(layer) for layer in rows])
    axes.set_ylabel("layer")
    axes.set_title(f"against {report.against}, {report.dtype}: error over limit")
    figure.colorbar(image, label="log10(relative RMS / limit)")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CloverError(f"{path} cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
