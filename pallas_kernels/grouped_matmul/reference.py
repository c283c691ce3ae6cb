"""Row by row, expert by expert, in float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def expert_glu(
    x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array, *, tile: int
) -> Array:
    """See `api.expert_glu`."""
    del tile
    wide = lambda a: a.astype(jnp.float32)
    matmul = lambda a, b: jnp.matmul(a, wide(b), precision=lax.Precision.HIGHEST)
    here = valid[:, None] & (expert >= 0) & (expert < w_in.shape[0])

    def row(args: tuple[Array, ...]) -> Array:
        x, expert, weight, here = args
        y = jnp.zeros_like(x)
        for j in range(expert.shape[0]):
            gate, up = jnp.split(matmul(x, w_in[expert[j]]), 2)
            each = matmul(jax.nn.silu(gate) * up, w_out[expert[j]])
            y = y + jnp.where(here[j], weight[j] * each, 0.0)
        return y

    rows = jnp.where(valid[:, None], wide(x), 0.0)
    return lax.map(row, (rows, expert, weight, here)).astype(x.dtype)
