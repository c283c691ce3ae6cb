"""Batches of task items: pure in the step, every sample once, nothing of the held-out part."""

import numpy as np
import pytest

from clover_jax.data import bpe, tasks
from clover_jax.data.pipeline import WINDOW, DataConfig, TaskBatches, to_example
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import NoiseConfig
from clover_jax.errors import CloverError

BLOCK = 16
MIX = tasks.Mix((("chain_sum", 1.0), ("gcd", 1.0)), thinking_share=0.5)
ONE_VIEW = NoiseConfig(complementary=False)
CONFIG = DataConfig(mix=MIX, rows=4, buckets=((40, 1), (64, 2), (120, 6)), seed=3, noise=ONE_VIEW)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    items = [tasks.item_at(MIX, 0, "train", i) for i in range(200)]
    texts = [f"{item.prompt}\n{item.thinking}\n{item.answer}\n" for item in items]
    bpe.write_tokenizer(folder, bpe.train_bpe(texts, 300), model_max_length=512)
    return Tokenizer.load(folder)


def batches(tokenizer, config=CONFIG, **options):
    return TaskBatches(tokenizer, config, block=BLOCK, **options)


def contents(batch) -> list[tuple[int, ...]]:
    """The tokens of a batch's samples, without pads."""
    return [
        tuple(row[:n].tolist()) for row, n in zip(batch.tokens, batch.n_valid, strict=True) if n > 0
    ]


