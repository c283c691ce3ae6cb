"""What decoding costs: wall time of real answers and of single passes, interleaved in one run.

Everything is measured in rounds that visit each variant once, so that a slow moment of the machine
hits all of them; figures are medians over rounds. Nothing is compiled after the first round, which
is a warm-up that counts nowhere.
"""

import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from clover_jax.cache import DecodeCache, empty_cache
from clover_jax.diffusion.decode_state import Canvas, blank_canvas
from clover_jax.diffusion.generate import Completion, Generator, Request, compiled_prefill
from clover_jax.diffusion.passes import ModelPasses
from clover_jax.errors import CloverError
from clover_jax.eval.compilations import compilations
from clover_jax.verify.rivals import Rival

PREFILL_TOKENS = 512
PASS_REPEATS = 5  # of a single pass per round: one is too short for the clock


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to decode.

    Attributes:
        name: shown in the table.
        mode: `ar` or `block`.
        fuse_commit: a block's commit rides in the next block's first preview.
        coreset: an expert subset per block, if the model has one.
        verified: a preview drafts each block and the causal pass judges it.
    """

    name: str
    mode: Literal["ar", "block"]
    fuse_commit: bool = False
    coreset: bool = True
    verified: bool = False

    def asks(self, request: Request) -> Request:
        """The request, decoded in this way. No confidence exceeds 1: one preview a block."""
        if not self.verified:
            return request
        sampling = dataclasses.replace(request.sampling, close="verified", threshold=1.0)
        return dataclasses.replace(request, sampling=sampling)


VARIANTS = (
    Variant("ar", "ar"),
    Variant("block", "block"),
    Variant("block, fused commit", "block", fuse_commit=True),
    Variant("block, no coreset", "block", coreset=False),
    Variant("block, fused commit, no coreset", "block", fuse_commit=True, coreset=False),
    Variant("block, verified", "block", verified=True),
)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """One variant at one batch size; times are medians over rounds.

    Attributes:
        variant: its name.
        batch: rows.
        tokens: of all rows' answers together.
        first_ms: prefill and decoding until every row has its first block (AR: its first token).
        tokens_per_s: of all rows together, prefill excluded.
        forward_ms: decoding time over the forwards that ran one after the other.
        tpf: tokens of all rows over their forwards.
        tpf_previews: the same over their previews; None in AR mode.
        break_even: the TPF at which the variant is as fast as AR: its forward over AR's.
        speedup: tokens per second over AR's.
        realised: speedup over tpf, the share of the TPF that wall time shows.
    """

    variant: str
    batch: int
    tokens: int
    first_ms: float
    tokens_per_s: float
    forward_ms: float
    tpf: float
    tpf_previews: float | None
    break_even: float
    speedup: float
    realised: float


@dataclasses.dataclass(frozen=True)
class Against:
    """Another framework on the same weights, causal, batch 1; medians over the same rounds.

    Attributes:
        name: the framework.
        versions: what it says of itself.
        prefill_tokens_per_s: of a prefill of `PREFILL_TOKENS`.
        ar_tokens_per_s: of the first request's greedy answer, prefill excluded.
        prefill_ratio: our rate over its.
        ar_ratio: our rate over its.
        tokens: of that answer.
        agreeing: its tokens before the first that differs from ours.
    """

    name: str
    versions: dict[str, str]
    prefill_tokens_per_s: float
    ar_tokens_per_s: float
    prefill_ratio: float
    ar_ratio: float
    tokens: int
    agreeing: int


@dataclasses.dataclass(frozen=True)
class Report:
    """All figures of one run.

    Attributes:
        decoding: by variant and batch size.
        against: by other framework.
        pass_ms: batch size -> name of a pass -> median milliseconds.
        prefill_tokens_per_s: batch size -> tokens per second of a prefill of `PREFILL_TOKENS`.
        compilations: programs compiled after the warm-up; 0 unless something is wrong.
        peak_memory: bytes, largest so far.
        peak_memory_of: `device` where the backend counts it, else `process` (compiler included).
        rounds: that count.
    """

    decoding: tuple[Decoding, ...]
    against: tuple[Against, ...]
    pass_ms: dict[int, dict[str, float]]
    prefill_tokens_per_s: dict[int, float]
    compilations: int
    peak_memory: int
    peak_memory_of: str
    rounds: int


@dataclasses.dataclass
class _Samples:
    """What the rounds saw of one variant at one batch size."""

    first: list[float] = dataclasses.field(default_factory=list)
    decode: list[float] = dataclasses.field(default_factory=list)
    done: list[Completion] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _RivalSamples:
    """What the rounds saw of another framework; the first is its warm-up."""

    prefill: list[float] = dataclasses.field(default_factory=list)
    write: list[float] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)

    def measure(self, rival: Rival, prompt: Sequence[int], count: int, vocab_size: int) -> None:
        self.prefill.append(rival.prefill(_prefill_prompt(1, vocab_size)[0].tolist()))
        written = rival.write(prompt, count)
        self.write.append(written.seconds)
        self.ids = written.ids


def bench(
    generator: Generator,
    requests: Sequence[Request],
    *,
    batches: Sequence[int],
    rounds: int,
    rivals: Sequence[Rival] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure AR and block decoding of the same requests.

    Args:
        generator: the model.
        requests: what a batch is filled from, over and over.
        batches: batch sizes.
        rounds: that count; one more runs before them.
        rivals: other frameworks with the same weights; they need a batch size of 1 to stand beside.
        progress: called with a line about what runs.

    Raises:
        CloverError: a model without blocks, no request, numbers below 1, answers of one token, or
            rivals without a batch size of 1.
    """
    if generator.cfg.bd_gdn is None:
        raise CloverError(
            "this is an autoregressive model (config bd_gdn is null): there is nothing to compare"
        )
    if not requests or rounds < 1 or not batches or min(batches) < 1:
        raise CloverError(
            f"{len(requests)} requests, rounds {rounds}, batch sizes {list(batches)}: expected at "
            "least one request and numbers of at least 1"
        )
    if rivals and 1 not in batches:
        raise CloverError(f"batch sizes {list(batches)}: other frameworks need batch size 1 too")
    cfg = generator.cfg
    variants = [v for v in VARIANTS if v.coreset or cfg.moe.coreset is not None]
    runners = {v: _variant(generator, v) for v in variants}
    samples = {(v, b): _Samples() for b in batches for v in variants}
    passes: dict[int, dict[str, list[float]]] = {b: {} for b in batches}
    filled = {b: [requests[i % len(requests)] for i in range(b)] for b in batches}
    theirs: dict[str, _RivalSamples] = {rival.name: _RivalSamples() for rival in rivals}
    compiled = 0
    for r in range(rounds + 1):
        before = compilations()
        for b in batches:
            for v in variants:
                progress(f"round {r}/{rounds}: batch {b}, {v.name}")
                _decode(runners[v], v, filled[b], samples[v, b])
            progress(f"round {r}/{rounds}: batch {b}, single passes")
            for name, ms in _time_passes(generator, filled[b]).items():
                passes[b].setdefault(name, []).append(ms)
        for rival in rivals:
            progress(f"round {r}/{rounds}: {rival.name}")
            answer = samples[variants[0], 1].done[0].token_ids
            theirs[rival.name].measure(rival, requests[0].prompt, len(answer), cfg.vocab_size)
        compiled += compilations() - before if r else 0
    for seen in samples.values():
        del seen.first[0], seen.decode[0]
    median = lambda values: statistics.median(values[1:])
    prefill_ms = {b: median(passes[b].pop("prefill")) for b in batches}
    prefill_rate = {b: 1e3 * b * PREFILL_TOKENS / ms for b, ms in prefill_ms.items()}
    memory, kind = _peak_memory()
    return Report(
        decoding=tuple(
            _summary(v, b, samples[v, b], samples[variants[0], b])
            for b in batches
            for v in variants
        ),
        against=tuple(
            _against(rival, theirs[rival.name], samples[variants[0], 1], prefill_rate[1])
            for rival in rivals
        ),
        pass_ms={b: {name: median(ms) for name, ms in passes[b].items()} for b in batches},
        prefill_tokens_per_s=prefill_rate,
        compilations=compiled,
        peak_memory=memory,
        peak_memory_of=kind,
        rounds=rounds,
    )


