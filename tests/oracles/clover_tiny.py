"""Writes the tiny Clover folder and what the torch oracle computes on it.

    .venv/bin/python tests/oracles/clover_tiny.py tests/goldens/clover_tiny .venv-oracle/bin/python

The weights are drawn here, in our layout; preview.safetensors and training.safetensors come from
`clover_jax/verify/oracles/torch_preview.py`, which shares no code with what it judges.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from clover_jax.checkpoint import save
from clover_jax.cli.commands import Verify
from clover_jax.cli.verify import other_side
from clover_jax.config import ModelConfig
from clover_jax.model.transformer import Params, param_specs
from clover_jax.params import ParamSpec, is_spec, named_leaves
from clover_jax.presets import clover_tiny
from clover_jax.verify.trace import write_trace

# Last part of a leaf's path -> (mean, standard deviation): away from every neutral value.
NORMAL = {
    "A_log": (-1.0, 1.0),
    "dt_bias": (0.0, 1.0),
    "embed_tokens": (0.0, 0.5),
    "lm_head": (0.0, 0.2),
    "gate": (0.0, 0.4),
    "conv1d": (0.3, 0.4),
    "conv_right_weight": (0.0, 0.3),
    "bd_softmax_logit_scale": (1.0, 0.7),
    "bd_softmax_history_bias": (0.0, 0.5),
    "bd_softmax_history_c": (1.0, 0.3),
    "out_proj": (0.0, 0.05),
    "o_proj": (0.0, 0.05),
    "down_proj": (0.0, 0.05),
}
NORMS = ("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


def config(**changes: object) -> ModelConfig:
    """One group of four layers; blocks of 8."""
    small = clover_tiny().replace(
        vocab_size=64,
        hidden_size=40,
        num_layers=4,
        **{"moe.intermediate": 16, "moe.shared_intermediate": 24, "delta.chunk": 16},
    )
    return small.replace(**changes)


def draw(cfg: ModelConfig, seed: int = 0) -> Params:
    """Random weights."""
    rng = np.random.default_rng(seed)

    def one(path: str, spec: ParamSpec) -> np.ndarray:
        leaf = path.split(".")[-1]
        if leaf in NORMS:
            mean, std = (1.0 if path.endswith("linear_attn.norm") else 0.0), 0.3
        else:
            mean, std = NORMAL.get(leaf, (0.0, 0.15))
        drawn = mean + std * rng.standard_normal(spec.shape)
        if leaf == "in_proj_qkv":  # keys like queries: what is read never cancels to noise
            width = cfg.delta.num_key_heads * cfg.delta.key_head_dim
            drawn[..., width : 2 * width] *= 0.5
            drawn[..., width : 2 * width] += 0.8 * drawn[..., :width]
        return drawn.astype(spec.dtype)

    specs = param_specs(cfg)
    leaves = [one(path, spec) for path, spec in named_leaves(specs).items()]
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def main(folder: Path, python: Path) -> None:
    """Weights, then both traces."""
    cfg = config()
    save(folder, cfg, draw(cfg), overwrite=True)
    for name, length in (("preview", 13), ("training", 21)):
        flags = Verify(
            folder=folder, against=f"torch-{name}", oracle_python=python, length=length, rows=2
        )  # fmt: skip
        tensors, about = other_side(flags, cfg)
        write_trace(folder / f"{name}.safetensors", tensors, about)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
