"""The problem families of the small task suite, from the standard library only.

`DRAW` maps a family to a function from a `random.Random` to an `Item`. Numbers are Python integers,
so every answer and scratchpad line is exact. A scratchpad has one step a line; families whose
solution has no honest forward trace (sorting, sudoku, text, code) have an empty one. No two
families share a prompt, so none of them sees another's held-out problems.
"""

import functools
import itertools
import operator
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

CANONICAL_SHARE = 0.7  # of the prompts use a family's first phrasing


@dataclass(frozen=True)
class Item:
    """One problem.

    Attributes:
        task: family, one of `TASKS`.
        prompt: the user's message.
        thinking: scratchpad, one step a line; empty in families without one.
        answer: reference answer.
        problem: what is asked, free of phrasing (and of order, where order does not matter).
    """

    task: str
    prompt: str
    thinking: str
    answer: str
    problem: str


# --- families with a scratchpad -----------------------------------------------------------------


def _phrase(rng: random.Random, canonical: str, *others: str) -> str:
    return canonical if rng.random() < CANONICAL_SHARE else rng.choice(others)


def _compute_phrase(rng: random.Random, expression: str) -> str:
    return _phrase(
        rng,
        f"Compute {expression}.",
        f"What is {expression}?",
        f"Calculate {expression}.",
        f"{expression} = ?",
    )


def _running_sum(numbers: list[int]) -> list[str]:
    totals = itertools.pairwise(itertools.accumulate(numbers))
    return [f"{a} + {n} = {b}" for (a, b), n in zip(totals, numbers[1:], strict=True)]


def _draw_chain_sum(rng: random.Random) -> Item:
    digits = [rng.choice(((0, 9), (10, 99))) for _ in range(rng.randint(2, 4))]
    total, *numbers = (rng.randint(*bounds) for bounds in digits)
    expression, steps = str(total), []
    for number in numbers:
        sign = rng.choice("+-")
        before, total = total, total + number if sign == "+" else total - number
        expression += f" {sign} {number}"
        steps.append(f"{before} {sign} {number} = {total}")
    prompt = _compute_phrase(rng, expression)
    return Item("chain_sum", prompt, "\n".join(steps), str(total), expression)


# An expression is a number or (left, operator, right).
type _Tree = int | tuple[_Tree, str, _Tree]

_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,  # drawn only where it is exact
}


def _random_tree(rng: random.Random, terms: int) -> tuple[_Tree, int]:
    """A tree with `terms` one-digit leaves and its value; every division in it is exact."""
    if terms == 1:
        leaf = rng.randint(0, 9)
        return leaf, leaf
    left_terms = rng.randint(1, terms - 1)
    left, a = _random_tree(rng, left_terms)
    right, b = _random_tree(rng, terms - left_terms)
    symbol = rng.choice("+-*//" if b != 0 and a % b == 0 else "+-*")
    return (left, symbol, right), _ARITHMETIC[symbol](a, b)


def _show(tree: _Tree, least: int = 0) -> str:
    """Infix text, bracketed where the operator binds less tightly than `least`."""
    if isinstance(tree, int):
        return str(tree)
    left, symbol, right = tree
    level = 2 if symbol in "*/" else 1
    text = f"{_show(left, level)} {symbol} {_show(right, level + 1)}"
    return text if level >= least else f"({text})"


def _reduce(tree: _Tree) -> _Tree:
    """The tree with its leftmost operator on two numbers replaced by the result."""
    if isinstance(tree, int):
        return tree
    left, symbol, right = tree
    if not isinstance(left, int):
        return _reduce(left), symbol, right
    if not isinstance(right, int):
        return left, symbol, _reduce(right)
    return _ARITHMETIC[symbol](left, right)


def _draw_basic_arithmetic(rng: random.Random) -> Item:
    # Plain sums belong to chain_sum and a * b to products: one prompt, one scratchpad.
    while True:
        tree, value = _random_tree(rng, rng.randint(2, 4))
        expression = _show(tree)
        if set(expression) & set("*/(") and not re.fullmatch(r"\d \* \d", expression):
            break
    steps = []
    while not isinstance(tree, int):
        tree = _reduce(tree)
        steps.append(f"= {_show(tree)}")
    prompt = _compute_phrase(rng, expression)
    return Item("basic_arithmetic", prompt, "\n".join(steps), str(value), expression)


def _decimal_parts(number: int) -> list[int]:
    digits = str(number)
    parts = [int(d) * 10 ** (len(digits) - 1 - i) for i, d in enumerate(digits)]
    return [part for part in parts if part]


