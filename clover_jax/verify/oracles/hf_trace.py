"""What transformers' Qwen3_5Moe computes for some tokens: logits and every layer's inner tensors.

Runs alone, under Python 3.11 in an environment of its own (README.md beside this file), imports
nothing of this project, and talks by safetensors:

    python hf_trace.py FOLDER REQUEST OUT [--dtype float32|bfloat16] [--continuation N]
                                          [--positions-from N] [--no-taps]

REQUEST holds `ids` [rows, time]. OUT holds, in the oracle's own dtype (i a layer, l a GDN layer):

    ids, logits [rows, time - positions_from, vocab], final_norm
    embed, hidden.{i}, layers.{i}.{mixer_in,mixer_out,moe_in,moe_out} [rows, time, width]
    layers.{i}.router_logits [rows, time, experts]
    layers.{l}.{q,k,v,o} [rows, time, heads, channels], q and k normalised, q not yet scaled
    layers.{l}.{beta,g} [rows, time, value heads]; layers.{l}.state [rows, value heads, key, value]
    layers.{l}.conv_state [rows, channels, K], the last pre-conv rows, newest last
    continuation, continuation.margin [rows, n]: greedy, one token at a time through the cache
"""

import argparse
import json
import platform
from pathlib import Path

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

CLOVER_SUFFIXES = (
    "conv_right_weight",
    "bd_softmax_logit_scale",
    "bd_softmax_history_bias",
    "bd_softmax_history_c",
)
OTHER_PARTS = ("mtp.", "model.visual.")


def text_config(folder: Path) -> dict:
    """The text settings of config.json."""
    fields = json.loads((folder / "config.json").read_text())
    return fields.get("text_config", fields)


def load(folder: Path, dtype: torch.dtype, experts: str = "eager") -> Qwen3_5MoeForCausalLM:
    """The causal model of a Qwen3.6 or Clover folder; Clover's own tensors are left out."""
    fields = text_config(folder)
    drop = ("architectures", "model_type", "clover", "num_shared_experts", "norm_topk_prob")
    assert fields.get("norm_topk_prob", True), "transformers always renormalises"
    config = Qwen3_5MoeTextConfig(**{k: v for k, v in fields.items() if k not in drop})
    model, info = Qwen3_5MoeForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation=experts,
        output_loading_info=True,
    )
    unexpected = [
        name
        for name in info.pop("unexpected_keys")
        if not (name.endswith(CLOVER_SUFFIXES) or name.startswith(OTHER_PARTS))
    ]
    assert not unexpected, f"not loaded: {unexpected}"
    assert not any(info.values()), info
    _restore_decays(model, folder)
    return model.eval()


def _restore_decays(model: Qwen3_5MoeForCausalLM, folder: Path) -> None:
    """A_log and dt_bias as the files hold them, in float32.

    Loading in bfloat16 rounds those that are float32 on disk, and dt_bias nearly cancels with what
    it is added to: g then differs by what the loader did, not by what a framework computes.
    """
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                path, _, leaf = name.rpartition(".")
                if leaf in ("A_log", "dt_bias") and not name.startswith(OTHER_PARTS):
                    path = path.removeprefix("model.").removeprefix("language_model.")
                    value = torch.nn.Parameter(tensors.get_tensor(name).float())
                    setattr(model.model.get_submodule(path), leaf, value)


