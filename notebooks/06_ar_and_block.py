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
# # 6. AR and block side by side
#
# The same weights decode in several ways: one causal token at a time; in blocks; in blocks that end
# before the first mask where nothing is sure (`unsure`); and in blocks that one preview drafts and
# the causal pass judges (`verified`: AR mode's text). All are scored on the same held-out problems,
# so differences in accuracy are paired. What blocks offer is tokens per forward; whether that is
# also *time* depends on what a forward of 32 rows costs:
#
# $$\text{speed-up} = \mathrm{TPF} \cdot \frac{t_\text{AR step}}{t_\text{forward of a block}}.$$
#
# **Switch:** `TASK`, or `THRESHOLD` to move along the frontier.

# %%
TASK = "leg_counting"
THRESHOLD = 0.95
N = 16

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import clover_jax
from clover_jax import checkpoint
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.cli.session import packaged_model
from clover_jax.data import tasks
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import Generator
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.eval.card import ARMS
from clover_jax.eval.card_report import mean_accuracy, mean_tpf
from clover_jax.eval.held_out import answer, paired_difference

keep_compiled_programs()
cfg, params, _ = checkpoint.load(packaged_model())
tokenizer = Tokenizer.load(packaged_model())
model = Generator(cfg, params, tokenizer=tokenizer, env=Env())

# %%
items = tasks.eval_set(TASK, "val", N)
WAYS = {
    "ar": SamplerConfig(),
    "block": SamplerConfig(threshold=THRESHOLD),
    "unsure": SamplerConfig(threshold=THRESHOLD, close="unsure"),
    "verified": SamplerConfig(threshold=1, close="verified"),  # nothing exceeds 1: one preview
}
found = {}
for way, sampling in WAYS.items():
    for _ in range(2):  # the first time compiles
        found[way] = answer(
            model, items, thinking=True, mode="ar" if way == "ar" else "block", sampling=sampling,
            max_tokens=96, batch=N,
        )  # fmt: skip
same = [a.completion.token_ids for a in found["ar"]]
assert [a.completion.token_ids for a in found["verified"]] == same  # lossless

# %% [markdown]
# ## One problem, all answers

# %%
for way, answers in found.items():
    a = answers[0]
    s = a.completion.stats
    verdict = "right" if a.score.correct else "wrong"
    print(f"--- {way}: {verdict}, {s.tokens} tokens in {s.forwards} forwards")
    print(a.completion.text)
print("\nasked:", items[0].prompt, "| right:", items[0].answer)

# %% [markdown]
# ## All of them

# %%
right = {way: [a.score.correct for a in answers] for way, answers in found.items()}
print(f"{'way':8} {'accuracy':>9} {'TPF':>6} {'tokens/s of the batch':>22}")
for way, answers in found.items():
    stats = [a.completion.stats for a in answers]
    tokens, forwards = sum(s.tokens for s in stats), sum(s.forwards for s in stats)
    seconds = max(s.tokens / s.tokens_per_s for s in stats)
    print(f"{way:8} {np.mean(right[way]):9.0%} {tokens / forwards:6.2f} {tokens / seconds:22.0f}")
for way in ("block", "unsure"):
    d = paired_difference([(right[way], right["ar"])])
    print(f"{way} minus AR: {100 * d.difference:+.0f} points, 95 % interval "
          f"{100 * d.low:+.0f} to {100 * d.high:+.0f} (n = {N})")  # fmt: skip

# %%
fig, ax = plt.subplots(figsize=(9, 3))
x = np.arange(N)
for i, way in enumerate(found):
    forwards = [a.completion.stats.forwards for a in found[way]]
    bars = ax.bar(x + 0.21 * i, forwards, width=0.2, label=way)
    for bar, correct in zip(bars, right[way], strict=True):
        if not correct:
            bar.set_hatch("///")
            bar.set_edgecolor("white")
ax.set(xlabel="problem (hatched: wrong answer)", ylabel="forwards")
ax.legend()
fig.tight_layout()
plt.show()

# %% [markdown]
# ## The frontier
# Accuracy against TPF over thresholds, mean of the six families with a scratchpad. The points are
# the shipped card's (`clover card`, many more problems than above), read from `experiments/`; AR
# mode of the same weights is the diamond.

# %%
card = sorted((Path(clover_jax.__file__).parents[1] / "experiments").glob("clover_nano_*/card"))[-1]
lines = (card / "cells.jsonl").read_text().splitlines()[1:]
cells = {line["key"]: line["cell"] for line in map(json.loads, lines)}

fig, ax = plt.subplots(figsize=(8, 4))
for arm in ARMS:
    if arm.frontier:
        points = [f"{arm.name}, {t}" for t in arm.frontier]
        tpf = [mean_tpf(cells, "frontier", at) for at in points]
        accuracy = [100 * mean_accuracy(cells, "frontier", at) for at in points]
        ax.plot(tpf, accuracy, "o-", label=f"{arm.name}, by threshold")
        for at, t in zip(zip(tpf, accuracy, strict=True), arm.frontier, strict=True):
            ax.annotate(f"{t:g}", at, (6, 3), textcoords="offset points", fontsize=8)
ar = [mean_tpf(cells, "answers", "AR mode"), 100 * mean_accuracy(cells, "answers", "AR mode")]
ax.plot(*ar, "D", color="black", label="AR mode")
for name in ("block 16", "block 8"):
    at = mean_tpf(cells, "answers", name), 100 * mean_accuracy(cells, "answers", name)
    ax.plot(*at, "s", mfc="none", label=f"{name}, threshold 0.95")
ax.set(xlabel="tokens per forward, all forwards", ylabel="accuracy, %", ylim=(0, 100))
ax.grid(alpha=0.3)
ax.legend(fontsize=8)
ax.set_title(card.parent.name, fontsize=9)
fig.tight_layout()
plt.show()

# %% [markdown]
# Right is faster in forwards, up is better. The threshold moves a sampler along its curve, and when
# a block closes decides which curve that is. What is verified is AR mode's text at every threshold;
# there the threshold only says how long a draft is worked on, and one preview pays best.
