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
# # 8. Parity with another framework
#
# Two implementations agree when every tensor agrees, not only the answers. `tests/goldens` holds
# what transformers' `Qwen3_5Moe` computed on a tiny random checkpoint, tensor by tensor, so no
# torch is needed here. `compare_causal` feeds each of our parts *the other side's* input and
# compares outputs
#
# $$\epsilon = \lVert x_\mathrm{ours} - x_\mathrm{theirs}\rVert / \lVert x_\mathrm{theirs}\rVert$$
#
# against one table of limits (`clover_jax/verify/limits.py`): a single operation $10^{-6}$, a layer
# $5\cdot10^{-6}$, the residual stream after any layer $10^{-5}$, KL of the logits $10^{-8}$.
# Because no error is passed on, a fault shows where it arises and nowhere else.
#
# **Switch:** `FAULT`: the layer whose GDN decay is made 1 % too large, or `None`. `clover verify`
# runs the same comparison from the command line.

# %%
FAULT = 2

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import clover_jax
from clover_jax import checkpoint
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.verify.causal import compare_causal
from clover_jax.verify.limits import LIMITS
from clover_jax.verify.trace import read_trace

keep_compiled_programs()
golden = Path(clover_jax.__file__).parents[1] / "tests" / "goldens" / "qwen36_tiny"
cfg, params, _ = checkpoint.load(golden)
theirs, about = read_trace(golden / "goldens.safetensors")
print(f"{cfg.num_layers} layers, tokens {theirs['ids'].shape}, {len(theirs)} tensors")


# %%
def compare(params):
    """Ours with these weights against the recorded tensors."""
    return compare_causal(
        cfg, params, theirs, about, against="golden", precision="highest",
        progress=lambda _: None, limits=LIMITS["float32"],
    )  # fmt: skip


def with_fault(params, layer: int):
    """The weights with one layer's decays 1 % too large: A_log + log 1.01."""
    group, place = divmod(layer, cfg.full_attention_interval)
    linear = params.layers.linear
    gdn = linear.linear_attn
    wrong = gdn.A_log.at[group, place].add(np.float32(np.log(1.01)))
    linear = linear.replace(linear_attn=gdn.replace(A_log=wrong))
    return params.replace(layers=params.layers.replace(linear=linear))


right = compare(params)
print("all inside their limits:", right.ok)
for found in right.logits:
    print(f"logits read {found.path:>24}: largest KL {found.kl_max:.1e}, top-1 {found.top1:.0%}")

# %%
wrong = None if FAULT is None else compare(with_fault(params, FAULT))
if wrong is not None:
    print("first tensor past its limit:", wrong.first_diverging.where)
    past = [tap for tap in wrong.taps if not tap.ok]
    print("all that are, each on their input:", ", ".join(tap.where for tap in past))

# %% [markdown]
# One point per tensor in the order of the computation. Dashes are limits. Our own weights stay
# below them everywhere; the fault is past them in its own layer only (squares), while the residual
# stream, where errors add up (right), carries it on to every later layer.

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, width_ratios=[4, 1])
for ax, kind in zip(axes, ("taps", "running"), strict=True):
    shown = ((right, "o", "as released"), (wrong, "s", f"fault in layer {FAULT}"))
    for report, style, label in shown:
        if report is None:
            continue
        found = getattr(report, kind)
        error = [max(tap.relative_rms, 1e-9) for tap in found]
        ax.semilogy(error, style, ms=4, mfc="none", label=label)
    limits = [tap.limit for tap in getattr(right, kind)]
    ax.semilogy(limits, "_", color="black", label="limit")
    layers = [tap.layer for tap in getattr(right, kind)]
    for i in range(1, len(layers)):
        if layers[i] != layers[i - 1]:
            ax.axvline(i - 0.5, color="grey", lw=0.4)
of_layer = np.array([tap.layer for tap in right.taps])
numbers = range(cfg.num_layers)
axes[0].set_xticks([np.flatnonzero(of_layer == i).mean() for i in numbers], map(str, numbers))
for i, tap in enumerate(() if wrong is None else wrong.taps):
    if not tap.ok:
        axes[0].annotate(tap.tap, (i, tap.relative_rms), (6, -3), textcoords="offset points",
                         fontsize=8, color="C1")  # fmt: skip
axes[0].set(xlabel="layer, its tensors in order", title="each part on their input")
axes[0].set_ylabel("relative RMS error")
axes[0].legend(fontsize=8)
axes[1].set(title="our own stream", xlabel="layer")
fig.tight_layout()
plt.show()

# %% [markdown]
# Where a router nearly ties (`near_ties` in the report) another choice is no error, and what
# follows from it is left out. The preview and the two-stream loss have goldens of their own
# (`tests/goldens/clover_tiny`), written by slow torch loops from the formulas.
