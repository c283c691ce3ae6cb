"""From a tokenised sample to the two streams of training.

The block grid starts at the first token of each assistant turn. A turn is its tokens and the stop
that ends it; past it, its last block is filled with pads, as a preview always sees full blocks.
A row holds one sample or several, one after the other, that do not see each other.
Noise depends on (seed, epoch, sample, block) only, so a batch is the same however it is split,
resumed or ordered.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clover_jax.errors import CloverError

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
        start: int32 [rows, time], column of the first token of each token's sample, 0 for pads;
            None where every row is one sample.
        block_start: int32 [rows, blocks], the same of each block; None likewise.
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
    start: Any = None
    block_start: Any = None


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


class Packed(NamedTuple):
    """Samples by row."""

    rows: list[tuple[Example, ...]]
    left: list[Example]  # too large for a row of their own


def pack(examples: Sequence[Example], *, time: int, blocks: int, block: int) -> Packed:
    """Lay samples into few rows of at most `time` tokens and `blocks` blocks of one view.

    First fit, longest first: a sample goes into the oldest row with room for it, else into a new
    one. Equally long samples go in the given order; a row's samples stand as they went in.
    """
    packed = Packed([], [])
    room: list[tuple[int, int]] = []  # tokens and blocks, by row
    for example in sorted(examples, key=lambda e: -len(e.tokens)):
        n, used = len(example.tokens), len(example.blocks(block))
        if n > time or used > blocks:
            packed.left.append(example)
            continue
        r = next((r for r, (t, b) in enumerate(room) if n <= t and used <= b), len(room))
        if r == len(room):
            packed.rows.append(())
            room.append((time, blocks))
        packed.rows[r] += (example,)
        room[r] = (room[r][0] - n, room[r][1] - used)
    return packed


def make_batch(
    rows: Sequence[Sequence[Example]],
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
    packed: bool = False,
) -> Batch:
    """Lay out rows of at most `time` tokens and at most `blocks` response blocks.

    Args:
        rows: the samples of each row, in order.
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
        packed: whether rows may hold several samples, so that every batch of a run is of one
            program; a batch in which one does is packed in any case.

    Raises:
        CloverError: a row that holds more.
    """
    packed = packed or any(len(row) > 1 for row in rows)
    count, views = len(rows), 2 if complementary else 1
    tokens = np.full((count, time), pad_id, np.int32)
    target_weight = np.zeros((count, time), np.float32)
    start = np.zeros((count, time), np.int32)
    block_start = np.zeros((count, blocks), np.int32)
    index = np.zeros((count, blocks), np.int32)
    block_tokens = np.full((count, blocks, block), pad_id, np.int32)
    masked = np.zeros((views, count, blocks, block), bool)
    weight = np.zeros((views, count, blocks, block), np.float32)
    follows = np.zeros((views, count, blocks), bool)
    for r, row in enumerate(rows):
        at = b = 0  # column and block where the next sample begins
        for example in row:
            grid = example.blocks(block)
            end, last = at + len(example.tokens), b + len(grid)
            if end > time or last > blocks:
                raise CloverError(
                    f"sample {example.sample} ends at token {end} and block {last} of row {r}: "
                    f"expected at most {time} tokens and {blocks} blocks (`pack` makes such rows)"
                )
            tokens[r, at:end] = example.tokens
            start[r, at:end] = block_start[r, b:last] = at
            for first, stop in example.turns:
                target_weight[r, at + first : at + stop] = 1.0
            target_weight[r, at : at + 1] = 0.0  # no token of its sample stands before it
            for i, (first, stop) in enumerate(grid, b):
                index[r, i] = at + first
                block_tokens[r, i, : stop - first] = example.tokens[first:stop]
                weight[:, r, i] = pad_weight
                weight[:, r, i, : stop - first] = 1.0
            noise, own = (seed, epoch, example.sample), np.s_[:, r, b:last]
            if looks_decoded(*noise, frontier_share):
                lengths = [stop - first for first, stop in grid]
                masked[own], factor = frontier_noise(*noise, lengths, block)
                weight[own] *= factor
                follows[1:, r, b:last] = True
            else:
                view = block_noise(*noise, len(grid), block)
                masked[own] = np.stack([view, ~view])[:views]
            at, b = end, last
    # Views side by side. A block of which a view masks nothing is none there.
    beside = lambda a: np.concatenate(list(a), axis=1)
    return Batch(
        tokens=tokens,
        n_valid=np.asarray([sum(len(e.tokens) for e in row) for row in rows], np.int32),
        target_weight=target_weight,
        block_index=beside([index] * views),
        block_tokens=beside([block_tokens] * views),
        block_masked=beside(masked),
        block_n_valid=beside(np.where(masked.any(-1), block, 0).astype(np.int32)),
        block_weight=beside(weight),
        block_follows=beside(follows),
        start=start if packed else None,
        block_start=beside([block_start] * views) if packed else None,
    )
