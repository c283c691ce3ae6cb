"""The noise of training and the layout of a batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.diffusion.corrupt import (
    FALL,
    WHOLE,
    Example,
    NoiseConfig,
    block_noise,
    frontier_noise,
    looks_decoded,
    make_batch,
    noise_levels,
    pack,
)
from clover_jax.errors import CloverError

PAD, PROMPT = 0, 100  # prompt tokens are 100, 101, ..., response tokens 1, 2, ...
SAMPLES = 4000


def example(sample: int, prompt: int, response: int) -> Example:
    return Example.single(sample, range(PROMPT, PROMPT + prompt), range(1, response + 1))


# Responses of part of a block, of a whole one, of a block and its stop, of one token; no prompt.
EXAMPLES = [
    example(3, 5, 6),
    example(4, 2, 4),
    example(5, 7, 5),
    example(6, 1, 1),
    example(7, 0, 12),
]
ROWS = [(e,) for e in EXAMPLES]


def batch(examples, **changes):
    """One sample a row."""
    return packed_batch([(e,) for e in examples], **changes)


ONE_VIEW = NoiseConfig(complementary=False)


def packed_batch(rows, *, seed=0, epoch=0, time=16, blocks=3, block=4, noise=ONE_VIEW, **options):
    return make_batch(
        rows, time=time, blocks=blocks, block=block, pad_id=PAD, seed=seed, epoch=epoch,
        noise=noise, **options,
    )  # fmt: skip


def noise(
    blocks: int,
    block: int,
    *,
    seed: int = 0,
    samples: int = SAMPLES,
    config: NoiseConfig = ONE_VIEW,
):
    """Masks of many samples, [samples, blocks, block]."""
    return np.stack(
        [block_noise(seed, 0, sample, blocks, block, config) for sample in range(samples)]
    )


# --- noise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", (1, 3))
def test_every_block_has_a_uniform_level(blocks):
    """Kolmogorov-Smirnov at the 0.1 % level, block by block."""
    t = np.stack([noise_levels(0, 0, sample, blocks) for sample in range(SAMPLES)])
    assert t.shape == (SAMPLES, blocks)
    assert t.min() >= 0
    assert t.max() < 1
    steps = np.arange(SAMPLES + 1)[:, None] / SAMPLES
    ranked = np.sort(t, axis=0)
    distance = np.maximum(np.abs(ranked - steps[1:]), np.abs(ranked - steps[:-1])).max(axis=0)
    assert (distance < 1.95 / SAMPLES**0.5).all(), distance


@pytest.mark.parametrize("blocks", (2, 5))
def test_levels_of_a_sample_are_spread_evenly(blocks):
    """One level in each of `blocks` equal strata, so that a sample's mean level hardly varies."""
    for sample in range(50):
        t = np.sort(noise_levels(1, 0, sample, blocks))
        np.testing.assert_array_equal(np.floor(t * blocks), np.arange(blocks))
        np.testing.assert_allclose(np.diff(t), 1 / blocks, atol=1e-12)


def test_the_number_of_masks_is_uniform():
    """A uniform level makes every count 0..n equally likely; none at all becomes one."""
    n = 8
    for blocks in (1, 3):
        counts = noise(blocks, n).sum(axis=-1)
        for b in range(blocks):
            share = np.bincount(counts[:, b], minlength=n + 1) / SAMPLES
            want = np.array([0, 2, *[1] * (n - 1)]) / (n + 1)
            spread = np.sqrt(want * (1 - want) / SAMPLES)
            assert (np.abs(share - want) <= 4 * spread).all(), (blocks, b, share)


def test_every_position_is_masked_equally_often():
    """No position of any block is spared, the first of the first block included."""
    n, blocks = 8, 3
    share = noise(blocks, n).mean(axis=0)
    want = 0.5 + 1 / (n * (n + 1))  # the forced mask falls anywhere
    assert np.abs(share - want).max() < 4 * 0.5 / SAMPLES**0.5, share.round(3)


