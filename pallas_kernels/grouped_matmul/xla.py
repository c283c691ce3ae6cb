"""Two forms: a loop over the used tiles, and one batched matmul over all of them.

The loop reads the weights of touched experts only, which is what a forward pass of few rows is
bound by. A differentiated call has many rows in every tile: there the gathered weights are small
beside the rows, and the batched form is twice as fast forward and backward (benchmark in README).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array


@jax.custom_vjp
def grouped_matmul(x: Array, w: Array, tile_expert: Array, used: Array) -> Array:
    """See `api.grouped_matmul`."""

    def step(t: Array, out: Array) -> Array:
        y = jnp.matmul(_at(x, t), _at(w, _at(tile_expert, t)))
        return lax.dynamic_update_index_in_dim(out, y, t, 0)

    return lax.fori_loop(0, used, step, jnp.zeros((*x.shape[:2], w.shape[2]), x.dtype))


def _at(a: Array, i: Array) -> Array:
    # A plain slice: indexing with `a[i]` is a gather to XLA, which copies the array in a loop.
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def _batched(x: Array, w: Array, tile_expert: Array, used: Array) -> Array:
    live = (jnp.arange(x.shape[0]) < used)[:, None, None]
    return jnp.where(live, jnp.einsum("trd,tdf->trf", x, w[tile_expert]), jnp.zeros((), x.dtype))


def _forward(x: Array, w: Array, tile_expert: Array, used: Array) -> tuple[Array, tuple]:
    return _batched(x, w, tile_expert, used), (x, w, tile_expert, used)


def _backward(saved: tuple, dy: Array) -> tuple:
    x, w, tile_expert, used = saved
    dx, dw = jax.vjp(lambda x, w: _batched(x, w, tile_expert, used), x, w)[1](dy)
    none = lambda a: np.zeros(a.shape, jax.dtypes.float0)
    return dx, dw, none(tile_expert), none(used)


grouped_matmul.defvjp(_forward, _backward)
