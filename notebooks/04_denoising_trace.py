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
# # 4. A denoising trace
#
# A block starts as $n$ masks. Each preview gives every masked position its best token and the
# confidence $c_i$ of it, and the reveal rule fixes
#
# $$\{\, i \text{ masked} : c_i > \tau \,\}, \quad\text{or the single best one if there is none.}$$
#
# What is revealed is seen by the next preview and never taken back. Masked-ness is an array of its
# own: the guesses at masked positions are shown here, but the model does not see them.
#
# **Switch:** `THRESHOLD` $\tau$ (1 reveals one position per preview), or the problem (`TASK`,
# `INDEX`).

# %%
THRESHOLD = 0.95
TASK, INDEX = "gcd", 1
BLOCK = 0  # which block of the answer is drawn

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.ticker import MaxNLocator

from clover_jax import checkpoint
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.cli.session import packaged_model
from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import CanvasEvent, DoneEvent, Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env

keep_compiled_programs()
cfg, params, _ = checkpoint.load(packaged_model())
tokenizer = Tokenizer.load(packaged_model())
model = Generator(cfg, params, tokenizer=tokenizer, env=Env())
item = tasks.eval_set(TASK, "val", INDEX + 1)[INDEX]
prompt = tokenize_prompt(tokenizer, tasks.messages(item), enable_thinking=True)
request = Request(prompt=tuple(prompt), max_tokens=96, sampling=SamplerConfig(threshold=THRESHOLD))

# %% [markdown]
# `stream(..., trace=True)` yields a `CanvasEvent` after every step: tokens, what is still masked,
# confidences.

# %%
events = list(model.stream([request], trace=True))
answer = next(e.completion for e in events if isinstance(e, DoneEvent))
canvases = [e for e in events if isinstance(e, CanvasEvent)]
steps = [e for e in canvases if e.start == BLOCK * cfg.block_length]
print("asked:", item.prompt, "(right:", item.answer + ")")
print(answer.text)
print(f"{len(canvases)} previews in all, {len(steps)} of them for block {BLOCK}")


# %%
def cell(token: int) -> str:
    """A token in a narrow cell."""
    text = tokenizer.decode([token], skip_special=False).replace("\n", "↵")
    return {"<|im_end|>": "end", "</think>": "/th"}.get(text, text.strip(" ") or "␣")[:5]


def draw_canvas(ax, event: CanvasEvent, y: float) -> None:
    """One block as a row of cells: grey is masked, colour the confidence, bold what is fixed."""
    ended = False
    for i, (token, masked, confidence) in enumerate(
        zip(event.tokens, event.masked, event.confidences, strict=True)
    ):
        color = plt.get_cmap("RdYlGn")(float(np.clip(confidence, 0, 1)))
        faint = 0.25 if masked else 1.0
        ax.add_patch(plt.Rectangle((i, y), 0.94, 0.88, color=color, alpha=0.1 if ended else faint))
        if not ended:
            dark = abs(confidence - 0.5) > 0.35
            weight, tone = ("normal", "0.45") if masked else ("bold", "white" if dark else "black")
            ax.text(i + 0.47, y + 0.44, cell(token), ha="center", va="center", fontsize=8,
                    color=tone, weight=weight)  # fmt: skip
        ended = ended or (not masked and token in tokenizer.stop_ids)


def blank(ax, rows: int) -> None:
    """Axes without a frame, one unit a cell."""
    ax.set(xlim=(0, cfg.block_length), ylim=(rows, 0), xticks=[], yticks=[])
    ax.set_frame_on(False)


# %% [markdown]
# ## Frame by frame
# Pale cells are guesses at masked positions, strong ones are fixed; red to green is the confidence.

# %%
kept = sorted(set(np.linspace(0, len(steps) - 1, 8).round().astype(int)))
fig, ax = plt.subplots(figsize=(12, 0.42 * len(kept) + 0.3))
blank(ax, len(kept))
for y, k in enumerate(kept):
    draw_canvas(ax, steps[k], y)
    ax.text(-0.3, y + 0.44, f"preview {steps[k].step + 1}", ha="right", va="center", fontsize=8)
fig.tight_layout()
plt.show()

# %% [markdown]
# ## As an animation

# %%
fig, ax = plt.subplots(figsize=(11, 1.1), dpi=80)
fig.subplots_adjust(left=0.01, right=0.99, bottom=0.05, top=0.7)


def frame(k: int) -> None:
    """Step k."""
    ax.clear()
    blank(ax, 1)
    draw_canvas(ax, steps[kept[k]], 0)
    fixed = cfg.block_length - sum(steps[kept[k]].masked)
    ax.set_title(f"preview {steps[kept[k]].step + 1}: {fixed} fixed", fontsize=9, loc="left")


with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "trace.gif"
    FuncAnimation(fig, frame, frames=len(kept)).save(file, PillowWriter(fps=1))
    plt.close(fig)
    animation = Image(file.read_bytes(), format="gif")
display(animation)

# %% [markdown]
# ## How much each preview fixes
# Bars: positions revealed per preview, over the whole answer. The height averaged over the bars is
# the TPF over previews, but for what is cut off after the stop.

# %%
fig, ax = plt.subplots(figsize=(9, 2.6))
before, new = cfg.block_length, []
for e in canvases:
    before = cfg.block_length if e.step == 0 else before
    new.append(before - sum(e.masked))
    before = sum(e.masked)
ax.xaxis.set_major_locator(MaxNLocator(integer=True))
colors = [f"C{e.start // cfg.block_length % 10}" for e in canvases]
ax.bar(range(1, len(new) + 1), new, color=colors)
ax.set(xlabel="preview (colour: block)", ylabel="positions fixed")
ax.set_title(
    f"TPF {answer.stats.tpf:.2f}, over previews {answer.stats.tpf_previews:.2f}", fontsize=9
)
fig.tight_layout()
plt.show()
