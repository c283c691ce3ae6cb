"""Token-serial gated delta rule, as the formula says it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def _run(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    begins: Array | None,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """For every position: read-out, what it writes, and the state before it; and the last state."""
    valid = jnp.ones(k.shape[:2], bool)
    if length is not None:
        valid = jnp.arange(k.shape[1])[None] < length[:, None]
    keep = lambda x: jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, 0.0)
    group = v.shape[2] // k.shape[2]
    q, k, v, g, beta = (keep(x) for x in (q, k, v, g, beta))
    q, k = (jnp.repeat(x, group, axis=2) for x in (q, k))
    begins = jnp.zeros_like(valid) if begins is None else begins & valid

    def step(s: Array, token: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        q, k, v, g, beta, begins = token
        before = s
        s = jnp.where(begins[:, None, None, None], 0.0, s)
        s = jnp.exp(g)[..., None, None] * s
        error = v - jnp.einsum("rhkv,rhk->rhv", s, k, precision=lax.Precision.HIGHEST)
        new = beta[..., None] * error
        s = s + k[..., :, None] * new[..., None, :]
        out = jnp.einsum("rhkv,rhk->rhv", s, q, precision=lax.Precision.HIGHEST)
        return s, (out, new, before)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta, begins))
    state, steps = lax.scan(step, state, tokens)
    return *jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), steps), state


def gated_delta(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    begins: Array | None, *, chunk: int,
) -> tuple[Array, Array]:  # fmt: skip
    """See `api.gated_delta`; the chunk length plays no part."""
    del chunk
    out, _, _, state = _run(q, k, v, g, beta, state, length, begins)
    return out, state


def gated_delta_trace(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    begins: Array | None, *, chunk: int,
) -> tuple[Array, Array, tuple[Array, ...]]:  # fmt: skip
    """See `api.gated_delta_trace`."""
    time = k.shape[1]
    chunk = min(chunk, time)
    out, new, before, last = _run(q, k, v, g, beta, state, length, begins)
    if begins is not None:
        g = jnp.where(begins[..., None], -jnp.inf, g)
    past = (
        jnp.arange(time)[None]
        < (jnp.full(k.shape[:1], time) if length is None else length)[:, None]
    )
    k, g = jnp.where(past[..., None, None], k, 0.0), jnp.where(past[..., None], g, 0.0)
    pad = lambda x: jnp.pad(x, ((0, 0), (0, -time % chunk), *((0, 0),) * (x.ndim - 2)))
    split = lambda x: pad(x).reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return out, last, (before[:, ::chunk], split(k), split(new), split(g))


def commit_state(
    k: Array, v: Array, g: Array, beta: Array, state: Array, count: Array, *, chunk: int
) -> Array:
    """See `api.commit_state`."""
    return gated_delta(jnp.zeros_like(k), k, v, g, beta, state, count, None, chunk=chunk)[1]
