"""Writes the causal trunk of a folder as GGUF (arch qwen35moe), which llama.cpp runs.

llama.cpp has no block operator, so a Clover folder loses its block-diffusion extras: the file is
the autoregressive model of the same weights, for comparison. It holds no tokenizer: ids in, ids
out.

Where the file differs from the checkpoint (llama.cpp's converter for Qwen3.5): norms that scale by
1 + w hold 1 + w; ssm_a is -exp(A_log); value heads are tiled, [key heads, group] -> [group, key
heads], wherever a value head is an axis.
"""

import concurrent.futures
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clover_jax.checkpoint.hf_map import BLOCK_DIFFUSION, ZERO_CENTRED, Piece, pieces
from clover_jax.checkpoint.loading import Survey, look_through, read_leaf
from clover_jax.checkpoint.report import NormStorage
from clover_jax.checkpoint.safetensors_io import MappedFiles
from clover_jax.config import ModelConfig
from clover_jax.errors import CloverError
from clover_jax.files import whole_file
from clover_jax.model.leaves import leaf_kind
from clover_jax.model.transformer import param_specs
from clover_jax.params import ParamSpec, named_leaves

ARCH = "qwen35moe"

type GGUFType = Literal["f32", "bf16", "q8_0"]
type _Change = Callable[[np.ndarray, ModelConfig], np.ndarray]


def _same(a: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    del cfg
    return a


def _tile_rows(a: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    """Rows of whole value heads, one or value_head_dim each: grouped -> tiled."""
    d = cfg.delta
    group = d.num_value_heads // d.num_key_heads
    heads = a.reshape(d.num_key_heads, group, -1, *a.shape[1:])
    return heads.swapaxes(0, 1).reshape(a.shape)


def _tile_value_rows(a: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    """The same for the last rows of q | k | v."""
    keys = 2 * cfg.delta.num_key_heads * cfg.delta.key_head_dim
    return np.concatenate([a[:keys], _tile_rows(a[keys:], cfg)])


# Checkpoint name within a layer -> name in the file, and what changes.
_LAYER: dict[str, tuple[str, _Change]] = {
    "input_layernorm.weight": ("attn_norm.weight", _same),
    "post_attention_layernorm.weight": ("post_attention_norm.weight", _same),
    "self_attn.q_proj.weight": ("attn_q.weight", _same),
    "self_attn.k_proj.weight": ("attn_k.weight", _same),
    "self_attn.v_proj.weight": ("attn_v.weight", _same),
    "self_attn.o_proj.weight": ("attn_output.weight", _same),
    "self_attn.q_norm.weight": ("attn_q_norm.weight", _same),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", _same),
    "linear_attn.in_proj_qkv.weight": ("attn_qkv.weight", _tile_value_rows),
    "linear_attn.in_proj_z.weight": ("attn_gate.weight", _tile_rows),
    "linear_attn.in_proj_a.weight": ("ssm_alpha.weight", _tile_rows),
    "linear_attn.in_proj_b.weight": ("ssm_beta.weight", _tile_rows),
    "linear_attn.conv1d.weight": (
        "ssm_conv1d.weight",
        lambda a, cfg: _tile_value_rows(a[:, 0], cfg),
    ),
    "linear_attn.A_log": ("ssm_a", lambda a, cfg: -np.exp(_tile_rows(a, cfg))),
    "linear_attn.dt_bias": ("ssm_dt.bias", _tile_rows),
    "linear_attn.norm.weight": ("ssm_norm.weight", _same),
    "linear_attn.out_proj.weight": ("ssm_out.weight", lambda a, cfg: _tile_rows(a.T, cfg).T),
    "mlp.gate.weight": ("ffn_gate_inp.weight", _same),
    "mlp.shared_expert_gate.weight": ("ffn_gate_inp_shexp.weight", lambda a, cfg: a[0]),
    "mlp.experts.down_proj": ("ffn_down_exps.weight", _same),
    "mlp.shared_expert.gate_proj.weight": ("ffn_gate_shexp.weight", _same),
    "mlp.shared_expert.up_proj.weight": ("ffn_up_shexp.weight", _same),
    "mlp.shared_expert.down_proj.weight": ("ffn_down_shexp.weight", _same),
}
_ROOT = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.*)")


@dataclasses.dataclass(frozen=True)
class GGUFReport:
    """What was written.

    Attributes:
        path: the file.
        tensors: in it.
        left_out: tensors of the block operator, which llama.cpp does not have.
    """

    path: Path
    tensors: int
    left_out: int


def export_gguf(
    folder: Path | str,
    target: Path | str,
    *,
    type: GGUFType = "f32",
    norms: NormStorage | None = None,
    overwrite: bool = False,
) -> GGUFReport:
    """Write a GGUF file; memory stays at about one tensor.

    Args:
        folder: Qwen3.6 or Clover checkpoint.
        target: the file to make.
        type: of matrices whose rows are whole blocks of 32; everything else is float32.
        norms: as for `load`.
        overwrite: replace the target if it exists.

    Raises:
        CloverError: the folder cannot be loaded, experts are pruned, the target is in the way or
            cannot be written, or the package `gguf` is missing.
    """
    try:
        import gguf
    except ImportError:
        raise CloverError(
            "GGUF files need the package gguf: install clover-jax with its extra `verify`"
        ) from None
    target = Path(target)
    survey = look_through(folder, norms=norms)
    cfg = survey.report.require_loadable()
    if cfg.moe.experts_per_layer is not None:
        raise CloverError(f"{folder} has other experts in each layer: GGUF has no place for that")
    if target.exists() and not overwrite:
        raise CloverError(f"{target} exists: choose another file, or overwrite it")
    if not target.parent.is_dir():
        raise CloverError(f"{target.parent} is not a folder: make it first")
    kinds = gguf.GGMLQuantizationType
    wanted = {"f32": kinds.F32, "bf16": kinds.BF16, "q8_0": kinds.Q8_0}[type]
    kind = lambda name, shape: (
        wanted if len(shape) > 1 and shape[-1] % 32 == 0 and _matrix(name) else kinds.F32
    )
    with whole_file(target) as building:
        writer = gguf.GGUFWriter(building, ARCH)
        _describe(writer, cfg)
        count = 0
        # Twice over the tensors, so that only one is in memory: their shapes, then their values.
        for name, tensor in _tensors(cfg, _no_values):
            _announce(writer, name, tensor.shape, kind(name, tensor.shape))
            count += 1
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            read = functools.partial(_read_piece, survey=survey, files=MappedFiles(), pool=pool)
            for name, tensor in _tensors(cfg, read):
                data = np.ascontiguousarray(tensor, np.float32)
                writer.write_tensor_data(gguf.quantize(data, kind(name, data.shape)))
        writer.close()
    left_out = sum(
        len(found) for path, found in survey.sources.items() if leaf_kind(path) in BLOCK_DIFFUSION
    )
    return GGUFReport(target, count, left_out)


def _matrix(name: str) -> bool:
    """What a quantised file quantises: projections, not routers, convs or per-head vectors."""
    if not name.startswith("blk."):
        return True
    return (".ffn_" in name and "_inp" not in name) or ".attn_" in name or ".ssm_out" in name


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: Any) -> None:
    import gguf

    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
        return
    stored = gguf.quant_shape_to_byte_shape(shape, kind)
    size = math.prod(stored)
    writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=kind)


