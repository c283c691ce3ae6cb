"""Real workloads: prefill, commit and decode of Clover-35B-A3B and of clover-nano."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.gated_delta.api import commit_state, gated_delta, gated_delta_trace
from pallas_kernels.gated_delta.math import chunked_flops
from pallas_kernels.gated_delta.reference import gated_delta as token_serial
from pallas_kernels.spec import Floor, Spec

# key heads, value heads, key channels, value channels, chunk: presets.py of the model
_SHAPES = {"35b": (16, 32, 128, 128, 64), "nano": (2, 4, 32, 32, 16)}


def _inputs(key: Array, rows: int, time: int, model: str) -> tuple[Array, ...]:
    """q, k, v, g, beta, state as a layer makes them: heads from keeping all to forgetting fast."""
    key_heads, heads, width, value, _ = _SHAPES[model]
    keys = jax.random.split(key, 6)
    draw = lambda i, *shape: jax.random.normal(keys[i], shape, jnp.float32)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    gates = (rows, time, heads)
    return (
        unit(draw(0, rows, time, key_heads, width)) * jnp.float32(width**-0.5),
        unit(draw(1, rows, time, key_heads, width)),
        draw(2, *gates, value),
        -jnp.exp(2.0 * draw(3, *gates) - 3.0),
        jax.nn.sigmoid(draw(4, *gates)),
        draw(5, rows, heads, width, value),
    )


def _floor(rows: int, time: int, model: str, *, reads: int, kept: int = 0) -> Floor:
    key_heads, heads, width, value, chunk = _SHAPES[model]
    state = heads * width * value
    tokens = time * (reads * key_heads * width + reads * heads * value + 2 * heads)
    extra = kept * (-(-time // chunk) * state + time * heads * value)
    flops = chunked_flops(
        rows, time, heads, heads // key_heads, width, value, chunk=min(chunk, time), reads=reads
    )
    if time == 1:  # the recurrence: S^T k, S + k v'^T, S^T q
        flops = rows * 2 * state * (reads + 1)
    return Floor(bytes=4 * rows * (2 * state + tokens + extra), flops=flops)


def _read(name: str, rows: int, time: int, model: str, *uses: str) -> Spec:
    return Spec(
        name=f"{name}_{model}",
        call=functools.partial(gated_delta, chunk=_SHAPES[model][-1]),
        inputs=functools.partial(_inputs, rows=rows, time=time, model=model),
        floor=_floor(rows, time, model, reads=2),
        torch="gated_delta",
        uses=frozenset(uses),
    )


def _trace(name: str, rows: int, time: int, model: str, *uses: str) -> Spec:
    return Spec(
        name=f"{name}_{model}",
        call=functools.partial(gated_delta_trace, chunk=_SHAPES[model][-1]),
        inputs=functools.partial(_inputs, rows=rows, time=time, model=model),
        floor=_floor(rows, time, model, reads=2, kept=1),
        naive=lambda q, k, v, g, beta, state: token_serial(
            q, k, v, g, beta, state, None, None, chunk=1
        ),
        uses=frozenset(uses),
    )


def _truncated(name: str, rows: int, time: int, model: str, *uses: str) -> Spec:
    """Rows accept from none to all of a block; the floor is that of a full one."""

    def inputs(key: Array) -> tuple[Any, ...]:
        _, *rest = _inputs(key, rows, time, model)
        return *rest, jnp.round(jnp.linspace(0, time, rows)).astype(jnp.int32)

    def naive(k: Array, v: Array, g: Array, beta: Array, state: Array, count: Array) -> Array:
        return token_serial(k, k, v, g, beta, state, count, None, chunk=1)[1]

    return Spec(
        name=f"{name}_{model}",
        call=functools.partial(commit_state, chunk=_SHAPES[model][-1]),
        inputs=inputs,
        floor=_floor(rows, time, model, reads=1),
        naive=naive,
        uses=frozenset(uses),
    )


SPECS = (
    _read("decode", 1, 1, "35b", "test", "bench", "aot"),
    _read("commit", 1, 32, "35b", "test", "bench", "aot"),
    _read("commit_rows8", 8, 32, "35b", "aot"),
    _truncated("truncated_commit", 4, 32, "35b", "bench", "aot"),
    _read("prefill_256", 1, 256, "35b", "bench", "aot"),
    _read("prefill_4096", 1, 4096, "35b", "aot"),
    _trace("train_512", 1, 512, "35b"),
    _read("decode", 1, 1, "nano", "bench"),
    _read("commit", 4, 32, "nano", "bench"),
    _truncated("truncated_commit", 4, 32, "nano", "test", "bench"),
    _read("prefill_512", 1, 512, "nano", "test", "bench"),
    _trace("train", 8, 256, "nano", "bench"),
)
