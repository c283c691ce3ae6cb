"""The block softmax with a history slot against loops in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.state_fusion import state_fusion
from tests.helpers.limits import assert_close

ROWS, BLOCK, KEY_HEADS, VALUE_HEADS, KEY, VALUE = 3, 5, 2, 4, 7, 3
# Machine code that is not optimised compiles in half the time.
QUICK = {"xla_backend_optimization_level": 0}
DIFFERENTIABLE = ("q", "k", "v", "read", "slot", "logit_scale", "bias")
CASES = ("plain", "bias", "sharp", "invalid", "no slot", "nothing")


def inputs(case: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    x = {
        "q": unit(draw(ROWS, BLOCK, KEY_HEADS, KEY)),
        "k": unit(draw(ROWS, BLOCK, KEY_HEADS, KEY)),
        "v": draw(ROWS, BLOCK, VALUE_HEADS, VALUE),
        "read": draw(ROWS, BLOCK, VALUE_HEADS, VALUE),
        "slot": draw(ROWS, BLOCK, VALUE_HEADS),
        "logit_scale": np.array([0.5, 1, 2, -3], np.float32),
        "bias": np.zeros((ROWS, VALUE_HEADS, BLOCK, BLOCK), np.float32),
        "valid": np.ones((ROWS, BLOCK), bool),
    }
    if case != "plain":
        x["bias"] = draw(ROWS, VALUE_HEADS, BLOCK, BLOCK)
    if case == "sharp":
        x["logit_scale"] = np.array([200, -200, 1e3, 0], np.float32)
        x["slot"][:, :, 0] = 500
    if case in ("invalid", "no slot", "nothing"):
        x["valid"] = np.arange(BLOCK)[None] < np.array([BLOCK, 2, 1])[:, None]
    if case in ("no slot", "nothing"):
        x["slot"][1] = -np.inf
    if case == "nothing":
        x["valid"][1:] = False  # row 1: neither slot nor block; row 2: the slot alone
    return x


def loop(x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    x = {n: a.astype(np.float64) if n != "valid" else a for n, a in x.items()}
    out = np.zeros((ROWS, BLOCK, VALUE_HEADS, VALUE))
    share = np.zeros((ROWS, BLOCK, VALUE_HEADS))
    for r in range(ROWS):
        for h in range(VALUE_HEADS):
            for i in range(BLOCK):
                keys = [j for j in range(BLOCK) if x["valid"][r, j]]
                logits = [x["slot"][r, i, h]]
                for j in keys:
                    qk = x["q"][r, i, h // 2] @ x["k"][r, j, h // 2]
                    logits.append(x["logit_scale"][h] * qk + x["bias"][r, h, i, j])
                if np.isinf(max(logits)):
                    continue
                w = np.exp(np.array(logits) - max(logits))
                w /= w.sum()
                share[r, i, h] = w[0]
                out[r, i, h] = w[0] * x["read"][r, i, h]
                out[r, i, h] += sum(w[1 + n] * x["v"][r, j, h] for n, j in enumerate(keys))
    return out, share


@functools.partial(jax.jit, static_argnames="impl", compiler_options=QUICK)
def run(x, weights, *, impl):
    def weighted(d):
        out, share = state_fusion(*(d[n] for n in DIFFERENTIABLE), x["valid"], impl=impl)
        return jnp.sum(out * weights[0]) + jnp.sum(share * weights[1]), (out, share)

    grads, (out, share) = jax.grad(weighted, has_aux=True)({n: x[n] for n in DIFFERENTIABLE})
    return out, share, grads


@pytest.mark.parametrize("case", CASES)
def test_both_implementations_are_the_loop(case):
    x = inputs(case)
    want = loop(x)
    rng = np.random.default_rng(1)
    weights = tuple(rng.normal(size=a.shape).astype(np.float32) for a in want)
    got = {impl: run(x, weights, impl=impl) for impl in ("reference", "xla")}
    for impl, (out, share, _) in got.items():
        assert_close("op", f"{impl} out", out, want[0])
        assert_close("op", f"{impl} share", share, want[1])
    for name in DIFFERENTIABLE:
        grads = [got[impl][2][name] for impl in ("xla", "reference")]
        if case == "sharp":  # nothing is left to compare but rounding
            assert np.isfinite(grads).all(), f"gradient of {name}"
        else:
            assert_close("gradient", f"gradient of {name}", *grads)
    if case == "nothing":
        assert not np.asarray(got["xla"][0][1]).any()
        np.testing.assert_array_equal(got["xla"][0][2], x["read"][2])


def test_no_bias_is_a_bias_of_zero():
    x = inputs("plain")
    call = jax.jit(functools.partial(state_fusion, impl="xla"))
    with_zero = call(*(x[n] for n in DIFFERENTIABLE), x["valid"])
    without = call(*(x[n] for n in DIFFERENTIABLE[:-1]), None, x["valid"])
    assert_close("op", "out", without[0], with_zero[0])


def test_gradient_is_the_loops_finite_difference():
    x = inputs("invalid")
    out, _ = loop(x)
    w = np.random.default_rng(1).normal(size=out.shape).astype(np.float32)
    grads = run(x, (w, np.zeros(out.shape[:-1], np.float32)), impl="reference")[2]
    rng = np.random.default_rng(3)
    for name in DIFFERENTIABLE:
        direction = rng.normal(size=x[name].shape)
        at = lambda e: (loop({**x, name: x[name] + e * direction})[0] * w).sum()  # noqa: B023
        slope = (at(1e-4) - at(-1e-4)) / 2e-4
        along = np.sum(np.asarray(grads[name], np.float64) * direction)
        assert along == pytest.approx(slope, rel=1e-4, abs=1e-4), name


def test_unknown_implementation_is_named():
    x = inputs("plain")
    args = [jnp.asarray(x[n]) for n in (*DIFFERENTIABLE, "valid")]
    with pytest.raises(
        ValueError, match="state_fusion cannot run as 'cuda': implementations are reference, xla"
    ):
        state_fusion.__wrapped__(*args, impl="cuda")
