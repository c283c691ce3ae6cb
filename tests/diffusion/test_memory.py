"""The decode state is updated in place: its memory is the cache's, not a multiple of it."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import cache_shapes, empty_cache
from clover_jax.diffusion import sampler
from clover_jax.diffusion.decode_state import Rules
from clover_jax.diffusion.passes import ModelPasses
from clover_jax.diffusion.sampler import Loop
from clover_jax.diffusion.sampling_config import SamplerConfig, sampler_params
from clover_jax.env import Env
from clover_jax.model.transformer import param_specs, unstack
from clover_jax.params import is_spec
from clover_jax.presets import clover_nano
from tests.model import small

ROWS, LIMIT = 4, 64


def rules(vocab: int) -> Rules:
    return Rules(jnp.zeros(vocab, bool), jnp.zeros(1, jnp.int32), jnp.int32(-1))


def start(cache: Any, loop: Loop, **options: Any) -> Any:
    cfg, full = loop.passes.cfg, functools.partial(jnp.full, ROWS)
    return sampler.start(
        cache, loop=loop, vocab_size=cfg.vocab_size, num_layers=cfg.num_layers, limit=LIMIT,
        max_tokens=full(LIMIT), thinking_open=full(False), seed=full(0, jnp.uint32),
        sample_index=full(0, jnp.uint32), context=jnp.int32(cfg.max_position_embeddings),
        **options,
    )  # fmt: skip


def loop_of(cfg: Any, mode: str, fuse: bool = False, close: Any = "resolved") -> Loop:
    config = SamplerConfig(close=close)
    block = cfg.block_length if mode == "block" else 1
    passes = ModelPasses(cfg, Env(rows="batched"))
    return Loop(passes, config.structure, block, mode, fuse)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "fuse", "close"),
    (
        ("block", False, "resolved"),
        ("block", True, "resolved"),
        ("block", False, "unsure"),
        ("block", False, "verified"),
        ("ar", False, "resolved"),
    ),
    ids=("block", "fused", "unsure", "verified", "ar"),
)
def test_a_decoding_loop_works_in_the_caches_own_memory(mode, fuse, close):
    """Nano's whole loop, compiled from shapes: no second cache at 4K or 16K (case S2)."""
    cfg = clover_nano().replace(max_position_embeddings=16_384)
    shaped = lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    params = jax.tree.map(shaped, param_specs(cfg), is_leaf=is_spec)
    loop = loop_of(cfg, mode, fuse, close)
    sampling = sampler_params([SamplerConfig()] * ROWS)
    work = {}
    for capacity in (4_096, 16_384):
        cache = cache_shapes(cfg, ROWS, capacity)
        state = jax.eval_shape(functools.partial(start, loop=loop), cache)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "some donated buffers were not usable"
            compiled = sampler.generate.lower(
                jax.eval_shape(unstack, params), state, sampling, rules(cfg.vocab_size), loop=loop
            ).compile(small.QUICK)
        memory = compiled.memory_analysis()
        size = sum(a.size * a.dtype.itemsize for a in (cache.k, cache.v))
        assert memory.alias_size_in_bytes > size  # the state that comes back is the one given
        work[capacity] = memory.temp_size_in_bytes
        if capacity == 16_384:
            assert work[capacity] < 0.25 * size
    assert work[16_384] - work[4_096] < 0.01 * size  # what it works in does not grow with the cache


@pytest.mark.slow
def test_a_state_that_was_given_away_says_so():
    cfg = small.config()
    loop = loop_of(cfg, "block")
    state = start(empty_cache(cfg, ROWS, 128), loop)
    params = jax.tree.map(jnp.asarray, unstack(small.random_params(cfg)))
    after = sampler.run_step(
        params, state, sampler_params([SamplerConfig()] * ROWS), rules(cfg.vocab_size), loop=loop
    )
    assert np.asarray(after.counters.forwards).any()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.cache.k)
