"""What the types of `api.state_fusion` cannot say, and how its arrays may be split over devices."""

from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.spec import Floor

FLOATS = (jnp.float32, jnp.bfloat16)


class Switches(NamedTuple):
    """Points of the formula that are not settled; each value is one reading (see `api`).

    Attributes:
        operator: `state_slot` is one softmax over history slot and block, `added` sums the state
            read and a block softmax of its own, `no_history` drops the slot.
        logit_scale: how the given scale is read: as is, through exp, or through softplus.
        history_logit: score of the slot: log(n_valid), or log(1 + |S^T q|).
        history_query: the state is read with the l2-normalised q, or with q / sqrt(key).
        block_value: v as is, or beta v.
        block_bias: nothing, or -|c_i - c_j| + log beta_j with c = cumsum(g), and c_i on the slot.
        empty_history: at an empty prefix the slot is kept, or dropped.
        right_order: the right tap of the next row is the first, or the last.
    """

    operator: Literal["state_slot", "added", "no_history"]
    logit_scale: Literal["plain", "exp", "softplus"]
    history_logit: Literal["log_length", "read_norm"]
    history_query: Literal["unit", "scaled"]
    block_value: Literal["conv", "beta"]
    block_bias: Literal["none", "decay"]
    empty_history: Literal["keep", "drop"]
    right_order: Literal["next_first", "next_last"]


# Logical axes, by operand; `by_shard` first, so that a part of the channels is a part of the heads.
AXES: dict[str, tuple[str | None, ...]] = {
    "ring": ("rows", None, "channels"),
    "block_qkv": ("rows", None, "channels"),
    "taps": (None, "channels"),
    "right_taps": (None, "channels"),
    "state": ("rows", "heads", None, None),
    "g": ("rows", None, "heads"),
    "beta": ("rows", None, "heads"),
    "logit_scale": ("heads",),
    "history_bias": ("heads",),
    "history_c": ("heads",),
    "valid": ("rows", None),
    "empty": ("rows",),
}
OUT_AXES: tuple[tuple[str | None, ...], ...] = (
    ("rows", None, "heads", None),
    ("rows", None, "heads"),
)


def by_shard(x: Array, ways: int, *, key_channels: int) -> Array:
    """Channels q | k | v of all heads -> `ways` even parts, each q | k | v of its own heads."""
    q, k, v = jnp.split(x, [key_channels, 2 * key_channels], axis=-1)
    parts = [a.reshape(*a.shape[:-1], ways, a.shape[-1] // ways) for a in (q, k, v)]
    return jnp.concatenate(parts, axis=-1).reshape(x.shape)


def check(
    ring: Array,
    block_qkv: Array,
    taps: Array,
    right_taps: Array | None,
    state: Array,
    *,
    key_heads: int,
    switches: Switches,
) -> None:
    """Raise what is wrong with the shapes, dtypes or switches of a call.

    Raises:
        ValueError: names the argument, its value and what was expected.
    """
    value_heads, key, value = state.shape[1:]
    channels = 2 * key_heads * key + value_heads * value
    older = taps.shape[0] - 1
    _expect(key_heads >= 1 and value_heads % key_heads == 0, "key_heads", key_heads,
            f"a divisor of the {value_heads} value heads")  # fmt: skip
    _expect(block_qkv.shape[-1] == channels, "channels of block_qkv", block_qkv.shape[-1],
            f"{channels}: q | k of {key_heads} heads and v of {value_heads}")  # fmt: skip
    _expect(block_qkv.shape[1] >= 1, "positions of block_qkv", block_qkv.shape[1], "at least 1")
    _expect(ring.shape[1] == older, "rows of ring", ring.shape[1],
            f"{older}, one fewer than taps")  # fmt: skip
    if right_taps is not None:
        _expect(right_taps.shape[0] == older, "rows of right_taps", right_taps.shape[0],
                f"{older}, one fewer than taps")  # fmt: skip
    names = {"ring": ring, "block_qkv": block_qkv, "taps": taps, "right_taps": right_taps}
    for name, x in names.items():
        _expect(x is None or x.dtype in FLOATS, f"dtype of {name}", getattr(x, "dtype", None),
                "float32 or bfloat16")  # fmt: skip
    _expect(ring.dtype == block_qkv.dtype, "dtype of ring", ring.dtype,
            f"that of block_qkv, {block_qkv.dtype}")  # fmt: skip
    for name, kind in get_type_hints(Switches).items():
        choices = get_args(kind)
        chosen = getattr(switches, name)
        _expect(chosen in choices, f"switch {name}", repr(chosen), f"one of {', '.join(choices)}")


def floor(block_qkv: Any, taps: Any, right_taps: Any, state: Any, *, key_heads: int) -> Floor:
    """What any implementation moves and computes, from shapes; exp, norms and masks are left out.

    g and beta, which few switches read, are left out too.
    """
    rows, value_heads, key, value = state.shape
    n, channels = block_qkv.shape[1:]
    tap_rows = taps.shape[0] + (0 if right_taps is None else right_taps.shape[0])
    older = taps.shape[0] - 1
    moved = rows * (older + n) * channels * block_qkv.dtype.itemsize
    moved += tap_rows * channels * taps.dtype.itemsize
    moved += 4 * (state.size + rows * n * value_heads * (value + 1))
    products = tap_rows * channels + key_heads * n * key + value_heads * (key + n + 1) * value
    return Floor(bytes=moved, flops=2 * rows * n * products)


def _expect(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"state_fusion: {name} is {value}: expected {expected}")
