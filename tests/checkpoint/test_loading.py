"""Loading: the goldens by hand, all spellings bit-equal, every problem in one error."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from clover_jax.checkpoint import config_to_hf, inspect, load, loading, save
from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.transformer import param_specs
from clover_jax.params import is_spec, named_leaves
from clover_jax.presets import qwen36_35b_a3b
from clover_jax.sharding import AxisRules, make_mesh, shardings
from tests.checkpoint.folders import (
    GOLDEN,
    assert_same,
    clover_small,
    qwen_small,
    random_params,
    read_folder,
    rename,
    write_folder,
)

bf16 = ml_dtypes.bfloat16


def tensors_of(cfg: ModelConfig, folder: Path, **options: Any) -> dict[str, np.ndarray]:
    """A random model's tensors under their Hugging Face names."""
    save(folder, cfg, random_params(cfg), **options)
    return read_folder(folder)


def error(folder: Path) -> str:
    with pytest.raises(CloverError) as caught:
        load(folder)
    return str(caught.value)


def lines_of(message: str) -> dict[str, str]:
    """Kind of problem -> its line."""
    return {line.strip().split(" (")[0]: line for line in message.splitlines()[1:]}


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("something was allocated")

    monkeypatch.setattr(loading, "read_leaf", refuse)
    monkeypatch.setattr(jax, "device_put", refuse)
    monkeypatch.setattr(jax, "make_array_from_callback", refuse)


# What is loaded.


def test_golden_weights_lie_where_they_should():
    """Each formula here is written from the layout's definition, index by index."""
    hf = load_file(GOLDEN / "model.safetensors")
    cfg, params, report = load(GOLDEN)
    leaves = {path: np.asarray(leaf) for path, leaf in named_leaves(params).items()}
    assert cfg.num_groups == 2 and cfg.linear_per_group == 3
    equal = np.testing.assert_array_equal
    equal(leaves["embed_tokens"], hf["model.embed_tokens.weight"])
    equal(leaves["lm_head"][3, 7], hf["lm_head.weight"][7, 3])
    equal(leaves["norm"], hf["model.norm.weight"])
    for layer in range(8):
        g, j = divmod(layer, 4)
        prefix = f"model.layers.{layer}."
        kind, at = ("full", (g,)) if j == 3 else ("linear", (g, j))
        ours = lambda name, kind=kind, at=at: leaves[f"layers.{kind}.{name}"][at]
        theirs = lambda name, prefix=prefix: hf[prefix + name]
        equal(ours("input_layernorm"), theirs("input_layernorm.weight"))
        equal(ours("post_attention_layernorm"), theirs("post_attention_layernorm.weight"))
        equal(ours("mlp.gate").T, theirs("mlp.gate.weight"))
        equal(ours("mlp.shared_expert_gate").T, theirs("mlp.shared_expert_gate.weight"))
        for name in ("gate_proj", "up_proj", "down_proj"):
            equal(ours(f"mlp.shared_expert.{name}").T, theirs(f"mlp.shared_expert.{name}.weight"))
        for e in range(8):
            expert = f"mlp.experts.{e}."
            gate_up = ours("mlp.experts.gate_up_proj")[e]
            equal(gate_up[:, :32].T, theirs(expert + "gate_proj.weight"))
            equal(gate_up[:, 32:].T, theirs(expert + "up_proj.weight"))
            equal(ours("mlp.experts.down_proj")[e].T, theirs(expert + "down_proj.weight"))
        if kind == "linear":
            for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"):
                equal(ours(f"linear_attn.{name}").T, theirs(f"linear_attn.{name}.weight"))
            for k in range(4):
                equal(ours("linear_attn.conv1d")[k], theirs("linear_attn.conv1d.weight")[:, 0, k])
            equal(ours("linear_attn.A_log"), theirs("linear_attn.A_log"))
            equal(ours("linear_attn.dt_bias"), theirs("linear_attn.dt_bias"))
            equal(ours("linear_attn.norm"), theirs("linear_attn.norm.weight"))
        else:
            q, o = ours("self_attn.q_proj"), ours("self_attn.o_proj")
            for h in range(4):  # per head 16 rows of query, then 16 of gate
                rows = theirs("self_attn.q_proj.weight")[32 * h : 32 * h + 32]
                equal(q[:, h, :], rows.T)
                equal(o[h], theirs("self_attn.o_proj.weight")[:, 16 * h : 16 * h + 16].T)
            for h in range(2):
                for name in ("k_proj", "v_proj"):
                    rows = theirs(f"self_attn.{name}.weight")[16 * h : 16 * h + 16]
                    equal(ours(f"self_attn.{name}")[:, h, :], rows.T)
            equal(ours("self_attn.q_norm"), theirs("self_attn.q_norm.weight"))
            equal(ours("self_attn.k_norm"), theirs("self_attn.k_norm.weight"))
    assert report.total.parameters == sum(t.size for t in hf.values())
    assert report.total.file_bytes == sum(t.nbytes for t in hf.values())
    assert report.experts == "per_expert" and report.casts == () and report.warnings == ()
    assert report.other_files == ("goldens.safetensors",)


