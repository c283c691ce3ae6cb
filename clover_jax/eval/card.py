"""The model card's figures: every decoding arm on the same held-out problems, resumable.

Arms share their problems, so differences are paired. Each finished cell is one line of
`cells.jsonl`; a second call with the same settings computes only what is missing.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from clover_jax import checkpoint
from clover_jax.config import canonical_json
from clover_jax.data import tasks
from clover_jax.data.pipeline import DataConfig, TaskBatches
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import streams
from clover_jax.diffusion.generate import Generator
from clover_jax.diffusion.loss import as_arrays
from clover_jax.diffusion.sampling_config import Close, SamplerConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.eval.backends import fingerprint
from clover_jax.eval.held_out import answer
from clover_jax.eval.replay import reference_blocks, replay
from clover_jax.files import whole_file
from clover_jax.model.transformer import forward

MAX_TOKENS = 160  # the longest reference has 108
THRESHOLD = 0.95
FRONTIER = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
EXPERT_BATCHES = 8


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to answer.

    Attributes:
        name: row of the table.
        model: `parent`, `control` or `model`.
        mode: `ar` or `block`.
        block: block length; of no account in AR mode.
        close: when a block closes.
        threshold: of the confidence.
        frontier: thresholds at which it answers again, for the curve.
    """

    name: str
    model: Literal["parent", "control", "model"]
    mode: Literal["ar", "block"]
    block: int = 32
    close: Close = "resolved"
    threshold: float = THRESHOLD
    frontier: tuple[float, ...] = ()


ARMS = (
    Arm("AR parent", "parent", "ar"),
    Arm("AR control", "control", "ar"),
    Arm("AR mode", "model", "ar"),
    Arm("block 32", "model", "block", 32, frontier=FRONTIER),
    Arm("block 16", "model", "block", 16),
    Arm("block 8", "model", "block", 8),
    Arm("block 32, unsure", "model", "block", 32, "unsure", frontier=FRONTIER),
    # Nothing exceeds 1: one preview drafts, the causal pass judges.
    Arm("block 32, verified", "model", "block", 32, "verified", 1.0, (THRESHOLD, 1.0)),
)
BASE_ARM = "AR mode"  # what the others are compared with


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardConfig:
    """What is measured.

    Attributes:
        n: problems per task (a family may have fewer).
        frontier_n: problems per task and threshold.
        replay_n: reference answers per task.
        split: `test`, or `val` while developing.
        batch: problems answered together.
    """

    n: int = 300
    frontier_n: int = 100
    replay_n: int = 100
    split: str = "test"
    batch: int = 32

    def __post_init__(self) -> None:
        numbers = (self.n, self.frontier_n, self.replay_n, self.batch)
        if min(numbers) < 1:
            raise CloverError(f"card sizes are {numbers}: expected numbers of at least 1")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One task in one arm.

    Attributes:
        right: per problem, `1` or `0`.
        tokens: per problem, up to and including the stop.
        previews: of all problems.
        forwards: of all problems.
        stopped: answers that ended by themselves.
        format_valid: answers of the family's form.
    """

    right: str
    tokens: tuple[int, ...]
    previews: int
    forwards: int
    stopped: int
    format_valid: int

    @property
    def solved(self) -> list[bool]:
        """Per problem."""
        return [c == "1" for c in self.right]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right.count("1") / len(self.right)

    @property
    def tpf(self) -> float:
        """Tokens over all forwards."""
        return sum(self.tokens) / max(self.forwards, 1)

    @property
    def tpf_previews(self) -> float | None:
        """Tokens over previews; None in AR mode."""
        return sum(self.tokens) / self.previews if self.previews else None


def thinks(task: str) -> bool:
    """Whether the card lets a family think: it does where there is a scratchpad."""
    return task in tasks.SCRATCHPAD_TASKS


def measure(
    folders: Mapping[str, Path],
    config: CardConfig,
    out: Path,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compute what `out` lacks; all cells by key.

    Keys are `answers/ARM/TASK`, `frontier/ARM, THRESHOLD/TASK`, `replay/RULE/TASK` and `experts`.

    Args:
        folders: checkpoint folders: `model`, and `parent` and `control` where they exist.
        config: what is measured.
        out: a folder of this card's own.
        progress: called with a line about what runs.

    Raises:
        CloverError: a folder that cannot be loaded, or `out` belongs to another card.
    """
    store = _Store(out, canonical_json(config), _fingerprints(folders))
    for name, folder in folders.items():
        arms = [arm for arm in ARMS if arm.model == name]
        jobs = list(_jobs(name, arms, config))
        if all(key in store.cells for key, _ in jobs):
            continue
        generator = _load(folder)
        for key, job in jobs:
            if key not in store.cells:
                progress(f"{len(store.cells)} cells done; {key}")
                store.add(key, job(generator))
    return store.cells


type _Job = Callable[[Generator], Any]


