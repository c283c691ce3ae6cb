"""`clover info`, and `clover checkpoint` with `convert`, `merge` and `export`."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from clover_jax import checkpoint, presets
from clover_jax.cache import bytes_per_row, bytes_per_token
from clover_jax.checkpoint.gguf_export import export_gguf
from clover_jax.checkpoint.loading import sum_components
from clover_jax.checkpoint.report import Component, problem_lines
from clover_jax.cli.commands import CheckpointConvert, CheckpointExport, CheckpointMerge, Info
from clover_jax.cli.session import packaged_model
from clover_jax.config import ModelConfig, parse_setting
from clover_jax.errors import CloverError
from clover_jax.model.transformer import param_specs
from clover_jax.params import named_leaves


def info(flags: Info) -> int:
    """Prints what a folder or preset is; returns 1 for a folder that would not load."""
    if flags.preset is not None:
        if flags.folder is not None:
            raise CloverError("a folder and --preset are both given: choose one")
        cfg = presets.named(flags.preset)
        specs = named_leaves(param_specs(cfg))
        components = sum_components(specs, collections.defaultdict(list), cfg)
        problems, warnings = [], ()
        lines = [f"preset {flags.preset}", *(_component_line(c) for c in components)]
    else:
        report = checkpoint.inspect(flags.folder or packaged_model(), norms=flags.norms)
        cfg, components, warnings = report.config, report.components, report.warnings
        problems, lines = problem_lines(report.problems), report.lines()
    if flags.json:
        facts = {} if cfg is None else _facts(cfg, components)
        out = {**facts, "warnings": warnings, "problems": problems}
        print(msgspec.json.format(msgspec.json.encode(out)).decode())
    else:
        print("\n".join([*lines, *([] if cfg is None else _config_lines(cfg, components))]))
    return 1 if problems else 0


def convert(flags: CheckpointConvert) -> int:
    """Converts a folder and prints what was done; returns the exit status."""
    report = checkpoint.convert(
        flags.source,
        flags.target,
        mask_token_id=flags.mask_token_id,
        overwrite=flags.overwrite,
        norms=flags.norms,
        settings=dict(parse_setting(text) for text in flags.set),
    )
    print("\n".join(report.lines()))
    return 0


def merge(flags: CheckpointMerge) -> int:
    """Merges an adapter into its base and prints what was written; returns the exit status."""
    report = checkpoint.merge_adapter(
        flags.base, flags.adapter, flags.target, norms=flags.norms, overwrite=flags.overwrite
    )
    print("\n".join(report.lines()))
    return 0


def export(flags: CheckpointExport) -> int:
    """Writes a GGUF file and prints what is in it; returns the exit status."""
    report = export_gguf(
        flags.source, flags.gguf, type=flags.type, norms=flags.norms, overwrite=flags.overwrite
    )
    print(f"wrote {report.path}: {report.tensors} tensors, {report.path.stat().st_size:,} bytes")
    if report.left_out:
        print(f"left out: {report.left_out} tensors of the block operator")
    return 0


def _facts(cfg: ModelConfig, components: Sequence[Component]) -> dict[str, Any]:
    return {
        "config": dataclasses.asdict(cfg),
        "config_hash": cfg.hash,
        "components": [c._asdict() for c in components],
        "parameters": sum(c.parameters for c in components),
        "active_parameters": _active(cfg, components),
        "memory_bytes": sum(c.memory_bytes for c in components),
        "cache_bytes_per_token": bytes_per_token(cfg),
        "cache_bytes_per_row": bytes_per_row(cfg),
    }


def _active(cfg: ModelConfig, components: Sequence[Component]) -> int:
    """Parameters that one token of a causal pass meets: all but the experts it is not sent to.

    The embedding counts whole, as published sizes do.
    """
    m = cfg.moe
    counts = m.experts_per_layer or (m.num_experts,) * cfg.num_layers
    share = cfg.num_layers * m.top_k / sum(counts)
    return sum(
        round(c.parameters * share) if c.name == "routed experts" else c.parameters
        for c in components
    )


def _component_line(c: Component) -> str:
    return f"{c.name:<22} {c.parameters:>14,} parameters {c.memory_bytes:>14,} bytes"


def _config_lines(cfg: ModelConfig, components: Sequence[Component]) -> list[str]:
    a, d, m = cfg.attention, cfg.delta, cfg.moe
    kind = "Clover" if cfg.bd_gdn is not None else "autoregressive base, cannot denoise blocks"
    coreset = "no coreset" if m.coreset is None else f"coreset {m.coreset.top_p:g}"
    total = sum(c.parameters for c in components)
    return [
        f"{kind}: {total:,} parameters, {_active(cfg, components):,} active per token",
        f"{cfg.num_layers} layers of width {cfg.hidden_size}, every "
        f"{cfg.full_attention_interval}th attention, the others GDN; {cfg.dtype}",
        f"attention {a.num_heads} heads ({a.num_kv_heads} KV) x {a.head_dim}; "
        f"GDN {d.num_key_heads} key, {d.num_value_heads} value heads x "
        f"{d.key_head_dim}, {d.value_head_dim}",
        f"{m.num_experts} experts, top {m.top_k}, and a shared one; {coreset}",
        f"vocabulary {cfg.vocab_size:,}, mask token {cfg.mask_token_id}, block "
        f"{cfg.block_length}, context {cfg.max_position_embeddings:,}",
        f"cache {bytes_per_token(cfg):,} bytes per token and {bytes_per_row(cfg):,} bytes per row",
        f"config {cfg.hash}",
    ]
