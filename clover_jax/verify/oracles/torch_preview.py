"""Clover's preview pass and two-stream training loss in torch: slow loops on top of transformers.

An independent reading of the formulas: one position after the other, nothing chunked, nothing
fused. Norms, projections and embeddings are the modules of transformers' Qwen3_5Moe; the delta
rule, the block operator, attention, coreset, reveal rule and loss are written out here. Runs alone
(README.md beside this file); switches come from `clover` in the folder's config.json.

    python torch_preview.py FOLDER REQUEST OUT [--threshold 0.95]
    python torch_preview.py FOLDER REQUEST OUT --train [--ar 1 --diffusion 0.3 --balance 0.01
                                                        --router-z 0.0001]

A preview's REQUEST holds `ids` [rows, time] (the prefix, may be empty), `block` and `masked`
[rows, n]. Its OUT holds the names of hf_trace.py for the block, each with `preview.` before it
([rows, n, ...]), and what they stand on or lead to:

    prefix.layers.{l}.{state,ring}, prefix.layers.{a}.{k,v}, prefix.hidden (final-normed, last)
    preview.layers.{l}.history_share [rows, n, value heads]; preview.layers.{i}.experts [rows, n, k]
    preview.logits; reveal.{tokens,confidence,revealed} [rows, n]

OUT repeats the request, each name with `request.` before it. With --train, REQUEST holds a
training batch: `tokens`, `target_weight` [rows, time], `n_valid` [rows], `block_index`,
`block_n_valid` [rows, blocks], `block_tokens`, `block_masked`, `block_weight` [rows, blocks, n],
`forbidden` [vocab]. OUT holds `train.{loss,ar_loss,diffusion_loss,router_balance,router_z}`,
`train.clean` and `train.noisy` (final-normed hidden states), and `grad.{name}` of every parameter
by the checkpoint's name.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from hf_trace import CLOVER_SUFFIXES, arguments, load, text_config, write
from safetensors.torch import load_file
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling


class Clover:
    """A folder's modules, block-diffusion tensors and switches."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.model = load(folder, dtype)
        self.config = self.model.config
        fields = text_config(folder)
        clover = fields["clover"]
        self.mask_id = clover["mask_token_id"]
        self.switches, self.coreset = clover["bd_gdn"], clover["coreset"]
        self.shifted = clover["logits_position"] == "shifted"
        found = {}
        for path in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(path).items():
                if name.endswith(CLOVER_SUFFIXES):
                    found[name.replace("model.language_model.", "model.")] = tensor.float()
        self.extra = {name: torch.nn.Parameter(tensor) for name, tensor in found.items()}
        kernel = self.config.linear_conv_kernel_dim
        self.own = []
        for i in range(self.config.num_hidden_layers):
            at = f"model.layers.{i}.linear_attn."
            if at + CLOVER_SUFFIXES[0] not in self.extra:
                self.own.append(None)
                continue
            right, *scalars = (self.extra[at + name] for name in CLOVER_SUFFIXES)
            right = right.reshape(-1, kernel - 1)  # [channels, K-1], with or without a middle axis
            self.own.append((right, *(scalar.reshape(-1) for scalar in scalars)))


class Prefix:
    """What the clean stream of one row leaves at every position."""

    def __init__(self):
        self.states: dict[int, list] = {}  # per GDN layer: the state before each position, and last
        self.rows: dict[int, torch.Tensor] = {}  # per GDN layer: pre-conv rows [time, channels]
        self.keys: dict[int, torch.Tensor] = {}  # per attention layer: [time, kv heads, channels]
        self.values: dict[int, torch.Tensor] = {}


def rotary(c: Clover, positions: torch.Tensor):
    """cos and sin, [time, rotated channels]."""
    at = positions[None, None].expand(3, 1, -1)
    cos, sin = c.model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), at)
    return cos[0], sin[0]


