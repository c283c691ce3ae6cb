"""A weight is declared once, as a `ParamSpec`; everything else about it is derived here.

Model files build trees of `ParamSpec` with the tree's own dataclasses (`gdn_specs(cfg)` returns a
`GDNParams` whose leaves are specs). Initial values, abstract shapes, parameter counts, shardings
and checkpoint templates are maps over such a tree.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

type Init = Callable[[Array, tuple[int, ...]], Array]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axes, start value and dtype of one weight.

    Attributes:
        shape: in our layout, `[in, out...]`.
        axes: one logical axis name or None per dimension, see `sharding.AxisRules`.
        init: fp32 start value from a key and the shape.
        dtype: storage and compute dtype. Norms, router, decay and block-softmax parameters are
            always float32: a rounding error in a decay compounds over thousands of steps.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    dtype: Any

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise TypeError(f"spec of shape {self.shape} declares axes {self.axes}")


def is_spec(x: object) -> bool:
    """Whether a tree node is a `ParamSpec` leaf."""
    return isinstance(x, ParamSpec)


def map_specs(f: Callable[[ParamSpec], Any], specs: Any) -> Any:
    """Map over the specs of a tree."""
    return jax.tree.map(f, specs, is_leaf=is_spec)


def stack(specs: Any, n: int, axis: str) -> Any:
    """The specs of `n` such trees stacked on a new leading dimension."""
    return map_specs(
        lambda s: dataclasses.replace(s, shape=(n, *s.shape), axes=(axis, *s.axes)), specs
    )


def abstract(specs: Any) -> Any:
    """The tree of `jax.ShapeDtypeStruct`."""
    return map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)


def initialise(specs: Any, key: Array) -> Any:
    """Start values. A leaf's key is folded from its path, so no leaf depends on another's shape."""
    flat, tree = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    leaves = [
        s.init(jax.random.fold_in(key, zlib.crc32(path_name(path).encode())), s.shape).astype(
            s.dtype
        )
        for path, s in flat
    ]
    return jax.tree.unflatten(tree, leaves)


def path_name(path: tuple[Any, ...]) -> str:
    """Dotted name of a tree path, e.g. `groups.linear.linear_attn.A_log`."""
    return ".".join(str(getattr(k, "name", getattr(k, "idx", getattr(k, "key", k)))) for k in path)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Dotted path -> leaf, for arrays or specs."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)
    return {path_name(path): leaf for path, leaf in flat}


def count(specs: Any) -> int:
    """Number of parameters of a tree of specs or arrays."""
    return sum(int(np.prod(s.shape)) for s in jax.tree.leaves(specs, is_leaf=is_spec))


def num_bytes(specs: Any) -> int:
    """Bytes of a tree of specs or arrays."""
    return sum(
        int(np.prod(s.shape)) * jnp.dtype(s.dtype).itemsize
        for s in jax.tree.leaves(specs, is_leaf=is_spec)
    )


def cast(specs: Any, params: Any) -> Any:
    """Every leaf in its spec's dtype (bf16 training copies, fp32 files, ...)."""
    return jax.tree.map(lambda s, p: p.astype(s.dtype), specs, params, is_leaf=is_spec)


def zeros(_key: Array, shape: tuple[int, ...]) -> Array:
    """Start value 0."""
    return jnp.zeros(shape, jnp.float32)


def ones(_key: Array, shape: tuple[int, ...]) -> Array:
    """Start value 1."""
    return jnp.ones(shape, jnp.float32)


def normal(std: float) -> Init:
    """Gaussian start values."""
    return lambda key, shape: jnp.float32(std) * jax.random.normal(key, shape, jnp.float32)


def log_uniform_decay(key: Array, shape: tuple[int, ...]) -> Array:
    """`A_log`: log of A ~ U(1, 16), the Mamba-2 / Gated DeltaNet start."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def inverse_softplus_step(key: Array, shape: tuple[int, ...]) -> Array:
    """`dt_bias`: softplus^-1 of a step log-uniform in [1e-3, 1e-1], the Mamba-2 start."""
    low, high = np.log(1e-3), np.log(1e-1)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, float(low), float(high)))
    return step + jnp.log(-jnp.expm1(-step))
