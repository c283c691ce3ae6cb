"""Chunked gated delta rule.

In a chunk, with c = cumsum(g), D_ij = e^{c_i - c_j} for j <= i and A the strict lower part of
beta_i (k_i . k_j) D_ij:

    V' = (I + A)^-1 beta (v - e^c (k S))
    o = e^c (q S) + ((q k^T) o D) V'          S <- e^{c_C} S + (e^{c_C - c} k)^T V'

What does not depend on S is computed for all chunks at once. Only differences of cumulative log
decays are exponentiated, and only where they are <= 0: the factored form e^{c_i} e^{-c_j}
overflows under strong decay (pytorch/executorch#21417).

A sample that begins at a position decays all before it by e^-inf = 0: every sum that leads over a
border is -inf, none is subtracted, and no pair, state or boundary needs a mask of its own.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gated_delta.contract import DeltaTrace

# The state and its solve stay float32: accelerators would round the inputs.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def gated_delta(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    begins: Array | None, *, chunk: int,
) -> tuple[Array, Array]:  # fmt: skip
    """See `api.gated_delta`."""
    q, k, v, g, beta = silence(length, q, k, v, forget(begins, g), beta)
    if k.shape[1] == 1:
        at = lambda x: x[:, 0]
        out, state = _one_token(at(q), at(k), at(v), at(g), at(beta), state)
        return out[:, None], state
    out, state, _ = _chunked(q, k, v, g, beta, state, chunk, trace=False)
    assert out is not None
    return out, state


def gated_delta_trace(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, length: Array | None,
    begins: Array | None, *, chunk: int,
) -> tuple[Array, Array, tuple[Array, ...]]:  # fmt: skip
    """See `api.gated_delta_trace`."""
    q, k, v, g, beta = silence(length, q, k, v, forget(begins, g), beta)
    out, state, kept = _chunked(q, k, v, g, beta, state, chunk, trace=True)
    assert out is not None and kept is not None
    split = lambda x: split_time(x, min(chunk, k.shape[1]))
    before, v_new = kept
    return out, state, (before, split(k), v_new, split(g))


def commit_state(
    k: Array, v: Array, g: Array, beta: Array, state: Array, count: Array, *, chunk: int
) -> Array:
    """See `api.commit_state`."""
    k, v, g, beta = silence(count, k, v, g, beta)
    return _chunked(None, k, v, g, beta, state, chunk, trace=False)[1]


def silence(length: Array | None, *arrays: Array) -> tuple[Array, ...]:
    """Zero what stands at or past each row's length, whatever it is."""
    if length is None:
        return arrays
    valid = jnp.arange(arrays[0].shape[1])[None] < length[:, None]
    keep = lambda x: jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, 0.0)
    return tuple(keep(x) for x in arrays)


def forget(begins: Array | None, g: Array) -> Array:
    """The log decays with -inf where a sample begins."""
    return g if begins is None else jnp.where(begins[..., None], -jnp.inf, g)


def split_time(x: Array, chunk: int) -> Array:
    """[rows, time, ...] -> [rows, chunks, chunk, ...], filled up with zeros."""
    pads = ((0, 0), (0, -x.shape[1] % chunk), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, pads).reshape(x.shape[0], -1, chunk, *x.shape[2:])


def _one_token(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """The recurrence itself: a decode step is one pass over the state."""
    group = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x, group, axis=1) for x in (q, k))
    s = jnp.exp(g)[..., None, None] * state
    new = beta[..., None] * (v - _einsum("rhkv,rhk->rhv", s, k))
    s = s + k[..., :, None] * new[..., None, :]
    return _einsum("rhkv,rhk->rhv", s, q), s


