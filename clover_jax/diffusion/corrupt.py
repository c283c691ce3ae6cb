"""From a tokenised sample to the two streams of training.

The block grid starts at the first token of each assistant turn. A turn is its tokens and the stop
that ends it; past it, its last block is filled with pads, as a preview always sees full blocks.
A row holds one sample or several, one after the other, that do not see each other.
Noise depends on (seed, epoch, sample, block) only, so a batch is the same however it is split,
resumed or ordered.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clover_jax.errors import CloverError
from clover_jax.model.transformer import CleanInput, NoisyInput

# Frontier noise: share of the blocks that start wholly masked, and how the loss weight falls with
# the distance from the frontier.
WHOLE, FALL = 0.3, 0.95
# Keep these draws apart from those of the blocks, which are numbered from 1.
_FRONTIER, _LENGTH, _SUBSTITUTES = 2**31, 2**31 + 2, 2**31 + 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """How blocks are corrupted. Every draw depends on (seed, epoch, sample, block) only.

    Attributes:
        band: range of a block's mask probability t; (0, 1) for likelihoods, dFactory fine-tunes
            with (0.3, 0.8).
        antithetic: the t of a sample's blocks are spread evenly over the band, not drawn one by
            one; the marginal of each stays uniform.
        complementary: every block twice, the second time with the other positions masked, so that
            one clean pass serves a prediction of every token (Fast-dLLM v2's complementary masks).
        frontier_share: share of the samples with frontier noise. Their second view, if there is
            one, follows the first (`on_policy.follow`).
        substituted: share of the known positions that show another token, which the model has to
            put right (token to token, LLaDA2.1): for samplers that edit. Not in frontier noise.
        pad_weight: loss weight of the pads after the stop (the stop itself has 1); small, since
            full-weight padding teaches a model to end early.
        lengths: block lengths that samples draw from; none is the model's own. Others than that
            make the model usable at several lengths.
        curriculum: (first step, longest length) in order of steps: longer ones are cut to it.
    """

    band: tuple[float, float] = (0.0, 1.0)
    antithetic: bool = True
    complementary: bool = True
    frontier_share: float = 0.0
    substituted: float = 0.0
    pad_weight: float = 0.05
    lengths: tuple[int, ...] = ()
    curriculum: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        low, high = self.band
        if not 0 <= low < high <= 1:
            raise CloverError(f"noise band is {self.band}: expected 0 <= low < high <= 1")
        for name in ("frontier_share", "substituted"):
            if not 0 <= getattr(self, name) <= 1:
                raise CloverError(
                    f"noise {name} is {getattr(self, name)}: expected a share from 0 to 1"
                )
        if not 0 <= self.pad_weight < math.inf:
            raise CloverError(f"noise pad_weight is {self.pad_weight}: expected a number >= 0")
        steps = [step for step, _ in self.curriculum]
        longest = [length for _, length in self.curriculum]
        if min([*self.lengths, *longest], default=1) < 1 or steps != sorted(set(steps)):
            raise CloverError(
                f"noise lengths {self.lengths}, curriculum {self.curriculum}: expected block "
                "lengths of at least 1, and steps that ascend"
            )

    def every_length(self, block: int) -> tuple[int, ...]:
        """All block lengths that a sample may have in a model of block length `block`.

        Raises:
            CloverError: a length is above the model's.
        """
        if max(self.lengths, default=0) > block:
            raise CloverError(
                f"noise lengths are {self.lengths}: expected at most the model's block length, "
                f"{block}"
            )
        longest = [min(block, length) for _, length in self.curriculum] or [block]
        lengths = self.lengths or (block,)
        return tuple(sorted({min(length, cut) for length in lengths for cut in longest}))

    def length(self, block: int, *, epoch: int, sample: int, seed: int, step: int = 0) -> int:
        """The block length of a sample in a model of block length `block`, at a step."""
        lengths = self.lengths or (block,)
        draw = np.random.default_rng([seed, epoch, sample, _LENGTH]).integers(len(lengths))
        longest = [length for first, length in self.curriculum if first <= step]
        return min([lengths[draw], *longest[-1:]])


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
        block_shown: int32 [rows, blocks, block], what the model sees where nothing is masked: the
            clean token, or a substitute for it.
        block_masked: bool [rows, blocks, block], the noise.
        block_n_valid: int32 [rows, blocks], the block's length, or 0 where there is no block.
        block_weight: float32 [rows, blocks, block], loss weight of a position when it is masked or
            substituted.
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
    block_shown: Any
    block_masked: Any
    block_n_valid: Any
    block_weight: Any
    block_follows: Any
    start: Any = None
    block_start: Any = None


def streams(batch: Batch) -> tuple[CleanInput, NoisyInput]:
    """A batch as the inputs of the two-stream forward."""
    clean = CleanInput(batch.tokens, batch.n_valid, batch.start)
    return clean, NoisyInput(
        batch.block_shown,
        batch.block_masked,
        batch.block_n_valid,
        batch.block_index,
        batch.block_start,
    )


def noise_levels(
    seed: int, epoch: int, sample: int, blocks: int, *, antithetic: bool = True
) -> np.ndarray:
    """Place of each block's t in the band, [blocks], uniform on [0, 1) in the marginal.

    Antithetic strata: one uniform draw per sample, rotated by 1/blocks from block to block.
    """
    rng = np.random.default_rng([seed, epoch, sample])
    if not antithetic:
        return rng.random(blocks)
    return (rng.random() + np.arange(blocks) / blocks) % 1.0


def block_noise(
    seed: int, epoch: int, sample: int, blocks: int, block: int, noise: NoiseConfig
) -> np.ndarray:
    """Which positions are masked, bool [blocks, block]: each with its block's t, at least one."""
    low, high = noise.band
    levels = noise_levels(seed, epoch, sample, blocks, antithetic=noise.antithetic)
    masked = np.zeros((blocks, block), bool)
    for b, t in enumerate(low + (high - low) * levels):
        draw = np.random.default_rng([seed, epoch, sample, b + 1]).random(block)
        masked[b] = draw < t
        if not masked[b].any():
            masked[b, draw.argmin()] = True
    return masked


def substitute(
    tokens: np.ndarray, seed: int, epoch: int, sample: int, share: float, ids: np.ndarray
) -> np.ndarray:
    """The tokens [blocks, block] with a share of them replaced by random ones of `ids`."""
    rng = np.random.default_rng([seed, epoch, sample, _SUBSTITUTES])
    chosen = rng.random(tokens.shape) < share
    return np.where(chosen, rng.choice(ids, tokens.shape), tokens).astype(np.int32)


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


def pack(
    examples: Sequence[Example], *, time: int, blocks: int, length_of: Callable[[Example], int]
) -> Packed:
    """Lay samples into few rows of at most `time` tokens and `blocks` blocks of one view.

    First fit, longest first: a sample goes into the oldest row with room for it, else into a new
    one. Equally long samples go in the given order; a row's samples stand as they went in.
    """
    packed = Packed([], [])
    room: list[tuple[int, int]] = []  # tokens and blocks, by row
    for example in sorted(examples, key=lambda e: -len(e.tokens)):
        n, used = len(example.tokens), len(example.blocks(length_of(example)))
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
    noise: NoiseConfig,
    step: int = 0,
    substitutes: np.ndarray | None = None,
    packed: bool = False,
) -> Batch:
    """Lay out rows of at most `time` tokens and at most `blocks` response blocks.

    Args:
        rows: the samples of each row, in order.
        time: width of the clean stream.
        blocks: blocks per row, of one view.
        block: the model's block length.
        pad_id: fills the last block and the rows' tails.
        seed: of the noise.
        epoch: of the noise.
        noise: how blocks are corrupted.
        step: of training, for the curriculum.
        substitutes: ids that may stand for others; needed where `noise.substituted` is not 0.
        packed: whether rows may hold several samples, so that every batch of a run is of one
            program; a batch in which one does is packed in any case.

    Raises:
        CloverError: a row that holds more.
    """
    packed = packed or any(len(row) > 1 for row in rows)
    count, views = len(rows), 2 if noise.complementary else 1
    tokens = np.full((count, time), pad_id, np.int32)
    target_weight = np.zeros((count, time), np.float32)
    start = np.zeros((count, time), np.int32)
    block_start = np.zeros((count, blocks), np.int32)
    index = np.zeros((count, blocks), np.int32)
    block_tokens = np.full((count, blocks, block), pad_id, np.int32)
    shown = np.full((views, count, blocks, block), pad_id, np.int32)
    masked = np.zeros((views, count, blocks, block), bool)
    weight = np.zeros((views, count, blocks, block), np.float32)
    lengths = np.zeros((count, blocks), np.int32)
    follows = np.zeros((views, count, blocks), bool)
    for r, row in enumerate(rows):
        at = b = 0  # column and block where the next sample begins
        for example in row:
            draw = (seed, epoch, example.sample)
            size = noise.length(block, seed=seed, epoch=epoch, sample=example.sample, step=step)
            grid = example.blocks(size)
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
                weight[:, r, i, :size] = noise.pad_weight
                weight[:, r, i, : stop - first] = 1.0
            lengths[r, b:last] = size
            own, inside = np.s_[:, r, b:last], np.s_[:, r, b:last, :size]
            shown[own] = block_tokens[r, b:last]
            if looks_decoded(*draw, noise.frontier_share):
                known = [stop - first for first, stop in grid]
                masked[inside], factor = frontier_noise(*draw, known, size)
                weight[inside] *= factor
                follows[1:, r, b:last] = True
            else:
                view = block_noise(*draw, len(grid), size, noise)
                masked[inside] = np.stack([view, ~view])[:views]
                if noise.substituted:
                    assert substitutes is not None
                    own_tokens = block_tokens[r, b:last, :size]
                    shown[inside] = substitute(own_tokens, *draw, noise.substituted, substitutes)
            at, b = end, last
    # Views side by side. A block of which a view masks nothing is none there.
    beside = lambda a: np.concatenate(list(a), axis=1)
    return Batch(
        tokens=tokens,
        n_valid=np.asarray([sum(len(e.tokens) for e in row) for row in rows], np.int32),
        target_weight=target_weight,
        block_index=beside([index] * views),
        block_tokens=beside([block_tokens] * views),
        block_shown=beside(shown),
        block_masked=beside(masked),
        block_n_valid=beside(np.where(masked.any(-1), lengths, 0).astype(np.int32)),
        block_weight=beside(weight),
        block_follows=beside(follows),
        start=start if packed else None,
        block_start=beside([block_start] * views) if packed else None,
    )
