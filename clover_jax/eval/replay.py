"""Blocks of reference answers denoised from the reference before them: what limits block mode?

Every block starts all masked after its true prefix, so that an early mistake spoils no later block
and each revealed token can be compared with the reference. Two rules:

- `threshold`: the sampler's own. Gives the calibration of its confidences, step by step.
- `oracle`: reveal every position whose argmax is right, however unsure; where none is, the leftmost
  position is given away and counted as a miss. No sampler can do better with these predictions, so
  blocks without a miss bound the accuracy and tokens per preview bound the TPF.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clover_jax.cache import DecodeCache, empty_cache
from clover_jax.config import ModelConfig
from clover_jax.data import tasks
from clover_jax.data.pipeline import to_example
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.decode_state import (
    Rules,
    blank_canvas,
    chosen_coreset,
    frozen_coreset,
)
from clover_jax.diffusion.generate import Generator, compiled_prefill
from clover_jax.diffusion.penalties import forbid
from clover_jax.diffusion.reveal import reveal_mask
from clover_jax.diffusion.stop import block_finished, candidates, first_position, first_stop
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.transformer import Params, preview

Rule = Literal["threshold", "oracle"]

PREFIX_BUCKET = 64  # prefixes are padded to a multiple of it: few compiled programs


class Block(NamedTuple):
    """A block of a reference answer."""

    answer: int  # which answer it belongs to
    prefix: Sequence[int]  # all tokens before it
    tokens: Sequence[int]  # its own; fewer than the block length only at the answer's end


@dataclasses.dataclass(frozen=True)
class Replay:
    """What happened, over all blocks.

    Attributes:
        answers: reference answers.
        solved: answers whose every revealed token was right (for `oracle`: without a miss).
        tokens: of the references.
        previews: denoising passes of all blocks.
        tpf_previews: tokens over previews.
        steps: per step in the block: how many tokens were revealed, their mean confidence, and the
            share of them that equals the reference. Pads after the stop do not count.
        bins: the same by tenths of confidence, over all steps and all masked positions, revealed
            or not.
    """

    answers: int
    solved: int
    tokens: int
    previews: int
    tpf_previews: float
    steps: tuple[tuple[int, float, float], ...]
    bins: tuple[tuple[int, float, float], ...]


class _Canvas(NamedTuple):
    tokens: Int[Array, "rows block"]
    masked: Bool[Array, "rows block"]
    coreset: Bool[Array, "rows layers experts"] | None


class _Step(NamedTuple):
    """One step's record: JAX arrays in the step, numpy arrays on the host."""

    live: Any  # bool [rows]
    seen: Any  # bool [rows, block], masked positions of the reference before the step
    revealed: Any  # bool [rows, block]
    confidence: Any  # float32 [rows, block]
    right: Any  # bool [rows, block], the argmax equals the reference


def reference_blocks(
    tokenizer: Tokenizer, items: Sequence[tasks.Item], *, thinking: bool, block: int
) -> list[Block]:
    """The blocks of the items' reference answers, each with its prefix."""
    found = []
    for i, item in enumerate(items):
        example = to_example(tokenizer, item, thinking=thinking, sample=i)
        tokens = list(example.tokens)
        found += [Block(i, tokens[:a], tokens[a:b]) for a, b in example.blocks(block)]
    return found


