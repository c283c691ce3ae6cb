"""Holes in held-out functions: where they are, how fills are judged, and a run of every arm."""

import sys

import pytest

from clover_jax.data import tasks
from clover_jax.diffusion.generate import Generator
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.eval import infilling
from clover_jax.eval.infilling import ARMS, HEADER, evaluate_infill, find_holes
from tests.diffusion.test_generate import BLOCK, CFG, params, tokenizer
from tests.helpers.compilation import unoptimised

__all__ = ["tokenizer"]  # a fixture
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are run on Linux only")
ITEMS = tasks.eval_set("python_function", "val", 12)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with unoptimised():
        yield


def run(tokenizer, n: int = 4, length: int = 2, batch: int = 3):
    own = Generator(CFG, params(), tokenizer=tokenizer, env=Env(moe_path="dense"))
    return evaluate_infill(
        own, n=n, split="val", length=length, sampling=SamplerConfig(), batch=batch
    )


def test_holes(tokenizer):
    holes = find_holes(tokenizer, ITEMS, length=3, block=8)
    assert [h.item for h in holes] == ITEMS
    text = lambda tokens: tokenizer.decode(tokens, skip_special=False)
    for h in holes:
        assert text(h.response[:-1]) == h.item.answer
        assert h.response[-1] == tokenizer.end_of_turn_id
        assert h.end - h.first == 3 and h.first // 8 == (h.end - 1) // 8
        assert text(h.response[: h.first]).startswith(HEADER)
        # A token of the answer stands right of the hole, in its block.
        assert h.end < len(h.response) - 1 and h.end // 8 == h.first // 8
    assert holes == find_holes(tokenizer, ITEMS, length=3, block=8)
    assert len({h.first for h in holes}) > 5
    assert find_holes(tokenizer, ITEMS, length=8, block=8) == []
    for h in find_holes(tokenizer, ITEMS, length=3, place="start", block=32):
        # The body's first token: the one before it still belongs to the header.
        assert text(h.response[: h.first]).startswith(HEADER)
        assert not text(h.response[: h.first - 1]).startswith(HEADER)


@pytest.mark.slow
def test_arms_of_a_small_model(tokenizer):
    """It knows no Python; every fill has the right length and is judged."""
    results = run(tokenizer)
    assert [r.arm for r in results] == list(ARMS)
    for r in results:
        assert r.n == 4 and 0 <= r.exact <= r.right < 1
        assert r.low <= r.right <= r.high
        assert r.forwards == 1 if r.arm == "ar" else r.forwards >= 1
    assert results[0].gain is None and results[1].gain is not None


def test_fills_are_judged_by_running(tokenizer, monkeypatch: pytest.MonkeyPatch):
    """The reference's tokens are right; two blanks are right only where blanks do not matter."""

    def filled(generator, holes, arm, sampling):
        if arm == "block":
            return [(h.response[h.first : h.end], 1) for h in holes]
        (blank,) = tokenizer.encode(" ", special=False)
        return [((blank, blank), 2) for _ in holes]

    monkeypatch.setattr(infilling, "_fill", filled)
    block, left, ar = run(tokenizer, n=12)
    assert (block.right, block.exact, block.forwards) == (1, 1, 1)
    assert left.right == ar.right < 0.5
    assert (left.forwards, ar.forwards) == (2, 2)
    assert left.gain.difference == pytest.approx(1 - left.right)


def test_refusals(tokenizer):
    with pytest.raises(CloverError, match="length is 0"):
        run(tokenizer, length=0)
    with pytest.raises(CloverError, match=f"no.* room for a hole of {BLOCK} tokens"):
        run(tokenizer, length=BLOCK)
    with pytest.raises(CloverError, match="batch is 0"):
        run(tokenizer, batch=0)
    bare = Generator(CFG, params(), tokenizer=None, env=Env())
    with pytest.raises(CloverError, match="tokenizer"):
        evaluate_infill(bare, n=1, split="val", length=2, sampling=SamplerConfig(), batch=1)
