"""The plan as a picture: what one device holds, as a stacked bar, against what devices have."""

from pathlib import Path

from clover_jax.errors import CloverError
from clover_jax.eval.card_report import require_pyplot
from clover_jax.plan.devices import DEVICES
from clover_jax.plan.report import Plan


def draw(plans: dict[str, Plan], path: Path) -> None:
    """One bar per plan; devices are lines.

    Args:
        plans: by the bar's label.
        path: of the picture; its ending says which kind.

    Raises:
        CloverError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = require_pyplot()
    figure, axes = pyplot.subplots(figsize=(4.5 + 1.6 * len(plans), 5), layout="constrained")
    names = dict.fromkeys(name for plan in plans.values() for name in plan.parts)
    colours = dict(zip(names, pyplot.get_cmap("tab20").colors, strict=False))
    for x, plan in enumerate(plans.values()):
        bottom = 0.0
        for name, size in plan.parts.items():
            height = size.device / 2**30
            label = None if name not in names else name
            names.pop(name, None)  # one entry in the legend
            axes.bar(x, height, 0.6, bottom, color=colours[name], label=label)
            bottom += height
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(x, bottom, f"{bottom:.1f}", ha="center", va="bottom", fontsize=9, bbox=box)
    tallest = max(sum(s.device for s in p.parts.values()) for p in plans.values())
    limits: dict[int, list[str]] = {}
    for device in DEVICES:
        limits.setdefault(device.memory, []).append(device.name)
    shown = sorted(limits)[: 1 + sum(limit < tallest for limit in limits)]  # one above all bars
    top = 1.12 * max(tallest, shown[-1])
    near: list[str] = []
    for limit, following in zip(shown, [*shown[1:], None], strict=True):
        axes.axhline(limit / 2**30, color="black", linewidth=0.8, linestyle="--", zorder=0)
        near += limits[limit]
        if following is None or following - limit > 0.035 * top:  # else one text for both
            text = " / ".join(near)
            axes.text(len(plans) - 0.6, limit / 2**30, text, fontsize=8, va="bottom")
            near = []
    axes.set_xlim(-0.5, len(plans) + 0.3)
    axes.set_xticks(range(len(plans)), plans)
    axes.set_ylabel("GiB on each device")
    axes.set_ylim(0, top / 2**30)
    figure.legend(loc="outside right upper", fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CloverError(f"{path} cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
