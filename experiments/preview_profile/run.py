"""Where the time of one denoising pass goes, part by part, next to an AR step. Prints a table.

    uv run python experiments/preview_profile/run.py [--checkpoint DIR] [--prefix 64] [--rounds 200]

Every part is a program of its own on the shapes that it has inside the pass, with the model's own
weights (one layer's, the same in each call); its time is multiplied by the number of layers that
have it. Parts of a program are fused and overlap, so the sum need not equal the whole; programs
this small also pay a start of some microseconds each. Medians; rounds interleave all programs.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax import checkpoint
from clover_jax.cache import empty_cache
from clover_jax.cli.session import packaged_model
from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.model.attention import attention_inputs, attention_output
from clover_jax.model.bd_gdn import block_gdn
from clover_jax.model.block import FullLayer, LinearLayer
from clover_jax.model.deltanet import PrefixState
from clover_jax.model.moe import expert_mlp, moe, route
from clover_jax.model.rope import rope_tables
from clover_jax.model.transformer import Params, extend, preview, unembed, unstack
from pallas_kernels.block_attention import BlockKV, block_attention

ENV = Env()


def parts(
    params: Params, cfg: ModelConfig, prefix: int
) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Name -> (times per pass, a call of the compiled part)."""
    layers: Any = params.layers
    linear = next(p for p in layers if isinstance(p, LinearLayer))
    full = next(p for p in layers if isinstance(p, FullLayer))
    n, rng = cfg.block_length, np.random.default_rng(0)
    ids = rng.integers(0, cfg.vocab_size, (1, prefix)).astype(np.int32)
    filled = jax.jit(functools.partial(extend, cfg=cfg, env=ENV))(
        params, ids, np.full(1, prefix, np.int32), empty_cache(cfg, 1, prefix + n)
    ).cache
    tokens = rng.integers(0, cfg.vocab_size, (1, n)).astype(np.int32)
    masked, valid = np.ones((1, n), bool), jnp.ones((1, n), bool)
    count, blocks = np.full(1, n, np.int32), (1, n)
    x = jnp.asarray(rng.standard_normal((1, n, cfg.hidden_size)), cfg.dtype)
    state = PrefixState(filled.state[0, 0], filled.ring[0, 0])
    a = cfg.attention
    at = prefix + jnp.arange(n, dtype=jnp.int32)[None]
    rope = rope_tables(at, rotary_dim=a.rotary_dim, theta=a.rope_theta)

    def attention(p: Any, x: Any, k_cells: Any, v_cells: Any) -> Any:
        q, k, v, gate = attention_inputs(p, x, rope, cfg=cfg)
        limit = jnp.full((1, n), prefix, jnp.int32)
        own = BlockKV(k[:, None], v[:, None], valid[:, None])
        mixed = block_attention(
            q, k_cells, v_cells, 0, limit, own,
            scale=a.head_dim**-0.5, impl="xla",
        )  # fmt: skip
        return attention_output(p, mixed, gate)

    gdn = lambda p, x: block_gdn(
        p, x[:, None], valid[:, None], state, None, jnp.zeros((1, 1), bool), cfg=cfg, env=ENV
    )[0]
    routing = jax.jit(lambda p, x: route(p, x, valid, None, blocks, cfg=cfg)[0])
    chosen = routing(linear.mlp, x)
    experts = lambda p, x: expert_mlp(p, x, chosen, valid, cfg=cfg, env=ENV)
    mixture = lambda p, x: moe(p, x, valid, None, blocks, cfg=cfg, env=ENV)[0]
    look = functools.partial(preview, cfg=cfg, env=ENV)
    append = functools.partial(extend, cfg=cfg, env=ENV, logits="last")
    one = np.ones(1, np.int32)

    def call(function: Any, *arguments: Any) -> Callable[[], Any]:
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*arguments))

    n_linear = sum(isinstance(p, LinearLayer) for p in layers)
    n_full = len(layers) - n_linear
    return {
        "AR step": (1, call(append, params, tokens[:, :1], one, filled)),
        "preview": (1, call(look, params, tokens, masked, count, filled)),
        "block operator (GDN)": (n_linear, call(gdn, linear.linear_attn, x)),
        "attention": (n_full, call(attention, full.self_attn, x, filled.k, filled.v)),
        "mixture of experts": (len(layers), call(mixture, linear.mlp, x)),
        "  of it router and coreset": (len(layers), call(routing, linear.mlp, x)),
        "  of it expert matmuls": (len(layers), call(experts, linear.mlp.experts, x)),
        "lm_head": (1, call(unembed, params, x)),
    }


def main() -> None:
    """Times and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--prefix", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    cfg, params, _ = checkpoint.load(args.checkpoint or packaged_model(), dtype="float32")
    found = parts(unstack(params), cfg, args.prefix)
    times: dict[str, list[float]] = {name: [] for name in found}
    for round_ in range(args.rounds + 1):
        for name, (_, run) in found.items():
            began = time.perf_counter()
            run()
            if round_:  # the first one compiles
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    whole = medians["preview"]
    print("| part | times | each | in a pass | of a preview |\n|---|---|---|---|---|")
    for name, (count, _) in found.items():
        ms = 1e3 * medians[name]
        print(
            f"| {name} | {count} | {ms:.3f} ms | {count * ms:.2f} ms "
            f"| {100 * count * ms / 1e3 / whole:.0f} % |"
        )
    print(f"\nprefix {args.prefix}, block {cfg.block_length}, medians of {args.rounds} rounds")


if __name__ == "__main__":
    main()
