"""When a block closes: before its first mask where nothing is sure, and held against AR mode."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.diffusion.generate import CanvasEvent, DoneEvent
from clover_jax.diffusion.ramps import RampBias
from clover_jax.diffusion.sampling_config import RampConfig, SamplerConfig, sampler_params
from clover_jax.diffusion.speculative import verify
from clover_jax.env import Env
from clover_jax.errors import CloverError
from tests.diffusion.test_generate import (
    BLOCK,
    CFG,
    facts,
    generator,
    params,
    prefix,
    request,
    tokenizer,
)
from tests.helpers.compilation import unoptimised
from tests.helpers.limits import TOP1_MARGIN, assert_close
from tests.model.small import jitted


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Compiling is what these tests cost; what they check does not need fast programs."""
    with unoptimised():
        yield


__all__ = ["tokenizer"]  # a fixture
EARLY = ("unsure", "verified")
RAMP = RampConfig(start=4, slope=0.5, cap=3.0)
REQUESTS = (
    request(5, 24, threshold=0.3),
    request(13, 17, first=5, threshold=0.5, presence=1.0, frequency=0.5, repetition=1.2),
    request(21, 40, first=2, threshold=0.2, temperature=0.8, seed=2**32 - 1, response_ramp=RAMP),
    request(60, 9, first=3, threshold=0.4, temperature=1.0, top_k=20, top_p=0.9, seed=3),
)


def closing(close, requests=REQUESTS):
    """The requests with that rule."""
    change = lambda r: dataclasses.replace(r.sampling, close=close)
    return [dataclasses.replace(r, sampling=change(r)) for r in requests]


@functools.cache
def completions(tokenizer, close, driver: Any = "full", mode: Any = "block"):
    return generator(tokenizer).complete(closing(close), driver=driver, mode=mode)


def test_verified_text_is_that_of_ar_mode(tokenizer):
    """Penalties, ramps, temperatures and seeds included."""
    ar = completions(tokenizer, "resolved", mode="ar")
    for want, got in zip(ar, completions(tokenizer, "verified"), strict=True):
        assert got.token_ids == want.token_ids
        assert got.finish_reason == want.finish_reason
        for name in ("logprobs", "confidences"):
            assert_close("continuation", name, getattr(got, name), getattr(want, name))
        assert got.stats.previews > 0
        # A verification gives at least a token, and nobody verifies twice between two previews.
        assert got.stats.forwards - got.stats.previews <= min(
            len(got.token_ids), got.stats.previews
        )


def test_ar_mode_does_not_ask_when_a_block_closes(tokenizer):
    ar = completions(tokenizer, "resolved", mode="ar")
    assert [facts(c) for c in completions(tokenizer, "verified", mode="ar")] == list(map(facts, ar))


@pytest.mark.parametrize("close", EARLY)
def test_rows_do_not_matter(tokenizer, close):
    for r in (0, 2):
        (alone,) = generator(tokenizer).complete(closing(close)[r : r + 1])
        assert facts(alone) == facts(completions(tokenizer, close)[r])


@pytest.mark.slow
@pytest.mark.parametrize("close", EARLY)
@pytest.mark.parametrize("driver", ["block", "step"])
def test_drivers_do_not_matter(tokenizer, close, driver):
    together = list(map(facts, completions(tokenizer, close)))
    assert list(map(facts, completions(tokenizer, close, driver))) == together


@pytest.mark.parametrize("close", EARLY)
def test_a_limit_only_cuts_the_text(tokenizer, close):
    whole = completions(tokenizer, close)[2].token_ids
    for n in (1, BLOCK, BLOCK + 1, 19):
        cut = dataclasses.replace(closing(close)[2], max_tokens=n)
        (got,) = generator(tokenizer).complete([cut])
        assert got.token_ids == whole[:n] and got.finish_reason == "length"


