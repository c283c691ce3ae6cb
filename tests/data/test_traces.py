"""Traces to samples: the template's own text, loss on answers only, cuts without invented stops."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from clover_jax.data.bpe import train_bpe, write_tokenizer
from clover_jax.data.chat import render_chat
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.data.traces import Traces, read_traces, targets, truncate, truncate_all
from clover_jax.diffusion.corrupt import Example, NoiseConfig, make_batch
from clover_jax.errors import CloverError

END = "<|im_end|>"
BLOCK = 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    texts = ["<think>\n\n</think>\n\n the cat sat\n\n user assistant"] * 3
    write_tokenizer(folder, train_bpe(texts, 300), model_max_length=512)
    return Tokenizer.load(folder)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "žluť"}}, {"name": "now"}]
SEVERAL = [
    SYSTEM,
    user("sum 1 2"),
    assistant("I add.", reasoning="easy", tool_calls=[call("add", a=1, b=2)]),
    tool("3"),
    assistant(None, thinking="time?", tool_calls=[call("now"), call("add", a=3)]),
    tool("noon"),
    tool("6"),
    assistant("3, at noon", reasoning_content="done"),
    user("and 🙂?"),
    user("please"),
    assistant("no", reasoning_content="hm"),
]
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [user("a"), assistant("b")]},
    "off": {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}
    | {"enable_thinking": False},
    "system": {"messages": [SYSTEM, user("a"), assistant("the cat", reasoning="sat")]},
    "several": {"messages": SEVERAL, "tools": TOOLS, "enable_thinking": True},
    "no tools": {"messages": SEVERAL, "enable_thinking": True},
    "two in a row": {"messages": [user("a"), assistant("b"), assistant("c")]},
}


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "traces.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def pieces(tokenizer: Tokenizer, example: Example) -> list[tuple[bool, str]]:
    """(learnt, text) of the stretches of a sample."""
    found, done = [], 0
    for first, end in example.turns:
        for learnt, part in ((False, slice(done, first)), (True, slice(first, end))):
            found.append((learnt, tokenizer.decode(example.tokens[part], skip_special=False)))
        done = end
    assert done == len(example.tokens)
    return found


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_a_sample_reads_as_the_template_writes_it(tokenizer, tmp_path, chat) -> None:
    """Up to the end of the query's last answer, character for character."""
    traces = read_traces(write(tmp_path, chat), tokenizer)
    messages = chat["messages"]
    assert tokenizer.chat_template is not None
    for sample in traces.samples:
        assert messages[sample.query]["role"] == "user"
        later = range(sample.query + 1, len(messages))
        stop = next((i for i in later if messages[i]["role"] == "user"), len(messages))
        whole = render_chat(
            tokenizer.chat_template,
            messages[:stop],
            add_generation_prompt=False,
            enable_thinking=chat.get("enable_thinking"),
            tools=chat.get("tools"),
        )
        got = tokenizer.decode(sample.example.tokens, skip_special=False)
        assert got == whole.removesuffix("\n")
    answers = sum(m["role"] == "assistant" for m in messages)
    assert sum(len(s.example.turns) for s in traces.samples) == answers


def test_what_is_learnt(tokenizer, tmp_path) -> None:
    """Written out by hand: thoughts, calls and ends of turns, and none of what stands between."""
    first, second = read_traces(write(tmp_path, CHATS["no tools"]), tokenizer).samples
    system = f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\nsum 1 2{END}\n"
    opening = "<|im_start|>assistant\n<think>\n"
    assert pieces(tokenizer, first.example) == [
        (False, system + opening),
        (True, "easy\n</think>\n\nI add.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n"
               "</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>" + END),
        (False, f"\n<|im_start|>user\n<tool_response>\n3\n</tool_response>{END}\n" + opening),
        (True, "time?\n</think>\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n"
               "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n"
               "</tool_call>" + END),
        (False, "\n<|im_start|>user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\n6\n"
                f"</tool_response>{END}\n" + opening),
        (True, f"done\n</think>\n\n3, at noon{END}"),
    ]  # fmt: skip
    (_, prompt), learnt = pieces(tokenizer, second.example)
    assert learnt == (True, f"hm\n</think>\n\nno{END}")
    assert prompt.endswith(f"user\nand 🙂?{END}\n<|im_start|>user\nplease{END}\n{opening}")
    assert not any(thought in prompt for thought in ("easy", "time?", "done"))
    assert (first.line, first.query, second.line, second.query) == (1, 1, 1, 9)
    assert (first.example.sample, second.example.sample) == (0, 1)


def test_borders_are_token_borders(tokenizer, tmp_path) -> None:
    """Each turn begins and ends with tokens of its own, as a sampler writes them."""
    (sample,) = read_traces(write(tmp_path, CHATS["plain"]), tokenizer).samples
    ((first, end),) = sample.example.turns
    newline = tokenizer.encode("\n", special=True)
    assert list(sample.example.tokens[first - 1 : first]) == newline  # one token would span this
    assert list(sample.example.tokens[first : first + 1]) == newline
    assert sample.example.tokens[end - 1] == tokenizer.end_of_turn_id


