"""Norms, rotary embedding, and a block of one position as the causal step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.env import Env
from clover_jax.model.block import (
    CleanLayout,
    LayerIndex,
    Layout,
    NoisyLayout,
    Streams,
    full_layer,
    full_layer_specs,
)
from clover_jax.model.norm import gated_rms_norm, l2_norm, rms_norm
from clover_jax.model.rope import apply_rope, rope_tables
from tests.helpers.limits import assert_close
from tests.model.small import QUICK, config, random_tree

CFG = config()


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rms(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def test_block_norm_is_neutral_at_weight_0():
    x = draw(3, 4, 8)
    zero = jnp.zeros(8, jnp.float32)
    assert_close("op", "w = 0", rms_norm(jnp.asarray(x), zero, eps=1e-6), rms(x))
    got = rms_norm(jnp.asarray(x), zero + jnp.float32(1), eps=1e-6)
    assert_close("op", "w = 1", got, 2 * rms(x))


def test_gated_norm_is_neutral_at_weight_1():
    x, gate = draw(3, 4, 8), draw(3, 4, 8, seed=1)
    one = jnp.ones(8, jnp.float32)
    silu = gate / (1 + np.exp(-gate.astype(np.float64)))
    args = jnp.asarray(x), jnp.asarray(gate)
    assert_close("op", "w = 1", gated_rms_norm(*args, one, eps=1e-6), rms(x) * silu)
    assert not np.asarray(gated_rms_norm(*args, jnp.zeros_like(one), eps=1e-6)).any()


def test_epsilons_are_inside_the_roots():
    x = np.full((1, 4), 1e-3, np.float32)
    zero = jnp.zeros(4, jnp.float32)
    assert_close("op", "rms", rms_norm(jnp.asarray(x), zero, eps=1e-6), x / np.sqrt(2e-6))
    assert_close("op", "l2", l2_norm(jnp.asarray(x)), x / np.sqrt(5e-6))


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_norms_keep_the_dtype(dtype):
    x, weight = jnp.asarray(draw(2, 8), dtype), jnp.asarray(draw(8))
    assert rms_norm(x, weight, eps=1e-6).dtype == dtype
    assert gated_rms_norm(x.astype(jnp.float32), x, weight, eps=1e-6).dtype == dtype
    assert l2_norm(x).dtype == jnp.float32


@pytest.mark.parametrize("theta", (1e4, 1e7))
@pytest.mark.parametrize("position", (0, 1, 4095, 100_000))
def test_rope_is_the_rotation_in_float64(theta, position):
    """Within what rounding an fp32 angle costs: an error of 2^-23 of the angle."""
    rotary, heads, width = 8, 3, 16
    x = draw(heads, width)
    tables = rope_tables(jnp.asarray(position), rotary_dim=rotary, theta=theta)
    got = np.asarray(apply_rope(jnp.asarray(x), *tables))
    np.testing.assert_array_equal(got[:, rotary:], x[:, rotary:])
    if position == 0:
        np.testing.assert_array_equal(got, x)
    for j in range(rotary // 2):
        angle = position * theta ** (-2.0 * j / rotary)
        a, b = x[:, j].astype(np.float64), x[:, j + rotary // 2].astype(np.float64)
        want = (a + 1j * b) * np.exp(1j * angle)
        error = np.abs(got[:, j] + 1j * got[:, j + rotary // 2] - want)
        assert (error <= np.abs(want) * (2**-23 * angle + 1e-6)).all(), f"pair {j}"


def test_a_block_of_one_position_is_the_causal_step():
    """Attention and experts of a preview are the base's when there is nothing to look ahead to."""
    rows, before = 2, np.array([3, 0], np.int32)
    p = random_tree(full_layer_specs(CFG))
    cache = empty_cache(CFG, rows, 64)
    cells = draw(*cache.k.shape)
    cache = cache._replace(k=cells, v=cells[::-1], length=before)
    x, a = draw(rows, 1, CFG.hidden_size), CFG.attention
    tables = functools.partial(rope_tables, rotary_dim=a.rotary_dim, theta=a.rope_theta)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(p, x, cache):
        valid = jnp.ones((rows, 1), bool)
        rope = tables(cache.length[:, None])
        clean = Layout(CleanLayout(cache.length, valid, rope), None)
        own = NoisyLayout(
            cache.length[:, None], valid[:, None], tuple(t[:, None] for t in rope), None
        )
        at, env = LayerIndex(0, None, None), Env(moe_path="grouped")
        causal = full_layer(p, Streams(x, None), cache, at, clean, cfg=CFG, env=env)
        block = full_layer(
            p, Streams(None, x[:, None]), cache, at, Layout(None, own), cfg=CFG, env=env
        )
        return (causal[0].clean, causal[2].router), (block[0].noisy[:, 0], block[2].router)

    (want, want_stats), (got, stats) = both(p, x, cache)
    assert_close("layer", "output", got, want)
    np.testing.assert_array_equal(stats.touched, want_stats.touched)
