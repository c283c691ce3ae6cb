"""Partial rotary embedding (qwen3_5_moe): the first rotary_dim channels, pairs (j, j + half)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rope_tables(
    positions: Int[Array, "*batch"], *, rotary_dim: int, theta: float
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """cos and sin of position · theta^(-2j / rotary_dim), j = 0 .. rotary_dim/2 - 1, float32."""
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    inverse_frequency = jnp.asarray(theta**-exponent, jnp.float32)
    angle = positions[..., None].astype(jnp.float32) * inverse_frequency.reshape(
        *(1,) * positions.ndim, -1
    )
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(
    x: Float[Array, "*batch heads channel"],
    cos: Float[Array, "*batch half"],
    sin: Float[Array, "*batch half"],
) -> Float[Array, "*batch heads channel"]:
    """Rotate the first 2·half channels of every head in float32; the others pass through."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)