def qkv(c: Clover, attn, x: torch.Tensor, positions: torch.Tensor):
    """Rotated q and k, v, and the gate, of rows [time, width]."""
    d = attn.head_dim
    q, gate = attn.q_proj(x).unflatten(-1, (-1, 2 * d)).chunk(2, dim=-1)
    k = attn.k_norm(attn.k_proj(x).unflatten(-1, (-1, d)))
    v = attn.v_proj(x).unflatten(-1, (-1, d))
    cos, sin = rotary(c, positions)
    q, k = modeling.apply_rotary_pos_emb(attn.q_norm(q), k, cos, sin, unsqueeze_dim=1)
    return q, k, v, gate


def attend(c: Clover, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query row [heads, channels] over all the keys it is given."""
    group = q.shape[0] // keys.shape[1]
    out = []
    for h in range(q.shape[0]):
        scores = keys[:, h // group] @ q[h] * q.shape[1] ** -0.5
        out.append(torch.softmax(scores.float(), dim=0).to(q.dtype) @ values[:, h // group])
    return torch.stack(out)


def strengths(attn, x: torch.Tensor):
    """beta and log decay g, [time, value heads], float32."""
    beta = attn.in_proj_b(x).float().sigmoid()
    step = F.softplus(attn.in_proj_a(x).float() + attn.dt_bias.float())
    return beta, -attn.A_log.float().exp() * step


def heads(attn, mixed: torch.Tensor):
    """SiLU, then q and k with norm 1 and v, of one row of conv outputs; per head, float32."""
    q, k, v = F.silu(mixed).split([attn.key_dim, attn.key_dim, attn.value_dim])
    unit = lambda x: x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
    q, k = (unit(x.reshape(attn.num_k_heads, attn.head_k_dim)) for x in (q, k))
    return q, k, v.reshape(attn.num_v_heads, attn.head_v_dim)


def delta_step(attn, q, k, v, beta, g, state):
    """One token of the gated delta rule, q divided by sqrt(channels): read-outs and new state."""
    group = attn.num_v_heads // attn.num_k_heads
    read, new = [], []
    for h in range(attn.num_v_heads):
        decayed = state[h] * g[h].exp()
        written = beta[h] * (v[h] - decayed.T @ k[h // group])
        updated = decayed + torch.outer(k[h // group], written)
        new.append(updated)
        read.append(updated.T @ q[h // group] * attn.head_k_dim**-0.5)
    return torch.stack(read), torch.stack(new)


def finish(attn, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gated norm per head, then the output projection, [time, width]."""
    z = attn.in_proj_z(x).reshape(-1, attn.head_v_dim)
    gated = attn.norm(o.reshape(-1, attn.head_v_dim).to(x.dtype), z)
    return attn.out_proj(gated.reshape(x.shape[0], -1))


def causal_gdn(attn, x: torch.Tensor):
    """Token by token over rows [time, width]: output, states before each token and last, rows."""
    kernel = attn.conv_kernel_size
    taps = attn.conv1d.weight[:, 0].float()
    rows = attn.in_proj_qkv(x)
    beta, g = strengths(attn, x)
    padded = torch.cat([rows.new_zeros(kernel - 1, rows.shape[1]), rows]).float()
    states = [torch.zeros(attn.num_v_heads, attn.head_k_dim, attn.head_v_dim)]
    out = []
    for t in range(x.shape[0]):
        mixed = sum(padded[t + j] * taps[:, j] for j in range(kernel))
        q, k, v = heads(attn, mixed)
        read, state = delta_step(attn, q, k, v, beta[t], g[t], states[-1])
        out.append(read)
        states.append(state)
    if not out:
        return x, states, rows
    return finish(attn, torch.stack(out), x), states, rows


def ring_before(rows: torch.Tensor, index: int, kernel: int) -> torch.Tensor:
    """The last K-1 pre-conv rows before a position, zeros before the text's start."""
    padded = torch.cat([rows.new_zeros(kernel - 1, rows.shape[1]), rows])
    return padded[index : index + kernel - 1]


def block_gdn(c: Clover, i: int, x: torch.Tensor, state, ring, seen: dict):
    """The block operator of layer i for rows [n, width]; writes its inner tensors to `seen`."""
    attn, s = c.model.model.layers[i].linear_attn, c.switches
    right, scale, bias, history_c = c.own[i]
    if s["right_order"] == "next_last":
        right = right.flip(1)
    n, kernel = x.shape[0], attn.conv_kernel_size
    taps = attn.conv1d.weight[:, 0].float()
    rows = attn.in_proj_qkv(x).float()
    beta, g = strengths(attn, x)
    window = torch.cat([ring.float(), rows])
    qs, ks, vs = [], [], []
    for t in range(n):
        mixed = sum(window[t + j] * taps[:, j] for j in range(kernel))
        for ahead in range(1, kernel):
            if s["right_conv"] and t + ahead < n:
                mixed = mixed + rows[t + ahead] * right[:, ahead - 1]
        q, k, v = heads(attn, mixed)
        qs.append(q)
        ks.append(k)
        vs.append(v)
    seen |= {"q": torch.stack(qs), "k": torch.stack(ks), "v": torch.stack(vs), "beta": beta, "g": g}

    if s["operator"] in ("causal", "two_direction"):
        o = torch.zeros(n, attn.num_v_heads, attn.head_v_dim)
        directions = [(range(n), state)]
        if s["operator"] == "two_direction":
            directions.append((range(n - 1, -1, -1), torch.zeros_like(state)))
        for order, running in directions:
            read = {}
            for t in order:
                read[t], running = delta_step(attn, qs[t], ks[t], vs[t], beta[t], g[t], running)
            o = o + torch.stack([read[t] for t in range(n)])
        seen |= {"o": o, "history_share": torch.zeros(n, attn.num_v_heads)}
        return finish(attn, o, x)

    scale = {"plain": lambda a: a, "exp": torch.exp, "softplus": F.softplus}[s["logit_scale"]](
        scale
    )
    group = attn.num_v_heads // attn.num_k_heads
    total = torch.cumsum(g, dim=0)
    empty = seen.pop("empty")
    out, shares = [], []
    for t in range(n):
        of_heads, share_of_heads = [], []
        for h in range(attn.num_v_heads):
            q = qs[t][h // group]
            asked = q if s["history_query"] == "unit" else q * attn.head_k_dim**-0.5
            history = state[h].T @ asked
            if s["history_logit"] == "log_length":
                score = torch.tensor(float(n)).log()
            else:
                score = torch.log1p((history.square().sum() + 1e-12).sqrt())
            slot = bias[h] + history_c[h] * score
            logits = []
            for j in range(n):
                logit = scale[h] * (q @ ks[j][h // group])
                if s["block_bias"] == "decay":
                    logit = logit - (total[t, h] - total[j, h]).abs() + (beta[j, h] + 1e-6).log()
                logits.append(logit)
            if s["block_bias"] == "decay":
                slot = slot + total[t, h]
            dropped = empty and s["empty_history"] == "drop"
            if s["operator"] in ("no_history", "added") or dropped:
                weight = torch.cat([torch.zeros(1), torch.softmax(torch.stack(logits), dim=0)])
            else:
                weight = torch.softmax(torch.stack([slot, *logits]), dim=0)
            values = [
                vs[j][h] * (beta[j, h] if s["block_value"] == "beta" else 1.0) for j in range(n)
            ]
            o = weight[0] * history + sum(weight[1 + j] * values[j] for j in range(n))
            if s["operator"] == "added":
                o = o + history
            of_heads.append(o)
            share_of_heads.append(weight[0])
        out.append(torch.stack(of_heads))
        shares.append(torch.stack(share_of_heads))
    o = torch.stack(out)
    seen |= {"o": o, "history_share": torch.stack(shares)}
    return finish(attn, o, x)


def ranked(scores: list, inside: list) -> list:
    """Ids by descending score; equal ones by id."""
    return sorted(inside, key=lambda e: (-scores[e], e))


def coreset(probs: torch.Tensor, k: int, rule: dict) -> list:
    """The experts that a block shares, from its routers' softmax [n, experts]."""
    mass = torch.zeros_like(probs)
    for t, row in enumerate(probs.tolist()):
        own = ranked(row, list(range(len(row))))[:k] if rule["mass"] == "top_k" else range(len(row))
        for e in own:
            mass[t, e] = probs[t, e]
    pooled = (mass.sum(dim=0) if rule["pool"] == "sum" else mass.amax(dim=0)).tolist()
    total, covered, chosen = sum(pooled), 0.0, []
    for e in ranked(pooled, list(range(len(pooled)))):
        if len(chosen) >= k and (covered >= rule["top_p"] * total or pooled[e] == 0):
            break
        chosen.append(e)
        covered += pooled[e]
    return chosen


def mixture(c: Clover, layer, x: torch.Tensor, shared: bool, seen: dict) -> torch.Tensor:
    """The MoE of rows [n, width]; `shared` rows take their experts from their coreset."""
    block, k = layer.mlp, c.config.num_experts_per_tok
    logits = F.linear(x.float(), block.gate.weight.float())
    probs = torch.softmax(logits, dim=-1)
    everyone = list(range(logits.shape[1]))
    inside = everyone
    if shared and c.coreset is not None:
        inside = coreset(probs.detach(), k, c.coreset)
    out, experts, members = [], [], []
    for t, row in enumerate(logits.detach().tolist()):
        chosen = ranked(row, inside)[:k]
        weights = probs[t, chosen] / probs[t, chosen].sum()
        y = torch.zeros(x.shape[1])
        for e, weight in sorted(zip(chosen, weights, strict=True), key=lambda pair: pair[0]):
            gate, up = (block.experts.gate_up_proj[e] @ x[t]).chunk(2)
            y = y + weight * (block.experts.down_proj[e] @ (F.silu(gate) * up)).float()
        shared_out = torch.sigmoid(block.shared_expert_gate(x[t])) * block.shared_expert(x[t])
        out.append(y.to(x.dtype) + shared_out)
        experts.append(torch.tensor(sorted(chosen)))
        member = torch.zeros(logits.shape[1])
        member[ranked(row, everyone)[:k]] = 1.0
        members.append(member)
    if not out:
        return x
    seen |= {"router_logits": logits, "experts": torch.stack(experts).int()}
    seen |= {"members": torch.stack(members), "probs": probs}
    return torch.stack(out)


class Block:
    """A block to denoise and where it stands in its row."""

    def __init__(self, c: Clover, tokens: torch.Tensor, masked: torch.Tensor, index: int):
        ids = torch.where(masked, torch.full_like(tokens, c.mask_id), tokens)
        self.index, self.x = index, c.model.model.embed_tokens(ids)
        self.embed = self.x
        self.positions = index + torch.arange(len(tokens))
        self.seen: list[dict] = []


def two_stream(c: Clover, ids: torch.Tensor, blocks: list) -> tuple:
    """One row through all layers: final-normed clean rows, what they leave, their routers.

    The blocks' residual streams and inner tensors are left in the blocks.
    """
    prefix, routed = Prefix(), []
    x = c.model.model.embed_tokens(ids)
    positions = torch.arange(len(ids))
    for i, layer in enumerate(c.model.model.layers):
        inner = [{"mixer_in": layer.input_layernorm(b.x)} for b in blocks]
        h = layer.input_layernorm(x)
        if layer.block_type == "linear_attention":
            attn = layer.linear_attn
            y, prefix.states[i], prefix.rows[i] = causal_gdn(attn, h)
            for b, seen in zip(blocks, inner, strict=True):
                seen["empty"] = b.index == 0
                ring = ring_before(prefix.rows[i], b.index, attn.conv_kernel_size)
                state = prefix.states[i][b.index]
                seen["mixer_out"] = block_gdn(c, i, seen["mixer_in"], state, ring, seen)
                seen.pop("empty", None)
        else:
            attn = layer.self_attn
            q, k, v, gate = qkv(c, attn, h, positions)
            prefix.keys[i], prefix.values[i] = k, v
            mixed = [attend(c, q[t], k[: t + 1], v[: t + 1]) for t in range(len(ids))]
            y = h
            if mixed:
                y = attn.o_proj((torch.stack(mixed) * gate.sigmoid()).reshape(len(ids), -1))
            for b, seen in zip(blocks, inner, strict=True):
                bq, bk, bv, bgate = qkv(c, attn, seen["mixer_in"], b.positions)
                keys, values = torch.cat([k[: b.index], bk]), torch.cat([v[: b.index], bv])
                mixed = torch.stack([attend(c, row, keys, values) for row in bq])
                seen["mixer_out"] = attn.o_proj((mixed * bgate.sigmoid()).reshape(len(bq), -1))
        x = x + y
        clean_seen: dict = {}
        x = x + mixture(c, layer, layer.post_attention_layernorm(x), False, clean_seen)
        for b, seen in zip(blocks, inner, strict=True):
            b.x = b.x + seen["mixer_out"]
            seen["moe_in"] = layer.post_attention_layernorm(b.x)
            seen["moe_out"] = mixture(c, layer, seen["moe_in"], True, seen)
            b.x = b.x + seen["moe_out"]
            b.seen.append({**seen, "hidden": b.x})
        routed.append([s for s in (clean_seen, *inner) if "probs" in s])
    return c.model.model.norm(x), prefix, routed


def own_positions(c: Clover, hidden: torch.Tensor, clean: torch.Tensor, index: int):
    """Block rows moved to the position that they speak of."""
    if not c.shifted:
        return hidden
    before = clean[index - 1] if index else torch.zeros_like(hidden[0])
    return torch.cat([before[None], hidden[:-1]])


def reveal(logits: torch.Tensor, masked: torch.Tensor, threshold: float):
    """Low confidence: all masked rows above the threshold, else the most confident one."""
    best = torch.softmax(logits.float(), dim=-1).max(dim=-1)
    revealed = masked & (best.values > threshold)
    if masked.any() and not revealed.any():
        candidates = torch.where(masked, best.values, torch.full_like(best.values, -1.0))
        revealed[candidates.argmax()] = True
    return best.indices.int(), best.values, revealed


@torch.no_grad()
def preview(c: Clover, request: dict, threshold: float) -> dict:
    """Every row's block over its prefix."""
    collected: dict[str, list] = {}
    ids, tokens, masked = request["ids"].long(), request["block"].long(), request["masked"].bool()
    for r in range(len(ids)):
        index = ids.shape[1]
        block = Block(c, tokens[r], masked[r], index)
        clean, prefix, _ = two_stream(c, ids[r], [block])
        row = {"preview.embed": block.embed}
        for i, seen in enumerate(block.seen):
            hidden = {f"preview.hidden.{i}": seen.pop("hidden")}
            row |= {
                f"preview.layers.{i}.{name}": tensor
                for name, tensor in seen.items()
                if name not in ("members", "probs")
            } | hidden
        for i, states in prefix.states.items():
            kernel = c.config.linear_conv_kernel_dim
            row[f"prefix.layers.{i}.state"] = states[-1]
            row[f"prefix.layers.{i}.ring"] = ring_before(prefix.rows[i], index, kernel)
        for i in prefix.keys:
            row[f"prefix.layers.{i}.k"] = prefix.keys[i]
            row[f"prefix.layers.{i}.v"] = prefix.values[i]
        row["prefix.hidden"] = clean[-1] if index else torch.zeros(c.config.hidden_size)
        hidden = own_positions(c, c.model.model.norm(block.x), clean, index)
        row["preview.logits"] = c.model.lm_head(hidden).float()
        found = reveal(row["preview.logits"], masked[r], threshold)
        names = ("reveal.tokens", "reveal.confidence", "reveal.revealed")
        row |= dict(zip(names, found, strict=True))
        for name, tensor in row.items():
            collected.setdefault(name, []).append(tensor)
    out = {name: torch.stack(tensors) for name, tensors in collected.items()}
    return {"ids": ids.int(), **out}


def train(c: Clover, batch: dict, weights: dict) -> dict:
    """The training loss of a batch, its parts, both streams, and all gradients."""
    parameters = dict(c.model.named_parameters()) | c.extra
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    rows, blocks, n = batch["block_tokens"].shape
    forbidden = batch["forbidden"].bool()
    nats = lambda hidden, target: (
        -torch.log_softmax(
            c.model.lm_head(hidden).float().masked_fill(forbidden, -torch.inf), dim=-1
        )[target]
    )
    ar, ar_weight, noisy, noisy_weight = 0.0, 0.0, 0.0, 0.0
    width = c.config.hidden_size
    clean_out = torch.zeros(rows, batch["tokens"].shape[1], width)
    noisy_out = torch.zeros(rows, blocks, n, width)
    routed: list[list] = [[] for _ in range(c.config.num_hidden_layers)]
    for r in range(rows):
        ids = batch["tokens"][r, : batch["n_valid"][r]].long()
        exist = [b for b in range(blocks) if batch["block_n_valid"][r, b] > 0]
        own = [
            Block(
                c,
                batch["block_tokens"][r, b].long(),
                batch["block_masked"][r, b].bool(),
                int(batch["block_index"][r, b]),
            )
            for b in exist
        ]
        clean, _, layers = two_stream(c, ids, own)
        clean_out[r, : len(ids)] = clean.detach()
        for layer, found in zip(routed, layers, strict=True):
            layer += found
        for t in range(1, len(ids)):
            weight = batch["target_weight"][r, t]
            if weight > 0:
                ar, ar_weight = ar + weight * nats(clean[t - 1], ids[t]), ar_weight + weight
        for b, block in zip(exist, own, strict=True):
            hidden = c.model.model.norm(block.x)
            noisy_out[r, b] = hidden.detach()
            hidden = own_positions(c, hidden, clean, block.index)
            for t in range(n):
                weight = batch["block_weight"][r, b, t]
                if batch["block_masked"][r, b, t] and weight > 0:
                    target = batch["block_tokens"][r, b, t].long()
                    noisy, noisy_weight = (
                        noisy + weight * nats(hidden[t], target),
                        noisy_weight + weight,
                    )
    balance, z = [], []
    for layer in routed:
        members = torch.cat([s["members"] for s in layer])
        probs = torch.cat([s["probs"] for s in layer])
        logits = torch.cat([s["router_logits"] for s in layer])
        balance.append(members.shape[1] * (members.mean(dim=0) * probs.mean(dim=0)).sum())
        z.append(torch.logsumexp(logits, dim=-1).square().mean())
    balance, z = torch.stack(balance).mean(), torch.stack(z).mean()
    ar, noisy = ar / ar_weight, noisy / noisy_weight
    loss = weights["ar"] * ar + weights["diffusion"] * noisy
    loss = loss + weights["balance"] * balance + weights["router_z"] * z
    loss.backward()
    out = {"loss": loss, "ar_loss": ar, "diffusion_loss": noisy}
    out |= {"router_balance": balance, "router_z": z, "clean": clean_out, "noisy": noisy_out}
    found = {f"train.{name}": tensor for name, tensor in out.items()}
    for name, parameter in parameters.items():
        grad = parameter.grad
        found[f"grad.{name}"] = torch.zeros_like(parameter) if grad is None else grad
    return {"ids": batch["tokens"].int(), **found}


def main() -> None:
    """Command line."""
    parser = arguments(__doc__)
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--train", action="store_true")
    weights = {"ar": 1.0, "diffusion": 0.3, "balance": 0.01, "router_z": 0.0001}
    for name, value in weights.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    clover, request = Clover(args.folder, getattr(torch, args.dtype)), load_file(args.request)
    if args.train:
        tensors = train(clover, request, {name: getattr(args, name) for name in weights})
    else:
        tensors = preview(clover, request, args.threshold)
    tensors |= {f"request.{name}": tensor for name, tensor in request.items()}
    write(args.out, tensors, args.dtype, __file__)


if __name__ == "__main__":
    main()
