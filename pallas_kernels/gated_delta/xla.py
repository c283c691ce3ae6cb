"""Chunked gated delta rule.

In a chunk, with c = cumsum(g), D_ij = e^{c_i - c_j} for j <= i and A the strict lower part of
beta_i (k_i . k_j) D_ij:

    U = (I + A)^-1 (beta v)      W = (I + A)^-1 (beta e^c k)      V' = U - W S
    o = (e^c q) S + ((q k^T) o D) V'          S <- e^{c_C} S + (e^{c_C - c} k)^T V'

Only differences of cumulative log decays are exponentiated, and only where they are <= 0: the
factored form e^{c_i} e^{-c_j} overflows under strong decay (pytorch/executorch#21417).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# The state and its solve stay float32: accelerators would round the inputs.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class DeltaTrace(NamedTuple):
    """What the state after any position is built from (heads split as key_heads x group)."""

    states: Float[Array, "rows bounds key_heads group key value"]  # before chunk 0, 1, ..., after
    k: Float[Array, "rows chunks chunk key_heads key"]
    v_new: Float[Array, "rows chunks chunk key_heads group value"]  # V'
    g: Float[Array, "rows chunks chunk key_heads group"]  # log decay


def gated_delta(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *, chunk: int
) -> tuple[Array, Array]:
    """See `api.gated_delta`."""
    out, trace = gated_delta_trace(q, k, v, g, beta, state, chunk=chunk)
    return out, _merge_heads(trace.states[:, -1])


def gated_delta_trace(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *, chunk: int
) -> tuple[Array, DeltaTrace]:
    """See `api.gated_delta_trace`."""
    rows, time, key_heads, _ = q.shape
    group = v.shape[2] // key_heads
    chunk = min(chunk, time)
    chunks = -(-time // chunk)
    split = lambda x, *heads: _pad_time(x, chunks * chunk).reshape(
        rows, chunks, chunk, *heads, *x.shape[3:]
    )
    q, k = split(q, key_heads), split(k, key_heads)
    v, g, beta = (split(x, key_heads, group) for x in (v, g, beta))
    state = state.reshape(rows, key_heads, group, *state.shape[2:])

    c = jnp.cumsum(g, axis=2)
    c_heads = jnp.moveaxis(c, 2, -1)  # [rows, chunks, key_heads, group, chunk]
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    # sum of g over j < m <= i, not c_i - c_j: that cancels under strong decay.
    g_heads = jnp.moveaxis(g, 2, -1)[..., :, None]
    between = jnp.cumsum(jnp.where(jnp.tril(lower, -1), g_heads, 0.0), axis=-2)
    decay = jnp.exp(jnp.where(lower, between, -jnp.inf))
    kk = _einsum("rnihk,rnjhk->rnhij", k, k)
    beta_heads = jnp.moveaxis(beta, 2, -1)
    a = jnp.where(jnp.tril(lower, -1), beta_heads[..., :, None] * kk[:, :, :, None] * decay, 0.0)
    beta_v = jnp.moveaxis(beta[..., None] * v, 2, -2)  # [rows, chunks, key_heads, group, chunk, v]
    beta_k = (beta_heads * jnp.exp(c_heads))[..., None] * jnp.moveaxis(k, 2, -2)[:, :, :, None]
    solved = _solve_unit_lower(a, jnp.concatenate([beta_v, beta_k], axis=-1))
    u, w = jnp.split(solved, [v.shape[-1]], axis=-1)
    c_end = c_heads[..., -1:]

    def step(s: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        k, u, w, to_end, c_last = x
        v_new = u - _einsum("rhgck,rhgkv->rhgcv", w, s)
        written = _einsum("rchk,rhgcv->rhgkv", k, jnp.exp(to_end)[..., None] * v_new)
        return jnp.exp(c_last)[..., None] * s + written, (s, v_new)

    xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (k, u, w, between[..., -1, :], c_end))
    last, (before, v_new) = lax.scan(step, state, xs)
    states = jnp.moveaxis(jnp.concatenate([before, last[None]]), 0, 1)
    v_new = jnp.moveaxis(v_new, 0, 1)

    scores = _einsum("rnihk,rnjhk->rnhij", q, k)[:, :, :, None] * decay
    read = _einsum("rnihk,rnhgkv->rnhgiv", q, states[:, :-1])
    out = jnp.exp(c_heads)[..., None] * read + _einsum("rnhgij,rnhgjv->rnhgiv", scores, v_new)
    out = jnp.moveaxis(out, -2, 2).reshape(rows, chunks * chunk, key_heads * group, -1)[:, :time]
    return out, DeltaTrace(states, k, jnp.moveaxis(v_new, -2, 2), g)


def boundary_state(
    trace: DeltaTrace, count: Int[Array, " rows"]
) -> Float[Array, "rows value_heads key value"]:
    """The state after the first `count` positions of each row, 0 <= count <= time.

    S_t = e^{c_t} S_0 + sum_{s<=t} e^{c_t - c_s} k_s V'_s^T, from the chunk that holds t.
    """
    chunk = trace.k.shape[2]
    index = jnp.minimum(count // chunk, trace.k.shape[1] - 1)
    inside = count - index * chunk  # 1..chunk, or 0 before the first position of a chunk
    pick = lambda x: jnp.take_along_axis(
        x, index.reshape(-1, *(1,) * (x.ndim - 1)), axis=1
    ).squeeze(1)
    state, k, v_new, g = (pick(x) for x in trace)
    written = (jnp.arange(chunk)[None] < inside[:, None])[..., None, None]
    # Log decay from after each position to the boundary, and of the whole chunk up to it.
    onward = lax.cumsum(jnp.where(written, g, 0.0), axis=1, reverse=True)
    after = jnp.concatenate([onward[:, 1:], jnp.zeros_like(onward[:, :1])], axis=1)
    weight = jnp.exp(jnp.where(written, after, -jnp.inf))
    new = _einsum("rchk,rchgv->rhgkv", k, weight[..., None] * v_new)
    return _merge_heads(jnp.exp(onward[:, 0])[..., None, None] * state + new)


def _solve_unit_lower(
    a: Float[Array, "*batch chunk chunk"], b: Float[Array, "*batch chunk width"]
) -> Float[Array, "*batch chunk width"]:
    """(I + a)^-1 b for strictly lower a, by inverting diagonal blocks of doubling size.

    [[P, 0], [Q, R]]^-1 = [[P^-1, 0], [-R^-1 Q P^-1, R^-1]]: block substitution, as stable as the
    row-by-row one, in log2(chunk) batched matmuls. XLA's triangular_solve calls LAPACK once per
    matrix on CPU, which took most of a training step. The product form (I - a)(I + a^2)... is not
    an option: with equal keys its terms grow like binomial coefficients.
    """
    chunk = a.shape[-1]
    size = 1 << (chunk - 1).bit_length()
    batch = a.shape[:-2]
    extra = size - chunk
    a = jnp.pad(a, (*((0, 0),) * len(batch), (0, extra), (0, extra)))
    inverse = jnp.ones((*batch, size, 1, 1), a.dtype)
    width = 1
    while width < size:
        pairs = size // (2 * width)
        blocks = a.reshape(*batch, pairs, 2, width, pairs, 2, width)
        lower = jnp.diagonal(blocks[..., 1, :, :, 0, :], axis1=-4, axis2=-2)
        q = jnp.moveaxis(lower, -1, len(batch))
        halves = inverse.reshape(*batch, pairs, 2, width, width)
        p, r = halves[..., 0, :, :], halves[..., 1, :, :]
        corner = -_small_matmul(_small_matmul(r, q), p)
        top = jnp.concatenate([p, jnp.zeros_like(p)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, r], axis=-1)], axis=-2)
        width *= 2
    return jnp.matmul(
        inverse.reshape(*batch, size, size)[..., :chunk, :chunk], b, precision=lax.Precision.HIGHEST
    )


def _small_matmul(x: Array, y: Array) -> Array:
    if x.shape[-1] >= 16:
        return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
    return jnp.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2)


def _pad_time(x: Array, time: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, time - x.shape[1]), *((0, 0),) * (x.ndim - 2)))


def _merge_heads(state: Array) -> Array:
    return state.reshape(state.shape[0], -1, *state.shape[3:])
