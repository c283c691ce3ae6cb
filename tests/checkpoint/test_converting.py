"""From a Qwen3.6 folder to a Clover folder: what is new, what is copied, where the mask goes."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from clover_jax.checkpoint import config_from_hf, config_to_hf, convert, load, save
from clover_jax.config import BDGDNConfig, CoresetConfig, ModelConfig
from clover_jax.data.tokenizer import MASK, Tokenizer
from clover_jax.errors import CloverError
from clover_jax.params import named_leaves
from tests.checkpoint.folders import (
    GOLDEN,
    assert_same,
    clover_small,
    qwen_small,
    random_params,
    read_folder,
    write_folder,
)

BASE = qwen_small(vocab_size=264)
# 256 bytes, two tokens of tokenizer.json, one that only tokenizer_config.json has, spare rows.
SPARE = 259


def write_tokenizer(folder: Path, *added: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|pad|>"])
    backend.save(str(folder / "tokenizer.json"))
    declared = {
        str(258 + i): {"content": text, "special": True, "normalized": False}
        for i, text in enumerate(added)
    }
    config = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "added_tokens_decoder": declared}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sharded, with the language_model level, vision and multi-token prediction, a tokenizer."""
    folder = tmp_path / "source"
    save(tmp_path / "plain", BASE, random_params(BASE), prefix="language_model")
    tensors = read_folder(tmp_path / "plain")
    tensors["mtp.fc.weight"] = np.zeros((3, 5), ml_dtypes.bfloat16)
    tensors["model.visual.proj.bias"] = np.zeros(4, np.float32)
    text = {**config_to_hf(BASE), "eos_token_id": 256, "some_switch": 1}
    root = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 2}}
    write_folder(folder, tensors, root, shards=3)
    write_tokenizer(folder, "<|audio|>")
    (folder / "generation_config.json").write_text('{"eos_token_id": 256}')
    return folder


def test_converted_folder(source: Path, tmp_path: Path):
    report = convert(source, tmp_path / "out")
    cfg, params, loaded = load(tmp_path / "out")
    assert (
        cfg
        == report.config
        == BASE.replace(
            bd_gdn=BDGDNConfig(), mask_token_id=SPARE, **{"moe.coreset": CoresetConfig(top_p=0.9)}
        )
    )
    assert loaded.problems == () and loaded.casts == () and loaded.prefix == "language_model"
    before = random_params(BASE)
    old, new = named_leaves(before), named_leaves(params)
    starts = {"conv_right_weight": 0, "logit_scale": 1, "history_bias": 0, "history_c": 1}
    for path in new.keys() - old.keys():
        start = next(v for name, v in starts.items() if path.endswith(name))
        assert np.all(np.asarray(new[path]) == start), path
    assert len(new.keys() - old.keys()) == 4
    for path in old.keys() - {"embed_tokens", "lm_head"}:
        assert np.array_equal(new[path], old[path]), path
    assert (report.new, report.copied) == (4 * 4, len(read_folder(source)) - 2)
    assert [tuple(i)[:2] for i in report.not_written] == [("mtp.", 1), ("model.visual.", 1)]
    assert any("mtp." in line for line in report.lines())


def test_mask_rows_are_the_mean_of_the_tokens_rows(source: Path, tmp_path: Path):
    convert(source, tmp_path / "out")
    _, params, _ = load(tmp_path / "out")
    before = random_params(BASE)
    for got, rows in (
        (np.asarray(params.embed_tokens), before.embed_tokens),
        (np.asarray(params.lm_head).T, before.lm_head.T),
    ):
        mean = rows[:SPARE].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(got[SPARE], mean, rtol=1e-6)
        others = np.arange(264) != SPARE
        assert np.array_equal(got[others], rows[others])


def test_other_files_and_the_tokenizer(source: Path, tmp_path: Path):
    plain = Tokenizer.load(source)
    convert(source, tmp_path / "out")
    marked = Tokenizer.load(tmp_path / "out")
    assert plain.mask_id is None and marked.mask_id == SPARE
    assert marked.vocab_size == SPARE + 1
    for text in ("<|end|>", "<|pad|>", "<|audio|>", "hello"):
        assert marked.encode(text, special=True) == plain.encode(text, special=True)
    assert marked.encode(MASK, special=True) == [SPARE]
    # tokenizer.json alone, as other programs read it, agrees.
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert backend.token_to_id(MASK) == SPARE and backend.token_to_id("<|audio|>") == 258
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": 256}'
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "clover_moe" and config["eos_token_id"] == 256
    assert config["clover"]["mask_token_id"] == SPARE
    assert "vision_config" not in config


def test_bfloat16_bytes_are_copied_as_they_are(tmp_path: Path):
    """The released files hold decays and norms in bf16; copying must not touch them."""
    cfg = qwen_small(dtype="bfloat16")
    save(tmp_path / "a", cfg, random_params(cfg), layout="per_expert")
    stored = {n: t.astype(ml_dtypes.bfloat16) for n, t in read_folder(tmp_path / "a").items()}
    source = write_folder(tmp_path / "b", stored, config_to_hf(cfg), shards=2)
    report = convert(source, tmp_path / "out", mask_token_id=7)
    written = read_folder(tmp_path / "out")
    for name in stored.keys() - {"model.embed_tokens.weight", "lm_head.weight"}:
        assert written[name].dtype == ml_dtypes.bfloat16, name
        assert written[name].tobytes() == stored[name].tobytes(), name
    others = np.arange(24) != 7
    rows = stored["model.embed_tokens.weight"].astype(np.float64)
    want = rows[others].mean(axis=0).astype(ml_dtypes.bfloat16)
    assert np.array_equal(written["model.embed_tokens.weight"][7], want)
    assert not report.mask_in_tokenizer
    assert load(tmp_path / "out")[2].experts == "per_expert"


