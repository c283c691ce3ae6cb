import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.diffusion.penalties import forbid, process_logits, response_counts
from clover_jax.diffusion.ramps import (
    THINKING,
    RampBias,
    ResponseState,
    advance,
    block_indices,
    ramp_bias,
    start_response,
)
from clover_jax.diffusion.sampling_config import RampConfig, SamplerConfig, sampler_params

CLOSE = jnp.int32(4)
NONE = jnp.zeros(0, jnp.int32)


def ints(*x):
    return jnp.array(x, jnp.int32)


def process(logits, counts, config, *, response=0.0, thinking=0.0, forbidden=(), stop=NONE):
    """One row of P: logits [block, vocab], counts [vocab]."""
    logits = jnp.asarray(logits)[None]
    places = logits.shape[:2]
    p = jax.jit(process_logits)(
        logits,
        ints(counts),
        RampBias(jnp.full(places, response), jnp.full(places, thinking)),
        sampler_params([config]),
        forbidden=jnp.zeros(logits.shape[-1], bool).at[ints(*forbidden)].set(True),
        stop_ids=stop,
        think_close=CLOSE,
    )
    assert p.dtype == jnp.float32
    return np.asarray(p[0])


def test_penalties_by_hand():
    #                 unseen  +once  +twice  -once  0  -inf forbidden
    logits = np.float32([[2.0, 2.0, 3.0, -1.0, 0.0, 5.0]])
    counts = [0, 1, 2, 1, 3, 4]
    config = SamplerConfig(repetition=1.25, presence=0.9, frequency=0.5)
    expected = [2.0, 2 / 1.25 - 1.4, 3 / 1.25 - 1.9, -1.25 - 1.4, -2.4, -np.inf]
    p = process(logits, counts, config, forbidden=[5])
    np.testing.assert_allclose(p[0], np.float64(expected), rtol=1e-6)


def test_penalties_against_float64():
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=5, size=(7, 40)).astype(np.float32)
    counts = rng.integers(0, 4, 40)
    config = SamplerConfig(repetition=1.05, presence=-0.3, frequency=0.2)
    x = np.float64(logits)
    x = np.where(counts > 0, np.where(x > 0, x / 1.05, x * 1.05), x)
    x = x + 0.3 * (counts > 0) - 0.2 * counts
    np.testing.assert_allclose(process(logits, counts.tolist(), config), x, rtol=2e-6, atol=1e-6)


def test_neutral_penalties_change_no_bit():
    logits = np.random.default_rng(1).normal(size=(3, 9)).astype(np.float32)
    np.testing.assert_array_equal(process(logits, list(range(9)), SamplerConfig()), logits)


def test_repetition_comes_before_presence():
    config = SamplerConfig(repetition=2.0, presence=0.9)
    p = process(np.float32([[1.0, -0.2]]), [1, 0], config)[0]
    # Presence first would give (1 - 0.9) / 2 = 0.05 and keep id 0 on top.
    np.testing.assert_allclose(p, [1 / 2 - 0.9, -0.2], rtol=1e-6)
    assert p.argmax() == 1


def test_ramps_come_last_and_reach_each_of_their_ids_once():
    config = SamplerConfig(repetition=2.0, presence=0.5)
    logits = np.float32([[-1.0, 1.0, 0.0, 0.0, 0.0, 9.0]])
    p = process(
        logits,
        [1, 0, 0, 0, 0, 1],
        config,
        response=3.0,
        thinking=7.0,
        forbidden=[5],
        stop=ints(0, 0, 5, -1),
    )
    # A ramp before the penalties would give (-1 + 3) / 2 - 0.5 = 0.5 on id 0.
    np.testing.assert_allclose(p[0], [-2 - 0.5 + 3, 1, 0, 0, 7, -np.inf], rtol=1e-6)


def test_forbid_keeps_nan_and_widens():
    x = jnp.array([[[1.0, jnp.nan, 2.0]]], jnp.bfloat16)
    out = forbid(x, jnp.array([True, True, False]))
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out[0, 0], [-np.inf, np.nan, 2.0])


def test_counts_add_only_the_counted_positions():
    committed = ints([0, 2, 0, 1], [0, 0, 0, 0])
    counts = response_counts(
        committed,
        ints([1, 3, 3, 0], [2, 2, 2, 2]),
        jnp.array([[True, True, True, False], [True, False, True, True]]),
    )
    np.testing.assert_array_equal(counts, [[0, 3, 0, 3], [0, 0, 3, 0]])
    assert counts.dtype == jnp.int32


