"""Workloads of the op: passes of Clover-35B (16 heads, 2 KV heads of 256) and of small models."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.block_attention.api import BlockKV, block_attention
from pallas_kernels.spec import Floor, Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One pass over attention layer 1 of 2.

    Attributes:
        prefix: committed tokens of each row.
        queries: of each row; of a preview, one block.
        own: a preview (the block sees itself both ways) or a causal pass.
        heads: query heads.
        kv_heads: KV heads.
        channel: head dim.
        capacity: KV cells.
        dtype: of every operand.
    """

    prefix: tuple[int, ...]
    queries: int
    own: bool
    heads: int = 16
    kv_heads: int = 2
    channel: int = 256
    capacity: int
    dtype: str = "bfloat16"

    def limits(self) -> list[list[int]]:
        """Cells that each query sees."""
        step = 0 if self.own else 1
        return [[p + step * (i + 1) for i in range(self.queries)] for p in self.prefix]


def inputs(shape: Shape, key: Array) -> tuple[Any, ...]:
    """Normed and rotated q and k are of unit size per channel, v is not far from it."""
    rows, n = len(shape.prefix), shape.queries
    keys = jax.random.split(key, 5)
    draw = lambda i, *size: jax.random.normal(keys[i], size, jnp.float32).astype(shape.dtype)
    cells = (2, rows, shape.kv_heads, shape.capacity, shape.channel)
    own = None
    if shape.own:
        block = (rows, 1, n, shape.kv_heads, shape.channel)
        own = BlockKV(draw(3, *block), draw(4, *block), jnp.ones((rows, 1, n), bool))
    q = draw(0, rows, n, shape.heads, shape.channel)
    limit = jnp.asarray(shape.limits(), jnp.int32)
    return q, draw(1, *cells), draw(2, *cells), jnp.int32(1), limit, own


def floor(shape: Shape) -> Floor:
    """K and V of what each row sees, q, and the output, once; 4 c operations a query and key."""
    own = shape.queries if shape.own else 0
    cells = sum(max(row) + own for row in shape.limits())
    pairs = sum(limit + own for row in shape.limits() for limit in row)
    per_cell = 2 * shape.kv_heads * shape.channel
    per_query = 2 * shape.heads * shape.channel
    queries = len(shape.prefix) * shape.queries
    itemsize = jnp.dtype(shape.dtype).itemsize
    return Floor(
        bytes=itemsize * (cells * per_cell + queries * per_query),
        flops=4 * shape.channel * shape.heads * pairs,
    )


def naive(
    q: Array, k: Array, v: Array, group: Any, limit: Array, own: BlockKV | None, *, scale: float
) -> Array:
    """Slice the layer out, repeat its heads, one softmax over the whole capacity and the block."""
    heads = q.shape[2]
    keys, values = (jnp.moveaxis(a[group], 2, 1) for a in (k, v))
    seen = jnp.arange(k.shape[3])[None, None] < limit[..., None]
    if own is not None:
        keys = jnp.concatenate([keys, own.k[:, 0]], axis=1)
        values = jnp.concatenate([values, own.v[:, 0]], axis=1)
        both = (*limit.shape, own.valid.shape[2])
        seen = jnp.concatenate([seen, jnp.broadcast_to(own.valid, both)], axis=2)
    keys, values = (jnp.repeat(a, heads // k.shape[2], axis=2) for a in (keys, values))
    logits = scale * jnp.einsum("rqhc,rthc->rhqt", q, keys, preferred_element_type=jnp.float32)
    w = jax.nn.softmax(jnp.where(seen[:, None], logits, -1e30), axis=-1)
    return jnp.einsum("rhqt,rthc->rqhc", w.astype(q.dtype), values)


def _spec(name: str, uses: str, **sizes: Any) -> Spec:
    shape = Shape(**sizes)
    scale = shape.channel**-0.5
    return Spec(
        name=name,
        call=functools.partial(block_attention, scale=scale),
        inputs=functools.partial(inputs, shape),
        floor=floor(shape),
        naive=functools.partial(naive, scale=scale),
        torch="block_attention",
        uses=frozenset(uses.split()),
    )


# Small models here: clover_nano and clover_bench (17.6M parameters, compared with HF and llama.cpp)
# have the same attention.
_SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "channel": 64, "dtype": "float32"}
_TEST: dict[str, Any] = {"heads": 4, "kv_heads": 2, "channel": 32, "dtype": "float32"}

SPECS = (
    _spec("preview_35b_4k", "bench aot", prefix=(4096,), queries=32, own=True, capacity=8192),
    _spec("preview_35b_131k", "bench aot", prefix=(131040,), queries=32, own=True, capacity=131072),
    _spec("commit_35b_4k", "bench aot", prefix=(4096,), queries=32, own=False, capacity=8192),
    _spec("prefill_35b_512", "bench aot", prefix=(4096,), queries=512, own=False, capacity=8192),
    _spec("decode_35b_4k", "bench aot", prefix=(4096,), queries=1, own=False, capacity=8192),
    _spec("preview_nano", "bench", prefix=(300,), queries=32, own=True, capacity=1024, **_SMALL),
    _spec("decode_nano", "bench", prefix=(300,), queries=1, own=False, capacity=1024, **_SMALL),
    _spec("prefill_17m", "bench", prefix=(0,), queries=512, own=False, capacity=640, **_SMALL),
    _spec("decode_17m", "bench", prefix=(512,), queries=1, own=False, capacity=640, **_SMALL),
    _spec("preview_17m", "bench", prefix=(512,), queries=32, own=True, capacity=640, **_SMALL),
    _spec("preview", "test", prefix=(0, 129), queries=4, own=True, capacity=256, **_TEST),
    _spec("commit", "test", prefix=(0, 125), queries=4, own=False, capacity=256, **_TEST),
    _spec("decode", "test", prefix=(0, 127, 128), queries=1, own=False, capacity=256, **_TEST),
)
