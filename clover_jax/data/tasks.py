"""Procedural tasks with exact answers: training items, held-out prompts and their scorer.

Item `index` of a stream is a pure function of (mix, seed, split, index): resuming a run needs the
index only. Phrasings of one problem share `Item.problem`, and splits are cut by it, never by the
prompt, so no rewording of a held-out problem is trained on.
"""

import ast
import hashlib
import itertools
import operator
import random
import re
import string
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from clover_jax.data.task_families import CHAT_REPLIES, DRAW, SUDOKU_GRIDS, Item
from clover_jax.errors import CloverError

TASKS = tuple(DRAW)
SCRATCHPAD_TASKS = TASKS[:6]  # the others have no honest forward trace to think with
SPLITS = ("train", "val", "test")

# Problems that documentation shows: test, whatever their hash says.
HELD_OUT = frozenset({("leg_counting", "2 ant, 3 cat")})

EVAL_SEED = "eval"
EVAL_MAX_REPEATS = 200  # known problems in a row after which a family counts as used up


@dataclass(frozen=True)
class Score:
    """Judgement of one response.

    Attributes:
        correct: the answer is right.
        format_valid: the think block is closed and the answer has its family's form.
        steps_valid: share of the scratchpad lines with `=` whose arithmetic holds; None if there
            is no such line.
    """

    correct: bool
    format_valid: bool
    steps_valid: float | None


@dataclass(frozen=True)
class Mix:
    """What a stream draws from.

    Attributes:
        weights: (task, relative weight) pairs.
        thinking_share: share of the indices, of every family, whose prompt leaves the think block
            open.

    Raises:
        CloverError: unknown task, negative weight, weights that sum to 0, share outside [0, 1].
    """

    weights: tuple[tuple[str, float], ...]
    thinking_share: float = 0.5

    def __post_init__(self) -> None:
        for task, weight in self.weights:
            _require_task(task)
            if not 0 <= weight < float("inf"):
                raise CloverError(f"weight of task {task} is {weight}: expected a number >= 0")
        if not any(weight for _, weight in self.weights):
            raise CloverError(f"task weights are {self.weights}: expected a positive one")
        if not 0 <= self.thinking_share <= 1:
            raise CloverError(f"thinking_share is {self.thinking_share}: expected 0 to 1")


# --- scoring ------------------------------------------------------------------------------------

_SOURCE_LIMIT = 300  # characters; keeps the interpreter's recursion shallow
_STEP_LIMIT = 5_000  # interpreted nodes a call
_NUMBER_LIMIT = 10**15

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: Fraction,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f for f in (len, list, max, min, reversed, set, sorted, sum)
}
# What wrong code can raise here; all of it means "does not run".
_CODE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


def _number(value: object) -> int | Fraction:
    if not isinstance(value, int | Fraction):
        raise TypeError(f"{value!r} is no number")
    if max(abs(value.numerator), value.denominator) > _NUMBER_LIMIT:
        raise ValueError("number out of range")
    return value


class _Interpreter:
    """A small, total subset of Python: whole numbers, lists, loops over lists, a few calls.

    It has no way to reach anything outside its arguments, and it ends: every node costs a step and
    numbers are bounded. Whatever lies outside the subset raises one of `_CODE_ERRORS`.
    """

    def __init__(self) -> None:
        self.steps = 0

    def value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """Value of an expression under the variables `names`."""
        self.steps += 1
        if self.steps > _STEP_LIMIT:
            raise ValueError("too many steps")
        match node:
            case ast.Constant(value=int(number)):
                return _number(number)
            case ast.Name(id=name):
                return names[name]
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -_number(self.value(inner, names))
            case ast.BinOp(left=left, op=op, right=right):
                a, b = (_number(self.value(side, names)) for side in (left, right))
                return _number(_BINARY[type(op)](a, b))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return _COMPARE[type(op)](self.value(left, names), self.value(right, names))
            case ast.List(elts=elements):
                return [self.value(element, names) for element in elements]
            case (
                ast.ListComp(elt=element, generators=[source])
                | ast.GeneratorExp(elt=element, generators=[source])
            ):
                return self.comprehension(element, source, names)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                options = {k.arg or "": self.value(k.value, names) for k in keywords}
                return _CALLS[name](*(self.value(arg, names) for arg in args), **options)
        raise ValueError(f"unsupported expression {type(node).__name__}")

    def comprehension(
        self, element: ast.expr, source: ast.comprehension, names: dict[str, Any]
    ) -> list[Any]:
        """The list of a comprehension with one `for`."""
        if not isinstance(source.target, ast.Name):
            raise ValueError("unsupported loop variable")
        found = []
        for value in tuple(self.value(source.iter, names)):
            inner = {**names, source.target.id: value}
            if all(self.value(condition, inner) for condition in source.ifs):
                found.append(self.value(element, inner))
        return found

    def run(self, body: list[ast.stmt], names: dict[str, Any]) -> tuple[Any] | None:
        """Executes statements on `names`; (value,) once a `return` is met, else None."""
        for statement in body:
            returned = None
            match statement:
                case ast.Return(value=ast.expr() as expression):
                    return (self.value(expression, names),)
                case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                    names[name] = self.value(expression, names)
                case ast.If(test=test, body=then, orelse=otherwise):
                    returned = self.run(then if self.value(test, names) else otherwise, names)
                case ast.For(target=ast.Name(id=name), iter=source, body=inner, orelse=[]):
                    for value in tuple(self.value(source, names)):
                        names[name] = value
                        returned = returned or self.run(inner, names)
                case ast.Expr(
                    value=ast.Call(
                        func=ast.Attribute(value=ast.Name(id=name), attr="append"),
                        args=[argument],
                        keywords=[],
                    )
                ):
                    names[name].append(self.value(argument, names))
                case ast.Expr(value=ast.Constant()):  # a docstring
                    pass
                case _:
                    raise ValueError(f"unsupported statement {type(statement).__name__}")
            if returned is not None:
                return returned
        return None


