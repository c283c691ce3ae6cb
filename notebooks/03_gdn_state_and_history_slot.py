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
# # 3. The GDN state and the history slot
#
# Six of clover-nano's eight layers keep no cells of the prefix, only a state $S$ per head. In a
# block Clover puts it, as one more item, into the softmax over the block's own rows:
#
# $$\ell_{ih} = b_h + c_h \log n, \qquad \ell_{ij} = a_h\,(q_i \cdot k_j), \qquad
# w = \mathrm{softmax}([\ell_{ih}, \ell_{i1}, \dots, \ell_{in}]),$$
# $$o_i = w_h\,(S^\top q_i) + \textstyle\sum_j w_j v_j .$$
#
# $w_h$ is the share of the **history slot**. $c_h = 1$ keeps it as the block grows: $n$ equal
# scores against $e^{\log n}$. $S$ is the clean state; a preview reads it and never writes.
#
# **Switch:** `LAYER` (GDN layer 0 to 5) and `OPERATOR`: `"state_slot"`, or a rival such as
# `"no_history"` or `"added"` (the last two have no slot in their softmax).

# %%
LAYER = 0
OPERATOR = "state_slot"

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from clover_jax import checkpoint
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.cli.session import packaged_model
from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.pipeline import DataConfig, TaskBatches
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import CanvasEvent, Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.model.bd_gdn import mixed_block
from clover_jax.model.deltanet import gdn_inputs, split_heads
from clover_jax.model.norm import rms_norm
from clover_jax.model.transformer import NoisyInput, forward
from clover_jax.train.calibrate import calibrate, with_scalars

keep_compiled_programs()
cfg, params, _ = checkpoint.load(packaged_model())
cfg = cfg.replace(**{"bd_gdn.operator": OPERATOR})
tokenizer = Tokenizer.load(packaged_model())
env = Env()
model = Generator(cfg, params, tokenizer=tokenizer, env=env)

# %% [markdown]
# ## An answer, step by step
# `keep_cache` gives the prefix right after the prompt: every preview of the first block reads it.

# %%
item = tasks.eval_set("gcd", "val", 2)[1]
prompt = tokenize_prompt(tokenizer, tasks.messages(item), enable_thinking=True)
request = Request(prompt=tuple(prompt), max_tokens=32, sampling=SamplerConfig())
kept = []
events = model.stream([request], trace=True, keep_cache=kept.append)
steps = [e for e in events if isinstance(e, CanvasEvent) and e.start == 0]
prefix = kept[0]
print(item.prompt, "->", len(steps), "previews of the first block")

# %%
run = jax.jit(functools.partial(forward, cfg=cfg, env=env, taps=True))


def denoise(tokens, masked):
    """One preview of the first block, with every GDN layer's values before the gated norm."""
    one = lambda x, dtype: np.asarray(x, dtype).reshape(1, 1, -1)
    n = np.full((1, 1), len(tokens), np.int32)
    return run(params, None, NoisyInput(one(tokens, np.int32), one(masked, bool), n, None), prefix)


seen = [np.ones(cfg.block_length, bool), *(np.array(e.masked) for e in steps[:-1])]
tokens = [np.zeros(cfg.block_length), *(np.array(e.tokens) for e in steps[:-1])]
outputs = [denoise(t, m) for t, m in zip(tokens, seen, strict=True)]
share = np.stack([np.asarray(o.stats.history_share)[:, 0] for o in outputs], axis=1)

# %% [markdown]
# ## One layer by hand
# The formula in numpy, from the layer's own projections, against the model (layer 0 sees the
# embeddings themselves, so nothing else has to be rebuilt; other layers only show their shares
# below).

# %%
middle = len(steps) // 2
shown = np.where(seen[middle], cfg.mask_token_id, tokens[middle].astype(int))
layer = model.params.layers[0]
p = layer.linear_attn
x = rms_norm(params.embed_tokens[shown][None], layer.input_layernorm, eps=cfg.rms_norm_eps)
valid = jnp.ones((1, cfg.block_length), bool)
mixed = mixed_block(p, prefix.ring[0, 0], gdn_inputs(p, x, valid).qkv, cfg.bd_gdn)
q, k, v = (np.asarray(a)[0] for a in split_heads(mixed, cfg))
S = np.asarray(prefix.state[0, 0, 0])
heads, n = cfg.delta.num_value_heads, cfg.block_length
a, b, c = (
    np.asarray(getattr(p, f"bd_softmax_{name}"))
    for name in ("logit_scale", "history_bias", "history_c")
)
weights, o = [], []
for h in range(heads):
    at = h // (heads // cfg.delta.num_key_heads)  # the key head of this value head
    logits = a[h] * q[:, at] @ k[:, at].T
    slot = np.full((n, 1), b[h] + c[h] * np.log(n))
    e = np.exp(np.concatenate([slot, logits], axis=1))
    w = e / e.sum(1, keepdims=True)
    weights.append(w)
    o.append(w[:, :1] * (q[:, at] @ S[h]) + w[:, 1:] @ v[:, h])
