"""The comparisons themselves: what is counted, and that they can fail."""

import numpy as np
import pytest

from clover_jax.verify.causal import splits
from clover_jax.verify.compare import (
    choices_apart,
    compare_continuation,
    compare_logits,
    compare_routing,
    compare_tap,
)
from clover_jax.verify.limits import LIMITS, kl, relative_rms

LIMIT = LIMITS["float32"]


def test_kl_by_hand():
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.5, 0.25]])
    wanted = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert kl(np.log(p), np.log(q) + 3) == pytest.approx([wanted])
    outside = lambda logits: np.append(logits, [[-np.inf]], axis=1)
    assert kl(outside(np.log(p)), outside(np.log(q))) == pytest.approx([wanted])


def test_relative_rms_by_hand():
    assert relative_rms(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == pytest.approx(0.2)


def test_another_choice_counts_unless_it_was_near():
    theirs = np.array([[3.0, 2.0, 1.0], [3.0, 2.9999, 1.0], [3.0, 2.0, 1.0]])
    ours = np.array([[2.0, 3.0, 1.0], [2.9999, 3.0, 1.0], [3.0, 2.0, 1.0]])
    assert choices_apart(ours, theirs, 1, 1e-3) == (1, 1)
    assert choices_apart(ours, theirs, 2, 1e-3) == (0, 0)  # the same pair, in another order
    assert choices_apart(ours, theirs, 3, 1e-3) == (0, 0)


def test_routing_near_a_tie_is_left_out_and_counted():
    theirs = np.array([[[3.0, 2.0, 1.0], [2.0, 1.9999, 1.0], [1.0, 5.0, 2.0]]])
    ours = np.array([[[3.0, 2.0, 1.0], [1.9999, 2.0, 1.0], [5.0, 1.0, 2.0]]])
    tap, clear = compare_routing(4, ours, theirs, LIMIT, top_k=1)
    assert (tap.differing, tap.near_ties, tap.ok) == (1, 1, False)
    assert clear.tolist() == [[True, False, True]]
    values = np.ones((1, 3, 2))
    other = values.copy()
    other[0, 1] = 7.0  # where the experts were nearly tied
    assert compare_tap(4, "moe_out", values, other, LIMIT, where=clear).ok
    assert not compare_tap(4, "moe_out", values, other, LIMIT).ok


def test_shapes_and_missing_experts_are_errors():
    tap = compare_tap(1, "q", np.zeros((2, 3)), np.zeros((3, 2)), LIMIT)
    assert not tap.ok
    assert "shape (2, 3), theirs (3, 2)" in tap.where
    theirs = np.array([[1.0, -np.inf]])
    tap, clear = compare_routing(0, theirs, theirs, LIMIT, top_k=1)
    assert tap.ok
    assert clear.tolist() == [True]
    assert not compare_tap(0, "router_logits", np.array([[1.0, 2.0]]), theirs, LIMIT).ok
    assert not compare_tap(0, "q", np.array([np.nan]), np.array([1.0]), LIMIT).ok


@pytest.mark.parametrize("error", [20 * LIMIT.logits, np.nan, np.inf])
def test_logits_past_a_limit(error: float):
    """The largest logit is 10, so that a difference of 10 limits is the most."""
    theirs = np.arange(1.0, 11.0).reshape(1, 2, 5)
    assert compare_logits("same", theirs, theirs, LIMIT).ok
    ours = theirs.copy()
    ours[0, 0, 1] += error
    assert not compare_logits("other", ours, theirs, LIMIT).ok


def test_continuation_up_to_its_first_difference():
    theirs, margins = np.array([5, 6, 7, 8]), np.array([1.0, 1.0, 1e-5, 1.0])
    near = compare_continuation(np.array([5, 6, 9, 1]), theirs, margins, LIMIT)
    assert (near.equal, near.margin, near.ok) == (2, 1e-5, True)
    assert not compare_continuation(np.array([5, 1, 7, 8]), theirs, margins, LIMIT).ok
    assert compare_continuation(theirs, theirs, margins, LIMIT).margin is None


LENGTHS = [(length, 0) for length in (1, 2, 3, 16, 17, 64, 65, 200)]


@pytest.mark.parametrize(("length", "first"), [*LENGTHS, (2, 1), (64, 60), (65, 60), (200, 199)])
def test_every_way_of_reading_reads_all_tokens(length: int, first: int):
    ways = splits(length, first)
    assert all(sum(pieces) == length and min(pieces) > 0 for pieces in ways.values())
    assert ways["whole"][-1] == length - first
