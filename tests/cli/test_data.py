"""`clover data check`: figures of a file, one sample with its loss, bad files."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clover_jax.cli.data import FILLER, sample_view
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import Example
from tests.cli.conftest import Clover, config

CALL = {"type": "function", "function": {"name": "stock", "arguments": {"item": "ants"}}}
CHAT = {
    "messages": [
        {"role": "user", "content": "ants?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "two ants \x1b[2J"},
        {"role": "user", "content": "cats?"},
        {"role": "assistant", "content": "three cats " * 40},
        {"role": "user", "content": "thanks"},
    ],
    "enable_thinking": False,
    "source": "shop",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text(f"{json.dumps(CHAT)}\n" * 3)
    return path


def facts(clover: Clover, model: Path, file: Path, *flags: object) -> dict[str, Any]:
    ran = clover("data", "check", file, "--checkpoint", model, "--json", *flags)
    assert (ran.status, ran.err) == (0, "")
    return json.loads(ran.out)


def test_figures(clover: Clover, model: Path, file: Path) -> None:
    """Against the tokenizer's own counts of the texts, written out by hand."""
    found = facts(clover, model, file)
    tokenizer, block = Tokenizer.load(model), config().block_length
    count = lambda text: len(tokenizer.encode(text, special=True))
    call = "<tool_call>\n<function=stock>\n<parameter=item>\nants\n</parameter>\n</function>\n"
    learnt = [
        count(call + "</tool_call><|im_end|>"),
        count("two ants \x1b[2J<|im_end|>"),
        count(("three cats " * 40).strip() + "<|im_end|>"),
    ]
    blocks = [-(-n // block) for n in learnt]
    assert (found["conversations"], found["samples"], found["turns"]) == (3, 6, 9)
    assert (found["target_tokens"], found["blocks"]) == (3 * sum(learnt), 3 * sum(blocks))
    assert found["block_length"] == block
    assert found["percentiles"]["blocks"]["100"] == max(blocks[0] + blocks[1], blocks[2])
    assert found["percentiles"]["target tokens"]["50"] == min(learnt[0] + learnt[1], learnt[2])
    assert found["roles"] == {"user": 9, "assistant": 9, "tool": 3}
    assert (found["tools_offered"], found["tools_called"]) == ({}, {"stock": 3})
    assert found["unknown_keys"] == {"source": 3}
    assert found["left_out"] == {"messages after the last answer, left out": 3}
    assert found["max_tokens"] == config().max_position_embeddings and found["cut"] == {}


def test_limits(clover: Clover, model: Path, file: Path) -> None:
    whole = facts(clover, model, file, "--limit", 1)
    assert (whole["conversations"], whole["samples"]) == (1, 2)
    longest = whole["percentiles"]["sample tokens"]["100"]
    assert facts(clover, model, file, "--max-tokens", longest)["cut"] == {}
    cut = facts(clover, model, file, "--max-tokens", longest - 1)["cut"]
    assert cut["samples cut"] == cut["turns cut"] == 3
    assert 0 < cut["target tokens left out"] <= 3 * config().block_length
    few = facts(clover, model, file, "--max-tokens", 1)["cut"]
    assert few["samples left out: not even their first block fits"] == 6


def test_text_in_a_pipe(clover: Clover, model: Path, file: Path) -> None:
    """Every figure, then one sample; nothing that a terminal would obey."""
    ran = clover("data", "check", file, "--checkpoint", model)
    assert (ran.status, ran.err) == (0, "")
    assert "\x1b" not in ran.out
    head, sample = ran.out.split("\nline 1, answer to message 0")
    for fragment in (
        "3 conversations, 6 samples", "9 turns", "sample tokens", "messages: user 9, assistant 9",
        "tools called: stock 3", "source 3", "not learnt: messages after the last answer",
        "lost by the limit",
    ):  # fmt: skip
        assert fragment in head
    assert "ants?" in sample and "block 1" in sample and "two ants ·[2J" in sample
    assert FILLER in sample


def test_nothing_is_left_to_show(clover: Clover, model: Path, file: Path) -> None:
    ran = clover("data", "check", file, "--checkpoint", model, "--max-tokens", 1)
    assert ran.status == 0 and "not even their first block fits 6" in ran.out
    assert "block 1" not in ran.out


def test_colours_say_what_gets_loss(model: Path) -> None:
    """Green is the turns' text and nothing else, a line per block, the last one filled up."""
    tokenizer = Tokenizer.load(model)
    words = ["Q" * 3, "a" * 10, "R" * 2, "b" * 3]
    tokens, turns = [], []
    for i, word in enumerate(words):
        ids = tokenizer.encode(word, special=False)
        assert len(ids) == len(word)  # so that block borders are known
        if i % 2:
            turns.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
    view = sample_view(Example(0, tokens, tuple(turns)), tokenizer, block=4)
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="standard", width=60).print(view)
    green = [part.split("\x1b[0m")[0] for part in out.getvalue().split("\x1b[32m")[1:]]
    assert green == ["aaaa", "aaaa", "aa", "bbb"]
    plain = io.StringIO()
    Console(file=plain, width=60).print(view)
    assert [line.split() for line in plain.getvalue().splitlines()] == [
        ["prompt", "│", "QQQ"],
        ["block", "1", "│", "aaaa"],
        ["block", "2", "│", "aaaa"],
        ["block", "3", "│", "aa" + 2 * FILLER],
        ["prompt", "│", "RR"],
        ["block", "4", "│", "bbb" + FILLER],
    ]


def test_long_samples_are_shortened(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    tokens = tokenizer.encode("Q" * 5000 + "a" * 400, special=False)
    first = len(tokenizer.encode("Q" * 5000, special=False))
    out = io.StringIO()
    view = sample_view(Example(0, tokens, ((first, len(tokens)),)), tokenizer, block=4)
    Console(file=out, width=100).print(view)
    assert "more characters" in out.getvalue() and "more ..." in out.getvalue()
    assert len(out.getvalue().splitlines()) < 100


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--limit", "-1"], "--limit is -1"),
        (["--checkpoint", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_wrong_flags(clover: Clover, file: Path, arguments: list[str], fragment: str) -> None:
    ran = clover("data", "check", file, *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and fragment in ran.err


def test_bad_files(clover: Clover, model: Path, file: Path) -> None:
    """All bad lines, one a line, up to ten; no traceback."""
    file.write_text(f"{json.dumps(CHAT)}\n" + "{}\n" * 12)
    ran = clover("data", "check", file, "--checkpoint", model)
    assert (ran.status, ran.out) == (2, "")
    head, *lines = ran.err.splitlines()
    assert head == f"error: {file} has 12 bad of 13 lines:"
    assert [line.split(": ")[0] for line in lines[:10]] == [f"  {file}:{i}" for i in range(2, 12)]
    assert lines[10:] == ["  and 2 more"]
    ran = clover("data", "check", file.with_name("absent"), "--checkpoint", model)
    assert ran.status == 2 and "cannot be read" in ran.err
