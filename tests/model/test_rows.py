"""Rows never influence each other: mapped rows are bit-equal, batched ones close."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import empty_cache, join_rows, take_rows
from clover_jax.env import Env
from clover_jax.errors import CloverError
from tests.helpers.limits import assert_close
from tests.model.small import (
    assert_same_bits,
    clean_input,
    committed,
    config,
    jitted,
    random_params,
    random_tokens,
)

CFG = config(full_attention_interval=2).replace(num_layers=2)  # one layer of each kind
MAPPED, BATCHED = Env(rows="mapped"), Env()
BLOCK, PROMPT, ROWS = CFG.block_length, 24, 32
PROMPTS = random_tokens(CFG, ROWS, PROMPT)
LENGTHS = np.array([3, 9, 20, *np.random.default_rng(0).integers(0, 25, ROWS - 3)], np.int32)
STEP, DRAFT = random_tokens(CFG, ROWS, BLOCK, seed=1), random_tokens(CFG, ROWS, BLOCK, seed=2)
MASKED = np.random.default_rng(1).random((ROWS, BLOCK)) < 0.5
N_STEP, N_DRAFT = (np.random.default_rng(s).integers(0, 9, ROWS).astype(np.int32) for s in (2, 3))


def config_params():
    return random_params(CFG)


@functools.cache
def prompts():
    """All rows' prompts, prefilled at once."""
    prefill = jitted("prefill", CFG, MAPPED, chunk=BLOCK)
    return prefill(config_params(), PROMPTS, LENGTHS, empty_cache(CFG, ROWS, 64))


def pick(rows: list[int] | np.ndarray):
    return take_rows(prompts(), jnp.asarray(rows))


def step(name: str, rows: np.ndarray, env: Env = MAPPED):
    """A pass over some rows, in that order: (logits, statistics, cache or None)."""
    cache = pick(rows)
    clean = STEP[rows], N_STEP[rows]
    block = DRAFT[rows], MASKED[rows], N_DRAFT[rows]
    if name == "extend":
        out = jitted("extend", CFG, env, logits="all")(config_params(), *clean, cache)
        return out.logits, out.stats, out.cache
    if name == "preview":
        return *jitted("preview", CFG, env)(config_params(), *block, cache), None
    call = jitted("commit_and_preview", CFG, env)
    cache, logits, stats = call(config_params(), clean_input(*clean), *block, cache)
    return logits, stats, cache


@functools.cache
def everyone(name: str, env: Env = MAPPED):
    return step(name, np.arange(ROWS), env)


NAMES = ("extend", "preview", "commit_and_preview")
SOME = {"alone": np.array([2]), "four, permuted": np.array([17, 2, 0, 30])}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", SOME.values(), ids=SOME)
def test_mapped_rows_are_bit_equal(name, rows):
    logits, stats, cache = step(name, rows)
    want_logits, want_stats, want_cache = everyone(name)
    np.testing.assert_array_equal(logits, want_logits[rows])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:, rows]), stats, want_stats)
    if cache is not None:
        assert_same_bits(cache, want_cache, slice(None), rows)


@pytest.mark.parametrize("name", NAMES)
def test_batched_rows_are_close(name):
    (logits, _, cache), (want, _, want_cache) = everyone(name, BATCHED), everyone(name)
    valid = np.arange(BLOCK)[None] < (N_STEP if name == "extend" else N_DRAFT)[:, None]
    assert_close("rows_batched", "logits", np.asarray(logits)[valid], np.asarray(want)[valid])
    if cache is not None:
        for part, tensor in committed(cache).items():
            assert_close("rows_batched", part, tensor, committed(want_cache)[part])


def test_unequal_prompts_are_their_solo_runs():
    """Prompts of 3, 9 and 20 tokens in chunks of 8; the array's own length cannot matter."""
    prefill = jitted("prefill", CFG, MAPPED, chunk=BLOCK)
    for r, n in enumerate((3, 9, 20)):
        longer = np.full((1, PROMPT + 5), 9, np.int32)
        longer[0, :n] = PROMPTS[r, :n]
        alone = prefill(config_params(), longer, LENGTHS[[r]], empty_cache(CFG, 1, 64))
        assert_same_bits(alone, prompts(), slice(None), [r])


def test_rows_join_and_leave():
    """A fourth row joins after a block, one leaves: every row stays its solo run."""
    rows = np.array([0, 2, 3, 4])
    cache = join_rows(join_rows(pick([0, 1, 2]), pick([3])), pick([4]))
    left = take_rows(cache, jnp.asarray(rows))
    assert_same_bits(left, prompts(), slice(None), rows)
    call = jitted("extend", CFG, MAPPED, logits="all")
    out = call(config_params(), STEP[rows], N_STEP[rows], left)
    assert_same_bits(out.cache, everyone("extend")[2], slice(None), rows)


def test_caches_of_different_capacity_do_not_join():
    with pytest.raises(CloverError, match="capacity 512 and 640"):
        join_rows(empty_cache(CFG, 1, 512), empty_cache(CFG, 1, 513))
