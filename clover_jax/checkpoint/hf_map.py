"""Which tensor of a Hugging Face checkpoint fills which part of which leaf, in both directions.

One table. A rule's pattern is read from our leaf to their tensor when saving and the other way
when loading; both are views, so reading a slice of a leaf touches only that slice's bytes.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal

import numpy as np
from einops import rearrange

from clover_jax.config import ModelConfig
from clover_jax.model.leaves import leaf_kind
from clover_jax.model.transformer import param_specs
from clover_jax.params import named_leaves

type ExpertLayout = Literal["fused", "per_expert"]
type NamePrefix = Literal["", "language_model"]

# Left out when loading: multi-token prediction and vision.
IGNORED_PREFIXES = ("mtp.", "model.visual.", "visual.")

_L = "model.layers.{layer}."
# Our leaf (its `leaf_kind`) -> their name, and the axes: ours -> theirs. Letters: v vocabulary,
# d model width, c channels, k taps, h heads, x head channel, e experts, f expert width.
RULES = {
    "embed_tokens": ("model.embed_tokens.weight", "v d -> v d"),
    "norm": ("model.norm.weight", "d -> d"),
    "lm_head": ("lm_head.weight", "d v -> v d"),
    "input_layernorm": (_L + "input_layernorm.weight", "d -> d"),
    "post_attention_layernorm": (_L + "post_attention_layernorm.weight", "d -> d"),
    "linear_attn.in_proj_qkv": (_L + "linear_attn.in_proj_qkv.weight", "d c -> c d"),
    "linear_attn.in_proj_z": (_L + "linear_attn.in_proj_z.weight", "d c -> c d"),
    "linear_attn.in_proj_a": (_L + "linear_attn.in_proj_a.weight", "d h -> h d"),
    "linear_attn.in_proj_b": (_L + "linear_attn.in_proj_b.weight", "d h -> h d"),
    "linear_attn.conv1d": (_L + "linear_attn.conv1d.weight", "k c -> c 1 k"),
    "linear_attn.A_log": (_L + "linear_attn.A_log", "h -> h"),
    "linear_attn.dt_bias": (_L + "linear_attn.dt_bias", "h -> h"),
    "linear_attn.norm": (_L + "linear_attn.norm.weight", "x -> x"),
    "linear_attn.out_proj": (_L + "linear_attn.out_proj.weight", "c d -> d c"),
    "linear_attn.conv_right_weight": (_L + "linear_attn.conv_right_weight", "k c -> c k"),
    "linear_attn.bd_softmax_logit_scale": (_L + "linear_attn.bd_softmax_logit_scale", "h -> h"),
    "linear_attn.bd_softmax_history_bias": (_L + "linear_attn.bd_softmax_history_bias", "h -> h"),
    "linear_attn.bd_softmax_history_c": (_L + "linear_attn.bd_softmax_history_c", "h -> h"),
    "self_attn.q_proj": (_L + "self_attn.q_proj.weight", "d h x -> (h x) d"),
    "self_attn.k_proj": (_L + "self_attn.k_proj.weight", "d h x -> (h x) d"),
    "self_attn.v_proj": (_L + "self_attn.v_proj.weight", "d h x -> (h x) d"),
    "self_attn.o_proj": (_L + "self_attn.o_proj.weight", "h x d -> d (h x)"),
    "self_attn.q_norm": (_L + "self_attn.q_norm.weight", "x -> x"),
    "self_attn.k_norm": (_L + "self_attn.k_norm.weight", "x -> x"),
    "mlp.gate": (_L + "mlp.gate.weight", "d e -> e d"),
    "mlp.experts.gate_up_proj": (_L + "mlp.experts.gate_up_proj", "e d f -> e f d"),
    "mlp.experts.down_proj": (_L + "mlp.experts.down_proj", "e f d -> e d f"),
    "mlp.shared_expert.gate_proj": (_L + "mlp.shared_expert.gate_proj.weight", "d f -> f d"),
    "mlp.shared_expert.up_proj": (_L + "mlp.shared_expert.up_proj.weight", "d f -> f d"),
    "mlp.shared_expert.down_proj": (_L + "mlp.shared_expert.down_proj.weight", "f d -> d f"),
    "mlp.shared_expert_gate": (_L + "mlp.shared_expert_gate.weight", "d 1 -> 1 d"),
}
# Stored as w where the scale is 1 + w.
ZERO_CENTRED = frozenset(
    ("norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
)
BLOCK_DIFFUSION = frozenset(
    leaf for leaf in RULES if leaf.startswith(("linear_attn.bd_", "linear_attn.conv_right"))
)
_ONE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor and the box of a stacked leaf that it fills.

    Attributes:
        name: Hugging Face name, without the `language_model` level.
        pattern: axes of the box past its leading ones -> axes of the tensor.
        start: first index of the box.
        shape: its sizes; 1 along the axes that layers (and single experts) are stacked on.
        file_shapes: tensor shapes that are accepted; the first is the one that is written. Others
            hold the same values in the same order, or one value for several heads in a row.
    """

    name: str
    pattern: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file_shapes: tuple[tuple[int, ...], ...]

    def to_leaf(self, tensor: np.ndarray) -> np.ndarray:
        """The tensor as the box: a view of it, unless its shape is not the one we write."""
        written = self.file_shapes[0]
        if tensor.shape != written:
            heads = math.prod(written) // tensor.size
            tensor = np.repeat(tensor.reshape(-1), heads).reshape(written)
        ours, theirs = self.pattern.split(" -> ")
        sizes = _axis_sizes(ours, self.shape)
        return rearrange(tensor, f"{theirs} -> {ours}", **sizes).reshape(self.shape)

    def to_file(self, leaf: np.ndarray) -> np.ndarray:
        """The box of a whole leaf as the tensor, in row-major order."""
        box = leaf[tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))]
        axes = self.pattern.split(" -> ")[0].split()
        box = box.reshape(self.shape[len(self.shape) - len(axes) :])
        return np.ascontiguousarray(rearrange(box, self.pattern))


