"""Loads a Hugging Face checkpoint folder: everything is checked before anything is allocated."""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from clover_jax.checkpoint.config_map import DTYPES, ConfigReading, read_config
from clover_jax.checkpoint.hf_map import (
    BLOCK_DIFFUSION,
    IGNORED_PREFIXES,
    ZERO_CENTRED,
    Piece,
    canonical,
    fused_name,
    per_expert,
    pieces,
)
from clover_jax.checkpoint.json_text import parse, show
from clover_jax.checkpoint.report import (
    Cast,
    Component,
    Ignored,
    LoadReport,
    NormStorage,
    Problem,
)
from clover_jax.checkpoint.safetensors_io import (
    WEIGHT_DTYPES,
    Index,
    MappedFiles,
    Tensor,
    read_index,
)
from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.leaves import leaf_kind
from clover_jax.model.transformer import Params, param_specs
from clover_jax.params import ParamSpec, is_spec, named_leaves
from clover_jax.sharding import shardings

CONFIG_FILE = "config.json"

DEVICE_ALIGNMENT = 64  # bytes; a CPU device takes over what starts there (XLA's MinAlign)

type LoadDtype = Literal["float32", "bfloat16"]

# Means of the norms' weights that could be of either storage.
UNCLEAR_NORMS = (0.35, 0.65)


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor of a file and the piece of a leaf that it is."""

    piece: Piece
    tensor: Tensor


@dataclasses.dataclass(frozen=True)
class Survey:
    """A folder looked through without reading its weights.

    Attributes:
        report: what it holds and what is wrong with it.
        sources: leaf path -> the tensors that fill it.
        config_json: the parsed config.json, or None.
    """

    report: LoadReport
    sources: dict[str, list[Source]]
    config_json: Any


def load(
    folder: Path | str,
    *,
    dtype: LoadDtype | None = None,
    norms: NormStorage | None = None,
    env: Env = Env(),  # noqa: B008
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ModelConfig, Params, LoadReport]:
    """Loads the weights of a folder.

    Leaves are filled in place: on a CPU device they are the weights, elsewhere one stacked leaf at
    a time is extra host memory. On a mesh a process reads only the slices of its own devices.

    Args:
        folder: holds config.json and safetensors files, experts fused or one tensor per expert,
            with or without the `language_model` level in the names.
        dtype: of the weights that do not have to be float32; None: the one that config.json says.
        norms: how the norms that scale by 1 + w are stored; None: their mean decides.
        env: its mesh says where the weights go; without one, to the default device.
        progress: called now and then with the bytes read so far and those of all tensors.

    Raises:
        CloverError: names every tensor and file that is missing, unknown, twice there, damaged, or
            of another shape or dtype than config.json says. Nothing was allocated.
    """
    survey = look_through(folder, dtype=dtype, norms=norms)
    cfg = survey.report.require_loadable()
    specs = param_specs(cfg)
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    placed = None if env.mesh is None else shardings(specs, env.mesh, env.rules)
    targets: list[Any] = [None] * len(leaves) if placed is None else jax.tree.leaves(placed)
    files = MappedFiles()
    count = None if progress is None else _Counter(survey.sources, progress)
    arrays = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for spec, path, target in zip(leaves, named_leaves(specs), targets, strict=True):
            plain = survey.report.norms == "plain" and leaf_kind(path) in ZERO_CENTRED
            read = functools.partial(
                read_leaf, spec, survey.sources[path],
                files=files, pool=pool, plain_norm=plain, count=count,
            )  # fmt: skip
            arrays.append(_to_device(read, spec, target))
    return cfg, jax.tree.unflatten(tree, arrays), survey.report


def inspect(
    folder: Path | str, *, dtype: LoadDtype | None = None, norms: NormStorage | None = None
) -> LoadReport:
    """What a folder holds and what would not load; reads headers and the norms' weights only.

    Raises:
        CloverError: the folder does not exist. Other problems are in the report.
    """
    return look_through(folder, dtype=dtype, norms=norms).report


def look_through(
    folder: Path | str, *, dtype: LoadDtype | None = None, norms: NormStorage | None = None
) -> Survey:
    """Config and headers of a folder, each tensor matched to its piece of a leaf."""
    if dtype is not None and dtype not in DTYPES:
        raise CloverError(f"dtype is {show(dtype)}: expected one of {', '.join(DTYPES)}, or none")
    folder = Path(folder)
    index = read_index(folder)
    config_json, reading = _read_config(folder / CONFIG_FILE, dtype)
    problems = [*(Problem("config", p) for p in reading.problems), *index.problems]
    report = LoadReport(
        folder=folder,
        config=reading.config,
        problems=tuple(problems),
        files=index.files,
        other_files=index.other_files,
        ignored=_ignored(index),
        unknown_config_keys=reading.unknown_keys,
    )
    if reading.config is None:
        return Survey(report, {}, config_json)
    sources, found = _match(reading.config, index)
    specs = named_leaves(param_specs(reading.config))
    problems += found
    norm_mean = None
    if not problems:
        norm_mean = _norm_mean(sources)
        if norms is None:
            norms, unclear = _norm_storage(norm_mean)
            problems += unclear
    report = dataclasses.replace(
        report,
        problems=tuple(problems),
        experts=_experts_layout(sources),
        prefix="language_model" if _has_level(sources) else "",
        components=sum_components(specs, sources, reading.config),
        casts=_casts(specs, sources),
        norm_mean=norm_mean,
        norms=norms,
    )
    return Survey(report, sources, config_json)


def _read_config(path: Path, dtype: LoadDtype | None) -> tuple[Any, ConfigReading]:
    try:
        content = parse(path.read_bytes())
    except (OSError, ValueError) as error:
        what = "is missing (incomplete download?)"
        if not isinstance(error, FileNotFoundError):
            what = f"cannot be read: {error}"
        return None, ConfigReading(None, (f"{path.name} {what}",), ())
    return content, read_config(content, dtype)


def _match(cfg: ModelConfig, index: Index) -> tuple[dict[str, list[Source]], list[Problem]]:
    """Pairs every piece with its tensor, and names what does not pair up, both ways."""
    problems: list[Problem] = []
    by_name: dict[str, Tensor] = {}
    for tensor in index.tensors.values():
        if tensor.name.startswith(IGNORED_PREFIXES):
            continue
        name = canonical(tensor.name)
        if name in by_name:
            what = f"{show(by_name[name].name)} and {show(tensor.name)} are one weight"
            problems.append(Problem("duplicate tensor", what))
        by_name[name] = tensor
    lost = frozenset(map(canonical, index.lost))
    known = by_name.keys() | lost
    split = {fused_name(name) for name in known} - known
    sources: dict[str, list[Source]] = {}
    for path, whole in pieces(cfg).items():
        sources[path] = []
        parts = (per_expert(p) if p.name in split else [p] for p in whole)
        for piece in itertools.chain.from_iterable(parts):
            tensor = by_name.pop(piece.name, None)
            if tensor is None:
                if piece.name not in lost:
                    problems.append(Problem("missing tensor", piece.name))
                continue
            sources[path].append(Source(piece, tensor))
            problems += _check(piece, tensor)
    filled = {source.piece.name for found in sources.values() for source in found}
    for name, tensor in by_name.items():
        kind = "duplicate tensor" if fused_name(name) in filled else "unknown tensor"
        problems.append(Problem(kind, tensor.name))
    return sources, problems


def _check(piece: Piece, tensor: Tensor) -> list[Problem]:
    problems = []
    if tensor.shape not in piece.file_shapes:
        what = f"{show(tensor.name)} is {list(tensor.shape)}, expected {list(piece.file_shapes[0])}"
        problems.append(Problem("wrong shape", what))
    if tensor.dtype not in WEIGHT_DTYPES:
        problems.append(Problem("wrong dtype", f"{show(tensor.name)} is {tensor.dtype}"))
    return problems


def read_leaf(
    spec: ParamSpec,
    sources: list[Source],
    index: tuple[slice, ...],
    *,
    files: MappedFiles,
    pool: concurrent.futures.Executor,
    plain_norm: bool,
    count: Callable[[Source], None] | None = None,
) -> np.ndarray:
    """A slice of a leaf, in its spec's dtype. What no tensor fills (pruned experts) is zero."""
    low, high = zip(
        *(s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True)), strict=True
    )
    out = _aligned_zeros(tuple(b - a for a, b in zip(low, high, strict=True)), spec.dtype)

    def fill(source: Source) -> None:
        box = source.piece
        ends = [a + n for a, n in zip(box.start, box.shape, strict=True)]
        first = [max(a, b) for a, b in zip(low, box.start, strict=True)]
        last = [min(a, b) for a, b in zip(high, ends, strict=True)]
        if any(a >= b for a, b in zip(first, last, strict=True)):
            return
        within = lambda origin: tuple(
            slice(a - o, b - o) for a, b, o in zip(first, last, origin, strict=True)
        )
        part = box.to_leaf(files.view(source.tensor))[within(box.start)]
        target = out[within(low)]
        if part.dtype == target.dtype and part.itemsize == 2:
            # Copied as plain integers: numpy holds its lock while copying bfloat16.
            part, target = part.view(np.uint16), target.view(np.uint16)
        target[...] = part
        del part
        files.release(source.tensor)
        if count is not None:
            count(source)

    list(pool.map(fill, sources))
    if plain_norm:
        out -= out.dtype.type(1)
    return out


