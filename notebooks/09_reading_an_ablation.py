# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 9. Reading an ablation
#
# An ablation is a question in a registry (`clover_jax/ablations.py`): arms that differ in settings,
# and claims about them, **written before the run**. `clover ablate run NAME` answers it into
# `experiments/NAME/results.jsonl`; `clover ablate report` writes the verdict from those lines
# alone. This notebook reads one of them.
#
# Arms answer the same problems, so a difference is taken problem by problem: with $b$ problems that
# only the arm solved and $c$ that only the base solved out of $n$, $\hat d = (b - c)/n$, and its 95
# % interval is Bonett and Price's, which adds one discordant pair of each kind and stays honest
# near 0 and 1. A claim is *confirmed* if the whole interval lies where it said, *refuted* if none
# of it does, else *undecided*: the run was too small to tell.
#
# **Switch:** `NAME`; the next cell lists what has results.

# %%
NAME = "005_coreset"

# %%
from pathlib import Path

import matplotlib.pyplot as plt

import clover_jax
from clover_jax import ablations
from clover_jax.eval.ablation_run import read_results
from clover_jax.eval.ablation_stats import difference, interval, outcomes, text_of, value

experiments = Path(clover_jax.__file__).parents[1] / "experiments"
for a in ablations.ABLATIONS:
    ran = (experiments / a.id / "results.jsonl").exists()
    print(f"{a.id:24} {'has results' if ran else 'not run yet'}")

# %%
ablation = ablations.named(NAME)
results = read_results(experiments / NAME / "results.jsonl")
by_arm = {arm.name: [r for r in results if r.arm == arm.name] for arm in ablation.arms}
by_arm = {name: found for name, found in by_arm.items() if found}
print(ablation.question)
print("Expected:", ablation.expected)

# %% [markdown]
# ## Arms
# One point per arm with its 95 % interval over the problems; arms of one line differ in one number.

# %%
UNIT = {"accuracy": 100, "stopped": 100, "repetition": 100}
LABEL = {
    "accuracy": "accuracy, %",
    "tpf": "tokens per forward, all",
    "experts": "experts per layer",
    "masked_loss": "masked loss, nats",
    "repetition": "repeated 4-grams, %",
    "stopped": "answers that end, %",
    "tokens": "tokens of an answer",
}


def scaled(metric: str, x: float) -> float:
    """In the unit of its label."""
    return x * UNIT.get(metric, 1)


x_metric, y_metric = ablation.axes[0]
fig, ax = plt.subplots(figsize=(8.5, 4.5))
lines = list(dict.fromkeys(arm.line or arm.name for arm in ablation.arms if arm.name in by_arm))
for place, line in enumerate(lines):
    arms = [a for a in ablation.arms if (a.line or a.name) == line and a.name in by_arm]
    x = [scaled(x_metric, value(by_arm[a.name], x_metric)) for a in arms]
    y = [scaled(y_metric, value(by_arm[a.name], y_metric)) for a in arms]
    ends = [[scaled(y_metric, e) for e in interval(by_arm[a.name], y_metric)] for a in arms]
    error = [[max(0, b - e[0]) for b, e in zip(y, ends, strict=True)],
             [max(0, e[1] - b) for b, e in zip(y, ends, strict=True)]]  # fmt: skip
    alone = len(arms) == 1  # then hollow and larger: another may lie under it
    ax.errorbar(
        x, y, error, fmt="o-", color=f"C{place}", mfc="none" if alone else None,
        ms=11 if alone else 6, capsize=2, elinewidth=0.6, label=line,
    )  # fmt: skip
    for arm, at in zip(arms, zip(x, y, strict=True), strict=True):
        ax.annotate(arm.point, at, (5, 4), textcoords="offset points", fontsize=8)
ax.set(xlabel=LABEL[x_metric], ylabel=LABEL[y_metric])
ax.grid(alpha=0.3)
ax.legend(fontsize=8)
fig.tight_layout()
plt.show()

# %% [markdown]
# The bars of two arms overlap although their difference may be clear: both answered the same
# problems, and what is hard for one is hard for the other. That is why claims are judged by paired
# differences.
#
# ## Claims

# %%
COLOR = {
    "confirmed": "tab:green",
    "refuted": "tab:red",
    "undecided": "tab:grey",
    "not run": "white",
}
found = [(claim, d, decided) for claim, d, decided in outcomes(ablation, results) if d]
fig, axes = plt.subplots(len(found), 1, figsize=(10, 0.75 * len(found) + 0.4),
                         squeeze=False)  # fmt: skip
for ax, (claim, d, decided) in zip(axes[:, 0], found, strict=True):
    low, mean, high = (scaled(claim.metric, v) for v in (d.low, d.value, d.high))
    ax.plot([low, high], [0, 0], color=COLOR[decided], lw=3)
    ax.plot(mean, 0, "o", color=COLOR[decided])
    if claim.direction == "same":
        margin = scaled(claim.metric, claim.margin)
        ax.axvspan(-margin, margin, color="tab:blue", alpha=0.12)
        reach = max(abs(low), abs(high), margin)
    else:
        reach = max(abs(low), abs(high))
    ax.axvline(0, color="black", lw=0.7)
    ax.set(xlim=(-1.15 * reach or -1, 1.15 * reach or 1), yticks=[], ylim=(-1, 1))
    ax.set_title(f"{decided}: {text_of(claim)}", fontsize=8, loc="left", pad=2)
    ax.tick_params(labelsize=7)
fig.suptitle("arm minus base, mean and 95 % interval (blue: counts as equal)", fontsize=9)
fig.tight_layout()
plt.show()

# %% [markdown]
# ## A comparison nobody registered
# Any two arms can be compared, but a difference that was found by looking is a question for a next
# run, not a result: among twenty intervals one misses.

# %%
first, second = lines[0], list(by_arm)[-1]
first = next(a.name for a in ablation.arms if (a.line or a.name) == first and a.name in by_arm)
d = difference(by_arm[second], by_arm[first], "accuracy")
print(f"accuracy of {second!r} minus {first!r}: {100 * d.value:+.1f} "
      f"({100 * d.low:+.1f} to {100 * d.high:+.1f}) points")  # fmt: skip
