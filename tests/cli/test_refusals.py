"""Wrong flags and bent folders end in one line and status 2, before anything is compiled."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clover_jax import checkpoint
from clover_jax.diffusion.generate import Generator
from tests.cli.conftest import Clover, Ran, config
from tests.model.small import random_params


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding starts after everything was checked; here that is a failure."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was started")

    monkeypatch.setattr(Generator, "_drive", started)


def assert_refused(ran: Ran, *fragments: str) -> None:
    """Status 2, nothing on standard output, one error line, no traceback."""
    assert ran.status == 2, ran
    assert ran.out == ""
    lines = [line for line in ran.err.splitlines() if not line.startswith("compiling ")]
    assert lines[0].startswith("error: "), ran.err
    assert all(line.startswith("  ") for line in lines[1:]), ran.err  # details of a folder
    assert "Traceback" not in ran.err
    for fragment in fragments:
        assert fragment in ran.err, ran.err


# Arguments after `generate --checkpoint MODEL`, what the line must hold, standard input.
GENERATE = [
    ("hi --seed x", "--seed"),
    ("hi --seed", "--seed"),
    ("hi --seed 1.5", "--seed"),
    ("hi --seed -1", "seed is -1"),
    ("hi --seed 4294967296", "seed is 4294967296"),
    ("hi --max-tokens 0", "max_tokens is 0"),
    ("hi --max-tokens -3", "max_tokens is -3"),
    ("hi --max-tokens many", "--max-tokens"),
    ("hi --max-tokens 600", "context of 512"),
    ("hi --threshold -0.1", "threshold is -0.1"),
    ("hi --threshold nan", "threshold is nan"),
    ("hi --threshold high", "--threshold"),
    ("hi --prefill-chunk 0", "--prefill-chunk is 0"),
    ("hi --temperature -1", "temperature is -1"),
    ("hi --temperature inf", "temperature is inf"),
    ("hi --top-k -1", "top_k is -1"),
    ("hi --top-k 0.5", "--top-k"),
    ("hi --top-p 0", "top_p is 0"),
    ("hi --top-p 1.01", "top_p is 1.01"),
    ("hi --top-p nan", "top_p is nan"),
    ("hi --presence inf", "presence is inf"),
    ("hi --frequency nan", "frequency is nan"),
    ("hi --repetition 0", "repetition is 0"),
    ("hi --repetition -1", "repetition is -1"),
    ("hi --samples 0", "--samples is 0"),
    ("hi --samples two", "--samples"),
    ("hi --mode diffusion", "diffusion"),
    ("hi --rows one", "one"),
    ("hi --dtype float16", "float16"),
    ("hi --thinking --no-thinking", "choose one"),
    ("hi --stop=", "stop strings"),
    ("hi --stop", "--stop"),
    ("hi --tresh 3", "--tresh"),
    ("hi -q", "-q"),
    ("hi --token-ids 3", "choose one"),
    ("--token-ids 3,x", "'x'"),
    ("--token-ids 3.5", "'3.5'"),
    ("--token-ids -3", "'-3'"),
    ("--token-ids ,", "no tokens"),
    ("--token-ids 320", "vocabulary of 320"),
    ("--token-ids 99999999999999999999999", "vocabulary of 320"),
    ("--token-ids ٣", "'٣'"),
    ("hi --trace nowhere/trace.jsonl", "nowhere"),
    ("hi --screen nowhere/screen.svg", "nowhere"),
    ("hi --checkpoint nowhere", "nowhere"),
    ("hi \udcff", "surrogate"),
]


@pytest.mark.parametrize(("arguments", "fragment"), GENERATE)
def test_wrong_flags(clover: Clover, model: Path, arguments: str, fragment: str):
    ran = clover("generate", "--checkpoint", model, *arguments.split(" "))
    assert_refused(ran, fragment)


@pytest.mark.parametrize(
    ("stdin", "fragment"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"caf\xe9", "not UTF-8"),
        (b"", "empty"),
        (b"\n", "empty"),
        (b"word " * 600, "context of 512"),
    ],
)
def test_wrong_input(clover: Clover, model: Path, stdin: bytes, fragment: str):
    assert_refused(clover("generate", "--checkpoint", model, stdin=stdin), fragment)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (
            "",
            "Expected one of {generate, chat, eval, bench, card, info, plan, verify",
        ),
        ("bogus", "bogus"),
        ("--bogus", "--bogus"),
        ("chat --context x", "--context"),
        ("checkpoint", "convert"),
        ("checkpoint convert", "SRC"),
        ("checkpoint convert nowhere target", "nowhere"),
        ("checkpoint convert a b c", "c"),
        ("checkpoint convert a b --set c", "NAME=VALUE"),
        ("checkpoint merge a b", "OUT"),
        ("checkpoint merge nowhere b c", "nowhere is not a folder"),
        ("info nowhere", "nowhere"),
        ("info --preset clover_huge", "clover_huge"),
        ("info folder --preset clover_tiny", "choose one"),
        ("train", "pretrain"),
        ("train pretrain", "--out"),
        ("train convert --out run", "--checkpoint"),
        ("train pretrain --out run --set steps", "NAME=VALUE"),
        ("train pretrain --out run --set optimiser.steps=x", "optimiser.steps=x"),
        ("train pretrain --out run --set optimiser.steps=0", "steps is 0"),
        ("train pretrain --out run --set optimiser.learning_rate=0", "learning_rate is 0"),
        ("train pretrain --out run --set data.rows=0", "rows 0"),
        ('train pretrain --out run --set data.mix.weights=[["chess",1]]', "chess"),
        ('train pretrain --out run --set data.mix.weights=[["gcd",-1]]', "-1"),
        ('train pretrain --out run --set data.mix.weights=[["gcd",0]]', "positive"),
        ("train pretrain --out run --set data.mix.thinking_share=2", "thinking_share is 2"),
        ("train pretrain --out run --set data.buckets=[[80,2],[40,1]]", "ascend"),
        ("train pretrain --out run --set lora.rank=0", "rank is 0"),
        ("train pretrain --out run --set loss.diffusion=1", "no blocks"),
        ("train sft --out run", "--data"),
        ("train sft --out run --data none.jsonl", "none.jsonl"),
        ("train sft --out run --data x --set traces.rows=3 --set accumulate=2", "divisor"),
        ("eval --suite traces", "--file"),
        ("eval --file x.jsonl", "--file"),
        ("train pretrain --out run --preset clover_huge", "clover_huge"),
    ],
)
def test_wrong_commands(
    clover: Clover,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    fragment: str,
):
    monkeypatch.chdir(tmp_path)
    assert_refused(clover(*arguments.split()), fragment)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_is_left_alone(clover: Clover, tmp_path: Path):
    (tmp_path / "precious").write_text("data")
    assert_refused(clover("train", "pretrain", "--out", tmp_path), "holds no run")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


# File, what is done to it (a function of its text, or None to remove it), what the line must hold.
def edited(**changes: Any) -> Any:
    """JSON with some keys set, by dotted name."""

    def edit(text: str) -> str:
        fields = json.loads(text)
        for name, value in changes.items():
            *path, last = name.split("__")
            inner = fields
            for key in path:
                inner = inner[key]
            inner[last] = value
        return json.dumps(fields)

    return edit


CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE, WEIGHTS = "chat_template.jinja", "model.safetensors"
FILES = [
    (CONFIG, None, "config.json"),
    (CONFIG, lambda _: "", "config.json"),
    (CONFIG, lambda _: "[]", "config"),
    (CONFIG, lambda _: "null", "config"),
    (CONFIG, lambda t: t[:-20], "config.json"),
    (CONFIG, lambda t: t.replace("320", "NaN"), "NaN"),
    (CONFIG, edited(vocab_size="320"), "vocab_size"),
    (CONFIG, edited(vocab_size=0), "vocab_size"),
    (CONFIG, edited(vocab_size=321), "embed_tokens"),
    (CONFIG, edited(vocab_size=2**70), "vocab_size"),
    (CONFIG, edited(hidden_size=-64), "hidden_size"),
    (CONFIG, edited(hidden_size=65), "is"),
    (CONFIG, edited(num_hidden_layers=3), "num_hidden_layers"),
    (CONFIG, edited(num_hidden_layers=4), "layer"),
    (CONFIG, edited(full_attention_interval=0), "full_attention_interval"),
    (CONFIG, edited(layer_types=["full_attention", "linear_attention"]), "layer_types"),
    (CONFIG, edited(num_attention_heads=3), "num_heads is 3"),
    (CONFIG, edited(num_key_value_heads=None), "num_key_value_heads"),
    (CONFIG, edited(rms_norm_eps="tiny"), "rms_norm_eps"),
    (CONFIG, edited(rms_norm_eps=-1.0), "rms_norm_eps"),
    (CONFIG, edited(max_position_embeddings=0), "max_position_embeddings"),
    (CONFIG, edited(dtype="int8"), "dtype"),
    (CONFIG, edited(hidden_act="gelu"), "hidden_act"),
    (CONFIG, edited(attention_bias=True), "attention_bias"),
    (CONFIG, edited(rope_parameters={}), "rope"),
    (CONFIG, edited(rope_parameters__partial_rotary_factor=2.0), "partial_rotary_factor"),
    (CONFIG, edited(rope_parameters__rope_type="yarn"), "rope_type"),
    (CONFIG, edited(num_experts=4), "expert"),
    (CONFIG, edited(num_experts_per_tok=9), "top_k is 9"),
    (CONFIG, edited(linear_conv_kernel_dim=5), "conv"),
    (CONFIG, edited(clover=None), "mask_token_id"),
    (CONFIG, edited(clover__block_length=0), "block_length"),
    (CONFIG, edited(clover__mask_token_id=320), "mask_token_id"),
    (CONFIG, edited(clover__mask_token_id=9), "mask"),
    (CONFIG, edited(clover__mask_token_id="5"), "mask_token_id"),
    (CONFIG, edited(clover__logits_position="next"), "logits_position"),
    (CONFIG, edited(clover__coreset__top_p=0), "top_p"),
    (CONFIG, edited(clover__coreset__pool="mean"), "pool"),
    (CONFIG, edited(clover__bd_gdn__operator="magic"), "operator"),
    (GENERATION, lambda _: "{", "generation_config.json"),
    (GENERATION, lambda _: "[]", "generation_config.json"),
    (GENERATION, lambda t: t.replace("0.02", "Infinity"), "Infinity"),
    (GENERATION, edited(temperature="hot"), "temperature"),
    (GENERATION, edited(temperature=-1), "temperature"),
    (GENERATION, edited(top_p=2), "top_p"),
    (GENERATION, edited(top_k=1.5), "top_k"),
    (GENERATION, edited(do_sample="no"), "do_sample"),
    (GENERATION, edited(repetition_penalty=0), "repetition"),
    (GENERATION, edited(max_new_tokens=0), "max_new_tokens"),
    (GENERATION, edited(max_new_tokens="20"), "max_new_tokens"),
    (GENERATION, edited(max_new_tokens=True), "max_new_tokens"),
    (GENERATION, edited(eos_token_id=279999), "eos_token_id"),
    (GENERATION, edited(eos_token_id="2"), "generation_config.json"),
    (GENERATION, edited(eos_token_id=[]), "generation_config.json"),
    (GENERATION, edited(pad_token_id=-1, eos_token_id=-1), "eos_token_id"),
    (GENERATION, edited(clover=3), "clover"),
    (GENERATION, edited(clover__threshold="0.9"), "threshold"),
    (GENERATION, edited(clover__treshold=0.9), "treshold"),
    (GENERATION, edited(clover__policy="random"), "policy"),
    (GENERATION, edited(clover__response_ramp={"start": 1}), "response_ramp"),
    (GENERATION, edited(clover__thinking_ramp={"start": -1, "slope": 1}), "start"),
    (TOKENIZER, None, "tokenizer.json"),
    (TOKENIZER, lambda _: "", "tokenizer.json"),
    (TOKENIZER, lambda _: "{}", "tokenizer.json"),
    (TOKENIZER, lambda t: t[: len(t) // 2], "tokenizer.json"),
    (TOKENIZER, edited(model__type="Unigram"), "tokenizer.json"),
    (TOKENIZER, edited(model__vocab={"a": 0}), "tokenizer.json"),
    (TOKENIZER, edited(model__dropout=0.5), "dropout"),
    (TOKENIZER, edited(pre_tokenizer=None), "tokenizer.json"),
    (TOKENIZER_CONFIG, None, "tokenizer_config.json"),
    (TOKENIZER_CONFIG, lambda _: "[]", "tokenizer_config.json"),
    (TOKENIZER_CONFIG, edited(eos_token="<end>"), "<end>"),
    (TOKENIZER_CONFIG, edited(mask_token="<|im_end|>"), "mask"),
    (TOKENIZER_CONFIG, edited(chat_template=3), "tokenizer_config.json"),
    (TEMPLATE, None, "no chat template"),
    (TEMPLATE, lambda _: "{% for %}", "chat template"),
    (TEMPLATE, lambda _: "{{ messages[9].content }}{{ 1 // 0 }}", "chat template"),
    (TEMPLATE, lambda _: "{{ raise_exception('not today') }}", "not today"),
    (TEMPLATE, lambda _: "{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),
    (TEMPLATE, lambda _: "{# nothing #}", "no tokens"),
    (WEIGHTS, None, "safetensors"),
    (WEIGHTS, lambda _: "", "model.safetensors"),
    (WEIGHTS, lambda _: "version https://example.invalid/lfs\noid sha256:0\n", "model.safetensors"),
]  # fmt: skip


def bent_folder(model: Path, folder: Path, name: str, change: Any) -> Path:
    """The model with one file changed; the others are links."""
    folder.mkdir()
    for path in model.iterdir():
        if path.name != name:
            os.link(path, folder / path.name)
    if change is not None:
        path = model / name
        text = path.read_text() if path.suffix != ".safetensors" else ""
        (folder / name).write_text(change(text))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "fragment"), FILES, ids=[f"{i}-{f[0]}" for i, f in enumerate(FILES)]
)
def test_bent_folders(
    clover: Clover, model: Path, tmp_path: Path, name: str, change: Any, fragment: str
):
    folder = bent_folder(model, tmp_path / "bent", name, change)
    assert_refused(clover("generate", "hi", "--checkpoint", folder), fragment)


def test_base_model_says_how_it_can_be_used(clover: Clover, model: Path, tmp_path: Path):
    """An autoregressive folder: the weights do not matter, only what its config says."""
    cfg = config().replace(bd_gdn=None, mask_token_id=None, **{"moe.coreset": None})
    checkpoint.save(tmp_path / "base", cfg, random_params(cfg), files_from=model)
    ran = clover("generate", "hi", "--checkpoint", tmp_path / "base")
    assert_refused(ran, "mode ar", "checkpoint convert")


def test_chat_needs_a_tokenizer_and_a_context(clover: Clover, model: Path, tmp_path: Path):
    assert_refused(clover("chat", "--checkpoint", model, "--context", 0, stdin=b"hi"), "--context")
    ran = clover("chat", "--checkpoint", model, stdin=b"\xff\n")
    assert_refused(ran, "not UTF-8")
    folder = bent_folder(model, tmp_path / "bare", TOKENIZER, None)
    (folder / TOKENIZER_CONFIG).unlink()
    assert_refused(clover("chat", "--checkpoint", folder, stdin=b"hi"), "tokenizer")
    assert_refused(clover("generate", "hi", "--checkpoint", folder), "--token-ids")
    arguments = ("--checkpoint", folder, "--token-ids", "3", "--stop", "x")
    assert_refused(clover("generate", *arguments), "tokenizer")