def _variant(generator: Generator, variant: Variant) -> Generator:
    """The same weights, decoded in another way."""
    cfg = generator.cfg
    if not variant.coreset:
        cfg = cfg.replace(**{"moe.coreset": None})
    return generator.variant(cfg=cfg, fuse_commit=variant.fuse_commit)


def _decode(
    generator: Generator, variant: Variant, requests: Sequence[Request], seen: _Samples
) -> None:
    """Answer once whole, and once up to the first block (token), by the same compiled program."""
    requests = [variant.asks(r) for r in requests]
    seen.done = generator.complete(requests, mode=variant.mode)
    if not max(c.stats.forwards for c in seen.done):
        raise CloverError(
            f"{variant.name}: the answers took no forward pass, so there is nothing to time: allow "
            "more tokens, or take another model"
        )
    seen.decode.append(max(c.stats.tokens / c.stats.tokens_per_s for c in seen.done))
    first = 1 if variant.mode == "ar" else generator.cfg.block_length
    cut = [dataclasses.replace(r, max_tokens=min(first, r.max_tokens)) for r in requests]
    began = time.perf_counter()
    generator.complete(cut, mode=variant.mode)
    seen.first.append(time.perf_counter() - began)


def _summary(variant: Variant, batch: int, seen: _Samples, ar: _Samples) -> Decoding:
    stats = [c.stats for c in seen.done]
    tokens, forwards = sum(s.tokens for s in stats), sum(s.forwards for s in stats)
    previews = sum(s.previews for s in stats)
    # Rows advance together, so a batch runs as many forwards as its longest row.
    forward = lambda x: statistics.median(x.decode) / max(c.stats.forwards for c in x.done)
    rate = lambda x: sum(c.stats.tokens for c in x.done) / statistics.median(x.decode)
    speedup = rate(seen) / rate(ar)
    return Decoding(
        variant=variant.name,
        batch=batch,
        tokens=tokens,
        first_ms=1e3 * statistics.median(seen.first),
        tokens_per_s=rate(seen),
        forward_ms=1e3 * forward(seen),
        tpf=tokens / forwards,
        tpf_previews=tokens / previews if previews else None,
        break_even=forward(seen) / forward(ar),
        speedup=speedup,
        realised=speedup / (tokens / forwards),
    )