def test_golden_comes_back(tmp_path: Path):
    """Import, export, import (N5), in the layout it came in: the file's tensors too."""
    cfg, params, _ = load(GOLDEN)
    save(tmp_path / "out", cfg, params, layout="per_expert")
    again, back, _ = load(tmp_path / "out")
    assert again == cfg
    assert_same(back, params)
    ours, theirs = read_folder(tmp_path / "out"), load_file(GOLDEN / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("cfg", [clover_small(), qwen_small()], ids=["clover", "qwen"])
def test_all_spellings_are_bit_equal(cfg: ModelConfig, tmp_path: Path):
    params = random_params(cfg)
    for layout in ("fused", "per_expert"):
        for prefix in ("", "language_model"):
            for size in (10**9, 3000):
                folder = tmp_path / f"{layout}-{prefix}-{size}"
                save(folder, cfg, params, layout=layout, prefix=prefix, max_shard_bytes=size)
                loaded, got, report = load(folder)
                assert loaded == cfg
                assert_same(got, params)
                assert (report.experts, report.prefix) == (layout, prefix)
                assert (len(report.files) > 1) == (size == 3000)
                names = read_folder(folder)
                assert ("model.language_model.norm.weight" in names) == bool(prefix)
                assert "lm_head.weight" in names


def test_layouts_may_differ_between_layers(tmp_path: Path):
    cfg = qwen_small()
    fused = tensors_of(cfg, tmp_path / "a")
    split = tensors_of(cfg, tmp_path / "b", layout="per_expert")
    mixed = {n: t for n, t in fused.items() if not n.startswith("model.layers.2.")}
    mixed |= {n: t for n, t in split.items() if n.startswith("model.layers.2.")}
    _, params, report = load(write_folder(tmp_path / "c", mixed, config_to_hf(cfg)))
    assert_same(params, random_params(cfg))
    assert report.experts == "mixed"


@pytest.mark.parametrize("file_dtype", ["bfloat16", "float16", "float32"])
def test_decays_norms_and_router_stay_float32(file_dtype: str, tmp_path: Path):
    """N2: whatever the file's dtype, through load, save and load again."""
    cfg = clover_small(dtype="bfloat16")
    kind = np.dtype(bf16 if file_dtype == "bfloat16" else file_dtype)
    stored = {n: t.astype(kind) for n, t in tensors_of(cfg, tmp_path / "a").items()}
    _, params, report = load(write_folder(tmp_path / "b", stored, config_to_hf(cfg)))
    exact = ("A_log", "dt_bias", "norm", "layernorm", "mlp.gate", "bd_softmax")
    for path, leaf in named_leaves(params).items():
        is_exact = "gate_up" not in path and any(word in path for word in exact)
        assert leaf.dtype == (np.float32 if is_exact else bf16), path
    a_log = stored["model.layers.4.linear_attn.A_log"]
    assert np.array_equal(params.layers.linear.linear_attn.A_log[1, 1], a_log.astype(np.float32))
    float32_leaves = 6 * 3 + 1 + 4 * 6 + 2 * 2
    bfloat16_leaves = len(stored) - float32_leaves
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    expected = {(names[file_dtype], "float32"): float32_leaves}
    expected[names[file_dtype], "bfloat16"] = bfloat16_leaves
    expected.pop(("F32", "float32"), None)
    expected.pop(("BF16", "bfloat16"), None)
    assert {(c.file_dtype, c.dtype): c.tensors for c in report.casts} == expected
    save(tmp_path / "c", cfg, params)
    assert read_folder(tmp_path / "c")["model.layers.4.linear_attn.A_log"].dtype == np.float32
    assert_same(load(tmp_path / "c")[1], params)


def test_dtype_can_be_asked_for(tmp_path: Path):
    cfg = qwen_small()
    params = random_params(cfg)
    save(tmp_path / "a", cfg, params)
    loaded, got, _ = load(tmp_path / "a", dtype="bfloat16")
    assert loaded == cfg.replace(dtype="bfloat16")
    assert_same(
        got,
        jax.tree.map(lambda s, p: p.astype(s.dtype), param_specs(loaded), params, is_leaf=is_spec),
    )
    assert inspect(tmp_path / "a", dtype="bfloat16").config == loaded


def test_tied_embeddings(tmp_path: Path):
    cfg = qwen_small(tie_word_embeddings=True)
    tensors = tensors_of(cfg, tmp_path / "a")
    assert "lm_head.weight" not in tensors
    _, params, _ = load(tmp_path / "a")
    assert params.lm_head is None


def test_pruned_experts(tmp_path: Path):
    cfg = qwen_small(**{"moe.experts_per_layer": (4, 2, 3, 4, 4, 2)})
    tensors = tensors_of(cfg, tmp_path / "a")
    assert tensors["model.layers.1.mlp.experts.down_proj"].shape[0] == 2
    assert tensors["model.layers.2.mlp.gate.weight"].shape[0] == 3
    loaded, params, report = load(tmp_path / "a")
    assert loaded == cfg
    want = random_params(cfg)
    experts = np.asarray(params.layers.linear.mlp.experts.gate_up_proj[0, 1])
    assert np.array_equal(experts[:2], want.layers.linear.mlp.experts.gate_up_proj[0, 1, :2])
    assert not experts[2:].any()
    assert report.total.parameters == sum(t.size for t in tensors.values())


def test_shapes_of_the_block_diffusion_tensors(tmp_path: Path):
    cfg = clover_small()  # 4 value heads, 2 key heads
    tensors = tensors_of(cfg, tmp_path / "a")
    base = "model.layers.1.linear_attn."
    right = tensors[base + "conv_right_weight"]
    changed = dict(tensors)
    changed[base + "conv_right_weight"] = right[:, None, :]
    changed[base + "bd_softmax_logit_scale"] = np.float32([[1], [2], [3], [4]])
    changed[base + "bd_softmax_history_bias"] = np.float32([5, 6])
    changed[base + "bd_softmax_history_c"] = np.float32([7])
    _, params, _ = load(write_folder(tmp_path / "b", changed, config_to_hf(cfg)))
    gdn = params.layers.linear.linear_attn
    assert np.array_equal(gdn.conv_right_weight[0, 1], right.T)  # tap 0 multiplies the next row
    assert np.array_equal(gdn.bd_softmax_logit_scale[0, 1], [1, 2, 3, 4])
    assert np.array_equal(gdn.bd_softmax_history_bias[0, 1], [5, 5, 6, 6])
    assert np.array_equal(gdn.bd_softmax_history_c[0, 1], [7, 7, 7, 7])


def test_swapping_gate_and_up_changes_the_leaf(tmp_path: Path):
    cfg = qwen_small()
    tensors = tensors_of(cfg, tmp_path / "a", layout="per_expert")
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    swapped = rename(
        tensors,
        lambda n: re.sub(r"(experts\.\d+\.)(gate_proj|up_proj)", lambda m: m[1] + swap[m[2]], n),
    )
    _, params, _ = load(write_folder(tmp_path / "b", swapped, config_to_hf(cfg)))
    want = random_params(cfg).layers.full.mlp.experts.gate_up_proj
    got = np.asarray(params.layers.full.mlp.experts.gate_up_proj)
    assert np.array_equal(got, np.concatenate([want[..., 10:], want[..., :10]], axis=-1))


def test_slices_under_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cfg = clover_small()
    params = random_params(cfg)
    specs = param_specs(cfg)
    shapes: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    read = loading.read_leaf

    def watched(spec, *rest, **options):
        array = read(spec, *rest, **options)
        shapes.setdefault(spec.shape, set()).add(array.shape)
        return array

    monkeypatch.setattr(loading, "read_leaf", watched)
    for layout in ("fused", "per_expert"):
        folder = tmp_path / layout
        save(folder, cfg, params, layout=layout)
        for mesh in (make_mesh(2, 2, 2), make_mesh(1, 4, 2)):
            shapes.clear()
            want = shardings(specs, mesh, AxisRules())
            _, got, _ = load(folder, env=Env(mesh=mesh))
            assert_same(got, params)
            for path, leaf in named_leaves(got).items():
                assert leaf.sharding == named_leaves(want)[path], path
            # Nothing larger than a device's part of the experts was ever read.
            assert shapes[2, 2, 4, 10, 20] == {(2, 2, 1, 10, 20)}
            assert shapes[2, 2, 4, 20, 20] == {(2, 2, 1, 20, 20)}


# What is reported.


def test_ignored_tensors_are_counted(tmp_path: Path):
    cfg = qwen_small()
    tensors = tensors_of(cfg, tmp_path / "a", prefix="language_model")
    tensors["mtp.fc.weight"] = np.zeros((3, 5), bf16)
    tensors["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = np.zeros(7, np.float32)
    tensors["model.visual.patch_embed.proj.bias"] = np.zeros(4, np.int64)
    _, params, report = load(write_folder(tmp_path / "b", tensors, config_to_hf(cfg), shards=2))
    assert_same(params, random_params(cfg))
    assert [tuple(i) for i in report.ignored] == [("mtp.", 2, 58), ("model.visual.", 1, 32)]
    assert any("mtp." in line and "2 tensors" in line for line in report.lines())


def shifted_norms(tensors: dict[str, np.ndarray], shift: float) -> dict[str, np.ndarray]:
    """The same with a shift of the norms that scale by 1 + w, written out by name."""
    ends = ("model.norm.weight", "layernorm.weight", "q_norm.weight", "k_norm.weight")
    return {n: t + np.float32(shift) if n.endswith(ends) else t for n, t in tensors.items()}


def test_norms_stored_plain_load_as_the_same_model(tmp_path: Path):
    """The mean decides; the flag decides against it."""
    cfg = qwen_small(dtype="float32")
    tensors = tensors_of(cfg, tmp_path / "a")
    assert inspect(tmp_path / "a").norms == "zero_centred"
    folder = write_folder(tmp_path / "b", shifted_norms(tensors, 1.0), config_to_hf(cfg))
    _, params, report = load(folder)
    assert report.norms == "plain" and "stored plain" in report.warnings[0]
    for name, want in named_leaves(random_params(cfg)).items():
        np.testing.assert_allclose(named_leaves(params)[name], want, atol=1e-6, err_msg=name)
    _, params, _ = load(folder, norms="zero_centred")
    want = np.asarray(random_params(cfg).norm) + np.float32(1)
    np.testing.assert_array_equal(params.norm, want)


def test_unclear_norms_are_refused_unless_told(tmp_path: Path):
    cfg = qwen_small()
    tensors = tensors_of(cfg, tmp_path / "a")
    folder = write_folder(tmp_path / "b", shifted_norms(tensors, 0.5), config_to_hf(cfg))
    with pytest.raises(CloverError, match=r"unclear norms.*zero_centred.*plain.*mean is 0\.5"):
        load(folder)
    for norms in ("zero_centred", "plain"):
        assert load(folder, norms=norms)[2].norms == norms
    damaged = shifted_norms(tensors, 0.0)
    damaged["model.norm.weight"] = np.full(20, np.inf, np.float32)
    damaged["model.layers.0.input_layernorm.weight"] = np.full(20, -np.inf, np.float32)
    report = inspect(write_folder(tmp_path / "c", damaged, config_to_hf(cfg)))
    assert "NaN" in report.warnings[0] and report.norms is None


def test_unknown_config_keys_are_a_warning(tmp_path: Path):
    save(tmp_path, qwen_small(), random_params(qwen_small()))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 128}))
    _, _, report = load(tmp_path)
    assert report.unknown_config_keys == ("sliding_window",)
    assert any("sliding_window" in line for line in report.lines())


