"""Holes in held-out Python functions, filled with and without what follows them, and run.

The hole is a span of tokens inside one block of the reference answer: somewhere in the body, at a
place that depends on the problem only, or at its start, where left context leaves open whether a
loop or a comprehension follows. Three arms fill it: `block` with the rest of its block in view,
`block, left only` and `ar` without. What the model cannot see (later blocks; for the last two all
that follows) is still there when the function runs.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Literal

from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import Generator, Request
from clover_jax.diffusion.infill import hole_at, infill, without_stops
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.errors import CloverError
from clover_jax.eval.held_out import (
    PairedDifference,
    in_batches,
    paired_difference,
    run_correctly,
    wilson,
)

HEADER = "def f(xs):\n"  # of every answer; never in a hole
Place = Literal["anywhere", "start"]
ARMS = ("block", "block, left only", "ar")


@dataclasses.dataclass(frozen=True)
class Hole:
    """A hole in a reference answer.

    Attributes:
        item: the problem.
        prompt: tokens before the answer.
        response: tokens of the answer and its stop.
        first: of the hole, in the response.
        end: of the hole.
    """

    item: tasks.Item
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    first: int
    end: int


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """One way to fill the holes.

    Attributes:
        arm: one of `ARMS`.
        n: holes.
        right: share of the functions that return what the reference does.
        low: lower end of the 95 % Wilson interval.
        high: its upper end.
        exact: share of the holes filled with the reference's tokens.
        forwards: mean passes per hole, prefill excluded.
        gain: of the arm with right context over this one, paired; None for itself.
    """

    arm: str
    n: int
    right: float
    low: float
    high: float
    exact: float
    forwards: float
    gain: PairedDifference | None


def find_holes(
    tokenizer: Tokenizer,
    items: Sequence[tasks.Item],
    *,
    length: int,
    place: Place = "anywhere",
    block: int,
) -> list[Hole]:
    """A hole per item; none where no such place leaves an answer token right of it in its block.

    Raises:
        CloverError: a length below 1.
    """
    if length < 1:
        raise CloverError(f"the hole's length is {length}: expected at least 1 token")
    found = []
    for item in items:
        prompt = tokenize_prompt(tokenizer, tasks.messages(item), enable_thinking=False)
        answer = tokenizer.encode(item.answer, special=True)
        sizes = [len(tokenizer.to_bytes([token], skip_special=False)) for token in answer]
        before = itertools.accumulate(sizes[:-1], initial=0)  # bytes, as the header is ASCII
        body = [first for first, size in enumerate(before) if size >= len(HEADER)]
        places = [
            first
            for first in (body if place == "anywhere" else body[:1])
            if first + length < min(len(answer), first - first % block + block)
        ]
        if places:
            first = random.Random(f"{item.problem}\0{length}").choice(places)
            response = (*answer, tokenizer.end_of_turn_id)
            found.append(Hole(item, tuple(prompt), response, first, first + length))
    return found


def evaluate_infill(
    generator: Generator,
    *,
    n: int,
    split: str,
    length: int,
    place: Place = "anywhere",
    sampling: SamplerConfig,
    batch: int,
    progress: Callable[[str, int], None] = lambda *_: None,
) -> list[ArmResult]:
    """Fill the holes of the first `n` held-out functions in every arm.

    Args:
        generator: a model with blocks and a tokenizer.
        n: problems.
        split: held-out part.
        length: tokens of a hole.
        place: of the holes in the body.
        sampling: threshold and the like.
        batch: holes filled together.
        progress: called with the arm and the number of holes so far.

    Raises:
        CloverError: no tokenizer or blocks, no hole of that length, or functions cannot be run.
    """
    if generator.tokenizer is None:
        raise CloverError("evaluation needs a tokenizer, and this folder has none")
    items = tasks.eval_set("python_function", split, n)
    holes = find_holes(
        generator.tokenizer, items, length=length, place=place, block=generator.cfg.block_length
    )
    if not holes:
        raise CloverError(
            f"none of {len(items)} answers has room for a hole of {length} tokens inside a block "
            f"of {generator.cfg.block_length}: choose a shorter one"
        )
    holes.sort(key=lambda h: len(h.prompt) + h.first)  # alike prefixes together: little padding
    right: dict[str, list[bool]] = {}
    results = []
    for arm in ARMS:
        filled = []
        for part, padded in in_batches(holes, batch):
            filled += _fill(generator, padded, arm, sampling)[: len(part)]
            progress(arm, len(filled))
        right[arm] = run_correctly(
            [_source(generator.tokenizer, h, f) for h, (f, _) in zip(holes, filled, strict=True)],
            [h.item for h in holes],
        )
        exact = [h.response[h.first : h.end] == f for h, (f, _) in zip(holes, filled, strict=True)]
        low, high = wilson(sum(right[arm]), len(holes))
        gain = None if arm == ARMS[0] else paired_difference([(right[ARMS[0]], right[arm])])
        results.append(
            ArmResult(
                arm=arm,
                n=len(holes),
                right=sum(right[arm]) / len(holes),
                low=low,
                high=high,
                exact=sum(exact) / len(holes),
                forwards=sum(forwards for _, forwards in filled) / len(holes),
                gain=gain,
            )
        )
    return results


def _fill(
    generator: Generator, holes: Sequence[Hole], arm: str, sampling: SamplerConfig
) -> list[tuple[tuple[int, ...], int]]:
    """The holes' tokens, and the passes they took."""
    assert generator.tokenizer is not None
    if arm == "ar":
        requests = [
            Request(
                prompt=h.prompt + h.response[: h.first],
                max_tokens=h.end - h.first,
                sampling=sampling,
            )
            for h in holes
        ]
        done = without_stops(generator).complete(requests, mode="ar")
        return [(c.token_ids, c.stats.forwards) for c in done]
    fill = generator.tokenizer.pad_id if arm == ARMS[0] else None
    block = generator.cfg.block_length
    blocks = [
        hole_at(h.prompt, h.response, (h.first, h.end), block=block, fill=fill) for h in holes
    ]
    found = infill(generator, blocks, sampling=sampling)
    return [
        (f.tokens[h.first % block : h.first % block + h.end - h.first], f.previews)
        for h, f in zip(holes, found, strict=True)
    ]


def _source(tokenizer: Tokenizer, hole: Hole, filled: tuple[int, ...]) -> str:
    tokens = (*hole.response[: hole.first], *filled, *hole.response[hole.end : -1])
    return tokenizer.decode(tokens, skip_special=False)
