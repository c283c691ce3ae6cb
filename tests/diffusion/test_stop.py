import jax.numpy as jnp
import numpy as np

from clover_jax.diffusion.stop import block_finished, candidates, counting, first_stop

STOP = jnp.array([7, 9, -1], jnp.int32)


def ints(*x):
    return jnp.array(x, jnp.int32)


def test_first_stop_is_the_lowest_revealed_stop_of_any_id():
    tokens = ints([1, 7, 9, 7], [9, 1, 1, 7], [1, 1, 1, 1], [7, 7, 7, 9], [-1, -1, -1, -1])
    revealed = np.ones((5, 4), bool)
    revealed[1, 0] = False  # a masked place may hold anything
    revealed[3] = False
    revealed[4] = False
    assert first_stop(tokens, jnp.array(revealed), STOP).tolist() == [1, 3, 4, 4, 4]
    assert first_stop(tokens, jnp.array(revealed), ints(-1)).tolist()[:4] == [4, 4, 4, 4]


def test_candidates_are_masked_left_of_the_stop_and_valid():
    masked = jnp.array([[True, False, True, True]] * 4)
    got = candidates(masked, ints(4, 3, 4, 4), ints(4, 4, 2, 0))
    assert got.tolist() == [
        [True, False, True, True],
        [True, False, True, False],
        [True, False, False, False],
        [False] * 4,
    ]


def test_the_text_counts_up_to_and_including_the_stop():
    masked = jnp.array([[False, True, False, False]] * 3)
    assert counting(masked, ints(2, 0, 4)).tolist() == [
        [True, False, True, False],
        [True, False, False, False],
        [True, False, True, True],
    ]


def test_block_is_finished_when_the_text_part_is_revealed():
    masked = jnp.array([[False, False, True, True]] * 6)
    stop = ints(4, 1, 3, 4, 4, 1)
    limit = ints(4, 4, 4, 2, 3, 4)
    assert block_finished(masked, stop, limit).tolist() == [False, True, False, True, False, True]
    everything = jnp.ones((2, 4), bool)
    assert block_finished(everything, ints(4, 4), ints(0, 1)).tolist() == [True, False]
    assert block_finished(~everything, ints(4, 4), ints(4, 4)).tolist() == [True, True]
