"""Headers and indices against the safetensors package, and against damage of every kind."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from clover_jax.checkpoint.report import HINTS
from clover_jax.checkpoint.safetensors_io import BITS, MappedFiles, read_index
from clover_jax.errors import CloverError

TENSORS = {
    "b": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a": np.float16([1.5, -2.0, 3.25]),
    "c.d": np.arange(6).reshape(1, 2, 3).astype(ml_dtypes.bfloat16),
    "scalar": np.array(7, np.float32),
}


def raw(header: object, data: bytes, length: int | None = None) -> bytes:
    """A file of this header (JSON value or bytes) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    listed = lambda v: list(v) if isinstance(v, tuple) else v
    return {"dtype": dtype, "shape": listed(shape), "data_offsets": listed(offsets)}


def problems(folder: Path) -> list[tuple[str, str]]:
    found = [(p.kind, p.what) for p in read_index(folder).problems]
    assert all(kind in HINTS for kind, _ in found)
    return found


def test_reads_what_the_package_writes(tmp_path: Path):
    other = {"i": np.arange(3), "bool": np.array([True]), "f64": np.float64([1, 2])}
    save_file({**TENSORS, **other}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = read_index(tmp_path)
    assert index.problems == () and index.lost == frozenset()
    shapes = {name: t.shape for name, t in index.tensors.items()}
    assert shapes == {name: t.shape for name, t in {**TENSORS, **other}.items()}
    files = MappedFiles()
    for name, want in TENSORS.items():
        got = files.view(index.tensors[name])
        assert got.dtype == want.dtype
        assert np.array_equal(got, want)


def test_view_is_not_a_copy(tmp_path: Path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    index, files = read_index(tmp_path), MappedFiles()
    whole = files.view(index.tensors["b"])
    assert np.shares_memory(whole, files.view(index.tensors["b"]))
    assert not whole.flags.writeable


def test_every_dtype_of_the_format_is_known(tmp_path: Path):
    start, header = 0, {}
    for dtype, bits in BITS.items():
        header[dtype] = entry(dtype, (8,), (start, start + bits))
        start += bits
    (tmp_path / "model.safetensors").write_bytes(raw(header, bytes(start)))
    assert problems(tmp_path) == []


def test_odd_but_legal(tmp_path: Path):
    header = {
        "empty": entry("F32", (0, 3), (4, 4)),
        "odd": entry("U8", (3,), (4, 7)),
        "unaligned": entry("F32", (1,), (7, 11)),
        "late": entry("F32", (), (0, 4)),
    }
    data = bytes(7) + np.float32(2.5).tobytes()
    (tmp_path / "model.safetensors").write_bytes(raw(header, data))
    index = read_index(tmp_path)
    assert index.problems == ()
    assert MappedFiles().view(index.tensors["unaligned"])[0] == 2.5


GOOD = {"w": entry()}
BAD_FILES: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": bytes(7),
    "length only": bytes(8),
    "no header": struct.pack("<Q", 20),
    "length past the end": raw(GOOD, bytes(8), length=2**20),
    "length of 2^64 - 1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "length too short": raw(GOOD, bytes(8), length=10),
    "not UTF-8": raw(b'{"\xff": 1}', b""),
    "UTF-16": raw(json.dumps(GOOD).encode("utf-16"), bytes(8)),
    "not JSON": raw(b"hello", b""),
    "NaN": raw(b'{"w": NaN}', b""),
    "deep": raw(b'{"w": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""),
    "deep but closed": raw({"w": entry(shape=json.loads("[" * 200 + "]" * 200))}, bytes(8)),
    "huge number": raw(
        b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}', b""
    ),
    "array": raw([GOOD], bytes(8)),
    "null": raw(None, b""),
    "string": raw("w", b""),
    "twice the same name": raw(b'{"w": 1, "w": 2}', b""),
    "twice the same field": raw(
        b'{"w": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', bytes(8)
    ),
    "metadata of numbers": raw({"__metadata__": {"a": 1}, **GOOD}, bytes(8)),
    "metadata a list": raw({"__metadata__": [], **GOOD}, bytes(8)),
    "entry null": raw({"w": None}, b""),
    "entry list": raw({"w": ["F32", [2], [0, 8]]}, bytes(8)),
    "entry without dtype": raw({"w": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "entry without shape": raw({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "entry without offsets": raw({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "entry with more": raw({"w": {**entry(), "strides": [1]}}, bytes(8)),
    "dtype unknown": raw({"w": entry("F31")}, bytes(8)),
    "dtype number": raw({"w": entry(32)}, bytes(8)),
    "dtype list": raw({"w": entry(["F32"])}, bytes(8)),
    "dtype lower case": raw({"w": entry("f32")}, bytes(8)),
    "shape number": raw({"w": entry(shape=2)}, bytes(8)),
    "shape negative": raw({"w": entry(shape=(-2,))}, bytes(8)),
    "shape two negative": raw({"w": entry(shape=(-2, -1))}, bytes(8)),
    "shape float": raw({"w": entry(shape=(2.0,))}, bytes(8)),
    "shape boolean": raw({"w": entry(shape=(True, 2))}, bytes(8)),
    "shape string": raw({"w": entry(shape=("2",))}, bytes(8)),
    "shape null": raw({"w": entry(shape=None)}, bytes(8)),
    "shape 2^64": raw({"w": entry(shape=(2**64, 2))}, bytes(8)),
    "shape wraps to 8 bytes": raw({"w": entry(shape=(2**62 + 2,))}, bytes(8)),
    "shape of rank 1000": raw({"w": entry(shape=(1,) * 1000, offsets=(0, 4))}, bytes(4)),
    "shape too small": raw({"w": entry(shape=(1,))}, bytes(8)),
    "shape too large": raw({"w": entry(shape=(3,))}, bytes(8)),
    "half a byte": raw({"w": entry("F4", (3,), (0, 1))}, bytes(1)),
    "offsets of one": raw({"w": entry(offsets=(0,))}, bytes(8)),
    "offsets of three": raw({"w": entry(offsets=(0, 8, 8))}, bytes(8)),
    "offsets reversed": raw({"w": entry(offsets=(8, 0))}, bytes(8)),
    "offsets negative": raw({"w": entry(offsets=(-8, 0))}, bytes(8)),
    "offsets float": raw({"w": entry(offsets=(0.0, 8.0))}, bytes(8)),
    "offsets object": raw({"w": entry(offsets={"0": 8})}, bytes(8)),
    "offsets past the end": raw({"w": entry(offsets=(8, 16))}, bytes(8)),
    "data cut": raw(GOOD, bytes(7)),
    "data too long": raw(GOOD, bytes(9)),
    "no data": raw(GOOD, b""),
    "overlap": raw({"w": entry(), "v": entry(offsets=(4, 12))}, bytes(12)),
    "overlap and gap": raw({"w": entry(), "v": entry(offsets=(4, 12))}, bytes(16)),
    "same bytes": raw({"w": entry(), "v": entry()}, bytes(8)),
    "gap": raw({"w": entry(), "v": entry(offsets=(12, 20))}, bytes(20)),
    "late start": raw({"w": entry(offsets=(4, 12))}, bytes(12)),
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_file_is_named(content: bytes, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(content)
    found = problems(tmp_path)
    assert found and all(kind == "unreadable file" for kind, _ in found)
    assert all("model.safetensors" in what and what.isprintable() for _, what in found)


def test_every_truncation_is_seen(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    content = file.read_bytes()
    for size in range(len(content)):
        file.write_bytes(content[:size])
        assert problems(tmp_path), size


def test_every_bit_flip_of_the_header_is_survived(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}, file)
    content = file.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    seen = 0
    for at in range(size):
        for bit in range(8):
            bent = bytearray(content)
            bent[at] ^= 1 << bit
            file.write_bytes(bent)
            seen += bool(problems(tmp_path))
    # The others rename a tensor, or change blanks to other blanks.
    assert seen > 0.75 * 8 * size


def test_all_problems_of_a_file_are_named(tmp_path: Path):
    header = {"w": entry("F31"), "v": entry(shape=(3,)), "u": entry(offsets=(0, 9)), "t": entry()}
    (tmp_path / "model.safetensors").write_bytes(raw(header, bytes(8)))
    found = " ".join(what for _, what in problems(tmp_path))
    assert "w: " in found and "v: " in found and "u: " in found and "t: " not in found
    assert read_index(tmp_path).lost == {"w", "v", "u"}


def test_control_characters_never_reach_the_message(tmp_path: Path):
    header = {"\x1b[2J\ud800\n": entry("F31")}
    (tmp_path / "model.safetensors").write_bytes(raw(header, bytes(8)))
    ((_, what),) = problems(tmp_path)
    assert what.isprintable()
    what.encode()


# Folders of several files.


def shards(folder: Path, weight_map: object) -> Path:
    """a, b in the first shard, c in the second."""
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}, folder / one)
    save_file({"c": np.zeros(1, np.float32)}, folder / two)
    if weight_map is not None:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
RIGHT = {"a": ONE, "b": ONE, "c": TWO}


def test_shards_with_and_without_index(tmp_path: Path):
    index = read_index(shards(tmp_path, RIGHT))
    assert index.problems == () and index.files == (ONE, TWO)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert read_index(tmp_path) == index


def test_files_beside_the_checkpoint_are_listed_not_read(tmp_path: Path):
    (shards(tmp_path, RIGHT) / "adapter.safetensors").write_bytes(b"junk")
    index = read_index(tmp_path)
    assert index.problems == () and index.other_files == ("adapter.safetensors",)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    index = read_index(tmp_path)
    assert index.files == ("model.safetensors",) and ONE in index.other_files


def test_missing_shard(tmp_path: Path):
    (shards(tmp_path, RIGHT) / ONE).unlink()
    assert problems(tmp_path) == [("missing file", f"{ONE}, holds 2 tensors by the index")]
    assert read_index(tmp_path).lost == {"a", "b"}


def test_dangling_link_is_a_missing_shard(tmp_path: Path):
    (shards(tmp_path, RIGHT) / TWO).unlink()
    (tmp_path / TWO).symlink_to(tmp_path / "blobs" / "gone")
    assert [kind for kind, _ in problems(tmp_path)] == ["missing file"]


def test_folder_in_place_of_a_shard(tmp_path: Path):
    (shards(tmp_path, RIGHT) / TWO).unlink()
    (tmp_path / TWO).mkdir()
    assert [kind for kind, _ in problems(tmp_path)] == ["unreadable file"]


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        ({"a": ONE, "c": TWO}, [("index mismatch", "b")]),
        ({**RIGHT, "d": ONE}, [("missing tensor", "d")]),
        ({**RIGHT, "d": "ghost.safetensors"}, [("missing file", "ghost.safetensors")]),
        (
            {**RIGHT, "c": ONE},
            [("missing tensor", "c")],  # the second shard is not named at all
        ),
        (
            {**RIGHT, "b": TWO},
            [("index mismatch", "b"), ("missing tensor", "b")],
        ),
    ],
)
def test_index_against_shards(
    weight_map: dict[str, str], expected: list[tuple[str, str]], tmp_path: Path
):
    found = problems(shards(tmp_path, weight_map))
    assert [(kind, what.split(" ")[0].rstrip(",")) for kind, what in found] == expected


def test_tensor_in_two_shards(tmp_path: Path):
    shards(tmp_path, RIGHT)
    save_file({"a": np.zeros(1, np.float32), "c": np.zeros(1, np.float32)}, tmp_path / TWO)
    found = dict(problems(tmp_path))
    assert found["duplicate tensor"].startswith("a in ")


def edit(change: Callable[[dict[str, Any]], object]) -> bytes:
    index = {"metadata": {"total_size": 12}, "weight_map": dict(RIGHT)}
    change(index)
    return json.dumps(index).encode()


BAD_INDICES: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'"\xff"',
    "list": b"[]",
    "null": b"null",
    "no map": b"{}",
    "empty map": b'{"weight_map": {}}',
    "map a list": b'{"weight_map": ["a"]}',
    "map null": b'{"weight_map": null}',
    "key twice": b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    "map twice": b'{"weight_map": {"a": "x.safetensors"}, "weight_map": {}}',
    "NaN": b'{"weight_map": {"a": NaN}}',
    "deep": b"[" * 200_000,
    "number for a file": edit(lambda i: i["weight_map"].update(c=2)),
    "null for a file": edit(lambda i: i["weight_map"].update(c=None)),
    "list for a file": edit(lambda i: i["weight_map"].update(c=[TWO])),
    "path up": edit(lambda i: i["weight_map"].update(c=f"../{TWO}")),
    "path down": edit(lambda i: i["weight_map"].update(c=f"sub/{TWO}")),
    "absolute path": edit(lambda i: i["weight_map"].update(c=f"/tmp/{TWO}")),
    "empty name": edit(lambda i: i["weight_map"].update(c="")),
    "dots": edit(lambda i: i["weight_map"].update(c="..")),
    "NUL": edit(lambda i: i["weight_map"].update(c="a\0b.safetensors")),
    "half a surrogate": edit(lambda i: i["weight_map"].update(c="\ud800.safetensors")),
    "other kind": edit(lambda i: i["weight_map"].update(c="pytorch_model.bin")),
}


@pytest.mark.parametrize("content", BAD_INDICES.values(), ids=BAD_INDICES)
def test_bad_index_is_named(content: bytes, tmp_path: Path):
    (shards(tmp_path, None) / "model.safetensors.index.json").write_bytes(content)
    found = problems(tmp_path)
    assert found[0][0] == "bad index"
    assert all(what.isprintable() for _, what in found)


def test_name_too_long_for_a_file(tmp_path: Path):
    name = "x" * 5000 + ".safetensors"
    found = problems(shards(tmp_path, {**RIGHT, "d": name}))
    assert [kind for kind, _ in found] == ["unreadable file"]


def test_no_folder(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path / "a\0b"):
        with pytest.raises(CloverError, match="not a folder"):
            read_index(path)


def test_empty_folder(tmp_path: Path):
    assert [kind for kind, _ in problems(tmp_path)] == ["missing file"]
