"""A scripted denoiser and the whole low-confidence loop for one row, in plain numpy.

Imports nothing that it judges. `settings` is any object with the fields of a sampler config
(threshold, temperature, top_k, top_p, presence, frequency, repetition, confidence, policy, steps,
window, response_ramp, thinking_ramp with start, slope, cap). A denoiser is a table [steps, block,
vocab], whose last entry repeats, or a function (step, tokens, masked) -> [block, vocab].
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

type Denoiser = np.ndarray | Callable[[int, list[int], list[bool]], np.ndarray]
type Noise = Callable[[int, int], np.ndarray]  # (absolute position, step in block) -> [vocab]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ids:
    """Token ids of a toy tokenizer."""

    mask: int
    stop: Sequence[int]
    forbidden: Sequence[int] = ()  # the mask included
    think_close: int | None = None


@dataclasses.dataclass(kw_only=True)
class Block:
    """One denoised block; lists by position, None where a position stayed masked."""

    tokens: list[int]
    masked: list[bool]
    confidence: list[float | None]
    log_probability: list[float | None]
    steps: list[list[int]]  # positions revealed by each step
    stop: int  # first stop position, or the block's length
    error: bool
    margin: float  # smallest distance of any decision from going the other way


@dataclasses.dataclass(kw_only=True)
class Generation:
    """A row's response, the stop included, with its denoised blocks."""

    response: list[int]
    finish: str  # stop, length or error
    blocks: list[Block]


def script(steps: Sequence[dict[int, int]], block: int, vocab: int, sure: float = 30.0):
    """Table in which step s is sure of {position: token} and uniform elsewhere."""
    table = np.zeros((len(steps), block, vocab), np.float32)
    for s, sure_of in enumerate(steps):
        for position, token in sure_of.items():
            table[s, position, token] = sure
    return table


def gumbel_noise(seed: int, sample_index: int, vocab: int) -> Noise:
    """The noise that the contract's key chain gives: seed, sample, absolute position, step."""
    return lambda position, step: np.asarray(_gumbel(seed, sample_index, position, step, vocab))


@functools.partial(jax.jit, static_argnums=4)
def _gumbel(seed, sample_index, position, step, vocab):
    key = jax.random.key(seed, impl="threefry2x32")
    for data in (sample_index, position, step):
        key = jax.random.fold_in(key, data)
    return jax.random.gumbel(key, (vocab,), mode="high")


def denoise_block_numpy(
    denoiser: Denoiser,
    settings: Any,
    ids: Ids,
    *,
    block: int,
    response: Sequence[int] = (),
    thinking_open: bool = False,
    start: int = 0,
    n_valid: int | None = None,
    limit: int | None = None,
    noise: Noise | None = None,
) -> Block:
    """Denoise one block until every position that can appear in the text is revealed.

    `response` are the committed response tokens, `thinking_open` says whether the prompt left a
    thinking block open, `start` is the block's absolute position, `limit` how many of its positions
    the text can still hold.
    """
    n_valid = block if n_valid is None else n_valid
    limit = n_valid if limit is None else limit
    out = Block(
        tokens=[ids.mask] * block,
        masked=[True] * block,
        confidence=[None] * block,
        log_probability=[None] * block,
        steps=[],
        stop=block,
        error=False,
        margin=np.inf,
    )
    while any(out.masked[: min(out.stop + 1, limit)]):
        step = len(out.steps)
        if callable(denoiser):
            logits = denoiser(step, list(out.tokens), list(out.masked))
        else:
            logits = denoiser[min(step, len(denoiser) - 1)]
        places = [i for i in range(min(out.stop, n_valid)) if out.masked[i]]
        if np.isnan(np.asarray(logits)[places]).any():
            out.error = True
            return out
        opened, at_least = _schedule(out.masked, places, step, block, n_valid, settings)
        places = [i for i in places if i in opened]
        picks = {
            i: _pick(i, logits[i], out, settings, ids, response, thinking_open, start + i, noise)
            for i in places
        }
        sure = {i: pick[1] for i, pick in picks.items()}
        reveal = [i for i in places if sure[i] > settings.threshold]
        gaps = [abs(c - settings.threshold) for c in sure.values()]
        if len(reveal) < at_least:
            score = {i: pick[4] for i, pick in picks.items()}
            ordered = sorted(places, key=lambda i: (-score[i], i))
            reveal = sorted({*reveal, *ordered[:at_least]})
            forced = [i for i in reveal if sure[i] <= settings.threshold]
            gaps += [score[f] - score[i] for f in forced for i in places if i not in reveal]
        out.margin = min(out.margin, *gaps, *(picks[i][3] for i in reveal))
        if thinking_open:  # one `</think>` closes it: what it held for the rest is out of date
            shown = [
                *response,
                *(None if m else t for t, m in zip(out.tokens, out.masked, strict=True)),
            ]
            closes = [
                i
                for i in reveal
                if picks[i][0] == ids.think_close
                and ids.think_close not in shown[: len(response) + i]
            ]
            reveal = [i for i in reveal if i not in closes[1:]]
        for i in reveal:
            out.tokens[i], out.confidence[i], out.log_probability[i], *_ = picks[i]
            out.masked[i] = False
        out.steps.append(reveal)
        ends = [i for i in range(block) if not out.masked[i] and out.tokens[i] in ids.stop]
        out.stop = ends[0] if ends else block
    return out


