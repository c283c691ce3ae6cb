"""Generators against independent solvers, splits, streams; the scorer has its own file."""

import collections
import functools
import itertools
import os
import random
import re
import subprocess
import sys
import types
from fractions import Fraction

import pytest

from clover_jax.data import tasks
from clover_jax.data.tasks import MIX, TASKS, Item, Mix
from clover_jax.errors import CloverError

WITH_SCRATCHPAD = TASKS[:6]


def only(task: str) -> Mix:
    return Mix(((task, 1.0),))


def draw(task: str, n: int, seed: int = 0) -> list[Item]:
    rng = random.Random(seed)
    return [tasks.generate(task, rng) for _ in range(n)]


# --- oracles: each solves the prompt from its text alone ------------------------------------------


@functools.cache
def compiled(expression: str) -> types.CodeType:
    """Python's own evaluation, with every number a Fraction so that division is exact."""
    return compile(re.sub(r"\d+", r"F(\g<0>)", expression.strip()), "", "eval")


def exact(expression: str, **names: int) -> Fraction:
    return eval(compiled(expression), {"F": Fraction, **names})


def expression_of(prompt: str) -> str:
    return re.sub(r"^(Compute|What is|Calculate) |[.?]$| = \?$", "", prompt)


def solve_expression(prompt: str) -> str:
    return str(exact(expression_of(prompt)))


def solve_gcd(prompt: str) -> str:
    a, b = map(int, re.findall(r"\d+", prompt))
    return str(max(d for d in range(1, 201) if a % d == 0 and b % d == 0))


def solve_equation(prompt: str) -> str:
    equation = re.sub(r"^(Solve for .: |Find .: |If )|, what is .\?$", "", prompt)
    (letter,) = set(re.findall("[a-z]", equation))
    left, right = equation.split(" = ")
    roots = [x for x in range(-25, 26) if exact(left, **{letter: x}) == int(right)]
    assert len(roots) == 1, prompt
    return str(roots[0])


LEGS = {
    0: "snake snakes",
    2: "chicken chickens duck ducks goose geese",
    4: "cat cats cow cows dog dogs fox foxes horse horses mouse mice ox oxen sheep sheep "
    "wolf wolves",
    6: "ant ants bee bees beetle beetles butterfly butterflies",
    8: "scorpion scorpions spider spiders",
    10: "crab crabs lobster lobsters",
}


def solve_legs(prompt: str) -> str:
    legs = {name: n for n, names in LEGS.items() for name in names.split()}
    return str(sum(int(n) * legs[name] for n, name in re.findall(r"(\d+) (\w+)", prompt)))


def solve_sorting(prompt: str) -> str:
    left = re.findall(r"\d+", prompt)
    descending = "descending" in prompt or "largest to" in prompt
    found = []
    while left:
        found.append((max if descending else min)(left, key=int))
        left.remove(found[-1])
    return " ".join(found)


