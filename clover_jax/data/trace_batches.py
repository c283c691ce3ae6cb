"""Batches of traces: a grain pipeline whose position belongs into the run's checkpoint.

    sample numbers -> shuffled, anew in every epoch -> windows -> batches of similar sizes

Windows end with their epoch. Batch `step` depends on (file, config, step) only; the state saves a
resumed run from drawing all earlier steps again, and says if the file has changed since.

Nothing else in clover_jax imports this module before it needs it: grain is of the extra `train`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clover_jax.data.pipeline import WINDOW, Rows, TraceConfig
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.data.traces import read_traces, truncate_all
from clover_jax.diffusion.corrupt import Batch
from clover_jax.errors import CloverError

try:
    import grain
except ImportError:
    raise CloverError(
        "traces are read with the package grain: install clover-jax with its extra `train`"
    ) from None


class TraceBatches:
    """Batches of a file's samples, by step.

    Attributes:
        traces: what the file holds.
        lost: what cutting to the last bucket lost, by reason.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: TraceConfig, *, block: int, split: str = "train"
    ) -> None:
        """Read the whole file.

        Args:
            tokenizer: of the checkpoint, with its template.
            config: what to read.
            block: the model's block length.
            split: `train` or `val`.

        Raises:
            CloverError: bad lines, no such split, or no sample of which a block fits a bucket.
        """
        files = {"train": config.train, "val": config.val}
        path = files.get(split)
        if path is None:
            raise CloverError(
                f"split is {split!r}: expected one of "
                f"{', '.join(name for name, file in files.items() if file)}"
            )
        lengths = config.noise.every_length(block)
        if any(block % length for length in lengths):
            raise CloverError(
                f"noise lengths are {lengths}: expected divisors of the model's block length, "
                f"{block}, since a cut turn must end with a block of any length"
            )
        self.config = config
        self.tokenizer = tokenizer
        self._block = block
        self.traces = read_traces(Path(path), tokenizer)
        tokens, blocks = config.buckets[-1]
        samples = (sample.example for sample in self.traces.samples)
        self._examples, self.lost = truncate_all(
            samples, block=block, tokens=tokens, blocks=blocks * min(lengths) // block
        )
        if not self._examples:
            raise CloverError(
                f"{path} has no sample of which a block fits the last bucket, {tokens} tokens and "
                f"{blocks} blocks: choose a larger one"
            )
        self._batches = self._pipeline()
        self._iterator = iter(self._batches)
        self._step = 0

    def batch(self, step: int) -> Batch:
        """The batch of a training step; steps in their order are cheapest."""
        if step < self._step:
            self._iterator, self._step = iter(self._batches), 0
        while self._step < step:
            self._next()
        epoch, first, rows = self._next()
        return self.config.lay_out(
            rows, block=self._block, tokenizer=self.tokenizer, epoch=epoch, step=first
        )

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch, as JSON values."""
        iterator = self._iterator.get_state()
        return {"step": self._step, "sha256": self.traces.sha256, "iterator": iterator}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a position; the config must be that of the run that it is from.

        Raises:
            CloverError: the file is another one than it was.
        """
        if state["sha256"] != self.traces.sha256:
            raise CloverError(
                f"{self.config.train} has changed since the checkpoint was written (SHA-256 "
                f"{self.traces.sha256[:12]}, was {state['sha256'][:12]}): put the old file back, "
                "or start a new run"
            )
        self._iterator.set_state(state["iterator"])
        self._step = state["step"]

    def _next(self) -> tuple[int, int, Rows]:
        self._step += 1
        return next(self._iterator)

    def _pipeline(self) -> grain.IterDataset[tuple[int, int, Rows]]:
        """(epoch, about the step of the window's first batch, rows of a batch), for ever."""
        numbers = grain.MapDataset.range(len(self._examples)).seed(self.config.seed).shuffle()
        windows = numbers.batch(WINDOW * self.config.rows, batch_fn=list)
        count = len(windows)

        def arrange(index: int, window: Sequence[int]) -> list[tuple[int, int, Rows]]:
            """A window of samples becomes batches of rows."""
            epoch, first = index // count, index * WINDOW
            batches = self.config.batches(
                [self._examples[i] for i in window],
                math.ceil(len(window) / self.config.rows),
                length_of=self.config.length_of(self._block, epoch=epoch, step=first),
                shuffle=f"{self.config.seed}\0{index}",
            )
            return [(epoch, first, rows) for rows in batches]

        # Everything is in memory: threads would only get in each other's way.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        repeated = windows.map_with_index(arrange).repeat().to_iter_dataset(options)
        return grain.experimental.FlatMapIterDataset(repeated, _Flatten())


class _Flatten(grain.experimental.FlatMapTransform):
    max_fan_out = WINDOW

    def flat_map(self, element: list[Any]) -> list[Any]:
        return element
