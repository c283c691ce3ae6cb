"""The ops in torch on CPU, as one would write them there: what the benchmark sets ours beside.

Runs alone, under a Python with torch and transformers, and imports nothing of this project. Answers
one line of JSON per line of standard input, after `{"torch": version}`:

    {"function": name, "arrays": FILE.npz, "dtypes": [...], "out": FILE.npy}  -> {"ok": true}
        loads the arguments, calls once, and writes the (first) result as float32
    {"repeats": n}  -> {"seconds": s} of n calls
"""

import functools
import json
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)


def block_attention(q, k, v, group, limit, own_k=None, own_v=None, own_valid=None):
    """scaled_dot_product_attention over the cells that anyone sees, and the block."""
    del own_valid  # the benchmark's blocks are full
    heads, kv_heads, used = q.shape[2], k.shape[2], int(limit.max())
    keys, values = k[int(group), :, :, :used], v[int(group), :, :, :used]
    seen = torch.arange(used) < limit[..., None]
    if own_k is not None:
        keys = torch.cat([keys, own_k[:, 0].transpose(1, 2)], dim=2)
        values = torch.cat([values, own_v[:, 0].transpose(1, 2)], dim=2)
        seen = torch.cat([seen, seen.new_ones(*limit.shape, own_k.shape[2])], dim=-1)
    mask = None if bool(seen.all()) else seen[:, None]
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
    return out.transpose(1, 2)


def gated_delta(q, k, v, g, beta, state):
    """transformers' own forms, one recurrent step or chunks of 64; they scale q themselves."""
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for x in (q, k))
    rule = torch_recurrent_gated_delta_rule if q.shape[1] == 1 else torch_chunk_gated_delta_rule
    q = q * q.shape[-1] ** 0.5
    return rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)


def state_fusion(ring, block, taps, right_taps, state, g, beta, scale, bias, factor, valid, empty):
    """Clover's reading: one depthwise convolution, then batched matmuls and a softmax."""
    del g, beta, empty
    rows, n, channels = block.shape
    value_heads, key, value = state.shape[1:]
    key_heads = (channels - value_heads * value) // (2 * key)
    block = block.float() * valid[..., None]
    window = torch.cat([ring.float(), block, block.new_zeros(rows, len(right_taps), channels)], 1)
    kernel = torch.cat([taps, right_taps]).float().T[:, None]
    mixed = F.silu(F.conv1d(window.transpose(1, 2), kernel, groups=channels)).transpose(1, 2)
    q, k, v = mixed.split([key_heads * key, key_heads * key, value_heads * value], dim=-1)
    heads = lambda x, count: x.reshape(rows, n, count, -1).transpose(1, 2)
    q, k = (F.normalize(heads(x, key_heads), dim=-1) for x in (q, k))
    q, k = (x.repeat_interleave(value_heads // key_heads, dim=1) for x in (q, k))
    logits = (q @ k.transpose(-1, -2)) * scale[:, None, None]
    logits = logits.masked_fill(~valid[:, None, None], -torch.inf)
    slot = (
        bias[:, None, None]
        + factor[:, None, None] * valid.sum(1).float().log()[:, None, None, None]
    )
    w = torch.softmax(torch.cat([slot.expand(-1, -1, n, 1), logits], dim=-1), dim=-1)
    return (w[..., :1] * (q @ state) + w[..., 1:] @ heads(v, value_heads)).transpose(1, 2)


def expert_glu(x, expert, weight, valid, w_in, w_out):
    """Expert by expert over the rows that chose it, as transformers' eager form does."""
    del valid
    y = torch.zeros(x.shape, dtype=torch.float32)
    for e in expert.unique().tolist():
        row, place = (expert == e).nonzero(as_tuple=True)
        gate, up = (x[row] @ w_in[e]).chunk(2, dim=-1)
        each = (F.silu(gate) * up) @ w_out[e]
        y.index_add_(0, row, each.float() * weight[row, place, None])
    return y.to(x.dtype)


@torch.inference_mode()
def main() -> None:
    """Serve standard input until it ends."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(json.dumps({"torch": torch.__version__}), flush=True)
    call = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "function" in asked:
            call = functools.partial(globals()[asked["function"]], *_tensors(asked))
            out = call()
            np.save(asked["out"], (out[0] if isinstance(out, tuple) else out).float().numpy())
            said = {"ok": True}
        else:
            began = time.perf_counter()
            for _ in range(asked["repeats"]):
                call()
            said = {"seconds": time.perf_counter() - began}
        print(json.dumps(said), flush=True)


def _tensors(asked):
    """The arguments; numpy has no bfloat16."""
    arrays = np.load(asked["arrays"]).values()
    tensors = (torch.as_tensor(a) for a in arrays)
    return [
        t.bfloat16() if kind == "bfloat16" else t
        for t, kind in zip(tensors, asked["dtypes"], strict=True)
    ]


if __name__ == "__main__":
    main()