def _against(rival: Rival, seen: _RivalSamples, ar: _Samples, prefill_rate: float) -> Against:
    """One rival's line."""
    ours = list(ar.done[0].token_ids)
    prefill = PREFILL_TOKENS / statistics.median(seen.prefill[1:])
    rate = len(ours) / statistics.median(seen.write[1:])
    differing = [a != b for a, b in zip(ours, seen.ids, strict=True)]
    return Against(
        name=rival.name,
        versions=rival.versions,
        prefill_tokens_per_s=prefill,
        ar_tokens_per_s=rate,
        prefill_ratio=prefill_rate / prefill,
        ar_ratio=len(ours) / statistics.median(ar.decode) / rate,
        tokens=len(ours),
        agreeing=differing.index(True) if any(differing) else len(ours),
    )


def _time_passes(generator: Generator, requests: Sequence[Request]) -> dict[str, float]:
    """Milliseconds of each pass from the requests' prefixes, the sampler left out."""
    cfg, env, params = generator.cfg, generator.env, generator.params
    rows, block = len(requests), cfg.block_length
    capacity = PREFILL_TOKENS + block
    prompt = _prefill_prompt(rows, cfg.vocab_size)
    full = jnp.full((rows,), PREFILL_TOKENS, jnp.int32)
    empty = jax.block_until_ready(empty_cache(cfg, rows, capacity))
    began = time.perf_counter()
    cache = compiled_prefill(
        params, prompt, full, empty, chunk=generator.prefill_chunk, cfg=cfg, env=env
    )  # fmt: skip
    jax.block_until_ready(cache)
    out = {"prefill": 1e3 * (time.perf_counter() - began)}
    tokens = prompt[:, :block]
    canvas = blank_canvas(rows, block)
    n = jnp.full((rows,), block, jnp.int32)
    one = jnp.ones((rows,), jnp.int32)
    model = ModelPasses(cfg, env)
    timed: dict[str, Callable[[DecodeCache], tuple[DecodeCache, Any]]] = {
        "AR step": lambda c: _ar_step(params, tokens[:, :1], one, c, passes=model),
        "preview": lambda c: (c, _preview(params, canvas, n, c, passes=model)),
        "commit": lambda c: (_commit(params, tokens, n, c, passes=model), None),
        "commit + preview": lambda c: _fused(params, tokens, n, canvas, n, c, passes=model),
    }
    for name, run in timed.items():
        began = time.perf_counter()
        for _ in range(PASS_REPEATS):
            # Always from the same place: a pass must not get dearer with what was written before.
            cache, logits = run(cache._replace(length=jnp.copy(full)))  # donated
            jax.block_until_ready((cache, logits))
        out[name] = 1e3 * (time.perf_counter() - began) / PASS_REPEATS
    return out


def _prefill_prompt(rows: int, vocab_size: int) -> jax.Array:
    key = jax.random.key(0)
    return jax.random.randint(key, (rows, PREFILL_TOKENS), 0, vocab_size, jnp.int32)


def _jit(function: Any) -> Any:
    return jax.jit(function, static_argnames=("passes",), donate_argnames=("cache",))


@_jit
def _ar_step(
    params: Any, tokens: Any, n_valid: Any, cache: DecodeCache, *, passes: ModelPasses
) -> tuple[DecodeCache, Any]:
    cache = passes.commit(params, tokens, n_valid, cache)
    return cache, passes.next_logits(params, cache)


@_jit
def _commit(
    params: Any, tokens: Any, n_valid: Any, cache: DecodeCache, *, passes: ModelPasses
) -> DecodeCache:
    return passes.commit(params, tokens, n_valid, cache)


def _preview_pass(
    params: Any, canvas: Canvas, n_valid: Any, cache: DecodeCache, *, passes: ModelPasses
) -> Any:
    return passes.preview(params, canvas, n_valid, cache, jnp.int32(0))[0]


_preview = jax.jit(_preview_pass, static_argnames=("passes",))


@_jit
def _fused(
    params: Any, tokens: Any, n_commit: Any, canvas: Canvas, n_valid: Any, cache: DecodeCache,
    *, passes: ModelPasses,
) -> tuple[DecodeCache, Any]:  # fmt: skip
    step = jnp.int32(0)
    cache, logits, _ = passes.commit_and_preview(
        params, tokens, n_commit, canvas, n_valid, cache, step
    )
    return cache, logits


def _peak_memory() -> tuple[int, str]:
    counted = jax.local_devices()[0].memory_stats()
    if counted and "peak_bytes_in_use" in counted:
        return counted["peak_bytes_in_use"], "device"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"
