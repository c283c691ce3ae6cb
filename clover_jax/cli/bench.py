"""`clover bench`: what a token costs in either mode."""

import dataclasses
import random
import sys

import msgspec

from clover_jax.cli.commands import Bench
from clover_jax.cli.session import Session, open_session
from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.diffusion.generate import Request
from clover_jax.eval.bench import Decoding, Report
from clover_jax.eval.bench import bench as measure

PROMPTS = 8
MAX_TOKENS = 96

HEADER = (
    "| variant | batch | first block | tokens/s | forward | TPF | TPF previews | break-even TPF "
    "| speed-up | of TPF |\n|---|---|---|---|---|---|---|---|---|---|"
)


def bench(flags: Bench) -> int:
    """Prints tables of medians, or one JSON object; returns the exit status."""
    session = open_session(flags)
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    report = measure(
        session.generator,
        _requests(session, flags),
        batches=flags.batch or (1, 8),
        rounds=flags.rounds,
        progress=lambda line: print(clear + line, end="" if clear else "\n", file=sys.stderr),
    )
    print(clear, end="", file=sys.stderr)
    if flags.json:
        print(msgspec.json.encode(dataclasses.asdict(report)).decode())
    else:
        print("\n".join(_lines(report)))
    return 0


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
