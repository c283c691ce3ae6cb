"""The chunked gated delta rule against a float64 loop over tokens and heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.sharding import AxisRules, make_mesh
from pallas_kernels.gated_delta import (
    boundary_state,
    commit_state,
    contract,
    gated_delta,
    gated_delta_trace,
)
from pallas_kernels.gated_delta.specs import SPECS
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


@pytest.mark.parametrize(("impl", "chunk"), (("reference", 8), ("xla", 8), ("xla", 64)))
def test_boundary_state_is_the_state_after_every_position(impl, chunk):
    time = TIME_OF_CHUNK[chunk]
    x = inputs(time, "mix")
    _, want = loop(x)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def states(*args):
        _, _, trace = gated_delta_trace(*args, chunk=chunk, impl=impl)
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
        _, _, trace = gated_delta_trace(*(x[n] for n in NAMES), chunk=8, impl="xla")
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


def past(length, x: dict[str, np.ndarray], fill: float) -> dict[str, np.ndarray]:
    """The same inputs with `fill` at and past each row's length."""

    def put(a: np.ndarray) -> np.ndarray:
        valid = np.arange(a.shape[1])[None] < np.asarray(length)[:, None]
        return np.where(valid.reshape(*valid.shape, *(1,) * (a.ndim - 2)), a, np.float32(fill))

    return {n: a if n == "state" else put(a) for n, a in x.items()}


@functools.partial(jax.jit, static_argnames="impl", compiler_options=QUICK)
def ragged(x, length, *, impl):
    args = [x[n] for n in NAMES]
    out, state = gated_delta(*args, length, chunk=8, impl=impl)
    return out, state, commit_state(*args[1:], length, chunk=8, impl=impl)


TIME = 19


@given(
    st.lists(st.integers(0, TIME), min_size=ROWS, max_size=ROWS), st.sampled_from(sorted(DECAYS))
)
@settings(max_examples=20, deadline=None)
def test_ragged_lengths(length, decay):
    """Lengths, empty rows included, with NaN in everything past them."""
    x = inputs(TIME, decay)
    want_out, want_states = loop(x)
    for impl in ("reference", "xla"):
        out, state, committed = ragged(
            past(length, x, np.nan), np.array(length, np.int32), impl=impl
        )
        for r, n in enumerate(length):
            assert_close("op", f"{impl} state of row {r}", state[r], want_states[r, n])
            assert_close("op", f"{impl} commit of row {r}", committed[r], want_states[r, n])
            assert_close("op", f"{impl} out of row {r}", out[r, :n], want_out[r, :n])
            np.testing.assert_array_equal(out[r, n:], np.zeros_like(out[r, n:]))


BORDERS = st.lists(st.booleans(), min_size=ROWS * TIME, max_size=ROWS * TIME)


def alone(x, begins):
    """Read-outs, and states after every count, of each sample as a call of its own."""
    out, states = loop(x)
    for r in range(ROWS):
        for first in np.flatnonzero(begins[r]):
            rest = {n: a if n == "state" else a[:, first:] for n, a in x.items()}
            part, part_states = loop({**rest, "state": np.zeros_like(x["state"])})
            out[r, first:], states[r, first + 1 :] = part[r], part_states[r, 1:]
    return out, states


@functools.partial(jax.jit, static_argnames="impl", compiler_options=QUICK)
def in_one_row(x, begins, length, weights, *, impl):
    """Outputs, last state, states after every count, and gradients of a weighted sum of all."""

    def weighted(x):
        args = (*(x[n] for n in NAMES), length, begins)
        out, state, trace = gated_delta_trace(*args, chunk=8, impl=impl)
        counts = jnp.broadcast_to(jnp.arange(TIME + 1)[:, None], (TIME + 1, ROWS))
        states = jax.vmap(functools.partial(boundary_state, trace))(counts)
        again, last = gated_delta(*args, chunk=8, impl=impl)
        total = jnp.sum((out + again) * weights[0]) + jnp.sum((state + last) * weights[1])
        return total + jnp.sum(states * weights[1][None]), (out, state, again, last, states)

    grads, values = jax.grad(weighted, has_aux=True)(x)
    return values, grads


