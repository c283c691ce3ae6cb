"""Qwen3.6's text model, one token at a time, in float64 numpy: an oracle that shares no code.

`python tests/oracles/qwen36_numpy.py FOLDER` compares it with FOLDER/goldens.safetensors.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Arrays = dict[str, np.ndarray]
Config = dict[str, Any]
Carry = dict[str, Any]  # what a layer keeps between tokens


def forward(folder_tensors: Arrays, config: Config, ids: np.ndarray) -> Arrays:
    """Logits and inner tensors of one row of tokens.

    Args:
        folder_tensors: the HF folder's tensors by name, one per expert, without `language_model.`.
        config: the folder's config.json (the text model's fields at the top level).
        ids: token ids [tokens].

    Returns:
        The names of goldens.safetensors (README.md), each with a leading `tokens` axis where the
        goldens have [rows, tokens]; `layers.{i}.state` and `conv_state` are those after the last
        token. All float64.
    """
    weights = {name: tensor.astype(np.float64) for name, tensor in folder_tensors.items()}
    layers = [_under(weights, f"model.layers.{i}.") for i in range(config["num_hidden_layers"])]
    carries: list[Carry] = [{} for _ in layers]
    rows: dict[str, list[np.ndarray]] = {}

    for position, token in enumerate(ids):
        seen: Arrays = {}
        x = weights["model.embed_tokens.weight"][token]
        for i, (w, carry) in enumerate(zip(layers, carries, strict=True)):
            inner: Arrays = {"mixer_in": _centred_norm(x, w["input_layernorm.weight"], config)}
            if config["layer_types"][i] == "linear_attention":
                mixed = _delta(inner["mixer_in"], _under(w, "linear_attn."), config, carry, inner)
            else:
                mixed = _attend(inner["mixer_in"], _under(w, "self_attn."), config, carry, position)
            x = x + mixed
            inner["mixer_out"] = mixed
            inner["moe_in"] = _centred_norm(x, w["post_attention_layernorm.weight"], config)
            inner["moe_out"] = _moe(inner["moe_in"], _under(w, "mlp."), config, inner)
            x = x + inner["moe_out"]
            seen |= {f"layers.{i}.{name}": tensor for name, tensor in inner.items()}
            seen[f"hidden.{i}"] = x
        seen["final_norm"] = _centred_norm(x, weights["model.norm.weight"], config)
        seen["logits"] = weights["lm_head.weight"] @ seen["final_norm"]
        for name, tensor in seen.items():
            rows.setdefault(name, []).append(tensor)

    trace = {name: np.stack(tensors) for name, tensors in rows.items()}
    for i, carry in enumerate(carries):
        trace |= {f"layers.{i}.{n}": t for n, t in carry.items() if n in ("state", "conv_state")}
    return trace


def rope(position: int, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of one position, each [rotated channels], the two halves equal."""
    p = config["rope_parameters"]
    rotary = int(config["head_dim"] * p["partial_rotary_factor"])
    angle = position * p["rope_theta"] ** (-np.arange(0, rotary, 2) / rotary)
    return np.tile(np.cos(angle), 2), np.tile(np.sin(angle), 2)


