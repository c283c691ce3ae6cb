"""Low-rank adapters as folders in the format of PEFT, and their merging into a checkpoint folder.

`adapter_config.json` says what is adapted, `adapter_model.safetensors` holds the tensors, in
float32, under `base_model.model.` and the Hugging Face name of the module, with weights [out, in]
and heads in Hugging Face order:

    …self_attn.q_proj.lora_A.weight     [rank, in]
    …self_attn.q_proj.lora_B.weight     [out, rank]
    …mlp.experts.lora_A.weight          [experts · rank, in], expert by expert
    …mlp.experts.lora_B.weight          [out, rank · experts], rank by rank
    …input_layernorm.weight             a leaf that was trained in full

Routed experts are one 3-D parameter each, no modules: PEFT's `target_parameters`, in the layout of
PEFT from 0.20 on (older ones take in for out). Where both parameters are adapted, PEFT wraps
down_proj around gate_up_proj, and the latter's names have `experts.base_layer` for `experts`.

Modules that were trained in full are listed as `modules_to_save`. Bare parameters (A_log,
bd_softmax_*, …) have no such list in PEFT: they are in our own `clover_parameters`, and PEFT leaves
their tensors out.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from safetensors.numpy import save_file

from clover_jax.checkpoint.hf_map import (
    RULES,
    NamePrefix,
    Piece,
    canonical,
    composed_shape,
    pieces,
    with_prefix,
)
from clover_jax.checkpoint.json_text import parse, show
from clover_jax.checkpoint.loading import load
from clover_jax.checkpoint.report import NormStorage, Problem, problem_lines
from clover_jax.checkpoint.safetensors_io import WEIGHT_DTYPES, MappedFiles, read_index
from clover_jax.checkpoint.saving import (
    SaveReport,
    check_leaves,
    new_folder,
    require_free,
    save,
    stacked,
    write_json,
)
from clover_jax.config import ModelConfig
from clover_jax.errors import CloverError
from clover_jax.model.leaves import choose, leaf_kind, matrix_axes
from clover_jax.model.lora import Adapter, LoRAConfig, init, merge
from clover_jax.model.transformer import param_specs
from clover_jax.params import abstract, named_leaves

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_HEAD = "base_model.model."
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# Keys of adapter_config.json that do not change what the tensors mean. Any other one that is not
# read must be off.
_HARMLESS = frozenset(
    ("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type",
     "inference_mode", "lora_dropout", "init_lora_weights", "layers_pattern", "loftq_config",
     "eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core",
     "qalora_group_size", "runtime_config")
)  # fmt: skip
_LISTS = ("target_modules", "target_parameters", "modules_to_save", "clover_parameters")


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the file and the part of a leaf of the stacked adapter that it is."""

    name: str
    leaf: str
    index: tuple[int | slice, ...]
    pattern: str  # axes of the part -> axes of the tensor
    sizes: dict[str, int]
    shape: tuple[int, ...]

    def to_file(self, leaf: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(rearrange(leaf[self.index], self.pattern), np.float32)

    def to_leaf(self, tensor: np.ndarray) -> np.ndarray:
        ours, theirs = self.pattern.split(" -> ")
        return rearrange(tensor, f"{theirs} -> {ours}", **self.sizes)


def save_adapter(
    folder: Path | str,
    cfg: ModelConfig,
    adapter: Adapter,
    lora: LoRAConfig,
    *,
    base: Path | str,
    prefix: NamePrefix = "",
    overwrite: bool = False,
) -> SaveReport:
    """Writes an adapter; `load_adapter` gives back the same bits. All or nothing, as `save`.

    Args:
        folder: must not exist, or be empty.
        cfg: the model that it adapts.
        adapter: of stacked or unstacked weights.
        lora: its config.
        base: the folder or the name of the model, for `base_model_name_or_path`.
        prefix: level in the names, as the base has it.
        overwrite: replace the folder if it is an adapter's. All its files go.

    Raises:
        CloverError: the folder is in the way or cannot be written, or the adapter is not one of
            these configs.
    """
    leaves = named_leaves(stacked(adapter, cfg))
    check_leaves(named_leaves(_template(cfg, lora)), leaves)
    parts = _tensors(cfg, lora)
    folder = Path(folder)
    tensors = {_with_level(t.name, prefix): t.to_file(np.asarray(leaves[t.leaf])) for t in parts}
    with new_folder(folder, overwrite=overwrite, mark=ADAPTER_CONFIG) as building:
        save_file(tensors, building / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (building / ADAPTER_WEIGHTS).chmod(0o644)  # the writer's files are only their owner's
        write_json(building / ADAPTER_CONFIG, _to_peft(cfg, lora, str(base)))
    size = sum(tensor.nbytes for tensor in tensors.values())
    return SaveReport(folder, (ADAPTER_WEIGHTS,), len(tensors), size)


def load_adapter(folder: Path | str, cfg: ModelConfig) -> tuple[Adapter, LoRAConfig]:
    """Loads an adapter, ours or PEFT's, for stacked weights (`lora.unstack_adapter` for others).

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        cfg: the model that it adapts.

    Raises:
        CloverError: names every tensor that is missing, unknown, damaged or of another shape than
            the configs say, and settings of PEFT that are not known here.
    """
    folder = Path(folder)
    lora = _from_peft(folder / ADAPTER_CONFIG)
    template = _template(cfg, lora)
    index = read_index(folder)
    found = {_without_level(t.name): t for t in index.tensors.values()}
    problems, lost = [*index.problems], {_without_level(name) for name in index.lost}
    sources = []
    for part in _tensors(cfg, lora):
        tensor = found.pop(part.name, None)
        if tensor is None:
            if part.name not in lost:
                problems.append(Problem("missing tensor", part.name))
            continue
        sources.append((part, tensor))
        if tensor.shape != part.shape:
            what = f"{show(tensor.name)} is {list(tensor.shape)}, expected {list(part.shape)}"
            problems.append(Problem("wrong shape", what))
        if tensor.dtype not in WEIGHT_DTYPES:
            problems.append(Problem("wrong dtype", f"{show(tensor.name)} is {tensor.dtype}"))
    problems += [Problem("unknown tensor", tensor.name) for tensor in found.values()]
    if problems:
        lines = "".join(f"\n  {line}" for line in problem_lines(problems))
        raise CloverError(f"cannot load the adapter {folder}:{lines}")
    # Experts that a pruned model does not have stay zero.
    leaves = {path: np.zeros(s.shape, s.dtype) for path, s in named_leaves(template).items()}
    files = MappedFiles()
    for part, tensor in sources:
        leaves[part.leaf][part.index] = part.to_leaf(files.view(tensor))
    arrays = [jnp.asarray(leaf) for leaf in leaves.values()]
    return jax.tree.unflatten(jax.tree.structure(template), arrays), lora


def merge_adapter(
    base: Path | str,
    adapter: Path | str,
    target: Path | str,
    *,
    norms: NormStorage | None = None,
    overwrite: bool = False,
) -> SaveReport:
    """Writes a base with an adapter merged into it, in the base's dtype, names and layout.

    Memory: the base, and the adapted weights a second time.

    Args:
        base: checkpoint folder; its other files are copied.
        adapter: adapter folder.
        target: must not exist, or be empty.
        norms: of the base, as for `load`; the target's are stored zero-centred.
        overwrite: replace the target if it is a checkpoint folder.

    Raises:
        CloverError: as `load`, `load_adapter` and `save`.
    """
    require_free(Path(target), overwrite)
    cfg, params, report = load(base, norms=norms)
    change, lora = load_adapter(adapter, cfg)
    return save(
        target,
        cfg,
        jax.jit(merge, static_argnames="lora")(params, change, lora=lora),
        layout="per_expert" if report.experts == "per_expert" else "fused",
        prefix=report.prefix,
        files_from=base,
        overwrite=overwrite,
    )


def _template(cfg: ModelConfig, lora: LoRAConfig) -> Adapter:
    """The stacked adapter's shapes."""
    start = functools.partial(init, lora=lora)
    return jax.eval_shape(
        lambda params, key: start(params, key=key),
        abstract(param_specs(cfg)),
        jax.eval_shape(lambda: jax.random.key(0)),
    )


def _tensors(cfg: ModelConfig, lora: LoRAConfig) -> list[_Tensor]:
    """The tensors of an adapter's file."""
    whole = pieces(cfg)
    low_rank, trained = lora.select(tuple(dict.fromkeys(map(leaf_kind, whole))))
    both = low_rank.issuperset(_EXPERTS)
    found = []
    for path, boxes in whole.items():
        kind = leaf_kind(path)
        for box in boxes:
            if kind in low_rank:
                nested = both and kind == _EXPERTS[0]
                found += _factors(path, box, lora.rank, "experts.base_layer" if nested else None)
            elif kind in trained:
                found.append(_part(_HEAD + box.name, path, box, box.pattern, {}))
    return found


def _factors(path: str, box: Piece, rank: int, module: str | None) -> list[_Tensor]:
    """Both factors of a weight; `module` is the last part of the module's name if it is another."""
    axes = matrix_axes(leaf_kind(path))
    assert axes is not None
    letters = box.pattern.split(" -> ")[0].split()
    stack = " ".join(letters[: len(letters) - sum(axes)])  # e, or nothing
    inputs = " ".join(letters[len(letters) - sum(axes) : len(letters) - axes.outputs])
    outputs = " ".join(letters[len(letters) - axes.outputs :])
    name = _HEAD + box.name.removesuffix(".weight")
    if stack:  # of a bare parameter, its owner is the module
        owner = name.rpartition(".")[0]
        name = owner if module is None else f"{owner.rpartition('.')[0]}.{module}"
    a = f"{stack} {inputs} r -> ({stack} r) ({inputs})"
    b = f"{stack} r {outputs} -> ({outputs}) (r {stack})"
    return [
        _part(f"{name}.lora_A.weight", f"{path}.lora_A", box, a, {"r": rank}),
        _part(f"{name}.lora_B.weight", f"{path}.lora_B", box, b, {"r": rank}),
    ]


def _part(name: str, leaf: str, box: Piece, pattern: str, more: dict[str, int]) -> _Tensor:
    letters = box.pattern.split(" -> ")[0].split()
    lead = len(box.shape) - len(letters)
    sizes = dict(zip(letters, box.shape[lead:], strict=True)) | more
    ours, theirs = pattern.split(" -> ")
    index = (*box.start[:lead], *(slice(sizes[axis]) for axis in ours.split()))
    named = {axis: sizes[axis] for axis in ours.split() if axis != "1"}
    return _Tensor(name, leaf, index, pattern, named, composed_shape(theirs, named))


def _with_level(name: str, prefix: NamePrefix) -> str:
    return _HEAD + with_prefix(name.removeprefix(_HEAD), prefix)


def _without_level(name: str) -> str:
    return _HEAD + canonical(name.removeprefix(_HEAD)) if name.startswith(_HEAD) else name


def _modules() -> dict[str, str]:
    """Leaf kind -> the last parts of its Hugging Face name, without `.weight`."""
    return {
        kind: name.removeprefix("model.layers.{layer}.").removesuffix(".weight")
        for kind, (name, _) in RULES.items()
    }


def _to_peft(cfg: ModelConfig, lora: LoRAConfig, base: str) -> dict[str, Any]:
    kinds = tuple(dict.fromkeys(map(leaf_kind, pieces(cfg))))
    low_rank, trained = lora.select(kinds)
    modules = _modules()
    is_module = lambda kind: RULES[kind][0].endswith(".weight")
    listed = lambda kinds: sorted(modules[kind] for kind in kinds)
    bare = listed(k for k in trained if not is_module(k))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "target_modules": listed(low_rank.difference(_EXPERTS)),
        "target_parameters": listed(low_rank.intersection(_EXPERTS)) or None,
        "modules_to_save": listed(filter(is_module, trained)) or None,
        **({"clover_parameters": bare} if bare else {}),
    }


def _from_peft(path: Path) -> LoRAConfig:
    """What adapter_config.json says.

    Raises:
        CloverError: it cannot be read, or says what is not known here.
    """
    try:
        content = parse(path.read_bytes())
    except FileNotFoundError:
        raise CloverError(
            f"{path.parent} is not an adapter folder: it has no {path.name}"
        ) from None
    except (OSError, ValueError) as error:
        raise CloverError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise CloverError(f"{path} is not the config of a LoRA adapter: peft_type is not LORA")
    rank: Any = content.get("r")
    alpha: Any = content.get("lora_alpha")
    number = lambda x, kinds: isinstance(x, kinds) and not isinstance(x, bool)
    if not number(rank, int) or not number(alpha, int | float):
        raise CloverError(f"{path}: r is {show(rank)}, lora_alpha {show(alpha)}: expected numbers")
    lists = {key: content.get(key) or [] for key in _LISTS}
    for key, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise CloverError(f"{path}: {key} is {show(value)}: expected a list of names")
    for key, value in content.items():
        known = key in _HARMLESS or key in lists or key in ("peft_type", "r", "lora_alpha")
        if not known and value and (key, value) != ("bias", "none"):
            raise CloverError(f"{path}: {show(key)} is {show(value)}, which is not known here")
    kinds = {module: kind for kind, module in _modules().items()}
    of = lambda key: {kinds[m] for m in choose(lists[key], kinds, f"{path}: {key}")}
    return LoRAConfig(
        rank=rank,
        alpha=float(alpha),
        targets=tuple(sorted(of("target_modules").difference(_EXPERTS) | of("target_parameters"))),
        train=tuple(sorted(of("modules_to_save") | of("clover_parameters"))),
    )