def solve_sudoku(prompt: str) -> str:
    board = [[int(c.replace("_", "0")) for c in row.split()] for row in prompt.split("\n")[1:]]
    empty = [(r, c) for r in range(4) for c in range(4) if not board[r][c]]
    assert len(board) == 4 and 6 <= len(empty) <= 10
    found = []

    def fill(i: int) -> None:
        if i == len(empty):
            found.append("\n".join(" ".join(map(str, row)) for row in board))
            return
        r, c = empty[i]
        box = {board[r // 2 * 2 + j][c // 2 * 2 + k] for j in (0, 1) for k in (0, 1)}
        for number in {1, 2, 3, 4} - box - set(board[r]) - {row[c] for row in board}:
            board[r][c] = number
            fill(i + 1)
        board[r][c] = 0

    fill(0)
    assert len(found) == 1, "not a unique solution"
    return found[0]


ORACLES = {
    "chain_sum": solve_expression,
    "basic_arithmetic": solve_expression,
    "products": solve_expression,
    "gcd": solve_gcd,
    "simple_equations": solve_equation,
    "leg_counting": solve_legs,
    "number_sorting": solve_sorting,
    "mini_sudoku": solve_sudoku,
}


@pytest.mark.parametrize("task", ORACLES)
def test_answers(task: str):
    for item in draw(task, 2_000):
        assert item.task == task
        assert item.answer == ORACLES[task](item.prompt), item.prompt


def test_python_answers_do_what_the_description_says():
    keep = {
        "even": lambda x, n: x % 2 == 0,
        "odd": lambda x, n: x % 2 != 0,
        "positive": lambda x, n: x > 0,
        "negative": lambda x, n: x < 0,
        "above": lambda x, n: x > n,
        "below": lambda x, n: x < n,
        "multiples": lambda x, n: x % n == 0,
    }
    change = {
        "squared": lambda x, n: x**2,
        "doubled": lambda x, n: x + x,
        "negated": lambda x, n: 0 - x,
        "plus": lambda x, n: x + n,
        "minus": lambda x, n: x - n,
        "times": lambda x, n: x * n,
    }
    finish = {
        "the sum": sum,
        "the count": len,
        "the largest": lambda ys: sorted(ys)[-1] if ys else 0,
        "the smallest": lambda ys: sorted(ys)[0] if ys else 0,
        "a list": list,
        "a sorted list": sorted,
        "a reversed list": lambda ys: ys[::-1],
        "a sorted list without repeats": lambda ys: sorted(dict.fromkeys(ys)),
    }
    seen = set()
    rng = random.Random(1)
    for item in draw("python_function", 2_000):
        what, which, after = re.search(  # pyright: ignore[reportOptionalMemberAccess]
            r"Return (.*) of the (.*) in xs(?:, each (.*))?\.", item.prompt
        ).groups()
        xs = [rng.randint(-20, 20) for _ in range(rng.randint(0, 8))]
        for word, test in keep.items():
            if word in which:
                xs_kept = [x for x in xs if test(x, int(re.sub(r"\D", "", which) or 0))]
                break
        else:
            assert which == "numbers"
            xs_kept = xs
        if after:
            word, *number = after.split()
            xs_kept = [change[word](x, *map(int, number or ["0"])) for x in xs_kept]
        scope: dict = {}
        exec(item.answer, scope)  # our own generator's output, not a model's
        assert scope["f"](list(xs)) == finish[what](xs_kept), item
        seen.add((what, re.sub(r"\d", "", which), re.sub(r"\d", "", after or "")))
    assert len(seen) > 430  # of 8 * 8 * 7 = 448


def test_text_replies():
    fixed = [prompt for prompts, _ in tasks.CHAT_REPLIES.values() for prompt in prompts]
    assert len(fixed) == len(set(fixed)) <= 40
    for item in draw("text", 2_000):
        if item.prompt in fixed:
            prompts, replies = tasks.CHAT_REPLIES[item.problem]
            assert item.prompt in prompts and item.answer in replies
            continue
        story = re.fullmatch(r"The (\w+) (\w+) (\w+) (\w+ the \w+)\. (.*)", item.prompt)
        assert story
        colour, actor, action, place, question = story.groups()
        expected = {
            f"Who {action}?": f"The {colour} {actor}.",
            f"Where is the {actor}?": f"{place}.",
            f"What colour is the {actor}?": f"{colour}.",
            f"What does the {actor} do?": f"It {action}.",
        }[question]
        assert item.answer == expected[0].upper() + expected[1:]


# --- scratchpads --------------------------------------------------------------------------------


@pytest.mark.parametrize("task", WITH_SCRATCHPAD)
def test_scratchpad_lines_hold_and_end_in_the_answer(task: str):
    for item in draw(task, 2_000, seed=1):
        before = item.problem
        for line in item.thinking.split("\n"):
            sides = line.split(": ")[-1].split("=")
            if task == "basic_arithmetic":
                assert sides.pop(0) == ""
                sides.insert(0, before)
            names = {}
            if task == "simple_equations":
                names = {letter: int(item.answer) for letter in set(re.findall("[a-z]", line))}
                assert len(names) == 1
            assert len(sides) >= 2 and len({exact(side, **names) for side in sides}) == 1, item
            before = sides[-1]
        last = item.thinking.split("\n")[-1]
        if task == "gcd":
            assert re.fullmatch(rf"\d+ = \d+ \* {item.answer} \+ 0", last)
        else:
            assert last.split("=")[-1].strip() == item.answer


@pytest.mark.parametrize(
    ("task", "index", "prompt", "thinking", "answer"),
    [
        (
            "chain_sum",
            2,
            "Compute 6 - 77 + 1 - 9.",
            "6 - 77 = -71|-71 + 1 = -70|-70 - 9 = -79",
            "-79",
        ),
        ("basic_arithmetic", 2, "Compute (4 + 9 + 3) / 8.", "= (13 + 3) / 8|= 16 / 8|= 2", "2"),
        (
            "products",
            1,
            "Compute 8 * 398.",
            "8 * 300 = 2400|8 * 90 = 720|8 * 8 = 64|2400 + 720 = 3120|3120 + 64 = 3184",
            "3184",
        ),
        (
            "gcd",
            1,
            "Greatest common divisor of 52 and 142?",
            "142 = 2 * 52 + 38|52 = 1 * 38 + 14|38 = 2 * 14 + 10|14 = 1 * 10 + 4|10 = 2 * 4 + 2"
            "|4 = 2 * 2 + 0",
            "2",
        ),
        (
            "simple_equations",
            2,
            "Solve for a: 2 - 9 - 6*a = -73",
            "-6*a - 7 = -73|-6*a = -73 + 7 = -66|a = -66 / -6 = 11",
            "11",
        ),
        (
            "leg_counting",
            1,
            "How many legs: 7 cats, 3 beetles, 2 ducks?",
            "7 cats: 7 * 4 = 28|3 beetles: 3 * 6 = 18|2 ducks: 2 * 2 = 4|28 + 18 = 46|46 + 4 = 50",
            "50",
        ),
        ("number_sorting", 2, "Sort ascending: 43 79 66 89 13", "", "13 43 66 79 89"),
    ],
)
def test_published_items_stay(task: str, index: int, prompt: str, thinking: str, answer: str):
    """Checked by hand; they also pin the stream that resumed runs and evaluation sets rely on."""
    item = tasks.item_at(only(task), 0, "test", index)
    assert (item.prompt, item.thinking, item.answer) == (
        prompt,
        thinking.replace("|", "\n"),
        answer,
    )


def test_families_do_not_share_prompts():
    owner: dict[str, str] = {}
    for task in TASKS:
        for item in draw(task, 1_500):
            assert owner.setdefault(item.prompt, task) == task, item.prompt


def test_plurals():
    prompts = " ".join(item.prompt for item in draw("leg_counting", 5_000))
    natural = "3 cats|2 mice|1 mouse|4 oxen|1 ox|5 sheep|1 sheep|2 wolves|6 butterflies|9 foxes"
    for words in [*natural.split("|"), "3 geese", "1 goose", "7 crabs"]:
        assert re.search(rf"\b{words}\b", prompts), words
    assert not re.search(r"\b1 (cats|mice|oxen|geese|wolves|butterflies|foxes)\b", prompts)
    assert not re.search(r"\b(sheeps|oxes|gooses|mouses|wolfs|foxs|butterflys)\b", prompts)
    bare = len(re.findall(r"[2-9] cat\b", prompts)) / len(re.findall(r"[2-9] cats?\b", prompts))
    assert 0.05 < bare < 0.15


CANONICAL = {
    "chain_sum": "Compute ",
    "basic_arithmetic": "Compute ",
    "products": "Compute ",
    "gcd": "Greatest common divisor of ",
    "simple_equations": "Solve for ",
    "leg_counting": "How many legs: ",
    "number_sorting": "Sort (ascending|descending): ",
    "mini_sudoku": "Solve the 4x4 sudoku:\n",
    "python_function": "Complete the function:\ndef f",
}


@pytest.mark.parametrize("task", CANONICAL)
def test_canonical_phrasing_dominates(task: str):
    matched = [re.match(CANONICAL[task], item.prompt) is not None for item in draw(task, 2_000)]
    assert 0.66 < sum(matched) / 2_000 < 0.74


# --- splits and streams -------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_by_problem(task: str):
    train = {item.problem for item in itertools.islice(tasks.stream(only(task), 3, "train"), 1_500)}
    val, test = ({i.problem for i in tasks.eval_set(task, split, 100)} for split in ("val", "test"))
    assert len(val) == len(test) == 100
    assert not train & val and not train & test and not val & test


@pytest.mark.parametrize("task", ["products", "gcd"])
def test_phrasings_and_order_do_not_change_the_split(task: str):
    prompts, splits = collections.defaultdict(set), collections.defaultdict(set)
    for item in draw(task, 6_000):
        numbers = tuple(sorted(re.findall(r"\d+", item.prompt)))
        prompts[numbers].add(item.prompt)
        splits[numbers].add(tasks.split_of(item))
    assert max(map(len, prompts.values())) > 2
    assert {len(found) for found in splits.values()} == {1}


def leg_problem(prompt: str) -> str:
    """The order-free problem from the prompt's words."""
    names = [name for words in LEGS.values() for name in words.split()]
    plurals = dict(zip(names[1::2], names[::2], strict=True))
    groups = re.findall(r"(\d+) (\w+)", prompt)
    return ", ".join(sorted(f"{n} {plurals.get(name, name)}" for n, name in groups))


def test_readme_example_is_held_out():
    for item in draw("leg_counting", 2_000):
        assert item.problem == leg_problem(item.prompt)
    for prompt in ("How many legs: 3 cats, 2 ants?", "Count the legs of 2 ants and 3 cats."):
        example = Item("leg_counting", prompt, "", "24", leg_problem(prompt))
        assert (example.task, example.problem) in tasks.HELD_OUT
        assert tasks.split_of(example) == "test"


def test_split_shares():
    counts = collections.Counter(tasks.split_of(item) for item in draw("leg_counting", 6_000))
    assert 0.88 < counts["train"] / 6_000 < 0.92
    assert 0.04 < counts["val"] / 6_000 < 0.06
    assert 0.04 < counts["test"] / 6_000 < 0.06


def test_split_is_the_hash_of_task_and_problem():
    # printf 'gcd\0%s' "1 19" | sha1sum: the first 8 hex digits modulo 100 are 4, 5, 9, 10, 98
    by_hand = {"1 19": "test", "1 50": "val", "1 1": "val", "1 125": "train", "1 29": "train"}
    for problem, split in by_hand.items():
        assert tasks.split_of(Item("gcd", "any phrasing", "", "1", problem)) == split


def test_held_out_items_leave_the_train_stream(monkeypatch):
    victim = tasks.item_at(MIX, 0, "train", 5)
    monkeypatch.setattr(tasks, "HELD_OUT", frozenset({(victim.task, victim.problem)}))
    assert tasks.item_at(MIX, 0, "train", 5).problem != victim.problem
    assert tasks.split_of(victim) == "test"


def test_coarse_splits_of_sudoku_and_functions():
    grids = {s: {i.answer for i in tasks.eval_set("mini_sudoku", s, 100)} for s in tasks.SPLITS}
    assert not grids["train"] & grids["test"] and not grids["train"] & grids["val"]
    shapes = {
        s: {re.sub(r"\d", "", i.problem) for i in tasks.eval_set("python_function", s, 60)}
        for s in tasks.SPLITS
    }
    assert not shapes["train"] & shapes["test"] and not shapes["train"] & shapes["val"]


def test_stream_is_indexable():
    items = list(itertools.islice(tasks.stream(MIX, 7, "train"), 60))
    assert items == [tasks.item_at(MIX, 7, "train", i) for i in range(60)]
    assert items[40:] == list(itertools.islice(tasks.stream(MIX, 7, "train", start=40), 20))
    tasks.generate("gcd", random.Random())  # no hidden state
    random.seed(1)
    assert tasks.item_at(MIX, 7, "train", 33) == items[33]
    assert items != list(itertools.islice(tasks.stream(MIX, 8, "train"), 60))
    assert items[5:] != list(itertools.islice(tasks.stream(MIX, 8, "train"), 4, 59))  # seed + index


def test_same_items_in_every_process():
    program = (
        "from clover_jax.data import tasks\n"
        "for split in tasks.SPLITS:\n"
        "    for i in range(100):\n"
        "        print(tasks.thinking_at(tasks.MIX, 0, split, i))\n"
        "        print(ascii(tasks.item_at(tasks.MIX, 0, split, i)))\n"
        "for task in tasks.TASKS:\n"
        "    print(ascii(tasks.eval_set(task, 'test', 5)))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1
    assert ascii(tasks.item_at(MIX, 0, "val", 99)) in outputs.pop()


def test_mix_weights_and_thinking_share():
    items = list(itertools.islice(tasks.stream(MIX, 0, "train"), 4_000))
    counts = collections.Counter(item.task for item in items)
    for task, weight in MIX.weights:
        assert abs(counts[task] / 4_000 - weight / 100) < 0.02, task
    assert sum(weight for _, weight in MIX.weights) == 100
    mix = Mix(MIX.weights, thinking_share=0.25)
    thinking = [tasks.thinking_at(mix, 0, "train", i) for i in range(4_000)]
    assert 0.22 < sum(thinking) / 4_000 < 0.28
    assert [tasks.item_at(mix, 0, "train", i) for i in range(20)] == items[:20]
    by_task = collections.Counter(i.task for i, on in zip(items, thinking, strict=True) if on)
    assert 0.15 < by_task["gcd"] / counts["gcd"] < 0.35  # independent of the task


def test_eval_set():
    items = tasks.eval_set("gcd", "test", 30)
    assert len({item.problem for item in items}) == 30
    assert all(tasks.split_of(item) == "test" for item in items)
    assert tasks.eval_set("gcd", "test", 20) == items[:20]
    assert tasks.eval_set("gcd", "val", 0) == []


def test_eval_set_of_a_small_family_ends(monkeypatch):
    monkeypatch.setattr(tasks, "EVAL_MAX_REPEATS", 5)
    few = tasks.eval_set("python_function", "test", 10_000)
    assert 20 < len({item.problem for item in few}) == len(few) < 1_000


# --- messages and responses ---------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_messages_and_response_text(task: str):
    for item in draw(task, 20):
        assert tasks.messages(item) == [{"role": "user", "content": item.prompt}]
        assert tasks.response_text(item, False) == item.answer
        whole = "<think>\n" + tasks.response_text(item, True)
        steps, answer = whole.removeprefix("<think>\n").split("\n</think>\n\n")
        assert (steps, answer) == (item.thinking, item.answer)
        assert bool(steps) == (task in WITH_SCRATCHPAD)
        if not steps:
            assert whole == f"<think>\n\n</think>\n\n{item.answer}"
        assert item.answer == item.answer.strip() and item.prompt == item.prompt.strip()


# --- user errors --------------------------------------------------------------------------------


def test_user_errors():
    with pytest.raises(CloverError, match="task is 'sums': expected one of chain_sum, "):
        tasks.generate("sums", random.Random(0))
    with pytest.raises(CloverError, match="task is 'sums'"):
        tasks.eval_set("sums", "test", 3)
    with pytest.raises(CloverError, match="split is 'dev': expected one of train, val, test"):
        tasks.item_at(MIX, 0, "dev", 0)
    with pytest.raises(CloverError, match="task is 'sums'"):
        Mix((("sums", 1.0),))
    with pytest.raises(CloverError, match="weight of task gcd is -1"):
        Mix((("gcd", -1.0),))
    with pytest.raises(CloverError, match="weight of task gcd is nan"):
        Mix((("gcd", float("nan")),))
    with pytest.raises(CloverError, match="expected a positive one"):
        Mix(())
    with pytest.raises(CloverError, match=r"thinking_share is 1\.5"):
        Mix((("gcd", 1.0),), thinking_share=1.5)
