"""Chats to prompts: the checkpoint's own template, rendered as Hugging Face renders it.

Prompt and response are tokenised apart. A text that is tokenised whole may get a token that spans
the border ("\\n" of the prompt and "\\n" of an empty thought merge), which no sampler could have
been prompted with; training on the parts puts the border where generation has it.
"""

import datetime
import functools
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import msgspec

from clover_jax.data.tokenizer import THINK_CLOSE, THINK_OPEN, Tokenizer
from clover_jax.errors import CloverError

# Names under which clients send a message's thoughts; templates read the first one.
_THOUGHT_NAMES = ("reasoning_content", "thinking", "reasoning")
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})

# Decoded JSON from files and requests, so its shape is checked at run time, not by a type.
type Messages = Any  # list of {"role": str, "content": str | list of parts | None, ...}
type Tools = Any  # list of JSON schemas, or None


def render_chat(
    template: str,
    messages: Messages,
    *,
    add_generation_prompt: bool,
    enable_thinking: bool | None = None,
    tools: Tools = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The chat as one string, character for character what Hugging Face's renderer gives.

    Beyond that renderer, a tool call's arguments may be a JSON string, as in the OpenAI API.

    Args:
        template: Jinja source of the chat template.
        messages: dicts with `role` and usually `content` (text, list of parts, or None).
        add_generation_prompt: whether to end with the opening of an assistant turn.
        enable_thinking: passed to the template unless None, which leaves its own default.
        tools: JSON schemas of the functions on offer.
        variables: further template variables, such as special token texts, `preserve_thinking`.

    Raises:
        CloverError: messages or tools of a wrong shape, or the template fails or refuses.
    """
    variables = dict(variables or {})
    if clash := _RESERVED & variables.keys():
        raise CloverError(
            f"template variables hold {sorted(clash)}: expected other names, since these are set "
            f"from the arguments"
        )
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    context = {
        "documents": None,
        **variables,
        "messages": checked_messages(messages),
        "tools": _checked_tools(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compiled(template).render(context)
    except Exception as error:  # a template is code of the checkpoint: it can raise anything
        where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise CloverError(
            f"the chat template cannot render these messages{where}: "
            f"{type(error).__name__}: {error}; change the messages or chat_template.jinja"
        ) from error


def tokenize_prompt(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    enable_thinking: bool | None = None,
    tools: Tools = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of the chat followed by the generation prompt, as `render_chat`."""
    text = _render(tokenizer, messages, True, enable_thinking, tools, variables)
    return tokenizer.encode(text, special=True)


def render_turn(
    tokenizer: Tokenizer,
    messages: Messages,
    index: int,
    *,
    enable_thinking: bool | None = None,
    tools: Tools = None,
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """An assistant message as training text: the prompt that it answers, and its response.

    The prompt is what `tokenize_prompt` encodes of the messages before it. The response is what the
    template writes after that prompt: thoughts if they are on, text, calls, the end-of-turn token.

    Args:
        tokenizer: with a chat template.
        messages: the chat; what follows the message is not looked at.
        index: of the assistant message.
        enable_thinking: as `render_chat`.
        tools: as `render_chat`.
        variables: as `render_chat`.

    Raises:
        CloverError: as `render_chat`; also if the rendered message does not continue its prompt,
            such as a message with thoughts while thinking is off.
    """
    end = tokenizer.decode([tokenizer.end_of_turn_id], skip_special=False)
    prompt = _render(tokenizer, messages[:index], True, enable_thinking, tools, variables)
    whole = _render(tokenizer, messages[: index + 1], False, enable_thinking, tools, variables)
    response, ended, _ = whole.removeprefix(prompt).rpartition(end)
    if not (whole.startswith(prompt) and ended):
        raise CloverError(
            f"message {index} (assistant) renders as ...{whole[-200:]!r}: expected a text that "
            f"continues the generation prompt ...{prompt[-60:]!r} and ends with {end!r}; a "
            f"message with thoughts needs enable_thinking=True"
        )
    return prompt, response + end


def thinking_state(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the last turn of a prompt leaves a think block open, so that thoughts come first."""
    for token_id in reversed(prompt_ids):
        if token_id == tokenizer.think_open_id:
            return True
        if token_id == tokenizer.think_close_id or token_id in tokenizer.stop_ids:
            return False
    return False


def split_thinking(text: str, *, opened: bool) -> tuple[str, str]:
    """(thoughts, answer) of a response, without the tags and the line breaks around them.

    Args:
        text: decoded response.
        opened: `thinking_state` of its prompt. If False, thoughts are only what stands in a think
            block at the very start. A block that is never closed has no answer yet.
    """
    body = text.removeprefix(THINK_OPEN)
    if not opened and body == text:
        return "", text
    thoughts, _, answer = body.partition(THINK_CLOSE)
    return thoughts.strip("\n"), answer.lstrip("\n")


def _render(
    tokenizer: Tokenizer,
    messages: Messages,
    add_generation_prompt: bool,
    enable_thinking: bool | None,
    tools: Tools,
    variables: Mapping[str, Any] | None,
) -> str:
    if tokenizer.chat_template is None:
        raise CloverError(
            "the checkpoint has no chat template: expected chat_template.jinja or chat_template in "
            "tokenizer_config.json; add one, or give the prompt as plain text"
        )
    return render_chat(
        tokenizer.chat_template,
        messages,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
        tools=tools,
        variables={**tokenizer.special_texts, **(variables or {})},
    )


def checked_messages(messages: Messages) -> list[dict[str, Any]]:
    """Messages as templates read them: thoughts under one name, arguments of calls as objects.

    Raises:
        CloverError: not a list of objects with a role and a content of a known form.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise CloverError(
            f"messages are {reprlib.repr(messages)}: expected a list of at least one message"
        )
    return [_checked_message(i, message) for i, message in enumerate(messages)]


def _checked_message(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise CloverError(
            f"message {i} is {reprlib.repr(message)}: expected an object with role and content"
        )
    if not isinstance(message.get("role"), str):
        raise CloverError(f"message {i} has role {message.get('role')!r}: expected a string")
    content = message.get("content")
    parts_ok = isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content
    )
    if not (content is None or isinstance(content, str) or parts_ok):
        raise CloverError(
            f"message {i} has content {reprlib.repr(content)}: expected text, null, or a list of "
            f"parts, each an object with a type"
        )
    checked = dict(message)
    thoughts = next((message[k] for k in _THOUGHT_NAMES if message.get(k) is not None), None)
    if thoughts is not None:
        checked["reasoning_content"] = thoughts
    if message.get("tool_calls") is not None:
        checked["tool_calls"] = _checked_calls(i, message["tool_calls"])
    return checked


def _checked_calls(i: int, calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, whether sent as such or as JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise CloverError(
            f"message {i} has tool_calls {reprlib.repr(calls)}: expected a list of objects"
        )
    checked = []
    for call in calls:
        nested = isinstance(call.get("function"), Mapping)
        function = dict(call["function"] if nested else call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                function["arguments"] = msgspec.json.decode(arguments or "{}")
            except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
                raise CloverError(
                    f"message {i} calls a tool with arguments {reprlib.repr(arguments)}: expected "
                    f"a JSON object ({error})"
                ) from None
        checked.append({**call, "function": function} if nested else function)
    return checked


def _checked_tools(tools: Tools) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise CloverError(f"tools are {reprlib.repr(tools)}: expected a list of JSON schemas")
    return [dict(tool) for tool in tools]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text: rendered as its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares an instance variable)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=8)  # compiling takes far longer than rendering
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The settings that published chat templates are written for (transformers 5)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