def replay(
    generator: Generator,
    blocks: Sequence[Block],
    *,
    rule: Rule,
    threshold: float,
    batch: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Replay:
    """Denoise blocks under a rule.

    Args:
        generator: a model with blocks and a tokenizer.
        blocks: from `reference_blocks`, of the model's block length.
        rule: `threshold` or `oracle`.
        threshold: of the confidence; the oracle does not use it.
        batch: blocks denoised together.
        progress: called with the number of blocks so far.

    Raises:
        CloverError: no blocks, a model without them, or without a tokenizer.
    """
    cfg = generator.cfg
    if not blocks or cfg.bd_gdn is None or generator.tokenizer is None:
        raise CloverError(
            f"a replay of {len(blocks)} blocks: expected at least one, and a model that has the "
            "block operator and a tokenizer"
        )
    # Alike prefixes together: little padding. A short last batch repeats its last block.
    order = sorted(range(len(blocks)), key=lambda i: len(blocks[i].prefix))
    records: list[tuple[list[Block], list[_Step]]] = []
    for start in range(0, len(order), batch):
        part = [blocks[i] for i in order[start : start + batch]]
        padded = part + [part[-1]] * (batch - len(part))
        steps = _run(generator, padded, rule, threshold)
        records.append((part, [_Step(*(a[: len(part)] for a in step)) for step in steps]))
        progress(min(start + batch, len(order)))
    return _summary(records)


def _run(
    generator: Generator, blocks: Sequence[Block], rule: Rule, threshold: float
) -> list[_Step]:
    cfg, env = generator.cfg, generator.env
    assert generator.tokenizer is not None
    rows, block = len(blocks), cfg.block_length
    longest = max(len(b.prefix) for b in blocks)
    width = -(-longest // PREFIX_BUCKET) * PREFIX_BUCKET
    prefix = np.zeros((rows, width), np.int32)
    reference = np.full((rows, block), generator.tokenizer.pad_id, np.int32)
    for r, b in enumerate(blocks):
        prefix[r, : len(b.prefix)] = b.prefix
        reference[r, : len(b.tokens)] = b.tokens
    n_prefix = jnp.asarray([len(b.prefix) for b in blocks], jnp.int32)
    n_tokens = jnp.asarray([len(b.tokens) for b in blocks], jnp.int32)
    cache = compiled_prefill(
        generator.params, jnp.asarray(prefix), n_prefix, empty_cache(cfg, rows, width + block),
        chunk=PREFIX_BUCKET, cfg=cfg, env=env,
    )  # fmt: skip
    blank = blank_canvas(rows, block, frozen_coreset(cfg))
    canvas = _Canvas(blank.tokens, blank.masked, blank.coreset)
    found: list[_Step] = []
    for _ in range(block):
        canvas, step, running = _denoise(
            generator.params, cache, canvas, jnp.asarray(reference), n_tokens, generator.rules,
            jnp.full((rows,), threshold, jnp.float32), rule=rule, cfg=cfg, env=env,
        )  # fmt: skip
        found.append(jax.device_get(step))
        if not running:
            break
    return found


@functools.partial(jax.jit, static_argnames=("rule", "cfg", "env"))
def _denoise(
    params: Params,
    cache: DecodeCache,
    canvas: _Canvas,
    reference: Int[Array, "rows block"],
    n_tokens: Int[Array, " rows"],
    rules: Rules,
    threshold: Float[Array, " rows"],
    *,
    rule: Rule,
    cfg: ModelConfig,
    env: Env,
) -> tuple[_Canvas, _Step, Bool[Array, ""]]:
    tokens, masked, coreset = canvas
    rows, block = tokens.shape
    whole = jnp.full((rows,), block, jnp.int32)
    inside = jnp.arange(block, dtype=jnp.int32)[None] < n_tokens[:, None]
    live = ~_finished(canvas, rules, inside, whole, rule)
    logits, stats = preview(params, tokens, masked, whole, cache, cfg=cfg, env=env, coreset=coreset)
    logits = forbid(logits, rules.forbidden)
    guess = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    confidence = jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))
    right = guess == reference
    if rule == "oracle":
        wanted = masked & inside
        reveal = wanted & right
        left = jnp.arange(block)[None] == first_position(wanted)[:, None]
        reveal = jnp.where(reveal.any(-1, keepdims=True), reveal, wanted & left)
        taken = reference
    else:
        stop = first_stop(tokens, ~masked, rules.stop_ids)
        reveal, _ = reveal_mask(masked, confidence, candidates(masked, stop, whole), threshold)
        taken = guess
    reveal = reveal & live[:, None]
    after = _Canvas(jnp.where(reveal, taken, tokens), masked & ~reveal, chosen_coreset(stats))
    step = _Step(live, masked & inside & live[:, None], reveal & inside, confidence, right)
    return after, step, ~_finished(after, rules, inside, whole, rule).all()


def _finished(canvas: _Canvas, rules: Rules, inside: Array, whole: Array, rule: Rule) -> Array:
    if rule == "oracle":
        return ~(canvas.masked & inside).any(-1)
    stop = first_stop(canvas.tokens, ~canvas.masked, rules.stop_ids)
    return block_finished(canvas.masked, stop, whole)


def _summary(records: Sequence[tuple[list[Block], list[_Step]]]) -> Replay:
    blocks = [b for part, _ in records for b in part]
    previews = sum(int(s.live.sum()) for _, steps in records for s in steps)
    tokens = sum(len(b.tokens) for b in blocks)
    wrong: set[int] = set()
    for part, steps in records:
        bad = np.zeros(len(part), bool)
        shown = np.zeros(len(part), np.int64)
        for s in steps:
            bad |= (s.revealed & ~s.right).any(-1)
            shown += s.revealed.sum(-1)
        # A stop revealed too early leaves tokens of the reference unwritten.
        bad |= shown < np.asarray([len(b.tokens) for b in part])
        wrong |= {b.answer for b, failed in zip(part, bad, strict=True) if failed}
    most = max(len(steps) for _, steps in records)
    at = lambda name, i, mask: np.concatenate(
        [getattr(s[i], name)[getattr(s[i], mask)] for _, s in records if i < len(s)]
    )
    by_step = tuple(_cell(at("confidence", i, "revealed"), at("right", i, "revealed"))
                    for i in range(most))  # fmt: skip
    confidence = np.concatenate([at("confidence", i, "seen") for i in range(most)])
    right = np.concatenate([at("right", i, "seen") for i in range(most)])
    tenth = np.minimum((confidence * 10).astype(int), 9)
    answers = len({b.answer for b in blocks})
    return Replay(
        answers=answers,
        solved=answers - len(wrong),
        tokens=tokens,
        previews=previews,
        tpf_previews=tokens / previews,
        steps=by_step,
        bins=tuple(_cell(confidence[tenth == i], right[tenth == i]) for i in range(10)),
    )


def _cell(confidence: Any, right: Any) -> tuple[int, float, float]:
    """Count, mean confidence, share that is right; zeros where there is nothing."""
    n = len(confidence)
    return (n, float(np.mean(confidence)), float(np.mean(right))) if n else (0, 0.0, 0.0)