def _parse(source: str) -> list[ast.stmt] | None:
    """The statements of `source`, or None if it is no Python or too long."""
    if len(source) > _SOURCE_LIMIT:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # doubtful syntax such as "1if" counts as none
            return ast.parse(source).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _arithmetic(source: str, names: dict[str, Any]) -> int | Fraction | None:
    """Exact value of an arithmetic expression, or None if it has none."""
    match _parse(source.strip()):
        case [ast.Expr(value=expression)]:
            try:
                return _number(_Interpreter().value(expression, names))
            except _CODE_ERRORS:
                return None
    return None


def _steps_valid(item: Item, thinking: str) -> float | None:
    # An equation's variable stands for its solution. "= 3 + 4" continues the line above.
    letters = string.ascii_lowercase if item.task == "simple_equations" else ""
    names = {letter: int(item.answer) for letter in letters}
    before, valid = item.problem, []
    for line in thinking.splitlines():
        if "=" not in line:
            continue
        first, *others = line.rpartition(":")[2].split("=")
        sides = [first if first.strip() else before, *others]
        values = [_arithmetic(side, names) for side in sides]
        valid.append(None not in values and len(set(values)) == 1)
        before = sides[-1]
    return sum(valid) / len(valid) if valid else None


def _integers(text: str) -> list[int] | None:
    words = text.split()
    readable = all(re.fullmatch(r"-?[0-9]{1,18}", word) for word in words)
    return [int(word) for word in words] if readable else None


# Each check says whether the answer is right, or None if it lacks the family's form.


def _check_integers(item: Item, answer: str) -> bool | None:
    got, expected = _integers(answer), _integers(item.answer)
    if not got or (item.task != "number_sorting" and len(got) != 1):
        return None
    return got == expected


def _check_grid(item: Item, answer: str) -> bool | None:
    rows = [_integers(row) for row in answer.splitlines()]
    if len(rows) != 4 or any(row is None or len(row) != 4 for row in rows):
        return None
    cells = tuple(cell for row in rows if row for cell in row)
    clues = zip(item.problem.split(), cells, strict=True)
    return cells in SUDOKU_GRIDS and all(clue in ("_", str(cell)) for clue, cell in clues)


def _check_text(item: Item, answer: str) -> bool | None:
    accepted = CHAT_REPLIES[item.problem][1] if item.problem in CHAT_REPLIES else (item.answer,)
    return answer in accepted if answer else None


def _function_inputs() -> list[list[int]]:
    """Every one-element list pins filter and map down, the mixed ones the reducer."""
    rng = random.Random(0)
    mixed = [[rng.randint(-20, 20) for _ in range(rng.randint(2, 8))] for _ in range(10)]
    return [[], *([n] for n in range(-20, 21)), *mixed]


FUNCTION_INPUTS = _function_inputs()  # what a python_function is judged on


def _call(function: ast.FunctionDef, xs: list[int]) -> object:
    """What the interpreted function returns, or None if it does not run."""
    try:
        returned = _Interpreter().run(function.body, {"xs": list(xs)})
    except _CODE_ERRORS:
        return None
    return returned[0] if returned else None


def _function(source: str) -> ast.FunctionDef | None:
    match _parse(source):
        case [ast.FunctionDef(name="f", args=ast.arguments(args=[ast.arg(arg="xs")])) as function]:
            return function
    return None


def _check_function(item: Item, answer: str) -> bool | None:
    got, reference = _function(answer), _function(item.answer)
    if got is None or reference is None:
        return None
    return all(_call(got, xs) == _call(reference, xs) for xs in FUNCTION_INPUTS)


# --- the public surface -------------------------------------------------------------------------

_CHECKS: Mapping[str, Callable[[Item, str], bool | None]] = {
    **dict.fromkeys(TASKS, _check_integers),
    "mini_sudoku": _check_grid,
    "text": _check_text,
    "python_function": _check_function,
}