def test_components_of_the_35b():
    """The table of the base's sizes; the published whole is 34,660,610,688."""
    cfg = qwen36_35b_a3b()
    specs = named_leaves(param_specs(cfg))
    found = loading.sum_components(specs, {path: [] for path in specs}, cfg)
    assert {c.name: c.parameters for c in found} == {
        "embedding": 508_559_360,
        "GDN mixers": 30 * 33_718_464,
        "attention mixers": 10 * 27_263_488,
        "routed experts": 40 * 256 * 3_145_728,
        "shared experts + gates": 40 * 3_147_776,
        "routers": 40 * 524_288,
        "norms": 165_888,
        "lm_head": 508_559_360,
    }
    assert sum(c.parameters for c in found) == 34_660_610_688


def test_inspect_says_what_would_not_load(tmp_path: Path):
    tensors = tensors_of(clover_small(), tmp_path / "a")
    del tensors["model.norm.weight"]
    folder = write_folder(tmp_path / "b", tensors, config_to_hf(clover_small()))
    report = inspect(folder)
    assert [tuple(p) for p in report.problems] == [("missing tensor", "model.norm.weight")]
    assert report.config == clover_small()
    extras = next(c for c in report.components if c.name == "block-diffusion extras")
    assert extras.parameters == 4 * (3 * 56 + 3 * 4)
    assert any("problem: missing tensor (1;" in line for line in report.lines())
    (folder / "config.json").unlink()
    report = inspect(folder)
    assert report.config is None and any("config.json" in line for line in report.lines())


