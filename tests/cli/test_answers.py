"""Commands that run the model. One file, so that its few programs are compiled once."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clover_jax.cli import view
from clover_jax.data.chat import thinking_state, tokenize_prompt
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import Event, Generator, Request
from tests.cli.conftest import Clover, config

PROMPT = "three cats"
STATS = {
    "prompt_tokens", "reused_tokens", "tokens", "previews", "forwards", "tpf_previews", "tpf",
    "prefill_tokens_per_s", "tokens_per_s", "experts_per_layer", "experts_per_layer_union",
}  # fmt: skip


@pytest.fixture(scope="module")
def told(model: Path) -> dict:
    """Filled by the first test that asks."""
    return {}


@pytest.fixture
def answer(told: dict, model: Path, clover: Clover) -> dict:
    """What the model says to PROMPT, by --json."""
    if not told:
        ran = clover("generate", PROMPT, "--checkpoint", model, "--json")
        assert ran.status == 0, ran.err
        assert "compiling the denoising loop for this model" in ran.err
        told.update(json.loads(ran.out))
    return told


def test_json_has_all_of_it(answer: dict, model: Path):
    assert answer.keys() == {
        "sample", "token_ids", "text", "finish_reason", "logprobs", "confidences", "revealed_at",
        "stats",
    }  # fmt: skip
    stats = answer["stats"]
    n = len(answer["token_ids"])
    assert stats.keys() == STATS
    assert n == stats["tokens"] > 0
    assert len(answer["logprobs"]) == len(answer["confidences"]) == len(answer["revealed_at"]) == n
    assert stats["tpf_previews"] == pytest.approx(n / stats["previews"])
    assert stats["tpf"] == pytest.approx(n / stats["forwards"])
    assert len(stats["experts_per_layer"]) == config().num_layers
    tokenizer = Tokenizer.load(model)
    messages = [{"role": "user", "content": PROMPT}]
    assert stats["prompt_tokens"] == len(tokenize_prompt(tokenizer, messages))
    assert answer["text"] == tokenizer.decode(answer["token_ids"], skip_special=True)
    if answer["finish_reason"] == "length":
        assert n == 20  # the folder's max_new_tokens


def test_text_goes_to_stdout_and_figures_to_stderr(answer: dict, model: Path, clover: Clover):
    ran = clover("generate", "--checkpoint", model, stdin=PROMPT.encode() + b"\n")
    assert ran.status == 0
    assert ran.out == answer["text"] + "\n"
    last = ran.err.splitlines()[-1]
    assert f"{answer['stats']['tokens']} tokens" in last
    assert f"{answer['stats']['forwards']} forwards" in last
    assert f"{answer['stats']['tpf_previews']:.2f} per preview" in last


def test_words_of_a_prompt_are_joined(answer: dict, model: Path, clover: Clover):
    assert clover("generate", *PROMPT.split(), "--checkpoint", model).out == answer["text"] + "\n"


def test_limit_cuts_the_same_text(answer: dict, model: Path, clover: Clover):
    ran = clover("generate", PROMPT, "--checkpoint", model, "--json", "--max-tokens", 5)
    assert json.loads(ran.out)["token_ids"] == answer["token_ids"][:5]


def test_stop_string_cuts_before_it(answer: dict, model: Path, clover: Clover):
    stop = answer["text"][3:5]
    ran = clover("generate", PROMPT, "--checkpoint", model, "--stop", stop, "--stop=never met")
    assert ran.out == answer["text"][: answer["text"].index(stop)] + "\n"


def test_trace_ends_in_the_answer(answer: dict, model: Path, clover: Clover, tmp_path: Path):
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "screen.svg"
    ran = clover(
        "generate", PROMPT, "--checkpoint", model, "--trace", trace, "--screen", picture, "--json"
    )
    assert ran.status == 0, ran.err
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(events) == answer["stats"]["previews"]
    assert [e["step"] for e in events if e["start"] == 0] == [
        *range(sum(e["start"] == 0 for e in events))
    ]
    final = {e["start"]: e for e in events}
    tokens = [token for at in sorted(final) for token in final[at]["tokens"]]
    assert tokens[: len(answer["token_ids"])] == answer["token_ids"]
    for before, after in itertools.pairwise(events):
        if before["start"] == after["start"]:
            fixed = [not masked for masked in before["masked"]]
            assert all(not after["masked"][i] for i, f in enumerate(fixed) if f)
    svg = picture.read_text()
    assert svg.startswith("<svg") and "clover&#160;generate" in svg and "@font-face" not in svg


def test_samples_differ_and_repeat(model: Path, clover: Clover, monkeypatch: pytest.MonkeyPatch):
    # One row after the other, so that no program for two rows has to be compiled.
    batched = Generator.stream

    def one_by_one(self: Generator, requests: list[Request], **options: Any) -> Iterator[Event]:
        for row, request in enumerate(requests):
            for event in batched(self, [request], **options):
                yield dataclasses.replace(event, row=row)

    monkeypatch.setattr(Generator, "stream", one_by_one)
    arguments = (
        "generate", PROMPT, "--checkpoint", model, "--samples", 2, "--temperature", 1,
        "--seed", 7, "--max-tokens", 8,
    )  # fmt: skip
    samples = [json.loads(line) for line in clover(*arguments, "--json").out.splitlines()]
    assert [s["sample"] for s in samples] == [0, 1]
    assert samples[0]["token_ids"] != samples[1]["token_ids"]
    again = clover(*arguments)
    assert again.out == "".join(f"[{i}] {s['text']}\n" for i, s in enumerate(samples))
    assert again.err.count("forwards") == 2


def test_token_ids_need_no_tokenizer(answer: dict, model: Path, clover: Clover, tmp_path: Path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    tokenizer = Tokenizer.load(model)
    prompt = tokenize_prompt(tokenizer, [{"role": "user", "content": PROMPT}])
    ids = " ".join(map(str, prompt))
    arguments = ("--token-ids", ids, "--threshold", 0.02, "--max-tokens", 8)
    ran = clover("generate", "--checkpoint", bare, *arguments, "--json")
    told = json.loads(ran.out)
    assert told["text"] is None
    # Without a tokenizer nothing stops and no id is forbidden but the mask.
    ended = [i for i, token in enumerate(answer["token_ids"]) if token in tokenizer.stop_ids]
    same = min([8, *ended])
    assert told["token_ids"][:same] == answer["token_ids"][:same]
    ran = clover("generate", "--checkpoint", bare, *arguments)
    assert ran.out == " ".join(map(str, told["token_ids"])) + " \n"


def test_raw_prompt_has_no_template(model: Path, clover: Clover):
    ran = clover("generate", "abc", "--checkpoint", model, "--raw", "--json", "--max-tokens", 3)
    tokenizer = Tokenizer.load(model)
    assert json.loads(ran.out)["stats"]["prompt_tokens"] == len(
        tokenizer.encode("abc", special=True)
    )


def test_thinking_switch_reaches_the_template(model: Path, clover: Clover):
    tokenizer = Tokenizer.load(model)
    for flag, enabled in (("--thinking", True), ("--no-thinking", False)):
        prompt = tokenize_prompt(
            tokenizer, [{"role": "user", "content": PROMPT}], enable_thinking=enabled
        )
        assert thinking_state(tokenizer, prompt) == enabled
        ran = clover("generate", PROMPT, "--checkpoint", model, flag, "--json", "--max-tokens", 2)
        assert json.loads(ran.out)["stats"]["prompt_tokens"] == len(prompt)


def test_autoregressive_mode(model: Path, clover: Clover):
    arguments = ("--checkpoint", model, "--json", "--mode", "ar", "--max-tokens", 4)
    told = json.loads(clover("generate", PROMPT, *arguments).out)
    assert len(told["token_ids"]) == 4 or told["finish_reason"] == "stop"
    assert told["stats"]["tpf_previews"] is None and told["stats"]["previews"] == 0


def test_live_view_ends_in_the_text(
    answer: dict, model: Path, clover: Clover, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(view, "in_terminal", lambda: True)
    ran = clover("generate", PROMPT, "--checkpoint", model)
    assert ran.status == 0
    shown = view.answer_text(answer["text"], thinking=True)[0].plain
    compact = lambda text: "".join(text.split())
    assert compact(ran.out).startswith(compact(shown))
    assert "tokens per forward" in ran.out  # the figures, too


TURNS = b"cats\nants\n\nlegs\n"  # short: all prompts fit one prefill program


def chat(clover: Clover, model: Path, *flags: object, stdin: bytes = TURNS) -> list[dict]:
    arguments = ("--checkpoint", model, "--json", "--context", 400, "--max-tokens", 4)
    ran = clover("chat", *arguments, *flags, stdin=stdin)
    assert ran.status == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


@pytest.mark.parametrize("thinking", ["--thinking", "--no-thinking"])
def test_reused_prefixes_change_no_token(model: Path, clover: Clover, thinking: str):
    warm = chat(clover, model, thinking)
    cold = chat(clover, model, thinking, "--no-reuse")
    assert len(warm) == len(cold) == 3
    for turn, (a, b) in enumerate(zip(warm, cold, strict=True)):
        assert a["token_ids"] == b["token_ids"], turn
        assert a["stats"]["prompt_tokens"] == b["stats"]["prompt_tokens"]
        assert b["stats"]["reused_tokens"] == 0
        assert (a["stats"]["reused_tokens"] > 0) == (turn > 0)
    assert warm[2]["stats"]["reused_tokens"] > warm[1]["stats"]["reused_tokens"]


def test_chat_turn_equals_a_generate(answer: dict, model: Path, clover: Clover):
    first = chat(clover, model, stdin=PROMPT.encode())[0]
    assert first["token_ids"] == answer["token_ids"][:4]


def test_chat_commands(model: Path, clover: Clover):
    turns = chat(clover, model, stdin=b"cats\n/reset\ncats\n/quit\ncats\n")
    assert len(turns) == 2
    assert turns[0]["token_ids"] == turns[1]["token_ids"]
    assert turns[1]["stats"]["prompt_tokens"] == turns[0]["stats"]["prompt_tokens"]
    assert turns[1]["stats"]["reused_tokens"] > 0


def test_chat_prints_answers_line_by_line(model: Path, clover: Clover):
    ran = clover("chat", "--checkpoint", model, "--max-tokens", 4, stdin=b"cats\nants\n")
    assert ran.status == 0
    figures = [line for line in ran.err.splitlines() if "forwards" in line]
    assert len(figures) == 2 and "(0 reused)" in figures[0] and "(0 reused)" not in figures[1]


def test_full_conversation_is_refused(model: Path, clover: Clover):
    ran = clover("chat", "--checkpoint", model, "--context", 20, stdin=b"a long question " * 9)
    assert ran.status == 2 and "--context" in ran.err


@pytest.mark.slow
def test_second_start_compiles_nothing(answer: dict, model: Path, cache_home: Path):
    """Both starts are new processes: earlier tests of this one may change programs' keys."""
    programs = cache_home / "clover_jax" / "compiled"
    code = "import sys; from clover_jax.cli import main; sys.exit(main())"
    arguments = ["generate", PROMPT, "--checkpoint", str(model)]
    environment = {**os.environ, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}

    def start() -> tuple[str, set[str]]:
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == answer["text"] + "\n"
        return ran.stderr, {path.name for path in programs.glob("*-cache")}

    _, first = start()
    told, second = start()
    assert any("jit_run_block" in name for name in first)
    assert "compiling" not in told
    assert second == first
