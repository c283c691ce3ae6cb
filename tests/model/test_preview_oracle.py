"""Causal and preview logits of a whole small model against the numpy oracle."""

import functools

import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.env import Env
from tests.helpers.limits import assert_close
from tests.model.oracle import Row
from tests.model.small import config, jitted, random_params, random_tokens

CFG, PREFIX, BLOCK = config(), 13, 8
N_PREFIX = np.array([PREFIX, 0], np.int32)  # one row starts at an empty prefix
N_VALID = np.array([BLOCK, 5], np.int32)


@functools.cache
def both():
    """(ours, oracle) causal logits, preview logits and experts touched, per row."""
    params = random_params(CFG)
    prefix, block = random_tokens(CFG, 2, 16), random_tokens(CFG, 2, BLOCK, seed=1)
    masked = np.random.default_rng(2).random((2, BLOCK)) < 0.6
    out = jitted("extend", CFG, Env(), logits="all")(
        params, prefix, N_PREFIX, empty_cache(CFG, 2, 64)
    )
    logits, stats = jitted("preview", CFG)(params, block, masked, N_VALID, out.cache)
    rows = [Row(params, CFG) for _ in range(2)]
    causal = [row.extend(prefix[r, :n]) for r, (row, n) in enumerate(zip(rows[:1], N_PREFIX[:1], strict=True))]
    want = [row.preview(block[r], masked[r], N_VALID[r]) for r, row in enumerate(rows)]
    assert min(row.margin for row in rows) > 1e-4, "a near-tie: choose other weights"
    return (out, logits, stats), (causal, want, rows)


def test_causal_logits():
    (out, _, _), (causal, _, _) = both()
    assert_close("logits", "causal", out.logits[0, :PREFIX], causal[0])


def test_what_a_prefix_leaves_behind():
    (out, _, _), (_, _, rows) = both()
    row, attention = rows[0], CFG.num_layers - 1
    for i in range(attention):
        assert_close("hidden", f"state of layer {i}", out.cache.state[0, i, 0], row.state[i])
        assert_close("hidden", f"ring of layer {i}", out.cache.ring[0, i, 0], row.ring[i])
    for name, cells in (("k", row.keys), ("v", row.values)):
        got = getattr(out.cache, name)[0, 0, :PREFIX]
        assert_close("hidden", name, got, np.stack(cells[attention]))


@pytest.mark.parametrize("row", (0, 1), ids=("after a prefix", "at an empty prefix, 5 of 8 valid"))
def test_preview_logits(row):
    (_, logits, stats), (_, want, _) = both()
    n = N_VALID[row]
    assert_close("logits", "preview", logits[row, :n], want[row][0])
    for layer, touched in enumerate(want[row][1]):
        assert set(np.flatnonzero(stats.router.touched[layer, row])) == touched, f"layer {layer}"