def _chunked(
    q: Array | None, k: Array, v: Array, g: Array, beta: Array, state: Array,
    chunk: int, *, trace: bool,
) -> tuple[Array | None, Array, tuple[Array, Array] | None]:  # fmt: skip
    """Read-outs (given queries), the last state, and with `trace` states before chunks and V'."""
    rows, time, key_heads, _ = k.shape
    heads, group = v.shape[2], v.shape[2] // key_heads
    chunk = min(chunk, time)

    def split(x: Array, *lead: int) -> Array:
        """[chunks, rows, heads or (key_heads, group), chunk, ...]."""
        x = split_time(x, chunk)
        x = x.reshape(*x.shape[:3], *lead, *x.shape[4:])
        return jnp.moveaxis(x, (1, 2), (0, 2 + len(lead)))

    k = split(k, key_heads)
    kq = k if q is None else jnp.concatenate([k, split(q, key_heads)], axis=-2)
    v, g, beta = (split(x, key_heads, group) for x in (v, g, beta))
    state = state.reshape(rows, key_heads, group, *state.shape[2:])

    strict = jnp.tril(jnp.ones((chunk, chunk), bool), -1)
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    c = jnp.cumsum(g, axis=-1)
    # sum of g over j < m <= i, not c_i - c_j: that cancels under strong decay.
    between = jnp.cumsum(jnp.where(strict, g[..., :, None], 0.0), axis=-2)
    decay = jnp.exp(jnp.where(lower, between, -jnp.inf))
    alike = _einsum("nrhik,nrhjk->nrhij", kq, k)[:, :, :, None]  # k k^T over q k^T
    a = jnp.where(strict, beta[..., :, None] * alike[..., :chunk, :] * decay, 0.0)
    scores = alike[..., chunk:, :] * decay if q is not None else alike[..., chunk:, :]
    inverse = _inverse_unit_lower(a)

    def step(s: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[Any, Any]]:
        k, kq, v, beta, inverse, scores, to_start, to_end = x
        read = _einsum("rhck,rhgkv->rhgcv", kq, s)
        error = v - to_start[..., None] * read[..., :chunk, :]
        v_new = _einsum("rhgij,rhgjv->rhgiv", inverse, beta[..., None] * error)
        written = _einsum("rhck,rhgcv->rhgkv", k, to_end[..., None] * v_new)
        out = None
        if q is not None:
            out = to_start[..., None] * read[..., chunk:, :]
            out = out + _einsum("rhgij,rhgjv->rhgiv", scores, v_new)
        after = to_start[..., -1:, None] * s + written
        return after, (out, (s, v_new) if trace else None)

    xs = (k, kq, v, beta, inverse, scores, jnp.exp(c), jnp.exp(between[..., -1, :]))
    state, (out, kept) = lax.scan(step, state, xs)
    state = state.reshape(rows, heads, *state.shape[3:])

    def join(x: Array) -> Array:
        """[chunks, rows, key_heads, group, chunk, value] -> [rows, chunks, chunk, heads, value]."""
        return jnp.moveaxis(x, (0, 4), (1, 2)).reshape(rows, -1, chunk, heads, x.shape[-1])

    if out is not None:
        out = join(out).reshape(rows, -1, heads, out.shape[-1])[:, :time]
    if kept is not None:
        before, v_new = kept
        before = jnp.moveaxis(before, 0, 1).reshape(rows, -1, *state.shape[1:])
        kept = (before, join(v_new))
    return out, state, kept


def boundary_state(trace: DeltaTrace, count: Array) -> Float[Array, "rows value_heads key value"]:
    """See `api.boundary_state`."""
    chunk = trace.k.shape[2]
    index = jnp.minimum(count // chunk, trace.k.shape[1] - 1)
    inside = count - index * chunk  # 1..chunk, or 0 before the first position of a chunk
    pick = lambda x: jnp.take_along_axis(
        x, index.reshape(-1, *(1,) * (x.ndim - 1)), axis=1
    ).squeeze(1)
    state, k, v_new, g = (pick(x) for x in trace)
    written = (jnp.arange(chunk)[None] < inside[:, None])[..., None]
    # Log decay from after each position to the boundary, and of the whole chunk up to it.
    onward = lax.cumsum(jnp.where(written, g, 0.0), axis=1, reverse=True)
    after = jnp.concatenate([onward[:, 1:], jnp.zeros_like(onward[:, :1])], axis=1)
    weighted = jnp.exp(jnp.where(written, after, -jnp.inf))[..., None] * v_new
    weighted = weighted.reshape(*k.shape[:3], -1, v_new.shape[-1])  # heads split by key head
    new = _einsum("rchk,rchgv->rhgkv", k, weighted)
    return jnp.exp(onward[:, 0])[..., None, None] * state + new.reshape(state.shape)


def _inverse_unit_lower(
    a: Float[Array, "*batch chunk chunk"],
) -> Float[Array, "*batch chunk chunk"]:
    """(I + a)^-1 for strictly lower a, by inverting diagonal blocks of doubling size.

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
    return inverse.reshape(*batch, size, size)[..., :chunk, :chunk]


def _small_matmul(x: Array, y: Array) -> Array:
    if x.shape[-1] >= 16:
        return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
    return jnp.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2)
