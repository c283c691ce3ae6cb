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
# # 7. The arithmetic of the speed claims
#
# The launch article names three speeds at batch 1 in bf16, without tokens per forward (TPF) and
# without the number of experts that a block touches: 680 tokens/s on a GB300 and 515 on an H200 for
# Clover, 365 on an H200 for a DFlash2 set-up. Which TPF and expert counts would give them?
#
# One row at a time, a pass is bound by memory: it cannot be faster than its bytes over the
# bandwidth,
#
# $$t_\mathrm{pass} \ge \frac{W + E\,w_e L + K(c) + S}{B},$$
#
# with $W$ all weights but the routed experts, $E$ distinct experts touched per layer of $w_e$ bytes
# each in $L$ layers, $K(c)$ KV cells at context $c$, $S$ GDN states and $B$ the bandwidth. A block
# of $n$ tokens takes $n/\mathrm{TPF}$ previews and one commit:
#
# $$\text{tokens/s} \le \frac{n}{\frac{n}{\mathrm{TPF}}\,t_\mathrm{preview} + t_\mathrm{commit}}.$$
#
# This is a floor of time: real programs are slower (`clover plan` prints the same figures for a
# mesh).
#
# **Switch:** `CONTEXT`, the committed tokens; or `FORM`: `FORMATS[0]` bf16, `[1]` int8, `[2]` int4.

# %%
from clover_jax.plan.devices import DEVICES, FORMATS

CONTEXT = 8192
FORM = FORMATS[0]

# %%
import matplotlib.pyplot as plt
import numpy as np

from clover_jax.plan.floor import (
    CLAIMS,
    Load,
    ar_speed,
    block_speed,
    expected_experts,
    tpf_needed,
    traffic,
)
from clover_jax.plan.memory import planned_env
from clover_jax.presets import named
from clover_jax.sharding import PRESETS

cfg = named("clover_35b_a3b")
ONE = planned_env((1, 1, 1), PRESETS["tensor"])  # a single device
load = Load(cfg=cfg, env=ONE, form=FORM, rows=1, context=CONTEXT)
TOP_K, ALL = cfg.moe.top_k, cfg.moe.num_experts

# %% [markdown]
# ## What a pass moves
# An AR step touches its top 8 experts. A block touches more: if all 32 tokens drew their experts
# evenly and independently, $E = N\,(1-(1-k/N)^{n})$. Real routing overlaps more, and the coreset
# cuts the tail, so $E$ of a preview is a measurement that was not published.

# %%
even = expected_experts(cfg, cfg.block_length)
passes = {
    "AR step": traffic(load, "AR step", TOP_K),
    "preview, E = 40": traffic(load, "preview", 40),
    "preview, E = 80": traffic(load, "preview", 80),
    f"commit, E = {even:.0f}": traffic(load, "commit", even),
}
fig, ax = plt.subplots(figsize=(9, 2.8))
left = np.zeros(len(passes))
labels = ("weights without routed experts", "routed experts", "KV cells", "GDN states")
for i, label in enumerate(labels):
    width = np.array([moved[i] for moved in passes.values()]) / 1e9
    ax.barh(list(passes), width, left=left, label=label)
    left += width
ax.invert_yaxis()
ax.set_xlabel(f"GB moved per pass, context {CONTEXT:,}, weights {FORM.name}")
ax.legend(loc="upper center", bbox_to_anchor=(0.45, 1.22), ncol=4, fontsize=8, frameon=False)
fig.tight_layout()
plt.show()

# %% [markdown]
# ## Which TPF and expert counts give the claims
# Each line: the tokens per preview that a machine *at the floor* needs for the claimed speed, by
# the experts that a preview touches. Reality lies above the line. The dotted ones allow for a
# program that reaches 60 % of the bandwidth, i.e. they need claim / 0.6. A line that leaves the
# picture needs more tokens per preview than a block has.

# %%
experts = np.arange(TOP_K, ALL + 1, 4)


