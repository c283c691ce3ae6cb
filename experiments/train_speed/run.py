"""What a training step costs by objective: `python experiments/train_speed/run.py [--json FILE]`.

clover-nano in float32, one batch of real samples, all objectives in turns; medians of one run. The
matmul peak is a float32 product of 1,024 x 1,024 matrices, timed in the same rounds. Operations are
the compiler's count of a step's program, whose loops over tiles and chunks it counts once, so the
share of the peak is a lower bound.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax import checkpoint
from clover_jax.cli.session import packaged_model
from clover_jax.data.pipeline import DataConfig, TaskBatches
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import NoiseConfig
from clover_jax.diffusion.loss import LossConfig, as_arrays
from clover_jax.model import lora
from clover_jax.model.transformer import unstack
from clover_jax.train.loop import ENV
from clover_jax.train.step import OptimiserConfig, init_state, train_step

ROUNDS = 7
PEAK_SIZE = 1024
ONE_VIEW, TWO_VIEWS = NoiseConfig(complementary=False), NoiseConfig()
FOLLOWING = NoiseConfig(frontier_share=1.0)
BLOCKS = LossConfig(diffusion=1.0)
ADAPTER = lora.LoRAConfig(rank=8, targets=("attention", "gdn"), train=("block",))


@dataclasses.dataclass(frozen=True)
class Objective:
    """One way to train."""

    name: str
    loss: LossConfig
    noise: NoiseConfig
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


OBJECTIVES = (
    Objective("AR", LossConfig(diffusion=0.0), ONE_VIEW),
    Objective("AR + diffusion, one view", BLOCKS, ONE_VIEW),
    Objective("diffusion only, one view", dataclasses.replace(BLOCKS, ar=0.0), ONE_VIEW),
    Objective("AR + diffusion, complementary views", BLOCKS, TWO_VIEWS),
    Objective(
        "the same, the second view follows the model",
        dataclasses.replace(BLOCKS, follow_above=0.9),
        FOLLOWING,
    ),
    Objective("one view, 4 parts", BLOCKS, ONE_VIEW, {"accumulate": 4}),
    Objective("one view, LoRA", BLOCKS, ONE_VIEW, {"lora": ADAPTER}),
    Objective("one view, bfloat16 pass", BLOCKS, ONE_VIEW, {"compute_dtype": "bfloat16"}),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    folder = packaged_model()
    cfg, params, _ = checkpoint.load(folder, dtype="float32")
    tokenizer = Tokenizer.load(folder)
    weights = unstack(params)
    rule = OptimiserConfig(learning_rate=1e-3, steps=1)
    forbidden = jnp.arange(cfg.vocab_size) >= tokenizer.vocab_size
    runs = []
    for objective in OBJECTIVES:
        data = DataConfig(rows=flags.rows, buckets=((96, 2),), noise=objective.noise)
        batch = as_arrays(TaskBatches(tokenizer, data, block=cfg.block_length).batch(0))
        adapter = objective.options.get("lora")
        start = weights if adapter is None else lora.init(weights, adapter, jax.random.key(0))
        state = init_state(jax.tree.map(jnp.copy, start), rule)
        compiled = train_step.lower(
            state, batch, forbidden, jnp.float32(1e-3), None if adapter is None else weights,
            cfg=cfg, env=ENV, loss=objective.loss, optimiser=rule.rule, **objective.options,
        ).compile()  # fmt: skip
        runs.append((compiled, state, batch, adapter is not None))
        print(f"compiled: {objective.name}", flush=True)
    square = jnp.asarray(np.random.default_rng(0).normal(size=(PEAK_SIZE,) * 2), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    times: list[list[float]] = [[] for _ in runs]
    peak_times = []
    for turn in range(ROUNDS + 1):
        for i, (compiled, state, batch, adapted) in enumerate(runs):
            arguments = (state, batch, forbidden, jnp.float32(1e-3))
            began = time.perf_counter()
            state, metrics = compiled(*arguments, *([weights] if adapted else [None]))
            jax.block_until_ready((state, metrics))
            runs[i] = (compiled, state, batch, adapted)
            if turn:
                times[i].append(time.perf_counter() - began)
        began = time.perf_counter()
        product(square).block_until_ready()
        if turn:
            peak_times.append(time.perf_counter() - began)
    peak = 2 * PEAK_SIZE**3 / statistics.median(peak_times)
    tokens = int(runs[0][2].n_valid.sum())
    ar = statistics.median(times[0])
    lines = []
    for objective, (compiled, *_), seconds in zip(OBJECTIVES, runs, times, strict=True):
        median = statistics.median(seconds)
        memory: Any = compiled.memory_analysis()
        cost: Any = compiled.cost_analysis()
        lines.append(
            {
                "objective": objective.name,
                "ms": 1e3 * median,
                "of_ar": median / ar,
                "tokens_per_s": tokens / median,
                "share_of_peak": cost["flops"] / median / peak,
                "kilobytes_per_token": memory.temp_size_in_bytes / tokens / 1e3,
            }
        )
    print(f"\n{tokens} clean tokens in {flags.rows} rows; matmul peak {peak / 1e9:.0f} GFLOP/s\n")
    print("| objective | step | of an AR step | tokens/s | of the peak | work memory per token |")
    print("|---|---|---|---|---|---|")
    for x in lines:
        print(
            f"| {x['objective']} | {x['ms']:.0f} ms | {x['of_ar']:.2f} | {x['tokens_per_s']:.0f} "
            f"| {100 * x['share_of_peak']:.0f} % | {x['kilobytes_per_token']:.0f} kB |"
        )
    if flags.json:
        flags.json.write_text(json.dumps({"peak_flops": peak, "rows": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
