"""Where and how a model runs; never what it computes."""

import dataclasses
from typing import Literal

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
        impls: kernel op name -> implementation, for ops that should not use `auto`.
        remat: recompute each layer group in the backward pass.
        boundary_batch: noisy blocks served at once from their boundary states (memory).
    """

    rows: Literal["mapped", "batched"] = "batched"
    moe_path: Literal["auto", "gather", "grouped", "ragged", "dense"] = "auto"
    moe_tile: int | None = None
    impls: tuple[tuple[str, Impl], ...] = ()
    remat: bool = False
    boundary_batch: int = 8

    def impl(self, op: str) -> Impl:
        """The implementation asked for this op."""
        return dict(self.impls).get(op, "auto")
