"""Token-serial gated delta rule, as the formula says it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def gated_delta(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *, chunk: int
) -> tuple[Array, Array]:
    """See `api.gated_delta`; the chunk length plays no part."""
    del chunk
    group = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(x, group, axis=2) for x in (q, k))

    def step(s: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta = token
        s = jnp.exp(g)[..., None, None] * s
        error = v - jnp.einsum("rhkv,rhk->rhv", s, k, precision=lax.Precision.HIGHEST)
        s = s + k[..., :, None] * (beta[..., None] * error)[..., None, :]
        return s, jnp.einsum("rhkv,rhk->rhv", s, q, precision=lax.Precision.HIGHEST)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta))
    state, out = lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state
