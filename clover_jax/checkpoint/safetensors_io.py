"""Reads the headers of safetensors files and maps their tensors; checks every byte it believes.

A file is: u64 length of the header, the header (JSON: name -> dtype, shape, data_offsets), the
data. The data is one gapless run of tensors. Weights of several files are listed in
`model.safetensors.index.json` (weight_map: name -> file).
"""

import dataclasses
import itertools
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from clover_jax.checkpoint.json_text import parse, show
from clover_jax.checkpoint.report import Problem
from clover_jax.errors import CloverError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
MAX_RANK = 32

# Bits of an element. Weights may only have the dtypes of `WEIGHT_DTYPES`.
BITS = (
    dict.fromkeys(("F4",), 4)
    | dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6)
    | dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8)
    | dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | dict.fromkeys(("U16", "I16", "F16", "BF16"), 16)
    | dict.fromkeys(("U32", "I32", "F32"), 32)
    | dict.fromkeys(("U64", "I64", "F64", "C64"), 64)
)
WEIGHT_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies; `offset` counts bytes from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Index:
    """The tensors of a folder and everything that is wrong with its files.

    Attributes:
        tensors: readable tensors by name.
        lost: names that an index or a header promises but that cannot be read; a problem says why.
        problems: all of them, in order of discovery.
        files: names of the files that belong to the checkpoint.
        other_files: safetensors files beside them that no index names.
    """

    tensors: Mapping[str, Tensor]
    lost: frozenset[str]
    problems: tuple[Problem, ...]
    files: tuple[str, ...]
    other_files: tuple[str, ...]


