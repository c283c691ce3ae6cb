"""How fast transformers' Qwen3_5Moe reads and writes tokens, on request.

Runs alone, under Python 3.11 in an environment of its own (README.md beside this file):

    python hf_speed.py FOLDER --threads N

Answers one line of JSON per line of standard input, so that the caller can take turns with other
programs. It says its versions first, then:

    {"prefill": [ids]}             -> {"seconds": s}                one pass, logits of the last
    {"prompt": [ids], "decode": n} -> {"seconds": s, "ids": [...]}  greedy, the prompt not timed
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import transformers
from hf_trace import load
from transformers import DynamicCache


@torch.inference_mode()
def read(model: torch.nn.Module, ids: list[int]) -> tuple[torch.Tensor, DynamicCache]:
    """The logits after the last id, and the cache."""
    cache = DynamicCache(config=model.config)
    out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1], cache


@torch.inference_mode()
def write(model: torch.nn.Module, ids: list[int], count: int) -> dict:
    """`count` greedy tokens, one at a time."""
    logits, cache = read(model, ids)
    answer = []
    began = time.perf_counter()
    for step in range(count):
        answer.append(int(logits.argmax()))
        if step + 1 < count:
            token = torch.tensor([answer[-1:]])
            logits = model(token, past_key_values=cache, use_cache=True).logits[0, -1]
    return {"seconds": time.perf_counter() - began, "ids": answer}


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # The default implementation of the experts is the fast one; parity tests take the plain one.
    model = load(arguments.folder, torch.float32, experts="grouped_mm")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "prefill" in asked:
            began = time.perf_counter()
            read(model, asked["prefill"])
            said = {"seconds": time.perf_counter() - began}
        else:
            said = write(model, asked["prompt"], asked["decode"])
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