def test_positions_are_masked_independently():
    """Given its level, neighbouring positions and blocks share nothing: correlation of pairs."""
    n = 8
    masks = noise(2, n).astype(float)
    within = masks[:, 0]
    # Two positions of a block are both masked with probability E[t^2] = 1/3.
    both = within.T @ within / SAMPLES
    pairs = both[np.triu_indices(n, 1)]
    assert np.abs(pairs - 1 / 3).max() < 5 * 0.47 / SAMPLES**0.5


@pytest.mark.parametrize("antithetic", (True, False))
def test_a_band_bounds_the_share_of_masks(antithetic):
    """With 400 positions a block's share is its t within 5 standard deviations."""
    config = NoiseConfig(band=(0.3, 0.8), antithetic=antithetic)
    share = noise(2, 400, samples=300, config=config).mean(axis=-1)
    assert share.min() > 0.3 - 0.125 and share.max() < 0.8 + 0.125
    assert abs(share.mean() - 0.55) < 0.02
    assert share.max() - share.min() > 0.45
    # The two levels of a sample lie half the band apart, or anywhere.
    apart = np.abs(share[:, 0] - share[:, 1])
    assert (abs(apart - 0.25).max() < 0.2) == antithetic


def test_levels_need_not_be_antithetic():
    t = np.stack([noise_levels(0, 0, s, 3, antithetic=False) for s in range(SAMPLES)])
    assert abs(np.corrcoef(t.T)[np.triu_indices(3, 1)]).max() < 0.06
    spread = np.stack([noise_levels(0, 0, s, 3) for s in range(SAMPLES)])
    assert (np.corrcoef(spread.T)[np.triu_indices(3, 1)] < -0.3).all()


def test_every_block_has_a_mask():
    assert noise(4, 2, samples=500).any(axis=-1).all()
    assert noise(3, 1, samples=20).all()  # block length 1: that one


@pytest.mark.parametrize("changed", range(4))
def test_noise_depends_on_seed_epoch_and_sample(changed):
    numbers = [0, 0, 0]
    if changed < 3:
        numbers[changed] = 1
    else:
        numbers = [1, 1, 0]
    assert (block_noise(*numbers, 4, 32, ONE_VIEW) != block_noise(0, 0, 0, 4, 32, ONE_VIEW)).any()
    np.testing.assert_array_equal(
        block_noise(*numbers, 4, 32, ONE_VIEW), block_noise(*numbers, 4, 32, ONE_VIEW)
    )


# --- layout -------------------------------------------------------------------------------------


def test_shapes_and_types():
    got = batch(EXAMPLES)
    rows, time, blocks, block = 5, 16, 3, 4
    want = {
        "tokens": ((rows, time), np.int32),
        "n_valid": ((rows,), np.int32),
        "target_weight": ((rows, time), np.float32),
        "block_index": ((rows, blocks), np.int32),
        "block_tokens": ((rows, blocks, block), np.int32),
        "block_shown": ((rows, blocks, block), np.int32),
        "block_masked": ((rows, blocks, block), np.bool_),
        "block_n_valid": ((rows, blocks), np.int32),
        "block_weight": ((rows, blocks, block), np.float32),
        "block_follows": ((rows, blocks), np.bool_),
    }
    arrays = {name: a for name, a in got._asdict().items() if a is not None}
    assert {name: (a.shape, a.dtype.type) for name, a in arrays.items()} == want


def test_a_row_by_hand():
    """Prompt of 5, response of 6 in blocks of 4: the grid starts at token 5."""
    got = batch(EXAMPLES)
    row = lambda name: getattr(got, name)[0].tolist()
    assert row("tokens") == [100, 101, 102, 103, 104, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0]
    assert row("n_valid") == 11
    assert row("target_weight") == [0.0] * 5 + [1.0] * 6 + [0.0] * 5
    assert row("block_index") == [5, 9, 0]
    assert row("block_n_valid") == [4, 4, 0]
    assert row("block_tokens") == [[1, 2, 3, 4], [5, 6, PAD, PAD], [PAD] * 4]
    # Token 6 is the stop and counts in full, what follows it hardly.
    low = np.float32(0.05)
    assert row("block_weight") == [[1.0] * 4, [1.0, 1.0, low, low], [0.0] * 4]


