"""The maths of the Pallas kernels on plain arrays, apart from how data gets there.

The chunked form's formula is in `xla.py`. `g` and `beta` are rows: one head's log decays and write
strengths of a chunk.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def numbers(chunk: int) -> Int[Array, "2 chunk chunk"]:
    """Row and column number of each cell: `at` of the functions below.

    They take it as an argument because a TPU kernel keeps it in memory: masks made of iotas are
    hoisted out of its loops by the compiler (jax 0.11.2, libtpu 0.0.48), and then spill.
    """
    shape = (1, chunk, chunk)
    return jnp.concatenate([lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2)])


def as_column(row: Float[Array, "1 chunk"], at: Any) -> Float[Array, "chunk 1"]:
    """A row of lanes as sublanes."""
    return jnp.sum(jnp.where(at[0] == at[1], row, 0.0), axis=1, keepdims=True)


def decay_from_start(g: Float[Array, "1 chunk"], at: Any) -> Float[Array, "chunk 1"]:
    """e^{c_i}: from the start of the chunk to each position."""
    return jnp.exp(jnp.sum(jnp.where(at[1] <= at[0], g, 0.0), axis=1, keepdims=True))


def decay_to_end(g: Float[Array, "1 chunk"], at: Any) -> Float[Array, "chunk 1"]:
    """e^{c_C - c_i}: a sum of its own, as a difference of cumulative sums cancels."""
    return jnp.exp(jnp.sum(jnp.where(at[1] > at[0], g, 0.0), axis=1, keepdims=True))


def decay_between(g: Float[Array, "1 chunk"], at: Any) -> Float[Array, "chunk chunk"]:
    """D_ij = e^{c_i - c_j} for j <= i, from after j to i; 0 above the diagonal."""
    until, after = (at[0] >= at[1]).astype(jnp.float32), at[0] > at[1]
    between = dot(until, jnp.where(after, as_column(g, at), 0.0))
    return jnp.exp(jnp.where(at[0] >= at[1], between, -jnp.inf))


def strict_lower(a: Float[Array, "chunk chunk"], at: Any) -> Float[Array, "chunk chunk"]:
    """What stands below the diagonal."""
    return jnp.where(at[0] > at[1], a, 0.0)


def inverse_unit_lower(a: Any, at: Any) -> Float[Array, "chunk chunk"]:
    """(I + a)^-1 for strictly lower a, by block doubling (why: `xla.py`).

    On whole matrices, as a matrix unit likes them: with X the inverses of the diagonal blocks of
    some width, X a X restricted to the cells that join the two blocks of a pair is R^-1 Q P^-1.
    Those are the cells whose row and column numbers differ first in bit log2(width).
    """

    def double(level: Any, x: Array) -> Array:
        joined = jnp.where((at[0] ^ at[1]) >> level == 1, a[...], 0.0)
        return x - dot(dot(x, joined), x)

    identity = (at[0] == at[1]).astype(jnp.float32)
    first = identity - jnp.where(at[0] ^ at[1] == 1, a[...], 0.0)
    return lax.fori_loop(1, (a.shape[-1] - 1).bit_length(), double, first)


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


def token_update(
    k: Float[Array, " key"],
    v: Float[Array, " value"],
    decay: Array,
    beta: Array,
    state: Float[Array, "key value"],
) -> Float[Array, "key value"]:
    """The recurrence of one token: S <- decay S;  S <- S + k (beta (v - S^T k))^T."""
    state = decay * state
    k = lax.broadcast_in_dim(k, state.shape, (0,))
    v_new = beta * (v - jnp.sum(k * state, axis=0))
    return state + k * lax.broadcast_in_dim(v_new, state.shape, (1,))


def read_out(q: Float[Array, " key"], state: Float[Array, "key value"]) -> Float[Array, " value"]:
    """S^T q."""
    return jnp.sum(lax.broadcast_in_dim(q, state.shape, (0,)) * state, axis=0)
