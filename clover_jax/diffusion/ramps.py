"""Soft pressure to end: biases that grow with the length of the answer or of the thinking.

An index counts response tokens to the left of a position: from the response's start while a
thinking block that the prompt left open is still open, from the token after `</think>` once it is
closed, and from the response's start if none was open.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clover_jax.diffusion.sampling_config import RampParams, SamplerParams
from clover_jax.diffusion.stop import first_position

THINKING = 2**30  # answer_start of a row that is still thinking; above any response index


class ResponseState(NamedTuple):
    """What the ramps must know of a row's committed response.

    Attributes:
        response_length: committed response tokens.
        answer_start: response index of the first token after `</think>`; 0 if the prompt left no
            thinking open; `THINKING` while it is open.
    """

    response_length: Int[Array, " rows"]
    answer_start: Int[Array, " rows"]


class BlockIndices(NamedTuple):
    """Per position of a block: is thinking open there, and how far along is its part.

    Attributes:
        thinking: no `</think>` stands to the left of the position.
        thinking_index: thinking tokens to its left; 0 where thinking is closed.
        answer_index: answer tokens to its left; 0 where thinking is open.
    """

    thinking: Bool[Array, "rows block"]
    thinking_index: Int[Array, "rows block"]
    answer_index: Int[Array, "rows block"]


class RampBias(NamedTuple):
    """Logit biases of a block: `response` for stop ids, `thinking` for the close-thinking id."""

    response: Float[Array, "rows block"]
    thinking: Float[Array, "rows block"]


def start_response(thinking_open: Bool[Array, " rows"]) -> ResponseState:
    """State before the first block, given whether the prompt ends inside an open thinking block."""
    length = jnp.zeros(thinking_open.shape, jnp.int32)
    return ResponseState(length, jnp.where(thinking_open, jnp.int32(THINKING), length))


def block_indices(
    state: ResponseState,
    tokens: Int[Array, "rows block"],
    revealed: Bool[Array, "rows block"],
    think_close: Int[Array, ""],
) -> BlockIndices:
    """Indices of the block that follows the committed response.

    Args:
        state: of the committed response.
        tokens: the block's canvas.
        revealed: positions whose token is fixed; only these can close thinking.
        think_close: id of `</think>`, -1 if the tokenizer has none.
    """
    close = first_position(revealed & (tokens == think_close))
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    index = state.response_length[:, None] + offset
    was_thinking = (state.answer_start == THINKING)[:, None]
    thinking = was_thinking & (offset <= close[:, None])
    answer_start = jnp.where(
        was_thinking, (state.response_length + close + 1)[:, None], state.answer_start[:, None]
    )
    zero = jnp.int32(0)
    return BlockIndices(
        thinking,
        jnp.where(thinking, index, zero),
        jnp.where(thinking, zero, index - answer_start),
    )


def later_closes(
    reveal: Bool[Array, "rows block"],
    guess: Int[Array, "rows block"],
    thinking: Bool[Array, "rows block"],
    think_close: Int[Array, ""],
) -> Bool[Array, "rows block"]:
    """Positions that a step would reveal as further `</think>` of the same open thinking.

    The ramp pushes every position to its right as if thinking were open there; once the first
    stands it is not. So these stay masked and are chosen anew in the next step.
    """
    closes = reveal & thinking & (guess == think_close)
    place = jnp.arange(guess.shape[1], dtype=jnp.int32)[None]
    return closes & (place > first_position(closes)[:, None])


def advance(
    state: ResponseState,
    tokens: Int[Array, "rows block"],
    n_committed: Int[Array, " rows"],
    think_close: Int[Array, ""],
) -> ResponseState:
    """State after the first `n_committed` tokens of a block are committed."""
    block = tokens.shape[1]
    committed = jnp.arange(block, dtype=jnp.int32)[None] < n_committed[:, None]
    close = first_position(committed & (tokens == think_close))
    closes = (state.answer_start == THINKING) & (close < block)
    return ResponseState(
        state.response_length + n_committed,
        jnp.where(closes, state.response_length + close + 1, state.answer_start),
    )


def ramp_bias(indices: BlockIndices, params: SamplerParams) -> RampBias:
    """Biases of every position; the thinking ramp is 0 where thinking is closed, and conversely."""
    return RampBias(
        _ramp(indices.answer_index, params.response_ramp),
        _ramp(indices.thinking_index, params.thinking_ramp),
    )


def _ramp(index: Int[Array, "rows block"], ramp: RampParams) -> Float[Array, "rows block"]:
    """min(slope · max(0, index - start), cap)."""
    past = jnp.maximum(index - ramp.start[:, None], 0).astype(jnp.float32)
    return jnp.minimum(ramp.slope[:, None] * past, ramp.cap[:, None])
