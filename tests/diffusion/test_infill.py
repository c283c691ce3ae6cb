"""Holes filled by a small random model: what is pinned stays, and the steps are the sampler's."""

import dataclasses

import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.diffusion.generate import Generator
from clover_jax.diffusion.infill import Infill, hole_at, infill, without_stops
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from tests.diffusion.test_generate import BLOCK, CFG, generator, params, tokenizer
from tests.helpers.compilation import unoptimised
from tests.model.small import jitted

__all__ = ["tokenizer"]  # a fixture
SLOW, FAST = SamplerConfig(threshold=1.0), SamplerConfig(threshold=0.05)
PREFIX = tuple(np.random.default_rng(0).integers(10, 300, 7).tolist())
TOKENS = tuple(np.random.default_rng(1).integers(10, 300, BLOCK).tolist())
ENV = Env(rows="mapped", moe_path="dense")  # as `generator` has it


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with unoptimised():
        yield


def holes(*at: int, n: int = BLOCK, **changes: int) -> Infill:
    """Masks at these positions of the first n tokens; t3=9 changes token 3."""
    tokens = [changes.get(f"t{i}", token) for i, token in enumerate(TOKENS[:n])]
    return Infill(prefix=PREFIX, tokens=tuple(tokens), masked=tuple(i in at for i in range(n)))


def fill(tokenizer, *requests: Infill, sampling: SamplerConfig = SLOW):
    """Always three rows: one program."""
    rows = [*requests, *[holes(0)] * (3 - len(requests))]
    return infill(generator(tokenizer), rows, sampling=sampling)[: len(requests)]


@pytest.mark.parametrize("sampling", (SLOW, FAST))
def test_pins_stay_and_every_hole_is_filled(tokenizer, sampling):
    places = ((3,), (0, 2, 5), tuple(range(BLOCK)))
    found = fill(tokenizer, *(holes(*at) for at in places), sampling=sampling)
    for at, done in zip(places, found, strict=True):
        for i in range(BLOCK):
            if i in at:
                assert 0 <= done.revealed_at[i] < done.previews <= len(at)
                assert 0 < done.confidences[i] <= 1
                assert done.tokens[i] not in (*tokenizer.stop_ids, CFG.mask_token_id)
                assert done.tokens[i] < tokenizer.vocab_size
            else:
                assert done.tokens[i] == TOKENS[i]
                assert done.revealed_at[i] == -1 and done.confidences[i] is None
        if sampling is SLOW:  # one position a step
            assert sorted(r for r in done.revealed_at if r >= 0) == list(range(len(at)))
            assert done.previews == len(at)


def test_steps_by_hand(tokenizer):
    """The most confident masked position first, from previews of the canvas so far."""
    at = (1, 4, 6)
    cache = jitted("extend", CFG, ENV)(
        params(), np.array([PREFIX], np.int32), np.array([7], np.int32), empty_cache(CFG, 1, 64)
    ).cache
    tokens, masked = np.array([TOKENS], np.int32), np.zeros((1, BLOCK), bool)
    masked[0, at] = True
    steps = {}
    for step in range(len(at)):
        logits, _ = jitted("preview", CFG, ENV)(
            params(), tokens, masked, np.array([BLOCK], np.int32), cache
        )
        logits = np.array(logits[0], np.float64)
        logits[:, [CFG.mask_token_id, *tokenizer.stop_ids]] = -np.inf
        logits[:, tokenizer.vocab_size :] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        confidence = np.where(masked[0], p.max(-1) / p.sum(-1), -1)
        best = int(confidence.argmax())
        tokens[0, best], masked[0, best] = logits[best].argmax(), False
        steps[best] = step, confidence[best]
    (done,) = fill(tokenizer, holes(*at))
    assert done.tokens == tuple(tokens[0].tolist())
    for i, (step, confidence) in steps.items():
        assert done.revealed_at[i] == step
        assert done.confidences[i] == pytest.approx(confidence, rel=1e-4)


def test_right_context_counts_and_masked_tokens_do_not(tokenizer):
    first, same, other = fill(tokenizer, holes(2), holes(2, t2=11), holes(2, t5=12))
    assert first == same
    assert first.confidences[2] != other.confidences[2]


