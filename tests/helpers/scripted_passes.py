"""A model without weights for the decode loop: logits come from a table, by row, block and step."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clover_jax.cache import DecodeCache


class Script(NamedTuple):
    """What the scripted model says. Blocks and steps past the table's end repeat the last one.

    Every revealed token t adds coupling[t] to the logits of the whole block, so that a canvas
    handed over wrongly changes the text.
    """

    logits: Any  # [rows, blocks, steps, block, vocab]
    coupling: Any  # [rows, vocab, vocab]
    prompt: Any  # [rows], prompt lengths


@dataclasses.dataclass(frozen=True)
class ScriptedPasses:
    """`sampler.Passes` over a `Script`; a causal logit is that of a block's first place."""

    block: int

    def commit(self, params, tokens, n_valid, cache):
        width = cache.hidden.shape[1]
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        cells = jnp.where(at < n_valid[:, None], cache.length[:, None] + at, width)
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        hidden = cache.hidden.at[rows, cells].set(tokens.astype(jnp.float32), mode="drop")
        return cache._replace(hidden=hidden, length=cache.length + n_valid)

    def preview(self, params, canvas, n_valid, cache, step):
        logits = _look_up(params, (cache.length - params.prompt) // self.block, step)
        rows = jnp.arange(step.shape[0], dtype=jnp.int32)[:, None]
        said = jnp.where(canvas.masked[..., None], 0.0, params.coupling[rows, canvas.tokens])
        # As a hole in the canvas: positions that do not exist say nothing.
        at = jnp.arange(canvas.tokens.shape[1], dtype=jnp.int32)[None]
        valid = (at < n_valid[:, None])[..., None]
        return jnp.where(valid, logits + said.sum(1, keepdims=True), 0.0), None

    def commit_and_preview(self, params, tokens, n_commit, canvas, n_valid, cache, step):
        cache = self.commit(params, tokens, n_commit, cache)
        return cache, *self.preview(params, canvas, n_valid, cache, step)

    def next_logits(self, params, cache):
        position = cache.length - params.prompt
        return _look_up(params, position, jnp.zeros_like(position))[:, 0]


def scripted_cache(prompt: np.ndarray, width: int) -> DecodeCache:
    """A cache that records what was committed: `hidden` [rows, width] holds the ids, -1 elsewhere.

    Every array is a buffer of its own, as a decode state is donated.
    """
    rows = len(prompt)
    none = lambda *shape: jnp.zeros(shape, jnp.float32)
    return DecodeCache(
        k=none(1, rows, 1, 1, 1),
        v=none(1, rows, 1, 1, 1),
        state=none(1, 1, rows, 1, 1, 1),
        ring=none(1, 1, rows, 1, 1),
        hidden=jnp.full((rows, width), -1.0, jnp.float32),
        length=jnp.array(prompt, jnp.int32),
    )


def _look_up(params, block, step):
    blocks, steps = params.logits.shape[1:3]
    rows = jnp.arange(block.shape[0], dtype=jnp.int32)
    return params.logits[rows, jnp.clip(block, 0, blocks - 1), jnp.minimum(step, steps - 1)]
