"""What an ablation's arms come to: problems, configs and training, resolved and hashed.

All that decides a result is known before anything runs, so that one file of results never mixes
configurations, and arms of any ablation that train alike share one training.
"""

import dataclasses
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from clover_jax import checkpoint
from clover_jax.ablations import Ablation
from clover_jax.config import ModelConfig, override
from clover_jax.data import tasks
from clover_jax.data.tasks import Item
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.errors import CloverError
from clover_jax.eval.backends import fingerprint
from clover_jax.eval.card import thinks
from clover_jax.eval.harness import Problem, Task, Verdict
from clover_jax.train.run_config import RunConfig, default_run

PARTS = ("model.", "run.", "decode.", "sampler.", "measure.")


# --- problems -----------------------------------------------------------------------------------


def _long_sum(rng: random.Random) -> Item:
    """A sum of 8 to 12 numbers; training stops at 4."""
    total, expression, steps = 0, "", []
    for i in range(rng.randint(8, 12)):
        number = rng.randint(0, 99)
        if i:
            steps.append(f"{total} + {number} = {total + number}")
        expression += f" + {number}" if i else str(number)
        total += number
    return Item("chain_sum", f"Compute {expression}.", "\n".join(steps), str(total), expression)


def _long_sorting(rng: random.Random) -> Item:
    """16 to 24 numbers; training stops at 8."""
    numbers = [rng.randint(0, 99) for _ in range(rng.randint(16, 24))]
    listed = lambda values: " ".join(map(str, values))
    found = listed(sorted(numbers))
    return Item("number_sorting", f"Sort ascending: {listed(numbers)}", "", found, found)


LONG = {"long_sum": _long_sum, "long_sorting": _long_sorting}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """How a model is measured.

    Attributes:
        tasks: families of the built-in tasks, or of `LONG`: longer than any in training.
        n: problems of each.
        split: held-out part; `val`, since ablations are there to choose by.
        thinking: leave the think block open in families that have a scratchpad.
        mode: `block` or `ar`.
        max_tokens: longer answers are cut, and then wrong.
        batch: problems answered together.
        loss_batches: of 16 samples, whose masked loss is measured; 0 leaves it out.
    """

    tasks: tuple[str, ...] = ("chain_sum", "basic_arithmetic", "products")
    n: int = 32
    split: Literal["val", "test"] = "val"
    thinking: bool = True
    mode: Literal["block", "ar"] = "block"
    max_tokens: int = 160
    batch: int = 16
    loss_batches: int = 0

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in (*tasks.TASKS, *LONG):
                known = ", ".join((*tasks.TASKS, *LONG))
                raise CloverError(f"measure tasks holds {task!r}: expected some of {known}")
        if min(self.n, self.max_tokens, self.batch) < 1 or self.loss_batches < 0:
            raise CloverError(
                f"measure n {self.n}, max_tokens {self.max_tokens}, batch {self.batch}, "
                f"loss_batches {self.loss_batches}: expected at least 1, of the last at least 0"
            )

    def items(self, task: str) -> list[Item]:
        """The problems of a task, the same in every run."""
        if task in LONG:
            return [LONG[task](random.Random(f"{task} {i}")) for i in range(self.n)]
        return tasks.eval_set(task, self.split, self.n)

    def task(self, name: str) -> Task:
        """A task as the harness asks it."""
        items = self.items(name)
        thinking = self.thinking and thinks(items[0].task)

        def judge(problems: Sequence[Problem], texts: Sequence[str]) -> list[Verdict]:
            scores = [
                tasks.score(problem.reference, text, thinking=thinking)
                for problem, text in zip(problems, texts, strict=True)
            ]
            return [Verdict(score.correct, score.format_valid) for score in scores]

        problems = tuple(Problem(item.prompt, item) for item in items)
        return Task(name, problems, judge, self.max_tokens, thinking)


# --- what is to be run --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A training from the parent.

    Attributes:
        start: config of the model that it starts from.
        run: the run, its `start` left empty.
        scratch: from random weights instead of the parent's.
    """

    start: ModelConfig
    run: RunConfig
    scratch: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One arm and seed with all that decides its result.

    Attributes:
        arm: name.
        seed: of the training.
        settings: of the registry.
        weights: digest of the parent's.
        training: None where the parent itself is measured.
        model: config that answers.
        sampler: settings of every request.
        measure: problems and mode.
    """

    arm: str
    seed: int
    settings: tuple[str, ...]
    weights: str
    training: Training | None
    model: ModelConfig
    sampler: SamplerConfig
    measure: Measurement

    @property
    def effective(self) -> dict[str, Any]:
        """As it is read back from a file."""
        return msgspec.json.decode(msgspec.json.encode(self))

    @property
    def hash(self) -> str:
        """Of the effective configuration."""
        return _hash(self)

    @property
    def training_hash(self) -> str:
        """Of what decides the trained weights."""
        return _hash((self.weights, self.training))


def _hash(value: Any) -> str:
    text = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:12]


def plans(ablation: Ablation, parent: Path) -> list[Plan]:
    """Every arm and seed of an ablation from a parent, the first seed of all arms first.

    Raises:
        CloverError: a setting does not fit, or the parent cannot be loaded or preview.
    """
    cfg = checkpoint.inspect(parent).require_loadable().replace(dtype="float32")
    if cfg.bd_gdn is None:
        raise CloverError(
            f"{parent} is an AR folder: give a Clover folder (`clover checkpoint convert {parent} "
            "DIR`); trainings start its block operator anew"
        )
    weights = fingerprint(parent)
    return [
        _plan(ablation, name, seed, cfg, weights)
        for seed in ablation.seeds
        for name in (arm.name for arm in ablation.arms)
    ]


def _plan(ablation: Ablation, name: str, seed: int, cfg: ModelConfig, weights: str) -> Plan:
    arm = ablation.arm(name)
    settings = ablation.settings_of(arm, seed)
    of = {part: [s.removeprefix(part) for s in settings if s.startswith(part)] for part in PARTS}
    strays = [s for s in settings if not s.startswith(PARTS)]
    if ablation.kind == "evaluate":
        strays += [s for s in settings if s.startswith(("model.", "run."))]
    if strays:
        raise CloverError(
            f"{ablation.id}, arm {name}: setting {strays[0]!r} has no place in an ablation of kind "
            f"{ablation.kind}"
        )
    training = None
    if ablation.kind == "convert":
        cfg = override(cfg, of["model."])
        run = override(default_run("convert", ""), of["run."])
        training = Training(start=cfg, run=run, scratch=arm.scratch)
    return Plan(
        arm=name,
        seed=seed,
        settings=settings,
        weights=weights,
        training=training,
        model=override(cfg, of["decode."]),
        sampler=override(SamplerConfig(), of["sampler."]),
        measure=override(Measurement(), of["measure."]),
    )