def test_a_switched_off_thought_is_prompt(tokenizer, tmp_path) -> None:
    for sample in read_traces(write(tmp_path, CHATS["off"]), tokenizer).samples:
        prompt, (_, learnt) = pieces(tokenizer, sample.example)[-2:]
        assert prompt[1].endswith("<think>\n\n</think>\n\n")
        assert "think" not in learnt


def test_counts(tokenizer, tmp_path) -> None:
    greeting = [assistant("Hello"), user("a"), assistant("b"), user("c"), user("d")]
    waits = [user("a"), assistant(None, tool_calls=[call("now")]), tool("noon")]
    lines = [
        CHATS["several"] | {"id": 7},
        {"messages": greeting, "id": 8, "source": "x"},
        {"messages": waits},
    ]
    traces = read_traces(write(tmp_path, *lines), tokenizer)
    assert traces.conversations == 3
    assert [s.line for s in traces.samples] == [1, 1, 2, 3]
    assert [s.example.sample for s in traces.samples] == [0, 1, 2, 3]
    assert traces.roles == {"system": 1, "user": 7, "assistant": 7, "tool": 4}
    assert traces.offered == {"add": 1, "now": 1}
    assert traces.called == {"add": 2, "now": 2}
    assert traces.unknown == {"id": 2, "source": 1}
    assert traces.left_out == {
        "assistant messages before the first query, not learnt": 1,
        "messages after the last answer, left out": 3,
    }
    first = read_traces(write(tmp_path, *lines), tokenizer, limit=1)
    assert first.conversations == 1 and len(first.samples) == 2