def whole_pass(model: Qwen3_5MoeForCausalLM, ids: torch.Tensor, taps: bool) -> dict:
    """One pass over all tokens."""
    trace: dict[str, torch.Tensor] = {}
    hooks = _record(model, trace, ids.shape) if taps else []
    linear_layers = [i for i, kind in enumerate(model.config.layer_types) if "linear" in kind]
    order = iter(linear_layers)
    chunked = modeling.torch_chunk_gated_delta_rule

    def chunked_and_kept(query, key, value, g, beta, **kwargs):
        o, state = chunked(query, key, value, g=g, beta=beta, **kwargs)
        at = f"layers.{next(order)}."
        kept = {"q": modeling.l2norm(query), "k": modeling.l2norm(key), "v": value}
        kept |= {"beta": beta, "g": g, "o": o}
        trace.update({at + name: tensor for name, tensor in kept.items()})
        return o, state

    cache = DynamicCache(config=model.config)
    if taps:
        modeling.torch_chunk_gated_delta_rule = chunked_and_kept
    try:
        trace["logits"] = model(ids, cache=cache, use_cache=True).logits
    finally:
        modeling.torch_chunk_gated_delta_rule = chunked
        for hook in hooks:
            hook.remove()
    if taps:
        for i in linear_layers:
            trace[f"layers.{i}.state"] = cache.get_recurrent_state(i, state_idx=0)
            trace[f"layers.{i}.conv_state"] = cache.get_conv_state(i, state_idx=0)
    return trace


def _record(model: Qwen3_5MoeForCausalLM, trace: dict, shape: torch.Size) -> list:
    """Hooks that write each layer's inner tensors into `trace`."""

    def keep(name: str, routed: bool = False):
        def hook(_module, _args, output):
            tensor = output[0] if isinstance(output, tuple) else output
            trace[name] = tensor.reshape(*shape, -1) if routed else tensor

        return hook

    def keep_input(name: str):
        def hook(_module, args, kwargs):
            trace[name] = args[0] if args else kwargs["hidden_states"]

        return hook

    hooks = [
        model.model.embed_tokens.register_forward_hook(keep("embed")),
        model.model.norm.register_forward_hook(keep("final_norm")),
    ]
    for i, layer in enumerate(model.model.layers):
        mixer = layer.linear_attn if layer.block_type == "linear_attention" else layer.self_attn
        at = f"layers.{i}."
        hooks += [
            mixer.register_forward_pre_hook(keep_input(at + "mixer_in"), with_kwargs=True),
            mixer.register_forward_hook(keep(at + "mixer_out")),
            layer.mlp.register_forward_pre_hook(keep_input(at + "moe_in"), with_kwargs=True),
            layer.mlp.register_forward_hook(keep(at + "moe_out")),
            layer.mlp.gate.register_forward_hook(keep(at + "router_logits", routed=True)),
            layer.register_forward_hook(keep(f"hidden.{i}")),
        ]
    return hooks


def continuation(model: Qwen3_5MoeForCausalLM, ids: torch.Tensor, n: int) -> dict:
    """n greedy tokens after the rows, one at a time through the cache, and their margins."""
    cache = DynamicCache(config=model.config)
    logits = model(ids, cache=cache, use_cache=True).logits[:, -1]
    tokens, margins = [], []
    for _ in range(n):
        best = logits.float().topk(2, dim=-1)
        tokens.append(best.indices[:, 0])
        margins.append(best.values[:, 0] - best.values[:, 1])
        logits = model(tokens[-1][:, None], cache=cache, use_cache=True).logits[:, -1]
    return {
        "continuation": torch.stack(tokens, dim=1).int(),
        "continuation.margin": torch.stack(margins, dim=1),
    }


def write(out: Path, tensors: dict, dtype: str, script: str) -> None:
    """Contiguous tensors and, as metadata, what computed them."""
    versions = {
        "oracle": Path(script).name,
        "dtype": dtype,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, out, metadata={"versions": json.dumps(versions)})


def arguments(description: str) -> argparse.ArgumentParser:
    """What every oracle is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("request", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser


@torch.no_grad()
def main() -> None:
    """Command line."""
    parser = arguments(__doc__)
    parser.add_argument("--continuation", type=int, default=0)
    parser.add_argument("--positions-from", type=int, default=0)
    parser.add_argument("--no-taps", action="store_true")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    model = load(args.folder, getattr(torch, args.dtype))
    ids = load_file(args.request)["ids"].long()
    tensors = {"ids": ids.int(), **whole_pass(model, ids, taps=not args.no_taps)}
    tensors["logits"] = tensors["logits"][:, args.positions_from :]
    if args.continuation:
        tensors |= continuation(model, ids, args.continuation)
    write(args.out, tensors, args.dtype, __file__)


if __name__ == "__main__":
    main()