def test_golden_folder(tmp_path: Path):
    convert(GOLDEN, tmp_path / "out", mask_token_id=103)
    _, params, _ = load(tmp_path / "out")
    _, before, _ = load(GOLDEN)
    old, new = named_leaves(before), named_leaves(params)
    shared = old.keys() - {"embed_tokens", "lm_head"}
    assert_same({p: new[p] for p in shared}, {p: old[p] for p in shared})


def test_tied_embeddings(tmp_path: Path):
    cfg = qwen_small(tie_word_embeddings=True)
    save(tmp_path / "a", cfg, random_params(cfg))
    convert(tmp_path / "a", tmp_path / "out", mask_token_id=0)
    assert load(tmp_path / "out")[1].lm_head is None


# Where the mask goes.


def test_the_tokenizers_own_mask_counts(source: Path, tmp_path: Path):
    write_tokenizer(source, "<|audio|>", MASK, "<|more|>")
    before = (source / "tokenizer.json").read_bytes()
    report = convert(source, tmp_path / "out")
    assert report.config.mask_token_id == 259 and report.mask_in_tokenizer
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize("asked", [258, 262], ids=["a token's row", "a later spare row"])
def test_another_row_is_named_in_the_config_only(asked: int, source: Path, tmp_path: Path):
    report = convert(source, tmp_path / "out", mask_token_id=asked)
    assert not report.mask_in_tokenizer and "config.json only" in report.lines()[1]
    assert config_of(tmp_path / "out").mask_token_id == asked
    assert Tokenizer.load(tmp_path / "out").mask_id is None


def config_of(folder: Path) -> ModelConfig:
    return config_from_hf(json.loads((folder / "config.json").read_text()))


def test_the_configs_mask_counts(source: Path, tmp_path: Path):
    edit_config(source, mask_token_id=261)
    assert convert(source, tmp_path / "out").config.mask_token_id == 261
    edit_config(source, mask_token_id=258)
    with pytest.raises(CloverError, match=r"258 .* is the token <\|audio\|>"):
        convert(source, tmp_path / "out2")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"].pop("clover", None)
    path.write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("asked", [-1, 264, 10**9])
def test_no_such_row(asked: int, source: Path, tmp_path: Path):
    with pytest.raises(CloverError, match=f"{asked} has no row"):
        convert(source, tmp_path / "out", mask_token_id=asked)


def test_no_spare_row(source: Path, tmp_path: Path):
    write_tokenizer(source, *(f"<|{i}|>" for i in range(6)))
    with pytest.raises(CloverError, match="264 has no row"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_against_the_tokenizers_mask(source: Path, tmp_path: Path):
    write_tokenizer(source, "<|audio|>", MASK)
    with pytest.raises(CloverError, match="says 259"):
        convert(source, tmp_path / "out", mask_token_id=260)


def test_no_tokenizer_to_ask(tmp_path: Path):
    save(tmp_path / "a", qwen_small(), random_params(qwen_small()))
    with pytest.raises(CloverError, match="name the mask"):
        convert(tmp_path / "a", tmp_path / "out")


def test_what_cannot_be_converted(source: Path, tmp_path: Path):
    clover = tmp_path / "clover"
    save(clover, clover_small(), random_params(clover_small()))
    with pytest.raises(CloverError, match="Clover folder already"):
        convert(clover, tmp_path / "out")
    with pytest.raises(CloverError, match="not empty"):
        convert(source, clover)
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(CloverError, match="tokenizer"):
        convert(source, tmp_path / "out")
    next(source.glob("model-*")).unlink()
    with pytest.raises(CloverError, match="missing file"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings(source: Path, tmp_path: Path):
    settings = {"logits_position": "shifted", "bd_gdn.right_conv": False, "coreset.top_p": 0.5}
    report = convert(source, tmp_path / "out", settings=settings)
    cfg, _, _ = load(tmp_path / "out")
    assert cfg == report.config
    assert (cfg.logits_position, cfg.moe.coreset) == ("shifted", CoresetConfig(top_p=0.5))
    assert cfg.bd_gdn == BDGDNConfig(right_conv=False)
    assert convert(source, tmp_path / "none", settings={"coreset": None}).config.moe.coreset is None


@pytest.mark.parametrize(
    ("path", "value", "fragment"),
    [
        ("logits_positions", "same", "expected one of block_length"),
        ("mask_token_id", 3, "expected one of block_length"),
        ("bd_gdn.rightconv", True, "bd_gdn.right_conv"),
        ("bd_gdn.right_conv.x", True, "expected one of"),
        ("hidden_size", 8, "hidden_size"),
        ("logits_position", "next", "shifted"),
        ("block_length", "many", "block_length"),
        ("coreset.top_p", 1.5, "share"),
        ("bd_gdn", None, "bd_gdn"),
    ],
)
def test_wrong_settings(path: str, value: Any, fragment: str, source: Path, tmp_path: Path):
    with pytest.raises(CloverError, match=fragment):
        convert(source, tmp_path / "out", settings={path: value})
    assert not (tmp_path / "out").exists()


def test_in_place(source: Path):
    convert(source, source, overwrite=True)
    assert load(source)[0].mask_token_id == SPARE
    assert Tokenizer.load(source).mask_id == SPARE
