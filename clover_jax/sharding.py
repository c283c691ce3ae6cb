"""One table from logical axes to mesh axes; the mesh is always (data, expert, tensor).

Size-1 axes are allowed, so there is one code path from one CPU to a pod. `data` splits rows,
`tensor` heads and vocabulary, `expert` and `tensor` together the routed experts (a width of 512 is
too narrow to be split eight ways). Rows are split over `expert`, too: outside of the experts that
axis is more data parallelism, and inside of them its rows are gathered and their sums scattered.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from clover_jax.errors import CloverError
from clover_jax.params import map_specs

MESH_AXES = ("data", "expert", "tensor")


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Logical axis name -> the mesh axes that split it, in order; none: replicated.

    A mesh axis splits one dimension of an array, the first whose rule names it.

    Attributes:
        table: hashable, as pairs.
        whole: axes that stay whole where no mesh axis divides them: a batch of one row, two KV
            heads on eight devices (their cells are split then), a short cache. Others raise.
    """

    table: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("group", ()),
        ("layer", ()),
        ("embed", ()),
        ("vocab", ("tensor",)),
        ("heads", ("tensor",)),
        ("kv_heads", ("tensor",)),
        ("channels", ("tensor",)),
        ("experts", ("expert", "tensor")),
        ("expert_width", ("tensor",)),
        ("rows", ("data", "expert")),
        ("cells", ("data", "expert", "tensor")),
    )
    whole: tuple[str, ...] = ("rows", "kv_heads", "cells")

    def replace(self, **axes: tuple[str, ...]) -> "AxisRules":
        """The rules with other mesh axes for some logical axes."""
        self._known(tuple(axes))
        return dataclasses.replace(self, table=tuple((dict(self.table) | axes).items()))

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The partition of an array with these logical axes, whatever its sizes.

        Raises:
            CloverError: a logical axis without a rule, or a mesh axis used twice in one array.
        """
        self._known(axes)
        table = dict(self.table)
        mesh_axes = [() if a is None else table[a] for a in axes]
        used = [m for axes in mesh_axes for m in axes]
        if len(used) != len(set(used)):
            raise CloverError(f"axes {axes} use a mesh axis twice: {mesh_axes}")
        return PartitionSpec(*map(_entry, mesh_axes))

    def partition(
        self, axes: Sequence[str | None], sizes: Sequence[int], mesh: Mesh
    ) -> PartitionSpec:
        """The partition of an array with these logical axes and sizes on a mesh.

        Raises:
            CloverError: a logical axis without a rule, or a size that none of its mesh axes
                divides.
        """
        self._known(tuple(axes))
        table, used, entries = dict(self.table), set[str](), []
        for axis, size in zip(axes, sizes, strict=True):
            taken: list[str] = []
            rule = () if axis is None else table[axis]
            free = [m for m in rule if mesh.shape[m] > 1 and m not in used]
            for name in free:
                if size % math.prod(mesh.shape[m] for m in (*taken, name)) == 0:
                    taken.append(name)
            if free and not taken and axis not in self.whole:
                raise CloverError(
                    f"axis {axis} of size {size} does not divide over {mesh.shape[free[0]]} "
                    f"devices of mesh axis {free[0]}: choose a mesh that divides it"
                )
            used |= set(taken)
            entries.append(_entry(tuple(taken)))
        return PartitionSpec(*entries)

    def _known(self, axes: tuple[str | None, ...]) -> None:
        names = [name for name, _ in self.table]
        unknown = [a for a in axes if a is not None and a not in names]
        if unknown:
            raise CloverError(f"no sharding rule for axis {unknown}: rules are {sorted(names)}")


TENSOR = AxisRules()
PRESETS = {
    "tensor": TENSOR,
    # Weights, gradients and optimiser state are split over the data axis, too, and gathered layer
    # by layer where they are used (ZeRO stage 3).
    "fsdp": TENSOR.replace(embed=("data",)),
}


def make_mesh(
    data: int = 1, expert: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A (data, expert, tensor) mesh over the first devices, with Auto axes.

    Raises:
        CloverError: there are fewer devices.
    """
    devices = jax.devices() if devices is None else devices
    need = data * expert * tensor
    if need > len(devices):
        raise CloverError(
            f"mesh {data}x{expert}x{tensor} needs {need} devices, here are {len(devices)}"
        )
    return jax.make_mesh(
        (data, expert, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:need]
    )


def parse_mesh(text: str) -> tuple[int, int, int]:
    """Sizes of data, expert and tensor from text such as `2x4x1`.

    Raises:
        CloverError: anything else.
    """
    sizes = text.split("x")
    if len(sizes) != 3 or not all(s.isascii() and s.isdigit() and int(s) for s in sizes):
        raise CloverError(
            f"mesh is {text!r}: expected three sizes, data x expert x tensor, such as 2x4x1"
        )
    data, expert, tensor = map(int, sizes)
    return data, expert, tensor


def shardings(specs: Any, mesh: Mesh, rules: AxisRules) -> Any:
    """The `NamedSharding` of every leaf of a tree of specs.

    Raises:
        CloverError: a dimension that its mesh axes do not divide.
    """
    one = lambda s: NamedSharding(mesh, rules.partition(s.axes, s.shape, mesh))
    return map_specs(one, specs)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one dimension of a `PartitionSpec`."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _entry(axes: tuple[str, ...]) -> Any:
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else axes