@given(BORDERS, st.integers(1, TIME), st.sampled_from(sorted(DECAYS)))
@settings(max_examples=15, deadline=None)
def test_samples_in_one_row_are_samples_alone(borders, length, decay):
    """Borders anywhere: states, read-outs, boundary states, and the gradients' two ways."""
    x, begins = inputs(TIME, decay), np.array(borders).reshape(ROWS, TIME)
    lengths = np.array([length, TIME], np.int32)
    want_out, want_states = alone(x, begins)
    grads = {}
    for impl in ("reference", "xla"):
        (out, state, again, last, states), grads[impl] = in_one_row(
            x, begins, lengths, weights(TIME), impl=impl
        )
        for r, n in enumerate(lengths):
            for name, got in (("out", out), ("out without trace", again)):
                assert_close("op", f"{impl} {name} of row {r}", got[r, :n], want_out[r, :n])
            for name, got in (("state", state), ("state without trace", last)):
                assert_close("op", f"{impl} {name} of row {r}", got[r], want_states[r, n])
            for t in range(n + 1):
                assert_close("op", f"{impl} row {r} after {t}", states[t, r], want_states[r, t])
    for name in NAMES:
        got, want = (grads[impl][name] for impl in ("xla", "reference"))
        assert_close("gradient", f"gradient of {name}", got, want)


def test_nothing_passes_a_border():
    """Of all that stands before it, the start state included, in bits."""
    x, w = inputs(TIME, "weak"), weights(TIME)
    lengths = np.full(ROWS, TIME, np.int32)
    for border in (5, 8):  # in a chunk and at a chunk's start
        begins = np.arange(TIME)[None] == np.full((ROWS, 1), border)
        after = np.arange(TIME) >= border
        other = {n: a if n == "state" else np.where(
            after.reshape(1, -1, *(1,) * (a.ndim - 2)), a, np.roll(a, 1, axis=0)
        ) for n, a in x.items()}  # fmt: skip
        other["state"] = 100 * x["state"]
        (out, state, *_), _ = in_one_row(x, begins, lengths, w, impl="xla")
        (changed, last, *_), _ = in_one_row(other, begins, lengths, w, impl="xla")
        np.testing.assert_array_equal(changed[:, border:], out[:, border:])
        np.testing.assert_array_equal(last, state)
        assert (changed[:, :border] != out[:, :border]).any()


def test_one_token_is_the_recurrence():
    x = {n: a[:, :1] if n != "state" else a for n, a in inputs(TIME, "mix").items()}
    want_out, want_states = loop(x)
    call = functools.partial(gated_delta, chunk=8, impl="xla")
    out, state = jax.jit(call)(*(x[n] for n in NAMES))
    assert_close("op", "out", out, want_out)
    assert_close("op", "state", state, want_states[:, 1])
    program = str(jax.make_jaxpr(call)(*(x[n] for n in NAMES)))
    assert "scan" not in program and "pad" not in program  # not the chunked machinery


@pytest.mark.parametrize("count", (0, 1, 8, 11, TIME))
def test_a_commit_of_a_part_is_the_pass_over_that_part(count):
    """Of the stored block, any accepted length; and its gradients."""
    x = {n: jnp.asarray(a) for n, a in inputs(TIME, "mix").items()}
    w = weights(TIME)[1]
    counts = jnp.full((ROWS,), count, jnp.int32)

    def from_commit(x):
        state = commit_state(*(x[n] for n in NAMES[1:]), counts, chunk=8, impl="xla")
        return jnp.sum(w * state), state

    def from_part(x):
        cut = {n: a if n == "state" else a[:, :count] for n, a in x.items()}
        args = [cut[n] for n in NAMES]
        state = gated_delta(*args, chunk=8, impl="reference")[1] if count else x["state"]
        return jnp.sum(w * state), state

    got, state = jax.jit(jax.grad(from_commit, has_aux=True), compiler_options=QUICK)(x)
    want, want_state = jax.jit(jax.grad(from_part, has_aux=True), compiler_options=QUICK)(x)
    assert_close("op", "state", state, want_state)
    for name in NAMES:
        if name == "q":
            np.testing.assert_array_equal(got[name], np.zeros_like(x[name]))
        else:
            assert_close("gradient", f"gradient of {name}", got[name], want[name])


