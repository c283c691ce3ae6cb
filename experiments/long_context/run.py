"""Memory and time of nano's shapes over a prefix of 131,072 tokens, filled chunk by chunk.

    uv run --extra experiments python experiments/long_context/run.py [--tokens 131072]

Weights and tokens are random: neither memory nor time of a pass depends on their values, but for
how evenly the router spreads them. After every piece the progress is written beside `--out`; an
interrupted command goes on from there. Memory is read from the real arrays: a cell counts as
written if any of its channels is not zero. Passes are timed on the prefix filled so far, in turns.
Seconds of the processor's work (over all threads) stand beside those of the clock: a machine with
other work on it stretches the latter. Prints a table; writes `--out`.json and `--out`.png.
"""

import argparse
import functools
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from clover_jax.cache import DecodeCache, bytes_per_row, bytes_per_token, empty_cache
from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.eval.card_report import require_pyplot
from clover_jax.files import whole_file
from clover_jax.model.placement import initialised
from clover_jax.model.transformer import Params, extend, param_specs, prefill, preview, unstack
from clover_jax.params import num_bytes
from clover_jax.presets import clover_nano
from pallas_kernels.block_attention import BlockKV, block_attention

CONTEXT = 131_072
PIECE = 8_192  # tokens between two looks at the memory
PREFIXES = tuple(1024 << i for i in range(8))  # where passes are timed
ENV = Env()
FLAT = ("state", "ring", "hidden", "length")  # what a token overwrites
SETTINGS = ("chunk", "calls")


class Programs(NamedTuple):
    """Compiled for one capacity."""

    prefill: Any
    preview: Any
    step: Any
    attention: dict[str, Any]  # one layer's, by the pass whose rows it has


def model(tokens: int) -> ModelConfig:
    """Nano, with room for one block after the prefix."""
    cfg = clover_nano()
    return cfg.replace(max_position_embeddings=tokens + cfg.block_length)


def compile_programs(
    params: Params, cache: DecodeCache, inputs: dict[str, Any], chunk: int, cfg: ModelConfig
) -> Programs:
    """All programs; those that write the cache take its buffers, as the sampler's do."""
    static = {"cfg": cfg, "env": ENV}
    fill = functools.partial(prefill, chunk=chunk, **static)
    look, append = functools.partial(preview, **static), functools.partial(extend, **static)
    one, rows = jnp.ones(1, jnp.int32), inputs["block"]
    a = cfg.attention

    def attend(q: Any, limit: Any, own: Any, k: Any, v: Any) -> Any:
        return block_attention(
            q, k, v, 0, limit, own,
            scale=a.head_dim**-0.5, impl=ENV.impl("block_attention"),
        )  # fmt: skip

    attention = {
        name: jax.jit(attend).lower(*inputs["attention"][name], cache.k, cache.v).compile()
        for name in inputs["attention"]
    }
    donated = lambda f: jax.jit(f, donate_argnums=3)
    piece = jnp.zeros((1, PIECE), jnp.int32)
    return Programs(
        donated(fill).lower(params, piece, one, cache).compile(),
        jax.jit(look).lower(params, *rows, cache).compile(),
        donated(append).lower(params, inputs["token"], one, cache).compile(),
        attention,
    )


def pass_inputs(cfg: ModelConfig, length: int) -> dict[str, Any]:
    """Arguments of the passes after `length` tokens, and of attention alone with their rows."""
    n, a, rng = cfg.block_length, cfg.attention, np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.standard_normal((1, *shape)), cfg.dtype)
    ids = jnp.asarray(rng.integers(0, cfg.vocab_size, (1, n)), jnp.int32)
    k, v = (draw(1, n, a.num_kv_heads, a.head_dim) for _ in "kv")
    own = BlockKV(k, v, jnp.ones((1, 1, n), bool))
    limit = lambda rows, cells: jnp.full((1, rows), cells, jnp.int32)
    q = draw(n, a.num_heads, a.head_dim)
    return {
        "block": (ids, jnp.ones((1, n), bool), jnp.full(1, n, jnp.int32)),
        "token": ids[:, :1],
        "attention": {
            "preview": (q, limit(n, length), own),
            "step": (q[:, :1], limit(1, length + 1), None),
        },
    }


