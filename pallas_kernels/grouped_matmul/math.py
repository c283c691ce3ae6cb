"""The formula on arrays, apart from how they reach the matmul unit."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def glu(gate_up: Array) -> Array:
    """silu(gate) · up of (gate | up)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def part_of_glu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """What a slice of the hidden width adds to the output, in float32.

    x [rows, width], gate and up [width, part], down [part, width].
    """
    h = jax.nn.silu(matmul(x, gate)) * matmul(x, up)
    return matmul(h.astype(x.dtype), down)


def matmul(a: Array, b: Array) -> Array:
    """Float32 sums: of exact float32 products, or of bfloat16 ones."""
    # Mosaic refuses HIGHEST on bfloat16, whose products are exact anyway (jax 0.11).
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=exact, preferred_element_type=jnp.float32)
