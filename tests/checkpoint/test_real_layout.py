"""The 69 GB checkpoints as they lie on the hub, headers only: what would the loader do with them?

Names, shapes and dtypes are written by hand (test_hf_map.py and below); the files are sparse.
"""

import collections
import json
import math
import re
from pathlib import Path

import pytest

from clover_jax.checkpoint import inspect
from clover_jax.checkpoint.config_map import config_to_hf
from clover_jax.checkpoint.loading import look_through
from clover_jax.config import ModelConfig
from clover_jax.model.transformer import param_specs
from clover_jax.params import named_leaves
from clover_jax.presets import clover_35b_a3b, qwen36_35b_a3b
from tests.checkpoint.test_hf_map import ATTENTION_LAYER, EXTRAS, MOE, published

SHARDS = 26
type Shapes = dict[str, tuple[int, ...]]


def hub_name(name: str) -> str:
    return re.sub(r"^model\.", "model.language_model.", name)


def mtp() -> Shapes:
    """19 tensors: one attention layer with its experts, and what joins the two inputs."""
    names = {"mtp.fc.weight": (2048, 4096)}
    names |= {f"mtp.{n}.weight": (2048,) for n in
              ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}  # fmt: skip
    return names | {f"mtp.layers.0.{n}": s for n, s in (ATTENTION_LAYER | MOE).items()}


def vision() -> Shapes:
    """333 tensors: 27 blocks of six layers with biases, patches, positions, merger."""
    names: Shapes = {
        "patch_embed.proj.weight": (1152, 3, 2, 16, 16), "patch_embed.proj.bias": (1152,),
        "pos_embed.weight": (2304, 1152),
    }  # fmt: skip
    for i in range(27):
        for part in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            names |= {f"blocks.{i}.{part}.weight": (1152, 1152), f"blocks.{i}.{part}.bias": (1152,)}
    for part in ("norm", "linear_fc1", "linear_fc2"):
        names |= {f"merger.{part}.weight": (2048, 4608), f"merger.{part}.bias": (2048,)}
    return {f"model.visual.{n}": s for n, s in names.items()}


def write_headers(folder: Path, cfg: ModelConfig, tensors: Shapes) -> Path:
    """Sharded files of the right sizes that hold nothing, and their index."""
    folder.mkdir()
    shards: list[list[str]] = [[] for _ in range(SHARDS)]
    for i, name in enumerate(tensors):
        shards[i * SHARDS // len(tensors)].append(name)
    index, total = {}, 0
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        header, end = {}, 0
        for name in names:
            size = 2 * math.prod(tensors[name])
            header[name] = {"dtype": "BF16", "shape": tensors[name],
                            "data_offsets": [end, end + size]}  # fmt: skip
            end += size
            index[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
        total += end
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config_to_hf(cfg)))
    return folder


def on_the_hub(extras: Shapes) -> Shapes:
    return {hub_name(n): s for n, s in published(extras).items()} | mtp() | vision()


def test_qwen36_is_consumed_whole(tmp_path: Path):
    """All 693 text tensors exactly once, 19 + 333 others left out, every leaf filled exactly."""
    tensors = on_the_hub({})
    assert len(tensors) == 1045
    survey = look_through(write_headers(tmp_path / "qwen", qwen36_35b_a3b(), tensors))
    report = survey.report
    assert report.problems == () and len(report.files) == SHARDS
    assert (report.experts, report.prefix) == ("fused", "language_model")
    assert [(i.prefix, i.tensors) for i in report.ignored] == [("mtp.", 19), ("model.visual.", 333)]
    assert report.total.parameters == 34_660_610_688
    assert report.total.file_bytes == 2 * 34_660_610_688  # 69.32 GB
    used = [s.tensor.name for found in survey.sources.values() for s in found]
    assert len(used) == len(set(used)) == 693
    assert set(used) == {hub_name(n) for n in published({})}
    for path, spec in named_leaves(param_specs(qwen36_35b_a3b())).items():
        boxes = [(s.piece.start, s.piece.shape) for s in survey.sources[path]]
        assert len(set(boxes)) == len(boxes), path
        assert sum(math.prod(shape) for _, shape in boxes) == math.prod(spec.shape), path


@pytest.mark.parametrize("scalars", ((32,), (16,), (1,), (32, 1)), ids=str)
def test_clover_suffixes(scalars: tuple[int, ...], tmp_path: Path):
    """The four suffixes that clover.md names, in every shape that it lists."""
    taps = (8192, 1, 3) if scalars == (16,) else (8192, 3)
    extras = {n: taps if "conv" in n else scalars for n in EXTRAS}
    tensors = {hub_name(n): s for n, s in published(extras).items()}
    report = inspect(write_headers(tmp_path / "clover", clover_35b_a3b(), tensors))
    assert report.problems == ()
    assert report.total.parameters == 34_660_610_688 + 740_160


def test_what_is_wrong_is_named(tmp_path: Path):
    """A tensor gone, one of another shape, one nobody knows: three lines and no more."""
    tensors = on_the_hub({})
    del tensors["model.language_model.layers.7.self_attn.k_norm.weight"]
    tensors["lm_head.weight"] = (248320, 2049)
    tensors["model.language_model.layers.3.linear_attn.in_proj_qkv.weight"] = (8192, 2048)
    report = inspect(write_headers(tmp_path / "bent", qwen36_35b_a3b(), tensors))
    kinds = collections.Counter(p.kind for p in report.problems)
    assert kinds == {"missing tensor": 1, "wrong shape": 1, "unknown tensor": 1}
    told = " ".join(p.what for p in report.problems)
    for name in ("layers.7.self_attn.k_norm", "lm_head", "layers.3.linear_attn.in_proj_qkv"):
        assert name in told
