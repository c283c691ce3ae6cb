"""Writes the tiny Qwen3.6 checkpoint and the tensors its forward pass must give.

Runs under Python 3.11 in an environment of its own (README.md beside this file), and imports
nothing of this repository but the oracle that traces transformers. Everything is fp32, seeded and
single-path, so that a second run on the same machine writes the same bytes.

    python tests/oracles/qwen36_golden.py tests/goldens/qwen36_tiny
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import safetensors
import torch
import transformers
from safetensors.torch import save_file
from transformers import DynamicCache, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

sys.path.insert(0, str(Path(__file__).parents[2] / "clover_jax" / "verify" / "oracles"))
from hf_trace import load, whole_pass

SEED = 0
TOKEN_SEED = 4  # the first one whose tokens keep the routing margin below
ROWS, LENGTH, PREFILL = 2, 70, 43  # 70: one chunk of 64 and a rest; 43: inside a chunk
ROPE_POSITIONS = [0, 1, 4095, 5000, 8000]
MIN_ROUTING_MARGIN = 1e-3  # router logit k minus logit k+1, so that rounding changes no expert


def tiny_config() -> Qwen3_5MoeTextConfig:
    """Two groups of layers; heads x head_dim is not hidden_size, and key heads are the wider."""
    return Qwen3_5MoeTextConfig(
        vocab_size=104,
        hidden_size=40,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        full_attention_interval=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_output_gate=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        mamba_ssm_dtype="float32",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        dtype="float32",
    )


# (end of the parameter's name, mean, standard deviation); the first that fits counts. What enters
# the residual stream is small, so that a norm's epsilon shows in the goldens, and what a layer adds
# is smaller, so that rounding does not grow from layer to layer.
NORMAL = [
    ("linear_attn.norm.weight", 1.0, 0.3),
    ("norm.weight", 0.0, 0.3),  # all other norms multiply by 1 + weight
    ("A_log", -1.5, 1.2),  # from heads that forget in a token to heads that hold all of them
    ("dt_bias", 0.0, 1.0),
    ("conv1d.weight", 0.4, 0.4),
    ("embed_tokens.weight", 0.0, 0.12),
    ("out_proj.weight", 0.0, 0.01),
    ("o_proj.weight", 0.0, 0.02),
    ("shared_expert.down_proj.weight", 0.0, 0.01),
    ("experts.down_proj", 0.0, 0.01),
    ("lm_head.weight", 0.0, 0.2),
    ("mlp.gate.weight", 0.0, 0.4),  # the router: peaked
    ("shared_expert_gate.weight", 0.0, 0.3),
    ("in_proj_a.weight", 0.0, 0.2),
    ("in_proj_b.weight", 0.0, 0.3),
    ("q_proj.weight", 0.0, 0.25),  # half of it is the gate
    ("", 0.0, 0.15),
]


@torch.no_grad()
def randomise(model: Qwen3_5MoeForCausalLM) -> None:
    """Draws every weight away from its neutral value: leaving one out changes the output."""
    generator = torch.Generator().manual_seed(SEED)
    for name, weight in sorted(model.named_parameters()):
        mean, std = next((m, s) for end, m, s in NORMAL if name.endswith(end))
        weight.copy_(mean + std * torch.randn(weight.shape, generator=generator))
    for layer in model.model.layers:
        # One head with tiny q and k: the epsilon inside l2norm, q_norm and k_norm counts there.
        if layer.block_type == "linear_attention":
            d, width = layer.linear_attn.head_k_dim, layer.linear_attn.key_dim
            queries, keys = layer.linear_attn.in_proj_qkv.weight[: 2 * width].split(width)
            keys.copy_(0.5 * keys + 0.8 * queries)  # alike: what is read never cancels to noise
            queries[:d] *= 0.03
            keys[:d] *= 0.03
        else:
            d = layer.self_attn.head_dim
            layer.self_attn.q_proj.weight[:d] *= 0.03
            layer.self_attn.k_proj.weight[:d] *= 0.05


def continued_pass(model: Qwen3_5MoeForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a prefill and then one token at a time, from the prefill's last position on."""
    cache = DynamicCache(config=model.config)
    logits = [model(ids[:, :PREFILL], cache=cache, use_cache=True).logits[:, -1:]]
    for t in range(PREFILL, LENGTH):
        logits.append(model(ids[:, t : t + 1], cache=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


def rope_tensors(model: Qwen3_5MoeForCausalLM) -> dict[str, torch.Tensor]:
    """cos, sin and a rotated query at far positions."""
    config = model.config
    generator = torch.Generator().manual_seed(SEED)
    shape = (1, len(ROPE_POSITIONS), config.num_attention_heads, config.head_dim)
    query = torch.randn(shape, generator=generator)
    positions = torch.tensor([ROPE_POSITIONS])
    cos, sin = model.model.rotary_emb(query, positions[None])
    rotated, _ = modeling.apply_rotary_pos_emb(query, query, cos, sin, unsqueeze_dim=2)
    named = {"positions": positions.int(), "cos": cos, "sin": sin, "q": query, "q_rotated": rotated}
    return {f"rope.{name}": tensor[0] for name, tensor in named.items()}


def check(trace: dict[str, torch.Tensor], config: Qwen3_5MoeTextConfig) -> None:
    """Stops on goldens that would mislead: flat logits, dead experts, near-ties, a wrong cache."""
    k = config.num_experts_per_tok
    margins = []
    for i in range(config.num_hidden_layers):
        top = trace[f"layers.{i}.router_logits"].sort(dim=-1, descending=True)
        used = top.indices[..., :k].unique().numel()
        assert used == config.num_experts, f"layer {i}: only {used} experts are used"
        margins.append((top.values[..., k - 1] - top.values[..., k]).min().item())
        names = (f"hidden.{i}", f"layers.{i}.mixer_out", f"layers.{i}.moe_out")
        rms = ", ".join(f"{trace[name].square().mean().sqrt():.3f}" for name in names)
        print(f"layer {i}: rms of hidden, mixer, moe {rms}; routing margin {margins[-1]:.4f}")
    assert min(margins) > MIN_ROUTING_MARGIN, f"routing margin {min(margins)}: change TOKEN_SEED"
    std = trace["logits"].std().item()
    gap = (trace["continued.logits"] - trace["logits"][:, PREFILL - 1 :]).abs().max().item()
    print(f"logits: std {std:.3f}, peak {trace['logits'].abs().max():.2f}, continued gap {gap:.2e}")
    assert 1 < std < 5, f"logits std {std}"
    assert gap <= 1e-5, f"one token at a time differs from the whole pass by {gap}"
    for name, tensor in trace.items():
        assert tensor.isfinite().all(), f"{name} is not finite"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)

    built = Qwen3_5MoeForCausalLM(tiny_config())
    randomise(built)
    built.save_pretrained(out)

    # From here on the files speak: what is recorded is what they hold.
    model = load(out, torch.float32)
    generator = torch.Generator().manual_seed(TOKEN_SEED)
    ids = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH), generator=generator)
    goldens = {"ids": ids.int(), "continued.logits": continued_pass(model, ids)}
    goldens |= {**rope_tensors(model), **whole_pass(model, ids, taps=True)}
    del goldens["embed"]  # rows of the weights
    check(goldens, model.config)

    versions = {
        "script": Path(__file__).name,
        "weight_seed": SEED,
        "token_seed": TOKEN_SEED,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in goldens.items()},
        out / "goldens.safetensors",
        metadata={"versions": json.dumps(versions)},  # one key: several are written in any order
    )
    for file in out.glob("*.safetensors"):
        file.chmod(0o644)  # the writer leaves them private
    (out / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
    for path in sorted(out.iterdir()):
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