# What is refused.


def test_all_problems_come_in_one_error(tmp_path: Path, nothing_allocated: None):
    cfg = clover_small()
    save(tmp_path / "a", cfg, _zeros(cfg))
    tensors = read_folder(tmp_path / "a")
    del tensors["model.layers.2.self_attn.q_norm.weight"]
    tensors["model.layers.2.self_attn.q_norm.bias"] = np.zeros(8, np.float32)
    tensors["model.layers.0.linear_attn.A_log"] = np.zeros(5, np.float32)
    tensors["model.layers.0.linear_attn.dt_bias"] = np.zeros(4, np.int64)
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]
    folder = write_folder(tmp_path / "b", tensors, config_to_hf(cfg), shards=3)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost.weight"] = "model-00009-of-00003.safetensors"
    index.write_text(json.dumps(content))
    lines = lines_of(error(folder))
    assert lines.keys() == {
        *("missing file", "duplicate tensor", "missing tensor", "unknown tensor"),
        *("wrong shape", "wrong dtype"),
    }
    assert "model-00009-of-00003.safetensors" in lines["missing file"]
    assert "incomplete download" in lines["missing file"]
    assert "model.language_model.norm.weight" in lines["duplicate tensor"]
    assert "model.layers.2.self_attn.q_norm.weight" in lines["missing tensor"]
    assert "model.layers.2.self_attn.q_norm.bias" in lines["unknown tensor"]
    assert "A_log is [5], expected [4]" in lines["wrong shape"]
    assert "dt_bias is I64" in lines["wrong dtype"]
    assert all(" (1; " in line for line in lines.values())


