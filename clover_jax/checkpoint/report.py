"""What is wrong with a checkpoint folder, and what loading it did."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from clover_jax.checkpoint.hf_map import NamePrefix
from clover_jax.checkpoint.json_text import show
from clover_jax.config import ModelConfig
from clover_jax.errors import CloverError

# Kind of problem -> what to do about it.
HINTS = {
    "config": "correct config.json",
    "missing file": "incomplete download?",
    "unreadable file": "truncated or damaged: fetch it again",
    "bad index": "fetch model.safetensors.index.json again",
    "index mismatch": "index and shards are of different downloads?",
    "duplicate tensor": "remove one",
    "missing tensor": "incomplete download, or a model of another kind?",
    "unknown tensor": "a model of another kind?",
    "wrong shape": "config.json of another model?",
    "wrong dtype": "expected F32, BF16 or F16: quantised files cannot be loaded",
    "unclear norms": "say how they are stored: norms zero_centred (w of 1 + w) or plain",
}
SHOWN = 20  # of each kind

type NormStorage = Literal["zero_centred", "plain"]


class Problem(NamedTuple):
    """One reason why a folder cannot be loaded; `kind` is a key of `HINTS`."""

    kind: str
    what: str


class Component(NamedTuple):
    """Weights of one kind. Bytes in memory are in the loaded dtypes."""

    name: str
    parameters: int
    memory_bytes: int
    file_bytes: int


class Ignored(NamedTuple):
    """Tensors that loading leaves out on purpose."""

    prefix: str
    tensors: int
    file_bytes: int


class Cast(NamedTuple):
    """Tensors that loading casts."""

    file_dtype: str
    dtype: str
    tensors: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a checkpoint folder holds.

    Attributes:
        folder: the folder.
        config: None if config.json cannot be used.
        problems: why it cannot be loaded; empty after a load.
        files: the safetensors files that belong to it.
        other_files: safetensors files that lie beside them and are not read.
        experts: how routed experts are stored: `fused`, `per_expert` or `mixed`.
        prefix: `language_model` if names have that level, else empty.
        components: sizes by kind of weight, as config.json gives them.
        ignored: tensors left out on purpose, by prefix.
        casts: dtype changes while loading.
        norm_mean: mean over all weights of the norms that scale by 1 + w.
        norms: how those are stored: as w, or plain as 1 + w; None where it is not known.
        unknown_config_keys: keys of config.json that nothing reads.
    """

    folder: Path
    config: ModelConfig | None
    problems: tuple[Problem, ...]
    files: tuple[str, ...]
    other_files: tuple[str, ...]
    experts: str = ""
    prefix: NamePrefix = ""
    components: tuple[Component, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    casts: tuple[Cast, ...] = ()
    norm_mean: float | None = None
    norms: NormStorage | None = None
    unknown_config_keys: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a careful reader should look at, though the folder loads."""
        found = []
        if self.norm_mean is not None and not math.isfinite(self.norm_mean):
            found.append("the norms hold NaN or infinite weights: damaged, or a failed training")
        elif self.norms == "plain":
            found.append(
                f"the norms are stored plain (mean {self.norm_mean:.3g}): 1 is subtracted in memory"
            )
        if self.unknown_config_keys:
            keys = ", ".join(show(k) for k in self.unknown_config_keys[:SHOWN])
            found.append(f"config.json has {len(self.unknown_config_keys)} unknown keys: {keys}")
        return tuple(found)

    @property
    def total(self) -> Component:
        """All components."""
        return Component(
            "total",
            sum(c.parameters for c in self.components),
            sum(c.memory_bytes for c in self.components),
            sum(c.file_bytes for c in self.components),
        )

    def lines(self) -> list[str]:
        """The report as text."""
        out = [f"folder {self.folder}: {len(self.files)} safetensors files"]
        if self.other_files:
            out.append(f"not read: {', '.join(show(f) for f in self.other_files[:SHOWN])}")
        if self.experts:
            out.append(f"experts {self.experts}, names {'model.' + self.prefix}".rstrip("."))
        for c in (*self.components, self.total) if self.components else ():
            out.append(
                f"{c.name:<22} {c.parameters:>14,} parameters {_size(c.memory_bytes):>10} in "
                f"memory {_size(c.file_bytes):>10} on disk"
            )
        for i in self.ignored:
            out.append(f"ignored {i.prefix}*: {i.tensors} tensors, {_size(i.file_bytes)}")
        for cast in self.casts:
            out.append(f"cast {cast.file_dtype} to {cast.dtype}: {cast.tensors} tensors")
        out += [f"warning: {w}" for w in self.warnings]
        return out + [f"problem: {line}" for line in problem_lines(self.problems)]

    def require_loadable(self) -> ModelConfig:
        """The config.

        Raises:
            CloverError: there are problems; names them all.
        """
        if self.problems or self.config is None:
            lines = "".join(f"\n  {line}" for line in problem_lines(self.problems))
            raise CloverError(f"cannot load {self.folder}:{lines}")
        return self.config


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """One line per kind with its count and at most `SHOWN` examples."""
    by_kind: Mapping[str, list[str]] = {kind: [] for kind in HINTS}
    for problem in problems:
        by_kind[problem.kind].append(show(problem.what, 400))
    return [
        f"{kind} ({len(found)}; {HINTS[kind]}): {'; '.join(found[:SHOWN])}"
        + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
        for kind, found in by_kind.items()
        if found
    ]


def _size(size: int) -> str:
    unit, name = next((u for u in ((1e9, "GB"), (1e6, "MB")) if size >= u[0]), (1e3, "kB"))
    return f"{size / unit:.2f} {name}"