def _aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros at an address that a CPU device takes over without a copy."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + DEVICE_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % DEVICE_ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class _Counter:
    """Counts the bytes of tensors as they are read, each once."""

    def __init__(
        self, sources: dict[str, list[Source]], progress: Callable[[int, int], None]
    ) -> None:
        self._progress, self._lock = progress, threading.Lock()
        self._seen: set[str] = set()
        self._done = 0
        self._total = sum(s.tensor.nbytes for found in sources.values() for s in found)

    def __call__(self, source: Source) -> None:
        with self._lock:
            if source.tensor.name not in self._seen:
                self._seen.add(source.tensor.name)
                self._done += source.tensor.nbytes
                self._progress(self._done, self._total)


def _to_device(
    read: Callable[[tuple[slice, ...]], np.ndarray], spec: ParamSpec, target: Any
) -> jax.Array:
    if target is None:
        return jax.device_put(read((slice(None),) * len(spec.shape)))
    return jax.make_array_from_callback(spec.shape, target, read)  # pyright: ignore[reportArgumentType]


def _has_level(sources: dict[str, list[Source]]) -> bool:
    return any(s.tensor.name != s.piece.name for found in sources.values() for s in found)


def _experts_layout(sources: dict[str, list[Source]]) -> str:
    routed = {
        "fused" if s.piece.name.endswith("_up_proj") else "per_expert"
        for path, found in sources.items()
        if leaf_kind(path) == "mlp.experts.gate_up_proj"
        for s in found
    }
    return "mixed" if len(routed) > 1 else "".join(routed)


