"""From a tokenised sample to the two streams of training.

The block grid starts at the first token of each assistant turn. A turn is its tokens and the stop
that ends it; past it, its last block is filled with pads, as a preview always sees full blocks.
Noise depends on (seed, epoch, sample, block) only, so a batch is the same however it is split,
resumed or ordered.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# Frontier noise: share of the blocks that start wholly masked, and how the loss weight falls with
# the distance from the frontier.
WHOLE, FALL = 0.3, 0.95
_FRONTIER = 2**31  # keeps its draws apart from those of the blocks


class Example(NamedTuple):
    """One tokenised sample: a conversation, or a prompt and its response."""

    sample: int  # its number, the source of its noise
    tokens: Sequence[int]  # every text between two borders of turns is tokenised apart
    turns: tuple[tuple[int, int], ...]  # (first, end) of what the assistant wrote, with its stop

    @classmethod
    def single(cls, sample: int, prompt: Sequence[int], response: Sequence[int]) -> "Example":
        """A prompt and its one response, which ends with the stop token."""
        tokens = [*prompt, *response]
        return cls(sample, tokens, ((len(prompt), len(tokens)),) if response else ())

    def blocks(self, block: int) -> list[tuple[int, int]]:
        """(first, end) of each block's own tokens, on the grid of its turn."""
        return [
            (at, min(at + block, end))
            for first, end in self.turns
            for at in range(first, end, block)
        ]


class Batch(NamedTuple):
    """Right-padded samples and their blocks: numpy arrays on the host, JAX arrays in a step.

    Attributes:
        tokens: int32 [rows, time], the clean stream.
        n_valid: int32 [rows].
        target_weight: float32 [rows, time], weight of predicting this token from those before it.
        block_index: int32 [rows, blocks], clean tokens before each block; 0 where there is none.
        block_tokens: int32 [rows, blocks, block], clean tokens of the blocks.
        block_masked: bool [rows, blocks, block], the noise.
        block_n_valid: int32 [rows, blocks], block length, or 0 where there is no block.
        block_weight: float32 [rows, blocks, block], loss weight of a position when it is masked.
        block_follows: bool [rows, blocks], whether the noise is to be what the model leaves masked
            of the same block in the first view (`on_policy.follow`).
    """

    tokens: Any
    n_valid: Any
    target_weight: Any
    block_index: Any
    block_tokens: Any
    block_masked: Any
    block_n_valid: Any
    block_weight: Any
    block_follows: Any


def noise_levels(seed: int, epoch: int, sample: int, blocks: int) -> np.ndarray:
    """Mask probability t of each block, [blocks], uniform on [0, 1) in the marginal.

    Antithetic strata: one uniform draw per sample, rotated by 1/blocks from block to block.
    """
    u = np.random.default_rng([seed, epoch, sample]).random()
    return (u + np.arange(blocks) / blocks) % 1.0


def block_noise(seed: int, epoch: int, sample: int, blocks: int, block: int) -> np.ndarray:
    """Which positions are masked, bool [blocks, block]: each with its block's t, at least one."""
    masked = np.zeros((blocks, block), bool)
    for b, t in enumerate(noise_levels(seed, epoch, sample, blocks)):
        draw = np.random.default_rng([seed, epoch, sample, b + 1]).random(block)
        masked[b] = draw < t
        if not masked[b].any():
            masked[b, draw.argmin()] = True
    return masked


def frontier_noise(
    seed: int, epoch: int, sample: int, lengths: Sequence[int], block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks known up to a frontier and masked past it, as decoding from the left meets them.

    Args:
        seed: of the noise.
        epoch: of the noise.
        sample: its number.
        lengths: response tokens of each block; the frontier is one of them.
        block: block length.

    Returns:
        masked, bool [blocks, block], and the factor of the loss weight, 1 at the frontier.
    """
    rng = np.random.default_rng([seed, epoch, sample, _FRONTIER])
    at = np.arange(block)[None]
    whole = rng.random(len(lengths)) < WHOLE
    frontier = np.where(whole, 0, rng.random(len(lengths)) * np.asarray(lengths))
    frontier = frontier.astype(int)[:, None]
    return at >= frontier, FALL ** np.maximum(at - frontier, 0)


def looks_decoded(seed: int, epoch: int, sample: int, share: float) -> bool:
    """Whether a sample gets frontier noise."""
    return bool(np.random.default_rng([seed, epoch, sample, _FRONTIER + 1]).random() < share)


def make_batch(
    examples: Sequence[Example],
    *,
    time: int,
    blocks: int,
    block: int,
    pad_id: int,
    seed: int,
    epoch: int,
    pad_weight: float,
    complementary: bool = False,
    frontier_share: float = 0.0,
) -> Batch:
    """Lay out samples of at most `time` tokens and at most `blocks` response blocks.

    Args:
        examples: one per row.
        time: width of the clean stream.
        blocks: blocks per row, of one view.
        block: block length.
        pad_id: fills the last block and the rows' tails.
        seed: of the noise.
        epoch: of the noise.
        pad_weight: loss weight of the pads after the stop (the stop itself has 1); small, since
            full-weight padding teaches a model to end early.
        complementary: every block twice, the second time with the other positions masked, so that
            one clean pass serves a prediction of every token (Fast-dLLM v2's complementary masks).
        frontier_share: share of the samples with frontier noise. Their second view, if there is
            one, follows the first.
    """
    rows, views = len(examples), 2 if complementary else 1
    tokens = np.full((rows, time), pad_id, np.int32)
    target_weight = np.zeros((rows, time), np.float32)
    index = np.zeros((rows, blocks), np.int32)
    block_tokens = np.full((rows, blocks, block), pad_id, np.int32)
    masked = np.zeros((views, rows, blocks, block), bool)
    weight = np.zeros((views, rows, blocks, block), np.float32)
    follows = np.zeros((views, rows, blocks), bool)
    for r, example in enumerate(examples):
        tokens[r, : len(example.tokens)] = example.tokens
        for first, end in example.turns:
            target_weight[r, first:end] = 1.0
        grid = example.blocks(block)
        used, lengths = len(grid), [end - first for first, end in grid]
        for b, (first, end) in enumerate(grid):
            index[r, b] = first
            block_tokens[r, b, : end - first] = example.tokens[first:end]
            weight[:, r, b] = pad_weight
            weight[:, r, b, : end - first] = 1.0
        noise = (seed, epoch, example.sample)
        if looks_decoded(*noise, frontier_share):
            masked[:, r, :used], factor = frontier_noise(*noise, lengths, block)
            weight[:, r, :used] *= factor
            follows[1:, r, :used] = True
        else:
            first = block_noise(*noise, used, block)
            masked[:, r, :used] = np.stack([first, ~first])[:views]
    # Views side by side. A block of which a view masks nothing is none there.
    beside = lambda a: np.concatenate(list(a), axis=1)
    return Batch(
        tokens=tokens,
        n_valid=np.asarray([len(e.tokens) for e in examples], np.int32),
        target_weight=target_weight,
        block_index=beside([index] * views),
        block_tokens=beside([block_tokens] * views),
        block_masked=beside(masked),
        block_n_valid=beside(np.where(masked.any(-1), block, 0).astype(np.int32)),
        block_weight=beside(weight),
        block_follows=beside(follows),
    )
