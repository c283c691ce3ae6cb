"""Which traces count as solved, by a model that answers from a script."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clover_jax.cli.session import packaged_model
from clover_jax.data.chat import render_turn
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import Generator
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.errors import CloverError
from clover_jax.eval.held_out import wilson
from clover_jax.eval.traces import solve_traces

CALL = {"name": "stock", "arguments": {"item": "ropes"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, thoughts: str = "", call: bool = False) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "reasoning_content": thoughts}
    return message | ({"tool_calls": [{"function": CALL}]} if call else {})


def trace(question: str, *, count: str) -> dict[str, Any]:
    """A call, its result, and an answer after a thought."""
    tool = {"role": "tool", "content": count}
    answer = says(count, f"there are {count}")
    messages = [user(question), says("", call=True), tool, answer]
    return {"messages": messages, "enable_thinking": True}


TRACES = [
    trace("ropes?", count="7"),
    trace("how many cords?", count="8"),
    {"messages": [user("hi"), says("hello")], "enable_thinking": False},
    trace("got ropes?", count="9"),
    {"messages": [user("bye"), says("bye")], "enable_thinking": False},
]


class Scripted(Generator):
    """Answers each known prompt with a text, 10 tokens in 4 forwards."""

    def __init__(self, tokenizer: Tokenizer | None, answers: dict[str, str]) -> None:
        self.tokenizer, self.answers, self.sizes = tokenizer, answers, []

    def complete(self, requests, *, mode):
        self.sizes.append(len(requests))
        prompts = [self.tokenizer.decode(list(r.prompt), skip_special=False) for r in requests]
        stats = SimpleNamespace(tokens=10, forwards=4)
        return [SimpleNamespace(text=self.answers[p], stats=stats) for p in prompts]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(packaged_model())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "held_out.jsonl"
    file.write_text("".join(json.dumps(x) + "\n" for x in TRACES))
    return file


def script(tokenizer: Tokenizer) -> dict[str, str]:
    """Every turn's own text, by its prompt."""
    found = {}
    for x in TRACES:
        for i, message in enumerate(x["messages"]):
            if message["role"] == "assistant":
                thinking = x["enable_thinking"]
                prompt, response = render_turn(
                    tokenizer, x["messages"], i, enable_thinking=thinking
                )
                found[prompt] = response.removesuffix("<|im_end|>")
    return found


def solve(generator: Generator, path: Path, batch: int = 2):
    return solve_traces(
        generator, path, mode="block", sampling=SamplerConfig(), max_tokens=50, batch=batch
    )


def test_the_true_turns_solve_all(tokenizer, path):
    generator = Scripted(tokenizer, script(tokenizer))
    got = solve(generator, path)
    assert (got.mode, got.n, got.right, got.solved) == ("block", 5, (5, 3), 1.0)
    assert (got.low, got.high) == wilson(5, 5)
    assert got.tpf == 2.5
    assert generator.sizes == [2] * 5  # 5 first turns, 3 second ones; short parts are filled up


def test_thoughts_are_free_and_nothing_else(tokenizer, path):
    """Other thoughts still solve a trace; a wrong answer and a wrong call end theirs."""
    answers = script(tokenizer)
    for prompt, text in answers.items():
        if "there are 7" in text:
            answers[prompt] = text.replace("there are 7", "seven it is")
        if "there are 8" in text:
            answers[prompt] = text.replace("</think>\n\n8", "</think>\n\n80")
        if "got ropes?" in prompt and "tool_response" not in prompt:
            answers[prompt] = text.replace("ropes", "rope")
        if "hi<" in prompt:
            answers[prompt] = "hello there"
    assert len(set(answers.items()) - set(script(tokenizer).items())) == 4
    got = solve(Scripted(tokenizer, answers), path)
    assert (got.right, got.solved) == ((3, 1), 0.4)


def test_what_is_refused(tokenizer, path):
    with pytest.raises(CloverError, match="tokenizer"):
        solve(Scripted(None, {}), path)
    path.write_text("{}\n")
    with pytest.raises(CloverError, match=r"held_out\.jsonl:1"):
        solve(Scripted(tokenizer, {}), path)
