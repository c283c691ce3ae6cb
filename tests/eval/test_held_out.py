"""Intervals of the card, and functions judged by running them."""

import math
import random
import sys

import pytest

from clover_jax.data import tasks
from clover_jax.data.tasks import Item
from clover_jax.diffusion.generate import Completion, Stats
from clover_jax.eval.held_out import Answer, judged_by_execution, paired_difference, wilson


def test_wilson_example():
    """Table values for 81 of 263 (Newcombe 1998, method 3)."""
    low, high = wilson(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def arms(both: int, first: int, second: int, neither: int):
    pairs = [(True, True)] * both + [(True, False)] * first
    pairs += [(False, True)] * second + [(False, False)] * neither
    return tuple(zip(*pairs, strict=True))


def test_paired_difference_by_hand():
    """n 20, 5 against 1 discordant pairs: p 6/22, q 2/22 after the adjustment."""
    found = paired_difference([arms(10, 5, 1, 4)])
    assert found.difference == pytest.approx(4 / 20)
    p, q = 6 / 22, 2 / 22
    half = 1.959964 * math.sqrt((p + q - (p - q) ** 2) / 22)
    assert found.low == pytest.approx(p - q - half, abs=1e-6)
    assert found.high == pytest.approx(p - q + half, abs=1e-6)


def test_equal_arms_are_not_certain():
    found = paired_difference([arms(20, 0, 0, 0)])
    assert found.difference == 0 and found.low < 0 < found.high


def test_strata_count_alike_and_the_order_turns_the_sign():
    strata = [arms(10, 5, 1, 4), arms(100, 0, 8, 2)]
    each = [paired_difference([s]) for s in strata]
    both = paired_difference(strata)
    assert both.difference == pytest.approx((each[0].difference + each[1].difference) / 2)
    halves = [(e.high - e.low) / 2 for e in each]
    assert (both.high - both.low) / 2 == pytest.approx(math.hypot(*halves) / 2)
    turned = paired_difference([(b, a) for a, b in strata])
    assert (turned.low, turned.high) == pytest.approx((-both.high, -both.low))


def test_coverage():
    """The true difference lies inside in about 95 of 100 draws, near the boundary too."""
    rng, truth, inside = random.Random(0), 0.04, 0
    for _ in range(600):
        draws = rng.choices(((1, 1), (1, 0), (0, 1), (0, 0)), (0.9, 0.05, 0.01, 0.04), k=60)
        first, second = zip(*draws, strict=True)
        found = paired_difference([([bool(a) for a in first], [bool(b) for b in second])])
        inside += found.low <= truth <= found.high
    assert 0.92 < inside / 600 <= 1


def answer_of(text: str, task: str = "python_function", thinking: bool = False) -> Answer:
    item = Item(task, "", "", "def f(xs):\n    return sum([x for x in xs if x > 3])", "")
    stats = Stats(1, 0, 1, 1, 1, 1.0, 1.0, 1.0, 1.0, (), ())
    done = Completion((), text, "stop", (), (), (), stats)
    return Answer(item, done, tasks.score(item, text, thinking=thinking))


@pytest.mark.skipif(sys.platform != "linux", reason="programs are run on Linux only")
def test_functions_judged_by_execution():
    """Right, wrong, what only the interpreter takes, what only Python takes, and no function."""
    body = "def f(xs):\n    return "
    texts = {
        body + "sum(x for x in xs if x > 3)": True,
        body + "sum(x for x in xs if x > 4)": False,
        body + "sum(filter(lambda x: x > 3, xs))": True,
        body + "sum(x for x in xs if x > 3) + 0 * len(x for x in xs)": False,
        "sum(xs)": False,
        "def g(xs): return 1\n" + body + "sum(x for x in xs if x > 3)": False,  # not the form
    }
    before = [*map(answer_of, texts), answer_of("hi", task="text")]
    after = judged_by_execution(before, thinking=False)
    assert [a.score.correct for a in after] == [*texts.values(), False]
    assert [a.score.correct for a in before] != [a.score.correct for a in after]
    assert [a.score.format_valid for a in after] == [a.score.format_valid for a in before]
    thought = answer_of(f"\n</think>\n\n{next(iter(texts))}", thinking=True)
    assert judged_by_execution([thought], thinking=True)[0].score.correct