BAD = {
    "no json": ("{", "not JSON"),
    "an empty line": ("", "not JSON"),
    "a list": ([1], "expected an object with messages"),
    "no messages": ({}, "messages are None"),
    "empty messages": ({"messages": []}, "at least one message"),
    "no object": ({"messages": ["a"]}, "message 0 is 'a'"),
    "no role": ({"messages": [{"content": "a"}]}, "message 0 has role None"),
    "unknown role": ({"messages": [user("a"), {"role": "bot", "content": "b"}]}, "role 'bot'"),
    "bad content": ({"messages": [{"role": "user", "content": 3}]}, "message 0 has content 3"),
    "no answer": ({"messages": [user("a")]}, "no assistant message answers"),
    "no query": ({"messages": [assistant("a")]}, "no assistant message answers"),
    "empty answer": ({"messages": [user("a"), assistant(" ")]}, r"\(assistant\) is empty"),
    "a result of no call": (
        {"messages": [user("a"), tool("b"), assistant("c")]},
        r"message 1 \(tool\) comes after user",
    ),
    "a result first": ({"messages": [tool("b")]}, r"message 0 \(tool\) comes first"),
    "a call without a name": (
        {"messages": [user("a"), assistant("", tool_calls=[{"arguments": {}}])]},
        "message 1 calls a tool of name None",
    ),
    "calls that are text": (
        {"messages": [user("a"), assistant("", tool_calls="now")]},
        "message 1 has tool_calls 'now'",
    ),
    "arguments that are a list": (
        {"messages": [user("a"), assistant("", tool_calls=[{"name": "f", "arguments": "[1]"}])]},
        r"message 1 calls f with arguments \[1\]",
    ),
    "thoughts while off": (
        {"messages": [user("a"), assistant("b", reasoning="x")], "enable_thinking": False},
        "message 1 .*enable_thinking=True",
    ),
    "thinking in words": ({**CHATS["plain"], "enable_thinking": "yes"}, "enable_thinking is 'yes'"),
    "tools that are text": ({**CHATS["plain"], "tools": "add"}, "tools are 'add'"),
    "a late system message": (
        {"messages": [user("a"), SYSTEM, assistant("b")]},
        "a system message can only be the first",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, assistant("b")]},
        "type image",
    ),
    "a stop in an answer": (
        {"messages": [user("a"), assistant(f"b{END}c")]},
        r"message 1 \(assistant\) holds the control token '<\|im_end\|>'",
    ),
    "a mask in an answer": (
        {"messages": [user("a"), assistant("b", reasoning="<|mask|>")]},
        r"holds the control token '<\|mask\|>'",
    ),
    "half a surrogate pair": (
        '{"messages": [{"role": "user", "content": "\\ud83d"}, '
        '{"role": "assistant", "content": "a"}]}',
        "not JSON|surrogate",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_bad_lines(tokenizer, tmp_path, line, message) -> None:
    """The error names file and line; a good line before does not hide it."""
    path = write(tmp_path, CHATS["plain"], line, CHATS["plain"])
    with pytest.raises(CloverError, match=message) as raised:
        read_traces(path, tokenizer)
    assert f"{path} has 1 bad of 3 lines" in str(raised.value)
    assert f"  {path}:2: " in str(raised.value)


def test_all_bad_lines_are_listed(tokenizer, tmp_path) -> None:
    path = write(tmp_path, *["{"] * 5, CHATS["plain"], *["["] * 9)
    with pytest.raises(CloverError) as raised:
        read_traces(path, tokenizer)
    head, *lines = str(raised.value).splitlines()
    assert head == f"{path} has 14 bad of 15 lines:"
    numbers = [int(line.split(":")[1]) for line in lines[:-1]]
    assert numbers == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert lines[-1] == "  and 4 more"


def test_files_that_hold_nothing(tokenizer, tmp_path) -> None:
    with pytest.raises(CloverError, match=r"empty.*expected a conversation"):
        read_traces(write(tmp_path), tokenizer)
    with pytest.raises(CloverError, match="cannot be read"):
        read_traces(tmp_path / "absent.jsonl", tokenizer)
    with pytest.raises(CloverError, match="cannot be read"):
        read_traces(tmp_path, tokenizer)


def test_the_last_line_needs_no_end(tokenizer, tmp_path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text("\r\n".join([json.dumps(CHATS["plain"])] * 2))
    assert len(read_traces(path, tokenizer).samples) == 2


def test_a_template_that_rewrites_answers(tokenizer, tmp_path) -> None:
    """Here an answer loses its text as soon as it is history: no second one continues it."""
    template = (
        "{% for m in messages %}{{ m.role }}:"
        "{{ '-' if m.role == 'assistant' and (add_generation_prompt or not loop.last) "
        "else m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    odd = dataclasses.replace(tokenizer, chat_template=template)
    path = write(tmp_path, CHATS["off"], CHATS["two in a row"])
    with pytest.raises(CloverError, match=r"1 bad of 2 (.|\n)*:2: message 2 .* does not continue"):
        read_traces(path, odd)


# --- truncation ----------------------------------------------------------------------------------

STOP, PAD = 1, 0


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Prompts and turns of random lengths; every turn ends with the only stop in it."""
    lengths = draw(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=4)
    )
    tokens, turns = [], []
    for prompt, response in lengths:
        tokens += range(100, 100 + prompt)
        turns.append((len(tokens), len(tokens) + response))
        tokens += [*range(200, 200 + response - 1), STOP]
    return Example(5, tokens, tuple(turns))


@hypothesis.given(examples(), st.integers(1, 140), st.none() | st.integers(1, 12))
def test_a_cut_invents_no_stop(example, tokens, blocks) -> None:
    """What is kept is a beginning; a turn without its stop fills its blocks; nothing more fits."""
    cut = truncate(example, block=BLOCK, tokens=tokens, blocks=blocks)
    grid = example.blocks(BLOCK)
    if cut is None:
        assert grid[0][1] > tokens
        return
    assert targets(cut) > 0 and cut.sample == example.sample
    assert len(cut.tokens) <= tokens and len(cut.blocks(BLOCK)) <= (blocks or len(grid))
    assert cut.tokens == example.tokens[: len(cut.tokens)]
    assert cut.turns[-1][1] == len(cut.tokens)  # nothing after the last thing that is learnt
    for (first, end), (first_whole, end_whole) in zip(cut.turns, example.turns, strict=False):
        assert first == first_whole and end <= end_whole
        assert cut.tokens[end - 1] == STOP or (end - first) % BLOCK == 0
    kept = cut.blocks(BLOCK)
    assert kept == grid[: len(kept)]
    if len(kept) < len(grid):  # as much as fits
        assert grid[len(kept)][1] > tokens or len(kept) == blocks
    else:
        assert cut == example
    batch = make_batch(
        [(cut,)], time=len(cut.tokens), blocks=len(kept), block=BLOCK, pad_id=PAD, seed=0, epoch=0,
        noise=NoiseConfig(),
    )  # fmt: skip
    for row in batch.block_tokens[0]:
        filled = row == PAD  # and fillers, the only pads here, stand after a stop only
        assert not filled.any() or row[filled.argmax() - 1] == STOP


def test_losses_are_counted(tokenizer) -> None:
    turns = lambda *lengths: Example(
        0,
        [*range(sum(10 + n for n in lengths))],
        tuple((10 * (i + 1) + sum(lengths[:i]), 10 * (i + 1) + sum(lengths[: i + 1]))
              for i in range(len(lengths))),
    )  # fmt: skip
    whole = [turns(8), turns(20), turns(8, 8), turns(100), turns(3, 90, 8)]
    kept, lost = truncate_all(whole, block=8, tokens=28, blocks=None)
    assert [e.turns for e in kept] == [
        ((10, 18),), ((10, 26),), ((10, 18),), ((10, 26),), ((10, 13),),
    ]  # fmt: skip
    assert lost == {
        "samples cut": 4,
        "turns left out": 1 + 2,
        "turns cut": 2,
        "target tokens left out": 4 + 8 + 84 + 98,
    }
    kept, lost = truncate_all(whole[:3], block=8, tokens=17, blocks=None)
    assert kept == []
    assert lost == {
        "samples left out: not even their first block fits": 3,
        "turns left out": 4,
        "target tokens left out": 8 + 20 + 16,
    }


def test_tokens_are_kept_small(tokenizer, tmp_path) -> None:
    traces: Traces = read_traces(write(tmp_path, CHATS["several"]), tokenizer)
    assert memoryview(traces.samples[0].example.tokens).itemsize == np.dtype(np.int32).itemsize
