"""config.json both ways: the published one, the goldens' one, and ones that are bent."""

import json
from typing import Any

import pytest

from clover_jax import presets
from clover_jax.checkpoint import config_from_hf, config_to_hf
from clover_jax.checkpoint.config_map import read_config
from clover_jax.config import BDGDNConfig, CoresetConfig
from clover_jax.errors import CloverError
from tests.checkpoint.folders import GOLDEN, clover_small, qwen_small

# The text settings of Qwen3.6-35B-A3B, from its published config.json.
PUBLISHED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 248044,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}
ROOT = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": PUBLISHED,
    "tie_word_embeddings": False,
    "transformers_version": "5.2.0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "model_type": "qwen3_5_moe"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
REQUIRED = [
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("rms_norm_eps", "max_position_embeddings", "dtype"),
]


def published(**changes: Any) -> dict[str, Any]:
    return {**PUBLISHED, **changes}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in keys}


def error(config: object) -> str:
    with pytest.raises(CloverError) as caught:
        config_from_hf(config)
    return str(caught.value)


def test_published_config_is_the_preset():
    for config in (ROOT, PUBLISHED, published(model_type="qwen3_5_moe")):
        reading = read_config(config)
        assert reading.config == presets.qwen36_35b_a3b()
        assert reading.unknown_keys == ()


def test_golden_config():
    cfg = config_from_hf(json.loads((GOLDEN / "config.json").read_text()))
    assert (cfg.vocab_size, cfg.hidden_size, cfg.num_layers, cfg.dtype) == (104, 40, 8, "float32")
    assert (cfg.attention.head_dim, cfg.attention.rotary_dim) == (16, 8)
    assert cfg.attention.rope_theta == 1e4
    assert (cfg.delta.key_head_dim, cfg.delta.value_head_dim) == (16, 8)
    assert (cfg.moe.num_experts, cfg.moe.top_k, cfg.moe.norm_topk_prob) == (8, 2, True)
    assert cfg.bd_gdn is None and cfg.moe.coreset is None


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_come_back(name: str):
    cfg = presets.PRESETS[name]()
    assert config_from_hf(json.loads(json.dumps(config_to_hf(cfg)))) == cfg


def test_every_switch_comes_back():
    switches = BDGDNConfig(
        operator="added", logit_scale="exp", history_logit="read_norm", right_conv=False
    )
    for cfg in (
        clover_small(bd_gdn=switches, block_length=5, logits_position="shifted"),
        clover_small(**{"moe.coreset": None, "moe.norm_topk_prob": False, "delta.chunk": 3}),
        clover_small(**{"moe.coreset": CoresetConfig(top_p=1.0, mass="softmax", pool="max")}),
        clover_small(**{"moe.experts_per_layer": (4, 2, 3, 4, 4, 2)}),
        clover_small(dtype="bfloat16", tie_word_embeddings=True, initializer_range=0.1),
        clover_small(**{"attention.head_dim": 6, "attention.rotary_dim": 2}),  # a third
        qwen_small(mask_token_id=7, block_length=4),
    ):
        assert config_from_hf(json.loads(json.dumps(config_to_hf(cfg)))) == cfg


def test_exported_config_is_what_transformers_reads():
    config = config_to_hf(presets.qwen36_35b_a3b())
    for key in without(PUBLISHED, *config_free_keys()):
        assert config[key] == (PUBLISHED[key] if key != "rope_parameters" else config[key]), key
    assert config["rope_parameters"] == PUBLISHED["rope_parameters"]
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]


def config_free_keys() -> list[str]:
    """What `ModelConfig` does not hold, or holds elsewhere."""
    return [
        *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "output_router_logits"),
        *("router_aux_loss_coef", "partial_rotary_factor"),
    ]


def test_older_spellings():
    flat = without(PUBLISHED, "rope_parameters", "dtype", "layer_types")
    cfg = config_from_hf({**flat, "rope_theta": 1e7, "torch_dtype": "bfloat16"})
    assert cfg == presets.qwen36_35b_a3b()
    assert config_from_hf(without(PUBLISHED, "full_attention_interval")) == cfg


