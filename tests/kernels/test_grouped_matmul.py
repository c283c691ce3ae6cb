"""Grouped matmul against a loop over rows, its gradients, and the layout that feeds it."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, plan
from tests.helpers.limits import assert_close

EXPERTS, TILE, WIDTH, OUT, ASSIGNMENTS = 8, 4, 6, 5, 24
CASES = {
    "everyone": np.arange(ASSIGNMENTS) * 5 % EXPERTS,
    "three experts": np.arange(ASSIGNMENTS) % 3,
    "one gets all": np.full(ASSIGNMENTS, 6),
    "no tokens": np.zeros(ASSIGNMENTS, int),
}
make_plan = jax.jit(plan, static_argnames=("num_experts", "tile"))


@functools.partial(jax.jit, static_argnames="impl")
def run(x, w, layout, weights, *, impl):
    def weighted(x, w):
        y = grouped_matmul(x, w, layout.tile_expert, layout.used, impl=impl)
        return jnp.sum(y * weights), y

    (dx, dw), y = jax.grad(weighted, argnums=(0, 1), has_aux=True)(x, w)
    return y, dx, dw


@pytest.mark.parametrize("case", CASES)
def test_both_implementations_are_the_loop(case):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    expert = CASES[case].astype(np.int32)
    assigned = np.full(ASSIGNMENTS, case != "no tokens")
    layout = make_plan(expert, assigned, num_experts=EXPERTS, tile=TILE)
    tokens, w = draw(ASSIGNMENTS, WIDTH), draw(EXPERTS, WIDTH, OUT)
    tiles = layout.tile_expert.shape[0]
    padded = np.concatenate([tokens, np.zeros((1, WIDTH), np.float32)])
    x = padded[np.asarray(layout.source)].reshape(tiles, TILE, WIDTH)
    weights = draw(tiles, TILE, OUT)

    # The plain sums, in float64, in the order of the assignments.
    slots = np.asarray(layout.slot)
    flat_weights = weights.astype(np.float64).reshape(-1, OUT)
    want_y, want_dx = np.zeros((tiles * TILE, OUT)), np.zeros((tiles * TILE, WIDTH))
    want_dw = np.zeros((EXPERTS, WIDTH, OUT))
    for token, e, slot, here in zip(tokens, expert, slots, assigned, strict=True):
        if here:
            want_y[slot] = token.astype(np.float64) @ w[e]
            want_dx[slot] = w[e].astype(np.float64) @ flat_weights[slot]
            want_dw[e] += np.outer(token.astype(np.float64), flat_weights[slot])
    filled = np.isin(np.arange(tiles * TILE), slots)
    unused = np.setdiff1d(np.arange(EXPERTS), expert[assigned])
    for impl in ("reference", "xla"):
        y, dx, dw = run(x, w, layout, weights, impl=impl)
        assert_close("op", f"{impl} y", y.reshape(-1, OUT), want_y)
        dx = np.where(filled[:, None], dx.reshape(-1, WIDTH), 0)
        assert_close("gradient", f"{impl} dx", dx, want_dx)
        assert_close("gradient", f"{impl} dw", dw, want_dw)
        assert not np.asarray(dw)[unused].any(), f"{impl}: gradient of unused experts {unused}"


SIZES = ((1, 4, 8), (7, 3, 2), (24, 8, 4), (30, 2, 1), (16, 16, 8))  # assignments, experts, tile


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data(), size=st.sampled_from(SIZES))
def test_plan_places_every_row_once_in_tiles_of_one_expert(data, size):
    n, num_experts, tile = size
    ids = st.integers(0, num_experts - 1)
    expert = np.array(data.draw(st.lists(ids, min_size=n, max_size=n)), np.int32)
    assigned = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
    slot, source, tile_expert, used = map(
        np.asarray, make_plan(expert, assigned, num_experts=num_experts, tile=tile)
    )
    assert len(source) == tile * len(tile_expert)
    assert (slot[assigned] < tile * used).all()
    assert (slot[~assigned] >= len(source)).all()
    np.testing.assert_array_equal(source[slot[assigned]], np.flatnonzero(assigned))
    assert (source < n).sum() == assigned.sum()
    np.testing.assert_array_equal(tile_expert[slot[assigned] // tile], expert[assigned])
    assert ((tile_expert >= 0) & (tile_expert < num_experts)).all()
    counts = np.bincount(expert[assigned], minlength=num_experts)
    assert used == np.ceil(counts / tile).sum()
    for e in range(num_experts):  # stable: rows of an expert keep their order
        assert (np.diff(slot[assigned & (expert == e)]) > 0).all()


def test_unknown_implementation_is_named():
    ones = jnp.ones((1, 4, 6), jnp.float32), jnp.ones((8, 6, 5), jnp.float32)
    with pytest.raises(ValueError, match="grouped_matmul has no implementation 'cuda'"):
        grouped_matmul.__wrapped__(*ones, jnp.zeros(1, jnp.int32), jnp.int32(1), impl="cuda")
