"""Bytes of weights, caches and training state: of the whole, and of the fullest device.

Everything is counted from the real specs and shapes, leaf by leaf; nothing is allocated, and no
device is needed.
"""

import collections
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from clover_jax.cache import cache_shapes, cache_shardings
from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.model.leaves import leaf_kind, matrix_axes
from clover_jax.model.placement import state_shardings
from clover_jax.model.transformer import param_specs
from clover_jax.params import ParamSpec, abstract, named_leaves
from clover_jax.plan.devices import WeightFormat
from clover_jax.sharding import MESH_AXES, AxisRules, shardings
from clover_jax.train.step import OptimiserConfig, init_state

ROUTED = "routed experts"
GRADIENTS = "gradients"  # temporaries of a step
_PARTS = {
    "embed_tokens": "embedding",
    "lm_head": "lm_head",
    "linear_attn": "GDN mixers",
    "self_attn": "attention mixers",
    "mlp": "shared experts, routers",
}
# Small, and a rounding error in them compounds: decays, write strengths, gates.
_KEPT = ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.shared_expert_gate")


class Bytes(NamedTuple):
    """Of the whole, and of one device (every device has the same)."""

    total: int
    device: int


def planned_env(sizes: tuple[int, int, int], rules: AxisRules) -> Env:
    """An env on a mesh of sizes (data, expert, tensor), larger than what is here if need be.

    It is for counting: every place of its mesh is the first device, and nothing can run on it.
    """
    places = np.full(sizes, jax.devices()[0], object)
    return Env(mesh=Mesh(places, MESH_AXES, axis_types=(AxisType.Auto,) * 3), rules=rules)


def weights(cfg: ModelConfig, env: Env, form: WeightFormat) -> dict[str, Bytes]:
    """Bytes of each part of a model's weights.

    Raises:
        CloverError: the mesh does not divide a weight.
    """
    specs = param_specs(cfg)
    places = named_leaves(shardings(specs, env.mesh, env.rules))  # pyright: ignore[reportArgumentType]

    def stored(name: str, spec: ParamSpec) -> Bytes:
        shapes = (spec.shape, places[name].shard_shape(spec.shape))
        return Bytes(*(_stored(name, spec, shape, cfg, form) for shape in shapes))

    return _sum((part_of(name), stored(name, spec)) for name, spec in named_leaves(specs).items())


def caches(cfg: ModelConfig, rows: int, capacity: int, env: Env) -> dict[str, Bytes]:
    """Bytes of a decode cache, by what is in it."""
    names = {"k": "KV cells", "v": "KV cells", "state": "GDN states", "ring": "conv rings"}
    shapes = cache_shapes(cfg, rows, capacity)
    places = cache_shardings(shapes, env)
    return _sum(
        (names.get(name, "last hidden states"), _size(getattr(shapes, name), getattr(places, name)))
        for name in shapes._fields
    )


def training(cfg: ModelConfig, optimiser: OptimiserConfig, env: Env) -> dict[str, Bytes]:
    """Bytes of float32 masters, gradients and the optimiser's state (an average included)."""
    masters = abstract(param_specs(cfg.replace(dtype="float32")))
    state = jax.eval_shape(lambda p: init_state(p, optimiser), masters)
    size = lambda tree: whole(map(_size, jax.tree.leaves(tree[0]), jax.tree.leaves(tree[1])))
    places = state_shardings(state, cfg, env)
    params = size((state.params, places.params))
    return {
        "float32 masters": params,
        GRADIENTS: params,
        "optimiser state": size(
            ((state.optimiser, state.ema, state.step), (places.optimiser, places.ema, places.step))
        ),
    }


def part_of(name: str) -> str:
    """The part of the model that a weight belongs to."""
    kind = leaf_kind(name)
    if kind.startswith("mlp.experts."):
        return ROUTED
    return _PARTS.get(kind.partition(".")[0], "norms")


def whole(parts: Iterable[Bytes]) -> Bytes:
    """Their sum."""
    parts = tuple(parts)
    return Bytes(sum(p.total for p in parts), sum(p.device for p in parts))


def _sum(found: Iterable[tuple[str, Bytes]]) -> dict[str, Bytes]:
    sums: dict[str, list[Bytes]] = collections.defaultdict(list)
    for name, size in found:
        sums[name].append(size)
    return {name: whole(sizes) for name, sizes in sums.items()}


def _size(leaf: Any, place: NamedSharding) -> Bytes:
    item = jnp.dtype(leaf.dtype).itemsize
    return Bytes(*(math.prod(s) * item for s in (leaf.shape, place.shard_shape(leaf.shape))))


def _stored(
    name: str, spec: ParamSpec, shape: tuple[int, ...], cfg: ModelConfig, form: WeightFormat
) -> int:
    """Bytes of a weight of this shape, with its scales if it is stored in fewer bits."""
    kind, size = leaf_kind(name), math.prod(shape)
    axes = matrix_axes(kind)
    kept = kind in _KEPT or jnp.dtype(spec.dtype) != jnp.dtype(cfg.dtype)
    if form.bits is None or axes is None or kept:
        return size * jnp.dtype(spec.dtype).itemsize
    inputs = math.prod(shape[-sum(axes) : len(shape) - axes.outputs])
    scales = size // inputs * -(-inputs // form.group)
    return -(-size * form.bits // 8) + scales * form.scale_bits // 8
