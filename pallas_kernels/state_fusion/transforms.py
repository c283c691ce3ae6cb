"""What `grad` and `vmap` do with a kernel."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gradient import with_gradient_of
from pallas_kernels.state_fusion import xla
from pallas_kernels.state_fusion.contract import AXES, Switches

_BY_ROW = tuple("rows" in axes for axes in AXES.values())


def transformable(
    forward: Callable[..., Any], *, key_heads: int, switches: Switches
) -> Callable[..., Any]:
    """`forward` of the op's arrays: the gradient is that of `xla`, a vmap is more rows."""
    formula = functools.partial(xla.state_fusion, key_heads=key_heads, switches=switches)
    rows = jax.custom_batching.custom_vmap(forward)
    rows.def_vmap(functools.partial(_more_rows, forward))
    return with_gradient_of(formula, rows)


def _more_rows(
    forward: Callable[..., Any], size: int, batched: Sequence[Any], *arrays: Any
) -> tuple[Any, Any]:
    """Fold the mapped axis into the rows; weights of its own per element are mapped instead.

    jax 0.11 gives a kernel's grid one more axis, which its own TPU interpreter cannot run.
    """
    is_batched = [bool(jax.tree.leaves(b)) and b for b in batched]
    spread = [
        jnp.broadcast_to(x, (size, *x.shape)) if by_row and not b else x
        for x, by_row, b in zip(arrays, _BY_ROW, is_batched, strict=True)
    ]
    if any(b and not by_row for b, by_row in zip(is_batched, _BY_ROW, strict=True)):
        own = [by_row or b for by_row, b in zip(_BY_ROW, is_batched, strict=True)]
        pick = lambda i: [x[i] if o else x for x, o in zip(spread, own, strict=True)]
        out = jax.lax.map(lambda i: forward(*pick(i)), jnp.arange(size, dtype=jnp.int32))
    else:
        merged = [
            x.reshape(-1, *x.shape[2:]) if by_row else x
            for x, by_row in zip(spread, _BY_ROW, strict=True)
        ]
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), forward(*merged))
    return out, jax.tree.map(lambda _: True, out)