def _component(path: str) -> str:
    kind = leaf_kind(path)
    owner = kind.partition(".")[0]
    if kind in BLOCK_DIFFUSION:
        return "block-diffusion extras"
    if kind.startswith("mlp.experts."):
        return "routed experts"
    if kind == "mlp.gate":
        return "routers"
    names = {
        "embed_tokens": "embedding",
        "linear_attn": "GDN mixers",
        "self_attn": "attention mixers",
        "mlp": "shared experts + gates",
        "lm_head": "lm_head",
    }
    return names.get(owner, "norms")


def sum_components(
    specs: dict[str, ParamSpec], sources: dict[str, list[Source]], cfg: ModelConfig
) -> tuple[Component, ...]:
    """Parameters, bytes in memory and bytes in the files by component of the model."""
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for path, whole in pieces(cfg).items():
        total = sums[_component(path)]
        total[0] += sum(math.prod(p.shape) for p in whole)
        total[1] += math.prod(specs[path].shape) * np.dtype(specs[path].dtype).itemsize
        total[2] += sum(s.tensor.nbytes for s in sources[path])
    return tuple(Component(name, *total) for name, total in sums.items())


def _casts(specs: dict[str, ParamSpec], sources: dict[str, list[Source]]) -> tuple[Cast, ...]:
    pairs = collections.Counter(
        (s.tensor.dtype, np.dtype(specs[path].dtype).name)
        for path, found in sources.items()
        for s in found
        if WEIGHT_DTYPES.get(s.tensor.dtype) != specs[path].dtype
    )
    return tuple(Cast(*pair, count) for pair, count in sorted(pairs.items()))


def _ignored(index: Index) -> tuple[Ignored, ...]:
    by_prefix = {
        prefix: [t.nbytes for t in index.tensors.values() if t.name.startswith(prefix)]
        for prefix in IGNORED_PREFIXES
    }
    return tuple(Ignored(p, len(sizes), sum(sizes)) for p, sizes in by_prefix.items() if sizes)


def _norm_storage(mean: float) -> tuple[NormStorage | None, list[Problem]]:
    """Zero-centred weights lie around 0, plain ones around 1; Clover's files may have either."""
    low, high = UNCLEAR_NORMS
    if low < mean < high:
        what = f"their mean is {mean:.3g}; expected about 0 (zero_centred) or about 1 (plain)"
        return None, [Problem("unclear norms", what)]
    return ("zero_centred" if mean <= low else "plain" if mean >= high else None), []


def _norm_mean(sources: dict[str, list[Source]]) -> float:
    files = MappedFiles()
    norms = [
        files.view(s.tensor).astype(np.float64)
        for path, found in sources.items()
        if leaf_kind(path) in ZERO_CENTRED
        for s in found
    ]
    with np.errstate(invalid="ignore"):  # a damaged weight shows as NaN in the report
        return float(np.mean(np.concatenate(norms)))
