"""The tiny Qwen3.6 folder: its tensors placed by hand into our layout, and what they must give."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from clover_jax.config import ModelConfig
from clover_jax.model.attention import AttentionParams
from clover_jax.model.block import FullLayer, LinearLayer
from clover_jax.model.deltanet import GDNParams
from clover_jax.model.moe import ExpertParams, MoEParams, SharedExpertParams
from clover_jax.model.stack import Groups
from clover_jax.model.transformer import Params
from clover_jax.presets import clover_tiny

FOLDER = Path(__file__).parents[1] / "goldens" / "qwen36_tiny"


@functools.cache
def tensors() -> dict[str, np.ndarray]:
    """What transformers computed; names in tests/oracles/README.md."""
    return load_file(FOLDER / "goldens.safetensors")


def config() -> ModelConfig:
    """The folder's model, chunk as in transformers."""
    c = json.loads((FOLDER / "config.json").read_text())
    rope = c["rope_parameters"]
    return clover_tiny().replace(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_layers=c["num_hidden_layers"],
        max_position_embeddings=c["max_position_embeddings"],
        bd_gdn=None,
        mask_token_id=None,
        **{
            "attention.num_heads": c["num_attention_heads"],
            "attention.num_kv_heads": c["num_key_value_heads"],
            "attention.head_dim": c["head_dim"],
            "attention.rotary_dim": int(c["head_dim"] * rope["partial_rotary_factor"]),
            "attention.rope_theta": rope["rope_theta"],
            "delta.num_key_heads": c["linear_num_key_heads"],
            "delta.num_value_heads": c["linear_num_value_heads"],
            "delta.key_head_dim": c["linear_key_head_dim"],
            "delta.value_head_dim": c["linear_value_head_dim"],
            "delta.conv_kernel": c["linear_conv_kernel_dim"],
            "delta.chunk": 64,
            "moe.num_experts": c["num_experts"],
            "moe.top_k": c["num_experts_per_tok"],
            "moe.intermediate": c["moe_intermediate_size"],
            "moe.shared_intermediate": c["shared_expert_intermediate_size"],
            "moe.coreset": None,
        },
    )


@functools.cache
def layers() -> list[LinearLayer | FullLayer]:
    """The folder's layers in order."""
    t, cfg = load_file(FOLDER / "model.safetensors"), config()
    return [_layer(t, i, cfg) for i in range(cfg.num_layers)]


@functools.cache
def params() -> Params:
    """The folder's weights, layers stacked."""
    t, n = load_file(FOLDER / "model.safetensors"), config().full_attention_interval
    stack = lambda trees: jax.tree.map(lambda *a: np.stack(a), *trees)
    groups = [layers()[i : i + n - 1] for i in range(0, len(layers()), n)]
    return Params(
        embed_tokens=t["model.embed_tokens.weight"],
        layers=Groups(stack([stack(group) for group in groups]), stack(layers()[n - 1 :: n])),
        norm=t["model.norm.weight"],
        lm_head=t["lm_head.weight"].T,
    )


def _layer(t: dict[str, np.ndarray], i: int, cfg: ModelConfig) -> LinearLayer | FullLayer:
    at = lambda name: t[f"model.layers.{i}.{name}"]
    norms = at("input_layernorm.weight"), at("post_attention_layernorm.weight")
    if f"model.layers.{i}.self_attn.q_proj.weight" in t:
        return FullLayer(norms[0], _attention(at, cfg), norms[1], _moe(at, cfg))
    return LinearLayer(norms[0], _gdn(at), norms[1], _moe(at, cfg))


def _gdn(at) -> GDNParams:
    linear = lambda name: at(f"linear_attn.{name}.weight").T
    return GDNParams(
        in_proj_qkv=linear("in_proj_qkv"),
        in_proj_z=linear("in_proj_z"),
        in_proj_a=linear("in_proj_a"),
        in_proj_b=linear("in_proj_b"),
        conv1d=at("linear_attn.conv1d.weight")[:, 0].T,
        A_log=at("linear_attn.A_log"),
        dt_bias=at("linear_attn.dt_bias"),
        norm=at("linear_attn.norm.weight"),
        out_proj=linear("out_proj"),
    )


def _attention(at, cfg: ModelConfig) -> AttentionParams:
    a = cfg.attention
    heads = lambda name, n: at(f"self_attn.{name}.weight").T.reshape(cfg.hidden_size, n, -1)
    return AttentionParams(
        q_proj=heads("q_proj", a.num_heads),
        k_proj=heads("k_proj", a.num_kv_heads),
        v_proj=heads("v_proj", a.num_kv_heads),
        o_proj=at("self_attn.o_proj.weight").T.reshape(a.num_heads, a.head_dim, -1),
        q_norm=at("self_attn.q_norm.weight"),
        k_norm=at("self_attn.k_norm.weight"),
    )


def _moe(at, cfg: ModelConfig) -> MoEParams:
    linear = lambda name: at(f"mlp.{name}.weight").T
    each = range(cfg.moe.num_experts)
    gate_up = [
        np.concatenate([linear(f"experts.{e}.{n}_proj") for n in ("gate", "up")], axis=1)
        for e in each
    ]
    return MoEParams(
        gate=linear("gate"),
        experts=ExpertParams(
            np.stack(gate_up), np.stack([linear(f"experts.{e}.down_proj") for e in each])
        ),
        shared_expert=SharedExpertParams(
            *(linear(f"shared_expert.{n}_proj") for n in ("gate", "up", "down"))
        ),
        shared_expert_gate=linear("shared_expert_gate"),
    )
