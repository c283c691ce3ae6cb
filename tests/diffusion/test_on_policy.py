"""Noise that follows the model: against one preview from a prefix that `extend` committed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.diffusion.corrupt import Example, NoiseConfig, make_batch
from clover_jax.diffusion.on_policy import follow
from clover_jax.env import Env
from clover_jax.model.transformer import extend, preview
from tests.model.small import QUICK, config, random_params

CFG = config(full_attention_interval=2, vocab_size=60).replace(num_layers=2, **{"delta.chunk": 4})
ENV = Env(moe_path="dense")
FORBIDDEN = jnp.arange(60) == CFG.mask_token_id
THRESHOLD = 0.05  # random weights are never sure of much


def sample(seed: int, prompt: int, response: int) -> Example:
    tokens = np.random.default_rng(seed).integers(0, 50, prompt + response).tolist()
    return Example.single(seed, tokens[:prompt], tokens[prompt:])


def batch_of(examples, share: float):
    return make_batch(
        [(e,) for e in examples], time=24, blocks=2, block=8, pad_id=0, seed=3, epoch=0,
        noise=NoiseConfig(frontier_share=share),
    )  # fmt: skip


@functools.cache
def params():
    return jax.tree.map(jnp.asarray, random_params(CFG))


@functools.partial(jax.jit, compiler_options=QUICK)
def commit(params, tokens, n_valid, cache):
    return extend(params, tokens, n_valid, cache, cfg=CFG, env=ENV).cache


@functools.partial(jax.jit, compiler_options=QUICK)
def denoise(params, tokens, masked, cache):
    n_valid = jnp.full((1,), 8, jnp.int32)
    return preview(params, tokens, masked, n_valid, cache, cfg=CFG, env=ENV)[0]


@functools.cache
def compiled(threshold: float):
    call = functools.partial(follow, threshold=threshold, cfg=CFG, env=ENV)
    return jax.jit(call, compiler_options=QUICK)


@pytest.mark.slow
def test_what_is_left_is_what_one_preview_was_not_sure_of():
    examples = [sample(0, 5, 11), sample(1, 9, 3), sample(2, 3, 16)]
    batch = batch_of(examples, 1.0)
    got = compiled(THRESHOLD)(params(), batch, FORBIDDEN)
    for name in set(batch._fields) - {"block_masked", "block_n_valid"}:
        np.testing.assert_array_equal(getattr(got, name), getattr(batch, name), err_msg=name)
    np.testing.assert_array_equal(got.block_masked[:, :2], batch.block_masked[:, :2])
    revealed = 0
    for r, example in enumerate(examples):
        for b, (first, _) in enumerate(example.blocks(8)):
            cache = empty_cache(CFG, 1, 64)
            prefix = jnp.asarray([[*example.tokens[:first], *[0] * (24 - first)]], jnp.int32)
            cache = commit(params(), prefix, jnp.asarray([first], jnp.int32), cache)
            masked = batch.block_masked[r, b]
            draft = jnp.asarray(batch.block_tokens[r, b][None])
            logits = denoise(params(), draft, jnp.asarray(masked[None]), cache)
            confidence = jax.nn.softmax(jnp.where(FORBIDDEN[None], -jnp.inf, logits[0])).max(-1)
            confidence = np.where(masked, confidence, -1)
            sure = (confidence > THRESHOLD) | (np.arange(8) == confidence.argmax())
            np.testing.assert_array_equal(got.block_masked[r, 2 + b], masked & ~sure)
            assert got.block_n_valid[r, 2 + b] == 8 * (masked & ~sure).any()
            revealed += int((masked & sure).sum()) - 1
    assert 0 < revealed < batch.block_masked[:, :2].sum()


def test_only_blocks_that_follow_change():
    examples = [sample(i, 4, 12) for i in range(8)]
    batch = batch_of(examples, 0.5)
    got = compiled(THRESHOLD)(params(), batch, FORBIDDEN)
    stays = ~batch.block_follows
    assert stays[:, 2:].any() and batch.block_follows.any()
    for name in ("block_masked", "block_n_valid"):
        np.testing.assert_array_equal(getattr(got, name)[stays], getattr(batch, name)[stays])


def test_a_finished_block_takes_no_part():
    """A confidence is never below 0: the model is sure of all."""
    batch = batch_of([sample(0, 5, 11), sample(1, 9, 3)], 1.0)
    got = compiled(-1.0)(params(), batch, FORBIDDEN)
    assert batch.block_n_valid[:, 2:].any()
    assert not np.asarray(got.block_masked[:, 2:]).any()
    assert not np.asarray(got.block_n_valid[:, 2:]).any()
