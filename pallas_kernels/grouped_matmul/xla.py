"""Two forms: a loop over the used tiles, and batched matmuls over all of them.

The loop reads the weights of touched experts only, which is what a forward pass of few rows is
bound by. A differentiated call has many rows in every tile: there the gathered weights are small
beside the rows, and one batched matmul does without the loop's many small operations.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from pallas_kernels.grouped_matmul.layout import RunTiles, through_tiles
from pallas_kernels.grouped_matmul.math import glu

UNROLL = 32  # weight rows of one step of `_by_rows`


def expert_glu(
    x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array, *, tile: int
) -> Array:
    """See `api.expert_glu`."""
    return through_tiles(glu_tiles, x, expert, weight, valid, w_in, w_out, tile=tile)


@jax.custom_vjp
def glu_tiles(x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array) -> Array:
    """Tiles [tiles, tile, width] through the MLP of their expert; 0 beyond the first `used`."""

    def step(t: Array, out: Array) -> Array:
        e = _at(tile_expert, t)
        h = glu(_matmul(_at(x, t), w_in, e))
        return lax.dynamic_update_index_in_dim(out, _matmul(h, w_out, e), t, 0)

    return lax.fori_loop(0, used, step, jnp.zeros(x.shape, x.dtype))


def _at(a: Array, i: Array) -> Array:
    # A plain slice: indexing with `a[i]` is a gather to XLA, which copies the array in a loop.
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def _matmul(x: Array, w: Array, e: Array) -> Array:
    """x @ w[e]."""
    whole = lambda x, w, e: jnp.matmul(x, _at(w, e))
    if x.shape[0] > 1:
        return whole(x, w, e)
    return lax.platform_dependent(x, w, e, cpu=_by_rows, default=whole)


def _by_rows(x: Array, w: Array, e: Array) -> Array:
    """x [1, in] @ w[e] in one pass over w[e].

    XLA on CPU has no matmul that reads through a dynamic slice: it copies the slice first (jax
    0.11), which costs a single row more than the product. Slices that are summed element by element
    are fused instead. Each step adds up by itself, which also keeps float32 rounding small.
    """
    depth, width = w.shape[1:]
    steps = next(s for s in range(-(-depth // UNROLL), depth + 1) if depth % s == 0)
    at_once = depth // steps

    def step(s: Array, total: Array) -> Array:
        rows = [s * at_once + i for i in range(at_once)]
        product = lambda i: (
            lax.dynamic_slice(x, (0, i), (1, 1)).astype(jnp.float32)
            * lax.dynamic_slice(w, (e, i, 0), (1, 1, width))[0].astype(jnp.float32)
        )
        return total + sum(map(product, rows[1:]), start=product(rows[0]))

    return lax.fori_loop(0, steps, step, jnp.zeros((1, width), jnp.float32)).astype(x.dtype)


def _batched(x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array) -> Array:
    h = glu(jnp.einsum("trd,tdf->trf", x, w_in[tile_expert]))
    live = (jnp.arange(x.shape[0]) < used)[:, None, None]
    h = jnp.where(live, h, jnp.zeros((), x.dtype))
    return jnp.einsum("trf,tfd->trd", h, w_out[tile_expert])


def _forward(
    x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array
) -> tuple[Array, tuple]:
    batched = lambda x, w_in, w_out: _batched(x, w_in, w_out, tile_expert, used)
    y, backward = jax.vjp(batched, x, w_in, w_out)
    return y, (backward, tile_expert, used)


def _backward(saved: tuple, dy: Array) -> tuple:
    backward, *integers = saved
    none = [np.zeros(a.shape, jax.dtypes.float0) for a in integers]
    return *backward(dy), *none


glu_tiles.defvjp(_forward, _backward)


def with_gradient(launch: RunTiles) -> Callable[..., Array]:
    """`launch`, which is `glu_tiles` by other means, with the gradient of this module's."""
    run = jax.custom_vjp(launch)

    def backward(saved: tuple[Array, ...], dy: Array) -> tuple:
        _, residuals = _forward(*saved)
        return _backward(residuals, dy)

    run.defvjp(lambda *args: (launch(*args), args), backward)
    return run
