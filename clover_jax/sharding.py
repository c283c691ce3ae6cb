"""One table from logical axes to mesh axes; the mesh is always (data, expert, tensor).

Size-1 axes are allowed, so there is one code path from one CPU to a pod.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from clover_jax.errors import CloverError
from clover_jax.params import ParamSpec, map_specs

MESH_AXES = ("data", "expert", "tensor")


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Logical axis name -> mesh axis (or None: replicated), as a hashable tuple of pairs."""

    table: tuple[tuple[str, str | None], ...] = (
        ("group", None),
        ("layer", None),
        ("embed", None),
        ("vocab", "tensor"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("channels", "tensor"),
        ("experts", "expert"),
        ("expert_width", "tensor"),
        ("rows", "data"),
    )

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The partition of an array with these logical axes.

        Raises:
            CloverError: a logical axis without a rule, or a mesh axis used twice in one array.
        """
        table = dict(self.table)
        unknown = [a for a in axes if a is not None and a not in table]
        if unknown:
            raise CloverError(f"no sharding rule for axis {unknown}: rules are {sorted(table)}")
        mesh_axes = [None if a is None else table[a] for a in axes]
        used = [m for m in mesh_axes if m is not None]
        if len(used) != len(set(used)):
            raise CloverError(f"axes {axes} use a mesh axis twice: {mesh_axes}")
        return PartitionSpec(*mesh_axes)


def make_mesh(data: int = 1, expert: int = 1, tensor: int = 1) -> Mesh:
    """A (data, expert, tensor) mesh over the first devices, with Auto axes."""
    devices = jax.devices()
    need = data * expert * tensor
    if need > len(devices):
        raise CloverError(
            f"mesh {data}x{expert}x{tensor} needs {need} devices, here are {len(devices)}"
        )
    return jax.make_mesh(
        (data, expert, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:need]
    )


def shardings(specs: Any, mesh: Mesh, rules: AxisRules) -> Any:
    """The `NamedSharding` of every leaf of a tree of specs.

    Raises:
        CloverError: a dimension that its mesh axis does not divide.
    """

    def one(spec: ParamSpec) -> NamedSharding:
        partition = rules.spec(spec.axes)
        for size, axis, name in zip(spec.shape, partition, spec.axes, strict=True):
            ways = 1 if axis is None else math.prod((mesh.shape[str(axis)],))
            if size % ways:
                raise CloverError(
                    f"axis {name} of size {size} does not divide over {ways} devices of mesh axis "
                    f"{axis}: choose a mesh that divides it"
                )
        return NamedSharding(mesh, partition)

    return map_specs(one, specs)
