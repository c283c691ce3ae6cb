"""The files of `experiments/agent_traces`: reproducible, short, right, and kept apart."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from clover_jax.cli.session import packaged_model
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.data.traces import read_traces

HERE = Path(__file__).parents[2] / "experiments" / "agent_traces"
FILES = {"train.jsonl": 200, "held_out.jsonl": 100}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def problem(trace: dict[str, Any]) -> tuple[str, ...]:
    """The question and what the tool said."""
    return tuple(m["content"] for m in trace["messages"] if m["role"] in ("user", "tool"))


def test_the_generator_writes_these_files(tmp_path, monkeypatch) -> None:
    spec = importlib.util.spec_from_file_location("make_traces", HERE / "make_traces.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "make_traces.py"))
    module.main()
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_samples_are_short(name) -> None:
    traces = read_traces(HERE / name, Tokenizer.load(packaged_model()))
    assert len(traces.samples) == traces.conversations == FILES[name]
    assert max(len(s.example.tokens) for s in traces.samples) <= 176
    assert max(len(s.example.blocks(32)) for s in traces.samples) <= 5
    assert traces.left_out == traces.unknown == {}


def test_no_held_out_problem_is_trained_on() -> None:
    problems = [problem(trace) for name in FILES for trace in lines(name)]
    assert len(set(problems)) == sum(FILES.values())


@pytest.mark.parametrize("name", FILES)
def test_answers_are_right(name) -> None:
    """Computed here from the question and the tool's results alone."""
    for trace in lines(name):
        question, asked, *results, answer = trace["messages"]
        items = [call["function"]["arguments"]["item"] for call in asked["tool_calls"]]
        assert items == re.findall(r"\b([a-z]+s)\b(?= and| are)", question["content"])
        have = [m["content"] for m in results]
        change = int((re.findall(r"\d+", question["content"]) or ["0"])[0])
        change = -change if "take" in question["content"] else change
        if have == ["none"]:
            assert answer["content"] == f"There are no {items[0]}."
        else:
            assert answer["content"] == str(sum(map(int, have)) + change)
            assert answer["reasoning_content"].endswith(f" = {answer['content']}")
