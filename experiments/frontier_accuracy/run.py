"""How right, and how sure, is a preview at and behind the first mask?

`python experiments/frontier_accuracy/run.py --json FILE --plot FILE [NAME=DIR ...]`

Every block of a reference answer is previewed once for each number of its tokens that are known,
all from the left, after its true prefix: the states that decoding from the left meets, without the
mistakes that it makes. Models are Clover folders; the packaged one is always the first.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from clover_jax import checkpoint
from clover_jax.cache import empty_cache
from clover_jax.cli.session import packaged_model
from clover_jax.data import tasks
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import Generator, compiled_prefill
from clover_jax.diffusion.penalties import forbid
from clover_jax.env import Env
from clover_jax.eval.replay import Block, reference_blocks
from clover_jax.model.transformer import preview

TASKS = ("chain_sum", "basic_arithmetic", "products")
THRESHOLD, BATCH, BUCKET = 0.95, 32, 64
PLACES = ((0, 4), (4, 8), (8, 16), (16, 32))  # of the first mask in its block
BEHIND = (0, 1, 2, 3, 4, 6, 8, 12)  # positions behind it


@functools.partial(jax.jit, static_argnames=("cfg", "env"))
def look(params, cache, tokens, masked, forbidden, *, cfg, env):
    """Best token and its confidence, both [rows, block]."""
    whole = jnp.full((len(tokens),), tokens.shape[1], jnp.int32)
    logits, _ = preview(params, tokens, masked, whole, cache, cfg=cfg, env=env)
    logits = forbid(logits, forbidden)
    sure = jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, axis=-1))
    return logits.argmax(-1), sure


def observe(model: Generator, states: list[tuple[Block, int]]) -> np.ndarray:
    """[masks, 4]: place of the first mask, positions behind it, right, confidence."""
    cfg, found = model.cfg, []
    width = -(-max(len(b.prefix) for b, _ in states) // BUCKET) * BUCKET
    for first in range(0, len(states), BATCH):
        some = states[first : first + BATCH]
        full = some + some[-1:] * (BATCH - len(some))
        prefix = np.zeros((BATCH, width), np.int32)
        tokens = np.zeros((BATCH, cfg.block_length), np.int32)
        for r, (b, _) in enumerate(full):
            prefix[r, : len(b.prefix)], tokens[r, : len(b.tokens)] = b.prefix, b.tokens
        known = np.array([known for _, known in full])
        n = jnp.asarray([len(b.prefix) for b, _ in full], jnp.int32)
        cache = compiled_prefill(
            model.params, jnp.asarray(prefix), n, empty_cache(cfg, BATCH, width + cfg.block_length),
            chunk=BUCKET, cfg=cfg, env=model.env,
        )  # fmt: skip
        masked = np.arange(cfg.block_length) >= known[:, None]
        guess, sure = jax.device_get(
            look(model.params, cache, tokens, masked, model.rules.forbidden, cfg=cfg, env=model.env)
        )
        for r, (b, m) in enumerate(some):
            at = np.arange(m, len(b.tokens))
            right = guess[r, at] == np.asarray(b.tokens)[at]
            found.append(np.stack([np.full(len(at), m), at - m, right, sure[r, at]], axis=1))
    return np.concatenate(found)


def summary(seen: np.ndarray) -> dict:
    """Shares in %: right; above the threshold; right of those above."""

    def shares(part: np.ndarray) -> dict:
        above = part[part[:, 3] > THRESHOLD]
        percent = lambda x: round(100 * float(np.mean(x)), 1) if len(x) else None
        return {
            "n": len(part),
            "right": percent(part[:, 2]),
            "above": percent(part[:, 3] > THRESHOLD),
            "right_above": percent(above[:, 2]),
        }

    at = seen[seen[:, 1] == 0]
    by_place = {f"{a}-{b - 1}": shares(at[(at[:, 0] >= a) & (at[:, 0] < b)]) for a, b in PLACES}
    return {
        "first mask, by its place": by_place,
        "behind it": {str(d): shares(seen[seen[:, 1] == d]) for d in BEHIND},
    }


def draw(found: dict[str, dict], path: Path) -> None:
    """Two panels: right by the first mask's place, and by the distance from it."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    for ax, panel in zip(axes, ("first mask, by its place", "behind it"), strict=True):
        for name, figures in found.items():
            cells = figures[panel]
            (line,) = ax.plot(list(cells), [c["right"] for c in cells.values()], "o-", label=name)
            ax.plot(list(cells), [c["right_above"] for c in cells.values()], ":",
                    color=line.get_color())  # fmt: skip
        ax.grid(alpha=0.3)
    axes[0].set(xlabel="known tokens of the block", ylabel=f"right, % (dotted: above {THRESHOLD})")
    axes[1].set(xlabel="positions behind the first mask")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="NAME=DIR")
    parser.add_argument("--n", type=int, default=24, help="problems of each task")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(packaged_model())
    items = [item for task in TASKS for item in tasks.eval_set(task, "val", args.n)]
    found = {}
    for model in (f"clover-nano={packaged_model()}", *args.models):
        name, _, folder = model.partition("=")
        cfg, params, _ = checkpoint.load(Path(folder))
        made = Generator(cfg, params, tokenizer=tokenizer, env=Env())
        blocks = reference_blocks(tokenizer, items, thinking=True, block=cfg.block_length)
        states = [(b, known) for b in blocks for known in range(len(b.tokens))]
        found[name] = summary(observe(made, sorted(states, key=lambda s: len(s[0].prefix))))
        print(name)
        for panel, cells in found[name].items():
            print(f"  {panel}")
            for at, c in cells.items():
                print(f"    {at:>6}: right {c['right']} %, above {THRESHOLD}: {c['above']} %, "
                      f"of those right {c['right_above']} % (n {c['n']})")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
