"""Mixture of experts: every path against the loop, routing rules, and statistics by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import CoresetConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.moe import moe, moe_specs, route
from tests.helpers.limits import assert_close
from tests.model import oracle
from tests.model.small import QUICK, config, random_tree

CFG = config().replace(**{"moe.coreset": None})
EXPERTS, TOP_K, ROWS, TIME = CFG.moe.num_experts, CFG.moe.top_k, 2, 11
PARAMS = jax.tree.map(jnp.asarray, random_tree(moe_specs(CFG)))
VALID = np.arange(TIME)[None] < np.array([TIME, 6])[:, None]
PATHS = ("gather", "grouped", "ragged", "dense")
layer = jax.jit(moe, static_argnames=("blocks", "cfg", "env"), compiler_options=QUICK)
router = jax.jit(route, static_argnames=("blocks", "cfg"), compiler_options=QUICK)


def inputs() -> np.ndarray:
    shape = (ROWS, TIME, CFG.hidden_size)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def oracle_params():
    return jax.tree.map(lambda a: np.asarray(a, np.float64), PARAMS)


def experts_of(logits: np.ndarray, allowed: list[int]) -> list[int]:
    return sorted(allowed, key=lambda e: (-logits[e], e))[:TOP_K]


def loop(x: np.ndarray, cfg=CFG, allowed=tuple(range(EXPERTS))) -> np.ndarray:
    p, allowed = oracle_params(), list(allowed)
    out = np.zeros(x.shape)
    for r, t in zip(*np.nonzero(VALID), strict=True):
        chosen = experts_of(x[r, t].astype(np.float64) @ p.gate, allowed)
        out[r, t] = oracle.moe(p, x[r, t].astype(np.float64), chosen, allowed, cfg)
    return out


@functools.cache
def with_gradients(path: str):
    """Outputs and the gradients of a weighted sum wrt every weight and x."""
    w = np.random.default_rng(1).normal(size=inputs().shape).astype(np.float32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(p, x):
        def weighted(p, x):
            y, _ = moe(p, x, jnp.asarray(VALID), None, None, cfg=CFG, env=Env(moe_path=path))
            return jnp.sum(jnp.where(VALID[..., None], y * w, 0.0)), y

        return jax.grad(weighted, argnums=(0, 1), has_aux=True)(p, x)

    (dp, dx), y = run(PARAMS, jnp.asarray(inputs()))
    return np.asarray(y), dp, dx


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_the_loop(path):
    y, _, _ = with_gradients(path)
    assert_close("layer", path, y[VALID], loop(inputs())[VALID])


@pytest.mark.parametrize("path", ("gather", "grouped", "ragged"))
def test_every_path_has_the_dense_gradients(path):
    _, dp, dx = with_gradients(path)
    _, want_p, want_x = with_gradients("dense")
    assert_close("gradient", "x", dx, want_x)
    flat, _ = jax.tree_util.tree_flatten_with_path(dp)
    for (name, got), want in zip(flat, jax.tree.leaves(want_p), strict=True):
        assert np.abs(np.asarray(got)).max() > 0, name
        assert_close("gradient", f"{path} {jax.tree_util.keystr(name)}", got, want)


@pytest.mark.parametrize("path", PATHS)
def test_unused_experts_have_no_gradient(path):
    """A router that sends everything to experts 1 and 6."""
    gate = jnp.zeros_like(PARAMS.gate).at[0, jnp.array([1, 6])].set(jnp.float32(5))
    p = PARAMS.replace(gate=gate)
    x = jnp.asarray(np.abs(inputs()) + 0.1)
    env = Env(moe_path=path)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def grads(p):
        y = lambda p: jnp.sum(moe(p, x, jnp.asarray(VALID), None, None, cfg=CFG, env=env)[0])
        return jax.grad(y)(p)

    for leaf in jax.tree.leaves(grads(p).experts):
        used = np.abs(np.asarray(leaf)).reshape(EXPERTS, -1).max(axis=1) > 0
        np.testing.assert_array_equal(np.flatnonzero(used), [1, 6])


@pytest.mark.parametrize("tile", (1, 8, 64))
def test_tile_size_does_not_matter(tile):
    env = Env(moe_path="grouped", moe_tile=tile)
    y, _ = layer(PARAMS, jnp.asarray(inputs()), jnp.asarray(VALID), None, None, cfg=CFG, env=env)
    assert_close("layer", f"tile {tile}", np.asarray(y)[VALID], loop(inputs())[VALID])


def logits_to_inputs(logits: np.ndarray):
    """A router that reads its logits straight from x, and that x."""
    gate = jnp.zeros_like(PARAMS.gate).at[:EXPERTS].set(jnp.eye(EXPERTS, dtype=jnp.float32))
    x = np.zeros((*logits.shape[:2], CFG.hidden_size), np.float32)
    x[..., :EXPERTS] = logits
    return PARAMS.replace(gate=gate), jnp.asarray(x)


def routed(logits, *, valid=None, allowed=None, blocks=None, cfg=CFG):
    """Experts, weights and statistics for logits [positions, experts] of one row."""
    p, x = logits_to_inputs(np.asarray(logits, np.float32)[None])
    valid = np.ones(len(logits), bool) if valid is None else np.asarray(valid)
    allowed = None if allowed is None else jnp.asarray(np.isin(np.arange(EXPERTS), allowed))
    routing, stats = router(p, x, jnp.asarray(valid[None]), allowed, blocks, cfg=cfg)
    return np.asarray(routing.expert[0]), np.asarray(routing.weight[0]), stats


def test_router_precision_is_pinned():
    """Accelerators round fp32 matmuls unless told otherwise, which turns close choices."""
    p, x = logits_to_inputs(np.zeros((1, 3, EXPERTS), np.float32))
    call = functools.partial(route, cfg=CFG, allowed=None, blocks=None)
    with jax.default_matmul_precision("default"):
        program = jax.make_jaxpr(call)(p, x, jnp.ones((1, 3), bool))
    found = [e for e in program.jaxpr.eqns if e.primitive is jax.lax.dot_general_p]
    highest = jax.lax.Precision.HIGHEST
    assert [e.params["precision"] for e in found] == [(highest, highest)]


def test_weights_by_hand():
    """All logits negative; weights are a softmax over the two chosen ones."""
    logits = [[-9, -7, -8, -9, -9, -9, -9, -6]]
    expert, weight, _ = routed(logits)
    np.testing.assert_array_equal(expert, [[1, 7]])
    np.testing.assert_allclose(weight, [[1 / (1 + np.e), np.e / (1 + np.e)]], rtol=1e-6)


def test_ties_go_to_the_lower_id():
    expert, weight, stats = routed([[0.0] * EXPERTS, [1, 0, 3, 0, 1, 1, 0, 0]])
    np.testing.assert_array_equal(expert, [[0, 1], [0, 2]])
    np.testing.assert_array_equal(weight[0], [0.5, 0.5])
    assert float(stats.margin[0]) == 0


def test_unnormalised_weights_are_the_softmax():
    cfg = CFG.replace(**{"moe.norm_topk_prob": False})
    logits = np.random.default_rng(0).normal(size=(5, EXPERTS))
    expert, weight, _ = routed(logits, cfg=cfg)
    probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(weight, np.take_along_axis(probs, expert, axis=1), rtol=1e-5)
    assert (weight.sum(axis=1) < 1).all()


def test_statistics_by_hand():
    """Three valid positions and a pad; two of them choose {0, 1}, one {0, 3}."""
    on = 3.0
    logits = [[on, on, 0, 0, 0, 0, 0, 0], [on, on, 0, 0, 0, 0, 0, 0], [on, 0, 0, on, 0, 0, 0, 0]]
    pad = [[0, 0, 0, 0, 0, 0, 9, 9]]
    _, _, stats = routed(logits + pad, valid=[True, True, True, False])
    high, low = np.exp(on) / (2 * np.exp(on) + 6), 1 / (2 * np.exp(on) + 6)
    np.testing.assert_array_equal(stats.touched[0], [1, 1, 0, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(stats.assigned[0], [3, 2, 0, 1, 0, 0, 0, 0])
    want = [3 * high, 2 * high + low, 3 * low, high + 2 * low, *[3 * low] * 4]
    np.testing.assert_allclose(stats.prob[0], want, rtol=1e-6)
    np.testing.assert_allclose(stats.z[0], 3 * np.log(2 * np.exp(on) + 6) ** 2, rtol=1e-6)
    np.testing.assert_allclose(stats.margin[0], on, rtol=1e-6)


def test_pads_count_nowhere():
    rng = np.random.default_rng(0)
    logits, pads = rng.normal(size=(3, EXPERTS)), 9 * rng.normal(size=(50, EXPERTS))
    _, _, want = routed(logits)
    _, _, got = routed(np.concatenate([logits, pads]), valid=[True] * 3 + [False] * 50)
    np.testing.assert_array_equal(got.touched, want.touched)
    for name in ("assigned", "prob", "z", "margin"):
        assert_close("op", name, getattr(got, name), getattr(want, name))


def test_all_experts_allowed_is_no_restriction():
    x, everyone = jnp.asarray(inputs()), jnp.ones(EXPERTS, bool)
    call = functools.partial(layer, PARAMS, x, jnp.asarray(VALID), cfg=CFG, env=Env())
    want, got = call(None, None), call(everyone, None)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_subset_is_a_smaller_model():
    """Experts 1, 3, 4, 6, 7 of 8: as the model that has only those, ids renumbered."""
    kept = np.array([1, 3, 4, 6, 7])
    small = PARAMS.replace(
        gate=PARAMS.gate[:, kept], experts=jax.tree.map(lambda a: a[kept], PARAMS.experts)
    )
    x, valid = jnp.asarray(inputs()), jnp.asarray(VALID)
    allowed = jnp.asarray(np.isin(np.arange(EXPERTS), kept))
    got, stats = layer(PARAMS, x, valid, allowed, None, cfg=CFG, env=Env())
    cfg = CFG.replace(**{"moe.num_experts": len(kept)})
    want, want_stats = layer(small, x, valid, None, None, cfg=cfg, env=Env())
    assert_close("layer", "output", np.asarray(got)[VALID], np.asarray(want)[VALID])
    assert_close("layer", "loop", np.asarray(got)[VALID], loop(inputs(), allowed=kept)[VALID])
    np.testing.assert_array_equal(np.asarray(stats.touched)[:, kept], want_stats.touched)
    assert not np.delete(np.asarray(stats.touched), kept, axis=1).any()
    for name in ("z", "margin"):
        assert_close("layer", name, getattr(stats, name), getattr(want_stats, name))


def test_fewer_experts_than_top_k():
    """A position takes the one expert there is; the missing ones weigh and count nothing."""
    logits = np.random.default_rng(0).normal(size=(3, EXPERTS))
    expert, weight, stats = routed(logits, allowed=[5])
    np.testing.assert_array_equal(weight[expert == 5], [1, 1, 1])
    np.testing.assert_array_equal(weight[expert != 5], [0, 0, 0])
    np.testing.assert_array_equal(np.flatnonzero(stats.touched[0]), [5])
    np.testing.assert_array_equal(np.flatnonzero(stats.assigned[0]), [5])
    assert not np.isnan(np.asarray(stats.margin)).any()


def test_config_refuses_fewer_experts_than_top_k():
    with pytest.raises(CloverError, match="experts_per_layer"):
        config(**{"moe.experts_per_layer": (8, 5, 3, 1)})


def test_a_lost_position_still_has_weights():
    """One position wants only experts outside the coreset, by far: its weights still sum to 1."""
    cfg = CFG.replace(**{"moe.coreset": CoresetConfig(top_p=0.5)})
    crowd = [[60, 59, 0, 0, 0, 0, 0, 0]] * 7
    lonely = [[0, -1, 0, 0, 0, 0, 200, 199]]
    expert, weight, _ = routed(crowd + lonely, blocks=(1, 8), cfg=cfg)
    np.testing.assert_array_equal(expert, [[0, 1]] * 8)
    share = np.e / (1 + np.e)
    np.testing.assert_allclose(weight, [[share, 1 - share]] * 8, rtol=1e-6)


def test_margin_sees_choices_inside_the_coreset():
    """A near-tie between the coreset's experts decides a position, so the margin must show it."""
    cfg = CFG.replace(**{"moe.coreset": CoresetConfig(top_p=0.8)})
    crowd = [[9, 8, 0, 0, 0, 0, 0, 0], [0, 0, 9, 8, 0, 0, 0, 0]] * 4
    # Wants 6 and 7, gets 2 and then, by a hair, 3 in place of 0.
    lonely = [[4, 0, 5, 4 + 1e-5, 0, 0, 9, 8]]
    expert, _, stats = routed(crowd + lonely, blocks=(1, 9), cfg=cfg)
    np.testing.assert_array_equal(np.flatnonzero(stats.touched[0]), [0, 1, 2, 3])
    np.testing.assert_array_equal(expert[-1], [2, 3])
    assert float(stats.margin[0]) < 1e-4
