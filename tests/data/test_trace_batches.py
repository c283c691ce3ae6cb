"""Batches of traces: determined by the step, resumable by their state (case T3)."""

import collections
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clover_jax.cli.session import packaged_model
from clover_jax.data.pipeline import TraceConfig
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.data.trace_batches import TraceBatches
from clover_jax.diffusion.corrupt import Batch
from clover_jax.errors import CloverError

BLOCK = 8
COUNT = 90


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(packaged_model())


def write(path: Path, count: int = COUNT) -> Path:
    """Conversations of one query, whose answers name them and differ in length."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": f"{i:02} " + "x " * (i % 23)},
            ],
            "enable_thinking": False,
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TraceConfig:
    folder = tmp_path_factory.mktemp("traces")
    return TraceConfig(
        train=str(write(folder / "train.jsonl")),
        val=str(write(folder / "val.jsonl", 3)),
        rows=4,
        buckets=((30, 2), (60, 5)),
        seed=3,
    )


def numbers(tokenizer: Tokenizer, batch: Batch) -> list[int]:
    """Which conversations a batch holds."""
    texts = [
        tokenizer.decode(row[:n].tolist(), skip_special=False)
        for row, n in zip(batch.tokens, batch.n_valid, strict=True)
        if n
    ]
    return [int(text.split("</think>")[1][:4]) for text in texts]


def assert_same(a: Batch, b: Batch) -> None:
    for name, x, y in zip(a._fields, a, b, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


def test_five_steps_and_five_more_are_ten(tokenizer, config) -> None:
    """From any position, through JSON, in a new pipeline, over the border of an epoch."""
    whole = TraceBatches(tokenizer, config, block=BLOCK)
    steps_per_epoch = -(-64 // 4) + -(-26 // 4)
    for start in (0, 5, 21, 23, 40):
        first = TraceBatches(tokenizer, config, block=BLOCK)
        for step in range(start):
            first.batch(step)
        state = json.loads(json.dumps(first.get_state()))
        second = TraceBatches(tokenizer, config, block=BLOCK)
        second.set_state(state)
        for step in range(start, start + 5):
            assert_same(second.batch(step), whole.batch(step))
        assert second.get_state()["step"] == start + 5
    assert 21 < steps_per_epoch == 23 < 40


def test_a_batch_depends_on_its_step_only(tokenizer, config) -> None:
    """Without a state, too: forwards, backwards, and again."""
    one = TraceBatches(tokenizer, config, block=BLOCK)
    in_order = [one.batch(step) for step in range(30)]
    other = TraceBatches(tokenizer, config, block=BLOCK)
    for step in (7, 29, 0, 8, 8):
        assert_same(other.batch(step), in_order[step])


def test_an_epoch_holds_each_sample_once(tokenizer, config) -> None:
    """In another order the next time, and with other noise."""
    batches = TraceBatches(tokenizer, config, block=BLOCK)
    epochs = []
    for epoch in range(3):
        steps = range(23 * epoch, 23 * epoch + 23)
        epochs.append([batches.batch(step) for step in steps])
    orders = [[n for batch in epoch for n in numbers(tokenizer, batch)] for epoch in epochs]
    for order in orders:
        assert sorted(order) == list(range(COUNT))
    assert len({tuple(order) for order in orders}) == 3
    same = [masks(tokenizer, epoch) for epoch in epochs]
    changed = [n for n in range(COUNT) if not np.array_equal(same[0][n], same[1][n])]
    assert len(changed) > 0.9 * COUNT


def masks(tokenizer: Tokenizer, batches: list[Batch]) -> dict[int, np.ndarray]:
    """The noise of the first view of each conversation."""
    found = {}
    for batch in batches:
        views = batch.block_masked.shape[1] // 2
        rows = [r for r, n in enumerate(batch.n_valid) if n]
        for row, number in zip(rows, numbers(tokenizer, batch), strict=True):
            used = batch.block_index[row, :views] > 0
            found[number] = batch.block_masked[row, :views][used]
    return found


def test_noise_is_the_samples_own(tokenizer, config) -> None:
    """Whatever the batch size (T2)."""
    other = dataclasses.replace(config, rows=9)
    steps = {4: 23, 9: 10}
    found = [
        masks(tokenizer, [b.batch(step) for step in range(steps[c.rows])])
        for c in (config, other)
        for b in [TraceBatches(tokenizer, c, block=BLOCK)]
    ]
    assert sorted(found[0]) == sorted(found[1]) == list(range(COUNT))
    for number in found[0]:
        np.testing.assert_array_equal(found[0][number], found[1][number])


def test_seeds_differ(tokenizer, config) -> None:
    """Also from each other's epochs: no seed's second epoch is the next seed's first."""
    orders = collections.Counter()
    for seed in (3, 4):
        batches = TraceBatches(tokenizer, dataclasses.replace(config, seed=seed), block=BLOCK)
        for epoch in range(2):
            steps = range(23 * epoch, 23 * epoch + 23)
            orders[tuple(n for s in steps for n in numbers(tokenizer, batches.batch(s)))] += 1
    assert len(orders) == 4


