"""Generators against independent solvers, splits, determinism, and the scorer."""

import collections
import itertools
import os
import random
import re
import subprocess
import sys
from fractions import Fraction

import pytest

from clover_jax.data import tasks
from clover_jax.data.tasks import MIX, TASKS, Item, Mix, Score, score
from clover_jax.errors import CloverError

WITH_SCRATCHPAD = TASKS[:6]


def only(task: str) -> Mix:
    return Mix(((task, 1.0),))


def draw(task: str, n: int, seed: int = 0) -> list[Item]:
    rng = random.Random(seed)
    return [tasks.generate(task, rng) for _ in range(n)]


# --- oracles: each solves the prompt from its text alone ------------------------------------------


def exact(expression: str, **names: int) -> Fraction:
    """Python's own evaluation, with every number a Fraction so that division is exact."""
    return eval(re.sub(r"\d+", r"F(\g<0>)", expression), {"F": Fraction, **names})


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
    roots = [x for x in range(-60, 61) if exact(left, **{letter: x}) == int(right)]
    assert len(roots) == 1, prompt
    return str(roots[0])


LEGS = {
    0: "snake snakes",
    2: "chicken chickens duck ducks goose geese",
    4: "cat cats cow cows dog dogs fox foxes horse horses mouse mice ox oxen sheep sheep wolf wolves",
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


def test_scratchpad_by_hand():
    found: dict[str, str] = {}
    for task in WITH_SCRATCHPAD:
        found |= {item.prompt: item.thinking for item in draw(task, 60_000, seed=2)}
    by_hand = {
        "Compute 5 - 9 + 3.": "5 - 9 = -4\n-4 + 3 = -1",
        "Compute 7 - (2 - 9).": "= 7 - -7\n= 14",
        "Compute 2 + 8 / 4.": "= 2 + 2\n= 4",
        "Compute 15 * 43.": "15 * 40 = 600\n15 * 3 = 45\n600 + 45 = 645",
        "Compute 87 * 6.": "80 * 6 = 480\n7 * 6 = 42\n480 + 42 = 522",
        "Greatest common divisor of 60 and 144?": "144 = 2 * 60 + 24\n60 = 2 * 24 + 12\n"
        "24 = 2 * 12 + 0",
    }
    assert {prompt: found.get(prompt) for prompt in by_hand} == by_hand


def test_equation_and_legs_scratchpads_by_shape():
    # Too many prompts to meet a given one, so the lines are rebuilt from the prompt.
    for item in draw("leg_counting", 200):
        groups = re.findall(r"\d+ \w+", item.prompt)
        lines = item.thinking.split("\n")
        assert [line.split(":")[0] for line in lines[: len(groups)]] == groups
        assert len(lines) == 2 * len(groups) - 1
    for item in draw("simple_equations", 2_000):
        if item.prompt.startswith("Solve") and item.problem.startswith("3*x - 7 = "):
            total = int(item.problem.split("= ")[1])
            letter = item.prompt[len("Solve for ")]
            assert item.thinking == (
                f"3*{letter} = {total} + 7 = {total + 7}\n{letter} = {total + 7} / 3 = {item.answer}"
            )
            break
    else:
        pytest.fail("no such equation drawn")


def test_families_do_not_share_prompts():
    owner: dict[str, str] = {}
    for task in TASKS:
        for item in draw(task, 5_000):
            assert owner.setdefault(item.prompt, task) == task, item.prompt


def test_plurals():
    prompts = " ".join(item.prompt for item in draw("leg_counting", 5_000))
    natural = "3 cats|2 mice|1 mouse|4 oxen|1 ox|5 sheep|1 sheep|2 wolves|6 butterflies|9 foxes"
    for words in natural.split("|") + ["3 geese", "1 goose", "7 crabs"]:
        assert re.search(rf"\b{words}\b", prompts), words
    assert not re.search(r"\b1 (cats|mice|oxen|geese|wolves|butterflies|foxes)\b", prompts)
    assert not re.search(r"(sheeps|oxes|gooses|mouses|wolfs|foxs|butterflys)", prompts)
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
    train = {item.problem for item in itertools.islice(tasks.stream(only(task), 3, "train"), 5_000)}
    val, test = ({i.problem for i in tasks.eval_set(task, split, 100)} for split in ("val", "test"))
    assert len(val) == len(test) == 100
    assert not train & val and not train & test and not val & test


@pytest.mark.parametrize("task", ["products", "gcd"])
def test_phrasings_and_order_do_not_change_the_split(task: str):
    prompts, splits = collections.defaultdict(set), collections.defaultdict(set)
    for item in draw(task, 10_000):
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
    counts = collections.Counter(tasks.split_of(item) for item in draw("leg_counting", 10_000))
    assert 0.88 < counts["train"] / 10_000 < 0.92
    assert 0.04 < counts["val"] / 10_000 < 0.06
    assert 0.04 < counts["test"] / 10_000 < 0.06


def test_split_is_the_hash_of_task_and_problem():
    # printf 'gcd\\0%s' "1 19" | sha1sum: the first 8 hex digits modulo 100 are 4, 9, 12, 18, 98
    by_hand = {"1 19": "test", "1 1": "val", "1 23": "train", "1 10": "train", "1 29": "train"}
    for problem, split in by_hand.items():
        assert tasks.split_of(Item("gcd", "any phrasing", "", "1", problem)) == split


def test_held_out_items_leave_the_train_stream(monkeypatch):
    victim = tasks.item_at(MIX, 0, "train", 5)
    monkeypatch.setattr(tasks, "HELD_OUT", frozenset({(victim.task, victim.problem)}))
    assert tasks.item_at(MIX, 0, "train", 5).problem != victim.problem
    assert tasks.split_of(victim) == "test"


def test_coarse_splits_of_sudoku_and_functions():
    grids = {s: {i.answer for i in tasks.eval_set("mini_sudoku", s, 200)} for s in tasks.SPLITS}
    assert not grids["train"] & grids["test"] and not grids["train"] & grids["val"]
    shapes = {
        s: {re.sub(r"\d", "", i.problem) for i in tasks.eval_set("python_function", s, 100)}
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
    items = tasks.eval_set("gcd", "test", 60)
    assert len({item.problem for item in items}) == 60
    assert all(tasks.split_of(item) == "test" for item in items)
    assert tasks.eval_set("gcd", "test", 20) == items[:20]
    assert tasks.eval_set("gcd", "val", 0) == []
    few = tasks.eval_set("python_function", "test", 10_000)  # ends although there are fewer
    assert 100 < len(few) < 1_000


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


# --- score --------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_score_accepts_references(task: str):
    for item in draw(task, 300, seed=4):
        steps = 1.0 if item.thinking else None
        with_steps = tasks.response_text(item, True)
        assert score(item, with_steps, thinking=True) == Score(True, True, steps)
        assert score(item, "<think>\n" + with_steps, thinking=True) == Score(True, True, steps)
        assert score(item, with_steps) == Score(True, True, steps)
        assert score(item, item.answer) == Score(True, True, None)
        assert score(item, f"<think>\n\n</think>\n\n{item.answer}\n") == Score(True, True, None)


def perturbed(item: Item, rng: random.Random) -> str:
    if item.task in WITH_SCRATCHPAD:
        return str(int(item.answer) + rng.choice((-10, -1, 1, 10)))
    if item.task == "text":
        return item.answer[:-1]
    if item.task == "number_sorting":
        return item.answer + " 7"
    if item.task == "mini_sudoku":
        return item.answer.translate(str.maketrans("1234", "2143"))
    raise AssertionError(item.task)


@pytest.mark.parametrize("task", [t for t in TASKS if t != "python_function"])
def test_score_rejects_perturbed_answers(task: str):
    rng = random.Random(5)
    for item in draw(task, 300, seed=5):
        assert score(item, perturbed(item, rng)) == Score(False, True, None), item


@pytest.mark.parametrize("task", TASKS)
def test_score_without_an_answer(task: str):
    item = draw(task, 1)[0]
    assert score(item, "") == Score(False, False, None)
    unclosed = score(item, item.thinking + "\n" + item.answer, thinking=True)
    assert not unclosed.correct and not unclosed.format_valid
    twice = tasks.response_text(item, True) + "\n</think>\n\n" + item.answer
    assert not score(item, twice, thinking=True).correct


def test_score_integers():
    item = Item("gcd", "", "", "12", "24 36")
    right = ["12", " 12\n", "012"]
    wrong = ["13", "-12", "1"]
    malformed = ["12.", "12 12", "x = 12", "1_2", "twelve", "١٢", "1" * 5_000, "<think>12", "12\0"]
    assert all(score(item, text) == Score(True, True, None) for text in right)
    assert all(score(item, text) == Score(False, True, None) for text in wrong)
    assert all(score(item, text) == Score(False, False, None) for text in malformed)


def test_score_grid():
    puzzle = "1 _ 3 4\n3 4 _ 2\n_ _ _ _\n4 _ 2 1"
    solution = "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1"
    item = Item("mini_sudoku", "", "", solution, puzzle)
    assert score(item, solution).correct
    assert score(item, "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 1 2") == Score(False, True, None)
    assert score(item, "2 1 3 4\n3 4 1 2\n1 2 4 3\n4 3 2 1") == Score(False, True, None)
    assert score(item, solution.replace("\n", " ")) == Score(False, False, None)
    assert score(item, solution[:-2]) == Score(False, False, None)
    # A puzzle with two solutions: both count, whichever the item calls its answer.
    open_puzzle = "_ _ 3 4\n3 4 _ _\n_ _ 4 3\n4 3 _ _"
    other = "2 1 3 4\n3 4 1 2\n1 2 4 3\n4 3 2 1"
    for grid in (solution, other):
        assert score(Item("mini_sudoku", "", "", solution, open_puzzle), grid).correct


def test_score_text_accepts_every_reply():
    item = next(i for i in draw("text", 200) if i.problem == "greeting")
    assert score(item, "Hello! How can I help?").correct
    assert score(item, "Hi! How can I help?").correct
    assert not score(item, "Goodbye!").correct


SUM_EVEN = Item(
    "python_function",
    "",
    "",
    "def f(xs):\n    return sum([x * x for x in xs if x % 2 == 0])",
    "Return the sum of the even numbers in xs, each squared.",
)


def body(*lines: str) -> str:
    return "\n    ".join(["def f(xs):", *lines])


@pytest.mark.parametrize(
    "answer",
    [
        body("return sum(x * x for x in xs if x % 2 == 0)"),
        body(
            '"""Sum."""',
            "ys = []",
            "for x in xs:",
            "    if x % 2 != 1:",
            "        ys.append(x*x)",
            "return sum(ys)",
        ),
        body("t = 0", "for y in xs:", "    if y % 2 == 0:", "        t = t + y * y", "return t"),
    ],
)
def test_score_functions_by_execution(answer: str):
    assert score(SUM_EVEN, answer) == Score(True, True, None)


@pytest.mark.parametrize(
    "answer",
    [
        body("return sum(x * x for x in xs if x % 2 == 1)"),
        body("return sum(x * x for x in xs)"),
        body("return sum(x for x in xs if x % 2 == 0)"),
        body("return max(x * x for x in xs if x % 2 == 0)"),
        body("return 0"),
        body("return"),
        body("return ys"),
        body("return f(xs)"),
        body("while 0 < 1:", "    xs.append(1)"),
        body("for x in xs:", "    xs.append(x)", "return sum(xs)"),
        body("import os", "return os.getcwd()"),
        body("return xs.__class__.__base__.__subclasses__()"),
        body("return __import__('os').getcwd()"),
        body("return [0] * 999999999"),
        body("return 9 ** 9 ** 9"),
        body("return 1 // 0"),
        body("return sum(" + "[" * 40 + "]" * 40 + ")"),
        body("return " + "-" * 260 + "1"),
        body(*(" " * d + f"for a{d} in [1,2,3,4,5,6]:" for d in range(8)), " " * 8 + "x = 1"),
        body("t = 2", "for x in xs:", "    for y in xs:", "        t = t * t", "return t"),
    ],
)
def test_score_rejects_wrong_and_unsafe_functions(answer: str):
    assert score(SUM_EVEN, answer) == Score(False, True, None)


@pytest.mark.parametrize(
    "answer",
    [
        "sum(xs)",
        "def f(xs)\n    return 0",
        "def g(xs):\n    return 0",
        "def f(xs):\n    return 0\nimport os",
        "def f(xs):\n    return 0 if 1else 2",
        "def f(xs):\n    return 0\0",
        "def f(xs):\n    return '\ud800'",
        "(" * 250,
        "def f(xs):\n    return 0\n" + "#" * 300,
    ],
)
def test_score_malformed_functions(answer: str):
    assert score(SUM_EVEN, answer) == Score(False, False, None)


@pytest.mark.parametrize("changed", ["x > 4", "x >= 3", "x < 3", "x % 3 == 0"])
def test_every_boundary_of_a_filter_is_seen(changed: str):
    item = Item("python_function", "", "", body("return [x for x in xs if x > 3]"), "")
    assert not score(item, item.answer.replace("x > 3", changed)).correct


def steps_valid(task: str, problem: str, answer: str, steps: str) -> float | None:
    item = Item(task, "", "", answer, problem)
    return score(item, f"{steps}\n</think>\n\n{answer}", thinking=True).steps_valid


def test_steps_valid():
    assert steps_valid("chain_sum", "5 - 9 + 31", "27", "5 - 9 = -4\n-4 + 31 = 27") == 1
    assert steps_valid("chain_sum", "5 - 9 + 31", "27", "5 - 9 = 4\n-4 + 31 = 27") == 0.5
    assert steps_valid("chain_sum", "5 - 9 + 31", "27", "I guess") is None
    assert steps_valid("basic_arithmetic", "7 - (2 - 9)", "14", "= 7 - -7\n= 14") == 1
    assert steps_valid("basic_arithmetic", "7 - (2 - 9)", "14", "= 7 - 7\n= 0") == 0.5
    assert steps_valid("basic_arithmetic", "6 / 4 * 2", "3", "= 1.5 * 2\n= 3") == 0
    assert steps_valid("basic_arithmetic", "6 / 4 * 2", "3", "= 3 / 2 * 2\n= 3") == 1
    assert steps_valid("gcd", "60 144", "12", "144 = 2 * 60 + 24\n60 = 2 * 24 + 11") == 0.5
    legs = "3 cats: 3 * 4 = 12\n2 ants: 2 * 6 = 13\n12 + 12 = 24\nso 24"
    assert steps_valid("leg_counting", "2 ant, 3 cat", "24", legs) == pytest.approx(2 / 3)
    equation = "3*m = 40 + 5 = 45\nm = 45 / 3 = 15"
    assert steps_valid("simple_equations", "3*x - 5 = 40", "15", equation) == 1
    assert steps_valid("simple_equations", "3*x - 5 = 40", "15", equation.replace("+", "-")) == 0.5
    junk = (
        "1 = = 1\n= \n2 ** 3 = 8\n1 / 0 = 1\n007 = 7\n1if = 1\n(1 = 1\n[1] = [1]\nf(1) = 1\n\0 = 1"
    )
    assert steps_valid("chain_sum", "1 + 1", "2", junk) == 0
    assert steps_valid("chain_sum", "1 + 1", "2", f"{'9' * 290} = {'9' * 290}") == 0
    assert steps_valid("chain_sum", "1 + 1", "2", f"{'-' * 298}1 = 1\n{'1+' * 149}1 = 150") == 1


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
