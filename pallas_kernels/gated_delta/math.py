"""The maths of the Pallas kernels on plain arrays, apart from how data gets there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def chunk_update(
    kq: Float[Array, "reads key"],
    alike: Float[Array, "reads chunk"],
    v: Float[Array, "chunk value"],
    g: Float[Array, "1 chunk"],
    beta: Float[Array, "1 chunk"],
    state: Float[Array, "key value"],
) -> tuple[
    Float[Array, "queries value"], Float[Array, "chunk value"], Float[Array, "key value"]
]:
    """One chunk of one value head; the formula is in `xla.py`.

    Args:
        kq: keys of the chunk, and below them its queries, if any.
        alike: kq k^T.
        v: values.
        g: log decay.
        beta: write strength.
        state: state before the chunk.

    Returns:
        Read-outs, V' and the state after the chunk.
    """
    chunk = v.shape[0]
    i, j = (lax.broadcasted_iota(jnp.int32, (chunk, chunk), axis) for axis in (0, 1))
    column = lambda row: jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)
    # Sums of g over ranges, never differences of cumulative sums: those cancel.
    start = jnp.sum(jnp.where(j <= i, g, 0.0), axis=1, keepdims=True)
    end = jnp.sum(jnp.where(j > i, g, 0.0), axis=1, keepdims=True)
    between = dot((i >= j).astype(jnp.float32), jnp.where(i > j, column(g), 0.0))
    decay = jnp.exp(jnp.where(i >= j, between, -jnp.inf))
    beta = column(beta)

    inverse = inverse_unit_lower(jnp.where(i > j, beta * alike[:chunk] * decay, 0.0))
    read = dot(kq, state)
    v_new = dot(inverse, beta * (v - jnp.exp(start) * read[:chunk]))
    out = read[chunk:]
    if out.shape[0]:
        out = jnp.exp(start) * out + dot(alike[chunk:] * decay, v_new)
    written = dot(kq[:chunk], jnp.exp(end) * v_new, contract=(0, 0))
    whole = jnp.exp(jnp.sum(g, axis=1, keepdims=True))
    return out, v_new, whole * state + written


def inverse_unit_lower(a: Float[Array, "chunk chunk"]) -> Float[Array, "chunk chunk"]:
    """(I + a)^-1 for strictly lower a, by block doubling (why: `xla.py`).

    On whole matrices, as a matrix unit likes them: with X the inverses of the diagonal blocks of
    some width, X a X restricted to the blocks that join pairs of them is R^-1 Q P^-1.
    """
    chunk = a.shape[0]
    i, j = (lax.broadcasted_iota(jnp.int32, (chunk, chunk), axis) for axis in (0, 1))

    def joins(width: int) -> Array:  # row in the second block of a pair, column in its first
        same_pair = i // (2 * width) == j // (2 * width)
        return same_pair & (i // width != j // width) & (i > j)

    x = jnp.where(i == j, 1.0, jnp.where(joins(1), -a, 0.0))
    width = 2
    while width < chunk:
        x = x - dot(dot(x, jnp.where(joins(width), a, 0.0)), x)
        width *= 2
    return x


def dot(a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    """A matmul that is float32 on every machine."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(
        a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def chunked_flops(
    rows: int, time: int, heads: int, group: int, key: int, value: int, *, chunk: int, reads: int
) -> int:
    """Operations of the matmuls of the chunked form, the inverse by substitution.

    Per chunk and value head: k S and q S, the inverse (chunk^3 / 3), V', (q k^T) V', k^T V'; per
    key head: k k^T and q k^T.

    Args:
        rows: batch rows.
        time: positions.
        heads: value heads.
        group: value heads per key head.
        key: key channels.
        value: value channels.
        chunk: positions of a chunk.
        reads: 2 with queries, 1 without.
    """
    per_head = 2 * chunk * key * value * (reads + 1) + 2 * chunk * chunk * value * reads
    per_head += chunk**3 // 3 + 2 * chunk * chunk * key * reads // group
    return rows * heads * -(-time // chunk) * per_head


def with_gradient_of(formula: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, differentiated as `formula` of the same arguments is."""

    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return kernel(*args)

    def backward(args: tuple, cotangents: Any) -> tuple:
        return jax.vjp(formula, *args)[1](cotangents)

    call.defvjp(lambda *args: (kernel(*args), args), backward)
    return call
