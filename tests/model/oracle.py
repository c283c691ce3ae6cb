"""The tiny Clover model in float64 numpy loops: prefix token by token, blocks pair by pair.

Written from the published formulas; imports nothing of what it judges. Weights come as our
parameter tree (only for its names and shapes), one row of the batch at a time.
"""

from typing import Any

import jax
import numpy as np

Array = np.ndarray


def layers_of(params: Any, cfg: Any) -> tuple[Any, list[Any]]:
    """The parameter tree in float64, and its layers in order."""
    tree = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    out = []
    for g in range(cfg.num_layers // cfg.full_attention_interval):
        for j in range(cfg.full_attention_interval - 1):
            out.append(jax.tree.map(lambda a, g=g, j=j: a[g, j], tree.layers.linear))
        out.append(jax.tree.map(lambda a, g=g: a[g], tree.layers.full))
    return tree, out


class Row:
    """One row's prefix. `extend` commits tokens, `preview` looks at a block and changes nothing."""

    def __init__(self, params: Any, cfg: Any, allowed: list[list[int]] | None = None):
        self.cfg = cfg
        self.params, self.layers = layers_of(params, cfg)
        self.allowed = allowed or [list(range(cfg.moe.num_experts)) for _ in self.layers]
        self.length = 0
        d = cfg.delta
        self.state = [np.zeros((d.num_value_heads, d.key_head_dim, d.value_head_dim))] * len(
            self.layers
        )
        self.ring = [np.zeros((d.conv_kernel - 1, d.conv_channels))] * len(self.layers)
        self.keys: list[list[Array]] = [[] for _ in self.layers]
        self.values: list[list[Array]] = [[] for _ in self.layers]
        self.margin = np.inf  # smallest gap of any expert or coreset choice so far

    def extend(self, tokens: Array) -> Array:
        """Logits of every token's successor [tokens, vocab]."""
        return np.stack([self._token(int(t)) for t in tokens])

    def _token(self, token: int) -> Array:
        cfg, x = self.cfg, self.params.embed_tokens[token]
        for i, p in enumerate(self.layers):
            h = centred_norm(x, p.input_layernorm, cfg)
            if hasattr(p, "linear_attn"):
                out, self.state[i], self.ring[i] = gdn_token(
                    p.linear_attn, h, self.state[i], self.ring[i], cfg
                )
            else:
                q, k, v, gate = qkv(p.self_attn, h, self.length, cfg)
                self.keys[i].append(k)
                self.values[i].append(v)
                mixed = attend(q, np.stack(self.keys[i]), np.stack(self.values[i]))
                out = np.einsum("hc,hcd->d", mixed * sigmoid(gate), p.self_attn.o_proj)
            x = x + out
            h = centred_norm(x, p.post_attention_layernorm, cfg)
            chosen = self._top(p.mlp.gate.T @ h, self.allowed[i])
            x = x + moe(p.mlp, h, chosen, self.allowed[i], cfg)
        self.length += 1
        return self._unembed(x)

    def preview(self, tokens: Array, masked: Array, n_valid: int) -> tuple[Array, list[set[int]]]:
        """Logits of the block's first n_valid rows, and each layer's experts that ran."""
        cfg, touched = self.cfg, []
        ids = [cfg.mask_token_id if m else t for t, m in zip(tokens, masked, strict=True)]
        x = self.params.embed_tokens[ids[:n_valid]]
        for i, p in enumerate(self.layers):
            h = np.stack([centred_norm(row, p.input_layernorm, cfg) for row in x])
            if hasattr(p, "linear_attn"):
                empty = self.length == 0
                out, _, _ = gdn_block(p.linear_attn, h, self.state[i], self.ring[i], empty, cfg)
            else:
                rows = [qkv(p.self_attn, r, self.length + t, cfg) for t, r in enumerate(h)]
                keys = np.stack([*self.keys[i], *(row[1] for row in rows)])
                values = np.stack([*self.values[i], *(row[2] for row in rows)])
                mixed = [attend(q, keys, values) * sigmoid(gate) for q, _, _, gate in rows]
                out = np.einsum("thc,hcd->td", np.stack(mixed), p.self_attn.o_proj)
            x = x + out
            h = np.stack([centred_norm(row, p.post_attention_layernorm, cfg) for row in x])
            logits = h @ p.mlp.gate
            inside = self.allowed[i]
            if cfg.moe.coreset is not None:
                inside, gap = coreset(logits, self.allowed[i], cfg)
                self.margin = min(self.margin, gap)
            chosen = [self._top(row, inside) for row in logits]
            x = x + np.stack(
                [moe(p.mlp, r, c, self.allowed[i], cfg) for r, c in zip(h, chosen, strict=True)]
            )
            touched.append({e for row in chosen for e in row})
        return np.stack([self._unembed(row) for row in x]), touched

    def _top(self, logits: Array, inside: list[int]) -> list[int]:
        ranked = sorted(inside, key=lambda e: (-logits[e], e))
        k = self.cfg.moe.top_k
        if len(ranked) > k:
            self.margin = min(self.margin, logits[ranked[k - 1]] - logits[ranked[k]])
        return ranked[:k]

    def _unembed(self, x: Array) -> Array:
        hidden = centred_norm(x, self.params.norm, self.cfg)
        head = self.params.lm_head
        return hidden @ (self.params.embed_tokens.T if head is None else head)


def gdn_token(p: Any, x: Array, state: Array, ring: Array, cfg: Any):
    """One token of the causal recurrence: output, state and ring after it."""
    window = np.concatenate([ring, (x @ p.in_proj_qkv)[None]])
    q, k, v = heads(silu((window * p.conv1d).sum(axis=0)), cfg)
    beta, g = write_strength(p, x), log_decay(p, x)
    o, state = delta_step(q / np.sqrt(cfg.delta.key_head_dim), k, v, g, beta, state)
    return gdn_output(p, o, x, cfg), state, window[1:]


def delta_step(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array):
    group, state, o = len(v) // len(k), state.copy(), np.empty(v.shape)
    for h in range(len(v)):
        state[h] *= np.exp(g[h])
        error = v[h] - state[h].T @ k[h // group]
        state[h] += np.outer(k[h // group], beta[h] * error)
        o[h] = state[h].T @ q[h // group]
    return o, state


def gdn_block(p: Any, x: Array, state: Array, ring: Array, empty: bool, cfg: Any):
    """The block operator: outputs [n, width], values before the gated norm, the slot's share."""
    s, n, taps = cfg.bd_gdn, len(x), cfg.delta.conv_kernel
    pre = x @ p.in_proj_qkv
    window = np.concatenate([ring, pre])
    q, k, v = [], [], []
    for t in range(n):
        c = sum(window[t + j] * p.conv1d[j] for j in range(taps))
        for d in range(1, taps):
            if s.right_conv and t + d < n:
                tap = d - 1 if s.right_order == "next_first" else taps - 1 - d
                c = c + pre[t + d] * p.conv_right_weight[tap]
        for got, new in zip((q, k, v), heads(silu(c), cfg), strict=True):
            got.append(new)
    beta = np.stack([write_strength(p, row) for row in x])
    g = np.stack([log_decay(p, row) for row in x])
    o, share = np.zeros((n, *v[0].shape)), np.zeros((n, len(v[0])))
    root = np.sqrt(cfg.delta.key_head_dim)

    if s.operator in ("causal", "two_direction"):
        forward = state
        for t in range(n):
            o[t], forward = delta_step(q[t] / root, k[t], v[t], g[t], beta[t], forward)
        backward = np.zeros_like(state)
        for t in reversed(range(n)):
            if s.operator == "two_direction":
                more, backward = delta_step(q[t] / root, k[t], v[t], g[t], beta[t], backward)
                o[t] += more
        return np.stack([gdn_output(p, o[t], x[t], cfg) for t in range(n)]), o, share

    c = np.cumsum(g, axis=0)
    for h in range(len(v[0])):
        kh = h // (len(v[0]) // len(k[0]))
        scale = p.bd_softmax_logit_scale[h]
        scale = {"plain": scale, "exp": np.exp(scale), "softplus": np.log1p(np.exp(scale))}[
            s.logit_scale
        ]
        for i in range(n):
            read = state[h].T @ (q[i][kh] if s.history_query == "unit" else q[i][kh] / root)
            score = np.log(n)
            if s.history_logit == "read_norm":
                score = np.log(1 + np.sqrt(read @ read))
            slot = p.bd_softmax_history_bias[h] + p.bd_softmax_history_c[h] * score
            logits = np.array([scale * (q[i][kh] @ k[j][kh]) for j in range(n)])
            values = np.array([v[j][h] for j in range(n)])
            if s.block_bias == "decay":
                logits += -np.abs(c[i, h] - c[:, h]) + np.log(beta[:, h])
                slot += c[i, h]
            if s.block_value == "beta":
                values = values * beta[:, h, None]
            dropped = empty and s.empty_history == "drop"
            if s.operator in ("no_history", "added") or dropped:
                slot = -np.inf
            w = softmax(np.array([slot, *logits]))
            o[i, h], share[i, h] = w[0] * read + w[1:] @ values, w[0]
            if s.operator == "added":
                o[i, h] = read + w[1:] @ values
    return np.stack([gdn_output(p, o[t], x[t], cfg) for t in range(n)]), o, share


def heads(mixed: Array, cfg: Any) -> tuple[Array, Array, Array]:
    d = cfg.delta
    width = d.num_key_heads * d.key_head_dim
    q, k, v = np.split(mixed, [width, 2 * width])
    unit = lambda a: a / np.sqrt((a * a).sum(axis=-1, keepdims=True) + 1e-6)
    q, k = (unit(a.reshape(d.num_key_heads, -1)) for a in (q, k))
    return q, k, v.reshape(d.num_value_heads, -1)


def write_strength(p: Any, x: Array) -> Array:
    return sigmoid(x @ p.in_proj_b)


def log_decay(p: Any, x: Array) -> Array:
    return -np.exp(p.A_log) * np.logaddexp(0, x @ p.in_proj_a + p.dt_bias)


def gdn_output(p: Any, o: Array, x: Array, cfg: Any) -> Array:
    normed = rms(o, cfg) * p.norm
    return (normed.ravel() * silu(x @ p.in_proj_z)) @ p.out_proj


def qkv(p: Any, x: Array, position: int, cfg: Any):
    """Rotated q [heads, c] and k [kv heads, c], plain v, and the gate."""
    dim = cfg.attention.head_dim
    both = np.einsum("d,dhc->hc", x, p.q_proj)
    q, gate = both[:, :dim], both[:, dim:]
    k, v = (np.einsum("d,dhc->hc", x, w) for w in (p.k_proj, p.v_proj))
    q, k = centred_norm(q, p.q_norm, cfg), centred_norm(k, p.k_norm, cfg)
    return rotate(q, position, cfg), rotate(k, position, cfg), v, gate


def rotate(x: Array, position: int, cfg: Any) -> Array:
    half = cfg.attention.rotary_dim // 2
    out = x.copy()
    for j in range(half):
        # The base's angles are float32: at position 8,191 some 1e-4 away from exact ones.
        frequency = cfg.attention.rope_theta ** (-2 * j / cfg.attention.rotary_dim)
        angle = float(np.float32(position) * np.float32(frequency))
        a, b = x[:, j], x[:, j + half]
        out[:, j] = a * np.cos(angle) - b * np.sin(angle)
        out[:, j + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def attend(q: Array, keys: Array, values: Array) -> Array:
    group = len(q) // keys.shape[1]
    out = np.empty((len(q), values.shape[-1]))
    for h in range(len(q)):
        w = softmax(keys[:, h // group] @ q[h] / np.sqrt(q.shape[-1]))
        out[h] = w @ values[:, h // group]
    return out


def probabilities(logits: Array, allowed: list[int]) -> Array:
    """Router softmax over the experts that exist; 0 for the others."""
    out = np.zeros(len(logits))
    out[allowed] = softmax(logits[allowed])
    return out


def moe(p: Any, x: Array, chosen: list[int], allowed: list[int], cfg: Any) -> Array:
    weight = probabilities(x @ p.gate, allowed)[chosen]
    if cfg.moe.norm_topk_prob:
        weight = weight / weight.sum()
    s = p.shared_expert
    shared = (silu(x @ s.gate_proj) * (x @ s.up_proj)) @ s.down_proj
    out = sigmoid(x @ p.shared_expert_gate) * shared
    for e, w in zip(chosen, weight, strict=True):
        gate, up = np.split(x @ p.experts.gate_up_proj[e], 2)
        out = out + w * ((silu(gate) * up) @ p.experts.down_proj[e])
    return out


def coreset(logits: Array, allowed: list[int], cfg: Any) -> tuple[list[int], float]:
    """A block's shared experts [positions, experts] -> ids, and how clear-cut their choice was."""
    k, c = cfg.moe.top_k, cfg.moe.coreset
    rows = []
    for row in logits:
        probs = probabilities(row, allowed)
        top = sorted(allowed, key=lambda e: (-row[e], e))[:k]
        keep = allowed if c.mass == "softmax" else top
        rows.append([probs[e] if e in keep else 0.0 for e in range(len(row))])
    pooled = np.sum(rows, axis=0) if c.pool == "sum" else np.max(rows, axis=0)
    ranked = sorted(range(len(pooled)), key=lambda e: (-pooled[e], e))
    members, reached, gap = [], 0.0, np.inf
    for n, e in enumerate(ranked):
        if n >= k and (reached >= c.top_p or pooled[e] == 0):
            gap = min(gap, pooled[members[-1]] - pooled[e])  # the next one nearly came in
            break
        members.append(e)
        reached += pooled[e] / pooled.sum()
        gap = min(gap, abs(reached - c.top_p))
    return members, gap


def rms(x: Array, cfg: Any) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + cfg.rms_norm_eps)


def centred_norm(x: Array, weight: Array, cfg: Any) -> Array:
    return rms(x, cfg) * (1 + weight)


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return e / e.sum()
