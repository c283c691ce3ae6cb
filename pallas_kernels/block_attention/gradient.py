"""The backward pass of the kernels: that of xla, recomputed from the inputs."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from pallas_kernels.block_attention import xla


def with_xla_gradient(
    forward: Callable[..., Array],
    q: Array,
    k: Array,
    v: Array,
    group: Any,
    limit: Array,
    own: Any,
    *,
    scale: float,
) -> Array:
    """forward(q, k, v, group, limit, own), differentiable in q, k, v and own's k and v."""
    floats = (q, k, v) if own is None else (q, k, v, own.k, own.v)
    places = (group, limit, None if own is None else own.valid)

    def arguments(floats: tuple, places: tuple) -> tuple:
        blocks = None if own is None else type(own)(*floats[3:], places[2])
        return *floats[:3], *places[:2], blocks

    def plain(floats: tuple, places: tuple) -> Array:
        return xla.block_attention(*arguments(floats, places), scale=scale, differentiable=True)

    @jax.custom_vjp
    def call(floats: tuple, places: tuple) -> Array:
        return forward(*arguments(floats, places))

    def backward(saved: tuple, cotangent: Array) -> tuple:
        floats, places = saved
        _, pull = jax.vjp(lambda f: plain(f, places), floats)
        return *pull(cotangent), None

    call.defvjp(lambda *saved: (call(*saved), saved), backward)
    return call(floats, places)
