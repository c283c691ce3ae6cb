"""`clover verify` on committed traces: it passes what is right, and says where what is wrong is."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax import checkpoint
from clover_jax import verify as verify_package
from clover_jax.cli import main
from clover_jax.config import ModelConfig
from clover_jax.diffusion.loss import LossConfig
from clover_jax.model import deltanet
from clover_jax.verify import ours
from clover_jax.verify.causal import compare_causal
from clover_jax.verify.compare import Report
from clover_jax.verify.limits import LIMITS
from clover_jax.verify.preview import compare_preview, compare_training
from clover_jax.verify.trace import Tensors, read_trace

pytestmark = pytest.mark.slow  # whole passes with taps, compiled once a test

GOLDENS = Path(__file__).parents[1] / "goldens"
QWEN, CLOVER = GOLDENS / "qwen36_tiny", GOLDENS / "clover_tiny"


def quiet(_line: str) -> None: ...


def first_group(tensors: Tensors) -> Tensors:
    """The trace of the first four layers, without logits."""
    later = tuple(f"{kind}.{i}" for kind in ("layers", "hidden") for i in range(4, 8))
    kept = {name: a for name, a in tensors.items() if name.startswith(("layers.", "hidden."))}
    kept = {name: a for name, a in kept.items() if not name.startswith(later)}
    return {"ids": tensors["ids"], **kept}


def verify_qwen(**changes: Any) -> Report:
    """The first group of the tiny Qwen under a changed config; a new config is compiled anew."""
    norms = changes.pop("norms", None)
    cfg, params, _ = checkpoint.load(QWEN, norms=norms)
    tensors, about = read_trace(QWEN / "goldens.safetensors")
    return compare_causal(
        cfg.replace(**changes), params, first_group(tensors), about,
        against="golden", precision="highest", progress=quiet, limits=LIMITS["float32"],
    )  # fmt: skip


def located(report: Report) -> tuple[int | None, str]:
    assert not report.ok
    first = report.first_diverging
    assert first is not None
    return first.layer, first.tap


def test_goldens_name_the_versions_that_made_them():
    """Rounding points moved between versions of transformers: a golden is of one of them."""
    how = (Path(verify_package.__file__).parent / "oracles" / "README.md").read_text()
    for golden in (*QWEN.glob("goldens*"), *CLOVER.glob("[pt]*.safetensors")):
        _, about = read_trace(golden)
        assert f"torch=={about['torch'].removesuffix('+cpu')} " in how, golden
        assert f"transformers=={about['transformers']} " in how, golden


def test_command_on_a_trace(capsys, tmp_path: Path):
    picture = tmp_path / "heat.png"
    golden = str(QWEN / "goldens.safetensors")
    arguments = ["verify", str(QWEN), "--against", "golden", "--golden", golden]
    assert main([*arguments, "--json", "--png", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["versions"]["theirs"]["transformers"] == "5.24.0"
    assert report["versions"]["ours"]["platform"] == "cpu"
    assert (report["precision"], report["dtype"], report["length"]) == ("highest", "float32", 70)
    assert {tap["layer"] for tap in report["taps"]} == set(range(8))
    assert [row["path"] for row in report["logits"]] == [
        "whole", "pieces of 64", "last 16 one at a time",
    ]  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_norm_without_plus_one_is_located():
    assert located(verify_qwen(norms="plain")) == (0, "mixer_in")


def test_rotary_on_all_channels_is_located():
    assert located(verify_qwen(**{"attention.rotary_dim": 16})) == (3, "mixer_out")


def test_tiled_value_heads_are_located(monkeypatch: pytest.MonkeyPatch):
    """Value head h must read key head h // group, not h % key_heads."""
    right = deltanet.gated_delta

    def tiled(q, k, v, *rest, **static):
        group = v.shape[2] // q.shape[2]
        q, k = (jnp.tile(x, (1, 1, group, 1)) for x in (q, k))
        return right(q, k, v, *rest, **static)

    monkeypatch.setattr(deltanet, "gated_delta", tiled)
    assert located(verify_qwen(max_position_embeddings=8001)) == (0, "o")


