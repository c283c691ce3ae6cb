"""Float32 matmuls that must not follow the accelerator's default, which rounds their inputs.

Without hardware this can only be read off the program: every matmul says HIGHEST for itself.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from pallas_kernels.block_attention import block_attention
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.grouped_matmul import expert_glu
from pallas_kernels.state_fusion import state_fusion
from pallas_kernels.state_fusion.specs import COSTLIEST

KEYS, VALUES = (1, 9, 2, 4), (1, 9, 4, 3)  # rows, time, heads, channels
PER_HEAD, STATE = VALUES[:-1], (1, 4, 4, 3)
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)

DELTA = [f32(*s) for s in (KEYS, KEYS, VALUES, PER_HEAD, PER_HEAD, STATE)]
BOOLS = jax.ShapeDtypeStruct((2,), jnp.bool_)
EXPERTS = [f32(2, 4), i32(2, 2), f32(2, 2), BOOLS, f32(3, 4, 6), f32(3, 3, 4)]
# ring, block, taps both ways, state, g, beta and the three scalars per head
FUSION = [f32(1, 3, 28), f32(1, 9, 28), f32(4, 28), f32(3, 28)]
FUSION += [f32(*STATE), *[f32(*PER_HEAD)] * 2, *[f32(4)] * 3]
OPS = {
    "gated_delta": (functools.partial(gated_delta, chunk=8), DELTA),
    "state_fusion": (
        lambda *args, impl: state_fusion(
            *args,
            jnp.ones((1, 9), bool),
            jnp.ones(1, bool),
            key_heads=2,
            switches=COSTLIEST,
            impl=impl,
        ),
        FUSION,
    ),
    "block_attention": (
        lambda q, k, limit, impl: block_attention(q, k, k, 0, limit, None, scale=1.0, impl=impl),
        [f32(1, 2, 2, 4), f32(1, 1, 2, 8, 4), i32(1, 2)],
    ),
    "expert_glu": (functools.partial(expert_glu, tile=2), EXPERTS),
}


def matmul_precisions(jaxpr) -> list:
    """The precision of every matmul of a program, inner programs included."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.dot_general_p:
            found.append(eqn.params["precision"])
        for inner in jaxprs_in_params(eqn.params):
            found += matmul_precisions(inner)
    return found


# The production paths of attention and experts follow the model's own precision.
@pytest.mark.parametrize(
    ("op", "impl"),
    [*((op, "reference") for op in OPS), ("gated_delta", "xla"), ("state_fusion", "xla")],
)
def test_precision_is_pinned(op, impl):
    call, args = OPS[op]
    with jax.default_matmul_precision("default"):
        program = jax.make_jaxpr(functools.partial(call, impl=impl))(*args)
    precisions = matmul_precisions(program.jaxpr)
    highest = lax.Precision.HIGHEST
    assert precisions
    assert set(precisions) == {(highest, highest)}, f"{op}, {impl}"
