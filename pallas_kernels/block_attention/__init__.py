"""Attention of a pass over a cached prefix and its own block. Contract: `api.block_attention`."""

from pallas_kernels.block_attention.api import KV_TILE, BlockKV, attention_part, block_attention

__all__ = ["KV_TILE", "BlockKV", "attention_part", "block_attention"]
