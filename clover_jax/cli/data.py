"""`clover data check`: what a file of traces holds, what is learnt of it, and what is lost."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from clover_jax import checkpoint
from clover_jax.cli.commands import DataCheck
from clover_jax.cli.session import packaged_model
from clover_jax.cli.view import printable
from clover_jax.data.tokenizer import StreamDecoder, Tokenizer
from clover_jax.data.traces import Sample, Traces, read_traces, targets, truncate, truncate_all
from clover_jax.diffusion.corrupt import Example
from clover_jax.errors import CloverError

SHARES = (50, 90, 99, 100)  # per cent
FILLER = "░"
PROMPT_ENDS = 700  # characters of a long prompt that are shown from either end
ROWS = 48  # of a sample
_PROMPT, _LEARNT, _NOTE = Style(dim=True), Style(color="green"), Style(color="yellow")


def check(flags: DataCheck) -> int:
    """Prints the figures and a sample; returns the exit status."""
    for name in ("max_tokens", "limit"):
        if (value := getattr(flags, name)) is not None and value < 1:
            raise CloverError(f"--{name.replace('_', '-')} is {value}: expected at least 1")
    folder = flags.checkpoint or packaged_model()
    if not folder.is_dir():
        raise CloverError(f"{folder} is not a folder: expected a checkpoint folder")
    report = checkpoint.inspect(folder)
    cfg = report.config or report.require_loadable()
    tokenizer = Tokenizer.load(folder)
    traces = read_traces(flags.file, tokenizer, limit=flags.limit)
    tokens = flags.max_tokens or cfg.max_position_embeddings
    facts = summary(traces, block=cfg.block_length, max_tokens=tokens)
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(facts)).decode())
        return 0
    console = Console()
    for line in (f"{flags.file}:", *_lines(facts)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    shown = _first(traces.samples, block=cfg.block_length, tokens=tokens)
    if shown is not None:
        where = f"line {shown.line}, answer to message {shown.query}"
        console.print(f"\n{where}: green gets loss, {FILLER} fills its block", highlight=False)
        console.print(sample_view(shown.example, tokenizer, block=cfg.block_length))
    return 0


def summary(traces: Traces, *, block: int, max_tokens: int) -> dict[str, Any]:
    """Everything that the command says in figures, as JSON values.

    Args:
        traces: a file.
        block: block length.
        max_tokens: where samples are cut; lengths and totals are those before it.
    """
    examples = [sample.example for sample in traces.samples]
    _, lost = truncate_all(examples, block=block, tokens=max_tokens, blocks=None)
    lengths = {
        "sample tokens": [len(e.tokens) for e in examples],
        "prompt tokens": [len(e.tokens) - targets(e) for e in examples],
        "target tokens": [targets(e) for e in examples],
        "blocks": [len(e.blocks(block)) for e in examples],
    }
    return {
        "conversations": traces.conversations,
        "samples": len(examples),
        "turns": sum(len(e.turns) for e in examples),
        "tokens": sum(lengths["sample tokens"]),
        "target_tokens": sum(lengths["target tokens"]),
        "blocks": sum(lengths["blocks"]),
        "block_length": block,
        "percentiles": {name: _percentiles(values) for name, values in lengths.items()},
        "roles": dict(traces.roles),
        "tools_offered": dict(traces.offered),
        "tools_called": dict(traces.called),
        "unknown_keys": dict(traces.unknown),
        "left_out": dict(traces.left_out),
        "max_tokens": max_tokens,
        "cut": dict(lost),
    }


def _percentiles(values: Sequence[int]) -> dict[str, int]:
    found = np.percentile(values, SHARES, method="inverted_cdf")
    return {str(share): int(value) for share, value in zip(SHARES, found, strict=True)}


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    share = facts["target_tokens"] / facts["tokens"]
    yield f"{facts['conversations']:,} conversations, {facts['samples']:,} samples (one a query)"
    yield (
        f"{facts['turns']:,} turns in {facts['blocks']:,} blocks of {facts['block_length']}; "
        f"{facts['tokens']:,} tokens, {facts['target_tokens']:,} ({share:.0%}) with loss"
    )
    yield ""
    yield f"{'':<14}" + "".join(f"{f'{s} %' if s < 100 else 'most':>9}" for s in SHARES)
    for name, values in facts["percentiles"].items():
        yield f"{name:<14}" + "".join(f"{value:>9,}" for value in values.values())
    yield ""
    yield f"messages: {_counts(facts['roles'])}"
    yield f"tools offered: {_counts(facts['tools_offered'])}"
    yield f"tools called: {_counts(facts['tools_called'])}"
    if facts["unknown_keys"]:
        yield f"keys that mean nothing here, by lines: {_counts(facts['unknown_keys'])}"
    yield f"not learnt: {_counts(facts['left_out'])}"
    yield f"lost by the limit of {facts['max_tokens']:,} tokens: {_counts(facts['cut'])}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{printable(name)} {n:,}" for name, n in counts.items()) or "none"


def _first(samples: Sequence[Sample], *, block: int, tokens: int) -> Sample | None:
    """The first sample of which something is left, cut."""
    for sample in samples:
        cut = truncate(sample.example, block=block, tokens=tokens, blocks=None)
        if cut is not None:
            return sample._replace(example=cut)
    return None


def sample_view(example: Example, tokenizer: Tokenizer, *, block: int) -> Table:
    """A sample, a line per prompt piece and per block, with the filler of its last block."""
    decoder = StreamDecoder(tokenizer, skip_special=False)  # a character may cross a border
    rows: list[tuple[str, Text]] = []
    done = 0
    for number, (first, end) in enumerate(example.blocks(block), 1):
        if first > done:
            prompt = _shortened(printable(decoder.push(example.tokens[done:first])))
            rows.append(("prompt", Text(prompt, _PROMPT)))
        learnt = printable(decoder.push(example.tokens[first:end])).replace("\n", "↵")
        filler = Text(FILLER * (block - (end - first)), _PROMPT)
        rows.append((f"block {number}", Text.assemble((learnt, _LEARNT), filler)))
        done = end
    table = Table.grid(padding=(0, 1))
    half = ROWS // 2
    if len(rows) > ROWS:
        note = Text(f"... {len(rows) - ROWS} more ...", _NOTE)
        rows = [*rows[:half], ("", note), *rows[-half:]]
    for label, text in rows:
        table.add_row(Text(label, _NOTE), Text("│", _NOTE), text)
    return table


def _shortened(text: str) -> str:
    if len(text) <= 2 * PROMPT_ENDS:
        return text
    gap = f"\n... {len(text) - 2 * PROMPT_ENDS:,} more characters ...\n"
    return text[:PROMPT_ENDS] + gap + text[-PROMPT_ENDS:]
