"""Both Pallas forms of the gated delta rule in the interpreters, and lowered for their machines.

Past a row's length the operands are NaN, and so is memory that nobody wrote.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.gated_delta import (
    boundary_state,
    commit_state,
    gated_delta,
    gated_delta_trace,
)
from pallas_kernels.gated_delta.api import __name__ as API
from pallas_kernels.gated_delta.specs import SPECS
from pallas_kernels.registry import explain, unsupported
from tests.helpers.limits import assert_close

pytestmark = pytest.mark.slow  # interpreters

NAMES = ("q", "k", "v", "g", "beta", "state")
WIDTH = 128
QUICK = {"xla_backend_optimization_level": 0}
MACHINE = {"tpu": "v5e", "gpu": "h200"}
PRIMITIVE = {"tpu": "pallas_call", "gpu": "mpmd_map"}


def inputs(
    time: int, *, rows: int = 1, heads: int = 1, value: int = WIDTH, decays: tuple = ()
) -> list[np.ndarray]:
    rng = np.random.default_rng(time)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    gates = (rows, time, heads)
    level = rng.choice([-0.001, -0.01, -5, -50], gates)
    if decays:  # one a row
        level = np.broadcast_to(np.array(decays)[:, None, None], gates)
    return [
        unit(draw(rows, time, 1, WIDTH)) / np.float32(np.sqrt(WIDTH)),
        unit(draw(rows, time, 1, WIDTH)),
        draw(*gates, value),
        (level * rng.uniform(0.5, 1, gates)).astype(np.float32),
        rng.uniform(0, 1, gates).astype(np.float32),
        draw(rows, heads, WIDTH, value),
    ]


def poisoned(args: list[np.ndarray], length: list[int]) -> list[np.ndarray]:
    def put(a: np.ndarray) -> np.ndarray:
        valid = np.arange(a.shape[1])[None] < np.array(length)[:, None]
        return np.where(valid.reshape(*valid.shape, *(1,) * (a.ndim - 2)), a, np.float32(np.nan))

    return arrays([*(put(a) for a in args[:5]), args[5]])


def arrays(args: list[np.ndarray]) -> list[jax.Array]:
    return [jnp.asarray(a) for a in args]


@functools.partial(jax.jit, static_argnames="chunk", compiler_options=QUICK)
def reference(args, length, *, chunk=8):
    return gated_delta(*args, length, chunk=chunk, impl="reference")


def check(
    machine: str, args: list[np.ndarray], length: list[int], *, chunk: int, commit: bool = False
) -> None:
    """Read-outs, last state and perhaps the commit of the same part, in the interpreter."""
    count, impl = jnp.array(length, jnp.int32), f"pallas_{machine}"
    want_out, want_state = reference(args, count)
    bad = poisoned(args, length)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(bad, count):
        out, state = gated_delta(*bad, count, chunk=chunk, impl=impl)
        return out, state, commit_state(
            *bad[1:], count, chunk=chunk, impl=impl
        ) if commit else state  # fmt: skip

    with compat.interpreted(machine):
        out, state, committed = run(bad, count)
    assert_close("op", "out", out, want_out)
    assert_close("op", "state", state, want_state)
    np.testing.assert_array_equal(committed, state)


def gradient(function, args):
    return jax.jit(jax.grad(function), compiler_options=QUICK)(args)


# A chunk is 8 here: one less, itself, one more, one; whole chunks past a length; an empty row.
@pytest.mark.parametrize(
    ("time", "length"), ((1, [1]), (7, [7]), (8, [8]), (9, [9]), (24, [17, 0]))
)
def test_tpu_kernel(time, length):
    check("tpu", inputs(time, rows=len(length)), length, chunk=8, commit=time == 24)


def test_tpu_kernel_on_whole_tiles_of_heads_and_a_long_chunk():
    """Sixteen key heads are two grid steps, eight sublanes each."""
    args = inputs(9)
    args = [np.repeat(a, 16, axis=1 if a is args[5] else 2) for a in args]
    check("tpu", args, [9], chunk=64)


# Tokens come in tiles of 16 or 8 where these divide, two in flight; else all at once, up to 32.
@pytest.mark.parametrize(
    ("time", "length"), ((1, [1]), (31, [31]), (32, [32]), (40, [40]), (40, [9, 0]))
)
def test_gpu_kernel(time, length):
    check("gpu", inputs(time, rows=len(length), value=64), length, chunk=8, commit=0 in length)


def test_tpu_kernel_on_groups():
    check("tpu", inputs(9, heads=2), [9], chunk=8)


def test_gpu_kernel_on_groups_and_parts():
    check("gpu", inputs(5, heads=2, value=128), [5], chunk=8)


@pytest.mark.parametrize("machine", ("tpu", "gpu"))
def test_strong_decays_stay_finite(machine):
    check(machine, inputs(16, rows=3, decays=(-0.01, -5, -50)), [16, 16, 16], chunk=16)


def test_gpu_kernel_has_no_races(capfd):
    args = arrays(inputs(48, value=64))
    with compat.interpreted("gpu", detect_races=True):
        gated_delta(*args, chunk=8, impl="pallas_gpu")[0].block_until_ready()
        commit_state(
            *args[1:], jnp.array([48], jnp.int32), chunk=8, impl="pallas_gpu"
        ).block_until_ready()
    assert "RACE" not in "".join(capfd.readouterr())


def test_tpu_trace_gives_every_boundary():
    args = inputs(19)
    count = jnp.array([17], jnp.int32)
    with compat.interpreted("tpu"):
        out, state, trace = gated_delta_trace(
            *poisoned(args, [17]), count, chunk=8, impl="pallas_tpu"
        )
    want_out, want_state = reference(args, count)
    assert_close("op", "out", out, want_out)
    assert_close("op", "state", state, want_state)
    assert trace.v_new.shape == (1, 3, 8, 1, WIDTH)
    for t in (0, 8, 17):
        at = jnp.array([t], jnp.int32)
        assert_close("op", f"state after {t}", boundary_state(trace, at), reference(args, at)[1])


@pytest.mark.parametrize("machine", ("tpu", "gpu"))
def test_gradients_are_those_of_the_formula(machine):
    """By name, of read-outs and state, with what is past the length cut off."""
    args, length = arrays(inputs(9)), jnp.array([7], jnp.int32)
    w_out, w_state = np.cos(np.arange(9)), np.sin(np.arange(WIDTH))

    def weighted(args, impl):
        out, state = gated_delta(*args, length, chunk=8, impl=impl)
        total = jnp.sum(out * w_out.astype(np.float32)[None, :, None, None])
        return total + jnp.sum(state * w_state.astype(np.float32)[None, None, None])

    want = gradient(functools.partial(weighted, impl="reference"), args)
    with compat.interpreted(machine):
        got = gradient(functools.partial(weighted, impl=f"pallas_{machine}"), args)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_close("gradient", f"gradient of {name}", a, b)


def test_tpu_trace_is_differentiable():
    args, count = arrays(inputs(9)), jnp.array([5], jnp.int32)

    def traced(args, impl):
        out, state, trace = gated_delta_trace(*args, chunk=8, impl=impl)
        return jnp.sum(out) + jnp.sum(state) + jnp.sum(boundary_state(trace, count))

    want = gradient(functools.partial(traced, impl="reference"), args)
    with compat.interpreted("tpu"):
        got = gradient(functools.partial(traced, impl="pallas_tpu"), args)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_close("gradient", f"gradient of {name}", a, b)


LOWERED = ("decode_35b", "commit_35b", "truncated_commit_35b", "prefill_256_35b")


@pytest.mark.parametrize("machine", ("tpu", "gpu"))
@pytest.mark.parametrize("name", LOWERED)
def test_the_kernel_that_was_named_is_lowered(machine, name):
    spec = next(s for s in SPECS if s.name == name)
    call = functools.partial(spec.call, impl=f"pallas_{machine}")
    with compat.target(compat.MACHINES[MACHINE[machine]]):
        traced = jax.jit(call).trace(*spec.shapes())
        assert PRIMITIVE[machine] in str(traced.jaxpr)
        platform = "cuda" if machine == "gpu" else "tpu"
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("mosaic_gpu" if machine == "gpu" else "tpu_custom_call") in text


def test_refusals_are_text():
    shapes = lambda time, heads, width: [
        jax.ShapeDtypeStruct(s, jnp.float32)
        for s in (
            (1, time, 2, width), (1, time, 2, width), (1, time, heads, width),
            (1, time, heads), (1, time, heads), (1, heads, width, width),
        )
    ]  # fmt: skip
    why = lambda machine, *shape, chunk=64, begins=(): unsupported(
        API, "gated_delta", f"pallas_{machine}", *shapes(*shape), None, *begins, chunk=chunk
    )
    begins = (jax.ShapeDtypeStruct((1, 8), jnp.bool_),)
    assert "needs a tpu and this is a cpu" in str(why("tpu", 8, 4, 128))
    with compat.target(compat.MACHINES["v5e"]):
        assert "32 key and 32 value channels" in str(why("tpu", 8, 4, 32))
        assert "chunk is 12: it must be a multiple of 8" in str(why("tpu", 64, 4, 128, chunk=12))
        assert "bytes of vector memory" in str(why("tpu", 128, 64, 128, chunk=128))
        assert why("tpu", 8, 4, 128) is None
        assert "begins is given" in str(why("tpu", 8, 4, 128, begins=begins))
        said = explain(API, "gated_delta_trace", *shapes(8, 4, 128), None, *begins, chunk=8)
        assert "begins is given" in said["pallas_tpu"] and said["xla"] == "serves this call"
    with compat.target(compat.MACHINES["h200"]):
        assert "64 key and 64 value channels" in str(why("gpu", 8, 4, 64))
        assert "begins is given" in str(why("gpu", 8, 4, 128, begins=begins))
        assert "time is 77: above 32 positions it must be a multiple of 8" in str(
            why("gpu", 77, 4, 128)
        )
        said = explain(API, "gated_delta_trace", *shapes(8, 4, 128), None, chunk=8)
        assert said["pallas_gpu"] == "implementations are reference, xla, pallas_tpu"
        assert said["xla"] == "serves this call"
