"""Chat rendering (case V6), prompts and responses as ids, think blocks.

The expected strings were also compared with `apply_chat_template` of transformers 5.24.0.
"""

import datetime
from pathlib import Path

import pytest

from clover_jax.data.bpe import train_bpe, write_tokenizer
from clover_jax.data.chat import (
    render_chat,
    render_turn,
    split_thinking,
    thinking_state,
    tokenize_prompt,
)
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.errors import CloverError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    texts = ["<think>\n\n</think>\n\n the cat sat\n\n"] * 3
    write_tokenizer(folder, train_bpe(texts, 300), model_max_length=512)
    return Tokenizer.load(folder)


def render(tokenizer: Tokenizer, messages, *, prompt: bool = True, **options) -> str:
    assert tokenizer.chat_template is not None
    return render_chat(tokenizer.chat_template, messages, add_generation_prompt=prompt, **options)


def user(text) -> dict:
    return {"role": "user", "content": text}


def assistant(text, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": " Be brief.\n"}
ONE = [user("  Hi \n")]
THREE = [
    SYSTEM,
    user("a"),
    assistant("b", reasoning_content="old thoughts"),
    user("c"),
    assistant("<think>\nalso old\n</think>\n\nd"),
    user("e"),
]
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "žluť <&>"}},
    {"type": "function", "function": {"name": "now"}},
]
TOOL_TEXT = (
    "Functions you can call, one JSON schema per line:\n"
    "<tools>\n"
    '{"type": "function", "function": {"name": "add", "description": "žluť <&>"}}\n'
    '{"type": "function", "function": {"name": "now"}}\n'
    "</tools>\n"
    "A call, at the end of your answer, looks like this:\n"
    "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
)
ONE_TEXT = "<|im_start|>user\nHi<|im_end|>\n"
THREE_TEXT = (
    "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
    "<|im_start|>user\ne<|im_end|>\n"
)
ON = "<|im_start|>assistant\n<think>\n"
OFF = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
CALL = [
    user("sum?"),
    assistant(
        "I add.",
        reasoning_content="easy",
        tool_calls=[
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "ř"]}}},
            {"name": "now", "arguments": {}},
        ],
    ),
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "on"}]},
]
CALL_TEXT = (
    "<|im_start|>user\nsum?<|im_end|>\n"
    "<|im_start|>assistant\n<think>\neasy\n</think>\n\nI add.\n\n"
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    '<parameter=b>\n[2, "ř"]\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n"
    "<tool_response>\nnoon\n</tool_response><|im_end|>\n"
)
GOLDENS = [
    (ONE, None, None, ONE_TEXT + ON),
    (ONE, None, True, ONE_TEXT + ON),
    (ONE, None, False, ONE_TEXT + OFF),
    (ONE, TOOLS, True, f"<|im_start|>system\n{TOOL_TEXT}<|im_end|>\n{ONE_TEXT}{ON}"),
    (ONE, TOOLS, False, f"<|im_start|>system\n{TOOL_TEXT}<|im_end|>\n{ONE_TEXT}{OFF}"),
    (THREE, None, True, f"<|im_start|>system\nBe brief.<|im_end|>\n{THREE_TEXT}{ON}"),
    (THREE, [], False, f"<|im_start|>system\nBe brief.<|im_end|>\n{THREE_TEXT}{OFF}"),
    (
        THREE,
        TOOLS,
        True,
        f"<|im_start|>system\n{TOOL_TEXT}\n\nBe brief.<|im_end|>\n{THREE_TEXT}{ON}",
    ),
    (
        THREE,
        TOOLS,
        False,
        f"<|im_start|>system\n{TOOL_TEXT}\n\nBe brief.<|im_end|>\n{THREE_TEXT}{OFF}",
    ),
    (CALL, None, True, CALL_TEXT + ON),
    (CALL, TOOLS, False, f"<|im_start|>system\n{TOOL_TEXT}<|im_end|>\n{CALL_TEXT}{OFF}"),
]


@pytest.mark.parametrize(("messages", "tools", "thinking", "expected"), GOLDENS)
def test_golden_renders(tokenizer, messages, tools, thinking, expected) -> None:
    text = render(tokenizer, messages, tools=tools, enable_thinking=thinking)
    assert text == expected
    without = render(tokenizer, messages, tools=tools, enable_thinking=thinking, prompt=False)
    assert text == without + (OFF if thinking is False else ON)


def test_thoughts_are_kept_on_request(tokenizer: Tokenizer) -> None:
    kept = render(tokenizer, THREE, variables={"preserve_thinking": True})
    assert "assistant\n<think>\nold thoughts\n</think>\n\nb<|im_end|>" in kept
    assert "assistant\n<think>\nalso old\n</think>\n\nd<|im_end|>" in kept
    assert "old" not in render(tokenizer, THREE, variables={"preserve_thinking": False})


