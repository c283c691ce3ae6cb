"""Where and how a model runs; never what it computes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from clover_jax.errors import CloverError
from clover_jax.params import ParamSpec, is_spec
from clover_jax.sharding import TENSOR, AxisRules, axes_of
from pallas_kernels.registry import Impl


@dataclasses.dataclass(frozen=True, kw_only=True)
class Env:
    """Hashable static of every pass. It may change last bits, never more.

    Attributes:
        rows: `mapped` maps one fixed-shape one-row program over the rows, so a row's results are
            bit-equal at every batch size; `batched` computes all rows at once, faster, equal
            within 1e-4 in the logits.
        moe_path: how expert matmuls run. `gather` runs every chosen expert by itself, `grouped`
            sorts rows into tiles of one expert, `ragged` and `dense` are ablations. `auto` is
            `gather` at one token a row, else `grouped`; it looks at tokens per row only, so a
            row's path never depends on the batch size.
        moe_tile: rows of a grouped tile; None takes it from tokens per row and expert.
        moe_chunk: tokens of a row that go through the experts at once, recomputed in the backward
            pass; it bounds what dispatch keeps. None: all of them.
        impls: kernel op name -> implementation, for ops that should not use `auto`.
        remat: recompute each layer in the backward pass.
        boundary_batch: noisy blocks served at once from their boundary states (memory).
        mesh: the devices, see `sharding.make_mesh`; None: one. Rows are then batched: one program
            mapped over rows that live on several devices would run on all of them in turn.
        rules: which dimension each mesh axis splits.
    """

    rows: Literal["mapped", "batched"] = "batched"
    moe_path: Literal["auto", "gather", "grouped", "ragged", "dense"] = "auto"
    moe_tile: int | None = None
    moe_chunk: int | None = None
    impls: tuple[tuple[str, Impl], ...] = ()
    remat: bool = False
    boundary_batch: int = 8
    mesh: Mesh | None = None
    rules: AxisRules = TENSOR

    def __post_init__(self) -> None:
        if self.mesh is not None and self.mesh.size > 1 and self.rows == "mapped":
            raise CloverError(
                f"rows is mapped on a mesh of {self.mesh.size} devices: expected batched rows; "
                "rows that are bit-equal at every batch size need one device"
            )

    def impl(self, op: str) -> Impl:
        """The implementation asked for this op."""
        return dict(self.impls).get(op, "auto")

    def partition(self, axes: Sequence[str | None], sizes: Sequence[int]) -> PartitionSpec:
        """How the mesh splits an array with these logical axes (`sharding.AxisRules`)."""
        assert self.mesh is not None
        return self.rules.partition(axes, sizes, self.mesh)

    def constrain(self, x: Any, *axes: str | None) -> Any:
        """`x` split over the mesh by its logical axes; as it is without a mesh, or if None."""
        if self.mesh is None or x is None:
            return x
        return lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, self.partition(axes, x.shape))
        )

    def gathered(self, params: Any, specs: Any) -> Any:
        """Weights as a layer uses them: in one piece along `embed`, whatever rule stores them."""
        if self.mesh is None or not dict(self.rules.table)["embed"]:
            return params
        rules = self.rules.replace(embed=())

        def one(spec: ParamSpec, p: Any) -> Any:
            partition = rules.partition(spec.axes, p.shape, self.mesh)  # pyright: ignore
            return lax.with_sharding_constraint(p, NamedSharding(self.mesh, partition))  # pyright: ignore

        return jax.tree.map(one, specs, params, is_leaf=is_spec)

    def ways(self, axis: str, size: int) -> int:
        """Into how many parts the mesh splits a dimension of this logical axis and size."""
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[m] for m in axes_of(self.partition((axis,), (size,))[0]))
