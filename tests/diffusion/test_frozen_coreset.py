"""A block that keeps the coreset of its first step, in the decode loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.config import CoresetConfig
from clover_jax.diffusion import sampler
from clover_jax.diffusion.decode_state import frozen_coreset
from clover_jax.diffusion.sampling_config import SamplerConfig, sampler_params
from clover_jax.env import Env
from clover_jax.model.transformer import preview, unstack
from tests.diffusion.test_memory import ROWS, loop_of, rules, start
from tests.model import small


@pytest.mark.slow
def test_a_block_keeps_the_coreset_of_its_first_step():
    cfg = small.config(**{"moe.coreset": CoresetConfig(top_p=0.5, frozen=True)})
    loop, env = loop_of(cfg, "block"), Env(rows="batched")
    params = jax.tree.map(jnp.asarray, unstack(small.random_params(cfg)))
    state = start(empty_cache(cfg, ROWS, 128), loop, coreset=frozen_coreset(cfg))
    look = jax.jit(functools.partial(preview, cfg=cfg, env=env), compiler_options=small.QUICK)
    whole = jnp.full(ROWS, cfg.block_length, jnp.int32)
    kept: list[np.ndarray | None] = [None] * ROWS
    blocks, moved = np.zeros(ROWS, int), 0
    for _ in range(3 * cfg.block_length):
        canvas, committed = state.canvas, np.asarray(state.pending)
        if not committed.any():  # then the cache is the one that the step will read
            anew = look(params, canvas.tokens, canvas.masked, whole, state.cache)[1].router
            held = look(
                params, canvas.tokens, canvas.masked, whole, state.cache, coreset=canvas.coreset
            )[1].router
            for r in range(ROWS):
                if (before := kept[r]) is not None:
                    np.testing.assert_array_equal(held.coreset[:, r, 0], before)
                    assert not (np.asarray(held.touched[:, r]) & ~before).any()
                    moved += not np.array_equal(anew.coreset[:, r, 0], before)
        state = sampler.run_step(
            params,
            state,
            sampler_params([SamplerConfig()] * ROWS),
            rules(cfg.vocab_size),
            loop=loop,
        )
        now = np.asarray(state.canvas.coreset)
        assert (now.sum(axis=-1) >= cfg.moe.top_k).all()
        for r in range(ROWS):
            if kept[r] is None or committed[r]:
                blocks[r] += 1
            else:
                np.testing.assert_array_equal(now[r], kept[r])
            kept[r] = now[r]
    assert (blocks >= 2).all()  # blocks came and went
    assert moved  # a coreset chosen anew would have been another