@pytest.mark.parametrize("r", range(len(EXAMPLES)))
def test_blocks_tile_the_response_and_nothing_else(r):
    """Prompt tokens are in no block; every response token is in one, at its own position."""
    got, prompt = batch(EXAMPLES), EXAMPLES[r].turns[0][0]
    used = got.block_n_valid[r] > 0
    assert used.sum() == len(EXAMPLES[r].blocks(4))
    np.testing.assert_array_equal(got.block_n_valid[r], np.where(used, 4, 0))
    at = (got.block_index[r][:, None] + np.arange(4))[used].reshape(-1)
    np.testing.assert_array_equal(at, prompt + np.arange(at.size))
    inside = at < len(EXAMPLES[r].tokens)
    tokens, weight = (a[r][used].reshape(-1) for a in (got.block_tokens, got.block_weight))
    np.testing.assert_array_equal(tokens[inside], got.tokens[r][at[inside]])
    np.testing.assert_array_equal(tokens[~inside], PAD)
    np.testing.assert_array_equal(weight, np.where(inside, 1, 0.05).astype(np.float32))
    assert tokens.max() < PROMPT
    assert not got.block_masked[r][~used].any()
    assert got.block_masked[r][used].any(axis=-1).all()


def test_a_batch_may_be_split_and_ordered_in_any_way():
    """8x1, 4x2, 1x8: rows are the same bits wherever they stand, and in any bucket."""
    many = [example(sample, 3 + sample % 4, 1 + sample % 12) for sample in range(8)]
    whole = batch(many, packed=True)
    for size in (1, 2, 4):
        parts = [batch(many[i : i + size], packed=True) for i in range(0, 8, size)]
        for name, *pieces in zip(whole._fields, *parts, strict=True):
            np.testing.assert_array_equal(np.concatenate(pieces), getattr(whole, name), name)
    order = np.random.default_rng(0).permutation(8)
    shuffled = batch([many[i] for i in order], packed=True)
    for name, a, b in zip(whole._fields, whole, shuffled, strict=True):
        np.testing.assert_array_equal(a[order], b, name)
    wide = batch(many, time=40, blocks=5)
    np.testing.assert_array_equal(wide.block_masked[:, :3], whole.block_masked)
    np.testing.assert_array_equal(wide.tokens[:, :16], whole.tokens)


def test_epochs_and_seeds_change_the_masks_only():
    first = batch(EXAMPLES)
    for other in (batch(EXAMPLES, epoch=1), batch(EXAMPLES, seed=1)):
        assert (other.block_masked != first.block_masked).any()
        for name, a, b in zip(first._fields, first, other, strict=True):
            if name != "block_masked":
                np.testing.assert_array_equal(a, b, name)


def test_an_empty_row_weighs_nothing():
    got = batch([Example(0, (), ()), EXAMPLES[0]])
    for name in ("n_valid", "target_weight", "block_n_valid", "block_masked", "block_weight"):
        assert not getattr(got, name)[0].any(), name


def test_complementary_views():
    """Each block a second time with the other positions masked: together every one exactly once."""
    args = {"time": 16, "blocks": 3, "block": 4, "pad_id": PAD, "seed": 0, "epoch": 0}
    one = make_batch(ROWS, **args, noise=ONE_VIEW)
    two = make_batch(ROWS, **args, noise=NoiseConfig())
    for name in ("tokens", "n_valid", "target_weight"):
        np.testing.assert_array_equal(getattr(two, name), getattr(one, name), err_msg=name)
    for name in ("block_index", "block_tokens", "block_weight"):
        for half in (slice(None, 3), slice(3, None)):
            np.testing.assert_array_equal(getattr(two, name)[:, half], getattr(one, name))
    np.testing.assert_array_equal(two.block_masked[:, :3], one.block_masked)
    np.testing.assert_array_equal(two.block_n_valid[:, :3], one.block_n_valid)
    exists = one.block_n_valid > 0
    second = two.block_masked[:, 3:]
    np.testing.assert_array_equal(second[exists], ~one.block_masked[exists])
    assert not second[~exists].any()
    # A block that was all masks has nothing left for its second view, which is then no block.
    left = (exists & ~one.block_masked.all(-1)) * 4
    np.testing.assert_array_equal(two.block_n_valid[:, 3:], left)
    assert (left == 0)[exists].any() and left.any()


