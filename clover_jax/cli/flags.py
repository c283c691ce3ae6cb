"""Flags that several commands share: their kinds, devices, and the model with its sampler."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

# A flag without a --no- twin.
Switch = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]


def own(metavar: str) -> Any:
    """A setting that the checkpoint folder decides unless the flag is given."""
    return arg(metavar=metavar, help_behavior_hint="(default: the folder's)")


def none(metavar: str) -> Any:
    """A flag that need not be given."""
    return arg(metavar=metavar, help_behavior_hint="(optional)")


FolderFloat = Annotated[float | None, own("FLOAT")]
FolderInt = Annotated[int | None, own("INT")]
OptionalText = Annotated[str | None, none("TEXT")]
OptionalFile = Annotated[Path | None, none("FILE")]
Norms = Annotated[Literal["zero_centred", "plain"] | None, none("{zero_centred,plain}")]
Close = Annotated[
    Literal["resolved", "unsure", "verified"] | None, own("{resolved,unsure,verified}")
]
Checkpoint = Annotated[
    Path | None, arg(metavar="DIR", help_behavior_hint="(default: the model in the package)")
]
ORACLE_PYTHON = Path(".venv-oracle/bin/python")
OraclePython = Annotated[
    Path | None, arg(metavar="FILE", help_behavior_hint=f"(default: {ORACLE_PYTHON})")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFlags:
    """Where it runs.

    Attributes:
        mesh: Devices as data x expert x tensor, such as 2x4x1; one device if not given.
        rules: What the mesh splits: `fsdp` splits weights over its data axis, too.
        distributed: This is one of several processes that run the same command, on one file
            system: `auto` asks SLURM, Kubernetes, Open MPI or a cloud TPU who they are, or give
            HOST:PORT,COUNT,INDEX.
    """

    mesh: Annotated[str | None, none("DxExT")] = None
    rules: Literal["tensor", "fsdp"] = "tensor"
    distributed: Annotated[str | None, none("{auto,HOST:PORT,COUNT,INDEX}")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(DeviceFlags):
    """Which model runs, and how it samples.

    Attributes:
        checkpoint: Checkpoint folder (Hugging Face format).
        dtype: Of the weights.
        norms: How the files store norms that scale by 1 + w; their mean decides if not given.
        max_tokens: The answer is cut there.
        threshold: Reveal every position whose confidence is above it, else the best one.
        temperature: 0 takes the most likely token, above 0 draws.
        top_k: Draw among the k best tokens; 0 is off.
        top_p: Draw among the fewest tokens that reach this share; 1 is off.
        presence: Subtracted from the logit of every token that the answer already has.
        frequency: Subtracted once per occurrence in the answer.
        repetition: Divides positive and multiplies negative logits of tokens the answer has.
        close: When a block ends: full; or also where nothing passes the threshold; or that, and
            only what AR mode would have written is kept of it (AR mode's text in fewer passes).
        seed: Of the random draws.
        stop: The text ends before the first of these strings.
        system: System message.
        thinking: Think before the answer, whatever the chat template's default is.
        no_thinking: Answer without thinking.
        mode: Denoise blocks, or take one token at a time from the causal model.
        rows: How the rows of a batch run: one fixed program per row, or all at once.
        prefill_chunk: Prompt tokens per pass: more is faster on long prompts, and every prompt is
            filled up to whole chunks.
        fuse_commit: Commit a block and preview the next one in one pass over the weights.
        coreset: Share an expert subset among the positions of a block.
        json: One JSON object per answer.
    """

    checkpoint: Checkpoint = None
    dtype: Annotated[Literal["float32", "bfloat16"] | None, own("{float32,bfloat16}")] = None
    norms: Norms = None
    max_tokens: FolderInt = None
    threshold: FolderFloat = None
    temperature: FolderFloat = None
    top_k: FolderInt = None
    top_p: FolderFloat = None
    presence: FolderFloat = None
    frequency: FolderFloat = None
    repetition: FolderFloat = None
    close: Close = None
    seed: int = 0
    stop: UseAppendAction[tuple[str, ...]] = ()
    system: OptionalText = None
    thinking: Switch = False
    no_thinking: Switch = False
    mode: Literal["block", "ar"] = "block"
    rows: Literal["batched", "mapped"] = "batched"
    prefill_chunk: int = 64
    fuse_commit: Switch = False
    coreset: bool = True
    json: Switch = False
