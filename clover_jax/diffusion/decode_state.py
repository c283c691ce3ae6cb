"""What a decode loop carries from step to step."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from clover_jax.cache import DecodeCache
from clover_jax.config import ModelConfig
from clover_jax.diffusion.ramps import ResponseState
from clover_jax.model.stack import StackStats

RUNNING, STOP, LENGTH, ERROR = range(4)  # DecodeState.finish


class Rules(NamedTuple):
    """What the vocabulary says, from the checkpoint folder."""

    forbidden: Bool[Array, " vocab"]  # the mask, and ids past the tokenizer's end
    stop_ids: Int[Array, " stops"]
    think_close: Int[Array, ""]  # -1: none


class Canvas(NamedTuple):
    """The blocks being denoised. Masked-ness is a flag, never `token == mask_id`."""

    tokens: Int[Array, "rows block"]
    masked: Bool[Array, "rows block"]
    logprob: Float[Array, "rows block"]  # log softmax(P)[token] when it was revealed
    confidence: Float[Array, "rows block"]  # of the latest preview's pick
    revealed_at: Int[Array, "rows block"]  # step in the block, -1 while masked
    guess: Int[Array, "rows block"]  # the latest preview's pick at every position
    coreset: Bool[Array, "rows layers experts"] | None = None  # frozen; no members: none yet


class Text(NamedTuple):
    """What has been written, by response index."""

    tokens: Int[Array, "rows limit"]
    logprob: Float[Array, "rows limit"]
    confidence: Float[Array, "rows limit"]
    revealed_at: Int[Array, "rows limit"]
    length: Int[Array, " rows"]  # up to and including the stop


class Counters(NamedTuple):
    """Accounting per row; expert counts are sums over previews, per layer."""

    previews: Int[Array, " rows"]
    forwards: Int[Array, " rows"]  # previews, commits, verifications; a fused pass is one
    experts: Float[Array, "layers rows"]  # distinct experts of the row
    experts_union: Float[Array, " layers"]  # distinct experts of the batch
    steps: Int[Array, ""]  # decode steps of the batch


class DecodeState(NamedTuple):
    """Everything a decode loop carries."""

    cache: DecodeCache
    response: ResponseState  # of committed tokens
    counts: Int[Array, "rows vocab"]  # of committed response tokens
    canvas: Canvas
    step: Int[Array, " rows"]  # previews of the current block
    pending: Int[Array, " rows"]  # tokens of the canvas that wait for their commit
    finish: Int[Array, " rows"]  # RUNNING, STOP, LENGTH or ERROR
    text: Text
    max_tokens: Int[Array, " rows"]
    seed: UInt32[Array, " rows"]
    sample_index: UInt32[Array, " rows"]
    context: Int[Array, ""]  # tokens that cache and model hold
    counters: Counters
    margin: Float[Array, " rows"]  # smallest decision margin so far


class Trace(NamedTuple):
    """Canvases after each step of a `run_block` call, step axis first."""

    canvas: Canvas
    step: Int[Array, "steps rows"]
    ran: Bool[Array, "steps rows"]  # the row was still running
    used: Int[Array, ""]  # steps recorded


def frozen_coreset(cfg: ModelConfig) -> tuple[int, int] | None:
    """(layers, experts) of what a block carries from step to step, None if it carries nothing."""
    m = cfg.moe
    return (cfg.num_layers, m.num_experts) if m.coreset is not None and m.coreset.frozen else None


def chosen_coreset(stats: StackStats | None) -> Bool[Array, "rows layers experts"] | None:
    """What a preview of one block a row chose its experts from, where a block keeps that."""
    if stats is None or stats.router.coreset is None:
        return None
    return jnp.moveaxis(stats.router.coreset[:, :, 0], 0, 1)


def blank_canvas(rows: int, block: int, coreset: tuple[int, int] | None = None) -> Canvas:
    """Blocks that are all masks; `coreset`: (layers, experts) where a block keeps its own."""
    fill = lambda value, dtype: jnp.full((rows, block), value, dtype)
    return Canvas(
        tokens=fill(0, jnp.int32),
        masked=fill(True, bool),
        logprob=fill(0, jnp.float32),
        confidence=fill(0, jnp.float32),
        revealed_at=fill(-1, jnp.int32),
        guess=fill(0, jnp.int32),
        coreset=None if coreset is None else jnp.zeros((rows, *coreset), bool),
    )
