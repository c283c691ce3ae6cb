"""Writes checkpoint folders in the format of Hugging Face, all or nothing."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
from safetensors.numpy import save_file

from clover_jax.checkpoint.config_map import DTYPES, config_to_hf
from clover_jax.checkpoint.hf_map import (
    ExpertLayout,
    NamePrefix,
    Piece,
    per_expert,
    pieces,
    with_prefix,
)
from clover_jax.checkpoint.json_text import show
from clover_jax.checkpoint.loading import CONFIG_FILE, LoadDtype
from clover_jax.checkpoint.report import SHOWN
from clover_jax.checkpoint.safetensors_io import INDEX_FILE, SINGLE_FILE
from clover_jax.config import ModelConfig
from clover_jax.errors import CloverError
from clover_jax.model.placement import first_process_first, is_here, on_host
from clover_jax.model.stack import Groups
from clover_jax.model.transformer import Params, param_specs
from clover_jax.params import named_leaves

SHARD_BYTES = 4_000_000_000
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor to be written; `make` gives it, in row-major order, when its shard is written."""

    name: str
    nbytes: int
    make: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """What was written."""

    folder: Path
    files: tuple[str, ...]  # none in a process of a job that is not its first
    tensors: int
    nbytes: int

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            f"wrote {self.folder}: {self.tensors} tensors, {self.nbytes:,} bytes in "
            f"{len(self.files)} safetensors files"
        ]


def save(
    folder: Path | str,
    cfg: ModelConfig,
    params: Params,
    *,
    layout: ExpertLayout = "fused",
    prefix: NamePrefix = "",
    dtype: LoadDtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    files_from: Path | str | None = None,
    overwrite: bool = False,
) -> SaveReport:
    """Writes config.json and the weights; `load` gives back the same config and weights.

    The folder appears complete or not at all. Host memory: one shard, and a copy of weights that
    live on an accelerator. Weights that several processes hold are gathered leaf by leaf: all call
    this, the first one writes.

    Args:
        folder: must not exist, or be empty.
        cfg: the model.
        params: its weights, as JAX or numpy arrays, layers stacked or not.
        layout: routed experts as two tensors per layer, or three per expert.
        prefix: level in the names, as multimodal Qwen checkpoints have it.
        dtype: of the weights that do not have to be float32; None: `cfg.dtype`.
        max_shard_bytes: a larger file is split; a single tensor never is.
        files_from: a checkpoint folder whose other files (tokenizer, generation_config) to copy.
        overwrite: replace the folder if it is a checkpoint folder. All its files go.

    Raises:
        CloverError: the folder is in the way or cannot be written, the weights are not those of
            the config, or an argument is none of its choices.
    """
    _require_choice("layout", layout, ("fused", "per_expert"))
    _require_choice("prefix", prefix, ("", "language_model"))
    _require_choice("dtype", dtype, (None, *DTYPES))
    cfg = cfg if dtype is None else cfg.replace(dtype=dtype)
    specs = named_leaves(param_specs(cfg))
    leaves = named_leaves(stacked(params, cfg))
    check_leaves(specs, leaves)

    # The pieces of a leaf follow each other.
    whole_leaf = functools.lru_cache(maxsize=1)(lambda path: on_host(leaves[path]))

    def entry(path: str, piece: Piece) -> Entry:
        kind = np.dtype(specs[path].dtype)
        make = lambda: piece.to_file(whole_leaf(path)).astype(kind, copy=False)
        return Entry(with_prefix(piece.name, prefix), math.prod(piece.shape) * kind.itemsize, make)

    routed = lambda p: layout == "per_expert" and ".mlp.experts." in p.name
    entries = [
        entry(path, part)
        for path, whole in pieces(cfg).items()
        for piece in whole
        for part in (per_expert(piece) if routed(piece) else [piece])
    ]
    folder, files = Path(folder), ()
    shared = any(not is_here(leaf) for leaf in leaves.values())
    with first_process_first() if shared else contextlib.nullcontext(True) as writes:
        if writes:
            with new_folder(folder, overwrite=overwrite) as building:
                files = write_weights(building, entries, max_shard_bytes)
                write_json(building / CONFIG_FILE, config_to_hf(cfg))
                if files_from is not None:
                    copy_other_files(Path(files_from), building)
        else:
            for path in pieces(cfg):
                whole_leaf(path)
    return SaveReport(folder, files, len(entries), sum(e.nbytes for e in entries))


