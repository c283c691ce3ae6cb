"""Fine-tuning samples from chats and agent traces in a JSONL file, one conversation a line:

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...], "enable_thinking": true}

Roles are system, user, assistant and tool; calls are `tool_calls` and thoughts `reasoning_content`
of an assistant message, in any spelling that `data/chat.py` reads. `tools` and `enable_thinking` go
to the checkpoint's chat template, and may be left out.

One sample per user query: templates drop the thoughts of earlier queries, so a conversation is not
one text. A sample is the conversation up to the end of the query's answer, which is one assistant
message or several with tool results between. Only those are learnt, each with its end of turn;
earlier ones are prompt. Every text between two borders is tokenised apart, as generation has it.
"""

import array
import collections
import dataclasses
import hashlib
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from clover_jax.data.chat import checked_messages, render_turn
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import Example
from clover_jax.errors import CloverError

ROLES = ("system", "user", "assistant", "tool")
SHOWN = 10  # bad lines that an error lists

Counts = collections.Counter[str]


class Sample(NamedTuple):
    """One query and its answer."""

    line: int  # of the file, from 1
    query: int  # index of the user message
    example: Example


@dataclasses.dataclass(frozen=True)
class Traces:
    """A file, read and tokenised.

    Attributes:
        samples: in the file's order; `example.sample` counts them.
        sha256: of the file.
        conversations: lines.
        roles: messages by role.
        offered: lines by tool that their `tools` offer.
        called: calls by tool.
        left_out: messages that no sample learns, by reason.
        unknown: lines by a key that means nothing here.
    """

    samples: tuple[Sample, ...]
    sha256: str
    conversations: int
    roles: Counts
    offered: Counts
    called: Counts
    left_out: Counts
    unknown: Counts


class _Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    tools: Any
    enable_thinking: bool | None
    unknown: list[str]


def read_traces(path: Path, tokenizer: Tokenizer, *, limit: int | None = None) -> Traces:
    """Every sample of a file, or of its first `limit` lines.

    Raises:
        CloverError: no such file, or bad lines, of which the first ten are listed.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CloverError(f"{path} cannot be read: {error}") from None
    lines = content.removesuffix(b"\n").split(b"\n")[:limit] if content else []
    samples: list[Sample] = []
    wrong: list[str] = []
    roles, offered, called, left_out, unknown = (Counts() for _ in range(5))
    for number, line in enumerate(lines, 1):
        try:
            conversation = _conversation(line)
            for query, answers in _answers(conversation.messages, left_out):
                example = _example(tokenizer, conversation, answers, len(samples))
                samples.append(Sample(number, query, example))
        except CloverError as error:
            wrong.append(f"{path}:{number}: {error}")
            continue
        unknown.update(conversation.unknown)
        roles.update(m["role"] for m in conversation.messages)
        offered.update(str(_function(t).get("name")) for t in conversation.tools or [])
        called.update(f["name"] for m in conversation.messages for f in _calls(m))
    if wrong:
        more = [f"  and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        shown = "\n".join([f"  {line}" for line in wrong[:SHOWN]] + more)
        raise CloverError(f"{path} has {len(wrong)} bad of {len(lines)} lines:\n{shown}")
    if not samples:
        raise CloverError(f"{path} is empty: expected a conversation on each line")
    sha256 = hashlib.sha256(content).hexdigest()
    return Traces(
        samples=tuple(samples),
        sha256=sha256,
        conversations=len(lines),
        roles=roles,
        offered=offered,
        called=called,
        left_out=+left_out,
        unknown=unknown,
    )


def truncate(example: Example, *, block: int, tokens: int, blocks: int | None) -> Example | None:
    """The sample without the blocks that do not fit, or None if not even the first one does.

    Blocks are kept or left out whole. A turn that loses some thus ends on its grid, without a stop
    and without a block that pads would fill: the model never learns to end there.

    Args:
        example: which ends with a turn.
        block: block length.
        tokens: most tokens of the sample.
        blocks: most blocks; None for any number.
    """
    kept = [end for _, end in example.blocks(block) if end <= tokens][:blocks]
    if not kept:
        return None
    turns = tuple((first, min(end, kept[-1])) for first, end in example.turns if first < kept[-1])
    return example._replace(tokens=example.tokens[: kept[-1]], turns=turns)


def truncate_all(
    examples: Iterable[Example], *, block: int, tokens: int, blocks: int | None
) -> tuple[list[Example], Counts]:
    """`truncate` of each, without those of which nothing is left, and what was lost, by reason."""
    kept: list[Example] = []
    lost = Counts()
    for whole in examples:
        cut = truncate(whole, block=block, tokens=tokens, blocks=blocks)
        if cut is None:
            lost["samples left out: not even their first block fits"] += 1
            lost["turns left out"] += len(whole.turns)
            lost["target tokens left out"] += targets(whole)
            continue
        kept.append(cut)
        if len(cut.tokens) < len(whole.tokens):
            lost["samples cut"] += 1
            lost["turns left out"] += len(whole.turns) - len(cut.turns)
            lost["turns cut"] += cut.turns[-1] != whole.turns[len(cut.turns) - 1]
            lost["target tokens left out"] += targets(whole) - targets(cut)
    return kept, +lost


def targets(example: Example) -> int:
    """Tokens that are learnt."""
    return sum(end - first for first, end in example.turns)


def _conversation(line: bytes) -> _Conversation:
    """A line, checked as far as it can be without a template."""
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CloverError(f"not JSON ({error}): expected an object with messages") from None
    if not isinstance(fields, dict):
        raise CloverError(f"{reprlib.repr(fields)}: expected an object with messages")
    thinking = fields.get("enable_thinking")
    if not (thinking is None or isinstance(thinking, bool)):
        raise CloverError(f"enable_thinking is {reprlib.repr(thinking)}: expected true or false")
    messages = checked_messages(fields.get("messages"))
    for i, message in enumerate(messages):
        _check_message(i, message, None if i == 0 else messages[i - 1]["role"])
    known = {"messages", "tools", "enable_thinking"}
    unknown = [key for key in fields if key not in known]
    return _Conversation(messages, fields.get("tools"), thinking, unknown)


def _check_message(i: int, message: dict[str, Any], previous: str | None) -> None:
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise CloverError(f"message {i} has role {role!r}: expected one of {', '.join(ROLES)}")
    if role == "tool" and previous not in ("assistant", "tool"):
        raise CloverError(
            f"message {i} (tool) comes {f'after {previous}' if previous else 'first'}: expected it "
            "after the assistant message that calls the tool, or after another tool message"
        )
    said = content.strip() if isinstance(content, str) else content
    if role == "assistant" and not (
        said or message.get("tool_calls") or message.get("reasoning_content")
    ):
        raise CloverError(
            f"message {i} (assistant) is empty: expected content, tool_calls or reasoning_content"
        )
    for function in _calls(message):
        name, arguments = function.get("name"), function.get("arguments")
        if not (isinstance(name, str) and name):
            raise CloverError(f"message {i} calls a tool of name {name!r}: expected a text")
        if not (arguments is None or isinstance(arguments, dict)):
            raise CloverError(
                f"message {i} calls {name} with arguments {reprlib.repr(arguments)}: expected an "
                "object"
            )


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [_function(call) for call in message.get("tool_calls") or []]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """What a call or a schema says of its function, with or without OpenAI's wrapping."""
    inner = tool.get("function")
    return inner if isinstance(inner, dict) else tool