def assert_same(a, b):
    for name, x, y in zip(a._fields, a, b, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


def test_an_example_is_the_chat_and_its_answer(tokenizer):
    """Prompt and response are tokenised apart and read as one chat that ends with one stop."""
    for index, thinking in ((0, True), (1, False)):
        item = tasks.item_at(MIX, 0, "train", index)
        got = to_example(tokenizer, item, thinking=thinking, sample=index)
        [(first, end)] = got.turns
        prompt, response = (
            tokenizer.decode(ids, skip_special=False)
            for ids in (got.tokens[:first], got.tokens[first:])
        )
        assert item.prompt in prompt
        assert prompt.endswith("<think>\n" if thinking else "</think>\n\n")
        assert response == tasks.response_text(item, thinking) + "<|im_end|>"
        assert got.tokens[-1] == tokenizer.end_of_turn_id
        assert got.sample == index and end == len(got.tokens)


def test_a_batch_depends_on_its_step_only(tokenizer):
    """In any order, asked again, and from a fresh reader: T3, data position after a resume."""
    one = batches(tokenizer)
    steps = [0, 9, 3, 17, 0]
    seen = [one.batch(step) for step in steps]
    assert_same(seen[0], seen[-1])
    for step, batch in zip(steps, seen, strict=True):
        assert_same(batch, batches(tokenizer).batch(step))


def test_the_seed_changes_samples_and_noise(tokenizer):
    other = DataConfig(mix=MIX, rows=4, buckets=CONFIG.buckets, seed=4, noise=ONE_VIEW)
    a, b = (contents(batches(tokenizer, config).batch(0)) for config in (CONFIG, other))
    assert not set(a) & set(b)


@pytest.mark.parametrize("window", (0, 1))
def test_a_window_uses_each_of_its_samples_once(tokenizer, window):
    """Batches 0..15 hold samples 0..63, the next 16 the next 64, each with its own noise."""
    reader = batches(tokenizer)
    first, size = window * WINDOW * CONFIG.rows, WINDOW * CONFIG.rows
    examples = [reader.example(i) for i in range(first, first + size)]
    fits = [e for e in examples if len(e.tokens) <= 120 and len(e.blocks(BLOCK)) <= 6]
    assert len(fits) > size / 2  # or this test would say little
    seen = [
        sample
        for step in range(window * WINDOW, (window + 1) * WINDOW)
        for sample in contents(reader.batch(step))
    ]
    assert sorted(seen) == sorted(tuple(e.tokens) for e in fits)


def test_buckets_hold_their_samples(tokenizer):
    reader = batches(tokenizer)
    shapes = set()
    for step in range(2 * WINDOW):
        batch = reader.batch(step)
        time, blocks = batch.tokens.shape[1], batch.block_index.shape[1]
        shapes.add((time, blocks))
        assert (time, blocks) in CONFIG.buckets
        assert len(batch.tokens) == CONFIG.rows
        used = (batch.block_n_valid > 0).sum(axis=1)
        weighted = batch.target_weight.sum(axis=1)
        np.testing.assert_array_equal(used, np.ceil(weighted / BLOCK))
        smaller = [b for b in CONFIG.buckets if b < (time, blocks)]
        if smaller:  # the smallest bucket that holds all rows: the next smaller one does not
            width, most = smaller[-1]
            assert batch.n_valid.max() > width or used.max() > most
    assert len(shapes) > 1


def test_sorting_keeps_padding_small(tokenizer):
    """Samples of one size share a batch: fewer padded tokens than in the order they come in."""
    reader = batches(tokenizer)
    padded = sum(reader.batch(step).tokens.size for step in range(WINDOW))
    assert padded < 0.9 * WINDOW * CONFIG.rows * CONFIG.buckets[-1][0]


def test_noise_is_the_samples_own(tokenizer):
    """The same sample in another batch size has the same masks."""
    other = DataConfig(mix=MIX, rows=8, buckets=CONFIG.buckets, seed=3, noise=ONE_VIEW)
    masks = {}
    for config in (CONFIG, other):
        reader = batches(tokenizer, config)
        for step in range(WINDOW * 4 // config.rows):
            batch = reader.batch(step)
            for r, sample in enumerate(contents(batch)):
                used = batch.block_n_valid[r] > 0
                masks.setdefault(sample, []).append(batch.block_masked[r][used])
    pairs = [found for found in masks.values() if len(found) == 2]
    assert len(pairs) >= 8
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)


def test_held_out_problems_are_never_trained_on(tokenizer):
    """By problem, not by wording: the split a batch is made of is the split of its problems."""
    for split in ("train", "val"):
        items = [tasks.item_at(MIX, CONFIG.seed, split, i) for i in range(40)]
        assert {tasks.split_of(item) for item in items} == {split}
    train = {s for step in range(WINDOW) for s in contents(batches(tokenizer).batch(step))}
    val = {s for step in range(4) for s in contents(batches(tokenizer, split="val").batch(step))}
    assert val
    assert not train & val


def test_rows_without_a_sample_weigh_nothing(tokenizer):
    """Samples that no bucket holds are left out, and the batch keeps its shape."""
    small = DataConfig(mix=MIX, rows=4, buckets=((40, 1),), seed=3)
    reader = batches(tokenizer, small)
    seen = [reader.batch(step) for step in range(WINDOW)]
    assert any((batch.n_valid == 0).any() for batch in seen)
    for batch in seen:
        assert batch.tokens.shape == (4, 40)
        empty = batch.n_valid == 0
        assert not batch.target_weight[empty].any()
        assert not batch.block_weight[empty].any()


def test_buckets_that_hold_no_sample_are_refused(tokenizer):
    """Rather than train on nothing without a word."""
    reader = batches(tokenizer, DataConfig(mix=MIX, rows=4, buckets=((8, 1),), seed=3))
    with pytest.raises(CloverError, match="bucket"):
        reader.batch(0)


def test_blocks_of_several_lengths(tokenizer):
    """Each sample draws its own, and the curriculum cuts it; the bucket is of that length."""
    noise = NoiseConfig(complementary=False, lengths=(8, 16), curriculum=((0, 8), (WINDOW, 16)))
    reader = batches(
        tokenizer, DataConfig(mix=MIX, rows=4, buckets=((120, 16),), seed=3, noise=noise)
    )
    seen = [set(), set()]
    for window in (0, 1):
        for step in range(window * WINDOW, window * WINDOW + 4):
            batch = reader.batch(step)
            for index, n in zip(batch.block_index, batch.block_n_valid, strict=True):
                seen[window] |= set(n[n > 0].tolist())
                for length in np.diff(index[n > 0]):
                    assert length == n[0]
    assert seen == [{8}, {8, 16}]


def test_tasks_are_not_packed():
    with pytest.raises(CloverError, match="packed"):
        DataConfig(mix=MIX, packed=True)


def test_unknown_split(tokenizer):
    with pytest.raises(CloverError, match="split is 'dev'"):
        batches(tokenizer, split="dev").batch(0)


BAD = {
    "no rows": {"rows": 0},
    "no buckets": {"buckets": ()},
    "widths fall": {"buckets": ((80, 1), (48, 2))},
    "a width twice": {"buckets": ((48, 1), (48, 2))},
    "blocks fall": {"buckets": ((48, 2), (80, 1))},
    "no tokens": {"buckets": ((0, 1),)},
    "no blocks": {"buckets": ((48, 0),)},
    "negative seed": {"seed": -1},  # the generator of the noise takes none
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_bad_settings_are_refused(changes):
    with pytest.raises(CloverError, match="data"):
        DataConfig(**changes)
