"""Matmuls of rows that each have their own expert.

`plan` lays assignments out in tiles that hold rows of one expert only (a counting sort: stable,
nothing dropped, every group padded to a whole tile); `grouped_glu` runs each tile through its
expert's gated MLP. `lax.ragged_dot` computes every expert on CPU and CUDA, hence our own.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.registry import Impl, call


class Plan(NamedTuple):
    """Where each assignment sits, and which expert each tile belongs to."""

    slot: Int[Array, " assignments"]  # position in the tiles; unassigned rows point past the end
    source: Int[Array, " slots"]  # the assignment of each slot, or `assignments` where padded
    tile_expert: Int[Array, " tiles"]
    used: Int[Array, ""]  # tiles that hold rows; the others are not computed


def plan(
    expert: Int[Array, " assignments"],
    assigned: Bool[Array, " assignments"],
    *,
    num_experts: int,
    tile: int,
) -> Plan:
    """A layout with at most `assignments // tile + min(num_experts, assignments)` tiles."""
    n = expert.shape[0]
    tiles = n // tile + min(num_experts, n)
    member = (expert[:, None] == jnp.arange(num_experts)[None]) & assigned[:, None]
    rank = jnp.cumsum(member.astype(jnp.int32), axis=0)
    tile_end = jnp.cumsum((rank[-1] + (tile - 1)) // tile)
    tile_start = tile_end - (rank[-1] + (tile - 1)) // tile
    place = tile * tile_start[None] + rank - 1
    slot = jnp.where(assigned, jnp.sum(jnp.where(member, place, 0), axis=1), tiles * tile)
    source = jnp.full((tiles * tile,), n, jnp.int32)
    source = source.at[slot].set(jnp.arange(n, dtype=jnp.int32), mode="drop")
    # All comparisons at once: the default is a loop of tiny operations.
    tile_expert = jnp.searchsorted(tile_end, jnp.arange(tiles), side="right", method="compare_all")
    return Plan(
        slot.astype(jnp.int32),
        source,
        jnp.minimum(tile_expert, num_experts - 1).astype(jnp.int32),
        tile_end[-1].astype(jnp.int32),
    )


def grouped_glu(
    x: Float[Array, "tiles tile width"],
    w_in: Float[Array, "experts width gate_up"],
    w_out: Float[Array, "experts hidden out"],
    tile_expert: Int[Array, " tiles"],
    used: Int[Array, ""],
    *,
    impl: Impl,
) -> Float[Array, "tiles tile out"]:
    """(silu(gate) · up) @ w_out[e] with (gate | up) = x[t] @ w_in[e], e = tile_expert[t].

    For the first `used` tiles; 0 for the others. Differentiable in x and both weights; the gradient
    of an unused expert is exactly 0.

    Raises:
        ValueError: an implementation this op does not have.
    """
    return call(__name__, "grouped_glu", impl, x, w_in, w_out, tile_expert, used)