def memory(cache: DecodeCache, cfg: ModelConfig) -> dict[str, int]:
    """Bytes in the arrays beside what `cache.py` says they should be."""
    cell = cfg.attention.head_dim * cache.k.dtype.itemsize
    written = sum(np.count_nonzero(np.asarray(a).any(axis=-1)) for a in (cache.k, cache.v))
    return {
        "kv_written": int(written) * cell,
        "kv_computed": int(cache.length[0]) * bytes_per_token(cfg),
        "kv_allocated": cache.k.nbytes + cache.v.nbytes,
        "flat": cache.state.nbytes + cache.ring.nbytes,
        "flat_computed": bytes_per_row(cfg),
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def time_passes(
    programs: Programs, params: Params, cache: DecodeCache, calls: int, cfg: ModelConfig
) -> tuple[dict[str, list[float]], DecodeCache]:
    """Milliseconds of a preview, an AR step, and attention in all layers of each.

    Returns:
        The median and the least of each, and the cache as it was.
    """
    inputs = pass_inputs(cfg, int(cache.length[0]))
    one = jnp.ones(1, jnp.int32)

    def step(cache: DecodeCache) -> DecodeCache:
        return programs.step(params, inputs["token"], one, cache).cache

    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = jax.block_until_ready(call())
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        return result

    for _ in range(calls + 1):
        timed("preview", functools.partial(programs.preview, params, *inputs["block"], cache))
        for name, attend in programs.attention.items():
            call = functools.partial(attend, *inputs["attention"][name], cache.k, cache.v)
            timed(f"{name}_attention", call)
        # The step takes the cache's buffers; what it overwrote is put back, its cell is past the
        # length and cannot matter.
        before = {name: jnp.copy(getattr(cache, name)) for name in FLAT}
        jax.block_until_ready(before)
        cache = timed("step", functools.partial(step, cache))._replace(**before)
    layers = lambda name: cfg.num_groups if name.endswith("attention") else 1
    return {
        name: [layers(name) * f(taken[1:]) for f in (statistics.median, min)]
        for name, taken in times.items()
    }, cache


def save_progress(path: Path, cache: DecodeCache, report: dict[str, Any]) -> None:
    """The committed cells, the states, and the report so far."""
    length = int(cache.length[0])
    arrays = {name: np.asarray(a) for name, a in cache._asdict().items()}
    arrays |= {n: np.ascontiguousarray(arrays[n][..., :length, :]) for n in ("k", "v")}
    with whole_file(path) as building:
        save_file(arrays, building, metadata={"report": json.dumps(report)})


def load_progress(
    path: Path, cache: DecodeCache, settings: dict[str, int]
) -> tuple[DecodeCache, dict[str, Any]]:
    """The cache filled as far as an earlier run got, and its report.

    Raises:
        CloverError: the file is another's, or of a run with other settings or more tokens.
    """
    remove = f"delete {path} or give another --out"
    try:
        with safe_open(path, "numpy") as file:
            report = json.loads((file.metadata() or {})["report"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CloverError(f"{path} cannot be read ({error}): {remove}") from None
    before = {name: report["settings"][name] for name in SETTINGS}
    if before != settings:
        raise CloverError(f"{path} is of a run with {before}, this one has {settings}: {remove}")
    length = arrays["k"].shape[3]
    if length > cache.capacity:
        raise CloverError(f"{path} holds {length} tokens, past this run's: {remove}")
    for name in ("k", "v"):
        arrays[name] = getattr(cache, name).at[:, :, :, :length].set(arrays[name])
    return DecodeCache(**jax.tree.map(jnp.asarray, arrays)), report


def run(tokens: int, chunk: int, calls: int, progress: Path) -> dict[str, Any]:
    """The whole report, from where `progress` stands."""
    cfg = model(tokens)
    params = unstack(initialised(cfg, jax.random.key(0), ENV))
    cache = empty_cache(cfg, 1, tokens + cfg.block_length)
    settings = {"chunk": chunk, "calls": calls}
    report: dict[str, Any] = {"pieces": [], "passes": []}
    if progress.exists():
        cache, report = load_progress(progress, cache, settings)
    programs = compile_programs(params, cache, pass_inputs(cfg, 0), chunk, cfg)
    named = programs._asdict() | {f"{n}_attention": p for n, p in programs.attention.items()}
    work = {n: p.memory_analysis() for n, p in named.items() if n != "attention"}
    report |= {
        "settings": settings,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}",
        "weights": num_bytes(param_specs(cfg)),
        "capacity": cache.capacity,
        "bytes_per_token": bytes_per_token(cfg),
        "bytes_per_row": bytes_per_row(cfg),
        "work_memory": {name: m.temp_size_in_bytes for name, m in work.items()},
    }
    print("work memory, MB:", {n: round(b / 1e6, 1) for n, b in report["work_memory"].items()})
    text = np.random.default_rng(0).integers(0, cfg.vocab_size, CONTEXT).astype(np.int32)
    stops = sorted({p for p in PREFIXES if p <= tokens} | {*range(PIECE, tokens, PIECE), tokens})
    for stop in stops:
        done = int(cache.length[0])
        if stop <= done:
            continue
        piece = np.zeros((1, PIECE), np.int32)
        piece[0, : stop - done] = text[done:stop]
        began, worked = time.perf_counter(), time.process_time()
        cache = programs.prefill(params, piece, np.array([stop - done], np.int32), cache)
        jax.block_until_ready(cache)
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
        report["pieces"].append(
            {
                "from": done,
                "to": stop,
                "seconds": seconds,
                "processor_seconds": worked,
                **memory(cache, cfg),
            }
        )
        print(piece_line(report["pieces"][-1]), flush=True)
        if stop in PREFIXES or stop == tokens:
            ms, cache = time_passes(programs, params, cache, calls, cfg)
            report["passes"].append({"prefix": stop, **ms})
            print("  ms, median (least): ", end="")
            print(*(f"{n} {a:.2f} ({b:.2f})" for n, (a, b) in ms.items()), sep=", ", flush=True)
        save_progress(progress, cache, report)
    return report


def piece_line(p: dict[str, Any]) -> str:
    """A row of the table of pieces."""
    speed, mb = (p["to"] - p["from"]) / p["seconds"], lambda name: f"{p[name] / 1e6:.2f}"
    return (
        f"| {p['to']:,} | {p['seconds']:.1f} s ({p['processor_seconds']:.1f}) | {speed:,.0f} "
        f"| {mb('kv_written')} "
        f"| {mb('kv_computed')} | {mb('flat')} | {mb('flat_computed')} | {mb('peak_rss')} |"
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Memory by part, time of a pass and of its attention, and prefill speed, by prefix length.

    Raises:
        CloverError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = require_pyplot()
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    ends = [p["to"] for p in report["pieces"]]
    mb = lambda name: [p[name] / 1e6 for p in report["pieces"]]
    left.plot(ends, mb("kv_computed"), "-", color="C0", label="KV cells, computed")
    left.plot(ends, mb("kv_written"), "o", color="C0", label="KV cells, written")
    left.plot(ends, mb("flat_computed"), "-", color="C1", label="GDN states and rings, computed")
    left.plot(ends, mb("flat"), "o", color="C1", label="GDN states and rings, array")
    left.axhline(report["weights"] / 1e6, color="grey", ls=":", label="weights")
    left.set(ylabel="MB", title="memory of one row", yscale="log")
    at = [p["prefix"] for p in report["passes"]]
    for i, (name, label) in enumerate((("preview", "preview of 32"), ("step", "AR step"))):
        for key, line, what in (
            (name, "o-", label),
            (f"{name}_attention", "s--", "attention of it, timed alone"),
        ):
            median, least = np.array([p[key] for p in report["passes"]]).T
            bars = np.stack([median - least, np.zeros_like(median)])
            middle.errorbar(at, median, bars, fmt=line, color=f"C{i + 2}", capsize=3, label=what)
    middle.set(ylabel="ms", title="one pass, median and least", yscale="log")
    centre = [(p["from"] + p["to"]) / 2 for p in report["pieces"]]
    each = lambda name: [1e3 * p[name] / (p["to"] - p["from"]) for p in report["pieces"]]
    right.plot(centre, each("seconds"), "o-", color="C4", label="clock")
    right.plot(centre, each("processor_seconds"), "s--", color="C5", label="processor, all threads")
    right.set(ylabel="ms per token", title="chunked prefill", ylim=0)
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
    for axes in (left, middle, right):
        axes.legend(fontsize=8)
        axes.set_xlabel("prefix, tokens")
        axes.grid(alpha=0.3)
    with whole_file(path) as building:
        figure.savefig(building, dpi=110, format="png")
    pyplot.close(figure)


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=CONTEXT, help=f"at most {CONTEXT}")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of one causal pass")
    parser.add_argument("--calls", type=int, default=9, help="timed calls of each pass")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "cpu")
    flags = parser.parse_args()
    if not (0 < flags.tokens <= CONTEXT and flags.chunk > 0 and flags.calls > 0):
        parser.error(f"expected 1 to {CONTEXT} tokens, and a chunk and calls of at least 1")
    progress = flags.out.with_suffix(".progress.safetensors")
    try:
        report = run(flags.tokens, flags.chunk, flags.calls, progress)
        with whole_file(flags.out.with_suffix(".json")) as building:
            building.write_text(json.dumps(report, indent=1) + "\n")
        draw(report, flags.out.with_suffix(".png"))
        progress.unlink()
    except CloverError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from the last piece")


if __name__ == "__main__":
    main()
