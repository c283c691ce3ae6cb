"""Saving: whole or not at all, never over what is not a checkpoint."""

import contextlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from clover_jax.checkpoint import inspect, load, save, saving
from clover_jax.errors import CloverError
from clover_jax.model.transformer import param_specs, unstack
from tests.checkpoint.folders import assert_same, clover_small, qwen_small, random_params, read_file

CFG = clover_small()


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_device_arrays_and_unstacked_layers(tmp_path: Path):
    params = random_params(CFG)
    save(tmp_path / "a", CFG, jax.tree.map(jax.device_put, params))
    assert_same(load(tmp_path / "a")[1], params)
    layers = unstack(params)
    save(tmp_path / "b", CFG, layers)
    with pytest.raises(CloverError, match="6 layers, the config 3"):
        save(tmp_path / "c", CFG.replace(num_layers=3), layers)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_shards_and_their_index(tmp_path: Path):
    params = random_params(CFG)
    report = save(tmp_path, CFG, params, max_shard_bytes=5000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = {name: read_file(tmp_path / name) for name in report.files}
    assert {t: file for file, tensors in shards.items() for t in tensors} == index["weight_map"]
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in shards.values()]
    assert sum(sizes) == index["metadata"]["total_size"] == report.nbytes
    assert report.tensors == sum(len(tensors) for tensors in shards.values())
    assert all(
        size <= 5000 or len(tensors) == 1
        for size, tensors in zip(sizes, shards.values(), strict=True)
    )
    count = len(report.files)
    assert report.files[1] == f"model-00002-of-{count:05}.safetensors"
    assert not (tmp_path / "model.safetensors").exists()
    assert inspect(tmp_path).total.file_bytes == report.nbytes


def test_file_says_that_it_is_readable_by_transformers(tmp_path: Path):
    save(tmp_path, CFG, random_params(CFG))
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"}


def test_dtype_of_the_file(tmp_path: Path):
    params = random_params(CFG)
    save(tmp_path, CFG, params, dtype="bfloat16")
    cfg, got, _ = load(tmp_path)
    assert cfg == CFG.replace(dtype="bfloat16")
    assert_same(got, jax.tree.map(lambda s, p: p.astype(s.dtype), param_specs(cfg), params))
    assert got.layers.linear.linear_attn.A_log.dtype == np.float32


@pytest.mark.parametrize("kind", ["file", "full", "foreign"])
def test_what_is_there_stays(kind: str, tmp_path: Path):
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("mine")
    else:
        save(target, qwen_small(), random_params(qwen_small()))
        if kind == "foreign":
            (target / "config.json").unlink()
    before = files_of(tmp_path) if kind == "file" else files_of(target)
    with pytest.raises(CloverError, match="out is"):
        save(target, CFG, random_params(CFG), overwrite=kind != "full")
    assert (files_of(tmp_path) if kind == "file" else files_of(target)) == before


def test_overwriting_replaces_the_whole_folder(tmp_path: Path):
    target = tmp_path / "out"
    target.mkdir()
    save(target, qwen_small(), random_params(qwen_small()), max_shard_bytes=5000)
    save(target, CFG, random_params(CFG), overwrite=True)
    assert sorted(files_of(target)) == ["config.json", "model.safetensors"]
    assert_same(load(target)[1], random_params(CFG))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_nothing_behind(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = tmp_path / "out"
    if overwrite:
        save(target, qwen_small(), random_params(qwen_small()))
    before = files_of(target) if overwrite else None
    write, calls = saving.save_file, []

    def fail_at_the_third(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        write(*args, **options)

    monkeypatch.setattr(saving, "save_file", fail_at_the_third)
    with pytest.raises(CloverError, match="No space left"):
        save(target, CFG, random_params(CFG), max_shard_bytes=5000, overwrite=overwrite)
    assert len(calls) == 3
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if overwrite else [])
    assert (files_of(target) if overwrite else None) == before


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "write_json", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "out", CFG, random_params(CFG))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CloverError, match="cannot be written"):
        save(tmp_path / "file" / "out", CFG, random_params(CFG))


def test_weights_of_another_model(tmp_path: Path):
    with pytest.raises(CloverError) as caught:
        save(tmp_path / "out", CFG, random_params(qwen_small()))
    assert "layers.linear.linear_attn.bd_softmax_history_c is missing" in str(caught.value)
    with pytest.raises(CloverError, match=r"embed_tokens is \[24, 20\], expected \[25, 20\]"):
        save(tmp_path / "out", CFG.replace(vocab_size=25), random_params(CFG))
    assert list(tmp_path.iterdir()) == []


def test_shard_of_no_bytes(tmp_path: Path):
    with pytest.raises(CloverError, match="max_shard_bytes"):
        save(tmp_path / "out", CFG, random_params(CFG), max_shard_bytes=0)


def test_other_files_come_along(tmp_path: Path):
    source = tmp_path / "source"
    save(source, qwen_small(), random_params(qwen_small()), max_shard_bytes=5000)
    (source / "tokenizer.json").write_text("{}")
    (source / "README.md").write_text("hello")
    (source / "pytorch_model.bin").write_text("old weights")
    (source / "figures").mkdir()
    save(tmp_path / "out", CFG, random_params(CFG), files_from=source)
    names = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(files_of(tmp_path / "out")) == names
    assert load(tmp_path / "out")[0] == CFG
    with pytest.raises(CloverError, match="none is not a folder"):
        save(tmp_path / "out2", CFG, random_params(CFG), files_from=tmp_path / "none")
    assert not (tmp_path / "out2").exists()


def test_other_processes_of_a_job_write_nothing_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They take part in gathering the weights; the first process writes."""
    monkeypatch.setattr(saving, "is_here", lambda _: False)
    monkeypatch.setattr(saving, "first_process_first", lambda: contextlib.nullcontext(False))
    report = save(tmp_path / "model", CFG, random_params(CFG))
    assert report.files == () and report.tensors > 0
    assert not (tmp_path / "model").exists()