def _zeros(cfg: ModelConfig) -> Any:
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), param_specs(cfg), is_leaf=is_spec)


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_dropped_shard_is_named_alone(shard: int, tmp_path: Path, nothing_allocated: None):
    cfg = clover_small()
    save(tmp_path / "a", cfg, _zeros(cfg))
    folder = write_folder(tmp_path / "b", read_folder(tmp_path / "a"), config_to_hf(cfg), shards=3)
    name = f"model-{shard:05}-of-00003.safetensors"
    (folder / name).unlink()
    lines = lines_of(error(folder))
    assert lines.keys() == {"missing file"} and name in lines["missing file"]
    (folder / "model.safetensors.index.json").unlink()  # without it, the tensors are missed
    lines = lines_of(error(folder))
    assert lines.keys() == {"missing tensor"} and "incomplete download" in lines["missing tensor"]


def test_a_cut_shard_is_named_alone(tmp_path: Path, nothing_allocated: None):
    cfg = clover_small()
    save(tmp_path, cfg, _zeros(cfg), max_shard_bytes=20_000)
    file = sorted(tmp_path.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    lines = lines_of(error(tmp_path))
    assert lines.keys() == {"unreadable file"} and file.name in lines["unreadable file"]


def test_long_lists_are_cut(tmp_path: Path, nothing_allocated: None):
    cfg = clover_small()
    folder = write_folder(tmp_path, {"x": np.zeros(1, np.float32)}, config_to_hf(cfg))
    lines = lines_of(error(folder))
    missing = 3 + 4 * (2 + 13 + 7) + 2 * (2 + 6 + 7)
    assert f"missing tensor ({missing};" in lines["missing tensor"]
    assert lines["missing tensor"].count("model.layers.") <= 20
    assert f"and {missing - 20} more" in lines["missing tensor"]


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        (lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight"), "missing tensor", "3.up"),
        (
            lambda t: t.update(
                {"model.layers.2.mlp.experts.4.up_proj.weight": t["lm_head.weight"]}
            ),
            "unknown tensor",
            "experts.4.up",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": t["lm_head.weight"]}),
            "duplicate tensor",
            "experts.0.gate_proj",
        ),
        (
            lambda t: t.update(
                {"model.layers.2.mlp.experts.1.down_proj.weight": np.zeros((10, 20), np.float32)}
            ),
            "wrong shape",
            "experts.1.down_proj.weight is [10, 20], expected [20, 10]",
        ),
    ],
)
def test_problems_of_single_experts(
    change: Callable[[dict[str, Any]], object], kind: str, named: str, tmp_path: Path
):
    cfg = qwen_small()
    tensors = tensors_of(cfg, tmp_path / "a", layout="per_expert")
    change(tensors)
    lines = lines_of(error(write_folder(tmp_path / "b", tensors, config_to_hf(cfg))))
    assert named in lines[kind]


