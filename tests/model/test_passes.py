"""Extend, preview and both at once: what a cache is worth, and what cannot matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import check_capacity, empty_cache
from clover_jax.config import BDGDNConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.transformer import align_logits, param_specs, unstack
from clover_jax.params import cast
from tests.helpers.limits import assert_close
from tests.model.small import (
    assert_same_bits,
    clean_input,
    committed,
    config,
    extend,
    jitted,
    random_params,
    random_tokens,
)

CFG = config()
BLOCK, TIME, ROWS = CFG.block_length, 32, 2
TOKENS = random_tokens(CFG, ROWS, TIME)
LONG = jitted("extend", CFG, logits="all")  # called with TIME tokens, or with BLOCK
FUSED = jitted("commit_and_preview", CFG)
PREVIEW = jitted("preview", CFG)


def params():
    return random_params(CFG)


def empty(rows: int = ROWS):
    return empty_cache(CFG, rows, 64)


def count(*n: int) -> np.ndarray:
    return np.array(n, np.int32)


@functools.cache
def whole():
    """Logits and cache of all TIME tokens in one pass."""
    return extend(params(), [TOKENS], empty(), LONG, TIME)


@functools.cache
def prefix():
    """The cache after 11 and 5 tokens."""
    return LONG(params(), TOKENS, count(11, 5), empty()).cache


def assert_continues(name, logits, cache, end=TIME):
    want_logits, want = whole()
    assert_close("continuation", f"{name} logits", logits, want_logits[:, :end])
    if end == TIME:
        for part, tensor in committed(cache).items():
            assert_close("continuation", f"{name} {part}", tensor, committed(want)[part])


def noisy(seed: int = 1):
    """A block of tokens and masks for every row."""
    masked = np.random.default_rng(seed).random((ROWS, BLOCK)) < 0.5
    return random_tokens(CFG, ROWS, BLOCK, seed=seed), masked


SPLITS = {
    f"pieces of {n}": [n] * (TIME // n) + [TIME % n] * (TIME % n > 0) for n in (1, 2, 3, 5, 8)
}
SPLITS |= {"2, 22, 8": [2, 22, 8], "5, 8, 8, 3, 8": [5, 8, 8, 3, 8]}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_any_split_leaves_the_same(split):
    """Commit(block) == prefill(prefix + block), pieces shorter than the conv window included."""
    pieces = np.split(TOKENS, np.cumsum(split)[:-1], axis=1)
    time = BLOCK if max(split) <= BLOCK else TIME
    assert_continues("split", *extend(params(), pieces, empty(), LONG, time))


def test_prefill_keeps_its_grid():
    """Two turns of unequal rows, prefilled in chunks, leave what one pass leaves."""
    prefill = jitted("prefill", CFG, chunk=BLOCK)
    first = count(20, 3)
    cache = prefill(params(), TOKENS, first, empty())
    rest = np.stack([np.roll(row, -n) for row, n in zip(TOKENS, first, strict=True)])
    cache = prefill(params(), rest, TIME - first, cache)
    for part, tensor in committed(cache).items():
        assert_close("continuation", part, tensor, committed(whole()[1])[part])


def test_pads_cannot_matter():
    """Right padding: other tokens in the pads change no bit, a done row changes not at all."""
    start = prefix()
    other = TOKENS.copy()
    other[0, 7:], other[1] = 9, 9
    a, b = (LONG(params(), t, count(7, 0), start) for t in (TOKENS, other))
    np.testing.assert_array_equal(a.logits[0, :7], b.logits[0, :7])
    assert_same_bits(a.cache, b.cache)
    assert_same_bits(a.cache, start, rows=[1])
    assert int(a.cache.length[0]) == 18
    np.testing.assert_array_equal(a.stats.router.assigned[:, 1], 0)


def test_a_short_row_is_that_row_alone():
    """A row of 11 tokens, padded by 0, 1, 3, 21 positions."""
    want = whole()[0][0, :11]
    for pads, time in ((21, TIME), (5, 2 * BLOCK)):
        tokens = random_tokens(CFG, ROWS, time, seed=pads)
        tokens[0, :11] = TOKENS[0, :11]
        got = LONG(params(), tokens, count(11, time), empty())
        assert_close("continuation", f"{pads} pads", got.logits[0, :11], want)
        for part in ("state", "ring"):
            a, b = (np.asarray(getattr(c, part))[:, :, 0] for c in (got.cache, prefix()))
            assert_close("continuation", f"{part}, {pads} pads", a, b)


@pytest.mark.parametrize("junk", (np.nan, 1e4))
def test_unused_cells_cannot_matter(junk):
    cache = prefix()
    unused = np.arange(cache.capacity)[None] >= np.asarray(cache.length)[:, None]
    fill = lambda a: np.where(unused[None, :, None, :, None], np.float32(junk), a)
    spoiled = cache._replace(k=fill(cache.k), v=fill(cache.v))
    step = TOKENS[:, :BLOCK]
    a, b = (LONG(params(), step, count(8, 3), c) for c in (cache, spoiled))
    np.testing.assert_array_equal(a.logits[0], b.logits[0])
    np.testing.assert_array_equal(a.logits[1, :3], b.logits[1, :3])
    assert_same_bits(a.cache, b.cache)
    a, b = (PREVIEW(params(), *noisy(), count(8, 3), c)[0] for c in (cache, spoiled))
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[1, :3], b[1, :3])


def test_overflow_is_dropped_and_refused():
    """Nothing is written past the capacity, and nothing before it moves."""
    cache = prefix()
    full = cache._replace(length=count(cache.capacity - 3, 5))
    out = LONG(params(), TOKENS[:, :BLOCK], count(8, 8), full)
    for name in ("k", "v"):
        before, after = (np.asarray(getattr(c, name))[:, 0] for c in (cache, out.cache))
        np.testing.assert_array_equal(after[..., :-3, :], before[..., :-3, :])
        assert np.abs(after[..., -3:, :]).min() > 0
    other = LONG(params(), TOKENS[:, :BLOCK], count(8, 8), cache)
    assert_same_bits(out.cache, other.cache, rows=[1])
    check_capacity(CFG, 20, 12, 32)
    with pytest.raises(CloverError, match=r"20 tokens are committed and 16 more .* holds 32"):
        check_capacity(CFG, 20, 16, 32)
    with pytest.raises(CloverError, match=f"holds {CFG.max_position_embeddings}"):
        check_capacity(CFG, CFG.max_position_embeddings, 1, 4096)


def test_commits_do_not_see_previews():
    """A commit is bit-equal whatever was previewed before it, and beside it."""
    start, step = prefix(), TOKENS[:, :BLOCK]
    before = jax.tree.map(np.array, start)
    want = LONG(params(), step, count(8, 8), start).cache
    for seed in (1, 2):
        PREVIEW(params(), *noisy(seed), count(8, 8), start)
        assert_same_bits(start, before)
        assert_same_bits(LONG(params(), step, count(8, 8), start).cache, want)
    fused = [
        FUSED(params(), clean_input(step, [8, 8]), *noisy(seed), count(8, n), start)[0]
        for seed, n in ((1, 8), (2, 3))
    ]
    assert_same_bits(*fused)


@functools.cache
def fused():
    """A commit (whole in row 0, 3 tokens in row 1) with the preview of the next block."""
    clean = clean_input(TOKENS[:, :BLOCK], [8, 3])
    return FUSED(params(), clean, *noisy(), count(8, 5), prefix())


def test_fused_is_commit_then_preview():
    cache, logits, stats = fused()
    committed_only = LONG(params(), TOKENS[:, :BLOCK], count(8, 3), prefix()).cache
    want, want_stats = PREVIEW(params(), *noisy(), count(8, 5), committed_only)
    for part, tensor in committed(cache).items():
        assert_close("continuation", part, tensor, committed(committed_only)[part])
    for r, n in enumerate((8, 5)):
        assert_close("logits", f"row {r}", logits[r, :n], want[r, :n])
    assert_close("layer", "history share", stats.history_share, want_stats.history_share)


def test_scan_and_unrolled_twin_agree():
    clean = clean_input(TOKENS[:, :BLOCK], [8, 3])
    apart = jax.tree.map(np.asarray, unstack(params()))
    cache, logits, stats = FUSED(apart, clean, *noisy(), count(8, 5), prefix())
    want_cache, want, want_stats = fused()
    for part, tensor in committed(cache).items():
        assert_close("layer", part, tensor, committed(want_cache)[part])
    assert_close("layer", "logits", logits[0], want[0])
    for name, a in stats.router._asdict().items():
        b = getattr(want_stats.router, name)
        finite = np.isfinite(np.asarray(b, np.float64))
        assert_close("layer", name, np.asarray(a)[finite], np.asarray(b)[finite])
    assert_close("layer", "history share", stats.history_share, want_stats.history_share)


def test_preview_of_one_token_is_the_causal_pass():
    """Block length 1 and the causal GDN operator leave a preview nothing to do otherwise."""
    cfg = CFG.replace(bd_gdn=BDGDNConfig(operator="causal", right_conv=False))
    tokens, _ = noisy()
    masked = np.zeros((ROWS, BLOCK), bool)
    got, _ = jitted("preview", cfg)(params(), tokens, masked, count(1, 1), prefix())
    want = LONG(params(), tokens, count(1, 1), prefix()).logits
    assert_close("logits", "first position", got[:, 0], want[:, 0])


def test_masks_hide_tokens():
    """The token under a mask cannot matter; the same token unmasked does."""
    tokens, masked = noisy()
    other = np.where(masked, (tokens + 1) % CFG.vocab_size, tokens)
    call = lambda t, m: np.asarray(PREVIEW(params(), t, m, count(8, 8), prefix())[0])
    np.testing.assert_array_equal(call(tokens, masked), call(other, masked))
    assert np.abs(call(tokens, masked) - call(tokens, ~masked)).max() > 0.1


def test_a_done_row_stays_finite():
    """A row with nothing to preview gives numbers that nobody reads, and no NaN."""
    logits, stats = PREVIEW(params(), *noisy(), count(8, 0), prefix())
    assert np.isfinite(logits).all()
    assert not np.asarray(stats.router.touched[:, 1]).any()
    assert not np.asarray(stats.history_share[:, 1]).any()


def test_a_spoiled_row_spoils_no_other():
    start = prefix()
    spoiled = start._replace(state=start.state.at[:, :, 1].set(jnp.nan))
    assert np.isnan(LONG(params(), TOKENS[:, :BLOCK], count(8, 8), spoiled).logits[1]).any()
    a, b = (LONG(params(), TOKENS[:, :BLOCK], count(8, 8), c) for c in (start, spoiled))
    np.testing.assert_array_equal(a.logits[0], b.logits[0])
    assert_same_bits(a.cache, b.cache, rows=[0])
    a, b = (PREVIEW(params(), *noisy(), count(8, 8), c)[0] for c in (start, spoiled))
    np.testing.assert_array_equal(a[0], b[0])


def test_invalid_block_rows_cannot_matter():
    tokens, masked = noisy()
    other = tokens.copy()
    other[:, 5:] = 9
    call = lambda t: PREVIEW(params(), t, masked, count(5, 5), prefix())
    (a, stats), (b, other_stats) = call(tokens), call(other)
    np.testing.assert_array_equal(a[:, :5], b[:, :5])
    jax.tree.map(np.testing.assert_array_equal, stats, other_stats)


def test_shifted_logits():
    x = jnp.arange(24, dtype=jnp.float32).reshape(2, 4, 3)
    previous = -jnp.ones((2, 3), jnp.float32)
    np.testing.assert_array_equal(align_logits(x, previous, "same"), x)
    shifted = align_logits(x, previous, "shifted")
    np.testing.assert_array_equal(shifted[:, 0], previous)
    np.testing.assert_array_equal(shifted[:, 1:], x[:, :-1])


def test_next_token_logits_are_the_last_ones():
    start = prefix()
    want = LONG(params(), TOKENS, count(11, 5), empty()).logits
    got = {rows: jitted("next_token_logits", CFG, Env(rows=rows)) for rows in ("batched", "mapped")}
    for rows, call in got.items():
        logits = call(params(), start)
        assert_close("continuation", f"{rows}, row 0", logits[0], want[0, 10])
        assert_close("continuation", f"{rows}, row 1", logits[1], want[1, 4])


def test_bfloat16_keeps_what_must_be_exact():
    """A bf16 model: states in float32, logits near those of the same weights in float32."""
    cfg = CFG.replace(dtype="bfloat16")
    low = cast(param_specs(cfg), jax.tree.map(jnp.asarray, params()))
    clean, block = clean_input(TOKENS[:, :BLOCK], [8, 3]), (*noisy(), count(8, 5))
    start = empty_cache(cfg, ROWS, 64)
    cache, logits, _ = jitted("commit_and_preview", cfg)(low, clean, *block, start)
    dtypes = {part: str(a.dtype) for part, a in cache._asdict().items()}
    low_parts = dict.fromkeys(("k", "v", "ring", "hidden"), "bfloat16")
    assert dtypes == {**low_parts, "state": "float32", "length": "int32"}
    assert logits.dtype == jnp.float32
    same = jax.tree.map(lambda a: a.astype(jnp.float32), low)
    want_cache, want, _ = FUSED(same, clean, *block, empty())
    relative = lambda a, b: np.linalg.norm(np.asarray(a - b)) / np.linalg.norm(b)
    assert relative(cache.state, want_cache.state) < 0.02
    assert relative(logits[0], want[0]) < 0.05


def test_a_model_without_a_mask_cannot_preview():
    cfg = CFG.replace(bd_gdn=None, mask_token_id=None)
    with pytest.raises(CloverError, match="mask_token_id is null"):
        jitted("preview", cfg, Env())(params(), *noisy(), count(8, 8), prefix())
