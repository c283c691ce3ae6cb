"""Two forms: a loop over the used tiles, and batched matmuls over all of them.

The loop reads the weights of touched experts only, which is what a forward pass of few rows is
bound by. A differentiated call has many rows in every tile: where the gathered weights are small,
one batched matmul does without the loop's many small operations.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from pallas_kernels.grouped_matmul.layout import through_tiles
from pallas_kernels.grouped_matmul.math import glu

# Single rows whose experts are fetched together on CPU. XLA copies what it slices before a matmul
# there; one copy of all of them, and one batched product, run on all cores, a loop's on one.
FETCHED = 32
# Weights that a differentiated call may gather, one copy of an expert for each of its tiles.
# Beyond, it loops over the tiles in both directions: 35B shapes would gather tens of GiB.
GATHERED_BYTES = 1 << 28


def expert_glu(
    x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array, *, tile: int
) -> Array:
    """See `api.expert_glu`."""
    return through_tiles(glu_tiles, x, expert, weight, valid, w_in, w_out, tile=tile)


@jax.custom_vjp
def glu_tiles(x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array) -> Array:
    """Tiles [tiles, tile, width] through the MLP of their expert; 0 beyond the first `used`."""
    arrays = (x, w_in, w_out, tile_expert, used)
    if x.shape[1] == 1 and x.shape[0] <= FETCHED:
        return lax.platform_dependent(*arrays, cpu=batched, default=_one_by_one)
    return _one_by_one(*arrays)


def _one_by_one(x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array) -> Array:
    """A loop over the used tiles."""

    def step(t: Array, out: Array) -> Array:
        e = _at(tile_expert, t)
        h = glu(jnp.matmul(_at(x, t), _at(w_in, e)))
        return lax.dynamic_update_index_in_dim(out, jnp.matmul(h, _at(w_out, e)), t, 0)

    return lax.fori_loop(0, used, step, jnp.zeros(x.shape, x.dtype))


def _at(a: Array, i: Array) -> Array:
    # A plain slice: indexing with `a[i]` is a gather to XLA, which copies the array in a loop.
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def batched(x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array) -> Array:
    """`glu_tiles` as batched matmuls on gathered weights."""
    h = glu(jnp.einsum("trd,tdf->trf", x, w_in[tile_expert]))
    live = (jnp.arange(x.shape[0]) < used)[:, None, None]
    h = jnp.where(live, h, jnp.zeros((), x.dtype))
    return jnp.einsum("trf,tfd->trd", h, w_out[tile_expert])


def _forward(
    x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array
) -> tuple[Array, tuple]:
    arrays = (x, w_in, w_out, tile_expert, used)
    gathered = tile_expert.size * (w_in.nbytes + w_out.nbytes) // w_in.shape[0]
    if gathered > GATHERED_BYTES:
        return _one_by_one(*arrays), arrays
    y, backward = jax.vjp(
        lambda x, w_in, w_out: batched(x, w_in, w_out, tile_expert, used), x, w_in, w_out
    )
    return y, (backward, tile_expert, used)


def _backward(saved: Any, dy: Array) -> tuple:
    *floats, tile_expert, used = saved
    none = [np.zeros(a.shape, jax.dtypes.float0) for a in (tile_expert, used)]
    if len(floats) == 1:
        return *floats[0](dy), *none
    x, w_in, w_out = floats
    return *_backward_one_by_one(x, w_in, w_out, tile_expert, used, dy), *none


def _backward_one_by_one(
    x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array, dy: Array
) -> tuple[Array, Array, Array]:
    """A loop over the used tiles; each adds to its expert's gradient, in float32."""

    def step(t: Array, grads: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        e = _at(tile_expert, t)
        tile = (_at(x, t), _at(w_in, e), _at(w_out, e))
        dx, d_in, d_out = jax.vjp(lambda x, a, b: jnp.matmul(glu(jnp.matmul(x, a)), b), *tile)[1](
            _at(dy, t)
        )
        add = lambda total, part: lax.dynamic_update_index_in_dim(
            total, _at(total, e) + part.astype(jnp.float32), e, 0
        )
        put = lax.dynamic_update_index_in_dim(grads[0], dx, t, 0)
        return put, add(grads[1], d_in), add(grads[2], d_out)

    zeros = lambda w: jnp.zeros(w.shape, jnp.float32)
    start = (jnp.zeros_like(x), zeros(w_in), zeros(w_out))
    dx, d_in, d_out = lax.fori_loop(0, used, step, start)
    return dx, d_in.astype(w_in.dtype), d_out.astype(w_out.dtype)


glu_tiles.defvjp(_forward, _backward)
