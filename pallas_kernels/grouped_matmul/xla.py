"""A loop over the used tiles, with a backward pass that adds into one weight gradient in place.

Differentiating a scan over `w[e]` would add a full-size weight cotangent per tile instead.
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
    # A plain slice: indexing with `a[i]` and `.at[i]` are a gather and a scatter to XLA, which
    # copy the whole array in a loop.
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def _forward(x: Array, w: Array, tile_expert: Array, used: Array) -> tuple[Array, tuple]:
    return grouped_matmul(x, w, tile_expert, used), (x, w, tile_expert, used)


def _backward(saved: tuple, dy: Array) -> tuple:
    x, w, tile_expert, used = saved

    def step(t: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        dx, dw = grads
        e, dy_t = _at(tile_expert, t), _at(dy, t)
        dx_t = jnp.einsum("rf,df->rd", dy_t, _at(w, e))
        dw_e = _at(dw, e) + jnp.einsum("rd,rf->df", _at(x, t), dy_t)
        dx = lax.dynamic_update_index_in_dim(dx, dx_t, t, 0)
        return dx, lax.dynamic_update_index_in_dim(dw, dw_e, e, 0)

    dx, dw = lax.fori_loop(0, used, step, (jnp.zeros_like(x), jnp.zeros_like(w)))
    none = lambda a: np.zeros(a.shape, jax.dtypes.float0)
    return dx, dw, none(tile_expert), none(used)


grouped_matmul.defvjp(_forward, _backward)
