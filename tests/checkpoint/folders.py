"""Small models and the folders that hold them, written without the code under test."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file

from clover_jax.config import ModelConfig
from clover_jax.model.transformer import Params, param_specs
from clover_jax.params import is_spec, named_leaves
from clover_jax.presets import clover_tiny

GOLDEN = Path(__file__).parents[1] / "goldens" / "qwen36_tiny"
NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64}


def clover_small(**changes: Any) -> ModelConfig:
    """One group twice, no two sizes alike where a transpose could hide."""
    small = clover_tiny().replace(
        vocab_size=24,
        hidden_size=20,
        num_layers=6,
        full_attention_interval=3,
        **{"attention.head_dim": 8, "attention.rotary_dim": 4, "delta.key_head_dim": 6},
        **{"moe.num_experts": 4, "moe.intermediate": 10, "moe.shared_intermediate": 14},
    )
    return small.replace(**changes)


def qwen_small(**changes: Any) -> ModelConfig:
    """The same without what Clover adds."""
    base = {"bd_gdn": None, "mask_token_id": None, "moe.coreset": None, "block_length": 32}
    return clover_small(**base, **{"delta.chunk": 64}).replace(**changes)


def random_params(cfg: ModelConfig, seed: int = 0) -> Params:
    """Random weights as numpy arrays, each leaf in its spec's dtype."""
    rng = np.random.default_rng(seed)
    draw = lambda s: (0.1 * rng.standard_normal(s.shape)).astype(s.dtype)
    return jax.tree.map(draw, param_specs(cfg), is_leaf=is_spec)


def read_file(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file, by the safetensors package."""
    return {
        name: np.frombuffer(t["data"], NUMPY[t["dtype"]]).reshape(t["shape"])
        for name, t in safetensors.deserialize(path.read_bytes())
    }


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= read_file(file)
    return tensors


def write_folder(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Any, *, shards: int = 1
) -> Path:
    """A checkpoint folder; several shards come with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        part = {n: np.ascontiguousarray(tensors[n]) for n in names[i::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def rename(
    tensors: Mapping[str, np.ndarray], change: Callable[[str], str]
) -> dict[str, np.ndarray]:
    """The same tensors under other names."""
    return {change(name): tensor for name, tensor in tensors.items()}


def assert_same(got: Any, want: Any) -> None:
    """Two parameter trees are equal to the last bit, dtypes included."""
    got, want = named_leaves(got), named_leaves(want)
    assert got.keys() == want.keys()
    for path in want:
        a, b = np.asarray(got[path]), np.asarray(want[path])
        assert a.dtype == b.dtype, path
        assert a.shape == b.shape, path
        assert a.tobytes() == b.tobytes(), path