def _answers(messages: Sequence[dict[str, Any]], left_out: Counts) -> list[tuple[int, list[int]]]:
    """(query, assistant messages that answer it), by index; counts what is in no sample."""
    runs: list[tuple[int, list[int]]] = []
    early = 0
    for i, message in enumerate(messages):
        if message["role"] == "user":
            runs.append((i, []))
        elif message["role"] == "assistant" and runs:
            runs[-1][1].append(i)
        else:
            early += message["role"] == "assistant"
    runs = [run for run in runs if run[1]]
    if not runs:
        raise CloverError("no assistant message answers a user message: expected at least one")
    left_out["assistant messages before the first query, not learnt"] += early
    left_out["messages after the last answer, left out"] += len(messages) - 1 - runs[-1][1][-1]
    return runs


def _example(
    tokenizer: Tokenizer, conversation: _Conversation, answers: Sequence[int], sample: int
) -> Example:
    """The conversation up to the last of the answers, which are its turns."""
    messages, tools, thinking, _ = conversation
    tokens = array.array("i")  # 4 bytes a token: all samples stay in memory
    turns: list[tuple[int, int]] = []
    text = ""
    for i in answers:
        prompt, response = render_turn(
            tokenizer, messages, i, tools=tools, enable_thinking=thinking
        )
        if not prompt.startswith(text):
            raise CloverError(
                f"message {i} (assistant) does not continue this query's earlier answer as it was "
                f"generated: expected a prompt that begins with ...{text[-60:]!r}; the chat "
                "template rewrites answers before their query is done, give each its own query"
            )
        tokens.extend(tokenizer.encode(prompt[len(text) :], special=True))
        ids = tokenizer.encode(response, special=True)
        _check_response(tokenizer, i, ids)
        turns.append((len(tokens), len(tokens) + len(ids)))
        tokens.extend(ids)
        text = prompt + response
    return Example(sample, tokens, tuple(turns))


def _check_response(tokenizer: Tokenizer, i: int, ids: Sequence[int]) -> None:
    """Tokens that a message only spells out would teach a stop, or a mask, in its middle."""
    for token in ids[:-1]:
        if token in tokenizer.stop_ids or token == tokenizer.mask_id:
            raise CloverError(
                f"message {i} (assistant) holds the control token "
                f"{tokenizer.decode([token], skip_special=False)!r}: expected text, calls and "
                "thoughts; the chat template ends the turn"
            )
