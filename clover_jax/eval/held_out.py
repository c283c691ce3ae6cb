"""Accuracy and tokens per forward on held-out problems of the procedural tasks."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.diffusion.generate import Completion, Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.errors import CloverError


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


def evaluate(
    generator: Generator,
    task: str,
    *,
    n: int,
    split: str,
    thinking: bool,
    mode: str,
    sampling: SamplerConfig,
    max_tokens: int,
    batch: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Answer the first `n` held-out problems of a family and score them.

    Args:
        generator: the model.
        task: family, one of `tasks.TASKS`.
        n: problems; fewer if the family has fewer.
        split: `val` or `test`.
        thinking: leave the think block open.
        mode: `block` or `ar`.
        sampling: threshold and the like.
        max_tokens: longer answers are cut, and then wrong.
        batch: problems answered together.
        progress: called with the number of answers so far.

    Raises:
        CloverError: no tokenizer, unknown task or split, bad numbers.
    """
    if mode not in ("block", "ar"):
        raise CloverError(f"mode is {mode!r}: expected block or ar")
    if n < 1 or batch < 1:
        raise CloverError(f"n is {n} and batch {batch}: expected at least 1")
    items = tasks.eval_set(task, split, n)
    pairs: list[tuple[tasks.Item, Completion]] = []
    for part in _parts(items, batch):
        requests = [_request(generator, item, thinking, sampling, max_tokens) for item in part]
        # A short last part is filled up, so that one compiled program serves all of them.
        padded = [*requests, *[requests[-1]] * (batch - len(requests))]
        pairs += zip(part, generator.complete(padded, mode=mode), strict=False)
        progress(len(pairs))
    scores = [tasks.score(item, c.text or "", thinking=thinking) for item, c in pairs]
    right = sum(s.correct for s in scores)
    stats = [c.stats for _, c in pairs]
    tokens, previews = sum(s.tokens for s in stats), sum(s.previews for s in stats)
    low, high = wilson(right, len(pairs))
    return Result(
        task=task,
        mode=mode,
        n=len(pairs),
        accuracy=right / len(pairs),
        low=low,
        high=high,
        format_valid=sum(s.format_valid for s in scores) / len(pairs),
        tokens=tokens / len(pairs),
        tpf_previews=tokens / previews if previews else None,
        tpf=tokens / max(sum(s.forwards for s in stats), 1),
    )


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share (Wilson 1927)."""
    z = 1.959963984540054
    p, zz = right / n, z * z / n
    centre = (p + zz / 2) / (1 + zz)
    half = z / (1 + zz) * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return centre - half, centre + half


def _parts(items: Sequence[tasks.Item], size: int) -> Iterator[Sequence[tasks.Item]]:
    return (items[i : i + size] for i in range(0, len(items), size))


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