def test_a_turn_after_the_last_question_always_thinks(tokenizer: Tokenizer) -> None:
    text = render(tokenizer, [user("a"), assistant("b")], prompt=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_names_of_thoughts(tokenizer, name) -> None:
    text = render(tokenizer, [user("a"), assistant("b", **{name: "hm"})], prompt=False)
    assert text.endswith("<think>\nhm\n</think>\n\nb<|im_end|>\n")


def test_arguments_as_json_text(tokenizer: Tokenizer) -> None:
    calls = CALL[1]["tool_calls"]
    as_text = '{"a": 1, "b": [2, "ř"]}'
    first = {"type": "function", "function": {"name": "add", "arguments": as_text}}
    second = {"name": "now", "arguments": ""}
    changed = [CALL[0], CALL[1] | {"tool_calls": [first, second]}, *CALL[2:]]
    assert render(tokenizer, changed) == CALL_TEXT + ON
    assert first["function"]["arguments"] == as_text and calls is CALL[1]["tool_calls"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content | tojson }}", '"<é>"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=True) }}", None),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("a{% generation %}b{{ messages|length }}{% endgeneration %}c", "ab1c"),
        (
            "{{ eos_token }}|{{ absent }}|{{ tools is none }}|{{ documents is none }}",
            "E||True|True",
        ),
        ("{{ enable_thinking is defined }}{{ add_generation_prompt }}", "FalseTrue"),
        ("{% for k, v in {'a': 1}|items %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
    ],
)
def test_the_dialect_of_published_templates(template, expected) -> None:
    text = render_chat(
        template, [user("<é>")], add_generation_prompt=True, variables={"eos_token": "E"}
    )
    assert text == (expected or '{\n "a": [\n  2\n ],\n "b": 1\n}')


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% if %}", "line 1"),
        ("a\n{{ 1 +", "line 2"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ absent.name }}", "Undefined"),
        ("{{ messages | nofilter }}", "nofilter"),
        ("{{ messages.append(1) }}", "Security"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{% for i in range(10000000000) %}{% endfor %}", "Overflow"),
        ("{{ 1 / 0 }}", "ZeroDivision"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ (messages[0].content | tojson)[0].x.y }}", "Undefined"),
        ("{% generation %}", "line 1"),
        ("{% include 'x' %}", "loader"),
        ("{{ strftime_now(3) }}", "TypeError"),
        ("{{ {'a': raise_exception} | tojson }}", "serializable"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "Recursion"),
    ],
)
def test_a_template_that_fails(template, match) -> None:
    with pytest.raises(CloverError, match=match):
        render_chat(template, [user("x")], add_generation_prompt=True)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        {"role": "user", "content": "x"},
        ["hi"],
        [None],
        [{}],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": None}],
        [user(3)],
        [user({"type": "text", "text": "x"})],
        [user(["x"])],
        [user([{"text": "x"}])],
        [user([{"type": 1, "text": "x"}])],
        [user([{"type": "text"}])],
        [user([{"type": "text", "text": 3}])],
        [user([{"type": "image", "image": "x.png"}])],
        [SYSTEM],
        [user("x"), SYSTEM],
        [SYSTEM, SYSTEM, user("x")],
        [user("x"), {"role": "critic", "content": "x"}],
        [user("x"), assistant("y", tool_calls="add(1)")],
        [user("x"), assistant("y", tool_calls=["add"])],
        [user("x"), assistant("y", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])],
        [user("x"), assistant("y", tool_calls=[{"function": {"name": "f", "arguments": [1]}}])],
        [user("x"), assistant("y", tool_calls=[{"function": {"name": "f", "arguments": "3"}}])],
        [
            user("x"),
            assistant("y", tool_calls=[{"function": {"name": "f", "arguments": "\ud800"}}]),
        ],
    ],
)
def test_bad_messages(tokenizer, messages) -> None:
    with pytest.raises(CloverError, match=r"message"):
        tokenize_prompt(tokenizer, messages)


@pytest.mark.parametrize("tools", ["add", {"name": "add"}, ["add"], [None], [{"name": {1, 2}}]])
def test_bad_tools(tokenizer, tools) -> None:
    with pytest.raises(CloverError, match=r"tools|serializable"):
        tokenize_prompt(tokenizer, ONE, tools=tools)


def test_variables_cannot_replace_arguments() -> None:
    with pytest.raises(CloverError, match="tools"):
        render_chat("x", ONE, add_generation_prompt=True, variables={"tools": []})


def test_a_folder_without_template(tmp_path) -> None:
    write_tokenizer(tmp_path, train_bpe([], 266), model_max_length=64)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(CloverError, match="no chat template"):
        tokenize_prompt(Tokenizer.load(tmp_path), ONE)


# --- ids -----------------------------------------------------------------------------------------