def test_root_stands_in_for_text_config():
    text = without(PUBLISHED, "dtype", "tie_word_embeddings")
    root = {**ROOT, "text_config": text, "torch_dtype": "float32", "tie_word_embeddings": True}
    cfg = config_from_hf(root)
    assert cfg.dtype == "float32" and cfg.tie_word_embeddings
    text = {**text, "tie_word_embeddings": False}
    assert "tie_word_embeddings" in error({**root, "text_config": text})


def test_dtype_can_be_asked_for():
    half = published(dtype="float16")
    assert "float16" in error(half)
    assert config_from_hf(half, "float32").dtype == "float32"
    assert config_from_hf(without(PUBLISHED, "dtype"), "bfloat16").dtype == "bfloat16"


def test_unknown_keys_are_named_at_their_level():
    text = published(
        new_switch=1, rope_parameters={**PUBLISHED["rope_parameters"], "rope_extra": 2}
    )
    reading = read_config({**ROOT, "text_config": text, "aligner_config": {}})
    assert reading.config == presets.qwen36_35b_a3b()
    assert set(reading.unknown_keys) == {
        *("text_config.new_switch", "aligner_config", "text_config.rope_parameters.rope_extra")
    }


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str):
    assert key in error(without(PUBLISHED, key))
    assert key in error(published(**{key: None}))


def test_all_missing_keys_are_named_at_once():
    message = error({"model_type": "qwen3_5_moe_text"})
    for key in (*REQUIRED, "rope_theta", "partial_rotary_factor", "full_attention_interval"):
        assert key in message, key


NUMBERS = [k for k in REQUIRED if k not in ("dtype",)]
BAD_NUMBERS = ["4", [4], {"a": 4}, True, 0, -1, 2**63, 10**400, float("nan"), float("inf"), ""]


@pytest.mark.parametrize("key", NUMBERS)
def test_bad_numbers(key: str):
    for value in BAD_NUMBERS:
        assert key in error(published(**{key: value})), value
    if key != "rms_norm_eps":
        assert key in error(published(**{key: 1.5}))
        assert key in error(published(**{key: 4.0}))


BAD_ROPE = [
    {"rope_type": "yarn"},
    {"rope_type": 3},
    {"rope_theta": "1e7"},
    {"rope_theta": 0},
    {"rope_theta": -1.0},
    {"rope_theta": 10**400},
    {"rope_theta": float("nan")},
    {"partial_rotary_factor": 0},
    {"partial_rotary_factor": 2},
    {"partial_rotary_factor": 0.3},
    {"partial_rotary_factor": []},
    {"partial_rotary_factor": 1 / 256},
]


@pytest.mark.parametrize("change", BAD_ROPE, ids=str)
def test_bad_rope(change: dict[str, Any]):
    rope = {**PUBLISHED["rope_parameters"], **change}
    assert error(published(rope_parameters=rope))


UNSUPPORTED = [
    {"attention_bias": True},
    {"attention_bias": "false"},
    {"attention_bias": 0},
    {"hidden_act": "gelu"},
    {"attn_output_gate": False},
    {"num_shared_experts": 2},
    {"quantization_config": {"quant_method": "fp8"}},
    {"rope_scaling": {"type": "yarn", "factor": 4}},
    {"layer_types": ["full_attention"] * 40},
    {"layer_types": ["linear_attention"] * 40},
    {"layer_types": PUBLISHED["layer_types"][:39]},
    {"layer_types": [*PUBLISHED["layer_types"][1:], "linear_attention"]},
    {"layer_types": "linear_attention"},
    {"layer_types": [["linear_attention"]] * 40},
    {"layer_types": 4},
    {"full_attention_interval": 5},
    {"full_attention_interval": 1},
    {"full_attention_interval": 8},
    {"norm_topk_prob": 1},
    {"tie_word_embeddings": "no"},
    {"initializer_range": -0.02},
    {"initializer_range": "x"},
    {"dtype": "float16"},
    {"dtype": 16},
    {"dtype": ["bfloat16"]},
    {"model_type": "qwen3_next"},
    {"model_type": None},
    {"model_type": 5},
    {"model_type": []},
    {"num_experts_per_layer": [256] * 39},
    {"num_experts_per_layer": [256] * 39 + [257]},
    {"num_experts_per_layer": [256] * 39 + [7]},
    {"num_experts_per_layer": [256] * 39 + [True]},
    {"num_experts_per_layer": 256},
    {"num_experts_per_layer": {}},
    {"num_experts_per_tok": 257},
    {"num_hidden_layers": 39},
    {"num_hidden_layers": 2**30},
    {"num_key_value_heads": 3},
    {"linear_num_key_heads": 5},
    {"linear_conv_kernel_dim": 1},
    {"mask_token_id": "x"},
    {"mask_token_id": -1},
    {"mask_token_id": 248320},
    {"rope_parameters": []},
    {"rope_parameters": "default"},
    {"partial_rotary_factor": 0.5},
    {"clover": []},
    {"clover": {"bd_gdn": {}}},
]