def needed(claim, share: float) -> list[float]:
    """Tokens per preview by experts, NaN where even one preview a block is too slow."""
    speed = claim.tokens_per_s / share
    found = (tpf_needed(load, claim.on, tokens_per_s=speed, experts=float(e)) for e in experts)
    return [np.nan if tpf is None else tpf for tpf in found]


FLOOR = {claim: (needed(claim, 1.0), needed(claim, 0.6)) for claim in CLAIMS}
fig, ax = plt.subplots(figsize=(9, 4.2))
for claim, color in zip(CLAIMS, ("tab:green", "tab:blue", "tab:orange"), strict=True):
    label = f"{claim.tokens_per_s:.0f} tokens/s on {claim.device} ({claim.of})"
    ax.plot(experts, FLOOR[claim][0], color=color, label=label)
    ax.plot(experts, FLOOR[claim][1], ":", color=color)
ax.axvline(even, color="grey", lw=0.8)
ax.text(even - 2, 15, "even routing", rotation=90, va="top", ha="right", color="grey")
ax.set(xlabel="distinct experts a preview touches, per layer", ylabel="tokens per preview needed")
ax.set(ylim=(0, 16), xlim=(TOP_K, ALL))
ax.legend(fontsize=8)
ax.grid(alpha=0.3)
fig.tight_layout()
plt.show()

# %%
print("tokens per preview needed (at the floor / at 60 % of the bandwidth)")
print(f"{'experts':>8}" + "".join(f"{c.tokens_per_s:>12.0f} {c.device:>5}" for c in CLAIMS))
for e in (8, 20, 40, 60, 80, 120, 160):
    i = int(np.argmin(abs(experts - e)))
    cells = (f"{FLOOR[c][0][i]:10.1f} /{FLOOR[c][1][i]:5.1f} " for c in CLAIMS)
    print(f"{e:8d}" + "".join(cells))

# %% [markdown]
# The third claim is a speculative AR decoder, not a block one: for it the line only says what a
# block decoder would need to reach the same speed.
#
# ## Where AR wins
# Both floors on the H200. Block decoding is faster only right of the crossing, the *break-even
# TPF*; left of it a block moves more bytes for its tokens than AR does. The floor of AR decoding is
# itself above the 515 claimed for blocks: no program reaches it, but bytes alone do not make AR
# slow at batch
# 1. What blocks gain over it depends on the experts that they touch.

# %%
h200 = next(d for d in DEVICES if d.name == "H200")
ar = ar_speed(load, h200).tokens_per_s
tpf = np.linspace(1, 16, 40)
fig, ax = plt.subplots(figsize=(9, 4))
ax.axhline(ar, color="black", label=f"AR floor, {ar:,.0f} tokens/s")
for e in (20, 40, 80, 160):
    speed = [block_speed(load, h200, tpf_previews=t, experts=float(e)).tokens_per_s for t in tpf]
    (line,) = ax.plot(tpf, speed, label=f"block, {e} experts per preview")
    even_at = tpf_needed(load, h200, tokens_per_s=ar, experts=float(e))
    if even_at is not None:
        print(f"{e:4d} experts: break-even at {even_at:.2f} tokens per preview")
        ax.plot(even_at, ar, "o", color=line.get_color())
ax.axhline(515, color="tab:blue", ls=":", lw=1)
ax.text(16, 525, "515 claimed", ha="right", color="tab:blue", fontsize=8)
ax.set(xlabel="tokens per preview", ylabel="tokens/s at the floor, H200, batch 1", xlim=(1, 16))
ax.set_ylim(0)
ax.legend(fontsize=8)
ax.grid(alpha=0.3)
fig.tight_layout()
plt.show()

# %% [markdown]
# Bytes are not all: on a CPU, or at a batch where arithmetic is the bound, a preview of 32 rows
# costs several AR steps whatever it reads, and AR wins at a higher TPF. `clover bench` measures it:
# for clover-nano on two CPU cores AR decoding is the faster one (notebook 6).