def test_an_unsure_row_is_the_plain_loop(tokenizer):
    """Passes one by one, decisions in numpy."""
    asked = closing("unsure")[0]
    threshold, preview = asked.sampling.threshold, jitted("preview", CFG, Env())
    spare = (tokenizer.mask_id, *range(tokenizer.vocab_size, CFG.vocab_size))
    cache, text, early, forwards = prefix(asked.prompt)[0], [], 0, 0
    tokens, masked = np.zeros(BLOCK, np.int32), np.ones(BLOCK, bool)
    margin = np.inf
    while True:
        logits = preview(params(), tokens[None], masked[None], np.array([BLOCK], np.int32), cache)[
            0
        ]
        forwards += 1
        p = np.array(logits, np.float64)[0]
        p[:, spare] = -np.inf
        share = np.exp(p - p.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        guess, sure = share.argmax(-1), share.max(-1)
        stops = np.flatnonzero(~masked & np.isin(tokens, tokenizer.stop_ids))
        open_ = masked & (np.arange(BLOCK) < min([*stops, BLOCK]))
        margin = min(margin, np.abs(sure[open_] - threshold).min())
        above, known = open_ & (sure > threshold), int(masked.argmax())
        if not above.any() and known:
            text += tokens[:known].tolist()
            cache = prefix(tokens[:known], cache)[0]
            tokens = np.concatenate([tokens[known:], np.zeros(known, np.int32)])
            masked = np.concatenate([masked[known:], np.ones(known, bool)])
            early, forwards = early + 1, forwards + 1
            continue
        if not above.any():
            above = np.arange(BLOCK) == np.where(open_, sure, -1).argmax()
        tokens, masked = np.where(above, guess, tokens).astype(np.int32), masked & ~above
        stops = np.flatnonzero(~masked & np.isin(tokens, tokenizer.stop_ids))
        end = min([*(stops + 1), asked.max_tokens - len(text), BLOCK])
        if masked[:end].any():
            continue
        text += tokens[:end].tolist()
        if len(stops) or len(text) == asked.max_tokens:
            break
        cache, forwards = prefix(tokens, cache)[0], forwards + 1
        tokens, masked = np.zeros(BLOCK, np.int32), np.ones(BLOCK, bool)
    assert margin > TOP1_MARGIN / 10 and early > 1  # else choose another prompt
    got = completions(tokenizer, "unsure")[0]
    assert got.token_ids == tuple(text)
    assert got.stats.forwards == forwards


def test_canvases_of_blocks_that_close_early(tokenizer):
    """What is revealed past the end of a block stays; a canvas starts where the text stands."""
    asked = closing("unsure")[:1]
    events = list(generator(tokenizer).stream(asked, driver="step", trace=True))
    done = next(e.completion for e in events if isinstance(e, DoneEvent))
    canvases = [e for e in events if isinstance(e, CanvasEvent)]
    assert len(canvases) == done.stats.previews
    assert any(e.start % BLOCK for e in canvases)
    known = {}
    for e in canvases:
        for i, (token, masked) in enumerate(zip(e.tokens, e.masked, strict=True)):
            assert known.get(e.start + i, token if not masked else None) == (
                None if masked else token
            )
            if not masked:
                known[e.start + i] = token
    assert tuple(known[i] for i in range(len(done.token_ids))) == done.token_ids


VOCAB, STOP, CLOSE = 12, 2, 4


def judge(draft, says, n=None, counts=None, **settings):
    """The verdict on one row; `says[j]` is the id that the causal pass favours at position j."""
    logits = np.zeros((1, len(says), VOCAB), np.float32)
    logits[0, np.arange(len(says)), says] = 5.0
    zeros = jnp.zeros((1, len(says)), jnp.float32)
    return verify(
        jnp.asarray(logits),
        jnp.asarray([draft], jnp.int32),
        jnp.asarray([len(draft) if n is None else n], jnp.int32),
        jnp.asarray([np.zeros(VOCAB) if counts is None else counts], jnp.int32),
        RampBias(zeros, zeros),
        jax.random.split(jax.random.key(0, impl="threefry2x32"), (1, len(says))),
        sampler_params([SamplerConfig(close="verified", **settings)]),
        forbidden=jnp.arange(VOCAB) == 0,
        stop_ids=jnp.asarray([STOP], jnp.int32),
        think_close=jnp.int32(CLOSE),
        raw_confidence=False,
    )


@pytest.mark.parametrize(
    ("draft", "says", "n", "accepted", "next_token"),
    [
        ([5, 6, 7], [5, 6, 7, 8], None, 3, 8),
        ([5, 6, 7], [5, 6, 9, 8], None, 2, 9),
        ([5, 6, 7], [9, 6, 7, 8], None, 0, 9),
        ([5, 6, 7], [5, 6, 7, 8], 2, 2, 7),  # the third is no draft
        ([5, 6, 7], [5, 6, 7, 8], 0, 0, 5),
    ],
)
def test_drafts_are_kept_up_to_the_first_other_choice(draft, says, n, accepted, next_token):
    found = judge(draft, says, n)
    assert int(found.accepted[0]) == accepted
    assert int(found.token[0, accepted]) == next_token
    np.testing.assert_allclose(found.margin, 5.0)
    np.testing.assert_allclose(found.confidence, np.exp(5) / (np.exp(5) + VOCAB - 2), rtol=1e-5)


def test_penalties_count_the_drafts_to_the_left():
    assert int(judge([5, 5, 5], [5, 5, 5, 5]).accepted[0]) == 3
    # At 3 an occurrence, the second 5 has 2 and the third -1, below the others' 0.
    found = judge([5, 5, 5], [5, 5, 5, 5], frequency=3.0)
    assert int(found.accepted[0]) == 2 and int(found.token[0, 2]) != 5
    already = np.eye(VOCAB)[5] * 2
    assert int(judge([5, 5, 5], [5, 5, 5, 5], counts=already, frequency=3.0).accepted[0]) == 0


def test_what_is_kept_has_ar_modes_distribution():
    """Whatever the draft, a position's token is a draw from the causal softmax."""
    rows = 4000
    logits = jnp.broadcast_to(jnp.asarray([0.0, 1.0, 2.0, 0.5]), (rows, 2, 4))
    none = jnp.zeros((rows, 2), jnp.float32)
    found = verify(
        logits,
        jnp.full((rows, 1), 3, jnp.int32),
        jnp.ones((rows,), jnp.int32),
        jnp.zeros((rows, 4), jnp.int32),
        RampBias(none, none),
        jax.random.split(jax.random.key(1, impl="threefry2x32"), (rows, 2)),
        sampler_params([SamplerConfig(close="verified", temperature=1.0)] * rows),
        forbidden=jnp.zeros(4, bool),
        stop_ids=jnp.asarray([-1], jnp.int32),
        think_close=jnp.int32(-1),
        raw_confidence=False,
    )
    share = np.asarray(jax.nn.softmax(logits[0, 0]))
    drawn = np.bincount(found.token[:, 0], minlength=4) / rows
    np.testing.assert_allclose(drawn, share, atol=4 * np.sqrt(0.25 / rows))
    np.testing.assert_array_equal(found.accepted == 1, found.token[:, 0] == 3)


@pytest.mark.parametrize("change", [{"steps": 4}, {"window": 8}])
def test_schedules_fill_whole_blocks(change):
    with pytest.raises(CloverError, match="close is 'unsure'"):
        SamplerConfig(close="unsure", **change)
