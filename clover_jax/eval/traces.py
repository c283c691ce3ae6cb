"""Share of held-out traces that a model solves.

A trace is solved if every assistant turn is right: the same calls, character for character as the
chat template writes them, and the same answer. Thoughts are free. After a right turn the model is
given what the trace has next, and a wrong turn ends the trace.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import msgspec

from clover_jax.data.chat import render_turn, split_thinking, thinking_state
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.data.traces import read_traces
from clover_jax.diffusion.generate import Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.errors import CloverError
from clover_jax.eval.held_out import wilson


@dataclasses.dataclass(frozen=True)
class TraceResult:
    """One file in one mode.

    Attributes:
        mode: `block` or `ar`.
        n: traces.
        right: traces that are right up to and including assistant turn 0, turn 1, ...
        solved: share that is right to its end.
        low: lower end of the 95 % Wilson interval of `solved`.
        high: its upper end.
        tpf: all tokens over all forwards.
    """

    mode: str
    n: int
    right: tuple[int, ...]
    solved: float
    low: float
    high: float
    tpf: float


def solve_traces(
    generator: Generator,
    path: Path,
    *,
    mode: Literal["block", "ar"],
    sampling: SamplerConfig,
    max_tokens: int,
    batch: int,
) -> TraceResult:
    """Answer every assistant turn of a file's traces, from the true history before it.

    Args:
        generator: the model.
        path: JSONL, see `data/traces.py`.
        mode: `block` or `ar`.
        sampling: threshold and the like.
        max_tokens: longer turns are cut, and then wrong.
        batch: turns answered together.

    Raises:
        CloverError: no tokenizer, a bad line, or no trace.
    """
    tokenizer = generator.tokenizer
    if tokenizer is None:
        raise CloverError("traces need a tokenizer, and this folder has none")
    if not read_traces(path, tokenizer).samples:
        raise CloverError(f"{path} has no trace with an assistant's turn")
    traces = [msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line.strip()]
    alive, right, solved, tokens, forwards = list(traces), [], 0, 0, 0
    for turn in range(max(len(_turns(trace)) for trace in traces)):
        passed = []
        for start in range(0, len(alive), batch):
            part = alive[start : start + batch]
            asked = [_ask(tokenizer, trace, turn, sampling, max_tokens) for trace in part]
            requests = [request for request, _ in asked]
            # A short last part is filled up, so that one compiled program serves all of them.
            requests += [requests[-1]] * (batch - len(part))
            completions = generator.complete(requests, mode=mode)
            for trace, (request, want), got in zip(part, asked, completions, strict=False):
                tokens, forwards = tokens + got.stats.tokens, forwards + got.stats.forwards
                if _said(tokenizer, request, got.text or "") == want:
                    passed.append(trace)
        right.append(len(passed))
        alive = [trace for trace in passed if len(_turns(trace)) > turn + 1]
        solved += len(passed) - len(alive)
        if not alive:
            break
    low, high = wilson(solved, len(traces))
    return TraceResult(
        mode, len(traces), tuple(right), solved / len(traces), low, high, tokens / max(forwards, 1)
    )


def _ask(
    tokenizer: Tokenizer, trace: dict[str, Any], turn: int, sampling: SamplerConfig, limit: int
) -> tuple[Request, str]:
    """The request for a trace's assistant turn, and what it has to say after its thoughts."""
    prompt, response = render_turn(
        tokenizer,
        trace["messages"],
        _turns(trace)[turn],
        tools=trace.get("tools"),
        enable_thinking=trace.get("enable_thinking"),
    )
    request = Request(
        prompt=tuple(tokenizer.encode(prompt, special=True)), max_tokens=limit, sampling=sampling
    )
    end = tokenizer.decode([tokenizer.end_of_turn_id], skip_special=False)
    return request, _said(tokenizer, request, response.removesuffix(end))


def _said(tokenizer: Tokenizer, request: Request, text: str) -> str:
    opened = thinking_state(tokenizer, request.prompt)
    return split_thinking(text, opened=opened)[1].strip()


def _turns(trace: dict[str, Any]) -> list[int]:
    return [i for i, m in enumerate(trace["messages"]) if m["role"] == "assistant"]