def _require_task(task: str) -> None:
    if task not in DRAW:
        raise CloverError(f"task is {task!r}: expected one of {', '.join(TASKS)}")


MIX = Mix(
    (
        *((task, 14.0) for task in SCRATCHPAD_TASKS),
        ("number_sorting", 6.0),
        ("mini_sudoku", 4.0),
        ("text", 3.0),
        ("python_function", 3.0),
    )
)


def generate(task: str, rng: random.Random) -> Item:
    """A random item of one family, of whatever split.

    Raises:
        CloverError: unknown task.
    """
    _require_task(task)
    return DRAW[task](rng)


def split_of(item: Item) -> str:
    """`train` (90 % of the problems), `val` (5 %) or `test` (5 %), by a hash of the problem.

    Two families are cut more coarsely, so that the held-out part asks for more than new numbers: a
    sudoku by its solution grid, a function by its description without the constants. Fixed chat
    replies can only be learnt by heart and are all `train`; `HELD_OUT` is all `test`.
    """
    if (item.task, item.problem) in HELD_OUT:
        return "test"
    if item.task == "text" and item.problem in CHAT_REPLIES:
        return "train"
    key = item.problem
    if item.task == "mini_sudoku":
        key = item.answer
    if item.task == "python_function":
        key = re.sub("[0-9]+", "#", item.problem)
    bucket = int(hashlib.sha1(f"{item.task}\0{key}".encode()).hexdigest()[:8], 16) % 100
    return "test" if bucket < 5 else "val" if bucket < 10 else "train"


def _rng(seed: int | str, split: str, index: int) -> random.Random:
    if split not in SPLITS:
        raise CloverError(f"split is {split!r}: expected one of {', '.join(SPLITS)}")
    return random.Random(f"{seed}\0{split}\0{index}")  # text seeds do not depend on PYTHONHASHSEED


def thinking_at(mix: Mix, seed: int | str, split: str, index: int) -> bool:
    """Whether stream item `index` is trained with an open think block.

    Raises:
        CloverError: unknown split.
    """
    return _rng(seed, split, index).random() < mix.thinking_share


def item_at(mix: Mix, seed: int | str, split: str, index: int) -> Item:
    """Item `index` of the stream: a pure function of the arguments.

    Raises:
        CloverError: unknown split.
    """
    rng = _rng(seed, split, index)
    rng.random()  # decides `thinking_at`
    tasks, weights = zip(*mix.weights, strict=True)
    task = rng.choices(tasks, weights)[0]
    while split_of(item := generate(task, rng)) != split:
        pass
    return item


def stream(mix: Mix, seed: int | str, split: str, start: int = 0) -> Iterator[Item]:
    """Endless items `start`, `start + 1`, ... of `item_at`."""
    return (item_at(mix, seed, split, index) for index in itertools.count(start))


def eval_set(task: str, split: str, n: int) -> list[Item]:
    """The first `n` distinct problems of a split; a smaller set is a prefix of a larger one.

    Fewer come back if the family runs out, that is after `EVAL_MAX_REPEATS` known ones in a row.

    Raises:
        CloverError: unknown task or split.
    """
    found: dict[str, Item] = {}
    repeats = 0
    for item in stream(Mix(((task, 1.0),)), EVAL_SEED, split):
        if len(found) >= n or repeats >= EVAL_MAX_REPEATS:
            break
        repeats = repeats + 1 if item.problem in found else 0
        found.setdefault(item.problem, item)
    return list(found.values())


def messages(item: Item) -> list[dict[str, str]]:
    """The chat before the response: one user message."""
    return [{"role": "user", "content": item.prompt}]


def response_text(item: Item, thinking: bool) -> str:
    """The assistant's text after the rendered prompt, without the stop token.

    With thinking the prompt ends in an open `<think>` line, and the response closes it; an empty
    scratchpad then gives the very text of an empty think block. Without, the prompt already holds
    the empty block.
    """
    return f"{item.thinking}\n</think>\n\n{item.answer}" if thinking else item.answer


def split_response(text: str, *, thinking: bool) -> tuple[str, str]:
    """Scratchpad and answer of a decoded response; see `score` for the arguments."""
    steps, closed, answer = text.partition("</think>")
    if not closed:
        steps, answer = (text, "") if thinking else ("", text)
    return steps.strip().removeprefix("<think>"), answer.strip()


def score(item: Item, text: str, *, thinking: bool = False) -> Score:
    """Judges a decoded response, stop token removed.

    Args:
        item: the problem.
        text: what followed the prompt; it may repeat the opening `<think>`.
        thinking: the prompt left the think block open, so an answer needs a `</think>` before it.
            Otherwise the text is the answer, or, if it has a `</think>`, what follows that.
    """
    steps, answer = split_response(text, thinking=thinking)
    verdict = _CHECKS[item.task](item, answer)
    steps_valid = _steps_valid(item, steps)
    return Score(verdict is True, verdict is not None, steps_valid)
