"""The scorer: references, perturbed and malformed answers, unsafe code, wrong steps."""

import random

import pytest

from clover_jax.data import tasks
from clover_jax.data.tasks import TASKS, Item, Score, score

WITH_SCRATCHPAD = TASKS[:6]


def draw(task: str, n: int, seed: int = 0) -> list[Item]:
    rng = random.Random(seed)
    return [tasks.generate(task, rng) for _ in range(n)]


@pytest.mark.parametrize("task", TASKS)
def test_score_accepts_references(task: str):
    for item in draw(task, 15 if task == "python_function" else 150, seed=4):
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