def test_frontier_noise():
    """Known up to the frontier, a response token, and masked past it; often wholly masked."""
    frontiers = []
    for sample in range(SAMPLES):
        masked, factor = frontier_noise(0, 0, sample, [8, 3], 8)
        for row, weight, length in zip(masked, factor, (8, 3), strict=True):
            frontier = int(row.argmax())
            assert frontier < length
            assert not row[:frontier].any() and row[frontier:].all()
            np.testing.assert_allclose(weight[frontier:], FALL ** np.arange(8 - frontier))
        frontiers.append(masked.argmax(axis=-1))
    share = np.bincount(np.asarray(frontiers)[:, 0], minlength=8) / SAMPLES
    want = np.full(8, (1 - WHOLE) / 8) + WHOLE * (np.arange(8) == 0)
    assert (abs(share - want) < 5 * np.sqrt(want / SAMPLES)).all()
    one, again, other = (
        np.stack([frontier_noise(seed, 0, sample, [8, 3], 8)[0] for sample in range(SAMPLES)])
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert (one != other).any(axis=(1, 2)).mean() > 0.5


def test_share_of_samples_with_frontier_noise():
    drawn = [looks_decoded(0, 0, sample, 0.25) for sample in range(SAMPLES)]
    assert abs(np.mean(drawn) - 0.25) < 0.05
    args = {"time": 16, "blocks": 3, "block": 4, "pad_id": PAD, "seed": 0, "epoch": 0}
    args |= {"packed": True}
    plain = make_batch(ROWS, **args, noise=NoiseConfig())
    some, every = (
        make_batch(ROWS, **args, noise=NoiseConfig(frontier_share=share)) for share in (0.5, 1.0)
    )
    for r, e in enumerate(EXAMPLES):
        same = all(np.array_equal(a[r], b[r]) for a, b in zip(plain, some, strict=True))
        assert same != looks_decoded(0, 0, e.sample, 0.5)
        used = len(e.blocks(4))
        masked, factor = frontier_noise(0, 0, e.sample, [b - a for a, b in e.blocks(4)], 4)
        for view in (0, 3):
            np.testing.assert_array_equal(every.block_masked[r, view : view + used], masked)
        np.testing.assert_allclose(
            every.block_weight[r, 3 : 3 + used], factor * plain.block_weight[r, :used], rtol=1e-6
        )
        assert (every.block_n_valid[r, 3 : 3 + used] == 4).all()
    for name in ("tokens", "target_weight", "block_index", "block_tokens"):
        np.testing.assert_array_equal(getattr(every, name), getattr(plain, name))
    blocks = plain.block_n_valid[:, :3] > 0
    np.testing.assert_array_equal(every.block_follows[:, 3:], blocks)
    assert not every.block_follows[:, :3].any() and not plain.block_follows.any()


def test_substitutes_are_shown_and_nothing_else_changes():
    """About the share of all positions, each with an id that is on offer; drawn per sample."""
    many = [example(i, 3, 12) for i in range(400)]
    ids = np.arange(200, 300)
    plain = batch(many, noise=NoiseConfig())
    config = NoiseConfig(substituted=0.25)
    got = batch(many, noise=config, substitutes=ids)
    for name in set(plain._fields) - {"block_shown"}:
        np.testing.assert_array_equal(getattr(got, name), getattr(plain, name), name)
    np.testing.assert_array_equal(plain.block_shown, plain.block_tokens)
    wrong = got.block_shown != got.block_tokens
    assert np.isin(got.block_shown[wrong], ids).all()
    inside = got.block_n_valid > 0
    assert abs(wrong[inside].mean() - 0.25) < 0.02
    again = batch(many[5:6], noise=config, substitutes=ids)
    np.testing.assert_array_equal(again.block_shown[0], got.block_shown[5])


def test_blocks_of_several_lengths_by_hand():
    """A response of 6 in blocks of 2 of a model of block length 4: positions past 2 are no part."""
    config = NoiseConfig(complementary=False, lengths=(2,))
    got = batch([example(3, 5, 5)], blocks=4, noise=config)
    assert got.block_index[0].tolist() == [5, 7, 9, 0]
    assert got.block_n_valid[0].tolist() == [2, 2, 2, 0]
    assert got.block_tokens[0].tolist()[:3] == [[1, 2, PAD, PAD], [3, 4, PAD, PAD], [5] + [PAD] * 3]
    assert got.block_weight[0, 2].tolist() == [1.0, np.float32(0.05), 0.0, 0.0]
    assert not got.block_masked[0, :, 2:].any()


def test_lengths_are_drawn_and_the_curriculum_cuts_them():
    config = NoiseConfig(lengths=(4, 8, 16), curriculum=((0, 4), (100, 8), (200, 32)))
    draw = lambda step: [
        config.length(16, seed=0, epoch=0, sample=sample, step=step) for sample in range(600)
    ]
    assert set(draw(99)) == {4} and set(draw(100)) == {4, 8}
    counts = np.bincount(draw(200), minlength=17)[[4, 8, 16]]
    assert counts.sum() == 600 and (abs(counts - 200) < 60).all()
    assert NoiseConfig().length(16, seed=0, epoch=0, sample=3) == 16
    with pytest.raises(CloverError, match="at most the model's block length, 8"):
        config.every_length(8)
    assert config.every_length(16) == (4, 8, 16)


BAD_NOISE = {
    "band": {"band": (0.5, 0.5)},
    "share": {"frontier_share": 1.5},
    "substituted": {"substituted": -0.1},
    "weight": {"pad_weight": float("nan")},
    "length": {"lengths": (4, 0)},
    "curriculum": {"curriculum": ((10, 4), (0, 8))},
    "longest": {"curriculum": ((0, 0),)},
}


@pytest.mark.parametrize("changes", BAD_NOISE.values(), ids=BAD_NOISE)
def test_bad_noise_is_refused(changes):
    with pytest.raises(CloverError, match="noise"):
        NoiseConfig(**changes)


def test_several_turns():
    """Each turn has a grid of its own; what others wrote between is in no block and no target."""
    tokens = [100, 101, 1, 2, 3, 4, 5, 102, 103, 6, 7]
    got = batch([Example(0, tokens, ((2, 7), (9, 11)))])
    assert got.block_index[0].tolist() == [2, 6, 9]
    assert got.block_tokens[0].tolist() == [[1, 2, 3, 4], [5, PAD, PAD, PAD], [6, 7, PAD, PAD]]
    low = np.float32(0.05)
    assert got.block_weight[0].tolist() == [[1.0] * 4, [1.0, low, low, low], [1.0, 1.0, low, low]]
    assert (
        got.target_weight[0].tolist() == [0.0] * 2 + [1.0] * 5 + [0.0] * 2 + [1.0] * 2 + [0.0] * 5
    )
    assert got.n_valid[0] == 11


# --- packed rows --------------------------------------------------------------------------------


def test_a_packed_row_by_hand():
    """Prompts of 2 and 0, responses of 5 and 3: both grids, and no target across the border."""
    got = packed_batch([(example(3, 2, 5), example(4, 0, 3)), (example(5, 1, 2),)])
    row = lambda name: getattr(got, name)[0].tolist()
    assert row("tokens") == [100, 101, 1, 2, 3, 4, 5, 1, 2, 3, 0, 0, 0, 0, 0, 0]
    assert row("start") == [0] * 7 + [7] * 3 + [0] * 6
    assert row("target_weight") == [0.0] * 2 + [1.0] * 5 + [0.0] + [1.0] * 2 + [0.0] * 6
    assert got.n_valid.tolist() == [10, 3]
    assert row("block_index") == [2, 6, 7]
    assert row("block_start") == [0, 0, 7]
    assert row("block_tokens") == [[1, 2, 3, 4], [5, PAD, PAD, PAD], [1, 2, 3, PAD]]
    assert not got.start[1].any() and not got.block_start[1].any()
    assert got.start.dtype == got.block_start.dtype == np.int32


@pytest.mark.parametrize("views", (1, 2))
@pytest.mark.parametrize("share", (0.0, 1.0))
def test_packing_moves_samples_and_changes_nothing_else(share, views):
    """Every sample's tokens, targets, blocks and noise are those of its own row."""
    order = [EXAMPLES[i] for i in (4, 0, 3, 2, 1)]
    config = NoiseConfig(complementary=views == 2, frontier_share=share)
    options = {"time": 50, "blocks": 9, "noise": config}
    got = packed_batch([order], **options)
    alone = batch(order, **options, packed=True)
    at = b = 0
    for r, e in enumerate(order):
        n, used = len(e.tokens), len(e.blocks(4))
        for name in ("tokens", "target_weight"):
            np.testing.assert_array_equal(
                getattr(got, name)[0, at : at + n], getattr(alone, name)[r, :n], name
            )
        np.testing.assert_array_equal(got.start[0, at : at + n], at)
        for view in range(0, 9 * views, 9):
            here, there = (0, slice(view + b, view + b + used)), (r, slice(view, view + used))
            for name in (
                "block_tokens", "block_masked", "block_n_valid", "block_weight", "block_follows"
            ):  # fmt: skip
                np.testing.assert_array_equal(
                    getattr(got, name)[here], getattr(alone, name)[there], name
                )
            np.testing.assert_array_equal(got.block_start[here], at)
            np.testing.assert_array_equal(got.block_index[here] - at, alone.block_index[there])
        at, b = at + n, b + used
    assert got.n_valid.tolist() == [at]
    assert not got.block_n_valid[0, b:9].any()


def test_start_is_there_when_rows_are_packed_or_the_caller_asks():
    assert batch(EXAMPLES).start is None and batch(EXAMPLES).block_start is None
    assert not batch(EXAMPLES, packed=True).start.any()
    assert packed_batch([tuple(EXAMPLES[:2])], time=20, blocks=4).block_start.any()
    empty = packed_batch([(), (EXAMPLES[0],)])
    assert empty.start is None and empty.n_valid.tolist() == [0, 11]


@pytest.mark.parametrize("room", ({"time": 16, "blocks": 9}, {"time": 50, "blocks": 2}))
def test_a_row_that_holds_too_much_is_refused(room):
    with pytest.raises(CloverError, match="sample 4 ends at token 17 and block 3 of row 1"):
        packed_batch([(), EXAMPLES[:2]], **room)


SIZES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30)