def test_models_of_another_kind(tmp_path: Path, nothing_allocated: None):
    clover, qwen = clover_small(), qwen_small()
    for cfg, other in ((clover, qwen), (qwen, clover)):
        folder = tmp_path / f"{cfg.bd_gdn is None}"
        save(folder, cfg, _zeros(cfg))
        (folder / "config.json").write_text(json.dumps(config_to_hf(other)))
        (kind,) = lines_of(error(folder))
        assert kind == ("unknown tensor" if cfg is clover else "missing tensor")


def test_config_and_weights_are_both_named(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    lines = lines_of(error(tmp_path))
    assert lines.keys() == {"config", "unreadable file"} and "llama" in lines["config"]


def test_no_such_folder(tmp_path: Path):
    for function in (load, inspect):
        with pytest.raises(CloverError, match="not a folder"):
            function(tmp_path / "none")
        with pytest.raises(CloverError, match="not a folder"):
            function(str(GOLDEN / "config.json"))


def test_progress_counts_every_byte_once(tmp_path: Path):
    cfg = clover_small()
    save(tmp_path / "model", cfg, random_params(cfg), layout="per_expert")
    calls: list[tuple[int, int]] = []
    load(tmp_path / "model", progress=lambda done, total: calls.append((done, total)))
    tensors = read_folder(tmp_path / "model")
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert calls[-1] == (total, total)
    assert len(calls) == len(tensors)
    assert calls == sorted(calls)


def test_leaves_are_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a CPU device the buffer that was filled is the weight: no leaf exists twice."""
    cfg, filled = clover_small(), []
    save(tmp_path / "model", cfg, random_params(cfg))
    read = loading.read_leaf

    def watched(*arguments, **options):
        array = read(*arguments, **options)
        filled.append(array.ctypes.data)
        return array

    monkeypatch.setattr(loading, "read_leaf", watched)
    _, params, _ = load(tmp_path / "model")
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)] == filled
