"""The two RMS norms, in float32, cast back once at the end."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*batch width"], weight: Float[Array, " width"], *, eps: float
) -> Float[Array, "*batch width"]:
    """Zero-centred RMS norm: x rsqrt(mean x² + eps) (1 + w). The `+ 1` exists only here."""
    return (normalise(x, eps=eps) * over_last_axis(jnp.float32(1) + weight, x)).astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*batch width"],
    gate: Float[Array, "*batch width"],
    weight: Float[Array, " width"],
    *,
    eps: float,
) -> Float[Array, "*batch width"]:
    """Norm of the GDN output, weight as stored, then the gate: x rsqrt(mean x² + eps) w silu(z)."""
    normed = normalise(x, eps=eps) * over_last_axis(weight, x)
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def normalise(x: Float[Array, "*batch width"], *, eps: float) -> Float[Array, "*batch width"]:
    """x rsqrt(mean x² + eps) in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps))


def l2_norm(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """x rsqrt(sum x² + 1e-6) in float32; the 1e-6 is the base's, inside the root."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(1e-6))


def over_last_axis(vector: Float[Array, " width"], x: Array) -> Array:
    """A vector shaped to broadcast over the last axis of `x`."""
    return vector.reshape(*(1,) * (x.ndim - 1), -1)
