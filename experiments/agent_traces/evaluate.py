"""Share of traces that a model solves: `python experiments/agent_traces/evaluate.py [DIR ...]`.

A trace is solved if every assistant turn is right: the same calls, character for character as the
chat template writes them, and the same final answer. Thoughts are free. After a right call the
model gets the results of the trace; the first wrong turn ends it.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from clover_jax import checkpoint
from clover_jax.cli.session import packaged_model
from clover_jax.data.chat import render_turn, split_thinking, thinking_state
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env

HERE = Path(__file__).parent
TURNS = 2  # assistant messages of a trace: the calls, and the answer
BATCH = 25
MAX_TOKENS = 160


def solved(
    generator: Generator, traces: Sequence[dict[str, Any]], mode: Literal["block", "ar"]
) -> list[int]:
    """Traces that are right up to and including assistant turn 0, turn 1, ..."""
    counts: list[int] = []
    right = list(traces)
    for turn in range(TURNS):
        parts = [right[i : i + BATCH] for i in range(0, len(right), BATCH)]
        right = [trace for part in parts for trace in _right(generator, part, turn, mode)]
        counts.append(len(right))
    return counts


def _right(
    generator: Generator, traces: Sequence[dict[str, Any]], turn: int, mode: Literal["block", "ar"]
) -> list[dict[str, Any]]:
    """The traces of which the model's assistant turn `turn` is the reference's."""
    tokenizer = generator.tokenizer
    assert tokenizer is not None
    wanted, requests = [], []
    for trace in traces:
        prompt, response = render_turn(
            tokenizer,
            trace["messages"],
            _turns(trace)[turn],
            tools=trace.get("tools"),
            enable_thinking=trace["enable_thinking"],
        )
        ids = tokenizer.encode(prompt, special=True)
        opened = thinking_state(tokenizer, ids)
        end = tokenizer.decode([tokenizer.end_of_turn_id], skip_special=False)
        wanted.append((opened, split_thinking(response.removesuffix(end), opened=opened)[1]))
        requests.append(Request(prompt=tuple(ids), max_tokens=MAX_TOKENS, sampling=SamplerConfig()))
    padded = [*requests, *[requests[-1]] * (BATCH - len(requests))]
    completions = generator.complete(padded, mode=mode)
    return [
        trace
        for trace, (opened, want), got in zip(traces, wanted, completions, strict=False)
        if split_thinking(got.text or "", opened=opened)[1].strip() == want.strip()
    ]


def _turns(trace: dict[str, Any]) -> list[int]:
    return [i for i, m in enumerate(trace["messages"]) if m["role"] == "assistant"]


def main() -> None:
    """Print a line per model and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="*", type=Path, default=[packaged_model()])
    parser.add_argument("--file", type=Path, default=HERE / "held_out.jsonl")
    parser.add_argument("--mode", nargs="*", choices=("ar", "block"), default=("ar", "block"))
    flags = parser.parse_args()
    traces = [json.loads(line) for line in flags.file.read_text().splitlines()]
    for folder in flags.folder:
        cfg, params, _ = checkpoint.load(folder)
        generator = Generator(cfg, params, tokenizer=Tokenizer.load(folder), env=Env())
        for mode in flags.mode:
            calls, whole = solved(generator, traces, mode)
            print(f"{folder} {mode}: {whole} of {len(traces)} solved, {calls} with right calls")


if __name__ == "__main__":
    main()