@given(SIZES, st.integers(1, 40), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_pack(sizes, time, blocks):
    """Nothing lost, nothing over, what is left fits nowhere, and `make_batch` takes it."""
    examples = [example(i, prompt, response) for i, (prompt, response) in enumerate(sizes)]
    room = {"time": time, "blocks": blocks, "length_of": lambda e: 4}
    rows, left = pack(examples, **room)
    assert pack(list(examples), **room) == (rows, left)
    placed = [e for row in rows for e in row]
    assert sorted(e.sample for e in (*placed, *left)) == list(range(len(sizes)))
    size = lambda row: (sum(len(e.tokens) for e in row), sum(len(e.blocks(4)) for e in row))
    assert all(size(row)[0] <= time and size(row)[1] <= blocks for row in rows)
    assert all(size([e])[0] > time or size([e])[1] > blocks for e in left)
    # First fit: no later row's longest sample had room in an earlier row when it was placed.
    for later in range(1, len(rows)):
        for row in rows[:later]:
            before = [e for e in row if len(e.tokens) >= len(rows[later][0].tokens)]
            total = size([*before, rows[later][0]])
            assert total[0] > time or total[1] > blocks
    assert packed_batch(rows, time=time, blocks=blocks).n_valid.sum() == sum(
        len(e.tokens) for e in placed
    )


def test_pack_by_hand():
    """Longest first, into the oldest row with room; equally long ones in the given order."""
    examples = [example(i, n - 1, 1) for i, n in enumerate((3, 6, 3, 7, 4, 11))]
    rows, left = pack(examples, time=10, blocks=3, length_of=lambda e: 4)
    assert [[e.sample for e in row] for row in rows] == [[3, 0], [1, 4], [2]]
    assert [e.sample for e in left] == [5]
    two = pack(examples, time=10, blocks=1, length_of=lambda e: 4).rows  # blocks fill a row as well
    assert [len(row) for row in two] == [1] * 5