def _describe(writer: Any, cfg: ModelConfig) -> None:
    a, d, m = cfg.attention, cfg.delta, cfg.moe
    writer.add_name("clover_jax export")
    writer.add_block_count(cfg.num_layers)
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_feed_forward_length(m.intermediate)
    writer.add_head_count(a.num_heads)
    writer.add_head_count_kv(a.num_kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    writer.add_rope_freq_base(a.rope_theta)
    writer.add_rope_dimension_count(a.rotary_dim)
    # Pairs take turns (time, height, width); all are the text position. A pair that no section
    # counts would not be rotated. 32 pairs give the base's own [11, 11, 10].
    pairs = a.rotary_dim // 2
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    writer.add_expert_count(m.num_experts)
    writer.add_expert_used_count(m.top_k)
    writer.add_expert_feed_forward_length(m.intermediate)
    writer.add_expert_shared_feed_forward_length(m.shared_intermediate)
    writer.add_ssm_conv_kernel(d.conv_kernel)
    writer.add_ssm_state_size(d.key_head_dim)
    writer.add_ssm_group_count(d.num_key_heads)
    writer.add_ssm_time_step_rank(d.num_value_heads)
    writer.add_ssm_inner_size(d.value_dim)
    writer.add_full_attention_interval(cfg.full_attention_interval)
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_tokenizer_model("none")


type _Read = Callable[[Piece, str, ParamSpec], np.ndarray]


def _tensors(cfg: ModelConfig, read: _Read) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values of the file's tensors, in the orientation of the checkpoint."""
    specs = named_leaves(param_specs(cfg))
    for path, whole in pieces(cfg).items():
        if leaf_kind(path) in BLOCK_DIFFUSION:
            continue
        for piece in whole:
            yield from _renamed(piece.name, read(piece, path, specs[path]), cfg)


def _no_values(piece: Piece, path: str, spec: ParamSpec) -> np.ndarray:
    """A tensor of the right shape that takes no memory."""
    del path, spec
    return np.broadcast_to(np.float32(0), piece.file_shapes[0])


def _read_piece(
    piece: Piece,
    path: str,
    spec: ParamSpec,
    *,
    survey: Survey,
    files: MappedFiles,
    pool: concurrent.futures.Executor,
) -> np.ndarray:
    centred = leaf_kind(path) in ZERO_CENTRED
    plain = survey.report.norms == "plain" and centred
    box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
    leaf = read_leaf(spec, survey.sources[path], box, files=files, pool=pool, plain_norm=plain)
    own = dataclasses.replace(piece, start=(0,) * len(piece.start))
    tensor = own.to_file(leaf).astype(np.float32)
    return tensor + np.float32(1) if centred else tensor


def _renamed(name: str, tensor: np.ndarray, cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    if name in _ROOT:
        yield _ROOT[name], tensor
        return
    match = _LAYER_NAME.fullmatch(name)
    assert match is not None, name
    block, own = f"blk.{match[1]}.", match[2]
    if own == "mlp.experts.gate_up_proj":  # rows of the gate, then of up
        gate, up = np.split(tensor, 2, axis=1)
        yield block + "ffn_gate_exps.weight", gate
        yield block + "ffn_up_exps.weight", up
        return
    target, change = _LAYER[own]
    yield block + target, change(tensor, cfg)
