"""Where the time of decoding and prefill goes on a CPU, by kind of XLA operation. Prints a table.

    uv run python experiments/cpu_speed/profile.py [--preset clover_bench] [--what ar|block|prefill]

Runs an answer (or a prefill of 512 tokens in one chunk) three times, traces a fourth with JAX's
profiler, and adds up the time of every operation, names without numbers. Operations run on all
cores, so their sum may exceed the wall time; tracing itself slows small operations down.
"""

import argparse
import collections
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax import presets
from clover_jax.cache import empty_cache
from clover_jax.diffusion.generate import Generator, Request, compiled_prefill
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.model.transformer import param_specs, unstack
from clover_jax.params import initialise

PREFILL = 512
TOKENS = 128
SHOWN = 12


def work(name: str, preset: str) -> Callable[[], int]:
    """What is traced; it returns the forwards that it took."""
    cfg = presets.named(preset).replace(dtype="float32")
    params = unstack(jax.jit(lambda: initialise(param_specs(cfg), jax.random.key(0)))())
    if name == "prefill":
        prompt = jax.random.randint(jax.random.key(0), (1, PREFILL), 0, cfg.vocab_size, jnp.int32)
        full = jnp.full((1,), PREFILL, jnp.int32)

        def prefill() -> int:
            cache: Any = jax.block_until_ready(empty_cache(cfg, 1, PREFILL))
            env = Env()
            out = compiled_prefill(params, prompt, full, cache, chunk=PREFILL, cfg=cfg, env=env)
            jax.block_until_ready(out)
            return 1

        return prefill
    generator = Generator(cfg, params, tokenizer=None, env=Env())
    request = Request(
        prompt=tuple(range(10, 42)), max_tokens=TOKENS, sampling=SamplerConfig(), seed=0
    )
    return lambda: generator.complete([request], mode=name)[0].stats.forwards


def operations(folder: Path) -> tuple[collections.Counter, collections.Counter]:
    """Nanoseconds and calls of each kind of XLA operation in the newest trace."""
    (path,) = folder.rglob("*.xplane.pb")
    spent, calls = collections.Counter(), collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if re.fullmatch(r"[a-z_-]+(\.\d+)*", event.name):  # not Python, not the runtime
                    kind = re.sub(r"[.\d]+$", "", event.name)
                    spent[kind] += event.duration_ns
                    calls[kind] += 1
    return spent, calls


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="clover_bench")
    parser.add_argument("--what", choices=("ar", "block", "prefill"), default="ar")
    arguments = parser.parse_args()
    run = work(arguments.what, arguments.preset)
    for _ in range(3):
        began = time.perf_counter()
        forwards = run()
        wall = 1e6 * (time.perf_counter() - began) / forwards
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        spent, calls = operations(Path(folder))
    print(f"{arguments.what}: {wall:.0f} µs per forward untraced, {forwards} forwards\n")
    print("| operation | µs per forward | calls per forward |\n|---|---|---|")
    for kind, ns in spent.most_common(SHOWN):
        print(f"| {kind} | {ns / 1e3 / forwards:.0f} | {calls[kind] / forwards:.1f} |")


if __name__ == "__main__":
    main()
