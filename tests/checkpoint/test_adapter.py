"""Adapter folders: PEFT's names and layouts, checked by hand; round trips; what is refused."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from clover_jax import checkpoint
from clover_jax.checkpoint import adapter as adapter_module
from clover_jax.checkpoint import load_adapter, merge_adapter, save, save_adapter
from clover_jax.errors import CloverError
from clover_jax.model.lora import LoRAConfig, init, unstack_adapter
from tests.checkpoint.folders import (
    assert_same,
    clover_small,
    qwen_small,
    random_params,
    read_file,
    read_folder,
)

CFG = clover_small()
ALL = LoRAConfig(
    rank=3, alpha=5.0, targets=("linear", "lm_head"),
    train=("block", "norms", "router", "embed_tokens", "conv1d", "A_log"),
)  # fmt: skip
HEAD = "base_model.model."


@functools.cache
def adapter(lora: LoRAConfig = ALL, cfg: Any = CFG) -> Any:
    """Random values in every leaf, as numpy arrays."""
    rng = np.random.default_rng(1)  # not that of `random_params`
    start = jax.eval_shape(
        lambda p, k: init(p, lora, k), random_params(cfg), jax.eval_shape(jax.random.key, 0)
    )
    return jax.tree.map(lambda s: (0.1 * rng.normal(size=s.shape)).astype(np.float32), start)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return read_file(folder / "adapter_model.safetensors")


def rewrite(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    (folder / "adapter_model.safetensors").unlink()
    save_file(tensors, folder / "adapter_model.safetensors")


def reconfigure(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("prefix", ("", "language_model"))
def test_round_trip(tmp_path: Path, prefix: Any):
    """Bit for bit, from stacked and from unstacked layers, with each leaf's whole name."""
    report = save_adapter(tmp_path / "a", CFG, adapter(), ALL, base="some/base", prefix=prefix)
    got, lora = load_adapter(tmp_path / "a", CFG)
    assert_same(got, adapter())
    assert (lora.rank, lora.alpha) == (3, 5.0)
    kinds = tuple(adapter_module.RULES)
    assert lora.select(kinds) == ALL.select(kinds)
    apart = unstack_adapter(adapter(), CFG)
    save_adapter(tmp_path / "b", CFG, apart, lora, base="some/base", prefix=prefix)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert report.tensors == len(tensors_of(tmp_path / "a"))
    level = f"{HEAD}model.{prefix}.layers." if prefix else f"{HEAD}model.layers."
    names = {n for n in tensors_of(tmp_path / "a") if ".layers." in n}
    assert names and all(n.startswith(level) for n in names)


def test_config_in_the_words_of_peft(tmp_path: Path):
    lora = LoRAConfig(rank=4, alpha=8.0, targets=("attention", "experts"), train=("norms", "A_log"))
    save_adapter(tmp_path / "a", CFG, adapter(lora), lora, base="some/base")
    got = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    want = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none",
        "base_model_name_or_path": "some/base",
        "target_modules": [f"self_attn.{x}_proj" for x in "koqv"],
        "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
        "modules_to_save": [
            "input_layernorm", "linear_attn.norm", "model.norm", "post_attention_layernorm",
            "self_attn.k_norm", "self_attn.q_norm",
        ],
        "clover_parameters": ["linear_attn.A_log"],
    }  # fmt: skip
    assert {key: got[key] for key in want} == want


def merged_by_hand(base: dict[str, np.ndarray], change: dict[str, np.ndarray], scale: float):
    """PEFT's own formulas on the tensors of the two files, in float64."""
    out = {name: np.asarray(t, np.float64) for name, t in base.items()}
    for name, b in change.items():
        module = name.removeprefix(HEAD)
        if not module.endswith(".lora_B.weight"):
            if not module.endswith(".lora_A.weight"):
                out[module] = np.asarray(b, np.float64)
            continue
        module = module.removesuffix(".lora_B.weight")
        a = np.asarray(change[f"{HEAD}{module}.lora_A.weight"], np.float64)
        if "experts" not in module.split("."):  # a module: B A
            assert out[f"{module}.weight"].shape == (b.shape[0], a.shape[1])
            out[f"{module}.weight"] += scale * b @ a
            continue
        outer = module.removesuffix(".base_layer")
        leaf = "gate_up_proj" if outer != module else "down_proj"
        weight = out[f"{outer}.{leaf}"]
        experts = weight.shape[0]
        a = a.reshape(experts, -1, a.shape[1])  # experts x rank x in
        b = b.reshape(b.shape[0], -1, experts)  # out x rank x experts
        weight += scale * np.einsum("ore,eri->eoi", b, a)
    return out


