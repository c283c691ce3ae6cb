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
# # 2. The block mask and positions
#
# Training reads two streams in one forward. The **clean stream** is causal: row $t$ sees rows $s
# \le t$. The **noisy stream** is a list of blocks; a block that stands after $b$ clean tokens sees
# those $b$, and itself both ways:
#
# $$\text{clean } t \leftarrow \text{clean } s \iff s \le t, \qquad
# \text{block } i \leftarrow \text{clean } s \iff s < b, \qquad
# \text{block } i \leftarrow \text{block } j \ \text{always},$$
#
# and clean rows never see a block. A preview is the same pass with the clean rows already in the
# cache. Row $i$ of the block has the position of its own token, $b + i$, masked or not.
#
# Nobody builds this mask as an array: GDN layers get it from the state at the boundary, attention
# from a limit per row. So it is **measured** here: change one token and see which rows move.
#
# **Switch:** `BOUNDARY`, the clean tokens before the block (the clean stream has 14).

# %%
BOUNDARY = 8
CLEAN, BLOCK = 14, 8

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
from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.env import Env
from clover_jax.model.transformer import CleanInput, NoisyInput, extend, forward, preview

keep_compiled_programs()
cfg, params, _ = checkpoint.load(packaged_model())
tokenizer = Tokenizer.load(packaged_model())
env = Env()

# %% [markdown]
# ## Measured mask
# One batch holds the original and, in every further row, the same tokens with one of them changed.
# No position is masked here, since a mask shows the model no token to change.

# %%
small = cfg.replace(block_length=BLOCK)
rng = np.random.default_rng(0)
total = CLEAN + BLOCK
tokens = np.tile(rng.integers(100, 400, total).astype(np.int32), (total + 1, 1))
for i in range(total):
    tokens[i + 1, i] = tokens[0, i] % 400 + 60  # another token

count = np.full(total + 1, CLEAN, np.int32)
clean = CleanInput(tokens[:, :CLEAN], count)
noisy = NoisyInput(
    tokens=tokens[:, None, CLEAN:],
    masked=np.zeros((total + 1, 1, BLOCK), bool),
    n_valid=np.full((total + 1, 1), BLOCK, np.int32),
    index=np.full((total + 1, 1), BOUNDARY, np.int32),
)
run = jax.jit(forward, static_argnames=("cfg", "env"))
hidden = run(params, clean, noisy, None, cfg=small, env=env).hidden
rows = np.concatenate([hidden.clean, hidden.noisy[:, 0]], axis=1)  # [changed, row, width]
influence = np.linalg.norm(rows[1:] - rows[0], axis=-1) / np.linalg.norm(rows[0], axis=-1)

s, b = np.arange(CLEAN), np.arange(BLOCK)
expected = np.block(
    [
        [s[None] <= s[:, None], np.zeros((CLEAN, BLOCK), bool)],
        [np.broadcast_to(s[None] < BOUNDARY, (BLOCK, CLEAN)), np.ones((BLOCK, BLOCK), bool)],
    ]
)
measured = influence.T > 1e-5
assert (measured == expected).all()
print("the measured mask is the formula's")

# %%
fig, ax = plt.subplots(figsize=(7.2, 5.6))
shown = np.where(measured, np.log10(np.maximum(influence.T, 1e-6)), np.nan)
image = ax.imshow(shown, cmap="viridis", vmin=-1, vmax=0)
ax.axhline(CLEAN - 0.5, color="tab:red")
ax.axvline(CLEAN - 0.5, color="tab:red")
ax.axvline(BOUNDARY - 0.5, color="tab:red", ls=":")
names = [*map(str, s), *(f"b{i}" for i in b)]
ax.set_xticks(range(total), names, fontsize=7)
ax.set_yticks(range(total), names, fontsize=7)
ax.set(xlabel="changed token (dotted: the block's boundary)", ylabel="row that moves")
fig.colorbar(image, label="log10 of the relative change")
fig.tight_layout()
plt.show()

# %% [markdown]
# Above the red line is the clean stream, below it the block. White is exactly no influence. Clean
# tokens right of the dotted line are later text: the block must not see them, or training would
# leak the answers.
#
# ## Positions, and which one a row speaks of
# RoPE turns row $i$ of the block by its position $b + i$. Which position a row's *logits* speak of
# is a switch of the config: `same`, row $i$ of token $i$; or `shifted`, row $i$ of token $i+1$ as
# in the causal parent (position 0 then takes the causal pass's own logits). clover-nano was trained
# with one of the two; the other reads the right answer at the wrong place.

# %%
item = next(i for i in tasks.eval_set("chain_sum", "val", 8) if len(i.thinking) > 20)
prompt = tokenize_prompt(tokenizer, tasks.messages(item), enable_thinking=True)
truth = tokenizer.encode(tasks.response_text(item, True), special=True)[: cfg.block_length]
n = np.array([len(truth)], np.int32)
block = np.zeros((1, cfg.block_length), np.int32)
block[0, : len(truth)] = truth
given = np.zeros_like(block, bool)
given[0, : len(truth) : 2] = True  # every second token is in view

commit = jax.jit(functools.partial(extend, cfg=cfg, env=env))
prefix = commit(
    params, np.asarray([prompt], np.int32), np.array([len(prompt)], np.int32),
    empty_cache(cfg, 1, 512),
).cache  # fmt: skip
print("prefix of", int(prefix.length[0]), "tokens; the block's positions start there")
for reading in ("same", "shifted"):
    denoise = jax.jit(functools.partial(preview, cfg=cfg.replace(logits_position=reading), env=env))
    logits, _ = denoise(params, jnp.asarray(block), jnp.asarray(~given), jnp.asarray(n), prefix)
    guess = np.asarray(logits[0, : n[0]].argmax(-1))
    hidden_ones = ~given[0, : n[0]]
    right = (guess == block[0, : n[0]])[hidden_ones].mean()
    mark = " <- how this model was trained" if reading == cfg.logits_position else ""
    print(f"{reading:8} {right:6.1%} of the masked tokens right{mark}")
    print("         ", tokenizer.decode(guess.tolist(), skip_special=False).replace("\n", "↵"))
print("text:     ", tokenizer.decode(truth, skip_special=False).replace("\n", "↵"))
