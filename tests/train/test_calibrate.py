"""What calibration regresses on what. The fit itself is tested with the run that it starts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import BDGDNConfig
from clover_jax.diffusion.corrupt import Example, NoiseConfig, make_batch
from clover_jax.env import Env
from clover_jax.train.calibrate import (
    SCALARS,
    block_lengths,
    residual,
    scalars_of,
    vary_blocks,
    with_scalars,
)
from tests.model.small import config, random_params

# The base's own recurrence as the block operator: blocks without masks are the causal pass.
CFG = config(
    full_attention_interval=2, bd_gdn=BDGDNConfig(operator="causal", right_conv=False)
).replace(num_layers=2, **{"delta.chunk": 4, "moe.coreset": None})
BLOCK = CFG.block_length
ONE_VIEW = NoiseConfig(complementary=False)


def batch(rows: int, *, samples: int = 1, time: int = 40, blocks: int = 3, **noise: Any):
    """Prompts and responses of random lengths, several to a row."""
    rng = np.random.default_rng(0)
    tokens = lambda n: rng.integers(10, 150, n).tolist()
    count = rows * samples
    sizes = zip(rng.integers(3, 12, count), rng.integers(1, 24, count), strict=True)
    examples = [Example.single(i, tokens(p), tokens(r)) for i, (p, r) in enumerate(sizes)]
    return make_batch(
        [examples[i : i + samples] for i in range(0, count, samples)],
        time=samples * time, blocks=samples * blocks, block=BLOCK, pad_id=0, seed=0, epoch=0,
        noise=dataclasses.replace(ONE_VIEW, **noise), substitutes=np.arange(10, 150),
    )  # fmt: skip


def residual_of(length: int, masked: bool):
    """(mean, sums and counts) with as many blocks of this length as there is room for."""
    given = batch(4)
    room = given.n_valid[:, None] - given.block_index
    n = np.where((given.block_n_valid > 0) & (room >= length), length, 0).astype(np.int32)
    given = given._replace(block_n_valid=n, block_masked=np.full_like(given.block_masked, masked))
    params = jax.tree.map(jnp.asarray, random_params(CFG))
    mean, table = _compiled()(scalars_of(params), params, given)
    return float(mean), np.asarray(table), n


@functools.cache
def _compiled():
    return jax.jit(functools.partial(residual, cfg=CFG, env=Env(moe_path="dense")))


@pytest.mark.parametrize(("block", "want"), [(1, (1,)), (8, (1, 2, 4, 8)), (6, (1, 2, 4))])
def test_block_lengths(block, want):
    assert block_lengths(block) == want


def test_blocks_vary():
    """Lengths 1 to 8 that the clean stream has room for, about half of the blocks with masks."""
    given = batch(200)
    got = vary_blocks(given, 3, BLOCK)
    lengths = got.block_n_valid
    assert set(np.unique(lengths)) == {0, 1, 2, 4, 8}
    assert (lengths[given.block_n_valid == 0] == 0).all()
    assert (got.block_index + lengths <= got.n_valid[:, None]).all()
    assert not (got.block_masked & ~given.block_masked).any()
    there = given.block_n_valid > 0
    noisy = got.block_masked.any(axis=-1)[there]
    assert 0.4 < noisy.mean() < 0.6
    np.testing.assert_array_equal(got.block_masked[there][noisy], given.block_masked[there][noisy])
    for name in ("tokens", "n_valid", "block_index"):
        np.testing.assert_array_equal(getattr(got, name), getattr(given, name))


@pytest.mark.parametrize(
    "noise", [{}, {"lengths": (1, 3)}, {"curriculum": ((0, 2),)}, {"substituted": 0.5}]
)
def test_blocks_show_the_clean_tokens_at_their_places(noise):
    """Short blocks end in pads and substitutes stand for others; causal values are of neither."""
    got = vary_blocks(batch(50, **(noise | {"blocks": 40})), 3, BLOCK)
    longer = 0
    for r, b in np.argwhere(got.block_n_valid > 0):
        first, n = got.block_index[r, b], got.block_n_valid[r, b]
        for shown in (got.block_tokens, got.block_shown):
            np.testing.assert_array_equal(shown[r, b, :n], got.tokens[r, first : first + n])
        longer += n > 3
    assert longer > 20


def test_blocks_of_packed_rows_stay_in_their_samples():
    """What follows a sample's end is another one, whose causal values are not the block's."""
    given = batch(50, samples=3)
    got = vary_blocks(given, 3, BLOCK)
    for r, b in np.argwhere(got.block_n_valid > 0):
        first = got.block_index[r, b]
        span = slice(first, first + got.block_n_valid[r, b])
        assert span.stop <= got.n_valid[r]
        assert (got.start[r, span] == got.block_start[r, b]).all()
    room = got.block_index + BLOCK <= got.n_valid[:, None]
    last = np.take_along_axis(got.start, np.where(room, got.block_index + BLOCK - 1, 0), axis=1)
    room &= (given.block_n_valid > 0) & (last == got.block_start)
    assert (got.block_n_valid[room] > 0).all() and room.sum() > 50
    over = (given.block_n_valid > 0) & ~room
    assert (got.block_n_valid[over] < BLOCK).all() and over.sum() > 50


def test_variation_depends_on_the_step_only():
    given = batch(20)
    one, again, other = (vary_blocks(given, step, BLOCK) for step in (3, 3, 4))
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (one.block_n_valid != other.block_n_valid).any()


@pytest.mark.parametrize("length", block_lengths(BLOCK))
def test_the_target_is_the_causal_value_at_the_same_position(length):
    """Zero for an operator that is the causal layer, whatever the boundary and the length."""
    column = block_lengths(BLOCK).index(length)
    layers = CFG.num_groups * CFG.linear_per_group
    mean, (total, count), n = residual_of(length, False)
    assert mean < 1e-9
    assert total.max() < 1e-9
    want = np.zeros((layers, len(block_lengths(BLOCK))))
    want[:, column] = n.sum()
    np.testing.assert_array_equal(count, want)
    assert n.any()
    mean, (total, count), _ = residual_of(length, True)
    assert mean > 1e-3  # masks hide what the causal values know
    np.testing.assert_array_equal(total > 0, want > 0)
    assert total.sum() / count.sum() == pytest.approx(mean, rel=1e-5)


def test_blocks_that_all_lack_room_leave_no_nan():
    """One row and an unlucky draw: 0 / 0 would spoil the scalars without a word."""
    mean, (total, count), n = residual_of(99, True)
    assert not n.any()
    assert mean == 0
    assert not total.any()
    assert not count.any()


def test_only_the_scalars_are_replaced():
    params = jax.tree.map(jnp.asarray, random_params(CFG))
    scalars = scalars_of(params)
    assert tuple(scalars) == SCALARS
    twice = with_scalars(params, {name: jnp.float32(2) * a for name, a in scalars.items()})
    old, new = (
        {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(p)}
        for p in (params, twice)
    )
    for name, a in old.items():
        factor = 2 if name.endswith(SCALARS) else 1
        np.testing.assert_array_equal(new[name], factor * np.asarray(a), err_msg=name)
