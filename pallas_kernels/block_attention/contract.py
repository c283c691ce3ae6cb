"""What types cannot say about a call, and the logical axes that a mesh may split."""

from typing import Any

from jaxtyping import Array

KV_TILE = 128  # cells; tiles are anchored at cell 0, so that the capacity never matters

AXES = {
    "q": ("rows", None, "heads", None),
    "k": ("group", "rows", "kv_heads", None, None),
    "v": ("group", "rows", "kv_heads", None, None),
    "group": (),
    "limit": ("rows", None),
    "own.k": ("rows", None, None, "kv_heads", None),
    "own.v": ("rows", None, None, "kv_heads", None),
    "own.valid": ("rows", None, None),
    "first": ("rows", None),
}
OUT_AXES = ("rows", None, "heads", None)


def check(q: Array, k: Array, v: Array, own: Any) -> None:
    """Refuse shapes that do not fit together.

    Raises:
        ValueError: names the argument, its value and what was expected.
    """
    heads, kv_heads, capacity = q.shape[2], k.shape[2], k.shape[3]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads: not a multiple of k's {kv_heads} KV heads")
    if capacity > KV_TILE and capacity % KV_TILE:
        raise ValueError(f"capacity {capacity} is not a multiple of the KV tile {KV_TILE}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: they must be one dtype")
    if own is None:
        return
    blocks, block = own.valid.shape[1:]
    if blocks * block != q.shape[1]:
        raise ValueError(f"q has {q.shape[1]} queries, own has {blocks} blocks of {block}")
    if own.k.dtype != q.dtype or own.v.dtype != q.dtype:
        raise ValueError(f"own.k, own.v are {own.k.dtype}, {own.v.dtype}: q is {q.dtype}")
