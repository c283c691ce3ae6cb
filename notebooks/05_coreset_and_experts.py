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
# # 5. The coreset and expert use
#
# Each token picks its top $k$ of $N$ experts. A block of $n$ tokens reads every expert that any of
# them picks, so a preview moves many more weights than an AR step. If tokens picked evenly and for
# themselves, a layer would touch
#
# $$\mathbb{E}\,|U| = N\,\bigl(1 - (1 - k/N)^n\bigr)$$
#
# experts. The **coreset** makes the block share a subset: router weights outside a token's top $k$
# count as 0, the rest is summed over the block's rows, and experts are taken in descending order
# until their share of that mass reaches $p$ (0.9), the crossing one included. Every row then takes
# its top $k$ inside it. Only previews have one: a commit is exact.
#
# **Switch:** `MASS` (`"top_k"` or `"softmax"`: all router mass) and `POOL` (`"sum"` or `"max"`).

# %%
MASS, POOL = "top_k", "sum"
SHARES = (0.5, 0.7, 0.9)

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from clover_jax import checkpoint
from clover_jax.cache import empty_cache
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.cli.session import packaged_model
from clover_jax.config import CoresetConfig
from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.env import Env
from clover_jax.model.coreset import coreset
from clover_jax.model.transformer import extend, preview
from clover_jax.verify.limits import kl

keep_compiled_programs()
cfg, params, _ = checkpoint.load(packaged_model())
tokenizer = Tokenizer.load(packaged_model())
env = Env()
N, K, n = cfg.moe.num_experts, cfg.moe.top_k, cfg.block_length

# %% [markdown]
# ## The rule on a toy block
# Router weights of six rows over eight experts, top 2, and who is in the coreset at $p = 0.8$.

# %%
rng = np.random.default_rng(1)
probs = jax.nn.softmax(jnp.asarray(rng.normal(0, 1.5, (1, 6, 8)), jnp.float32))
chosen = jnp.argsort(jnp.argsort(-probs, axis=-1), axis=-1) < 2
rule = CoresetConfig(top_p=0.8, mass=MASS, pool=POOL)
member, _ = coreset(probs, chosen, jnp.ones((1, 6), bool), cfg=rule, top_k=2)

fig, ax = plt.subplots(figsize=(6.4, 2.8))
image = ax.imshow(probs[0], cmap="Blues", vmin=0)
for i, j in np.argwhere(np.asarray(chosen[0])):
    kept = bool(member[0, j])
    ax.text(j, i, "●" if kept else "○", ha="center", va="center", color="tab:red")
for j in np.flatnonzero(member[0]):
    ax.add_patch(plt.Rectangle((j - 0.5, -0.5), 1, 6, fill=False, ec="tab:red"))
ax.set(xlabel="expert (framed: in the coreset)", ylabel="row")
ax.set_title("own top 2: ● kept, ○ replaced by the best inside", fontsize=9)
fig.colorbar(image, label="router weight")
fig.tight_layout()
plt.show()

# %% [markdown]
# ## On the model
# Eight held-out problems of one task; the block is their reference answer, with half of the tokens
# masked. What does a smaller coreset save, and how far does it move the predictions?

# %%
ROWS = 8
items = tasks.eval_set("chain_sum", "val", ROWS)
prompts = [tokenize_prompt(tokenizer, tasks.messages(i), enable_thinking=True) for i in items]
answers = [tokenizer.encode(tasks.response_text(i, True), special=True)[:n] for i in items]
tokens = np.zeros((ROWS, 64), np.int32)
blocks = np.zeros((ROWS, n), np.int32)
for r, (prompt, text) in enumerate(zip(prompts, answers, strict=True)):
    tokens[r, : len(prompt)] = prompt
    blocks[r, : len(text)] = text
length = np.array([len(p) for p in prompts], np.int32)
count = np.array([len(a) for a in answers], np.int32)
masked = rng.random((ROWS, n)) < 0.5
valid = np.arange(n) < count[:, None]
hidden = masked & valid

commit = jax.jit(functools.partial(extend, cfg=cfg, env=env))
prefix = commit(params, tokens, length, empty_cache(cfg, ROWS, 512)).cache


def denoise(rule: CoresetConfig | None):
    """Logits and statistics of one preview under a coreset rule."""
    run = jax.jit(functools.partial(preview, cfg=cfg.replace(**{"moe.coreset": rule}), env=env))
    logits, stats = run(params, blocks, masked, count, prefix)
    return np.asarray(logits), np.asarray(stats.router.touched)


free, touched = denoise(None)
rules = {p: CoresetConfig(top_p=p, mass=MASS, pool=POOL) for p in SHARES}
found = {p: denoise(rule) for p, rule in rules.items()} | {1.0: (free, touched)}
even = np.mean([N * (1 - (1 - K / N) ** int(c)) for c in count])
print(f"even and independent routing would touch {even:.1f} of {N} experts")
print(f"{'share':>6} {'experts':>8} {'KL, nats':>9} {'same top-1':>11} {'right':>6}")
curve = []
for p, (logits, used) in sorted(found.items()):
    apart = kl(free, logits)[hidden].mean()
    same = (logits.argmax(-1) == free.argmax(-1))[hidden].mean()
    right = (logits.argmax(-1) == blocks)[hidden].mean()
    curve.append((p, used.sum(-1).mean(), apart, same))
    name = "none" if p == 1 else f"{p:.2f}"
    print(f"{name:>6} {curve[-1][1]:8.1f} {apart:9.4f} {same:11.1%} {right:6.1%}")
    assert p == 1 or not (used & ~touched).any() or MASS == "softmax"

# %%
share, experts, apart, same = map(np.array, zip(*curve, strict=True))
fig, axes = plt.subplots(1, 2, figsize=(10, 3.2))
axes[0].plot(share, experts, "o-")
axes[0].axhline(even, color="grey", ls=":", label="even routing")
axes[0].axhline(K, color="black", ls=":", label="an AR step")
axes[0].set(xlabel="share p (1: no coreset)", ylabel="experts per layer", ylim=(0, N))
axes[0].legend(fontsize=8)
axes[1].plot(experts, 100 * same, "o-")
for e, s, p in zip(experts, same, share, strict=True):
    axes[1].annotate(f"{p:g}", (e, 100 * s), (6, -9), textcoords="offset points", fontsize=8)
axes[1].margins(0.1)
axes[1].set(xlabel="experts per layer", ylabel="same best token as without, %")
for ax in axes:
    ax.grid(alpha=0.3)
fig.tight_layout()
plt.show()

# %% [markdown]
# ## Who is used
# How many of the eight blocks touch each expert, without a coreset and with the smallest one. One
# task alone already uses most experts of every layer, so what a coreset leaves out differs by
# block.

# %%
fig, axes = plt.subplots(2, 1, figsize=(10, 4.6), sharex=True)
smallest = min(SHARES)
for ax, (p, title) in zip(
    axes, ((1.0, "no coreset"), (smallest, f"coreset, p = {smallest}")), strict=True
):
    uses = found[p][1].sum(1)
    image = ax.imshow(uses, aspect="auto", cmap="viridis", vmin=0, vmax=ROWS)
    ax.set(title=f"{title}: {found[p][1].sum(-1).mean():.1f} experts a block and layer")
    ax.set_ylabel("layer")
axes[1].set_xlabel("expert")
fig.colorbar(image, ax=axes, label=f"blocks of {ROWS} that touch it", pad=0.01)
plt.show()

# %% [markdown]
# What it does to accuracy and TPF of whole answers is ablation `005_coreset` (notebook 9), and what
# the bytes are worth on an H200 is notebook 7.
