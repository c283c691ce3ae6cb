"""Loads a synthetic bfloat16 checkpoint and prints what that took, as JSON.

    uv run python experiments/load_speed/run.py [--gigabytes 3] [--shards 24]

The files are written to a temporary folder in the hub's layout (fused experts, `language_model`
level, many shards) and pushed out of the page cache. Plain reading of the same files, cold too, is
the ceiling. Memory is the kernel's high-water mark of this process (VmHWM) above its value before.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from clover_jax import checkpoint
from clover_jax.checkpoint import config_to_hf
from clover_jax.checkpoint.hf_map import pieces, with_prefix
from clover_jax.checkpoint.saving import Entry, write_json, write_weights
from clover_jax.config import ModelConfig
from clover_jax.presets import qwen36_35b_a3b

READ = 2**24  # bytes at a time of the plain reading


def config(gigabytes: float) -> ModelConfig:
    """The 35B's layers, narrower and fewer, with as many experts as the size asks for."""
    base = qwen36_35b_a3b().replace(
        hidden_size=1024, num_layers=8, vocab_size=32768,
        **{
            "attention.head_dim": 128, "attention.rotary_dim": 32,
            "delta.num_key_heads": 8, "delta.num_value_heads": 16,
        },
    )  # fmt: skip
    size = lambda cfg: sum(2 * np.prod(p.shape) for found in pieces(cfg).values() for p in found)
    with_experts = lambda n: base.replace(**{"moe.num_experts": n})
    fixed, each = size(with_experts(8)), size(with_experts(9)) - size(with_experts(8))
    return with_experts(8 + max(0, round((gigabytes * 1e9 - fixed) / each)))


def write(folder: Path, cfg: ModelConfig, shards: int) -> None:
    """Random weights with norms near 0, a leaf's piece at a time."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(2**20).astype(np.float32) * 0.02

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return np.resize(noise, shape).astype(ml_dtypes.bfloat16)

    entries = []
    for found in pieces(cfg).values():
        for piece in found:
            shape = piece.file_shapes[0]
            name = with_prefix(piece.name, "language_model")
            nbytes = 2 * int(np.prod(shape))
            entries.append(Entry(name, nbytes, lambda shape=shape: draw(shape)))
    total = sum(entry.nbytes for entry in entries)
    write_weights(folder, entries, -(-total // shards))
    write_json(folder / "config.json", config_to_hf(cfg))


def forget(folder: Path) -> None:
    """Pushes the files out of the page cache."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def high_water() -> int:
    """Bytes of memory that this process held at most."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # pyright: ignore


def measure(folder: Path) -> dict[str, float]:
    """Memory and time of a load; in a process of its own."""
    before, calls = high_water(), []
    began = time.monotonic()
    _, params, _ = checkpoint.load(folder, progress=lambda done, total: calls.append((done, total)))
    seconds = time.monotonic() - began
    del params
    return {
        "seconds": seconds,
        "peak_bytes": high_water() - before,
        "progress_calls": len(calls),
        "complete": calls[-1][0] == calls[-1][1],
    }


def main() -> None:
    """Writes, reads plainly, loads, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(folder, config(args.gigabytes), args.shards)
        files = sorted(folder.glob("*.safetensors"))
        nbytes = sum(path.stat().st_size for path in files)
        forget(folder)
        began = time.monotonic()
        for path in files:
            with path.open("rb", buffering=0) as opened:
                while opened.read(READ):
                    pass
        plain = time.monotonic() - began
        forget(folder)
        command = [sys.executable, __file__, "--measure", str(folder)]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    out = {
        "bytes": nbytes,
        "files": len(files),
        **found,
        "peak_over_bytes": found["peak_bytes"] / nbytes,
        "gigabytes_per_s": nbytes / found["seconds"] / 1e9,
        "plain_read_gigabytes_per_s": nbytes / plain / 1e9,
        "share_of_plain_read": plain / found["seconds"],
    }
    print(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