def test_a_known_stop_ends_nothing(tokenizer):
    stop = tokenizer.stop_ids[0]
    plain, stopped = fill(tokenizer, holes(4, 5, 6), holes(4, 5, 6, t1=stop))
    assert stopped.previews == plain.previews == 3
    assert sorted(stopped.revealed_at[4:7]) == [0, 1, 2]


def test_what_is_not_given_is_unknown(tokenizer):
    """Three tokens: the rest of the block is masked, not pinned to anything, and not returned."""
    short, long = fill(tokenizer, holes(1, n=3), holes(1, 3, 4, 5, 6, 7))
    assert len(short.tokens) == 3 and short.previews <= long.previews
    assert short.tokens == long.tokens[:3]


def test_a_pinned_stop_ends_nothing(tokenizer):
    """A hole left of the stop is filled; the pads after it stay."""
    stop = tokenizer.stop_ids[0]
    (done,) = fill(tokenizer, holes(1, 3, t5=stop, t6=tokenizer.pad_id, t7=tokenizer.pad_id))
    assert min(done.revealed_at[1], done.revealed_at[3]) >= 0
    assert done.tokens[5:] == (stop, tokenizer.pad_id, tokenizer.pad_id)


def test_without_stops_changes_a_copy(tokenizer):
    """A bias that makes the stop the best token everywhere: a hole never takes it."""
    own = generator(tokenizer)
    before = np.array(own.rules.forbidden)
    after = np.array(without_stops(own).rules.forbidden)
    assert set(np.flatnonzero(after & ~before)) == set(tokenizer.stop_ids)
    np.testing.assert_array_equal(own.rules.forbidden, before)


def test_hole_at():
    prompt, response = (1, 2), tuple(range(100, 113))
    given = hole_at(prompt, response, (2, 4), block=8, fill=0)
    assert given.prefix == prompt
    assert given.tokens == response[:8]
    assert given.masked == (False, False, True, True, False, False, False, False)
    given = hole_at(prompt, response, (10, 12), block=8, fill=0)
    assert given.prefix == prompt + response[:8]
    assert given.tokens == (*response[8:], 0, 0, 0)
    assert given.masked == (False, False, True, True, False, False, False, False)
    left = hole_at(prompt, response, (10, 12), block=8, fill=None)
    assert left == dataclasses.replace(given, tokens=response[8:12], masked=given.masked[:4])


@pytest.mark.parametrize(
    ("hole", "message"),
    [
        ((6, 9), "crosses the border of blocks at 8"),
        ((0, 9), "crosses the border of blocks at 8"),
        ((3, 3), "at least one"),
        ((12, 14), "at least one"),
        ((-1, 2), "at least one"),
    ],
)
def test_holes_that_cannot_be(hole, message):
    with pytest.raises(CloverError, match=message):
        hole_at((1,), range(13), hole, block=8, fill=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": (*TOKENS, 9), "masked": (True,) * (BLOCK + 1)}, "cannot see what follows"),
        ({"tokens": (CFG.vocab_size,), "masked": (True,)}, "outside the vocabulary"),
        ({"prefix": (CFG.vocab_size,)}, "outside the vocabulary"),
        ({"prefix": (9,) * (CFG.max_position_embeddings - BLOCK + 1)}, "do not fit"),
        ({"prefix": ()}, "at least one"),
    ],
)
def test_requests_that_cannot_be(tokenizer, change, message):
    with pytest.raises(CloverError, match=message):
        fill(tokenizer, dataclasses.replace(holes(2), **change))


def test_masks_that_cannot_be():
    for masked in ((False,) * BLOCK, (True,)):
        with pytest.raises(CloverError, match="at least one that is masked"):
            dataclasses.replace(holes(2), masked=masked)


def test_autoregressive_models_see_nothing_to_the_right():
    plain = Generator(CFG.replace(bd_gdn=None), params(), tokenizer=None, env=ENV)
    with pytest.raises(CloverError, match="bd_gdn is null"):
        infill(plain, [holes(2)], sampling=SLOW)


def test_no_requests(tokenizer):
    with pytest.raises(CloverError, match="no hole"):
        infill(generator(tokenizer), [], sampling=SLOW)


def test_a_hole_is_filled_whole(tokenizer):
    early = dataclasses.replace(SLOW, steps=0, window=0, close="verified")
    with pytest.raises(CloverError, match="close is 'verified'"):
        infill(generator(tokenizer), [holes(2)], sampling=early)
