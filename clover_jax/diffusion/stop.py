"""Where a block's text ends, and when a block is finished."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def first_stop(
    tokens: Int[Array, "rows block"],
    revealed: Bool[Array, "rows block"],
    stop_ids: Int[Array, " stops"],
) -> Int[Array, " rows"]:
    """Lowest revealed position that holds a stop id, or the block's length if there is none.

    Args:
        tokens: the block's canvas; masked positions may hold anything.
        revealed: positions whose token is fixed.
        stop_ids: padded with -1, which no token equals.
    """
    is_stop = revealed & (tokens[..., None] == stop_ids[None, None]).any(-1)
    return first_position(is_stop)


def first_position(hit: Bool[Array, "rows block"]) -> Int[Array, " rows"]:
    """Lowest position of a hit, or the block's length if there is none."""
    block = hit.shape[1]
    return jnp.where(hit, _positions(block), block).min(-1, initial=block)


def candidates(
    masked: Bool[Array, "rows block"], stop: Int[Array, " rows"], n_valid: Int[Array, " rows"]
) -> Bool[Array, "rows block"]:
    """Positions that a step may reveal: masked, left of the first stop, and valid.

    Args:
        masked: positions not yet revealed.
        stop: `first_stop`.
        n_valid: block length; less only at the end of the context, 0 for a finished row. A limit
            on the text is no reason to lower it: it would change which position a step without a
            confident one reveals, and a text would no longer be a prefix of a longer one.
    """
    return masked & (_positions(masked.shape[1]) < jnp.minimum(stop, n_valid)[:, None])


def counting(
    masked: Bool[Array, "rows block"], stop: Int[Array, " rows"]
) -> Bool[Array, "rows block"]:
    """Revealed positions that belong to the text: up to and including the first stop."""
    return ~masked & (_positions(masked.shape[1]) <= stop[:, None])


def block_finished(
    masked: Bool[Array, "rows block"], stop: Int[Array, " rows"], limit: Int[Array, " rows"]
) -> Bool[Array, " rows"]:
    """Whether no masked position remains left of min(first stop + 1, limit).

    Args:
        masked: positions not yet revealed.
        stop: `first_stop`.
        limit: positions of this block that can still appear in the text: at most the valid ones,
            less where the token limit cuts the text inside this block, 0 for a finished row.
    """
    end = jnp.minimum(stop + 1, limit)[:, None]
    return ~(masked & (_positions(masked.shape[1]) < end)).any(-1)


def _positions(block: int) -> Int[Array, "1 block"]:
    return jnp.arange(block, dtype=jnp.int32)[None]
