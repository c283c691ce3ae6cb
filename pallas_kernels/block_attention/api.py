"""Grouped-query attention over a cached prefix and, for a block, over the block itself.

Query row i of a batch row sees the cached cells `0 .. limit_i - 1` and every valid position of its
own block, both ways. Drawn for a prefix of 4 and a block of 3 (limit 4 for all three rows):

            cache cells      own block
    q0      x x x x . .      x x x
    q1      x x x x . .      x x x
    q2      x x x x . .      x x x

A causal pass writes its keys into the cache first and has no own block: limit_i = start + i + 1.
    out_i = sum_j softmax_j(scale q_i . k_j) v_j        0 where a query sees nothing

With `first`, a query sees no cells before first_i either (samples packed in one row); those must
be finite. Cells at or past the limit and invalid positions cannot matter, whatever they hold (NaN
included).
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.block_attention import xla
from pallas_kernels.block_attention.contract import KV_TILE, check
from pallas_kernels.block_attention.math import Part
from pallas_kernels.registry import Impl, call

__all__ = ["KV_TILE", "BlockKV", "attention_part", "block_attention"]


class BlockKV(NamedTuple):
    """Keys and values of the blocks themselves; queries are grouped into the same blocks."""

    k: Float[Array, "rows blocks block kv_heads channel"]
    v: Float[Array, "rows blocks block kv_heads channel"]
    valid: Bool[Array, "rows blocks block"]


def block_attention(
    q: Float[Array, "rows queries heads channel"],
    k: Float[Array, "groups rows kv_heads capacity channel"],
    v: Float[Array, "groups rows kv_heads capacity channel"],
    group: int | Int[Array, ""],
    limit: Int[Array, "rows queries"],
    own: BlockKV | None,
    first: Int[Array, "rows queries"] | None = None,
    *,
    scale: float,
    impl: Impl,
) -> Float[Array, "rows queries heads channel"]:
    """Attention outputs, in q's dtype; scores and softmax in float32.

    Args:
        q: queries after norm and rotation; with `own`, `queries` is blocks x block.
        k: cached keys of all attention layers; they are read in place, never sliced out. A
            capacity past one KV_TILE is a multiple of it.
        v: cached values.
        group: which attention layer's cells to read.
        limit: number of cached cells each query sees, at most `capacity`.
        own: the blocks' own keys and values, or None for a causal pass.
        first: the first cached cell that each query sees; None: cell 0.
        scale: factor of q . k.
        impl: `reference` is one dense softmax, `xla` an online softmax over the tiles of KV_TILE
            cells below the largest limit, `pallas_tpu` and `pallas_gpu` the same as one kernel.
            Tiles are anchored at cell 0, so the capacity never matters.

    Raises:
        ValueError: shapes or dtypes that do not fit together, an implementation that this op does
            not have or that cannot serve this call.
    """
    check(q, k, v, own)
    return call(
        __name__,
        "block_attention",
        impl,
        q,
        k,
        v,
        group,
        limit,
        own,
        first,
        scale=scale,
    )


def attention_part(
    q: Float[Array, "rows queries heads channel"],
    k: Float[Array, "groups rows kv_heads capacity channel"],
    v: Float[Array, "groups rows kv_heads capacity channel"],
    group: int | Int[Array, ""],
    limit: Int[Array, "rows queries"],
    own: BlockKV | None,
    first: Int[Array, "rows queries"] | None = None,
    *,
    scale: float,
) -> Part:
    """`block_attention` before the division: what a device that holds a part of the cells computes.

    Parts over disjoint keys are merged as `math.merge` does; `unfold(finish(part), queries)` is the
    attention output. The arguments are those of `block_attention`, with cells and limits counted
    from the part's first cell. It has the xla form only.

    Returns:
        Arrays [rows, kv_heads, m, ...] of folded queries (`math.fold`), float32.

    Raises:
        ValueError: as `block_attention`.
    """
    check(q, k, v, own)
    return xla.attention_part(q, k, v, group, limit, own, first, scale=scale)
