"""Two forms: a loop over the used tiles, and batched matmuls over all of them.

The loop reads the weights of touched experts only, which is what a forward pass of few rows is
bound by. A differentiated call has many rows in every tile: there the gathered weights are small
beside the rows, and one batched matmul does without the loop's many small operations.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array


@jax.custom_vjp
def grouped_glu(x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array) -> Array:
    """See `api.grouped_glu`."""

    def step(t: Array, out: Array) -> Array:
        e = _at(tile_expert, t)
        h = _glu(jnp.matmul(_at(x, t), _at(w_in, e)))
        return lax.dynamic_update_index_in_dim(out, jnp.matmul(h, _at(w_out, e)), t, 0)

    return lax.fori_loop(0, used, step, jnp.zeros((*x.shape[:2], w_out.shape[2]), x.dtype))


def _at(a: Array, i: Array) -> Array:
    # A plain slice: indexing with `a[i]` is a gather to XLA, which copies the array in a loop.
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def _glu(gate_up: Array) -> Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _batched(x: Array, w_in: Array, w_out: Array, tile_expert: Array, used: Array) -> Array:
    h = _glu(jnp.einsum("trd,tdf->trf", x, w_in[tile_expert]))
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


grouped_glu.defvjp(_forward, _backward)
