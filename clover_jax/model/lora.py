"""Low-rank adapters (LoRA, arXiv 2106.09685): trained beside frozen weights, merged into them.

An adapter is a tree like the weights it was made for, stacked or not: a `LowRank` where a weight
gets a low-rank change, a float32 array where it is trained in full, None where it stays.
"""

import dataclasses
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array

from clover_jax.config import ModelConfig
from clover_jax.errors import CloverError
from clover_jax.model.leaves import choose, known_kinds, leaf_kind, matrix_axes
from clover_jax.model.transformer import Params
from clover_jax.params import count, named_leaves, num_bytes, path_name

type Adapter = Params  # leaves as above

# Names of several leaves, for `targets` and for `train`.
SETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "gdn": ("in_proj_qkv", "in_proj_z", "out_proj"),
    "shared_expert": (
        "shared_expert.gate_proj",
        "shared_expert.up_proj",
        "shared_expert.down_proj",
    ),
    "experts": ("experts.gate_up_proj", "experts.down_proj"),
    "block": ("bd_softmax_*", "conv_right_weight"),
    "linear": ("*proj", "in_proj_*", "shared_expert_gate"),
    "norms": (
        "norm",
        "linear_attn.norm",
        "input_layernorm",
        "post_attention_layernorm",
        "q_norm",
        "k_norm",
    ),
    "router": ("mlp.gate",),
}


@struct.dataclass
class LowRank:
    """A change of a weight, or of each matrix in a stack: alpha / rank · lora_A lora_B, float32."""

    lora_A: Any  # [*stack, *inputs, rank]
    lora_B: Any  # [*stack, rank, *outputs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """What an adapter trains. There is no dropout: a merged weight has none.

    Attributes:
        rank: of every change; each routed expert has factors of its own.
        alpha: a change is scaled by alpha / rank.
        targets: projections with a low-rank change: names as in `leaves.choose`, or keys of `SETS`.
        train: further leaves that are trained in full, named alike.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("attention", "gdn")
    train: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise CloverError(f"lora rank is {self.rank}: expected at least 1")
        if not 0 < self.alpha < math.inf:
            raise CloverError(f"lora alpha is {self.alpha}: expected a positive finite number")
        low_rank, whole = self.select(known_kinds())
        if not low_rank | whole:
            raise CloverError("lora targets and train are empty: there is nothing to train")

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / self.rank

    def select(self, kinds: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
        """Which of a model's leaves get a low-rank change, and which are trained in full.

        Raises:
            CloverError: a name that means none of them, or a leaf that is in both.
        """
        spelt = lambda names: [part for name in names for part in SETS.get(name, (name,))]
        matrices = tuple(k for k in kinds if matrix_axes(k) is not None)
        low_rank = choose(spelt(self.targets), matrices, "lora targets")
        whole = choose(spelt(self.train), kinds, "lora train")
        if low_rank & whole:
            raise CloverError(
                f"lora targets and train both name {', '.join(sorted(low_rank & whole))}: "
                "expected each leaf in one of them"
            )
        return low_rank, whole


class Size(NamedTuple):
    """How large an adapter is, and what it costs in memory."""

    trained: int  # numbers that are trained
    total: int  # numbers of the model
    merged_bytes: int  # the model's weights that a pass holds a second time, changed


def init(params: Params, lora: LoRAConfig, key: Array) -> Adapter:
    """An adapter that changes nothing yet.

    lora_A is uniform on ±1 / sqrt(inputs), which is PEFT's start (kaiming_uniform with a = sqrt 5),
    lora_B is zero, and leaves trained in full start as copies.

    Args:
        params: weights, stacked or not.
        lora: what is trained.
        key: of lora_A; a leaf's own key is folded from its path.

    Raises:
        CloverError: a name of the config that means no leaf of these weights.
    """
    low_rank, whole = lora.select(tuple(dict.fromkeys(map(leaf_kind, named_leaves(params)))))

    def start(path: tuple[Any, ...], weight: Any) -> LowRank | Array | None:
        name = path_name(path)
        kind = leaf_kind(name)
        if kind in whole:
            return jnp.array(weight, jnp.float32, copy=True)
        axes = matrix_axes(kind)
        if kind not in low_rank or axes is None:
            return None
        stack = weight.shape[: weight.ndim - sum(axes)]
        inputs = weight.shape[len(stack) : len(stack) + axes.inputs]
        outputs = weight.shape[len(stack) + axes.inputs :]
        own, bound = jax.random.fold_in(key, zlib.crc32(name.encode())), math.prod(inputs) ** -0.5
        shape = (*stack, *inputs, lora.rank)
        return LowRank(
            jax.random.uniform(own, shape, jnp.float32, -bound, bound),
            jnp.zeros((*stack, lora.rank, *outputs), jnp.float32),
        )

    return jax.tree_util.tree_map_with_path(start, params)


def merge(params: Params, adapter: Adapter, lora: LoRAConfig) -> Params:
    """The weights with the adapter's changes: W + alpha / rank · A B in float32, in W's dtype.

    Differentiable in the adapter: a training objective merges first, so one forward serves full
    fine-tuning and LoRA. Each target's merged weight exists beside the frozen one during the pass,
    and its gradient during the backward pass. For the 35B in bfloat16 that is 2.56 GB for attention
    and GDN projections, 0.25 GB for the shared experts and 64.4 GB for the routed ones.

    A change of zero leaves every bit but the sign of zeros (-0 becomes 0).

    Args:
        params: weights.
        adapter: of the same form, stacked or not, from `init` or `checkpoint.load_adapter`.
        lora: the adapter's config.
    """

    def changed(weight: Any, change: Any) -> Any:
        if change is None:
            return weight
        if not isinstance(change, LowRank):
            return change.astype(weight.dtype)
        outputs = weight.ndim - change.lora_A.ndim + 1
        stack = weight.shape[: change.lora_B.ndim - 1 - outputs]
        a = change.lora_A.reshape(*stack, -1, lora.rank)
        b = change.lora_B.reshape(*stack, lora.rank, -1)
        product = jnp.matmul(a, b, precision=lax.Precision.HIGHEST).reshape(weight.shape)
        return (weight.astype(jnp.float32) + jnp.float32(lora.scale) * product).astype(weight.dtype)

    return jax.tree.map(changed, params, adapter)


def unstack_adapter(adapter: Adapter, cfg: ModelConfig) -> Adapter:
    """The adapter for unstacked weights; `transformer.restack` is the inverse."""
    groups = adapter.layers
    if isinstance(groups, tuple):
        return adapter
    layers = []
    for g in range(cfg.num_groups):
        for j in range(cfg.linear_per_group):
            layers.append(jax.tree.map(lambda a, g=g, j=j: a[g, j], groups.linear))
        layers.append(jax.tree.map(lambda a, g=g: a[g], groups.full))
    return adapter.replace(layers=tuple(layers))  # pyright: ignore[reportAttributeAccessIssue]


def size(params: Params, adapter: Adapter) -> Size:
    """How large an adapter for these weights is; both may be abstract (`jax.eval_shape`)."""
    held = jax.tree.map(lambda w, change: None if change is None else w, params, adapter)
    return Size(count(adapter), count(params), num_bytes(held))
