"""Workloads of the expert matmuls, with the experts that they touch.

An expert of the 35B model is 3 · 2048 · 512 weights: 6.3 MB in bfloat16, and all 256 of one layer
are 1.6 GB. Specs at that size are compiled only (`aot`); `narrow` ones keep the routing and shrink
the matrices, for tests here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul.api import expert_glu
from pallas_kernels.spec import Floor, Spec


def routing(rows: int, k: int, experts: int, touched: int, key: Array) -> tuple[Array, Array]:
    """Ids [rows, k], ascending in each row, of exactly `touched` experts, and their weights.

    Every touched expert is chosen rows · k // touched times or once more.
    """
    order, mix, which = jax.random.split(key, 3)
    chosen = jax.random.permutation(which, experts)[:touched].astype(jnp.int32)
    places = jax.random.permutation(order, rows)[:, None] * k + jnp.arange(k)[None]
    weight = jax.nn.softmax(jax.random.normal(mix, (rows, k), jnp.float32), axis=-1)
    return jnp.sort(chosen[places % touched], axis=1), weight


def naive(x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array) -> Array:
    """The chosen experts' matrices, fetched for every row; float32 sum as in the formula."""
    gate, up = jnp.split(jnp.einsum("rd,rkdf->rkf", x, w_in[expert]), 2, axis=-1)
    each = jnp.einsum("rkf,rkfd->rkd", jax.nn.silu(gate) * up, w_out[expert])
    y = jnp.sum(weight[..., None] * each.astype(jnp.float32), axis=1)
    return jnp.where(valid[:, None], y, 0.0).astype(x.dtype)


def _spec(
    name: str,
    *,
    rows: int,
    touched: int,
    tile: int,
    width: int,
    hidden: int,
    experts: int,
    k: int,
    dtype: Any,
    uses: set[str],
) -> Spec:
    def inputs(key: Array) -> tuple[Array, ...]:
        choice, *keys = jax.random.split(key, 4)
        expert, weight = routing(rows, k, experts, touched, choice)
        draw = lambda key, shape, fan_in: (
            jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5
        ).astype(dtype)
        x = draw(keys[0], (rows, width), 1)
        w_in = draw(keys[1], (experts, width, 2 * hidden), width)
        w_out = draw(keys[2], (experts, hidden, width), hidden)
        return x, expert, weight, jnp.ones(rows, bool), w_in, w_out

    size = jnp.dtype(dtype).itemsize
    return Spec(
        name=name,
        call=functools.partial(expert_glu, tile=tile),
        inputs=inputs,
        floor=Floor(
            bytes=size * (3 * touched * width * hidden + 2 * rows * width) + 8 * rows * k,
            flops=6 * rows * k * width * hidden,
        ),
        naive=naive,
        torch="expert_glu",
        uses=frozenset(uses),
    )


_35B = functools.partial(
    _spec, width=2048, hidden=512, experts=256, k=8, dtype=jnp.bfloat16, uses={"aot"}
)
_NARROW = functools.partial(
    _spec, width=64, hidden=32, experts=256, k=8, dtype=jnp.float32, uses={"test"}
)
_NANO = functools.partial(
    _spec, width=128, hidden=48, experts=32, k=4, dtype=jnp.float32, uses={"test", "bench"}
)
_17M = functools.partial(  # machines.md section 2
    _spec, width=256, hidden=128, experts=16, k=4, dtype=jnp.float32, uses={"test", "bench"}
)
# Tiles as the model chooses them: 1 at one token a row, else what one batch row brings an expert.
SPECS: tuple[Spec, ...] = (
    _35B("decode_35b", rows=1, touched=8, tile=1),
    _35B("preview_35b", rows=32, touched=150, tile=8),
    # These two are the program of preview_35b with other experts: nothing new to compile.
    _35B("preview_35b_coreset", rows=32, touched=60, tile=8, uses=set()),
    _35B("commit_35b", rows=32, touched=163, tile=8, uses=set()),  # qwen36 section 4: uniform
    _35B("preview_35b_batch8", rows=256, touched=256, tile=8),
    # Hopper refuses float32: compiled by name, for TPUs alone.
    _35B("preview_35b_f32", rows=32, touched=150, tile=8, dtype=jnp.float32, uses=set()),
    _NARROW("decode_35b_narrow", rows=1, touched=8, tile=1),
    _NARROW("preview_35b_narrow", rows=32, touched=150, tile=8),
    _NARROW("preview_35b_coreset_narrow", rows=32, touched=60, tile=8),
    _NANO("decode_nano", rows=1, touched=4, tile=1, uses={"bench"}),
    _NANO("preview_nano", rows=32, touched=24, tile=8),
    _NANO("prefill_nano", rows=256, touched=32, tile=32),
    _17M("decode_17m", rows=1, touched=4, tile=1),
    _17M("preview_17m", rows=32, touched=16, tile=8, uses={"bench"}),
    _17M("prefill_17m", rows=512, touched=16, tile=128, uses={"bench"}),
)
