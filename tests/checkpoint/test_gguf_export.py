"""GGUF files: against llama.cpp itself, and read back by the `gguf` package."""

import dataclasses
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax import checkpoint
from clover_jax.checkpoint.gguf_export import export_gguf
from clover_jax.cli.session import packaged_model
from clover_jax.config import ModelConfig
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.transformer import CleanInput, Params, forward, unembed
from clover_jax.presets import clover_nano
from clover_jax.verify.llama import llama_logits
from tests.checkpoint.folders import clover_small, random_params
from tests.helpers.texts import solved_problems

# Groups of three value heads, a rotary width that is no multiple of six, 32-blocks for q8_0.
SMALL = clover_nano().replace(
    vocab_size=96, hidden_size=64, num_layers=4, bd_gdn=None, mask_token_id=None,
    **{
        "moe.coreset": None, "moe.num_experts": 8, "moe.intermediate": 32,
        "moe.shared_intermediate": 32, "delta.num_key_heads": 2, "delta.num_value_heads": 6,
        "attention.num_heads": 6, "attention.num_kv_heads": 2, "attention.rotary_dim": 20,
    },
)  # fmt: skip


def our_logits(cfg: ModelConfig, params: Params, ids: list[int]) -> np.ndarray:
    clean = CleanInput(jnp.asarray([ids], jnp.int32), jnp.asarray([len(ids)], jnp.int32))
    passed = lambda p: forward(p, clean, None, None, cfg=cfg, env=Env()).hidden.clean
    return np.asarray(jax.jit(lambda p: unembed(p, passed(p)))(params))[0]


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) of logits, per row, in float64."""

    def log(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    return (np.exp(log(p)) * (log(p) - log(q))).sum(-1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "small"
    checkpoint.save(folder, SMALL, random_params(SMALL), dtype="float32")
    return folder


def test_llama_cpp_agrees_on_random_weights(small: Path, tmp_path: Path):
    export_gguf(small, tmp_path / "m.gguf")
    ids = np.random.default_rng(0).integers(0, 96, 150).tolist()
    theirs = llama_logits(tmp_path / "m.gguf", ids)
    cfg, params, _ = checkpoint.load(small)
    ours = our_logits(cfg, params, ids)
    assert np.abs(ours - theirs).max() < 1e-4
    assert divergence(ours, theirs).max() < 1e-8


@pytest.mark.slow
def test_llama_cpp_agrees_on_nano(tmp_path: Path):
    """The causal trunk of the model that ships, on 2,000 tokens: top-1 wherever it is clear.

    Of solved problems: on random tokens its routers nearly tie somewhere, and another expert gives
    other logits.
    """
    cfg, params, _ = checkpoint.load(packaged_model(), dtype="float32")
    report = export_gguf(packaged_model(), tmp_path / "m.gguf")
    assert report.left_out == 4 * cfg.num_layers * 3 // 4
    worst, tokenizer = 0.0, Tokenizer.load(packaged_model())
    for part in range(4):
        ids = solved_problems(tokenizer, 500, skip=12 * part)
        theirs, ours = llama_logits(tmp_path / "m.gguf", ids), our_logits(cfg, params, ids)
        worst = max(worst, divergence(ours, theirs).max())
        best = np.sort(ours, axis=-1)
        clear = best[:, -1] - best[:, -2] > 1e-3
        np.testing.assert_array_equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])
    assert worst < 1e-6


def test_quantised_matrices_stay_near(small: Path, tmp_path: Path):
    ids = np.random.default_rng(0).integers(0, 96, 60).tolist()
    cfg, params, _ = checkpoint.load(small)
    ours = our_logits(cfg, params, ids)
    sizes = {}
    for type, limit in (("f32", 1e-8), ("bf16", 1e-2), ("q8_0", 1e-2)):
        export_gguf(small, tmp_path / type, type=type)
        sizes[type] = (tmp_path / type).stat().st_size
        assert divergence(ours, llama_logits(tmp_path / type, ids)).mean() < limit, type
    assert sizes["q8_0"] < 0.65 * sizes["bf16"] < 0.4 * sizes["f32"]


def test_values_by_hand(small: Path, tmp_path: Path):
    """What the file holds, for the tensors that are not just renamed."""
    export_gguf(small, tmp_path / "m.gguf")
    tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    _, params, _ = checkpoint.load(small)
    linear = params.layers.linear  # first group, first layer
    gdn = jax.tree.map(lambda a: np.asarray(a[0, 0]), linear.linear_attn)
    tiled = [0, 3, 1, 4, 2, 5]  # value heads (key head, group): (0,0) (1,0) (0,1) (1,1) ...
    np.testing.assert_allclose(tensors["blk.0.ssm_a"], -np.exp(gdn.A_log[tiled]), rtol=1e-6)
    np.testing.assert_array_equal(tensors["blk.0.ssm_dt.bias"], gdn.dt_bias[tiled])
    np.testing.assert_array_equal(tensors["blk.0.ssm_norm.weight"], gdn.norm)
    out = gdn.out_proj.reshape(6, -1, 64)[tiled].reshape(-1, 64)
    np.testing.assert_array_equal(tensors["blk.0.ssm_out.weight"], out.T)
    keys = 2 * 2 * 32
    conv = gdn.conv1d.T  # [channels, taps]
    values = conv[keys:].reshape(6, -1, 4)[tiled].reshape(-1, 4)
    np.testing.assert_array_equal(
        tensors["blk.0.ssm_conv1d.weight"], np.concatenate([conv[:keys], values])
    )
    norm = np.asarray(linear.input_layernorm[0, 0]) + np.float32(1)
    np.testing.assert_array_equal(tensors["blk.0.attn_norm.weight"], norm)
    np.testing.assert_array_equal(tensors["output.weight"], np.asarray(params.lm_head).T)
    experts = np.asarray(linear.mlp.experts.gate_up_proj[0, 0])
    np.testing.assert_array_equal(
        tensors["blk.0.ffn_up_exps.weight"], experts[:, :, 32:].swapaxes(1, 2)
    )


def test_sections_of_the_real_model_are_its_own():
    """32 pairs: [11, 11, 10], as its config.json says."""
    written: list[list[int]] = []

    class Writer:
        def __getattr__(self, name):
            return written.append if name == "add_rope_dimension_sections" else lambda *_: None

    from clover_jax.checkpoint.gguf_export import _describe
    from clover_jax.presets import qwen36_35b_a3b

    _describe(Writer(), qwen36_35b_a3b())
    assert written == [[11, 11, 10, 0]]


def test_refusals(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "m.gguf"
    target.write_text("mine")
    with pytest.raises(CloverError, match="exists"):
        export_gguf(small, target)
    assert target.read_text() == "mine"
    with pytest.raises(CloverError, match="not a folder"):
        export_gguf(small, tmp_path / "no" / "m.gguf")
    pruned = clover_small()
    pruned = dataclasses.replace(
        pruned, moe=dataclasses.replace(pruned.moe, experts_per_layer=(4, 3, 4, 4, 4, 4))
    )
    checkpoint.save(tmp_path / "pruned", pruned, random_params(pruned))
    with pytest.raises(CloverError, match="other experts"):
        export_gguf(tmp_path / "pruned", tmp_path / "p.gguf")

    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full_disk)
    with pytest.raises(CloverError, match="cannot be written: no space"):
        export_gguf(small, tmp_path / "half.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "pruned"]