def write_weights(folder: Path, entries: Sequence[Entry], max_shard_bytes: int) -> tuple[str, ...]:
    """Writes one file, or several and their index; one shard's tensors are in memory at a time."""
    if max_shard_bytes < 1:
        raise CloverError(f"max_shard_bytes is {max_shard_bytes}: expected at least 1")
    shards: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not shards or entry.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = files if len(files) > 1 else [SINGLE_FILE]
    for file, shard in zip(files, shards, strict=True):
        tensors = {entry.name: entry.make() for entry in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})  # transformers wants a format
        (folder / file).chmod(0o644)  # the writer makes files that only their owner can read
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(e.nbytes for e in entries)},
            "weight_map": {
                e.name: file for file, shard in zip(files, shards, strict=True) for e in shard
            },
        }
        write_json(folder / INDEX_FILE, index)
    return tuple(files)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes readable JSON."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def copy_other_files(source: Path, target: Path) -> None:
    """Copies a folder's files except weights, their index and config.json."""
    if not source.is_dir():
        raise CloverError(f"{source} is not a folder: expected a checkpoint folder to copy from")
    for file in sorted(source.iterdir()):
        ours = file.name in (CONFIG_FILE, INDEX_FILE) or file.suffix in WEIGHT_SUFFIXES
        if file.is_file() and not ours:
            shutil.copyfile(file, target / file.name)


@contextlib.contextmanager
def new_folder(folder: Path, *, overwrite: bool, mark: str = CONFIG_FILE) -> Iterator[Path]:
    """A folder to fill beside the target; it takes the target's place when the block ends well.

    Args:
        folder: the target.
        overwrite: whether it may replace a folder that has the file `mark`.
        mark: tells what kind of folder it is.

    Raises:
        CloverError: the target is in the way, or the disk refuses.
    """
    try:
        folder = folder.resolve()
        require_free(folder, overwrite, mark)
        building = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        building.mkdir(parents=True)
        try:
            yield building
            _swap(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except (OSError, safetensors.SafetensorError) as error:
        raise CloverError(f"{folder} cannot be written: {error}") from None


def require_free(folder: Path, overwrite: bool, mark: str = CONFIG_FILE) -> None:
    """Checks that `new_folder` may write there.

    Raises:
        CloverError: what is in the way.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CloverError(f"{folder} is a file: expected a folder to write")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise CloverError(f"{folder} is not empty: choose another, or allow overwriting")
    if not (folder / mark).is_file():
        raise CloverError(f"{folder} is full and has no {mark}: it will not be overwritten")


def _swap(building: Path, folder: Path) -> None:
    """Puts a finished folder in its place; the old one goes only when the new one is there."""
    if not folder.exists():
        os.rename(building, folder)
        return
    old = building.with_name(f"{building.name}.old")
    os.rename(folder, old)
    try:
        os.rename(building, folder)
    except OSError:
        os.rename(old, folder)
        raise
    shutil.rmtree(old)


def _require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        expected = ", ".join(map(repr, choices))
        raise CloverError(f"{name} is {show(repr(value))}: expected one of {expected}")


def stacked(params: Params, cfg: ModelConfig) -> Params:
    """The weights with stacked layers; layers that are not stacked yet are stacked on the host."""
    layers, every = params.layers, cfg.full_attention_interval
    if isinstance(layers, Groups):
        return params
    if len(layers) != cfg.num_layers:
        raise CloverError(f"the weights have {len(layers)} layers, the config {cfg.num_layers}")
    stack = lambda trees: jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
    starts = range(0, cfg.num_layers, every)
    linear = stack([stack(layers[i : i + every - 1]) for i in starts])
    full = stack(layers[every - 1 :: every])
    return dataclasses.replace(params, layers=Groups(linear=linear, full=full))


def check_leaves(specs: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Checks that leaves have the names and shapes of these specs.

    Raises:
        CloverError: names those that have not.
    """
    found = [f"{p} is missing" for p in specs.keys() - leaves.keys()]
    found += [f"{p} is not part of it" for p in leaves.keys() - specs.keys()]
    for path in specs.keys() & leaves.keys():
        leaf, shape = leaves[path], specs[path].shape
        if tuple(leaf.shape) != shape:
            found.append(f"{path} is {list(leaf.shape)}, expected {list(shape)}")
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        what = "; ".join(sorted(found)[:SHOWN]) + more
        raise CloverError(f"the weights are not those of the config: {what}")
