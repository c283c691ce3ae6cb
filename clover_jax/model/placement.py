"""Where a training state's and a batch's arrays live on a mesh."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.model.leaves import leaf_kind
from clover_jax.model.transformer import param_specs
from clover_jax.params import ParamSpec, initialise, named_leaves, path_name
from clover_jax.sharding import shardings


def state_shardings(state: Any, cfg: ModelConfig, env: Env) -> Any:
    """A tree like `state` of shardings; env has a mesh.

    Each leaf that bears a weight's name is split as the weight is, stacked or not: averages and an
    optimiser's moments, too. The others (steps, an adapter's factors) are on every device.

    Args:
        state: a tree of arrays or abstract arrays: weights, or what a training run carries.
        cfg: the model.
        env: its mesh.
    """
    kinds: dict[str, list[ParamSpec]] = {}  # stacked GDN and attention layers share their kinds
    for name, spec in named_leaves(param_specs(cfg)).items():
        kinds.setdefault(leaf_kind(name), []).append(spec)

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        assert env.mesh is not None
        kind = max(
            (k for k in kinds if f".{path_name(path)}".endswith(f".{k}")), key=len, default=""
        )
        axes: tuple[str | None, ...] = (None,) * leaf.ndim
        for spec in kinds.get(kind, ()):
            if leaf.shape and spec.shape[-leaf.ndim :] == leaf.shape:
                axes = spec.axes[-leaf.ndim :]
        return NamedSharding(env.mesh, env.partition(axes, leaf.shape))

    return jax.tree_util.tree_map_with_path(one, state)


def place(state: Any, cfg: ModelConfig, env: Env) -> Any:
    """The state with each array where `state_shardings` says; without a mesh, on one device."""
    if env.mesh is None:
        return jax.device_put(state, jax.devices()[0])
    return jax.tree.map(put, state, state_shardings(state, cfg, env))


def constrain_state(state: Any, cfg: ModelConfig, env: Env) -> Any:
    """The same inside a compiled function."""
    if env.mesh is None:
        return state
    return jax.tree.map(lax.with_sharding_constraint, state, state_shardings(state, cfg, env))


def place_rows(batch: Any, env: Env) -> Any:
    """A batch with its rows spread over the mesh; without one, on the default device."""
    if env.mesh is None:
        return jax.tree.map(jax.numpy.asarray, batch)
    at = lambda a: NamedSharding(env.mesh, env.partition(_by_row(a), a.shape))  # pyright: ignore
    return jax.tree.map(lambda a: put(a, at(a)), batch)


def put(x: Any, sharding: NamedSharding) -> Array:
    """An array on a mesh whose devices may belong to several processes, all of which have it."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if not is_here(x):
        return x if x.sharding == sharding else _moved(sharding)(x)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def replicate(tree: Any, env: Env) -> Any:
    """Host values on every device; without a mesh, on the default one."""
    if env.mesh is None:
        return jax.tree.map(jax.numpy.asarray, tree)
    everywhere = NamedSharding(env.mesh, PartitionSpec())
    return jax.tree.map(lambda a: put(a, everywhere), tree)


def to_host(tree: Any, env: Env) -> Any:
    """The values of small arrays, on every process that holds a part of them."""
    if env.mesh is not None and not all(map(is_here, jax.tree.leaves(tree))):
        tree = _moved(NamedSharding(env.mesh, PartitionSpec()))(tree)
    return jax.device_get(tree)


def initialised(cfg: ModelConfig, key: Array, env: Env) -> Any:
    """Start values; on a mesh each device computes its own part and no other."""
    specs = param_specs(cfg)
    if env.mesh is None:
        return initialise(specs, key)
    at = shardings(specs, env.mesh, env.rules)
    return jax.jit(lambda key: initialise(specs, key), out_shardings=at)(key)


@contextlib.contextmanager
def first_process_first() -> Iterator[bool]:
    """Whether this is the job's first process; the others go on when it has done the block."""
    yield jax.process_index() == 0
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the first process is done")


def first_process_says(answer: bool) -> bool:
    """The first process's answer, in all of them: clocks differ, and a save is collective."""
    if jax.process_count() == 1:
        return answer
    return bool(multihost_utils.broadcast_one_to_all(np.bool_(answer)))


def is_here(x: Any) -> bool:
    """Whether this process holds all of an array's parts."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def on_host(x: Any) -> np.ndarray:
    """The whole array in this process's memory. Every process must ask for it."""
    if not is_here(x):
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


@functools.cache
def _moved(sharding: NamedSharding) -> Callable[[Any], Any]:
    """Arrays that several processes hold, somewhere else; one compiled function per place."""
    return jax.jit(lambda tree: tree, out_shardings=sharding)


def _by_row(a: Any) -> tuple[str | None, ...]:
    return ("rows",) + (None,) * (a.ndim - 1)