@pytest.mark.parametrize("change", UNSUPPORTED, ids=lambda c: f"{c}"[:60])
def test_unsupported_values_are_named(change: dict[str, Any]):
    message = error(published(**change))
    # Rules between several values are `ModelConfig`'s, under its names.
    names = {"num_experts_per_tok": "moe.top_k", "num_key_value_heads": "num_kv_heads"}
    names |= {"linear_num_key_heads": "num_key_heads"}
    names |= {"num_experts_per_layer": "moe.experts_per_layer"}
    assert any(key in message or names.get(key, key) in message for key in change), message


def test_all_wrong_values_are_named_at_once():
    message = error(published(hidden_size="x", attention_bias=True, rms_norm_eps=-1, num_experts=0))
    for key in ("hidden_size", "attention_bias", "rms_norm_eps", "num_experts"):
        assert key in message


@pytest.mark.parametrize("root", [None, [], "config", 3, True, {}, {"text_config": []}], ids=str)
def test_not_a_config(root: object):
    assert error(root)


def clover_json(**clover: Any) -> dict[str, Any]:
    return published(model_type="clover_moe", max_position_embeddings=131072, clover=clover)


def test_clover_without_settings_has_the_preset_ones():
    config = without(clover_json(), "clover")
    assert config_from_hf(config) == presets.clover_35b_a3b()
    assert config_from_hf({**config, "mask_token_id": 9}).mask_token_id == 9
    assert "mask_token_id" in error({**config, "vocab_size": 1000})
    nested = {**ROOT, "model_type": "clover_moe", "text_config": config}
    assert config_from_hf(nested) == presets.clover_35b_a3b()


def test_clover_settings():
    cfg = config_from_hf(
        clover_json(
            block_length=16,
            mask_token_id=7,
            chunk=8,
            logits_position="shifted",
            coreset={"top_p": 1, "pool": "max"},
            bd_gdn={"operator": "no_history"},
        )
    )
    assert (cfg.block_length, cfg.mask_token_id, cfg.delta.chunk) == (16, 7, 8)
    assert cfg.logits_position == "shifted"
    assert cfg.moe.coreset == CoresetConfig(top_p=1.0, pool="max")
    assert cfg.bd_gdn == BDGDNConfig(operator="no_history")
    assert config_from_hf(clover_json(coreset=None)).moe.coreset is None


BAD_CLOVER = [
    {"block_length": 0},
    {"block_length": "32"},
    {"block_length": 1e3},
    {"chunk": -4},
    {"chunk": [64]},
    {"mask_token_id": 248320},
    {"mask_token_id": -1},
    {"mask_token_id": "<|mask|>"},
    {"logits_position": "other"},
    {"logits_position": 0},
    {"coreset": 0.9},
    {"coreset": {}},
    {"coreset": {"top_p": 0}},
    {"coreset": {"top_p": 1.1}},
    {"coreset": {"top_p": float("nan")}},
    {"coreset": {"top_p": "0.9"}},
    {"coreset": {"top_p": 0.9, "mass": "all"}},
    {"coreset": {"top_p": 0.9, "size": 3}},
    {"bd_gdn": "state_slot"},
    {"bd_gdn": {"operator": "unheard"}},
    {"bd_gdn": {"right_conv": 1}},
    {"bd_gdn": {"rihgt_conv": True}},
    {"bd_gdn": {"logit_scale": None}},
    {"blocklength": 32},
]


@pytest.mark.parametrize("change", BAD_CLOVER, ids=str)
def test_bad_clover_settings(change: dict[str, Any]):
    message = error(clover_json(**change))
    assert next(iter(change)) in message


def test_two_mask_ids():
    assert "mask_token_id" in error({**clover_json(mask_token_id=7), "mask_token_id": 8})
