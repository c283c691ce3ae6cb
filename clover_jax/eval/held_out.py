"""Accuracy and tokens per forward on held-out problems of the procedural tasks."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.diffusion.generate import Completion, Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.errors import CloverError
from clover_jax.eval import execution

type Judge = Literal["interpreter", "execution"]

Z95 = 1.959963984540054  # of the normal distribution, two-sided


@dataclasses.dataclass(frozen=True)
class Result:
    """One task in one mode.

    Attributes:
        task: family.
        mode: `block` or `ar`.
        n: problems.
        accuracy: share of right answers.
        low: lower end of the 95 % Wilson interval.
        high: its upper end.
        format_valid: share of answers of the family's form.
        tokens: mean tokens of an answer, up to and including the stop.
        tpf_previews: all tokens over all previews, None in AR mode.
        tpf: all tokens over all forwards.
    """

    task: str
    mode: str
    n: int
    accuracy: float
    low: float
    high: float
    format_valid: float
    tokens: float
    tpf_previews: float | None
    tpf: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """One problem, what came back, and its score."""

    item: tasks.Item
    completion: Completion
    score: tasks.Score


def answer(
    generator: Generator,
    items: Sequence[tasks.Item],
    *,
    thinking: bool,
    mode: Literal["block", "ar"],
    sampling: SamplerConfig,
    max_tokens: int,
    batch: int,
    judge: Judge = "interpreter",
    progress: Callable[[int], None] = lambda _: None,
) -> list[Answer]:
    """Answer problems in batches and score them.

    Args:
        generator: the model.
        items: problems.
        thinking: leave the think block open.
        mode: `block` or `ar`.
        sampling: threshold and the like.
        max_tokens: longer answers are cut, and then wrong.
        batch: problems answered together.
        judge: of Python functions. `execution` runs them (Linux only); `interpreter` knows a small
            subset of Python, anywhere and without a process: for training and the card, whose
            answers look like the references.
        progress: called with the number of answers so far.

    Raises:
        CloverError: no tokenizer, a batch below 1, or functions cannot be run here.
    """
    found: list[Answer] = []
    for part, padded in in_batches(items, batch):
        requests = [_request(generator, item, thinking, sampling, max_tokens) for item in padded]
        for item, completion in zip(part, generator.complete(requests, mode=mode), strict=False):
            verdict = tasks.score(item, completion.text or "", thinking=thinking)
            found.append(Answer(item, completion, verdict))
        progress(len(found))
    return judged_by_execution(found, thinking=thinking) if judge == "execution" else found


def judged_by_execution(answers: Sequence[Answer], *, thinking: bool) -> list[Answer]:
    """The same answers; a Python function is right if it returns what the reference does.

    Its form is judged as before: one function f(xs), of at most a few hundred characters.

    Raises:
        CloverError: programs are not run on this system.
    """
    running = [
        i
        for i, a in enumerate(answers)
        if a.item.task == "python_function" and a.score.format_valid
    ]
    own = [
        tasks.split_response(answers[i].completion.text or "", thinking=thinking)[1]
        for i in running
    ]
    right = dict(zip(running, run_correctly(own, [answers[i].item for i in running]), strict=True))
    rescored = lambda a, correct: dataclasses.replace(
        a, score=dataclasses.replace(a.score, correct=correct)
    )
    return [rescored(a, right[i]) if i in right else a for i, a in enumerate(answers)]


def run_correctly(sources: Sequence[str], items: Sequence[tasks.Item]) -> list[bool]:
    """Whether each source's f returns what its `python_function` item's reference does.

    Raises:
        CloverError: programs are not run on this system.
    """
    program = lambda source: execution.Program(source, "f", tasks.FUNCTION_INPUTS)
    references = execution.execute([program(item.answer) for item in items])
    expected = [reference.outputs for reference in references]
    verdicts = execution.judge([program(source) for source in sources], expected)
    return [verdict.status == "passed" for verdict in verdicts]


def evaluate(
    generator: Generator,
    task: str,
    *,
    n: int,
    split: str,
    thinking: bool,
    mode: Literal["block", "ar"],
    sampling: SamplerConfig,
    max_tokens: int,
    batch: int,
    judge: Judge = "interpreter",
    progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Answer the first `n` held-out problems of a family; see `answer` for the arguments.

    Raises:
        CloverError: no tokenizer, unknown task or split, bad numbers, functions cannot be run here.
    """
    if n < 1:
        raise CloverError(f"n is {n}: expected at least 1")
    answers = answer(
        generator, tasks.eval_set(task, split, n), thinking=thinking, mode=mode, sampling=sampling,
        max_tokens=max_tokens, batch=batch, judge=judge, progress=progress,
    )  # fmt: skip
    right, count = sum(a.score.correct for a in answers), len(answers)
    stats = [a.completion.stats for a in answers]
    tokens, previews = sum(s.tokens for s in stats), sum(s.previews for s in stats)
    low, high = wilson(right, count)
    return Result(
        task=task,
        mode=mode,
        n=count,
        accuracy=right / count,
        low=low,
        high=high,
        format_valid=sum(a.score.format_valid for a in answers) / count,
        tokens=tokens / count,
        tpf_previews=tokens / previews if previews else None,
        tpf=tokens / max(sum(s.forwards for s in stats), 1),
    )


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """Difference of two shares on the same problems, with a 95 % interval."""

    difference: float
    low: float
    high: float


def paired_difference(
    pairs: Sequence[tuple[Sequence[bool], Sequence[bool]]],
) -> PairedDifference:
    """Mean over strata of share(first) - share(second), problems paired (Bonett and Price 2012).

    Their adjustment adds one discordant pair of each kind and stays honest near 0 and 1. Strata
    (tasks) count alike; their variances add.

    Args:
        pairs: per stratum, whether each problem was solved in the first and in the second arm.
    """
    centre, variance, plain = 0.0, 0.0, 0.0
    for first, second in pairs:
        n = len(first)
        only_first = sum(a and not b for a, b in zip(first, second, strict=True))
        only_second = sum(b and not a for a, b in zip(first, second, strict=True))
        p, q = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
        plain += (only_first - only_second) / n
        centre += p - q
        variance += (p + q - (p - q) ** 2) / (n + 2)
    k = len(pairs)
    half = Z95 * math.sqrt(variance) / k
    return PairedDifference(plain / k, max(-1.0, centre / k - half), min(1.0, centre / k + half))


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share (Wilson 1927)."""
    z = Z95
    p, zz = right / n, z * z / n
    centre = (p + zz / 2) / (1 + zz)
    half = z / (1 + zz) * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return centre - half, centre + half


def in_batches[T](items: Sequence[T], batch: int) -> Iterator[tuple[Sequence[T], Sequence[T]]]:
    """Parts, and each filled up with its last item: one compiled program serves all of them.

    Raises:
        CloverError: a batch below 1.
    """
    if batch < 1:
        raise CloverError(f"batch is {batch}: expected at least 1")
    for i in range(0, len(items), batch):
        part = items[i : i + batch]
        yield part, [*part, *[part[-1]] * (batch - len(part))]


def _request(
    generator: Generator,
    item: tasks.Item,
    thinking: bool,
    sampling: SamplerConfig,
    max_tokens: int,
) -> Request:
    if generator.tokenizer is None:
        raise CloverError("evaluation needs a tokenizer, and this folder has none")
    prompt = tokenize_prompt(generator.tokenizer, tasks.messages(item), enable_thinking=thinking)
    return Request(prompt=tuple(prompt), max_tokens=max_tokens, sampling=sampling)