def _jobs(name: str, arms: Sequence[Arm], config: CardConfig) -> Iterator[tuple[str, _Job]]:
    """Keys and how their cells are computed, for one checkpoint folder."""
    for arm in arms:
        for task in tasks.TASKS:
            yield f"answers/{arm.name}/{task}", _answers(arm, task, config.n, arm.threshold, config)
    if name != "model":
        return
    for task in tasks.TASKS:
        for rule in ("threshold", "oracle"):
            yield f"replay/{rule}/{task}", _replay(rule, task, config)
    for arm in arms:
        for threshold in arm.frontier:
            for task in tasks.SCRATCHPAD_TASKS:
                job = _answers(arm, task, config.frontier_n, threshold, config)
                yield f"frontier/{arm.name}, {threshold}/{task}", job
    yield "experts", lambda generator: _expert_use(generator, config)


def _load(folder: Path) -> Generator:
    cfg, params, _ = checkpoint.load(folder)
    return Generator(cfg, params, tokenizer=Tokenizer.load(folder), env=Env(rows="batched"))


def _answers(arm: Arm, task: str, n: int, threshold: float, config: CardConfig) -> _Job:
    def job(generator: Generator) -> Any:
        answers = answer(
            generator.variant(cfg=generator.cfg.replace(block_length=arm.block)),
            tasks.eval_set(task, config.split, n),
            thinking=thinks(task),
            mode=arm.mode,
            sampling=SamplerConfig(threshold=threshold, close=arm.close),
            max_tokens=MAX_TOKENS,
            batch=config.batch,
        )
        stats = [a.completion.stats for a in answers]
        return dataclasses.asdict(
            Cell(
                right="".join(str(int(a.score.correct)) for a in answers),
                tokens=tuple(s.tokens for s in stats),
                previews=sum(s.previews for s in stats),
                forwards=sum(s.forwards for s in stats),
                stopped=sum(a.completion.finish_reason == "stop" for a in answers),
                format_valid=sum(a.score.format_valid for a in answers),
            )
        )

    return job


def _replay(rule: Any, task: str, config: CardConfig) -> _Job:
    def job(generator: Generator) -> Any:
        assert generator.tokenizer is not None
        items = tasks.eval_set(task, config.split, config.replay_n)
        blocks = reference_blocks(
            generator.tokenizer, items, thinking=thinks(task), block=generator.cfg.block_length
        )
        found = replay(generator, blocks, rule=rule, threshold=THRESHOLD, batch=config.batch)
        return dataclasses.asdict(found)

    return job


def _expert_use(generator: Generator, config: CardConfig) -> Any:
    """Share of the routed positions of both streams that each expert gets, [layers, experts]."""
    assert generator.tokenizer is not None
    cfg = generator.cfg
    run = jax.jit(forward, static_argnames=("cfg", "env"))
    data = DataConfig(rows=config.batch, buckets=((208, 4),))
    batches = TaskBatches(generator.tokenizer, data, block=cfg.block_length, split=config.split)
    total = np.zeros((cfg.num_layers, cfg.moe.num_experts))
    for i in range(EXPERT_BATCHES):
        b = as_arrays(batches.batch(i))
        clean, noisy = streams(b)
        out = run(generator.params, clean, noisy, None, cfg=cfg, env=generator.env)
        total += np.asarray(out.stats.router.assigned).sum(1)
    return (total / total.sum(1, keepdims=True)).tolist()


def _fingerprints(folders: Mapping[str, Path]) -> str:
    """Says which weights the cells belong to."""
    digests = {name: fingerprint(folder) for name, folder in folders.items()}
    return json.dumps(digests, sort_keys=True)


class _Store:
    """Cells on disk, one line each; the first line says what they are cells of."""

    def __init__(self, folder: Path, config: str, weights: str) -> None:
        self._path = folder / "cells.jsonl"
        head = {"config": json.loads(config), "weights": json.loads(weights)}
        self.cells: dict[str, Any] = {}
        if not self._path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(head) + "\n")
            return
        first, *lines = self._path.read_text().splitlines(keepends=True) or ["{}"]
        try:
            known = json.loads(first)
        except ValueError:
            known = {}
        weights_then = known.get("weights", {})
        merged = {**weights_then, **head["weights"]}  # a control may join later
        if known.get("config") != head["config"] or {**merged, **weights_then} != merged:
            raise CloverError(
                f"{self._path} holds figures of other weights or settings: repeat those, or choose "
                "another folder"
            )
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines) or merged != weights_then:  # a crash cut the last line off
            text = json.dumps({**head, "weights": merged}) + "\n" + "".join(whole)
            with whole_file(self._path) as building:
                building.write_text(text)
        self.cells = {line["key"]: line["cell"] for line in map(json.loads, whole)}

    def add(self, key: str, cell: Any) -> None:
        # Through JSON, so that a fresh cell and one read back are the same.
        text = json.dumps({"key": key, "cell": cell})
        with self._path.open("a") as file:
            file.write(text + "\n")
        self.cells[key] = json.loads(text)["cell"]
