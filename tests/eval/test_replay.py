"""Replayed reference answers: where the reference is the model's own answer all is known."""

import functools
import itertools

import numpy as np
import pytest

from clover_jax.data import tasks
from clover_jax.diffusion.generate import Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.eval.replay import Block, reference_blocks, replay
from tests.diffusion.test_generate import BLOCK, CFG, params, tokenizer
from tests.helpers.compilation import unoptimised

__all__ = ["tokenizer"]  # a fixture
THRESHOLD = 0.05


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with unoptimised():
        yield


@functools.cache
def generator(tokenizer):
    env = Env(rows="mapped", moe_path="dense")  # bit-equal whatever shares the batch
    return Generator(CFG, params(), tokenizer=tokenizer, env=env)


@functools.cache
def own_answers(tokenizer):
    """(blocks of the model's answers, previews it took)."""
    requests = [
        Request(
            prompt=tuple(np.random.default_rng(r).integers(10, 300, 7).tolist()),
            max_tokens=2 * BLOCK,
            sampling=SamplerConfig(threshold=THRESHOLD),
        )
        for r in range(3)
    ]
    done = generator(tokenizer).complete(requests)
    blocks = []
    for r, (request, answer) in enumerate(zip(requests, done, strict=True)):
        ids = list(answer.token_ids)
        for start in range(0, len(ids), BLOCK):
            prefix = [*request.prompt, *ids[:start]]
            blocks.append(Block(r, prefix, ids[start : start + BLOCK]))
    return blocks, sum(c.stats.previews for c in done)


def run(tokenizer, blocks, rule, batch=4):
    return replay(
        generator(tokenizer), blocks, rule=rule, threshold=THRESHOLD, batch=batch
    )  # fmt: skip


def test_own_answers_are_all_right(tokenizer):
    blocks, previews = own_answers(tokenizer)
    found = run(tokenizer, blocks, "threshold")
    assert (found.answers, found.solved) == (3, 3)
    assert (found.previews, found.tokens) == (previews, sum(len(b.tokens) for b in blocks))
    assert found.tpf_previews == pytest.approx(found.tokens / previews)
    assert sum(n for n, _, _ in found.steps) == found.tokens
    assert all(share == 1 for n, _, share in found.steps if n)


def test_batches_do_not_matter(tokenizer):
    blocks, _ = own_answers(tokenizer)
    assert run(tokenizer, blocks, "threshold", 2) == run(tokenizer, blocks, "threshold", 4)


def test_the_oracle_never_needs_more_previews(tokenizer):
    blocks, previews = own_answers(tokenizer)
    best = run(tokenizer, blocks, "oracle")
    assert best.previews <= previews and best.tpf_previews >= 1
    assert all(share == 1 or n == 0 for n, _, share in best.steps) == (best.solved == best.answers)


@pytest.mark.parametrize("rule", ("threshold", "oracle"))
def test_another_reference_is_not_solved(tokenizer, rule):
    """One token of one answer changed: that answer fails, the others do not."""
    blocks, _ = own_answers(tokenizer)
    before = run(tokenizer, blocks, rule)
    tokens = list(blocks[0].tokens)
    tokens[2] = next(i for i in range(10, 300) if i not in tokens)
    found = run(tokenizer, [blocks[0]._replace(tokens=tokens), *blocks[1:]], rule)
    assert found.solved < before.answers
    assert found.solved >= before.solved - 1
    wrong = [n * (1 - share) for n, _, share in found.steps]
    assert sum(wrong) > 0.5


def test_bins_hold_every_masked_position(tokenizer):
    blocks, _ = own_answers(tokenizer)
    found = run(tokenizer, blocks, "threshold")
    assert len(found.bins) == 10
    for i, (n, confidence, share) in enumerate(found.bins):
        assert n == 0 or i / 10 <= confidence <= (i + 1) / 10
        assert 0 <= share <= 1
    # Every token of the reference is masked at least in the first step of its block.
    assert sum(n for n, _, _ in found.bins) >= found.tokens


def test_reference_blocks(tokenizer):
    items = tasks.eval_set("chain_sum", "val", 3)
    blocks = reference_blocks(tokenizer, items, thinking=True, block=8)
    for i, item in enumerate(items):
        own = [b for b in blocks if b.answer == i]
        response = [t for b in own for t in b.tokens]
        text = tokenizer.decode(response[:-1], skip_special=True)
        assert text.endswith(item.answer) and response[-1] == tokenizer.end_of_turn_id
        assert all(len(b.tokens) == 8 for b in own[:-1])
        for before, after in itertools.pairwise(own):
            assert list(after.prefix) == [*before.prefix, *before.tokens]


def test_refusals(tokenizer):
    with pytest.raises(CloverError, match="0 blocks"):
        run(tokenizer, [], "oracle")
    unsure = Generator(CFG, params(), tokenizer=None, env=Env())
    with pytest.raises(CloverError, match="tokenizer"):
        replay(unsure, own_answers(tokenizer)[0], rule="oracle", threshold=0.5, batch=2)
