"""The chunked gated delta rule against a float64 loop over tokens and heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import boundary_state, gated_delta, gated_delta_trace
from tests.helpers.limits import assert_close

ROWS, KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 2, 4, 7, 5
# Machine code that is not optimised compiles in half the time.
QUICK = {"xla_backend_optimization_level": 0}
NAMES = ("q", "k", "v", "g", "beta", "state")
# Chunk lengths with a number of tokens that most of them do not divide.
TIME_OF_CHUNK = {1: 19, 3: 19, 8: 19, 16: 19, 64: 200}
DECAYS = {"weak": -0.01, "strong": -5.0, "extreme": -50.0, "mix": None, "alike": -1e-3}


def inputs(time: int, decay: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(time)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    shape = (ROWS, time, VALUE_HEADS)
    level = DECAYS[decay]
    spread = np.full(shape, level) if level else rng.choice([-0.001, -0.01, -5, -50], shape)
    k = draw(ROWS, time, KEY_HEADS, KEY)
    if decay == "alike":  # nearly equal keys, up to their sign: the system is far from diagonal
        k = np.sign(k[..., :1]) * (1 + np.float32(0.05) * k)
    return {
        "q": unit(draw(ROWS, time, KEY_HEADS, KEY)) / np.float32(np.sqrt(KEY)),
        "k": unit(k),
        "v": draw(*shape, VALUE),
        "g": (spread * rng.uniform(0.5, 1.0, shape)).astype(np.float32),
        "beta": rng.uniform(0.9 if decay == "alike" else 0, 1, shape).astype(np.float32),
        "state": draw(ROWS, VALUE_HEADS, KEY, VALUE),
    }


def loop(x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Read-outs, and the states before the first and after every token (time axis second)."""
    x = {name: a.astype(np.float64) for name, a in x.items()}
    time = x["v"].shape[1]
    out = np.empty((ROWS, time, VALUE_HEADS, VALUE))
    states = np.empty((ROWS, time + 1, VALUE_HEADS, KEY, VALUE))
    for r in range(ROWS):
        for h in range(VALUE_HEADS):
            s = x["state"][r, h]
            states[r, 0, h] = s
            for t in range(time):
                q, k = x["q"][r, t, h // 2], x["k"][r, t, h // 2]
                s = np.exp(x["g"][r, t, h]) * s
                s = s + np.outer(k, x["beta"][r, t, h] * (x["v"][r, t, h] - s.T @ k))
                out[r, t, h], states[r, t + 1, h] = s.T @ q, s
    return out, states


@functools.partial(jax.jit, static_argnames=("impl", "chunk"), compiler_options=QUICK)
def run(x, weights, *, impl, chunk):
    """Outputs, final state, and the gradients of a weighted sum of both."""

    def weighted(x):
        out, state = gated_delta(*(x[n] for n in NAMES), chunk=chunk, impl=impl)
        return jnp.sum(out * weights[0]) + jnp.sum(state * weights[1]), (out, state)

    grads, (out, state) = jax.grad(weighted, has_aux=True)(x)
    return out, state, grads


def weights(time: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = (ROWS, time, VALUE_HEADS, VALUE), (ROWS, VALUE_HEADS, KEY, VALUE)
    return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("chunk", TIME_OF_CHUNK)
def test_chunked_form_is_the_loop(chunk, decay):
    time = TIME_OF_CHUNK[chunk]
    x = inputs(time, decay)
    want_out, want_states = loop(x)
    ref_out, ref_state, ref_grads = run(x, weights(time), impl="reference", chunk=1)
    out, state, grads = run(x, weights(time), impl="xla", chunk=chunk)
    for name, got, want in (
        ("reference out", ref_out, want_out),
        ("reference state", ref_state, want_states[:, -1]),
        ("xla out", out, want_out),
        ("xla state", state, want_states[:, -1]),
    ):
        assert_close("op", name, got, want)
    for name in NAMES:
        assert_close("gradient", f"gradient of {name}", grads[name], ref_grads[name])


def test_gradient_is_the_loops_finite_difference():
    """The reference's gradients judge the others, so they are judged once themselves."""
    x, (w_out, w_state) = inputs(19, "weak"), weights(19)
    grads = run(x, (w_out, w_state), impl="reference", chunk=1)[2]

    def weighted(x):
        out, states = loop(x)
        return (out * w_out).sum() + (states[:, -1] * w_state).sum()

    rng = np.random.default_rng(3)
    for name in NAMES:
        step = {**x, name: x[name].astype(np.float64)}
        direction = rng.normal(size=x[name].shape)
        values = [weighted({**step, name: step[name] + e * direction}) for e in (1e-4, -1e-4)]
        slope = (values[0] - values[1]) / 2e-4
        assert np.sum(np.asarray(grads[name], np.float64) * direction) == pytest.approx(
            slope, rel=1e-4, abs=1e-4
        ), name


@pytest.mark.parametrize("chunk", (8, 64))
def test_boundary_state_is_the_state_after_every_position(chunk):
    time = TIME_OF_CHUNK[chunk]
    x = inputs(time, "mix")
    _, want = loop(x)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def states(*args):
        _, trace = gated_delta_trace(*args, chunk=chunk)
        counts = jnp.stack([jnp.arange(time + 1), time - jnp.arange(time + 1)], axis=1)
        return jax.vmap(functools.partial(boundary_state, trace))(counts)

    got = states(*(x[n] for n in NAMES))
    for t in range(time + 1):
        assert_close("op", f"row 0 after {t}", got[t, 0], want[0, t])
        assert_close("op", f"row 1 after {time - t}", got[t, 1], want[1, time - t])


def test_boundary_state_is_differentiable():
    time, count = 19, 11
    x = {n: jnp.asarray(a) for n, a in inputs(time, "mix").items()}
    w = weights(time)[1]

    def from_trace(x):
        _, trace = gated_delta_trace(*(x[n] for n in NAMES), chunk=8)
        return jnp.sum(w * boundary_state(trace, jnp.full((ROWS,), count)))

    def from_loop(x):
        cut = {n: a if n == "state" else a[:, :count] for n, a in x.items()}
        return jnp.sum(w * gated_delta(*(cut[n] for n in NAMES), chunk=1, impl="reference")[1])

    got, want = (jax.jit(jax.grad(f), compiler_options=QUICK)(x) for f in (from_trace, from_loop))
    for name in NAMES:
        if name == "q":  # a state does not depend on queries
            np.testing.assert_array_equal(got[name], np.zeros_like(x[name]))
        else:
            assert_close("gradient", name, got[name], want[name])


@pytest.mark.parametrize("impl", ("reference", "xla"))
def test_pads_leave_the_state_as_it_is(impl):
    call = jax.jit(functools.partial(gated_delta, chunk=8, impl=impl))
    x = inputs(24, "mix")
    valid = np.array([16, 11])[:, None] > np.arange(24)[None]
    x["g"], x["beta"] = (np.where(valid[..., None], x[n], 0) for n in ("g", "beta"))
    _, state = call(*(x[n] for n in NAMES))
    _, states = loop(x)
    assert_close("op", "state", state, np.stack([states[0, 16], states[1, 11]]))

    # What stands in the pads cannot matter.
    other = {**x, "k": np.where(valid[..., None, None], x["k"], 0.25)}
    other["v"] = np.where(valid[..., None, None], x["v"], 1e4).astype(np.float32)
    np.testing.assert_array_equal(call(*(other[n] for n in NAMES))[1], state)

    # Nothing but pads: the state comes back bit for bit.
    silent = {**x, "g": np.zeros_like(x["g"]), "beta": np.zeros_like(x["beta"])}
    np.testing.assert_array_equal(call(*(silent[n] for n in NAMES))[1], x["state"])


def test_unknown_implementation_is_named():
    x = inputs(19, "weak")
    with pytest.raises(
        ValueError, match="gated_delta cannot run as 'cuda': implementations are reference, xla"
    ):
        gated_delta.__wrapped__(*(jnp.asarray(x[n]) for n in NAMES), chunk=8, impl="cuda")
