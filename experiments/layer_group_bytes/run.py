"""Device bytes of one layer group of Clover-35B in a preview and a commit, by the TPU compiler.

    uv run --group aot python experiments/layer_group_bytes/run.py [--machine v5p] [--prefix 4096]

Compiles three GDN layers and one attention layer at the 35B shapes (bf16, one row, block 32) for a
TPU that is not here, with the Pallas kernels and with plain XLA, and prints the bytes that the
compiler counts over all operations. A kernel's count is its own cost estimate, which for the
experts assumes that every choice is another expert (256 touched); XLA counts the body of a loop
once, so its experts' loop is all but missing. Beside it stands the least that must move.
"""

import argparse
import os

from pallas_kernels.aot import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # libtpu reads it when it starts

import jax
import jax.numpy as jnp

from clover_jax.cache import DecodeCache, bytes_per_token, cache_shapes
from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.model.transformer import (
    CleanInput,
    NoisyInput,
    Params,
    forward,
    param_specs,
    unstack,
)
from clover_jax.params import abstract, num_bytes
from clover_jax.presets import clover_35b_a3b
from pallas_kernels.compat import MACHINES, target

BLOCK = 32
KERNELS = ("block_attention", "gated_delta", "state_fusion", "expert_glu")


def compiled_cost(cfg: ModelConfig, env: Env, name: str, machine: str, capacity: int) -> dict:
    """The compiler's cost analysis of one pass."""
    params = jax.eval_shape(unstack, abstract(param_specs(cfg)))
    cache = cache_shapes(cfg, 1, capacity)
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    masked = jax.ShapeDtypeStruct((1, 1, BLOCK), jnp.bool)

    def commit(params: Params, tokens: jax.Array, n: jax.Array, cache: DecodeCache) -> object:
        return forward(params, CleanInput(tokens, n), None, cache, cfg=cfg, env=env).cache

    def preview(
        params: Params, tokens: jax.Array, masked: jax.Array, n: jax.Array, cache: DecodeCache
    ) -> object:
        noisy = NoisyInput(tokens, masked, n, None)
        return forward(params, None, noisy, cache, cfg=cfg, env=env).hidden.noisy

    place = MACHINES[machine].sharding()
    with target(MACHINES[machine]):
        if name == "commit":
            jitted = jax.jit(commit, in_shardings=place, out_shardings=place, donate_argnums=3)
            traced = jitted.trace(params, integers(1, BLOCK), integers(1), cache)
        else:
            jitted = jax.jit(preview, in_shardings=place, out_shardings=place)
            traced = jitted.trace(params, integers(1, 1, BLOCK), masked, integers(1, 1), cache)
        return traced.lower().compile().cost_analysis()


def least_bytes(cfg: ModelConfig, name: str, prefix: int, experts: int) -> int:
    """Every weight but the untouched experts', states, rings and KV, once each way."""
    group = param_specs(cfg).layers
    one = 3 * cfg.hidden_size * cfg.moe.intermediate * jnp.dtype(cfg.dtype).itemsize
    weights = num_bytes(group) - cfg.num_layers * one * (cfg.moe.num_experts - experts)
    cache = cache_shapes(cfg, 1, prefix)
    states = sum(a.size * a.dtype.itemsize for a in (cache.state, cache.ring))
    kv = prefix * bytes_per_token(cfg)
    if name == "commit":  # states and rings are written too, and the block's cells
        return weights + 2 * states + kv + BLOCK * bytes_per_token(cfg)
    return weights + states + kv


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", choices=("v5e", "v5p", "v6e"), default="v5p")
    parser.add_argument("--prefix", type=int, default=4096, help="cells, all of them filled")
    arguments = parser.parse_args()
    # A token's row of the embedding is read, but the compiler counts the whole table: a small one.
    cfg = clover_35b_a3b().replace(num_layers=4, vocab_size=512, mask_token_id=0)
    kernels = Env(impls=tuple((op, "pallas_tpu") for op in KERNELS))
    print("| pass | least, 163 experts | least, 256 experts | kernels | plain XLA |")
    print("|---|---|---|---|---|")
    for name in ("preview", "commit"):
        least = [least_bytes(cfg, name, arguments.prefix, n) for n in (163, 256)]
        seen = [
            compiled_cost(cfg, env, name, arguments.machine, arguments.prefix)["bytes accessed"]
            for env in (kernels, Env())
        ]
        print(f"| {name} | " + " | ".join(f"{b / 1e9:.3f} GB" for b in (*least, *seen)) + " |")


if __name__ == "__main__":
    main()
