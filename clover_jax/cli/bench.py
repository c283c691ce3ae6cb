"""`clover bench`: what a token costs in either mode."""

import dataclasses
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import msgspec

from clover_jax import checkpoint, presets
from clover_jax.cli.commands import Bench
from clover_jax.cli.flags import ORACLE_PYTHON
from clover_jax.cli.session import Session, open_session, packaged_model
from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.diffusion.generate import Request
from clover_jax.errors import CloverError
from clover_jax.eval.bench import PREFILL_TOKENS, Decoding, Report
from clover_jax.eval.bench import bench as measure
from clover_jax.model.transformer import param_specs
from clover_jax.params import initialise
from clover_jax.verify.rivals import cores, opened

PROMPTS = 8
MAX_TOKENS = 96

HEADER = (
    "| variant | batch | first block | tokens/s | forward | TPF | TPF previews | break-even TPF "
    "| speed-up | of TPF |\n|---|---|---|---|---|---|---|---|---|---|"
)


def bench(flags: Bench) -> int:
    """Prints tables of medians, or one JSON object; returns the exit status."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    with _folder(flags) as folder:
        session = open_session(dataclasses.replace(flags, checkpoint=folder))
        requests = _requests(session, flags)
        longest = max(PREFILL_TOKENS, max(len(r.prompt) + r.max_tokens for r in requests))
        python = flags.oracle_python or ORACLE_PYTHON
        with opened(
            tuple(dict.fromkeys(flags.against)),
            folder,
            oracle_python=python,
            threads=cores(),
            capacity=longest,
            norms=flags.norms,
        ) as rivals:
            report = measure(
                session.generator,
                requests,
                batches=flags.batch or (1, 8),
                rounds=flags.rounds,
                rivals=rivals,
                progress=lambda line: print(
                    clear + line, end="" if clear else "\n", file=sys.stderr
                ),
            )
    print(clear, end="", file=sys.stderr)
    if flags.json:
        print(msgspec.json.encode(dataclasses.asdict(report)).decode())
    else:
        print("\n".join(_lines(report)))
    return 0


@contextmanager
def _folder(flags: Bench) -> Iterator[Path]:
    """The checkpoint; of a preset, one with random weights that is removed again."""
    if flags.preset is None:
        yield flags.checkpoint or packaged_model()
        return
    if flags.checkpoint is not None:
        raise CloverError("--checkpoint and --preset are both given: choose one")
    cfg = presets.named(flags.preset).replace(dtype="float32")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / flags.preset
        checkpoint.save(folder, cfg, initialise(param_specs(cfg), jax.random.key(flags.seed)))
        yield folder


def _requests(session: Session, flags: Bench) -> list[Request]:
    """Held-out problems, one family after the other."""
    limit = flags.max_tokens or MAX_TOKENS
    tokenizer = session.tokenizer
    if tokenizer is None:
        rng = random.Random(0)
        size = session.generator.cfg.vocab_size
        prompts = [[rng.randrange(size) for _ in range(32)] for _ in range(PROMPTS)]
    else:
        families = [tasks.eval_set(name, "test", PROMPTS) for name in tasks.SCRATCHPAD_TASKS]
        items = [families[i % len(families)][i // len(families)] for i in range(PROMPTS)]
        prompts = [
            tokenize_prompt(
                tokenizer, tasks.messages(item), enable_thinking=not flags.no_thinking
            )
            for item in items
        ]  # fmt: skip
    return [
        Request(prompt=tuple(p), max_tokens=limit, sampling=session.sampling, seed=flags.seed)
        for p in prompts
    ]


def _lines(report: Report) -> list[str]:
    lines = [HEADER, *(_row(d) for d in report.decoding), ""]
    for batch, passes in report.pass_ms.items():
        base = passes["AR step"]
        shown = ", ".join(f"{name} {ms:.2f} ms ({ms / base:.1f}x)" for name, ms in passes.items())
        rate = report.prefill_tokens_per_s[batch]
        lines.append(f"single passes, batch {batch}: {shown}; prefill {rate:.0f} tokens/s")
    for a in report.against:
        versions = ", ".join(f"{name} {version}" for name, version in a.versions.items())
        lines.append(
            f"{a.name} ({versions}), same weights: prefill {a.prefill_tokens_per_s:.0f} tokens/s "
            f"(ours {a.prefill_ratio:.2f}x), AR {a.ar_tokens_per_s:.0f} tokens/s "
            f"(ours {a.ar_ratio:.2f}x), {a.agreeing} of {a.tokens} tokens as ours"
        )
    lines.append(
        f"peak memory of the {report.peak_memory_of} {report.peak_memory / 2**20:.0f} MiB; "
        f"{report.compilations} compilations after the warm-up; medians of {report.rounds} rounds"
    )
    return lines


def _row(d: Decoding) -> str:
    previews = "-" if d.tpf_previews is None else f"{d.tpf_previews:.2f}"
    return (
        f"| {d.variant} | {d.batch} | {d.first_ms:.1f} ms | {d.tokens_per_s:.0f} "
        f"| {d.forward_ms:.2f} ms | {d.tpf:.2f} | {previews} | {d.break_even:.2f} "
        f"| {d.speedup:.2f} | {100 * d.realised:.0f} % |"
    )