def test_prompt_ids_are_the_rendered_text(tokenizer: Tokenizer) -> None:
    ids = tokenize_prompt(tokenizer, THREE, enable_thinking=False, tools=TOOLS)
    assert ids == tokenizer.encode(GOLDENS[8][3], special=True)
    assert tokenizer.decode(ids, skip_special=False) == GOLDENS[8][3]
    assert ids.count(tokenizer.stop_ids[0]) == 6


def test_control_text_in_a_message_follows_the_template(tokenizer: Tokenizer) -> None:
    """As in Hugging Face: a typed mask is the mask's id, but nothing around it changes."""
    typed = tokenize_prompt(tokenizer, [user("a <|mask|> b")])
    clean = tokenize_prompt(tokenizer, [user("a  b")])
    assert typed.count(5) == 1 and clean.count(5) == 0
    assert tokenizer.decode(typed, skip_special=False) == (
        "<|im_start|>user\na <|mask|> b<|im_end|>\n" + ON
    )


def test_a_message_with_half_a_surrogate_pair(tokenizer: Tokenizer) -> None:
    with pytest.raises(CloverError, match="surrogate"):
        tokenize_prompt(tokenizer, [user("\ud83d")])


@pytest.mark.parametrize(
    ("message", "thinking", "prompt_end", "response"),
    [
        (assistant("b", reasoning_content="hm"), None, ON, "hm\n</think>\n\nb<|im_end|>"),
        (assistant("b", reasoning_content="hm"), True, ON, "hm\n</think>\n\nb<|im_end|>"),
        (assistant("<think>\nhm\n</think>\nb"), True, ON, "hm\n</think>\n\nb<|im_end|>"),
        (assistant("b"), True, ON, "\n</think>\n\nb<|im_end|>"),
        (assistant("b"), False, OFF, "b<|im_end|>"),
        (
            assistant("", tool_calls=[{"name": "now", "arguments": {}}]),
            False,
            OFF,
            "<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>",
        ),
    ],
)
def test_a_turn_is_prompt_and_response(tokenizer, message, thinking, prompt_end, response) -> None:
    chat = [user("a"), message, user("not looked at")]
    prompt, got = render_turn(tokenizer, chat, 1, enable_thinking=thinking)
    assert prompt == "<|im_start|>user\na<|im_end|>\n" + prompt_end
    assert got == response
    ids = tokenize_prompt(tokenizer, chat[:1], enable_thinking=thinking)  # what a sampler is given
    assert tokenizer.encode(prompt, special=True) == ids
    assert tokenizer.encode(response, special=True)[-1] == tokenizer.end_of_turn_id
    assert thinking_state(tokenizer, ids) == (thinking is not False)


def test_every_assistant_message_is_a_turn(tokenizer: Tokenizer) -> None:
    """Earlier turns are rendered as they were when they were the last."""
    chat = [*THREE, assistant("f", reasoning_content="new")]
    assert [render_turn(tokenizer, chat, i)[1] for i in (2, 4, 6)] == [
        "old thoughts\n</think>\n\nb<|im_end|>",
        "also old\n</think>\n\nd<|im_end|>",
        "new\n</think>\n\nf<|im_end|>",
    ]
    assert render_turn(tokenizer, chat, 6)[0] == render(tokenizer, THREE)


def test_turns_that_do_not_continue_their_prompt(tokenizer: Tokenizer) -> None:
    with pytest.raises(CloverError, match=r"message 1 .*enable_thinking"):
        render_turn(tokenizer, [user("a"), assistant("b", thinking="x")], 1, enable_thinking=False)
    with pytest.raises(CloverError, match="messages"):
        render_turn(tokenizer, [], 0)


# --- think blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("", False),
        ("a", False),
        ("<think>", True),
        ("<think>\na</think>", False),
        ("</think><think>a", True),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\n</think><|im_end|>\n" + ON, True),
        ("<|im_start|>user\n<think><|im_end|>\n" + OFF, False),
    ],
)
def test_thinking_state(tokenizer, text, state) -> None:
    assert thinking_state(tokenizer, tokenizer.encode(text, special=True)) is state


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("hm\n</think>\n\nyes", True, ("hm", "yes")),
        ("\n</think>\n\nyes", True, ("", "yes")),
        ("still going", True, ("still going", "")),
        ("hm</think>a</think>b", True, ("hm", "a</think>b")),
        ("yes", False, ("", "yes")),
        ("a </think> b", False, ("", "a </think> b")),
        ("a <think>b</think>", False, ("", "a <think>b</think>")),
        ("<think>\nhm\n</think>\n\nyes", False, ("hm", "yes")),
        ("<think>\nhm", False, ("hm", "")),
        ("<think>\nhm</think>yes", True, ("hm", "yes")),
        ("", False, ("", "")),
    ],
)
def test_split_thinking(text, opened, expected) -> None:
    assert split_thinking(text, opened=opened) == expected
