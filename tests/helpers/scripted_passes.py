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
    """`sampler.Passes` over a `Script`. A causal logit is that of its block's first place."""

    block: int

    def commit(self, params, tokens, n_valid, cache):
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        cells = jnp.where(at < n_valid[:, None], cache.length[:, None] + at, cache.hidden.shape[1])
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        hidden = cache.hidden.at[rows, cells].set(tokens.astype(jnp.float32), mode="drop")
        return cache._replace(hidden=hidden, length=cache.length + n_valid)

    def preview(self, params, canvas, n_valid, cache, step):
        rows = jnp.arange(step.shape[0], dtype=jnp.int32)[:, None]
        said = jnp.where(canvas.masked[..., None], 0.0, params.coupling[rows, canvas.tokens])
        logits = _look_up(params, cache, self.block, step) + said.sum(1, keepdims=True)
        at = jnp.arange(canvas.tokens.shape[1], dtype=jnp.int32)[None]
        # NaN where there is no position: the loop must not look there.
        return jnp.where((at < n_valid[:, None])[..., None], logits, jnp.nan), None

    def commit_and_preview(self, params, tokens, n_commit, canvas, n_valid, cache, step):
        cache = self.commit(params, tokens, n_commit, cache)
        return cache, *self.preview(params, canvas, n_valid, cache, step)

    def next_logits(self, params, cache):
        return _look_up(params, cache, self.block, jnp.zeros_like(cache.length))[:, 0]

    def verify(self, params, tokens, n_valid, cache):
        at = lambda i: self.next_logits(params, cache._replace(length=cache.length + i))
        return cache, jnp.stack([at(i) for i in range(self.block + 1)], axis=1)


def scripted_cache(prompt: np.ndarray, width: int) -> DecodeCache:
    """A cache that records what was committed: `hidden` [rows, width] holds ids, -1 elsewhere.

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


def _look_up(params, cache, block_length, step):
    blocks, steps = params.logits.shape[1:3]
    rows = jnp.arange(step.shape[0], dtype=jnp.int32)
    block = jnp.clip((cache.length - params.prompt) // block_length, 0, blocks - 1)
    return params.logits[rows, block, jnp.minimum(step, steps - 1)]
