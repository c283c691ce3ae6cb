"""The block's shared experts against a loop, and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import CoresetConfig
from clover_jax.model.coreset import coreset
from tests.model import oracle
from tests.model.small import config

EXPERTS, BLOCK, ROWS, TOP_K = 16, 8, 40, 3
choose = jax.jit(coreset, static_argnames=("cfg", "top_k"))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def top(probs: np.ndarray, k: int) -> np.ndarray:
    """Boolean membership of each position's k best, ties to the lower id."""
    order = np.argsort(-probs, axis=-1, kind="stable")[..., :k]
    return (order[..., None] == np.arange(probs.shape[-1])).any(axis=-2)


def members(probs, cfg, k, valid=None, chosen=None):
    """(membership, margin) of one block of probabilities [positions, experts]."""
    probs = np.asarray(probs, np.float32)[None]
    valid = np.ones(probs.shape[:2], bool) if valid is None else np.asarray(valid)[None]
    chosen = top(probs, k) if chosen is None else chosen
    got, margin = choose(probs, jnp.asarray(chosen & valid[..., None]), valid, cfg=cfg, top_k=k)
    return np.flatnonzero(got[0]).tolist(), float(margin[0])


@pytest.mark.parametrize("mass", ("top_k", "softmax"))
@pytest.mark.parametrize("pool", ("sum", "max"))
@pytest.mark.parametrize("top_p", (0.3, 0.9))
def test_choice_is_the_loop(mass, pool, top_p):
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(ROWS, BLOCK, EXPERTS)) + 3 * rng.normal(size=(ROWS, 1, EXPERTS))
    probs = softmax(logits).astype(np.float32)
    n_valid = rng.integers(1, BLOCK + 1, ROWS)
    valid = np.arange(BLOCK)[None] < n_valid[:, None]
    chosen = top(probs, TOP_K) & valid[..., None]
    cfg = CoresetConfig(top_p=top_p, mass=mass, pool=pool)
    got, _ = choose(probs, jnp.asarray(chosen), valid, cfg=cfg, top_k=TOP_K)
    model = config().replace(**{"moe.num_experts": EXPERTS, "moe.top_k": TOP_K, "moe.coreset": cfg})
    checked = 0
    for r in range(ROWS):
        want, gap = oracle.coreset(logits[r, : n_valid[r]], list(range(EXPERTS)), model)
        if gap > 1e-5:
            checked += 1
            assert np.flatnonzero(got[r]).tolist() == sorted(want), f"row {r}"
        assert got[r].sum() >= TOP_K
        if mass == "top_k":  # a subset of what the unrestricted block touches
            assert not (np.asarray(got[r]) & ~chosen[r].any(axis=0)).any()
    assert checked > 0.8 * ROWS


@pytest.mark.parametrize("pool", ("sum", "max"))
def test_the_whole_mass_is_the_unrestricted_union(pool):
    rng = np.random.default_rng(0)
    probs = softmax(3 * rng.normal(size=(BLOCK, EXPERTS))).astype(np.float32)
    union = np.flatnonzero(top(probs, TOP_K).any(axis=0)).tolist()
    assert members(probs, CoresetConfig(top_p=1.0, pool=pool), TOP_K)[0] == union
    assert len(union) < EXPERTS


def test_the_crossing_expert_is_included():
    probs = [[0.5, 0.3, 0.2, 0], [0.5, 0.3, 0.2, 0]]  # shares 0.5, 0.8, 1.0
    for top_p, want in ((0.4, [0]), (0.6, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2])):
        cfg = CoresetConfig(top_p=top_p, mass="softmax")
        got, margin = members(probs, cfg, 1)
        assert got == want
        assert margin == pytest.approx(min(abs(s - top_p) for s in (0.5, 0.8, 1.0)), abs=1e-6)


def test_never_fewer_than_top_k():
    probs = [[0.9, 0.06, 0.04, 0], [0.9, 0.06, 0.04, 0]]
    for k, want in ((1, [0]), (2, [0, 1]), (3, [0, 1, 2])):
        assert members(probs, CoresetConfig(top_p=0.5), k)[0] == want


def test_ties_go_to_the_lower_id():
    cfg = CoresetConfig(top_p=0.4, mass="softmax")
    assert members([[0.25] * 4] * 2, cfg, 1)[0] == [0, 1]


def test_sum_follows_the_crowd_and_max_keeps_a_specialist():
    probs = [[0.5, 0.4, 0.1, 0]] * 6 + [[0.02, 0.02, 0.02, 0.94]]
    assert members(probs, CoresetConfig(top_p=0.75, mass="softmax"), 1)[0] == [0, 1]
    by_max = CoresetConfig(top_p=0.75, mass="softmax", pool="max")
    assert members(probs, by_max, 1)[0] == [0, 1, 3]


def test_mass_outside_the_top_k_counts_only_as_softmax_mass():
    probs = [[0.6, 0.0, 0.4, 0.0], [0.0, 0.6, 0.4, 0.0]]  # expert 2 is everyone's second choice
    assert members(probs, CoresetConfig(top_p=0.7), 1)[0] == [0, 1]
    assert members(probs, CoresetConfig(top_p=0.3, mass="softmax"), 1)[0] == [2]


def test_invalid_rows_have_no_say():
    rng = np.random.default_rng(0)
    probs = softmax(rng.normal(size=(BLOCK, EXPERTS)))
    valid = np.arange(BLOCK) < 5
    for mass in ("top_k", "softmax"):
        for pool in ("sum", "max"):
            cfg = CoresetConfig(top_p=0.7, mass=mass, pool=pool)
            want = members(probs[:5], cfg, 2)
            other = np.where(valid[:, None], probs, softmax(9 * rng.normal(size=probs.shape)))
            assert members(other, cfg, 2, valid=valid)[0] == want[0]


def test_margin_sees_the_next_expert():
    """Two experts of nearly one mass, one in and one out: a choice that rounding can turn."""
    probs = [[0.6, 0.2, 0.2 - 1e-6, 0]] * 2
    got, margin = members(probs, CoresetConfig(top_p=0.7, mass="softmax"), 1)
    assert got == [0, 1]
    assert margin < 1e-4