@pytest.mark.parametrize("layout", ("fused", "per_expert"))
def test_merged_export_is_what_the_two_files_say(tmp_path: Path, layout: Any):
    params = random_params(CFG)
    save(tmp_path / "base", CFG, params)
    save(tmp_path / "as_given", CFG, params, layout=layout, prefix="language_model")
    (tmp_path / "as_given" / "tokenizer.json").write_text("{}")
    save_adapter(tmp_path / "adapter", CFG, adapter(), ALL, base="base")
    merge_adapter(tmp_path / "as_given", tmp_path / "adapter", tmp_path / "merged")
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    report = checkpoint.inspect(tmp_path / "merged")
    assert (report.experts, report.prefix) == (layout, "language_model")
    cfg, got, _ = checkpoint.load(tmp_path / "merged")
    assert cfg == CFG
    save(tmp_path / "plain", CFG, got)
    got, old = read_folder(tmp_path / "plain"), read_folder(tmp_path / "base")
    want = merged_by_hand(old, tensors_of(tmp_path / "adapter"), 5 / 3)
    assert got.keys() == want.keys()
    same = {name for name in old if np.array_equal(got[name], old[name])}
    assert {name.rpartition(".")[-1] for name in same} == {"dt_bias"}
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-6, err_msg=name)


def test_pruned_experts(tmp_path: Path):
    """A model with fewer experts in some layers has as many factors there, and zeros in memory."""
    cfg = clover_small(**{"moe.experts_per_layer": (4, 3, 2, 4, 4, 2)})
    lora = LoRAConfig(rank=2, targets=("experts.down_proj",), train=("router",))
    save_adapter(tmp_path / "a", cfg, adapter(lora, cfg), lora, base="base")
    tensor = tensors_of(tmp_path / "a")[f"{HEAD}model.layers.1.mlp.experts.lora_A.weight"]
    assert tensor.shape == (3 * 2, cfg.moe.intermediate)
    got, _ = load_adapter(tmp_path / "a", cfg)
    change = np.asarray(got.layers.linear.mlp.experts.down_proj.lora_A)
    want = adapter(lora, cfg).layers.linear.mlp.experts.down_proj.lora_A
    np.testing.assert_array_equal(change[0, 1, :3], want[0, 1, :3])
    assert not change[0, 1, 3:].any()


def test_an_adapter_of_another_writer(tmp_path: Path):
    """Module names without their owners, settings that change nothing here, bfloat16 tensors."""
    lora = LoRAConfig(rank=3, targets=("attention",))
    save_adapter(tmp_path / "a", CFG, adapter(lora), lora, base="base")
    reconfigure(
        tmp_path / "a", target_modules=["v_proj", "q_proj", "k_proj", "o_proj"], lora_alpha=16,
        lora_dropout=0.1, peft_version="0.21.2", use_qalora=False, qalora_group_size=16,
        megatron_core="megatron.core", rank_pattern={}, layers_to_transform=None,
    )  # fmt: skip
    half = {n: t.astype("bfloat16") for n, t in tensors_of(tmp_path / "a").items()}
    rewrite(tmp_path / "a", half)
    got, read = load_adapter(tmp_path / "a", CFG)
    assert read.alpha == 16
    assert_same(got, jax.tree.map(lambda a: a.astype("bfloat16").astype(np.float32), adapter(lora)))


# --- what is refused ------------------------------------------------------------------------------

ATTENTION = LoRAConfig(rank=3, targets=("attention",))
Q = f"{HEAD}model.layers.2.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapter(tmp_path / "a", CFG, adapter(ATTENTION), ATTENTION, base="base")
    return tmp_path / "a"


