"""`clover info`, `clover checkpoint convert` and `clover checkpoint merge`."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax import checkpoint
from clover_jax.cli import info as info_module
from clover_jax.model.lora import LoRAConfig, init
from clover_jax.params import named_leaves
from clover_jax.presets import PRESETS
from tests.cli.conftest import Clover, config
from tests.model.small import random_params


def test_preset_sizes(clover: Clover):
    """Against a count by hand from the published config.json."""
    facts = json.loads(clover("info", "--preset", "qwen36_35b_a3b", "--json").out)
    width, experts, vocab = 2048, 256, 248320
    expert = 3 * width * 512
    moe = width * experts + experts * expert + expert + width  # router, experts, shared, its gate
    channels = 2 * 16 * 128 + 32 * 128
    gdn = width * (channels + 32 * 128 + 2 * 32) + 4 * channels + 2 * 32 + 128 + 32 * 128 * width
    attention = width * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * width + 2 * 256
    total = 30 * gdn + 10 * attention + 40 * (moe + 2 * width) + 2 * vocab * width + width
    assert facts["parameters"] == total
    assert facts["active_parameters"] == total - 40 * (experts - 8) * expert
    assert facts["cache_bytes_per_token"] == 10 * 2 * 2 * 256 * 2
    assert facts["cache_bytes_per_row"] == 30 * (32 * 128 * 128 * 4 + 3 * channels * 2)
    assert sum(c["parameters"] for c in facts["components"]) == total
    assert facts["problems"] == []


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_text(clover: Clover, preset: str):
    ran = clover("info", "--preset", preset)
    assert ran.status == 0
    assert f"preset {preset}" in ran.out and "bytes per token" in ran.out


def test_folder(clover: Clover, model: Path):
    ran = clover("info", model)
    assert ran.status == 0 and "routed experts" in ran.out and config().hash in ran.out
    facts = json.loads(clover("info", model, "--json").out)
    assert facts["config"]["vocab_size"] == config().vocab_size
    assert facts["memory_bytes"] == sum(c["memory_bytes"] for c in facts["components"])


def test_folder_that_would_not_load(clover: Clover, model: Path, tmp_path: Path):
    for path in model.iterdir():
        if path.name != "model.safetensors":
            os.link(path, tmp_path / path.name)
    ran = clover("info", tmp_path)
    assert ran.status == 1 and "missing tensor" in ran.out
    ran = clover("info", tmp_path, "--json")
    assert ran.status == 1 and "missing" in json.loads(ran.out)["problems"][0]


def test_packaged_model_is_the_default(
    clover: Clover, model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(info_module, "packaged_model", lambda: model)
    assert str(model) in clover("info").out


def test_convert_then_info(clover: Clover, model: Path, tmp_path: Path):
    cfg = config().replace(bd_gdn=None, mask_token_id=None, **{"moe.coreset": None})
    base, target = tmp_path / "base", tmp_path / "clover"
    checkpoint.save(base, cfg, random_params(cfg), files_from=model)
    ran = clover("checkpoint", "convert", base, target)
    assert ran.status == 0 and str(target) in ran.out
    assert json.loads(clover("info", target, "--json").out)["config"]["mask_token_id"] == 5
    again = clover("checkpoint", "convert", base, target)
    assert again.status == 2 and "not empty" in again.err
    assert clover("checkpoint", "convert", base, target, "--overwrite").status == 0


def test_merge_then_info(clover: Clover, model: Path, tmp_path: Path):
    lora = LoRAConfig(rank=2, targets=("q_proj",), train=("A_log",))
    change = init(random_params(config()), lora, jax.random.key(0))
    change = jax.tree.map(jnp.ones_like, change)
    checkpoint.save_adapter(tmp_path / "lora", config(), change, lora, base=model)
    merge = ("checkpoint", "merge", model, tmp_path / "lora", tmp_path / "merged")
    ran = clover(*merge)
    assert ran.status == 0 and f"wrote {tmp_path / 'merged'}" in ran.out
    assert clover("info", tmp_path / "merged").status == 0
    got, old = (named_leaves(checkpoint.load(f)[1]) for f in (tmp_path / "merged", model))
    for name, value in got.items():
        # Two columns of ones times two rows of ones, scaled by 32 / 2.
        shift = 32 if name.endswith("q_proj") else 0
        want = np.ones_like(value) if name.endswith("A_log") else np.asarray(old[name]) + shift
        np.testing.assert_allclose(value, want, rtol=1e-6, err_msg=name)
    again = clover(*merge)
    assert again.status == 2 and "not empty" in again.err
    assert clover(*merge, "--overwrite").status == 0
    wrong = clover("checkpoint", "merge", model, model, tmp_path / "other")
    assert wrong.status == 2 and "is not an adapter folder" in wrong.err
