"""What `expert_glu` asks of its arguments beyond their types, and how they may be sharded.

On a mesh each device runs the op on its rows and its experts: it passes `expert - first` (ids of
other devices' experts fall outside and add nothing) and the results are summed over the mesh axes
of "experts". Rows that such an axis splits are gathered over it before.
"""

import jax.numpy as jnp
from jaxtyping import Array

# Logical axes (clover_jax/sharding.py) of x, expert, weight, valid, w_in, w_out. The gate and the
# up half share w_in's last axis, so a plain split of it would tear them apart: it stays whole.
AXES = (
    ("rows", None),
    ("rows", None),
    ("rows", None),
    ("rows",),
    ("experts", None, None),
    ("experts", None, None),
)
OUT_AXES = ("rows", None)
SUMMED_AXES = ("experts",)


def check(
    x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array, tile: int
) -> None:
    """Raise ValueError naming the argument, its value and what was expected."""
    hidden = w_out.shape[1]
    if w_in.shape[2] != 2 * hidden:
        raise ValueError(
            f"w_in's last axis is {w_in.shape[2]}, expected {2 * hidden}: gate and up, each as "
            f"wide as w_out's {hidden} inputs"
        )
    for name, dtype in (("w_in", w_in.dtype), ("w_out", w_out.dtype)):
        if dtype != x.dtype:
            raise ValueError(f"{name} is {dtype} and x is {x.dtype}: cast one of them")
    if weight.dtype != jnp.float32:
        raise ValueError(f"weight is {weight.dtype}, expected float32: it scales a float32 sum")
    if tile < 1:
        raise ValueError(f"tile is {tile}, expected at least one row")
