"""Linked judgements: worlds against the prompt's own words, read by another program."""

import itertools
import random
import re

import pytest

from clover_jax.data import judgements
from clover_jax.errors import CloverError

KNIGHTS = ("kk4", "kk6", "kk5_multi", "mirror8")


def lines_of(item):
    context, *questions, _ = item.prompt.split("\n")
    return context, questions


def holds(text, knights):
    """Truth of "Ann is a knight or Ben is a knave" as the words say it."""
    truth = re.sub(r"(\w+) is a (knight|knave)", lambda m: str(knights[m[1]] == (m[2] == "knight")), text)  # noqa: E501  # fmt: skip
    return eval(truth)


def knight_worlds(item):
    """Every assignment that the sentences allow, by brute force over what is printed."""
    context, questions = lines_of(item)
    claims = re.findall(r"(\w+): ([^.]*)\.", context)
    names = [re.fullmatch(r"\d+\. Is (\w+) a knight\?", q)[1] for q in questions]
    for values in itertools.product((True, False), repeat=len(names)):
        knights = dict(zip(names, values, strict=True))
        if all(holds(text, knights) == knights[speaker] for speaker, text in claims):
            yield tuple("yes" if v else "no" for v in values)


@pytest.mark.parametrize("family", KNIGHTS)
def test_knights(family):
    fewest, most = {"kk5_multi": (2, 4), "mirror8": (2, 2)}.get(family, (1, 1))
    for item in judgements.eval_set(family, "test", 12):
        worlds = set(knight_worlds(item))
        assert worlds == set(item.worlds) == item.coherent
        assert fewest <= len(worlds) <= most
        if family == "mirror8":
            turn = {"yes": "no", "no": "yes"}
            assert {tuple(turn[a] for a in world) for world in worlds} == worlds


def order_answers(questions, order):
    """`order` from the tallest."""
    found = []
    for q in questions:
        who = re.findall(r"[A-Z]\w+", q)[1:]
        if "tallest" in q or "shortest" in q:
            found.append(order[0] if "tallest" in q else order[-1])
        else:
            found.append("yes" if order.index(who[0]) < order.index(who[1]) else "no")
    return tuple(found)


def test_orders():
    for item in judgements.eval_set("order8", "test", 12):
        context, questions = lines_of(item)
        clues = re.findall(r"(\w+) is taller than (\w+)\.", context)
        names = sorted({name for clue in clues for name in clue})
        orders = list(itertools.permutations(names))
        fitting = [o for o in orders if all(o.index(a) < o.index(b) for a, b in clues)]
        assert [order_answers(questions, o) for o in fitting] == list(item.worlds)
        assert {order_answers(questions, o) for o in orders} == item.coherent
        assert len(questions) == 8


def test_rules():
    for item in judgements.eval_set("rules8", "test", 12):
        context, questions = lines_of(item)
        facts = {
            m[0]: m[1] == "on" for m in re.findall(r"(?:^|\. )(\w) is (on|off)(?=\.)", context)
        }
        rules = dict(re.findall(r"(\w) is on if and only if ([^.]*)\.", context))

        def value(name, facts=facts, rules=rules):
            if name in facts:
                return facts[name]
            letters = re.findall(r"\b[A-P]\b", rules[name])
            values = [value(letter) for letter in letters]
            if "exactly one" in rules[name]:
                return values[0] != values[1]
            if " off" in rules[name]:
                return not values[0]
            return all(values) if " and " in rules[name] else any(values)

        asked = [q.split()[2] for q in questions]
        world = tuple("yes" if value(name) else "no" for name in asked)
        assert item.worlds == (world,) and world in item.coherent
        assert len(facts) == 4 and 2 <= len(item.coherent) <= 16


@pytest.mark.parametrize("family", judgements.SETS)
def test_sets_and_scores(family):
    items = judgements.eval_set(family, "test", 6)
    assert judgements.eval_set(family, "test", 3) == items[:3]
    assert {judgements.split_of(i) for i in items} == {"test"}
    assert len({i.prompt for i in items}) == 6
    for item in items:
        for world in item.worlds:
            numbered = "\n".join(f"{k + 1}. {answer.upper()}," for k, answer in enumerate(world))
            for text in (" ".join(world), numbered, f"steps</think>\n\n{', '.join(world)}."):
                score = judgements.score(item, text)
                assert score.correct and score.consistent and score.questions_right == 1


def test_wrong_answers():
    item = judgements.draw("order8", random.Random(0))
    right = item.worlds[0]
    flipped = ("no" if right[0] == "yes" else "yes", *right[1:])
    score = judgements.score(item, " ".join(flipped))
    assert (score.correct, score.format_valid, score.questions_right) == (False, True, 7 / 8)
    assert score.consistent == (flipped in item.coherent)
    reversed_order = next(w for w in item.coherent if w[6] == right[7] and w[7] == right[6])
    assert judgements.score(item, " ".join(reversed_order)).consistent
    for text in ("", " ".join(right[:-1]), " ".join((*right, "yes")), " ".join(["maybe"] * 8)):
        score = judgements.score(item, text)
        assert (score.correct, score.format_valid, score.consistent) == (False, False, False)


def test_refusals():
    with pytest.raises(CloverError, match="'kk9': expected one of kk4"):
        judgements.eval_set("kk9", "test", 1)
    with pytest.raises(CloverError, match="split is 'dev'"):
        judgements.eval_set("kk4", "dev", 1)