@pytest.mark.parametrize("spec", [s for s in SPECS if "test" in s.uses], ids=lambda s: s.name)
def test_specs(spec):
    arrays = jax.jit(spec.inputs, compiler_options=QUICK)(jax.random.key(1))
    run = lambda impl: jax.jit(functools.partial(spec.call, impl=impl), compiler_options=QUICK)
    got, want = (jax.tree.leaves(run(impl)(*arrays)) for impl in ("xla", "reference"))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_close("op", f"result {i}", a, b)
    if spec.naive is not None:
        assert_close("op", "naive", jax.tree.leaves(jax.jit(spec.naive)(*arrays))[0], want[0])


def test_specs_have_unique_names_and_floors():
    assert len({s.name for s in SPECS}) == len(SPECS)
    for spec in SPECS:
        moved = jax.tree.leaves((spec.shapes(), jax.eval_shape(
            functools.partial(spec.call, impl="xla"), *spec.shapes()
        )))  # fmt: skip
        # Every operand and result once; lengths and the keys of a trace are not in the floor.
        assert spec.floor.bytes <= sum(4 * a.size for a in moved)
        assert spec.floor.flops > 0


def test_shards_compute_what_the_whole_does():
    x = {n: np.concatenate([a, a]) for n, a in inputs(TIME, "mix").items()}
    args = [x[n] for n in NAMES]
    length = np.array([TIME, 11, 0, 3], np.int32)
    begins = np.arange(TIME)[None] == np.array([5, 8, 0, 1])[:, None]
    rules = AxisRules()
    mesh = make_mesh(4, 1, 2)
    call = functools.partial(gated_delta, chunk=8, impl="xla")
    want = jax.jit(call)(*args, length, begins)
    shards = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=tuple(rules.spec(axes) for axes in contract.AXES),
        out_specs=tuple(rules.spec(axes) for axes in contract.OUT_AXES),
    )
    for name, a, b in zip(
        ("out", "state"), jax.jit(shards)(*args, length, begins), want, strict=True
    ):
        assert len(a.sharding.device_set) == 8
        assert_close("op", name, a, b)
    part = functools.partial(commit_state, chunk=8, impl="xla")
    shards = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=tuple(rules.spec(axes) for axes in contract.COMMIT_AXES),
        out_specs=rules.spec(contract.COMMIT_OUT_AXES),
    )
    want = jax.jit(call)(*args, length)
    assert_close("op", "commit", jax.jit(shards)(*args[1:], length), want[1])


def test_what_cannot_be_served_is_named():
    x = {n: jnp.asarray(a) for n, a in inputs(TIME, "weak").items()}
    call = lambda impl="xla", chunk=8, **other: gated_delta.__wrapped__(
        *({**x, **other}[n] for n in NAMES), chunk=chunk, impl=impl
    )
    with pytest.raises(
        ValueError, match="gated_delta cannot run as 'cuda': implementations are reference, xla"
    ):
        call("cuda")
    with pytest.raises(ValueError, match="v has dtype bfloat16: expected float32"):
        call(v=x["v"].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="v has 3 heads and k 2: expected a multiple"):
        call(v=x["v"][:, :, :3])
    with pytest.raises(ValueError, match="chunk is 0: expected a positive"):
        call(chunk=0)
