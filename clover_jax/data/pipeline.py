"""From samples to rows, and batches of task items. Batch `step` is a pure function of the
configuration.

A row is one sample unless packing is asked for. To keep padding small, a window of samples is
sorted by size and cut into batches, each in the smallest bucket that holds all of its samples.
"""

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import Batch, Example, NoiseConfig, make_batch, pack
from clover_jax.errors import CloverError

WINDOW = 16  # batches sorted together

NOISE = NoiseConfig()
type Rows = Sequence[Sequence[Example]]  # the samples of each row of a batch


@runtime_checkable
class Batches(Protocol):
    """What a run reads."""

    lost: Counter[str]  # what it does not read of what it was given, by reason

    def batch(self, step: int) -> Batch:
        """The batch of a training step: the same whenever it is asked for."""
        ...

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch, as JSON values."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowConfig:
    """How samples are laid out and noised, whatever they are read from.

    Attributes:
        rows: samples per batch.
        buckets: (tokens, response blocks) of a row, ascending.
        seed: of the data and the noise.
        noise: how blocks are corrupted. A curriculum's lengths change with a window of batches.
        packed: rows of the largest bucket hold several samples, which do not see each other.
    """

    rows: int = 32
    buckets: tuple[tuple[int, int], ...] = ((48, 1), (80, 2), (144, 4))
    seed: int = 0
    noise: NoiseConfig = NOISE
    packed: bool = False

    def __post_init__(self) -> None:
        widths, blocks = zip(*self.buckets, strict=True) if self.buckets else ((), ())
        ascending = list(widths) == sorted(set(widths)) and list(blocks) == sorted(blocks)
        if self.rows < 1 or not self.buckets or not ascending or min(*widths, *blocks) < 1:
            raise CloverError(
                f"data rows {self.rows}, buckets {self.buckets}: expected at least one row and "
                "buckets of at least one token and block that ascend in both"
            )
        if self.seed < 0:
            raise CloverError(f"data seed is {self.seed}: expected a number >= 0")

    def length_of(self, block: int, *, epoch: int, step: int) -> Callable[[Example], int]:
        """Block length of each sample in a model of block length `block`."""
        return lambda example: self.noise.length(
            block, seed=self.seed, epoch=epoch, sample=example.sample, step=step
        )

    def bucket(self, example: Example, length: int) -> int:
        """The smallest bucket for a sample in blocks of a length, or their number if none is."""
        blocks = len(example.blocks(length))
        fits = [
            i
            for i, (time, most) in enumerate(self.buckets)
            if len(example.tokens) <= time and blocks <= most
        ]
        return fits[0] if fits else len(self.buckets)

    def batches(
        self,
        examples: Sequence[Example],
        count: int,
        *,
        length_of: Callable[[Example], int],
        shuffle: str,
    ) -> Sequence[Rows]:
        """A window of samples cut into batches, in a random order.

        Unpacked, `count` batches of samples of similar sizes, one a row; packed, as many batches of
        the largest bucket as it takes.

        Args:
            examples: each fits a bucket.
            count: of batches, enough for `rows` to hold every sample.
            length_of: block length of a sample.
            shuffle: seed of the order of the batches.
        """
        if self.packed:
            time, blocks = self.buckets[-1]
            rows = pack(examples, time=time, blocks=blocks, length_of=length_of).rows
            parts: list[Rows] = [rows[i : i + self.rows] for i in range(0, len(rows), self.rows)]
        else:
            size = lambda e: (self.bucket(e, length_of(e)), len(e.tokens))
            ordered = [(e,) for e in sorted(examples, key=size)]
            cuts = np.array_split(np.arange(len(ordered)), count)
            parts = [[ordered[i] for i in part] for part in cuts]
        random.Random(shuffle).shuffle(parts)
        return parts

    def lay_out(
        self, rows: Rows, *, block: int, tokenizer: Tokenizer, epoch: int, step: int
    ) -> Batch:
        """At most `rows` rows in the smallest bucket that holds all, filled up with empty ones."""
        length_of = self.length_of(block, epoch=epoch, step=step)
        sizes = [self.bucket(e, length_of(e)) for row in rows for e in row]
        time, blocks = self.buckets[-1 if self.packed else max(sizes, default=0)]
        ids = np.arange(tokenizer.vocab_size)
        return make_batch(
            [*rows, *[()] * (self.rows - len(rows))],
            time=time,
            blocks=blocks,
            block=block,
            pad_id=tokenizer.pad_id,
            seed=self.seed,
            epoch=epoch,
            noise=self.noise,
            step=step,
            substitutes=ids[ids != tokenizer.mask_id],
            packed=self.packed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(RowConfig):
    """What a run on the procedural tasks reads; samples larger than any bucket are left out.

    Attributes:
        mix: task weights and the share of samples with an open think block.
    """

    mix: tasks.Mix = tasks.MIX

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packed:
            raise CloverError(
                "data packed is true: the tasks are drawn without end, so batches of like sizes "
                "leave little padding; expected false"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig(RowConfig):
    """What a fine-tuning run reads; samples larger than the last bucket are cut to it.

    Attributes:
        train: JSONL file, see `data/traces.py`.
        val: file of the same form, held out.
    """

    train: str
    val: str | None = None
    buckets: tuple[tuple[int, int], ...] = ((128, 4), (256, 8), (512, 16))


class TaskBatches:
    """Batches of the procedural tasks, by step."""

    def __init__(
        self, tokenizer: Tokenizer, config: DataConfig, *, block: int, split: str = "train"
    ) -> None:
        """`block` is the model's block length, `split` one of `tasks.SPLITS`.

        Raises:
            CloverError: the config asks for blocks longer than the model's.
        """
        config.noise.every_length(block)
        self.config = config
        self.tokenizer = tokenizer
        self.lost = Counter[str]()  # items are made, not given
        self._block = block
        self._split = split
        self._window = functools.lru_cache(maxsize=2)(self._make_window)

    def example(self, index: int) -> Example:
        """Sample `index`, tokenised."""
        mix, seed, split = self.config.mix, self.config.seed, self._split
        item = tasks.item_at(mix, seed, split, index)
        thinking = tasks.thinking_at(mix, seed, split, index)
        return to_example(self.tokenizer, item, thinking=thinking, sample=index)

    def get_state(self) -> dict[str, Any]:
        """Nothing: a step is all there is to a position."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Nothing to do."""

    def batch(self, step: int) -> Batch:
        """The batch of a training step."""
        window, place = divmod(step, WINDOW)
        return self.config.lay_out(
            self._window(window)[place],
            block=self._block,
            tokenizer=self.tokenizer,
            epoch=0,
            step=window * WINDOW,
        )

    def _make_window(self, window: int) -> Sequence[Rows]:
        config = self.config
        length_of = config.length_of(self._block, epoch=0, step=window * WINDOW)
        first, count = window * WINDOW * config.rows, WINDOW * config.rows
        examples = [self.example(first + i) for i in range(count)]
        fits = [e for e in examples if config.bucket(e, length_of(e)) < len(config.buckets)]
        if not fits:
            raise CloverError(
                f"no sample of window {window} fits a bucket of {config.buckets} (tokens, "
                "response blocks): choose a larger one"
            )
        return config.batches(fits, WINDOW, length_of=length_of, shuffle=f"{config.seed}\0{window}")


def to_example(tokenizer: Tokenizer, item: tasks.Item, *, thinking: bool, sample: int) -> Example:
    """Prompt and response of an item, tokenised apart; the response ends its turn."""
    prompt = tokenize_prompt(tokenizer, tasks.messages(item), enable_thinking=thinking)
    response = tokenizer.encode(tasks.response_text(item, thinking), special=True)
    return Example.single(sample, prompt, [*response, tokenizer.end_of_turn_id])