def _draw_products(rng: random.Random) -> Item:
    if rng.random() < 0.3:
        factors = [rng.randint(100, 999), rng.randint(2, 9)]
        rng.shuffle(factors)
    else:
        factors = [rng.randint(1, 10 ** rng.randint(1, 2) - 1) for _ in range(2)]
    a, b = factors
    # Split the second factor into decimal parts, or the first if the second is one digit.
    pairs = [(a, p) for p in _decimal_parts(b)] if b >= 10 else [(p, b) for p in _decimal_parts(a)]
    steps = [f"{x} * {y} = {x * y}" for x, y in pairs] + _running_sum([x * y for x, y in pairs])
    prompt = _compute_phrase(rng, f"{a} * {b}")
    return Item("products", prompt, "\n".join(steps), str(a * b), f"{min(a, b)} * {max(a, b)}")


def _draw_gcd(rng: random.Random) -> Item:
    factor = rng.randint(1, 20)  # without it three answers in five are 1
    a, b = (factor * rng.randint(1, 200 // factor) for _ in range(2))
    prompt = _phrase(
        rng,
        f"Greatest common divisor of {a} and {b}?",
        f"What is the greatest common divisor of {a} and {b}?",
        f"gcd({a}, {b}) = ?",
    )
    small, large = sorted((a, b))
    problem, steps = f"{small} {large}", []
    while small:
        quotient, rest = divmod(large, small)
        steps.append(f"{large} = {quotient} * {small} + {rest}")
        large, small = small, rest
    return Item("gcd", prompt, "\n".join(steps), str(large), problem)


def _times(coefficient: int, letter: str) -> str:
    return {1: letter, -1: f"-{letter}"}.get(coefficient, f"{coefficient}*{letter}")


def _tidy(equation: str) -> str:
    return equation.replace("+ -", "- ")


def _draw_simple_equations(rng: random.Random) -> Item:
    letter, solution = rng.choice("abcdkmnpqtxyz"), rng.randint(1, 20)
    while True:
        kinds = list(rng.choice(("vc", "vcc", "vvc")))  # v: a multiple of the variable, c: constant
        rng.shuffle(kinds)
        signs = [1, *(rng.choice((1, -1)) for _ in kinds[1:])]
        numbers = [
            sign * rng.randint(1, {"v": 9, "c": 20}[kind])
            for sign, kind in zip(signs, kinds, strict=True)
        ]
        terms = list(zip(kinds, numbers, strict=True))
        coefficient = sum(number for kind, number in terms if kind == "v")
        if coefficient:
            break
    constant = sum(number for kind, number in terms if kind == "c")
    total, moved = coefficient * solution + constant, coefficient * solution
    sides = [_times(number, letter) if kind == "v" else str(number) for kind, number in terms]
    equation = f"{_tidy(' + '.join(sides))} = {total}"
    left, steps = _times(coefficient, letter), []
    if len(terms) == 3:
        steps.append(_tidy(f"{left} + {constant} = {total}") if constant else f"{left} = {total}")
    if constant:
        steps.append(_tidy(f"{left} = {total} + {-constant} = {moved}"))
    if coefficient != 1:
        steps.append(f"{letter} = {moved} / {coefficient} = {solution}")
    prompt = _phrase(
        rng,
        f"Solve for {letter}: {equation}",
        f"If {equation}, what is {letter}?",
        f"Find {letter}: {equation}",
    )
    problem = equation.replace(letter, "x")
    return Item("simple_equations", prompt, "\n".join(steps), str(solution), problem)


# Singular, plural, legs.
ANIMALS = (
    ("ant", "ants", 6),
    ("bee", "bees", 6),
    ("beetle", "beetles", 6),
    ("butterfly", "butterflies", 6),
    ("cat", "cats", 4),
    ("chicken", "chickens", 2),
    ("cow", "cows", 4),
    ("crab", "crabs", 10),
    ("dog", "dogs", 4),
    ("duck", "ducks", 2),
    ("fox", "foxes", 4),
    ("goose", "geese", 2),
    ("horse", "horses", 4),
    ("lobster", "lobsters", 10),
    ("mouse", "mice", 4),
    ("ox", "oxen", 4),
    ("scorpion", "scorpions", 8),
    ("sheep", "sheep", 4),
    ("snake", "snakes", 0),
    ("spider", "spiders", 8),
    ("wolf", "wolves", 4),
)


def _draw_leg_counting(rng: random.Random) -> Item:
    counted = [(rng.randint(1, 9), *animal) for animal in rng.sample(ANIMALS, rng.randint(2, 4))]
    inflected = rng.random() < 0.9  # the others say "3 cat, 2 ant"
    groups = [f"{n} {many if inflected and n > 1 else one}" for n, one, many, _ in counted]
    listed, spoken = ", ".join(groups), f"{', '.join(groups[:-1])} and {groups[-1]}"
    steps = [
        f"{group}: {n} * {legs} = {n * legs}"
        for group, (n, _, _, legs) in zip(groups, counted, strict=True)
    ]
    products = [n * legs for n, _, _, legs in counted]
    prompt = _phrase(
        rng,
        f"How many legs: {listed}?",
        f"How many legs do {spoken} have?",
        f"Sum up the legs: {listed}.",
        f"Count the legs of {spoken}.",
    )
    problem = ", ".join(sorted(f"{n} {one}" for n, one, _, _ in counted))
    thinking = "\n".join(steps + _running_sum(products))
    return Item("leg_counting", prompt, thinking, str(sum(products)), problem)


# --- families without a scratchpad --------------------------------------------------------------


def _draw_number_sorting(rng: random.Random) -> Item:
    numbers = [rng.randint(0, 99) for _ in range(rng.randint(3, 8))]
    descending = rng.random() < 0.5
    direction = "descending" if descending else "ascending"
    ends = "largest to smallest" if descending else "smallest to largest"
    listed = " ".join(map(str, numbers))
    prompt = _phrase(
        rng,
        f"Sort {direction}: {listed}",
        f"Sort in {direction} order: {listed}",
        f"Order from {ends}: {listed}",
    )
    answer = " ".join(map(str, sorted(numbers, reverse=descending)))
    return Item("number_sorting", prompt, "", answer, " ".join(map(str, sorted(numbers))))


def _sudoku_grids() -> tuple[tuple[int, ...], ...]:
    """All filled 4x4 grids, row by row: rows, columns and the four 2x2 boxes hold 1 to 4 once."""
    rows = list(itertools.permutations((1, 2, 3, 4)))
    bands = [(a, b) for a in rows for b in rows if {*a[:2], *b[:2]} == {*a[2:], *b[2:]} == {*a}]
    return tuple(
        (*a, *b, *c, *d)
        for a, b in bands
        for c, d in bands
        if all(len(set(column)) == 4 for column in zip(a, b, c, d, strict=True))
    )


SUDOKU_GRIDS = _sudoku_grids()

# Bit g of [cell][number] says that grid g has the number in that cell.
_GRIDS_WITH = tuple(
    {n: sum(1 << g for g, grid in enumerate(SUDOKU_GRIDS) if grid[cell] == n) for n in range(1, 5)}
    for cell in range(16)
)


def _grid_text(cells: list[str]) -> str:
    return "\n".join(" ".join(cells[i : i + 4]) for i in range(0, 16, 4))


def _draw_mini_sudoku(rng: random.Random) -> Item:
    solution = rng.choice(SUDOKU_GRIDS)
    while True:
        empty = rng.sample(range(16), rng.randint(6, 10))
        clues = (_GRIDS_WITH[i][solution[i]] for i in range(16) if i not in empty)
        if functools.reduce(operator.and_, clues).bit_count() == 1:  # one grid has all of them
            break
    cells = ["_" if i in empty else str(number) for i, number in enumerate(solution)]
    puzzle = _grid_text(cells)
    title = _phrase(rng, "Solve the 4x4 sudoku:", "Fill in the 4x4 sudoku:", "4x4 sudoku:")
    answer = _grid_text([str(number) for number in solution])
    return Item("mini_sudoku", f"{title}\n{puzzle}", "", answer, puzzle)


# Intent -> (prompts, accepted replies).
CHAT_REPLIES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "greeting": (
        ("Hello!", "Hi!", "Hey!", "Hello there!", "Good morning!", "Good evening!"),
        ("Hello! How can I help?", "Hi! How can I help?"),
    ),
    "thanks": (
        ("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much!"),
        ("You are welcome!", "You're welcome!"),
    ),
    "farewell": (("Goodbye!", "Bye!", "See you later!", "Good night!"), ("Goodbye!", "Bye!")),
    "mood": (("How are you?", "How are you doing?"), ("I am fine, thank you.",)),
    "identity": (
        ("Who are you?", "What are you?", "Tell me about yourself."),
        ("I am a small Clover model. I write text block by block.",),
    ),
    "abilities": (
        ("What can you do?", "What can I ask you?", "How can you help me?", "Help!"),
        ("I can calculate, sort numbers, solve small sudokus and write short functions.",),
    ),
    "method": (
        ("How do you work?", "How do you write?"),
        ("I start from masks and fill in several tokens at a time.",),
    ),
    "size": (("How big are you?", "Are you a big model?"), ("I am very small.",)),
    "limits": (
        ("What can you not do?", "What are your limits?", "What do you not know?"),
        ("I know little about the world.",),
    ),
    "mistakes": (
        ("Are you always right?", "Can I trust your answers?"),
        ("Not always. Please check my answers.",),
    ),
    "thinking": (
        ("Can you think?", "Can you show your steps?"),
        ("Yes, I can write down my steps before I answer.",),
    ),
    "code": (("Can you write code?", "Do you know Python?"), ("Yes, short functions on lists.",)),
    "numbers": (("Can you calculate?", "Are you good with numbers?"), ("Yes, with small ones.",)),
}

_COLOURS = ("red", "blue", "green", "black", "white", "brown", "grey", "yellow")
_ACTORS = ("bird", "cat", "dog", "fox", "frog", "horse", "mouse", "rabbit")
_ACTIONS = ("eats", "hides", "plays", "rests", "sings", "sits", "sleeps", "waits")
_PLACES = (
    "at the gate",
    "behind the house",
    "by the river",
    "in the barn",
    "in the garden",
    "near the tree",
    "on the roof",
    "under the table",
)


def _draw_text(rng: random.Random) -> Item:
    if rng.random() < 0.5:
        intent = rng.choice(tuple(CHAT_REPLIES))
        prompts, replies = CHAT_REPLIES[intent]
        return Item("text", rng.choice(prompts), "", rng.choice(replies), intent)
    colour, actor, action, place = map(rng.choice, (_COLOURS, _ACTORS, _ACTIONS, _PLACES))
    question, reply = rng.choice(
        (
            (f"Who {action}?", f"The {colour} {actor}."),
            (f"Where is the {actor}?", f"{place.capitalize()}."),
            (f"What colour is the {actor}?", f"{colour.capitalize()}."),
            (f"What does the {actor} do?", f"It {action}."),
        )
    )
    prompt = f"The {colour} {actor} {action} {place}. {question}"
    return Item("text", prompt, "", reply, prompt)


# Words and code of the function tasks; {k} and {m} stand for constants.
_FILTERS = (
    ("numbers", ""),
    ("even numbers", "x % 2 == 0"),
    ("odd numbers", "x % 2 == 1"),
    ("positive numbers", "x > 0"),
    ("negative numbers", "x < 0"),
    ("numbers above {k}", "x > {k}"),
    ("numbers below {k}", "x < {k}"),
    ("multiples of {m}", "x % {m} == 0"),
)
_MAPS = (
    ("", "x"),
    (", each squared", "x * x"),
    (", each doubled", "x * 2"),
    (", each negated", "-x"),
    (", each plus {k}", "x + {k}"),
    (", each minus {k}", "x - {k}"),
    (", each times {m}", "x * {m}"),
)
_REDUCERS = (
    ("the sum of", "sum({})"),
    ("the count of", "len({})"),
    ("the largest of", "max({}, default=0)"),
    ("the smallest of", "min({}, default=0)"),
    ("a list of", "{}"),
    ("a sorted list of", "sorted({})"),
    ("a reversed list of", "list(reversed({}))"),
    ("a sorted list without repeats of", "sorted(set({}))"),
)


def _draw_python_function(rng: random.Random) -> Item:
    (which, condition), (change, value), (what, reducer) = map(
        rng.choice, (_FILTERS, _MAPS, _REDUCERS)
    )
    constants = {"k": rng.randint(1, 9), "m": rng.randint(3, 9)}
    condition, value = condition.format(**constants), value.format(**constants)
    task = f"Return {what} the {which} in xs{change}.".format(**constants)
    if rng.random() < 0.5:
        body = f"[{value} for x in xs{' if ' * bool(condition)}{condition}]"
        lines = [f"    return {reducer.format(body)}"]
    else:
        lines = ["    ys = []", "    for x in xs:"]
        lines += [f"        if {condition}:"] if condition else []
        lines += [" " * (12 if condition else 8) + f"ys.append({value})"]
        lines += [f"    return {reducer.format('ys')}"]
    prompt = _phrase(
        rng,
        f'Complete the function:\ndef f(xs):\n    """{task}"""',
        f"Write a Python function f(xs). {task}",
        f"Python f(xs): {task}",
    )
    return Item("python_function", prompt, "", "\n".join(["def f(xs):", *lines]), task)


DRAW: Mapping[str, Callable[[random.Random], Item]] = {
    "chain_sum": _draw_chain_sum,
    "basic_arithmetic": _draw_basic_arithmetic,
    "products": _draw_products,
    "gcd": _draw_gcd,
    "simple_equations": _draw_simple_equations,
    "leg_counting": _draw_leg_counting,
    "number_sorting": _draw_number_sorting,
    "mini_sudoku": _draw_mini_sudoku,
    "text": _draw_text,
    "python_function": _draw_python_function,
}