def _delta(x: np.ndarray, w: Arrays, config: Config, carry: Carry, seen: Arrays):
    """Gated DeltaNet; `carry` holds conv_state [channels, K] and state [value heads, k, v]."""
    nk, nv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dk, dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
    taps = w["conv1d.weight"][:, 0]
    window = carry.get("conv_state", np.zeros_like(taps))
    window = np.concatenate([window[:, 1:], (w["in_proj_qkv.weight"] @ x)[:, None]], axis=1)
    q, k, v = np.split(_silu((window * taps).sum(axis=1)), [nk * dk, 2 * nk * dk])
    q, k, v = _l2(q.reshape(nk, dk)), _l2(k.reshape(nk, dk)), v.reshape(nv, dv)
    beta = _sigmoid(w["in_proj_b.weight"] @ x)
    g = -np.exp(w["A_log"]) * np.logaddexp(0, w["in_proj_a.weight"] @ x + w["dt_bias"])

    state = carry.get("state", np.zeros((nv, dk, dv))).copy()
    o = np.empty((nv, dv))
    for h in range(nv):
        q_h, k_h = q[h // (nv // nk)] / np.sqrt(dk), k[h // (nv // nk)]
        state[h] *= np.exp(g[h])
        state[h] += np.outer(k_h, beta[h] * (v[h] - state[h].T @ k_h))
        o[h] = state[h].T @ q_h
    carry |= {"conv_state": window, "state": state}
    seen |= {"q": q, "k": k, "v": v, "beta": beta, "g": g, "o": o}

    normed = w["norm.weight"] * _rms(o, config)
    return w["out_proj.weight"] @ (normed.ravel() * _silu(w["in_proj_z.weight"] @ x))


def _attend(x: np.ndarray, w: Arrays, config: Config, carry: Carry, position: int):
    """Gated attention; `carry` lists keys (normed, rotated) and values, [kv heads, dim] a token."""
    heads, kv, dim = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    q, gate = np.split((w["q_proj.weight"] @ x).reshape(heads, 2 * dim), 2, axis=1)
    k, v = ((w[n] @ x).reshape(kv, dim) for n in ("k_proj.weight", "v_proj.weight"))
    q = _rotate(_centred_norm(q, w["q_norm.weight"], config), position, config)
    k = _rotate(_centred_norm(k, w["k_norm.weight"], config), position, config)
    carry.setdefault("keys", []).append(k)
    carry.setdefault("values", []).append(v)
    keys, values = np.stack(carry["keys"]), np.stack(carry["values"])

    out = np.empty((heads, dim))
    for h in range(heads):
        group = h // (heads // kv)
        out[h] = _softmax(keys[:, group] @ q[h] / np.sqrt(dim)) @ values[:, group]
    return w["o_proj.weight"] @ (out * _sigmoid(gate)).ravel()


def _rotate(x: np.ndarray, position: int, config: Config) -> np.ndarray:
    cos, sin = rope(position, config)
    turned, kept = x[:, : cos.size], x[:, cos.size :]
    first, second = np.split(turned, 2, axis=1)
    return np.hstack([turned * cos + np.hstack([-second, first]) * sin, kept])


def _moe(x: np.ndarray, w: Arrays, config: Config, seen: Arrays) -> np.ndarray:
    logits = w["gate.weight"] @ x
    seen["router_logits"] = logits
    probabilities = _softmax(logits)
    chosen = np.argsort(-probabilities, kind="stable")[: config["num_experts_per_tok"]]
    total = probabilities[chosen].sum()
    out = _sigmoid(w["shared_expert_gate.weight"] @ x) * _expert(x, _under(w, "shared_expert."))
    for e in chosen:
        out = out + probabilities[e] / total * _expert(x, _under(w, f"experts.{e}."))
    return out


def _expert(x: np.ndarray, w: Arrays) -> np.ndarray:
    up = w["up_proj.weight"] @ x
    return w["down_proj.weight"] @ (_silu(w["gate_proj.weight"] @ x) * up)


def _under(tensors: Arrays, prefix: str) -> Arrays:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _rms(x: np.ndarray, config: Config) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"])


def _centred_norm(x: np.ndarray, weight: np.ndarray, config: Config) -> np.ndarray:
    return _rms(x, config) * (1 + weight)


def _l2(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def main() -> None:
    """Prints how far each golden tensor is from ours."""
    folder = Path(sys.argv[1])
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    goldens = load_file(folder / "goldens.safetensors")
    rows = [forward(weights, config, ids) for ids in goldens["ids"]]
    traced = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    ropes = [rope(int(position), config) for position in goldens["rope.positions"]]
    traced["rope.cos"], traced["rope.sin"] = (np.stack(part) for part in zip(*ropes, strict=True))
    for name, ours in traced.items():
        assert ours.shape == goldens[name].shape, f"{name}: {ours.shape}, {goldens[name].shape}"
        gap = ours - goldens[name]
        share = np.sqrt(np.mean(gap**2) / np.mean(ours**2))
        print(f"{name:24} largest {np.abs(gap).max():.2e}  relative rms {share:.2e}")


if __name__ == "__main__":
    main()
