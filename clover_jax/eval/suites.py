"""The harness' local suites: procedural problems that need no download.

- `quick`: every family of suites A and C, few problems of each: minutes on two cores.
- `A`: chat and reasoning, scratchpads where a family has one.
- `B`: linked judgements, eight questions on one context (`data/judgements.py`).
- `C`: text and code.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from clover_jax.data import judgements, tasks
from clover_jax.errors import CloverError
from clover_jax.eval.harness import Problem, Task, Verdict
from clover_jax.eval.held_out import Judge, run_correctly

Suite = Literal["quick", "A", "B", "C"]
CODE = ("text", "python_function")
FAMILIES: Mapping[Suite, tuple[str, ...]] = {
    "quick": tasks.TASKS,
    "A": tuple(task for task in tasks.TASKS if task not in CODE),
    "B": judgements.SETS,
    "C": CODE,
}
SIZES: Mapping[Suite, int] = {"quick": 16, "A": 300, "B": 300, "C": 300}  # problems a family
MAX_TOKENS = 160  # the longest reference has 108


def suite(
    name: Suite,
    *,
    n: int | None = None,
    families: Sequence[str] = (),
    split: str = "test",
    thinking: bool = True,
    judge: Judge = "execution",
    max_tokens: int = MAX_TOKENS,
) -> list[Task]:
    """The tasks of a suite.

    Args:
        name: of the suite.
        n: problems per family, at most; by default the suite's own number.
        families: only these of its families.
        split: held-out part.
        thinking: leave the think block open in families that have a scratchpad.
        judge: of Python functions: run them (Linux only), or read them.
        max_tokens: budget of an answer.

    Raises:
        CloverError: an unknown family, split or size.
    """
    known = FAMILIES[name]
    for family in families:
        if family not in known:
            raise CloverError(
                f"task {family!r} is not of suite {name}: expected one of {', '.join(known)}"
            )
    size = SIZES[name] if n is None else n
    if size < 1:
        raise CloverError(f"n is {size}: expected at least 1")
    chosen = families or known
    if name == "B":
        return [linked_judgements(f, n=size, split=split, max_tokens=max_tokens) for f in chosen]
    return [
        procedural(
            f, n=size, split=split, judge=judge, max_tokens=max_tokens,
            thinking=thinking and f in tasks.SCRATCHPAD_TASKS,
        )
        for f in chosen
    ]  # fmt: skip


def procedural(
    family: str, *, n: int, split: str, thinking: bool, judge: Judge, max_tokens: int = MAX_TOKENS
) -> Task:
    """A family of `data.tasks`, scored by its own verifier; functions are run if `judge` says so.

    Raises:
        CloverError: unknown family or split, or functions cannot be run here.
    """

    def verdicts(problems: Sequence[Problem], texts: Sequence[str]) -> list[Verdict]:
        items: list[tasks.Item] = [p.reference for p in problems]
        scores = [tasks.score(i, t, thinking=thinking) for i, t in zip(items, texts, strict=True)]
        right = [s.correct for s in scores]
        if family == "python_function" and judge == "execution":
            runs = [i for i, s in enumerate(scores) if s.format_valid]
            sources = [tasks.split_response(texts[i], thinking=thinking)[1] for i in runs]
            ran = dict(zip(runs, run_correctly(sources, [items[i] for i in runs]), strict=True))
            right = [ran.get(i, False) for i in range(len(items))]
        return [
            Verdict(
                correct,
                score.format_valid,
                {} if score.steps_valid is None else {"steps valid": score.steps_valid},
            )
            for correct, score in zip(right, scores, strict=True)
        ]

    problems = tuple(Problem(i.prompt, i) for i in tasks.eval_set(family, split, n))
    return Task(family, problems, verdicts, max_tokens, thinking)


def linked_judgements(family: str, *, n: int, split: str, max_tokens: int = MAX_TOKENS) -> Task:
    """A set of `data.judgements`: right if all answers of a context are.

    Raises:
        CloverError: unknown set or split.
    """

    def verdicts(problems: Sequence[Problem], texts: Sequence[str]) -> list[Verdict]:
        scores = [judgements.score(p.reference, t) for p, t in zip(problems, texts, strict=True)]
        return [
            Verdict(
                s.correct,
                s.format_valid,
                {"questions right": s.questions_right, "consistent": float(s.consistent)},
            )
            for s in scores
        ]

    found = judgements.eval_set(family, split, n)
    return Task(family, tuple(Problem(j.prompt, j) for j in found), verdicts, max_tokens)