def test_rows_fit_their_bucket(tokenizer, config) -> None:
    batches = TraceBatches(tokenizer, config, block=BLOCK)
    shapes = set()
    for step in range(23):
        batch = batches.batch(step)
        time, blocks = batch.tokens.shape[1], batch.block_index.shape[1] // 2
        assert (time, blocks) in config.buckets
        assert batch.n_valid.max() <= time
        shapes.add((time, blocks))
    assert shapes == set(config.buckets)
    assert batches.lost == {}


def test_large_samples_are_cut_and_counted(tokenizer, config) -> None:
    small = dataclasses.replace(config, buckets=((30, 1),))
    batches = TraceBatches(tokenizer, small, block=BLOCK)
    assert batches.lost["samples cut"] == batches.lost["turns cut"] > COUNT / 2
    for step in range(23):
        batch = batches.batch(step)
        for row, n, weight in zip(batch.tokens, batch.n_valid, batch.target_weight, strict=True):
            learnt = row[:n][weight[:n] > 0]
            assert not n or len(learnt) == BLOCK or learnt[-1] == tokenizer.end_of_turn_id


def test_the_held_out_file(tokenizer, config) -> None:
    val = TraceBatches(tokenizer, config, block=BLOCK, split="val")
    assert sorted(numbers(tokenizer, val.batch(0))) == [0, 1, 2]
    assert val.batch(5).tokens.shape[0] == config.rows


def test_refusals(tokenizer, config, tmp_path) -> None:
    with pytest.raises(CloverError, match="split is 'test': expected one of train, val"):
        TraceBatches(tokenizer, config, block=BLOCK, split="test")
    alone = dataclasses.replace(config, val=None)
    with pytest.raises(CloverError, match=r"split is 'val': expected one of train$"):
        TraceBatches(tokenizer, alone, block=BLOCK, split="val")
    with pytest.raises(CloverError, match="no sample of which a block fits"):
        TraceBatches(tokenizer, dataclasses.replace(config, buckets=((9, 1),)), block=BLOCK)
    state = TraceBatches(tokenizer, config, block=BLOCK).get_state()
    changed = dataclasses.replace(config, train=str(write(tmp_path / "other.jsonl", 89)))
    with pytest.raises(CloverError, match="has changed since the checkpoint"):
        TraceBatches(tokenizer, changed, block=BLOCK).set_state(state)


def test_grain_is_not_imported_before_it_is_needed() -> None:
    """It is an extra; and without it, one line says so."""
    code = (
        "import sys; sys.modules['grain'] = None\n"
        "import clover_jax.train.loop, clover_jax.cli.data, clover_jax.data.traces\n"
        "from clover_jax.errors import CloverError\n"
        "try:\n    import clover_jax.data.trace_batches\n"
        "except CloverError as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "extra `train`" in ran.stdout
