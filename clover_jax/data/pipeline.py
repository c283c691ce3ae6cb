"""From samples to rows, and batches of task items. Batch `step` is a pure function of the
configuration.

Samples are not packed: a row is one sample. To keep padding small, a window of samples is sorted by
size and cut into batches, each in the smallest bucket that holds all of its samples.
"""

import dataclasses
import functools
import random
from collections.abc import Sequence

import numpy as np

from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import Batch, Example, make_batch
from clover_jax.errors import CloverError

WINDOW = 16  # batches sorted together


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowConfig:
    """How samples are laid out and noised, whatever they are read from.

    Attributes:
        rows: samples per batch.
        buckets: (tokens, response blocks) of a row, ascending.
        seed: of the data and the noise.
        pad_weight: loss weight of the pads after a stop.
        complementary: every block twice, with complementary noise.
        frontier_share: share of the samples whose blocks are known from the left, as in decoding.
    """

    rows: int = 32
    buckets: tuple[tuple[int, int], ...] = ((48, 1), (80, 2), (144, 4))
    seed: int = 0
    pad_weight: float = 0.05
    complementary: bool = True
    frontier_share: float = 0.0

    def __post_init__(self) -> None:
        widths, blocks = zip(*self.buckets, strict=True) if self.buckets else ((), ())
        ascending = list(widths) == sorted(set(widths)) and list(blocks) == sorted(blocks)
        if self.rows < 1 or not self.buckets or not ascending or min(*widths, *blocks) < 1:
            raise CloverError(
                f"data rows {self.rows}, buckets {self.buckets}: expected at least one row and "
                "buckets of at least one token and block that ascend in both"
            )
        if not 0 <= self.frontier_share <= 1:
            raise CloverError(
                f"data frontier_share is {self.frontier_share}: expected a share from 0 to 1"
            )
        if self.seed < 0 or not 0 <= self.pad_weight < float("inf"):
            raise CloverError(
                f"data seed {self.seed}, pad_weight {self.pad_weight}: expected numbers >= 0"
            )

    def bucket(self, example: Example, block: int) -> int:
        """The smallest bucket that holds a sample, or their number if none does."""
        blocks = len(example.blocks(block))
        fits = [
            i
            for i, (time, most) in enumerate(self.buckets)
            if len(example.tokens) <= time and blocks <= most
        ]
        return fits[0] if fits else len(self.buckets)

    def batches(
        self, examples: Sequence[Example], count: int, *, block: int, shuffle: str
    ) -> list[list[Example]]:
        """A window of samples cut into `count` batches of similar sizes, in a random order.

        Args:
            examples: each fits a bucket.
            count: of batches, enough for `rows` to hold every sample.
            block: block length.
            shuffle: seed of the order of the batches.
        """
        ordered = sorted(examples, key=lambda e: (self.bucket(e, block), len(e.tokens)))
        parts = [list(part) for part in np.array_split(np.arange(len(ordered)), count)]
        random.Random(shuffle).shuffle(parts)
        return [[ordered[i] for i in part] for part in parts]

    def lay_out(self, examples: Sequence[Example], *, block: int, pad_id: int, epoch: int) -> Batch:
        """At most `rows` samples in the smallest bucket that holds all; other rows are empty."""
        time, blocks = self.buckets[max((self.bucket(e, block) for e in examples), default=0)]
        empty = Example(0, (), ())
        return make_batch(
            [*examples, *[empty] * (self.rows - len(examples))],
            time=time,
            blocks=blocks,
            block=block,
            pad_id=pad_id,
            seed=self.seed,
            epoch=epoch,
            pad_weight=self.pad_weight,
            complementary=self.complementary,
            frontier_share=self.frontier_share,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(RowConfig):
    """What a run on the procedural tasks reads; samples larger than any bucket are left out.

    Attributes:
        mix: task weights and the share of samples with an open think block.
    """

    mix: tasks.Mix = tasks.MIX


class TaskBatches:
    """Batches of the procedural tasks, by step."""

    def __init__(
        self, tokenizer: Tokenizer, config: DataConfig, *, block: int, split: str = "train"
    ) -> None:
        """`block` is the model's block length, `split` one of `tasks.SPLITS`."""
        self.config = config
        self.tokenizer = tokenizer
        self._block = block
        self._split = split
        self._window = functools.lru_cache(maxsize=2)(self._make_window)

    def example(self, index: int) -> Example:
        """Sample `index`, tokenised."""
        mix, seed, split = self.config.mix, self.config.seed, self._split
        item = tasks.item_at(mix, seed, split, index)
        thinking = tasks.thinking_at(mix, seed, split, index)
        return to_example(self.tokenizer, item, thinking=thinking, sample=index)

    def batch(self, step: int) -> Batch:
        """The batch of a training step."""
        window, place = divmod(step, WINDOW)
        examples = self._window(window)[place]
        pad_id = self.tokenizer.pad_id
        return self.config.lay_out(examples, block=self._block, pad_id=pad_id, epoch=0)

    def _make_window(self, window: int) -> list[list[Example]]:
        rows, buckets = self.config.rows, self.config.buckets
        first = window * WINDOW * rows
        examples = [self.example(first + i) for i in range(WINDOW * rows)]
        examples = [e for e in examples if self.config.bucket(e, self._block) < len(buckets)]
        if not examples:
            raise CloverError(
                f"no sample of window {window} fits a bucket of {buckets} (tokens, "
                "response blocks): choose a larger one"
            )
        shuffle = f"{self.config.seed}\0{window}"
        return self.config.batches(examples, WINDOW, block=self._block, shuffle=shuffle)


def to_example(tokenizer: Tokenizer, item: tasks.Item, *, thinking: bool, sample: int) -> Example:
    """Prompt and response of an item, tokenised apart; the response ends its turn."""
    prompt = tokenize_prompt(tokenizer, tasks.messages(item), enable_thinking=thinking)
    response = tokenizer.encode(tasks.response_text(item, thinking), special=True)
    return Example.single(sample, prompt, [*response, tokenizer.end_of_turn_id])