class MappedFiles:
    """Tensors as views of memory-mapped files: bytes are read when they are touched."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def view(self, tensor: Tensor) -> np.ndarray:
        """Read-only view of a tensor that has one of `WEIGHT_DTYPES`."""
        whole = np.frombuffer(self._map(tensor.file), np.uint8)
        data = whole[tensor.offset : tensor.offset + tensor.nbytes]
        return data.view(WEIGHT_DTYPES[tensor.dtype]).reshape(tensor.shape)

    def release(self, tensor: Tensor) -> None:
        """Gives the memory of a tensor's pages back; a later look reads them again."""
        page = mmap.PAGESIZE
        first = -(-tensor.offset // page) * page
        last = (tensor.offset + tensor.nbytes) // page * page
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map(tensor.file).madvise(mmap.MADV_DONTNEED, first, last - first)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


@dataclasses.dataclass
class _Scan:
    """What reading a folder finds, while it is read."""

    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    lost: set[str] = dataclasses.field(default_factory=set)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def problem(self, kind: str, what: str) -> None:
        self.problems.append(Problem(kind, what))


def read_index(folder: Path) -> Index:
    """Reads the headers of a checkpoint folder's safetensors files, and no data.

    The files are those that the index names; without an index `model.safetensors`; without that
    every `*.safetensors`.

    Raises:
        CloverError: the folder is not one. Everything else that is wrong is in `Index.problems`.
    """
    if not folder.is_dir():
        raise CloverError(f"{folder} is not a folder: expected config.json and safetensors files")
    scan = _Scan()
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    weight_map = _read_weight_map(folder / INDEX_FILE, scan)
    if weight_map is not None:
        files = sorted(set(weight_map.values()))
    else:
        files = [SINGLE_FILE] if SINGLE_FILE in present else present
        if not files:
            scan.problem("missing file", f"{SINGLE_FILE} (no *.safetensors at all)")
    promised: dict[str, list[str]] = {name: [] for name in files}
    for name, file in (weight_map or {}).items():
        promised[file].append(name)
    for file in files:
        found = _read_file(folder / file, promised[file], scan)
        if found is not None and weight_map is not None:
            _compare(file, found, promised[file], scan)
    return Index(
        scan.tensors,
        frozenset(scan.lost - scan.tensors.keys()),
        tuple(scan.problems),
        tuple(files),
        tuple(sorted(set(present) - set(files))),
    )


def _read_weight_map(path: Path, scan: _Scan) -> dict[str, str] | None:
    """Tensor name -> file name, or None without an index."""
    try:
        content = parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        scan.problem("bad index", f"{path.name} cannot be read: {error}")
        return None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        scan.problem("bad index", f"{path.name} has no weight_map of names to files")
        return None
    good = {}
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file.isprintable() and Path(file).name == file
        if plain and file.endswith(".safetensors"):
            good[name] = file
        else:
            scan.lost.add(name)
            scan.problem("bad index", f"file of {show(name)} is {show(file)}")
    return good


def _read_file(path: Path, promised: list[str], scan: _Scan) -> set[str] | None:
    """Adds a file's tensors to the scan; their names, or None if its header cannot be read."""
    holds = f", holds {len(promised)} tensors by the index" if promised else ""
    try:
        size = path.stat().st_size
        header, data_start = _read_header(path, size)
    except FileNotFoundError:
        scan.problem("missing file", f"{show(path.name)}{holds}")
        scan.lost.update(promised)
        return None
    except (OSError, ValueError) as error:
        scan.problem("unreadable file", f"{show(path.name)}{holds}: {error}")
        scan.lost.update(promised)
        return None
    names = set()
    good: list[Tensor] = []
    for name, entry in header.items():
        names.add(name)
        try:
            tensor = _tensor(name, path, entry, data_start, size)
        except ValueError as error:
            scan.problem("unreadable file", f"{path.name}: {show(name)}: {error}")
            scan.lost.add(name)
            continue
        good.append(tensor)
        if name in scan.tensors:
            where = f"{scan.tensors[name].file.name} and in {path.name}"
            scan.problem("duplicate tensor", f"{show(name)} in {where}")
        else:
            scan.tensors[name] = tensor
    _check_tiling(path, good, data_start, None if len(good) < len(header) else size, scan)
    return names


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The header without its metadata, and where the data starts."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError(f"its {size} bytes end inside the header")
        if length > HEADER_LIMIT:
            raise ValueError(f"its header has {length} bytes, the limit is {HEADER_LIMIT}")
        try:
            header = parse(file.read(length))
        except ValueError as error:
            raise ValueError(f"its header is not the JSON of a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is not an object of strings")
    return header, 8 + length


def _tensor(name: str, path: Path, entry: Any, data_start: int, size: int) -> Tensor:
    """A header entry.

    Raises:
        ValueError: says what is wrong with it.
    """
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("entry is not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"unknown dtype {show(dtype)}")
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise ValueError(f"shape is {show(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets are {show(offsets)}")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * BITS[dtype] != 8 * nbytes:
        raise ValueError(f"{dtype} {show(shape)} does not fill the {nbytes} bytes of its offsets")
    if data_start + offsets[1] > size:
        raise ValueError("truncated: its data end past the end of the file")
    return Tensor(name, path, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(n) is int and 0 <= n < 2**63
        for n in value  # bool is an int
    )


def _check_tiling(
    path: Path, tensors: list[Tensor], data_start: int, size: int | None, scan: _Scan
) -> None:
    """No two tensors share bytes and, if the size is given, no byte belongs to none."""
    in_order = sorted(tensors, key=lambda t: (t.offset, t.nbytes))
    for a, b in itertools.pairwise(in_order):
        if b.offset < a.offset + a.nbytes:
            scan.problem(
                "unreadable file", f"{path.name}: {show(a.name)} and {show(b.name)} overlap"
            )
    covered = sum(t.nbytes for t in tensors)
    if size is not None and covered != size - data_start:
        scan.problem(
            "unreadable file",
            f"{path.name}: tensors fill {covered} of {size - data_start} bytes of data",
        )


def _compare(file: str, found: set[str], promised: list[str], scan: _Scan) -> None:
    """The index against a file, both ways."""
    for name in sorted(found.difference(promised)):
        scan.problem("index mismatch", f"{show(name)} lies in {file}, not so in the index")
    for name in sorted(set(promised) - found):
        scan.lost.add(name)
        scan.problem("missing tensor", f"{show(name)} (in {file} by the index)")
