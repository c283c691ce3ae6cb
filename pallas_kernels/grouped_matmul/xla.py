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
    out = jnp.zeros((*x.shape[:2], w.shape[2]), x.dtype)
    return lax.fori_loop(
        0, used, lambda t, out: out.at[t].set(jnp.matmul(x[t], w[tile_expert[t]])), out
    )


def _forward(x: Array, w: Array, tile_expert: Array, used: Array) -> tuple[Array, tuple]:
    return grouped_matmul(x, w, tile_expert, used), (x, w, tile_expert, used)


def _backward(saved: tuple, dy: Array) -> tuple:
    x, w, tile_expert, used = saved

    def step(t: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        dx, dw = grads
        e = tile_expert[t]
        dx = dx.at[t].set(jnp.einsum("rf,df->rd", dy[t], w[e]))
        return dx, dw.at[e].add(jnp.einsum("rd,rf->df", x[t], dy[t]))

    dx, dw = lax.fori_loop(0, used, step, (jnp.zeros_like(x), jnp.zeros_like(w)))
    none = lambda a: np.zeros(a.shape, jax.dtypes.float0)
    return dx, dw, none(tile_expert), none(used)


grouped_matmul.defvjp(_forward, _backward)
