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
# # 1. A tour
#
# clover-nano is the small block-diffusion model that ships in the package. It answers a question by
# filling blocks of masked positions:
#
# 1. **prefill**: one causal pass over the prompt fills the cache, the *prefix*;
# 2. **preview**: a denoising pass over a block of $n$ masks. It reads the prefix and never writes;
# 3. **reveal**: every position whose confidence
#    $c_i = \max_v \mathrm{softmax}(\ell_i)_v$ is above the threshold is fixed; if none is, the
#    best one;
# 4. previews and reveals repeat until no mask is left; then **commit**, a causal pass over the
#    finished block, makes it part of the prefix, and the next block begins.
#
# Tokens per forward, $\mathrm{TPF} = \text{tokens} / \text{forwards}$, counts tokens up to and
# including the stop; prefill is excluded. It is given over previews only and over all forwards.
#
# **Switch:** change `QUESTION`, `THRESHOLD` or `MODE` (`"block"` or `"ar"`) and run all cells.

# %%
QUESTION = "How many legs: 3 cats, 2 ants?"
THRESHOLD = 0.95
MODE = "block"

# %%
import matplotlib.pyplot as plt
import numpy as np

from clover_jax import checkpoint
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.cli.session import packaged_model
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env

keep_compiled_programs()  # the second run of a notebook starts faster

# %% [markdown]
# ## Load
# `ModelConfig` says what is computed, `Env` where and how. Weights are a plain tree of arrays.

# %%
folder = packaged_model()
cfg, params, report = checkpoint.load(folder)
tokenizer = Tokenizer.load(folder)
model = Generator(cfg, params, tokenizer=tokenizer, env=Env())

gdn = cfg.num_groups * cfg.linear_per_group
print(f"{cfg.num_layers} layers: {gdn} Gated DeltaNet, {cfg.num_groups} full attention")
print(f"{cfg.moe.num_experts} experts a layer, top {cfg.moe.top_k} and one shared")
print(f"block of {cfg.block_length}, vocabulary {cfg.vocab_size}, width {cfg.hidden_size}")

# %% [markdown]
# ## Ask
# The chat template leaves a think block open, so that the model writes its steps first.

# %%
prompt = tokenize_prompt(tokenizer, [{"role": "user", "content": QUESTION}], enable_thinking=True)
request = Request(prompt=tuple(prompt), max_tokens=96, sampling=SamplerConfig(threshold=THRESHOLD))
answer = model.complete([request], mode=MODE)[0]
print(answer.text)
print("---")
s = answer.stats
print(f"{s.tokens} tokens in {s.forwards} forwards, {s.previews} of them previews")
print(f"TPF {s.tpf:.2f}; over previews {s.tpf_previews or float('nan'):.2f}")
print(f"ended by {answer.finish_reason}")

# %% [markdown]
# ## When was each token fixed?
# Each cell is a token of the answer, in reading order; a row is a block. The colour is the
# denoising step within its block at which it was revealed, and the small number its confidence
# then, in %.

# %%
n = cfg.block_length
rows = -(-len(answer.token_ids) // n)
step = np.full((rows, n), np.nan)
step.flat[: len(answer.revealed_at)] = answer.revealed_at

fig, ax = plt.subplots(figsize=(11, 0.7 * rows + 1.2))
steps = 1 + max(answer.revealed_at)
colors = plt.get_cmap("viridis", steps)
image = ax.imshow(step + 1, cmap=colors, aspect="auto", vmin=0.5, vmax=steps + 0.5)
for i, token in enumerate(answer.token_ids):
    text = tokenizer.decode([token], skip_special=False).replace("\n", "↵")
    shown = {"<|im_end|>": "end", "</think>": "/th"}.get(text, text)
    r, c = divmod(i, n)
    light = answer.revealed_at[i] > 0.6 * np.nanmax(step)
    style = {"ha": "center", "va": "center", "color": "black" if light else "white"}
    ax.text(c, r - 0.12, shown[:5], fontsize=8, **style)
    ax.text(c, r + 0.3, f"{100 * answer.confidences[i]:.0f}", fontsize=6, **style)
ax.set_yticks(range(rows), [f"block {r + 1}" for r in range(rows)])
ax.set_xlabel("position in the block")
ticks = range(1, steps + 1, 1 + steps // 10)
fig.colorbar(image, label="step", pad=0.01, ticks=list(ticks))
fig.tight_layout()
plt.show()

# %% [markdown]
# A low threshold gives more tokens per forward and more wrong answers; in `ar` mode every token
# costs a forward. Notebook 4 shows the same block step by step, notebook 6 counts the right
# answers.