def test_sign_of_the_decay_is_located(monkeypatch: pytest.MonkeyPatch):
    right = deltanet.gdn_inputs

    def growing(p, x, valid):
        inputs = right(p, x, valid)
        return inputs._replace(g=-inputs.g)

    for module in (deltanet, ours):
        monkeypatch.setattr(module, "gdn_inputs", growing)
    assert located(verify_qwen(max_position_embeddings=8002)) == (0, "g")


@pytest.fixture(scope="module")
def clover() -> tuple[ModelConfig, Any]:
    cfg, params, _ = checkpoint.load(CLOVER)
    return cfg, params


def test_preview_and_reveal(clover):
    cfg, params = clover
    tensors, about = read_trace(CLOVER / "preview.safetensors")
    report = compare_preview(
        cfg, params, tensors, about, threshold=0.95, precision="highest", progress=quiet
    )
    assert report.ok, report.first_diverging
    assert [row.path for row in report.logits] == ["preview", "fused with a commit"]
    assert {tap.tap for tap in report.taps} >= {"history_share", "experts", "reveal"}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"moe.norm_topk_prob": False}, (0, "moe_out")),
        ({"moe.coreset": None}, (0, "experts")),
        ({"bd_gdn.right_order": "next_last"}, (0, "q")),
        ({"bd_gdn.history_query": "scaled"}, (0, "o")),
    ],
    ids=["weights not renormalised", "no coreset", "taps reversed", "scaled query"],
)
def test_a_changed_operator_is_located(clover, change: dict, where: tuple[int, str]):
    cfg, params = clover
    tensors, about = read_trace(CLOVER / "preview.safetensors")
    del tensors["preview.logits"]
    report = compare_preview(
        cfg.replace(**change), params, tensors, about,
        threshold=0.95, precision="highest", progress=quiet,
    )  # fmt: skip
    assert located(report) == where


def test_training_loss_and_every_gradient(clover):
    cfg, params = clover
    tensors, about = read_trace(CLOVER / "training.safetensors")
    report = compare_training(
        cfg, params, tensors, about, loss=LossConfig(), precision="highest"
    )  # fmt: skip
    assert report.ok, report.first_diverging
    gradients = [tap for tap in report.taps if tap.tap.startswith("grad.")]
    files = sum(len(tensors) for tensors in checkpoint.hf_map.pieces(cfg).values())
    assert len(gradients) == files
    assert all(np.abs(np.asarray(tensors[tap.tap])).max() > 0 for tap in gradients)


def test_our_own_trace_is_inside_the_limits(capsys, tmp_path: Path):
    """What `clover logits --taps` writes is a trace that `clover verify` takes."""
    out = tmp_path / "trace.safetensors"
    ids = "3 1 4 1 5 9 2 6 50 35"
    assert main(["logits", str(CLOVER), "--token-ids", ids, "--out", str(out), "--taps"]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    tensors, about = read_trace(out)
    assert about["oracle"] == "clover logits"
    assert tensors["logits"].shape == (1, 10, 64)
    assert main(["verify", str(CLOVER), "--against", "golden", "--golden", str(out)]) == 0
    assert "inside all limits" in capsys.readouterr().out
    changed = tmp_path / "other"
    shutil.copytree(CLOVER, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    assert main(["verify", str(changed), "--against", "golden", "--golden", str(out)]) == 1
    assert "past the limits, first at layer 0 mixer_in" in capsys.readouterr().out


def test_logits_from_a_position_on(tmp_path: Path):
    out, whole = tmp_path / "some.safetensors", tmp_path / "all.safetensors"
    common = ["logits", str(CLOVER), "--token-ids", "3 1 4 1 5 9 2 6", "--out"]
    assert main([*common, str(whole)]) == 0
    assert main([*common, str(out), "--positions-from", "5"]) == 0
    some, every = read_trace(out)[0]["logits"], read_trace(whole)[0]["logits"]
    np.testing.assert_allclose(some, every[:, 5:], atol=1e-5)
