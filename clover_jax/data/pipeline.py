"""From task items to training batches. Batch `step` is a pure function of the configuration.

Samples are not packed: a row is one sample. To keep padding small, a window of samples is sorted by
size and cut into batches, each in the smallest bucket that holds all of its samples.
"""

import dataclasses
import functools
import random

import numpy as np

from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import Batch, Example, make_batch
from clover_jax.errors import CloverError

WINDOW = 16  # batches sorted together


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a run reads.

    Attributes:
        mix: task weights and the share of samples with an open think block.
        rows: samples per batch.
        buckets: (tokens, response blocks) of a row, ascending; larger samples are left out.
        seed: of items and noise.
        pad_weight: loss weight of the pads after a stop.
        complementary: every block twice, with complementary noise.
        frontier_share: share of the samples whose blocks are known from the left, as in decoding.
    """

    mix: tasks.Mix = tasks.MIX
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
        return self._layout(self._window(window)[place])

    def _bucket(self, example: Example) -> int:
        """The smallest bucket that holds a sample, or their number if none does."""
        blocks = len(example.blocks(self._block))
        fits = [
            i
            for i, (time, most) in enumerate(self.config.buckets)
            if len(example.tokens) <= time and blocks <= most
        ]
        return fits[0] if fits else len(self.config.buckets)

    def _make_window(self, window: int) -> list[list[Example]]:
        rows = self.config.rows
        first = window * WINDOW * rows
        examples = [self.example(first + i) for i in range(WINDOW * rows)]
        examples = [e for e in examples if self._bucket(e) < len(self.config.buckets)]
        if not examples:
            raise CloverError(
                f"no sample of window {window} fits a bucket of {self.config.buckets} (tokens, "
                "response blocks): choose a larger one"
            )
        examples.sort(key=lambda e: (self._bucket(e), len(e.tokens)))
        parts = [list(part) for part in np.array_split(np.arange(len(examples)), WINDOW)]
        random.Random(f"{self.config.seed}\0{window}").shuffle(parts)
        return [[examples[i] for i in part] for part in parts]

    def _layout(self, examples: list[Example]) -> Batch:
        bucket = max((self._bucket(e) for e in examples), default=0)
        time, blocks = self.config.buckets[bucket]
        rows = [(example,) for example in examples]
        return make_batch(
            rows + [()] * (self.config.rows - len(rows)),
            time=time,
            blocks=blocks,
            block=self._block,
            pad_id=self.tokenizer.pad_id,
            seed=self.config.seed,
            epoch=0,
            pad_weight=self.config.pad_weight,
            complementary=self.config.complementary,
            frontier_share=self.config.frontier_share,
        )


def to_example(tokenizer: Tokenizer, item: tasks.Item, *, thinking: bool, sample: int) -> Example:
    """Prompt and response of an item, tokenised apart; the response ends its turn."""
    prompt = tokenize_prompt(tokenizer, tasks.messages(item), enable_thinking=thinking)
    response = tokenizer.encode(tasks.response_text(item, thinking), special=True)
    return Example.single(sample, prompt, [*response, tokenizer.end_of_turn_id])
