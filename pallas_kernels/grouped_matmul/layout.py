"""Rows laid out in tiles that hold rows of one expert only, and back.

A counting sort: stable, nothing dropped, every expert's rows padded to whole tiles.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Plan(NamedTuple):
    """Where each (row, chosen expert) sits, and which expert each tile belongs to."""

    slot: Int[Array, "rows k"]  # position in the tiles; past the end where nothing is assigned
    source: Int[Array, " slots"]  # the row of each slot, or `rows` where padded
    tile_expert: Int[Array, " tiles"]
    used: Int[Array, ""]  # tiles that hold rows; they come first


type RunTiles = Callable[[Array, Array, Array, Array, Array], Array]


def plan(
    expert: Int[Array, "rows k"], assigned: Bool[Array, "rows k"], *, num_experts: int, tile: int
) -> Plan:
    """At most m + (n - m) // tile tiles for n assignments to m = min(n, num_experts) experts."""
    rows, k = expert.shape
    n = rows * k
    m = min(n, num_experts)
    tiles = m + (n - m) // tile
    ids, live = expert.reshape(-1), assigned.reshape(-1)
    if tile == 1:  # every assignment is a tile: what is left out closes up, nothing is sorted
        before = jnp.cumsum(live.astype(jnp.int32))
        place, used = before - 1, before[-1]
        # All comparisons at once: for the few assignments of a row cheaper than the scatter below.
        taker = jnp.sum((before[None] <= jnp.arange(n)[:, None]).astype(jnp.int32), axis=1)
    else:
        member = (ids[:, None] == jnp.arange(num_experts)[None]) & live[:, None]
        rank = jnp.cumsum(member.astype(jnp.int32), axis=0)
        tile_end = jnp.cumsum((rank[-1] + (tile - 1)) // tile)
        tile_start = tile_end - (rank[-1] + (tile - 1)) // tile
        within = jnp.where(member, tile * tile_start[None] + rank - 1, 0)
        place, used = jnp.where(live, jnp.sum(within, axis=1), tiles * tile), tile_end[-1]
        taker = jnp.full((tiles * tile,), n, jnp.int32)
        taker = taker.at[place].set(jnp.arange(n, dtype=jnp.int32), mode="drop")
    slot = jnp.where(live, place, tiles * tile).astype(jnp.int32)
    first = jnp.minimum(taker.reshape(tiles, tile)[:, 0], n - 1)
    return Plan(
        slot.reshape(rows, k),
        taker // k,
        jnp.clip(ids[first], 0, num_experts - 1),
        used.astype(jnp.int32),
    )


def through_tiles(
    run: RunTiles,
    x: Float[Array, "rows width"],
    expert: Int[Array, "rows k"],
    weight: Float[Array, "rows k"],
    valid: Bool[Array, " rows"],
    w_in: Float[Array, "experts width gate_up"],
    w_out: Float[Array, "experts hidden width"],
    *,
    tile: int,
) -> Float[Array, "rows width"]:
    """`api.expert_glu` by way of `run`, which is or stands for `xla.glu_tiles`.

    What `run` leaves in tiles that are not used does not matter.
    """
    assigned = valid[:, None] & (expert >= 0) & (expert < w_in.shape[0])
    to = plan(expert, assigned, num_experts=w_in.shape[0], tile=tile)
    padded = jnp.concatenate([x, jnp.zeros_like(x[:1])])
    tiles = padded[to.source].reshape(-1, tile, x.shape[1])
    y = run(tiles, w_in, w_out, to.tile_expert, to.used).reshape(-1, x.shape[1])
    each = y[jnp.minimum(to.slot, y.shape[0] - 1)].astype(jnp.float32)
    # Both factors: nobody wrote the slot of what is not assigned, and 0 · NaN is NaN.
    each = jnp.where(assigned[..., None], each, 0.0)
    weight = jnp.where(assigned, weight, 0.0)
    total = jnp.zeros(x.shape, jnp.float32)
    for j in range(expert.shape[1]):
        total = total + weight[:, j, None] * each[:, j]
    return total.astype(x.dtype)