def pieces(cfg: ModelConfig) -> dict[str, list[Piece]]:
    """Leaf path -> the tensors that fill it, experts fused. What no tensor fills is zero."""
    return {
        path: [_piece(path, spec.shape, layer, lead, cfg) for layer, lead in _places(path, cfg)]
        for path, spec in named_leaves(param_specs(cfg)).items()
    }


def per_expert(piece: Piece) -> list[Piece]:
    """The box of a fused expert tensor as one tensor per expert and matrix."""
    *lead, experts, rows, columns = piece.shape
    zeros = (0,) * len(lead)

    def one(expert: int, matrix: str, pattern: str, first: int, width: int) -> Piece:
        offset = (*zeros, expert, 0, first)
        return Piece(
            f"{piece.name.rpartition('.')[0]}.{expert}.{matrix}.weight",
            pattern,
            tuple(a + b for a, b in zip(piece.start, offset, strict=True)),
            (*lead, 1, rows, width),
            ((width, rows),),
        )

    if piece.name.endswith("down_proj"):
        return [one(e, "down_proj", "f d -> d f", 0, columns) for e in range(experts)]
    half = columns // 2
    return [
        one(e, matrix, "d f -> f d", first, half)
        for e in range(experts)
        for matrix, first in (("gate_proj", 0), ("up_proj", half))
    ]


def canonical(name: str) -> str:
    """A tensor's name without the `language_model` level."""
    head = "model.language_model."
    return "model." + name.removeprefix(head) if name.startswith(head) else name


def with_prefix(name: str, prefix: NamePrefix) -> str:
    """Inverse of `canonical`; `lm_head` never has the level."""
    if not prefix or not name.startswith("model."):
        return name
    return f"model.{prefix}.{name.removeprefix('model.')}"


def fused_name(name: str) -> str | None:
    """The fused tensor that the tensor of one expert is a part of; None for any other name."""
    match = _ONE_EXPERT.fullmatch(name)
    return match and f"{match[1]}.{'down_proj' if match[2] == 'down' else 'gate_up_proj'}"


def _places(path: str, cfg: ModelConfig) -> list[tuple[int | None, tuple[int, ...]]]:
    """(layer number, index on the stacked axes) of every tensor of a leaf."""
    every, groups = cfg.full_attention_interval, range(cfg.num_groups)
    if path.startswith("layers.linear."):
        return [(g * every + j, (g, j)) for g in groups for j in range(cfg.linear_per_group)]
    if path.startswith("layers.full."):
        return [(g * every + every - 1, (g,)) for g in groups]
    return [(None, ())]


def _piece(
    path: str, leaf: tuple[int, ...], layer: int | None, lead: tuple[int, ...], cfg: ModelConfig
) -> Piece:
    kind = leaf_kind(path)
    name, pattern = RULES[kind]
    ours, theirs = pattern.split(" -> ")
    own = list(leaf[len(lead) :])
    if "e" in ours.split() and cfg.moe.experts_per_layer is not None and layer is not None:
        own[ours.split().index("e")] = cfg.moe.experts_per_layer[layer]
    written = composed_shape(theirs, _axis_sizes(ours, tuple(own)))
    return Piece(
        name.format(layer=layer),
        pattern,
        (*lead, *(0 for _ in own)),
        (*(1 for _ in lead), *own),
        (written, *_other_shapes(kind, written, cfg)),
    )


def _other_shapes(
    kind: str, written: tuple[int, ...], cfg: ModelConfig
) -> tuple[tuple[int, ...], ...]:
    """No public source gives the shapes of the released block-diffusion tensors: take them all."""
    if kind not in BLOCK_DIFFUSION:
        return ()
    if kind == "linear_attn.conv_right_weight":
        channels, taps = written
        return ((channels, 1, taps),)
    counts = {cfg.delta.num_value_heads, cfg.delta.num_key_heads, 1}
    return tuple(s for n in sorted(counts, reverse=True) for s in ((n,), (n, 1)) if s != written)


def composed_shape(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that one side of a pattern describes; an axis without a size has 1."""
    groups = re.findall(r"\(([^)]*)\)|(\S+)", axes)
    return tuple(
        math.prod(sizes.get(axis, 1) for axis in (several or single).split())
        for several, single in groups
    )


def _axis_sizes(axes: str, shape: tuple[int, ...]) -> dict[str, int]:
    """Sizes of named axes, the last ones of a shape."""
    names = axes.split()
    sizes = zip(names, shape[len(shape) - len(names) :], strict=True)
    return {name: size for name, size in sizes if name != "1"}
