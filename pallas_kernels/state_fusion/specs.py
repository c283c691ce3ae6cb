"""Workloads of the operator: previews of the 35B and the nano model, one layer each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.spec import Spec
from pallas_kernels.state_fusion import contract
from pallas_kernels.state_fusion.api import state_fusion
from pallas_kernels.state_fusion.contract import Switches

CLOVER = Switches(
    operator="state_slot",
    logit_scale="plain",
    history_logit="log_length",
    history_query="unit",
    block_value="conv",
    block_bias="none",
    empty_history="keep",
    right_order="next_first",
)
# Whatever costs more than Clover's reading, at once.
COSTLIEST = Switches(
    operator="state_slot",
    logit_scale="softplus",
    history_logit="read_norm",
    history_query="scaled",
    block_value="beta",
    block_bias="decay",
    empty_history="drop",
    right_order="next_last",
)


def inputs(
    key: Array, *, rows: int, block: int, key_heads: int, group: int, head: int, dtype: Any
) -> tuple[Array, ...]:
    """As a layer makes them: the last row's second half is not valid, and its prefix is empty."""
    value_heads, channels = key_heads * group, (2 + group) * key_heads * head
    keys = iter(jax.random.split(key, 10))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)
    last = (jnp.arange(rows) == rows - 1) & (rows > 1)
    n_valid = jnp.where(last, (block + 1) // 2, block)
    return (
        normal(rows, 3, channels).astype(dtype),
        normal(rows, block, channels).astype(dtype),
        (normal(4, channels) / 2).astype(dtype),
        (normal(3, channels) / 2).astype(dtype),
        normal(rows, value_heads, head, head),
        -jax.nn.softplus(normal(rows, block, value_heads)),
        jax.nn.sigmoid(normal(rows, block, value_heads)),
        1 + normal(value_heads),
        normal(value_heads),
        1 + normal(value_heads) / 4,
        jnp.arange(block)[None] < n_valid[:, None],
        last,
    )


def naive(
    ring: Array, block: Array, taps: Array, right_taps: Array, state: Array, g: Array, beta: Array,
    logit_scale: Array, bias: Array, factor: Array, valid: Array, empty: Array, *, key_heads: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Clover's reading in plain operations, one after the other as the formula names them."""
    rows, n, _ = block.shape
    value_heads, key, value = state.shape[1:]
    f32 = lambda x: x.astype(jnp.float32)
    block = f32(jnp.where(valid[..., None], block, 0))
    window = jnp.concatenate([f32(ring), block], axis=1)
    mixed = sum(window[:, j : j + n] * f32(tap)[None, None] for j, tap in enumerate(taps))
    ahead = jnp.pad(block[:, 1:], ((0, 0), (0, len(right_taps)), (0, 0)))
    mixed += sum(ahead[:, j : j + n] * f32(tap)[None, None] for j, tap in enumerate(right_taps))
    q, k, v = jnp.split(jax.nn.silu(mixed), [key_heads * key, 2 * key_heads * key], axis=-1)
    unit = lambda x: x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(1e-6))
    q, k = (unit(x.reshape(rows, n, key_heads, key)) for x in (q, k))
    q, k = (jnp.repeat(x, value_heads // key_heads, axis=2) for x in (q, k))
    v = v.reshape(rows, n, value_heads, value)
    dot = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    logits = dot("bihk,bjhk->bhij", q, k) * logit_scale[None, :, None, None]
    logits = jnp.where(valid[:, None, None], logits, -jnp.inf)
    score = jnp.log(jnp.sum(f32(valid), axis=1))[:, None, None, None]
    slot = bias[None, :, None, None] + factor[None, :, None, None] * score
    slot = jnp.broadcast_to(slot, (*logits.shape[:-1], 1))
    w = jax.nn.softmax(jnp.concatenate([slot, logits], axis=-1), axis=-1)
    share = jnp.moveaxis(w[..., 0], 1, 2)
    out = share[..., None] * dot("bihk,bhkv->bihv", q, state)
    return out + dot("bhij,bjhv->bihv", w[..., 1:], v), share


def _spec(
    name: str, uses: str, *, switches: Switches = CLOVER, rows: int = 1, block: int = 32,
    key_heads: int, head: int, dtype: Any,
) -> Spec:  # fmt: skip
    sizes = {"rows": rows, "block": block, "key_heads": key_heads, "group": 2, "head": head}
    make = functools.partial(inputs, **sizes, dtype=dtype)
    _, qkv, taps, right_taps, state, *_ = jax.eval_shape(make, jax.random.key(0))
    return Spec(
        name=name,
        call=functools.partial(state_fusion, key_heads=key_heads, switches=switches),
        inputs=make,
        floor=contract.floor(qkv, taps, right_taps, state, key_heads=key_heads),
        naive=functools.partial(naive, key_heads=key_heads) if switches == CLOVER else None,
        torch="state_fusion" if switches == CLOVER else None,
        uses=frozenset(uses.split()),
    )


_LARGE = {"key_heads": 16, "head": 128, "dtype": jnp.bfloat16}
_NANO = {"key_heads": 2, "head": 32, "dtype": jnp.float32}
SPECS: tuple[Spec, ...] = (
    _spec("preview_35b", "bench aot", **_LARGE),
    _spec("preview_35b_block_8", "bench aot", block=8, **_LARGE),
    _spec("preview_35b_block_16", "bench", block=16, **_LARGE),
    _spec("preview_35b_block_64", "bench aot", block=64, **_LARGE),
    _spec("preview_35b_rows_8", "bench", rows=8, **_LARGE),
    _spec("preview_35b_costliest", "bench aot", switches=COSTLIEST, **_LARGE),
    _spec("preview_35b_float32", "aot", key_heads=16, head=128, dtype=jnp.float32),
    _spec("preview_nano", "bench", **_NANO),
    _spec("preview_nano_rows_4", "test bench", rows=4, **_NANO),
    _spec("preview_nano_costliest", "test", rows=2, switches=COSTLIEST, **_NANO),
)
