"""From a (prompt, response) pair to the two streams of training.

The block grid starts at the response's first token. A response is its tokens and the stop that
ends the turn; past it, its last block is filled with pads, as a preview always sees full blocks.
Noise depends on (seed, epoch, sample, block) only, so a batch is the same however it is split,
resumed or ordered.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# Frontier noise: share of the positions past the frontier that are known all the same, and how the
# loss weight falls with the distance from it.
ISLANDS, FALL = 0.1, 0.9
_FRONTIER = 2**31  # keeps its draws apart from those of the blocks


class Example(NamedTuple):
    """One tokenised sample; prompt and response are tokenised apart."""

    sample: int  # its number, the source of its noise
    prompt: Sequence[int]
    response: Sequence[int]  # ends with the stop token

    @property
    def length(self) -> int:
        """Tokens of the clean stream."""
        return len(self.prompt) + len(self.response)


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
    """

    tokens: Any
    n_valid: Any
    target_weight: Any
    block_index: Any
    block_tokens: Any
    block_masked: Any
    block_n_valid: Any
    block_weight: Any


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
    seed: int, epoch: int, sample: int, view: int, lengths: Sequence[int], block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks as the sampler meets them: known up to a frontier, past it masked but for islands.

    Args:
        seed: of the noise.
        epoch: of the noise.
        sample: its number.
        view: 0, or 1 for the second view of a sample.
        lengths: response tokens of each block; the frontier is one of them.
        block: block length.

    Returns:
        masked, bool [blocks, block], and the factor of the loss weight, 1 at the frontier.
    """
    rng = np.random.default_rng([seed, epoch, sample, _FRONTIER + view])
    at = np.arange(block)[None]
    frontier = (rng.random(len(lengths)) * np.asarray(lengths)).astype(int)[:, None]
    island = (rng.random((len(lengths), block)) < ISLANDS) & (at < np.asarray(lengths)[:, None])
    masked = (at >= frontier) & ~(island & (at > frontier))
    return masked, FALL ** np.maximum(at - frontier, 0)


def looks_decoded(seed: int, epoch: int, sample: int, share: float) -> bool:
    """Whether a sample gets frontier noise."""
    return bool(np.random.default_rng([seed, epoch, sample, _FRONTIER + 2]).random() < share)


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
        frontier_share: share of the samples with frontier noise, in both views if there are two.
    """
    rows, views = len(examples), 2 if complementary else 1
    tokens = np.full((rows, time), pad_id, np.int32)
    target_weight = np.zeros((rows, time), np.float32)
    index = np.zeros((rows, blocks), np.int32)
    block_tokens = np.full((rows, blocks, block), pad_id, np.int32)
    masked = np.zeros((views, rows, blocks, block), bool)
    weight = np.zeros((views, rows, blocks, block), np.float32)
    for r, example in enumerate(examples):
        prompt, response = len(example.prompt), len(example.response)
        tokens[r, : prompt + response] = [*example.prompt, *example.response]
        target_weight[r, prompt : prompt + response] = 1.0
        used = -(-response // block)
        index[r, :used] = prompt + block * np.arange(used)
        flat = block_tokens[r, :used].reshape(-1)
        flat[:response] = example.response
        block_tokens[r, :used] = flat.reshape(used, block)
        flat_weight = np.full(used * block, pad_weight, np.float32)
        flat_weight[:response] = 1.0
        weight[:, r, :used] = flat_weight.reshape(used, block)
        noise = (seed, epoch, example.sample)
        if looks_decoded(*noise, frontier_share):
            lengths = [min(block, response - block * b) for b in range(used)]
            for view in range(views):
                masked[view, r, :used], factor = frontier_noise(*noise, view, lengths, block)
                weight[view, r, :used] *= factor
        else:
            first = block_noise(*noise, used, block)
            masked[:, r, :used] = np.stack([first, ~first])[:views]
    # Views side by side. A block of which a view masks nothing is none there.
    beside = lambda a: np.concatenate(list(a), axis=1)
    return Batch(
        tokens=tokens,
        n_valid=np.asarray([e.length for e in examples], np.int32),
        target_weight=target_weight,
        block_index=beside([index] * views),
        block_tokens=beside([block_tokens] * views),
        block_masked=beside(masked),
        block_n_valid=beside(np.where(masked.any(-1), block, 0).astype(np.int32)),
        block_weight=beside(weight),
    )
