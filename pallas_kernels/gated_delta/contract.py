"""What the types of `api` cannot say: dtypes, sizes that must divide, and logical axes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

# Logical axes, in the order of the arguments. Rows and heads never influence each other; key heads
# split with the value heads that read them, so a mesh axis must divide the number of key heads.
_TOKENS, _GATES = ("rows", None, "heads", None), ("rows", None, "heads")
_STATE = ("rows", "heads", None, None)
AXES = (_TOKENS, _TOKENS, _TOKENS, _GATES, _GATES, _STATE, ("rows",), ("rows", None))
OUT_AXES = (_TOKENS, _STATE)
COMMIT_AXES = (_TOKENS, _TOKENS, _GATES, _GATES, _STATE, ("rows",))
COMMIT_OUT_AXES = _STATE


class DeltaTrace(NamedTuple):
    """What the state after any position is built from; chunks are filled up with g = beta = 0."""

    before: Float[Array, "rows chunks value_heads key value"]  # state before each chunk
    k: Float[Array, "rows chunks chunk key_heads key"]
    v_new: Float[Array, "rows chunks chunk value_heads value"]  # beta (v - S^T k)
    g: Float[Array, "rows chunks chunk value_heads"]  # -inf where a sample begins


_make: Any = DeltaTrace  # of axes, not arrays
TRACE_AXES = _make(
    before=("rows", None, "heads", None, None),
    k=("rows", None, None, "heads", None),
    v_new=("rows", None, None, "heads", None),
    g=("rows", None, None, "heads"),
)
TRACE_OUT_AXES = (*OUT_AXES, TRACE_AXES)


def check(chunk: int, length: Array | None, **arrays: Array) -> None:
    """Refuse what no implementation can serve.

    Raises:
        ValueError: names the argument, its value and what is expected.
    """
    for name, x in arrays.items():
        if x.dtype != jnp.float32:
            raise ValueError(f"{name} has dtype {x.dtype}: expected float32, cast it first")
    if length is not None and length.dtype != jnp.int32:
        raise ValueError(f"length has dtype {length.dtype}: expected int32, cast it first")
    k, v = arrays["k"], arrays["v"]
    if v.shape[2] % k.shape[2]:
        raise ValueError(
            f"v has {v.shape[2]} heads and k {k.shape[2]}: expected a multiple, as every key head "
            "is read by the same number of value heads"
        )
    if k.shape[1] < 1:
        raise ValueError("k has no positions: expected at least one")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: expected a positive number of positions")
