"""Expert MLPs against a loop over rows, their gradients, and the layout that feeds them."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_glu, plan
from tests.helpers.limits import assert_close

EXPERTS, TILE, WIDTH, HIDDEN, OUT, ASSIGNMENTS = 8, 4, 6, 3, 5, 24
CASES = {
    "everyone": np.arange(ASSIGNMENTS) * 5 % EXPERTS,
    "three experts": np.arange(ASSIGNMENTS) % 3,
    "one gets all": np.full(ASSIGNMENTS, 6),
    "no tokens": np.zeros(ASSIGNMENTS, int),
}
make_plan = jax.jit(plan, static_argnames=("num_experts", "tile"))


@functools.partial(jax.jit, static_argnames="impl")
def run(x, w_in, w_out, layout, weights, *, impl):
    """Forward alone, forward under differentiation, gradients: the first two are other programs."""
    mlp = functools.partial(
        grouped_glu, tile_expert=layout.tile_expert, used=layout.used, impl=impl
    )  # fmt: skip

    def weighted(x, w_in, w_out):
        y = mlp(x, w_in, w_out)
        return jnp.sum(y * weights), y

    grads, y = jax.grad(weighted, argnums=(0, 1, 2), has_aux=True)(x, w_in, w_out)
    return mlp(x, w_in, w_out), y, *grads


@pytest.mark.parametrize("case", CASES)
def test_both_implementations_are_the_loop(case):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    expert = CASES[case].astype(np.int32)
    assigned = np.full(ASSIGNMENTS, case != "no tokens")
    layout = make_plan(expert, assigned, num_experts=EXPERTS, tile=TILE)
    tokens, w_in = draw(ASSIGNMENTS, WIDTH), draw(EXPERTS, WIDTH, 2 * HIDDEN)
    w_out = draw(EXPERTS, HIDDEN, OUT)
    tiles = layout.tile_expert.shape[0]
    padded = np.concatenate([tokens, np.zeros((1, WIDTH), np.float32)])
    x = padded[np.asarray(layout.source)].reshape(tiles, TILE, WIDTH)
    weights = draw(tiles, TILE, OUT)

    # The plain sums, in float64, in the order of the assignments.
    slots = np.asarray(layout.slot)
    flat_weights = weights.astype(np.float64).reshape(-1, OUT)
    want_y, want_dx = np.zeros((tiles * TILE, OUT)), np.zeros((tiles * TILE, WIDTH))
    want_in, want_out = np.zeros(w_in.shape), np.zeros(w_out.shape)
    for token, e, slot, here in zip(
        tokens.astype(np.float64), expert, slots, assigned, strict=True
    ):
        if here:
            gate, up = np.split(token @ w_in[e], 2)
            sigmoid = 1 / (1 + np.exp(-gate))
            h = gate * sigmoid * up
            dh = w_out[e].astype(np.float64) @ flat_weights[slot]
            d_gate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
            d_gate_up = np.concatenate([d_gate, dh * gate * sigmoid])
            want_y[slot] = h @ w_out[e]
            want_dx[slot] = w_in[e].astype(np.float64) @ d_gate_up
            want_in[e] += np.outer(token, d_gate_up)
            want_out[e] += np.outer(h, flat_weights[slot])
    filled = np.isin(np.arange(tiles * TILE), slots)
    unused = np.setdiff1d(np.arange(EXPERTS), expert[assigned])
    for impl in ("reference", "xla"):
        alone, y, dx, d_in, d_out = run(x, w_in, w_out, layout, weights, impl=impl)
        assert_close("op", f"{impl} y alone", alone.reshape(-1, OUT), want_y)
        assert_close("op", f"{impl} y", y.reshape(-1, OUT), want_y)
        dx = np.where(filled[:, None], dx.reshape(-1, WIDTH), 0)
        assert_close("gradient", f"{impl} dx", dx, want_dx)
        for name, got, want in (("w_in", d_in, want_in), ("w_out", d_out, want_out)):
            assert_close("gradient", f"{impl} {name}", got, want)
            assert not np.asarray(got)[unused].any(), f"{impl}: gradient of unused {unused}"


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
    shapes = (1, 4, 6), (8, 6, 4), (8, 2, 5)
    ones = [jnp.ones(shape, jnp.float32) for shape in shapes]
    with pytest.raises(
        ValueError, match="grouped_glu cannot run as 'cuda': implementations are reference, xla"
    ):
        grouped_glu.__wrapped__(*ones, jnp.zeros(1, jnp.int32), jnp.int32(1), impl="cuda")
