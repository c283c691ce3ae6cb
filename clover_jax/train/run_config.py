"""What a training run is asked to do: one frozen config for every kind of run."""

import dataclasses
from typing import Literal

from clover_jax.data.pipeline import DataConfig, RowConfig, TraceConfig
from clover_jax.data.tasks import TASKS
from clover_jax.diffusion.loss import LossConfig
from clover_jax.errors import CloverError
from clover_jax.model.lora import LoRAConfig
from clover_jax.train.step import OptimiserConfig

LOG_EVERY = 10  # steps
Kind = Literal["pretrain", "convert", "sft"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Answers by the real sampler while a run goes on, on the `val` split.

    Attributes:
        every: steps between two evaluations; the last step always has one.
        n: problems of each task.
        tasks: families.
        max_tokens: longer answers are cut, and then wrong.
        batch: problems answered together.
    """

    every: int = 500
    n: int = 32
    tasks: tuple[str, ...] = ("chain_sum", "gcd", "number_sorting")
    max_tokens: int = 160
    batch: int = 16

    def __post_init__(self) -> None:
        for name in ("every", "n", "max_tokens", "batch"):
            if getattr(self, name) < 1:
                raise CloverError(
                    f"evaluation {name} is {getattr(self, name)}: expected at least 1"
                )
        if self.every % LOG_EVERY:
            raise CloverError(
                f"evaluation every is {self.every}: expected a multiple of {LOG_EVERY}, the steps "
                "of a line in the log"
            )
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown:
            raise CloverError(
                f"evaluation tasks holds {unknown[0]!r}: expected some of {', '.join(TASKS)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run is asked to do.

    Attributes:
        kind: `pretrain` (clean stream only), `convert` (both streams, from a base or a Clover
            folder), `sft` (both streams, from a Clover folder, on the user's own traces).
        start: a preset's name (pre-training from nothing), or a checkpoint folder.
        data: the tasks that it reads, or None.
        traces: the files that it reads, or None.
        loss: weights of the terms.
        optimiser: rates and steps.
        seed: of the start values.
        calibration_steps: that fit the block operator before the first step.
        lora: what an adapter trains instead of all weights.
        accumulate: parts that a batch's rows run in, one after the other, for less memory.
        compute_dtype: of the pass; None is float32. What is trained is kept in float32, save in a
            pre-training from nothing, which keeps the preset's own dtype.
        remat: recompute each layer in the backward pass, with the router's choices kept.
        evaluation: answers on the way, or None.
    """

    kind: Kind
    start: str
    data: DataConfig | None = None
    traces: TraceConfig | None = None
    loss: LossConfig
    optimiser: OptimiserConfig
    seed: int = 0
    calibration_steps: int = 0
    lora: LoRAConfig | None = None
    accumulate: int = 1
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    remat: bool = False
    evaluation: Evaluation | None = None

    def __post_init__(self) -> None:
        if self.calibration_steps < 0 or not 0 <= self.seed < 2**32:
            raise CloverError(
                f"run calibration_steps {self.calibration_steps}, seed {self.seed}: expected "
                "numbers >= 0, the seed below 2^32"
            )
        if (self.data is None) == (self.traces is None):
            raise CloverError(
                "a run reads tasks or traces: expected one of data and traces, the other null"
            )
        if self.accumulate < 1 or self.rows.rows % self.accumulate:
            raise CloverError(
                f"run accumulate is {self.accumulate}: expected a divisor of the {self.rows.rows} "
                "rows of a batch"
            )
        if self.kind == "pretrain" and (self.loss.diffusion or self.calibration_steps):
            raise CloverError(
                f"pre-training has no blocks, but loss.diffusion is {self.loss.diffusion} and "
                f"calibration_steps {self.calibration_steps}: expected 0 for both"
            )
        noise, follow = self.rows.noise, self.loss.follow_above
        if follow is not None and not (noise.complementary and noise.frontier_share):
            raise CloverError(
                f"loss.follow_above is {follow}, noise.complementary {noise.complementary} and "
                f"noise.frontier_share {noise.frontier_share}: expected true and a share above 0, "
                "since it is the second view of frontier noise that follows the first"
            )
        if noise.complementary and noise.frontier_share and follow is None and self.loss.diffusion:
            raise CloverError(
                f"noise.frontier_share is {noise.frontier_share} and loss.follow_above null: "
                "expected a confidence (such as 0.9), or noise.complementary false; the second "
                "view of a block would repeat the first"
            )

    @property
    def rows(self) -> RowConfig:
        """How what it reads is laid out."""
        rows = self.traces if self.data is None else self.data
        assert rows is not None
        return rows


def default_run(kind: Kind, start: str, *, traces: TraceConfig | None = None) -> RunConfig:
    """The settings of a kind of run before any `--set`; `traces` take the place of tasks."""
    data = DataConfig() if traces is None else None
    if kind == "pretrain":
        return RunConfig(
            kind=kind,
            start=start,
            data=data,
            traces=traces,
            loss=LossConfig(diffusion=0.0),
            optimiser=OptimiserConfig(learning_rate=3e-3, steps=1000),
        )
    return RunConfig(
        kind=kind,
        start=start,
        data=data,
        traces=traces,
        loss=LossConfig(),
        optimiser=OptimiserConfig(learning_rate=1e-3, steps=1000),
        calibration_steps=60 if kind == "convert" else 0,
    )