def test_indices_follow_the_first_revealed_close():
    # Rows: no thinking; thinking open; closed in the block (a masked close and a later one are
    # none); closed before the block.
    state = ResponseState(ints(10, 10, 10, 10), ints(0, THINKING, THINKING, 7))
    tokens = ints([4, 1, 1, 1], [1, 1, 1, 1], [4, 4, 1, 4], [4, 1, 1, 1])
    revealed = jnp.ones((4, 4), bool).at[2, 0].set(False)
    indices = block_indices(state, tokens, revealed, CLOSE)
    assert indices.thinking.tolist() == [
        [False] * 4,
        [True] * 4,
        [True, True, False, False],
        [False] * 4,
    ]
    assert indices.thinking_index.tolist() == [[0] * 4, [10, 11, 12, 13], [10, 11, 0, 0], [0] * 4]
    assert indices.answer_index.tolist() == [
        [10, 11, 12, 13],
        [0] * 4,
        [0, 0, 0, 1],
        [3, 4, 5, 6],
    ]
    no_close = block_indices(state, tokens, revealed, jnp.int32(-1))
    assert no_close.thinking.tolist() == [[False] * 4, [True] * 4, [True] * 4, [False] * 4]


def test_committing_a_block_moves_its_indices_into_the_state():
    state = start_response(jnp.array([False, True, True, True]))
    assert state.answer_start.tolist() == [0, THINKING, THINKING, THINKING]
    tokens = ints([4, 1, 1, 1], [1, 1, 1, 1], [1, 4, 4, 1], [1, 1, 1, 4])
    state = advance(state, tokens, ints(4, 4, 4, 2), CLOSE)
    assert state.response_length.tolist() == [4, 4, 4, 2]
    assert state.answer_start.tolist() == [0, THINKING, 2, THINKING]  # row 3 cut before its close
    blank = jnp.zeros((4, 4), jnp.int32)
    following = block_indices(state, blank, blank > 0, CLOSE)
    assert following.answer_index[2].tolist() == [2, 3, 4, 5]
    closed_again = advance(state, ints(*[[4, 4, 4, 4]] * 4), ints(4, 4, 4, 0), CLOSE)
    assert closed_again.answer_start.tolist() == [0, 5, 2, THINKING]


@pytest.mark.parametrize("cap", [None, 1.0])
def test_ramps_grow_from_their_start_to_their_cap(cap):
    config = SamplerConfig(
        response_ramp=RampConfig(start=5, slope=0.25, cap=cap),
        thinking_ramp=RampConfig(start=2, slope=0.5, cap=cap),
    )
    state = ResponseState(ints(0, 0), ints(0, THINKING))
    blank = jnp.zeros((2, 16), jnp.int32)
    bias = ramp_bias(
        block_indices(state, blank, blank > 0, CLOSE), sampler_params([config, config])
    )
    index, top = np.arange(16), np.inf if cap is None else cap
    np.testing.assert_allclose(bias.response[0], np.clip(0.25 * (index - 5), 0, top))
    np.testing.assert_allclose(bias.thinking[1], np.clip(0.5 * (index - 2), 0, top))
    np.testing.assert_array_equal(bias.thinking[0], 0)
    np.testing.assert_array_equal(bias.response[1], 0)
    assert (np.diff(bias.response[0]) >= 0).all() and (np.diff(bias.thinking[1]) >= 0).all()


def test_thinking_ramp_is_off_right_of_a_close_and_the_response_ramp_starts_there():
    config = SamplerConfig(
        response_ramp=RampConfig(start=1, slope=1.0), thinking_ramp=RampConfig(start=0, slope=1.0)
    )
    tokens = ints([1, 1, 4, 1, 1, 1])
    state = ResponseState(ints(100), ints(THINKING))
    revealed = jnp.array([[False, False, True, False, False, False]])
    bias = ramp_bias(block_indices(state, tokens, revealed, CLOSE), sampler_params([config]))
    assert bias.thinking[0].tolist() == [100, 101, 102, 0, 0, 0]
    assert bias.response[0].tolist() == [0, 0, 0, 0, 0, 1]


def test_no_ramp_is_no_bias():
    state = ResponseState(ints(100_000, 100_000), ints(0, THINKING))
    blank = jnp.zeros((2, 3), jnp.int32)
    bias = ramp_bias(
        block_indices(state, blank, blank > 0, CLOSE), sampler_params([SamplerConfig()] * 2)
    )
    np.testing.assert_array_equal(bias.response, 0)
    np.testing.assert_array_equal(bias.thinking, 0)
