"""Folders bent at one place: `load` answers with a CloverError, never with another exception."""

import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clover_jax.checkpoint import inspect, load, save
from clover_jax.errors import CloverError
from tests.checkpoint.folders import clover_small, random_params

HOSTILE = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, 1e999),
    *("", "x", "32", "\ud800", "\x00", "a" * 3000, "../x", "NaN"),
    *([], [[]], [None], [1, 2, 3], {}, {"a": {}}, [0] * 500, {"dtype": "F32"}),
]


def nodes(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all nodes of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from nodes(value[key], (*path, key))


def bend(value: Any, rng: random.Random) -> Any:
    """The value with one node replaced, removed, doubled or renamed."""
    value = copy.deepcopy(value)
    path = rng.choice(list(nodes(value))[1:])
    owner = value
    for key in path[:-1]:
        owner = owner[key]
    kind = rng.choice(["replace", "replace", "replace", "remove", "rename", "wrap"])
    if kind == "replace":
        owner[path[-1]] = rng.choice(HOSTILE)
    elif kind == "remove":
        del owner[path[-1]]
    elif kind == "rename" and isinstance(owner, dict):
        owner[f"{path[-1]}_"] = owner.pop(path[-1])
    else:
        owner[path[-1]] = [owner[path[-1]]]
    return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = clover_small(num_layers=3)
    path = tmp_path_factory.mktemp("malformed") / "model"
    save(path, cfg, random_params(cfg), max_shard_bytes=40_000)
    return path


def outcome(folder: Path) -> str:
    """`loaded`, or the message of the one exception that is allowed."""
    report = inspect(folder)
    assert all(line.isprintable() for line in report.lines())
    if report.problems:
        with pytest.raises(CloverError) as caught:
            load(folder)
        assert all(line.isprintable() for line in str(caught.value).splitlines())
        str(caught.value).encode()
        return str(caught.value)
    return "loaded"


def bent(folder: Path, file: Path, contents: Iterator[bytes]) -> list[str]:
    original = file.read_bytes()
    try:
        found = []
        for content in contents:
            file.write_bytes(content)
            found.append(outcome(folder))
        return found
    finally:
        file.write_bytes(original)


def test_bent_config(folder: Path):
    file = folder / "config.json"
    config, rng = json.loads(file.read_bytes()), random.Random(0)
    texts = (json.dumps(bend(config, rng)).encode() for _ in range(120))
    found = bent(folder, file, texts)
    assert 70 < sum(text != "loaded" for text in found) < 120


def test_bent_index(folder: Path):
    file = folder / "model.safetensors.index.json"
    index, rng = json.loads(file.read_bytes()), random.Random(1)
    texts = (json.dumps(bend(index, rng)).encode() for _ in range(50))
    assert sum(text != "loaded" for text in bent(folder, file, texts)) > 40


def test_bent_header(folder: Path):
    file = sorted(folder.glob("*.safetensors"))[0]
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, rng = json.loads(content[8 : 8 + length]), random.Random(2)

    def contents() -> Iterator[bytes]:
        for _ in range(60):
            text = json.dumps(bend(header, rng)).encode()
            yield struct.pack("<Q", len(text)) + text + content[8 + length :]

    assert sum(text != "loaded" for text in bent(folder, file, contents())) > 50


BAD_CONFIGS = {
    "empty": b"",
    "cut": b'{"model_type": "clover_moe", "vocab',
    "not UTF-8": b'{"model_type": "\xff"}',
    "UTF-16": '{"model_type": "clover_moe"}'.encode("utf-16"),
    "list": b"[]",
    "number": b"1",
    "string": b'"clover_moe"',
    "null": b"null",
    "deep": b"[" * 200_000,
    "deep value": b'{"model_type": "clover_moe", "a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "key twice": b'{"model_type": "clover_moe", "model_type": "clover_moe"}',
    "NaN": b'{"model_type": "clover_moe", "rms_norm_eps": NaN}',
    "long number": b'{"model_type": "clover_moe", "vocab_size": ' + b"9" * 5000 + b"}",
    "NUL bytes": bytes(100),
}


@pytest.mark.parametrize("content", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_config_that_is_no_config(content: bytes, folder: Path):
    (message,) = bent(folder, folder / "config.json", iter([content]))
    assert "config (" in message


def test_no_config(folder: Path, tmp_path: Path):
    for file in folder.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    assert "config.json is missing" in outcome(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "config.json cannot be read" in outcome(tmp_path)