def generate_numpy(
    denoiser_of_block: Callable[[int], Denoiser],
    settings: Any,
    ids: Ids,
    *,
    block: int,
    max_tokens: int,
    prompt_length: int = 0,
    context: int = 10**9,
    thinking_open: bool = False,
    noise: Noise | None = None,
) -> Generation:
    """Blocks until a stop, the token limit, the end of the context, or an error."""
    out = Generation(response=[], finish="length", blocks=[])
    while True:
        start = prompt_length + len(out.response)
        n_valid = min(block, context - start)
        limit = min(n_valid, max_tokens - len(out.response))
        if limit <= 0:
            return out
        done = denoise_block_numpy(
            denoiser_of_block(len(out.blocks)),
            settings,
            ids,
            block=block,
            response=tuple(out.response),
            thinking_open=thinking_open,
            start=start,
            n_valid=n_valid,
            limit=limit,
            noise=noise,
        )
        out.blocks.append(done)
        if done.error:
            out.finish = "error"
            return out
        out.response += done.tokens[: min(done.stop + 1, limit)]
        if done.stop < limit:
            out.finish = "stop"
            return out


def _schedule(masked, places, step, block, n_valid, settings):
    """Open positions of a step, and how many it reveals at least."""
    width = min(settings.window or block, block)
    j = places[0] // width
    inside = range(j * width, (j + 1) * width)
    if not settings.steps:
        return inside, 1
    windows = math.ceil(block / width)
    due = (j + 1) * settings.steps // windows
    masks = sum(masked[i] for i in inside if i < n_valid)
    return inside, max(1, math.ceil(masks / max(1, due - step)))


def _pick(i, logits, so_far, settings, ids, response, thinking_open, position, noise):
    """Token, confidence, log-probability, top-2 gap and order score of one position."""
    raw = np.asarray(logits, np.float64).copy()
    raw[list(ids.forbidden)] = -np.inf
    p = raw.copy()
    in_text = [t for j, t in enumerate(so_far.tokens) if not so_far.masked[j] and j <= so_far.stop]
    for token, count in Counter([*response, *in_text]).items():
        p[token] = (
            p[token] / settings.repetition if p[token] > 0 else p[token] * settings.repetition
        )
        p[token] -= settings.presence + settings.frequency * count
    # Everything to the left of the position, a masked place as None.
    left = [*response]
    left += [None if so_far.masked[j] else so_far.tokens[j] for j in range(i)]
    closed = thinking_open and ids.think_close is not None and ids.think_close in left
    if thinking_open and not closed:
        if ids.think_close is not None:
            p[ids.think_close] += _ramp(settings.thinking_ramp, len(left))
    else:
        answer = len(left) - (left.index(ids.think_close) + 1 if closed else 0)
        for token in set(ids.stop):
            p[token] += _ramp(settings.response_ramp, answer)
    score = p if settings.temperature == 0 else _scores(p, settings, noise, position, so_far)
    token = int(np.argmax(score))
    runner_up = np.max(np.delete(score, token))
    log_p = p[token] - _log_sum_exp(p)
    log_c = raw[token] - _log_sum_exp(raw) if settings.confidence == "raw" else log_p
    share = np.exp(p - _log_sum_exp(p))
    two = np.sort(share)[-2:]
    order = {
        "low_confidence": np.exp(log_c),
        "entropy": sum(x * math.log(x) for x in share if x > 0),
        "margin": two[1] - two[0],
        "leftmost": -i,
    }[settings.policy]
    return token, float(np.exp(log_c)), float(log_p), float(score[token] - runner_up), float(order)


def _scores(p, settings, noise, position, so_far):
    """p / T plus noise within top-k, then top-p; -inf elsewhere."""
    scaled = p / settings.temperature
    order = sorted(range(len(p)), key=lambda v: (-scaled[v], v))
    if settings.top_k:
        order = order[: settings.top_k]
    share = np.exp(scaled[order] - _log_sum_exp(scaled[order]))
    kept, reached = [], 0.0
    for token, part in zip(order, share, strict=True):
        kept.append(token)
        reached += part
        if reached >= settings.top_p and settings.top_p < 1:
            break
    score = np.full(len(p), -np.inf)
    score[kept] = scaled[kept] + noise(position, len(so_far.steps))[kept]
    return score


def _ramp(ramp, index):
    if ramp is None:
        return 0.0
    return min(ramp.slope * max(0, index - ramp.start), np.inf if ramp.cap is None else ramp.cap)


def _log_sum_exp(x):
    return np.max(x) + np.log(np.sum(np.exp(x - np.max(x))))