def test_tensors_that_do_not_fit(folder: Path):
    """All of them are named."""
    tensors = tensors_of(folder)
    tensors["stray"] = tensors.pop(Q)
    v = Q.replace("q_proj", "v_proj")
    tensors[v] = np.ascontiguousarray(tensors[v].T)
    k = Q.replace("q_proj", "k_proj")
    tensors[k] = tensors[k].astype(np.float64)
    rewrite(folder, tensors)
    with pytest.raises(CloverError) as caught:
        load_adapter(folder, CFG)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"cannot load the adapter {folder}:"
    for kind, what in (
        ("missing tensor (1", Q), ("unknown tensor (1", "stray"),
        ("wrong shape (1", f"{v} is [20, 3], expected [3, 20]"), ("wrong dtype (1", f"{k} is F64"),
    ):  # fmt: skip
        assert [x for x in lines if x.strip().startswith(kind) and what in x], (kind, lines)


def test_a_damaged_file(folder: Path):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CloverError, match="truncated"):
        load_adapter(folder, CFG)


CONFIGS = {
    "another method": ({"peft_type": "LOHA"}, "peft_type is not LORA"),
    "scaled otherwise": ({"use_rslora": True}, "use_rslora is True"),
    "ranks by module": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    "some layers": ({"layers_to_transform": [0]}, r"layers_to_transform is \[0\]"),
    "biases": ({"bias": "all"}, "bias is all"),
    "of tomorrow": ({"frobnicate": 1}, "frobnicate is 1"),
    "no rank": ({"r": None}, "r is None"),
    "rank is true": ({"r": True}, "r is True"),
    "no list": ({"target_modules": "all-linear"}, "target_modules is all-linear: expected a list"),
    "unknown module": ({"target_modules": ["wq"]}, "target_modules names 'wq'"),
    "no rank at all": ({"r": 0}, "rank is 0"),
    "other rank": ({"r": 4}, r"expected \[4, 20\]"),
    "other module": ({"target_modules": ["in_proj_z"]}, "missing tensor"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIGS.values(), ids=CONFIGS)
def test_configs_that_are_not_understood(folder: Path, changes: dict, message: str):
    reconfigure(folder, **changes)
    with pytest.raises(CloverError, match=message):
        load_adapter(folder, CFG)


def test_what_is_no_adapter_folder(folder: Path, tmp_path: Path):
    with pytest.raises(CloverError, match="nowhere is not an adapter folder"):
        load_adapter(tmp_path / "nowhere", CFG)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(CloverError, match=r"adapter_config\.json cannot be read"):
        load_adapter(folder, CFG)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(CloverError, match="peft_type"):
        load_adapter(folder, CFG)


def test_an_adapter_of_another_model(tmp_path: Path):
    lora = LoRAConfig(rank=2, targets=("q_proj",), train=("block",))
    save_adapter(tmp_path / "a", CFG, adapter(lora), lora, base="base")
    with pytest.raises(CloverError, match="bd_softmax"):
        load_adapter(tmp_path / "a", qwen_small())
    with pytest.raises(CloverError, match=r"q_proj\.lora_B is"):
        save_adapter(
            tmp_path / "b",
            clover_small(**{"attention.head_dim": 16}),
            adapter(lora),
            lora,
            base="x",
        )
    with pytest.raises(CloverError, match="lora_A is missing"):
        save_adapter(tmp_path / "b", CFG, adapter(lora), ALL, base="base")
    assert not (tmp_path / "b").exists()


def test_all_or_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(CloverError, match="not empty"):
        save_adapter(folder, CFG, adapter(), ALL, base="base")
    save(tmp_path / "model", CFG, random_params(CFG))
    with pytest.raises(
        CloverError, match=r"has no adapter_config\.json: it will not be overwritten"
    ):
        save_adapter(tmp_path / "model", CFG, adapter(), ALL, base="base", overwrite=True)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(adapter_module, "write_json", fail)
        with pytest.raises(CloverError, match="No space left"):
            save_adapter(folder, CFG, adapter(), ALL, base="base", overwrite=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "model"]
    save_adapter(folder, CFG, adapter(), ALL, base="base", overwrite=True)
    assert_same(load_adapter(folder, CFG)[0], adapter())


def test_merging_checks_the_target_first(folder: Path, tmp_path: Path):
    """Before tens of gigabytes are read."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(CloverError, match="full is not empty"):
        merge_adapter(tmp_path / "nowhere", folder, tmp_path / "full")
