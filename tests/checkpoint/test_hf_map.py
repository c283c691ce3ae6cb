"""The rule table against the published names and shapes, by hand."""

import math

import numpy as np
import pytest

from clover_jax.checkpoint.hf_map import RULES, canonical, per_expert, pieces
from clover_jax.config import ModelConfig
from clover_jax.model.leaves import leaf_kind
from clover_jax.model.transformer import param_specs
from clover_jax.params import named_leaves
from clover_jax.presets import clover_35b_a3b, qwen36_35b_a3b
from tests.checkpoint.folders import clover_small, qwen_small

# Qwen3.6-35B-A3B, as its safetensors headers say.
GDN_LAYER = {
    "input_layernorm.weight": (2048,),
    "post_attention_layernorm.weight": (2048,),
    "linear_attn.in_proj_qkv.weight": (8192, 2048),
    "linear_attn.in_proj_z.weight": (4096, 2048),
    "linear_attn.in_proj_a.weight": (32, 2048),
    "linear_attn.in_proj_b.weight": (32, 2048),
    "linear_attn.conv1d.weight": (8192, 1, 4),
    "linear_attn.A_log": (32,),
    "linear_attn.dt_bias": (32,),
    "linear_attn.norm.weight": (128,),
    "linear_attn.out_proj.weight": (2048, 4096),
}
ATTENTION_LAYER = {
    "input_layernorm.weight": (2048,),
    "post_attention_layernorm.weight": (2048,),
    "self_attn.q_proj.weight": (8192, 2048),
    "self_attn.k_proj.weight": (512, 2048),
    "self_attn.v_proj.weight": (512, 2048),
    "self_attn.o_proj.weight": (2048, 4096),
    "self_attn.q_norm.weight": (256,),
    "self_attn.k_norm.weight": (256,),
}
MOE = {
    "mlp.gate.weight": (256, 2048),
    "mlp.experts.gate_up_proj": (256, 1024, 2048),
    "mlp.experts.down_proj": (256, 2048, 512),
    "mlp.shared_expert.gate_proj.weight": (512, 2048),
    "mlp.shared_expert.up_proj.weight": (512, 2048),
    "mlp.shared_expert.down_proj.weight": (2048, 512),
    "mlp.shared_expert_gate.weight": (1, 2048),
}
EXTRAS = {
    "linear_attn.conv_right_weight": (8192, 3),
    "linear_attn.bd_softmax_logit_scale": (32,),
    "linear_attn.bd_softmax_history_bias": (32,),
    "linear_attn.bd_softmax_history_c": (32,),
}


def published(extras: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    names = {
        "model.embed_tokens.weight": (248320, 2048),
        "model.norm.weight": (2048,),
        "lm_head.weight": (248320, 2048),
    }
    for i in range(40):
        layer = ATTENTION_LAYER if (i + 1) % 4 == 0 else GDN_LAYER | extras
        names |= {f"model.layers.{i}.{name}": shape for name, shape in (layer | MOE).items()}
    return names


@pytest.mark.parametrize(
    ("cfg", "expected", "count"),
    [(qwen36_35b_a3b(), published({}), 693), (clover_35b_a3b(), published(EXTRAS), 813)],
    ids=["qwen36", "clover"],
)
def test_names_and_shapes_of_the_35b(
    cfg: ModelConfig, expected: dict[str, tuple[int, ...]], count: int
):
    found = [piece for whole in pieces(cfg).values() for piece in whole]
    assert len(found) == count
    assert {p.name: p.file_shapes[0] for p in found} == expected


def test_per_expert_names_of_the_35b():
    found = pieces(qwen36_35b_a3b())
    whole = [
        *found["layers.full.mlp.experts.gate_up_proj"],
        *found["layers.full.mlp.experts.down_proj"],
    ]
    layer3 = [p for p in whole if p.name.startswith("model.layers.3.")]
    split = {p.name: p.file_shapes[0] for one in layer3 for p in per_expert(one)}
    expected = {}
    for e in range(256):
        name = f"model.layers.3.mlp.experts.{e}"
        expected[f"{name}.gate_proj.weight"] = (512, 2048)
        expected[f"{name}.up_proj.weight"] = (512, 2048)
        expected[f"{name}.down_proj.weight"] = (2048, 512)
    assert split == expected


def test_every_rule_is_used():
    used = {leaf_kind(path) for path in pieces(clover_small())}
    assert used == RULES.keys()


@pytest.mark.parametrize("split", [False, True], ids=["fused", "per_expert"])
@pytest.mark.parametrize(
    "cfg",
    [
        clover_small(),
        qwen_small(tie_word_embeddings=True),
        qwen_small(**{"moe.experts_per_layer": (4, 2, 3, 4, 4, 2)}),
    ],
    ids=["clover", "tied", "pruned"],
)
def test_pieces_fill_every_leaf_once_and_come_back(cfg: ModelConfig, split: bool):
    for path, spec in named_leaves(param_specs(cfg)).items():
        leaf = np.arange(1, math.prod(spec.shape) + 1, dtype=np.float64).reshape(spec.shape)
        rebuilt = np.zeros_like(leaf)
        for whole in pieces(cfg)[path]:
            parts = per_expert(whole) if split and ".experts." in whole.name else [whole]
            for piece in parts:
                tensor = piece.to_file(leaf)
                assert tensor.shape == piece.file_shapes[0]
                assert tensor.flags.c_contiguous
                box = piece.to_leaf(tensor)
                assert np.shares_memory(box, tensor)
                at = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
                assert not rebuilt[at].any()
                rebuilt[at] = box
        assert np.array_equal(rebuilt, leaf * existing(path, leaf.shape, cfg)), path


def existing(path: str, shape: tuple[int, ...], cfg: ModelConfig) -> np.ndarray:
    """1 where a leaf's expert exists in its layer (two of three layers are linear), else 0."""
    exists = np.ones(shape)
    axis = {"mlp.gate": -1, "mlp.experts.gate_up_proj": -3, "mlp.experts.down_proj": -3}
    kind = leaf_kind(path)
    for layer, count in enumerate(cfg.moe.experts_per_layer or ()):
        group, j = divmod(layer, 3)
        if kind in axis and (j == 2) == path.startswith("layers.full."):
            at = exists[group] if j == 2 else exists[group, j]
            np.moveaxis(at, axis[kind], 0)[count:] = 0
    return exists


def test_only_the_level_is_taken_out_of_a_name():
    assert canonical("model.language_model.norm.weight") == "model.norm.weight"
    assert canonical("model.norm.weight") == "model.norm.weight"
    assert canonical("lm_head.weight") == "lm_head.weight"
    assert canonical("language_model.model.norm.weight") == "language_model.model.norm.weight"
