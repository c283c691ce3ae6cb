"""`clover bench` on a small random model: figures that must agree; refusals of it and the card."""

import json
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from clover_jax import checkpoint
from clover_jax.eval import bench
from clover_jax.eval.compilations import compilations
from clover_jax.presets import PRESETS, clover_tiny
from tests.cli.conftest import Clover
from tests.helpers.compilation import unoptimised
from tests.model.small import random_params


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Two variants in place of five, compiled without care: what is checked needs no speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "VARIANTS", bench.VARIANTS[:2])
        patch.setattr(bench, "PREFILL_TOKENS", 64)
        with unoptimised():
            yield


@pytest.mark.slow
def test_figures_agree(model: Path, clover: Clover):
    arguments = ("bench", "--checkpoint", model, "--batch", 2, "--rounds", 2, "--max-tokens", 8)
    ran = clover(*arguments, "--json")
    assert ran.status == 0, ran.err
    told = json.loads(ran.out)
    assert told["compilations"] == 0 and told["rounds"] == 2
    ar, block = told["decoding"]
    assert (ar["variant"], ar["speedup"], ar["break_even"]) == ("ar", 1, 1)
    for d in (ar, block):
        assert d["batch"] == 2 and 2 <= d["tokens"] <= 16
        assert min(d["first_ms"], d["forward_ms"], d["tokens_per_s"]) > 0
        assert d["realised"] == pytest.approx(d["speedup"] / d["tpf"])
    assert block["speedup"] == pytest.approx(block["tokens_per_s"] / ar["tokens_per_s"])
    assert block["break_even"] == pytest.approx(block["forward_ms"] / ar["forward_ms"])
    assert ar["tpf_previews"] is None and block["tpf_previews"] >= block["tpf"]
    assert set(told["pass_ms"]["2"]) == {"AR step", "preview", "commit", "commit + preview"}
    assert told["prefill_tokens_per_s"]["2"] > 0
    assert told["peak_memory"] > 2**20 and told["peak_memory_of"] == "process"
    shown = clover(*arguments)
    assert shown.out.startswith("| variant |") and "0 compilations after the warm-up" in shown.out


def test_a_compilation_is_counted():
    before = compilations()
    once = jax.jit(lambda x: x * 3 + 1)
    once(2.0)
    after = compilations()
    assert after > before
    once(4.0)
    assert compilations() == after


def test_autoregressive_models_are_refused(clover: Clover, tmp_path: Path):
    cfg = clover_tiny().replace(
        num_layers=2, full_attention_interval=2, bd_gdn=None, mask_token_id=None,
        **{"moe.coreset": None},
    )  # fmt: skip
    checkpoint.save(tmp_path / "ar", cfg, random_params(cfg))
    ran = clover("bench", "--checkpoint", tmp_path / "ar")
    assert (ran.status, ran.out) == (2, "") and "autoregressive" in ran.err


CHEAP = {"moe.coreset": None, "delta.value_head_dim": 16}  # llama.cpp wants key and value alike


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("inferna") is None, reason="llama.cpp's wheel exists for Linux on x86-64 only"
)
def test_a_preset_gets_random_weights_that_are_removed(clover: Clover, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arguments = ("--batch", 1, "--rounds", 1, "--max-tokens", 4, "--against", "llama.cpp")
    monkeypatch.setitem(PRESETS, "small", lambda: clover_tiny().replace(num_layers=4, **CHEAP))
    ran = clover("bench", "--preset", "small", *arguments, "--json")
    assert ran.status == 0, ran.err
    (rival,) = json.loads(ran.out)["against"]
    assert rival["name"] == "llama.cpp" and "inferna" in rival["versions"]
    assert rival["agreeing"] == rival["tokens"] == 4
    assert min(rival["prefill_ratio"], rival["ar_ratio"]) > 0
    assert list(tmp_path.iterdir()) == []


REFUSALS = {
    "rounds": (("bench", "--rounds", 0), "rounds 0"),
    "batch": (("bench", "--batch", 0), "batch sizes [0]"),
    "preset": (("bench", "--preset", "huge"), "expected one of clover_35b_a3b"),
    "both": (("bench", "--preset", "clover_bench", "--checkpoint", "x"), "choose one"),
    "rivals": (("bench", "--batch", 2, "--against", "llama.cpp"), "need batch size 1"),
    "no folder": (("card", "--checkpoint", "nowhere", "--out", "x"), "nowhere is not a folder"),
    "parent": (("card", "--parent", "nowhere", "--out", "x"), "nowhere is not a folder"),
    "run": (("card", "--run", "log", "--out", "x"), "NAME=DIR"),
    "size": (("card", "--n", 0, "--out", "x"), "at least 1"),
}


def test_a_file_in_the_way_of_a_card(clover: Clover, tmp_path: Path):
    (tmp_path / "card").write_text("mine")
    ran = clover("card", "--out", tmp_path / "card")
    assert (ran.status, ran.out) == (2, "") and "is a file" in ran.err
    assert (tmp_path / "card").read_text() == "mine"


@pytest.mark.parametrize(("arguments", "said"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(arguments, said, clover: Clover, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    ran = clover(*arguments)
    assert (ran.status, ran.out) == (2, "") and said in ran.err
    assert list(tmp_path.iterdir()) == []
