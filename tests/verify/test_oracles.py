"""The live oracles, in their own Python: `pytest -m verify`, after the README beside them."""

import json
from pathlib import Path
from typing import Any

import pytest

from clover_jax.checkpoint import save
from clover_jax.cli import main
from clover_jax.cli.session import packaged_model
from clover_jax.data.tokenizer import Tokenizer
from tests.helpers.texts import solved_problems
from tests.oracles.clover_tiny import config, draw

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-oracle" / "bin" / "python"
QWEN = ROOT / "tests" / "goldens" / "qwen36_tiny"
CLOVER = ROOT / "tests" / "goldens" / "clover_tiny"
pytestmark = [
    pytest.mark.verify,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-oracle: see oracles/README.md"),
]


def verify(capsys: Any, folder: Path, against: str, *options: object) -> dict[str, Any]:
    """The report of a comparison."""
    words = ["verify", folder, "--against", against, "--oracle-python", PYTHON, "--json", *options]
    status = main([str(word) for word in words])
    said = capsys.readouterr()
    assert status in (0, 1), said.err
    report = json.loads(said.out)
    assert report["ok"] == (status == 0)
    return report


def past_limits(report: dict[str, Any]) -> list[Any]:
    """What of a report is not inside its limits."""
    taps = [t for t in (*report["taps"], *report["running"])
            if t["relative_rms"] > t["limit"] or t["differing"]]  # fmt: skip
    return [*taps, *(x for x in (*report["logits"], *report["continuation"]) if not x["ok"])]


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 600])
def test_transformers_at_many_lengths(capsys, length: int):
    report = verify(capsys, QWEN, "hf", "--length", length, "--rows", 2, "--seed", length)
    assert past_limits(report) == []
    assert len(report["continuation"]) == 2
    assert sum(row["positions"] for row in report["logits"][:1]) == 2 * length


UNEVEN = {
    "attention.num_heads": 6, "attention.num_kv_heads": 3, "attention.head_dim": 20,
    "delta.num_value_heads": 6, "delta.key_head_dim": 12, "delta.value_head_dim": 10,
    "moe.num_experts": 5, "moe.top_k": 3, "num_layers": 8, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_transformers_on_uneven_head_counts(capsys, tmp_path: Path):
    """A Clover folder, too: its causal trunk is the base's model."""
    cfg = config(**UNEVEN)
    save(tmp_path / "model", cfg, draw(cfg, seed=3))
    assert past_limits(verify(capsys, tmp_path / "model", "hf", "--length", 77, "--rows", 3)) == []


def test_transformers_on_the_model_that_ships(capsys):
    assert past_limits(verify(capsys, packaged_model(), "hf", "--length", 200)) == []
    assert (
        past_limits(
            verify(capsys, packaged_model(), "hf", "--prompt", "How many legs: 3 cats, 2 ants?")
        )
        == []
    )


def test_transformers_past_position_4000(capsys):
    options = ("--length", 4200, "--positions-from", 4100, "--continuation", 8)
    report = verify(capsys, QWEN, "hf", *options)
    assert past_limits(report) == []
    assert report["logits"][0]["positions"] == 100


def test_transformers_in_bfloat16(capsys):
    prompt = "<|im_start|>user\nHow many legs: 3 cats, 2 ants?<|im_end|>\n<|im_start|>assistant\n"
    assert (
        past_limits(
            verify(capsys, packaged_model(), "hf", "--prompt", prompt, "--dtype", "bfloat16")
        )
        == []
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logits_position": "shifted", "moe.coreset.mass": "softmax", "moe.coreset.pool": "max"},
        {"bd_gdn.operator": "causal", "moe.coreset": None},
        {"bd_gdn.operator": "two_direction", "bd_gdn.right_conv": False},
        {"bd_gdn.operator": "added", "bd_gdn.logit_scale": "exp"},
        {"bd_gdn.operator": "no_history", "bd_gdn.block_value": "beta"},
        {"bd_gdn.block_bias": "decay", "bd_gdn.logit_scale": "softplus"},
        {"bd_gdn.history_logit": "read_norm", "bd_gdn.history_query": "scaled"},
        {"bd_gdn.right_order": "next_last", "bd_gdn.empty_history": "drop"},
        UNEVEN,
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()) or "defaults",
)
def test_torch_preview_under_every_switch(capsys, tmp_path: Path, changes: dict[str, Any]):
    cfg = config(**changes)
    save(tmp_path / "model", cfg, draw(cfg, seed=1))
    assert (
        past_limits(
            verify(capsys, tmp_path / "model", "torch-preview", "--length", 21, "--rows", 2)
        )
        == []
    )
    assert past_limits(verify(capsys, tmp_path / "model", "torch-preview", "--length", 0)) == []


def test_torch_preview_on_the_model_that_ships(capsys):
    assert past_limits(verify(capsys, packaged_model(), "torch-preview", "--length", 40)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logits_position": "shifted", "bd_gdn.block_bias": "decay", "moe.coreset": None},
        {"bd_gdn.operator": "two_direction"},
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()) or "defaults",
)
def test_torch_training_step(capsys, tmp_path: Path, changes: dict[str, Any]):
    cfg = config(**changes)
    save(tmp_path / "model", cfg, draw(cfg, seed=2))
    report = verify(capsys, tmp_path / "model", "torch-training", "--length", 30, "--rows", 2)
    assert past_limits(report) == []
    assert sum(tap["tap"].startswith("grad.") for tap in report["taps"]) > 50


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0"])
def test_llama_cpp_on_the_model_that_ships(capsys, kind: str):
    ids = solved_problems(Tokenizer.load(packaged_model()), 400)
    words = ("--token-ids", " ".join(map(str, ids)), "--gguf-type", kind)
    report = verify(capsys, packaged_model(), "llama.cpp", *words)
    assert past_limits(report) == []
    assert report["versions"]["theirs"]["type"] == kind