theirs = np.asarray(outputs[middle].taps.block)[0, 0, 0]
error = np.abs(np.stack(o, axis=1) - theirs).max() / np.abs(theirs).max()
print(f"by hand against the model, largest difference: {error:.1e} (of the largest value)")
if OPERATOR == "state_slot":
    assert error < 1e-5

# %%
fig, axes = plt.subplots(1, heads, figsize=(12, 3.3), sharey=True)
for h, ax in enumerate(axes):
    image = ax.imshow(np.log10(weights[h]), vmin=-2.5, vmax=0, cmap="magma", aspect="auto")
    ax.axvline(0.5, color="white", lw=1)
    ax.set(title=f"head {h}, slot {weights[h][:, 0].mean():.0%}", xlabel="slot | block column")
axes[0].set_ylabel("row of the block")
fig.colorbar(image, ax=axes, label="log10 weight", pad=0.01)
fig.suptitle(f"softmax weights of GDN layer 0 at preview {middle + 1}", y=1.04)
plt.show()

# %% [markdown]
# ## The slot's share over time
# Mean over heads and rows. While the block is all masks its rows are nearly alike and say little,
# so one could expect the share to fall as tokens are revealed. A flat line says that a layer leans
# on the prefix as much at the end as at the start.

# %%
fig, ax = plt.subplots(figsize=(9, 3.2))
for i, row in enumerate(share):
    ax.plot(range(1, len(row) + 1), row, "o-", lw=2.5 if i == LAYER else 1, label=f"GDN layer {i}")
ax.set(xlabel="preview", ylabel="share of the history slot", ylim=(0, None))
ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
ax.grid(alpha=0.3)
fig.tight_layout()
plt.show()
print(f"GDN layer {LAYER}:", " ".join(f"{w:.2f}" for w in share[LAYER]))

# %% [markdown]
# ## What calibration does
# A convex mix of one read and $n$ values cannot repeat the delta rule exactly. Before a conversion
# is trained, `calibrate` fits $a_h, b_h, c_h$ so that the block's values are as near as they can be
# to the causal ones at the same positions, over blocks of $n = 1, 2, \dots, 32$ tokens, half of
# them partly masked. The residual is the mean square difference after the gated norm's
# normalisation: 0 is equal, 2 is unrelated. Here it starts from the neutral values 1, 0, 1, as a
# conversion does; the other weights are the trained ones.

# %%
shape = params.layers.linear.linear_attn.bd_softmax_history_c.shape
neutral = with_scalars(
    params,
    {
        "bd_softmax_logit_scale": jnp.ones(shape, jnp.float32),
        "bd_softmax_history_bias": jnp.zeros(shape, jnp.float32),
        "bd_softmax_history_c": jnp.ones(shape, jnp.float32),
    },
)
data = DataConfig(rows=2, buckets=((64, 2),))
batches = TaskBatches(tokenizer, data, block=cfg.block_length)
few = [batches.batch(i) for i in range(16)]
fitted, residuals = calibrate(neutral, few, cfg=cfg, env=env, learning_rate=0.1)
print("mean residual before", np.nanmean(residuals.before).round(3),
      "after", np.nanmean(residuals.after).round(3))  # fmt: skip

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True)
for ax, table, title in zip(
    axes, (residuals.before, residuals.after), ("neutral: 1, 0, 1", "calibrated"), strict=True
):
    for i, row in enumerate(table):
        ax.plot(residuals.lengths, row, "o-", ms=4, label=f"GDN layer {i}")
    ax.set_xscale("log", base=2)
    ax.set(xlabel="tokens in the block, n", title=title, ylim=(0, None))
    ax.set_xticks(residuals.lengths, [str(n) for n in residuals.lengths])
    ax.grid(alpha=0.3)
axes[0].set_ylabel("residual")
axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
fig.tight_layout()
plt.show()
