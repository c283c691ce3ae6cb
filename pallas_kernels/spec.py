"""Named real workloads of the ops: what tests compare, benchmarks time and compilers are asked."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

OPS = ("block_attention", "gated_delta", "grouped_matmul", "state_fusion")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
    """What any implementation must at least do.

    Attributes:
        bytes: read and written once each, of inputs that matter and of outputs.
        flops: operations of the formula; a multiply-add is two.
    """

    bytes: int
    flops: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One workload of one op.

    Attributes:
        name: unique within the op, with the model it comes from: `preview_35b`, `commit_nano`.
        call: the public entry with its static arguments bound; takes the arrays and `impl`.
        inputs: PRNG key -> arrays, as the model would make them (norms, signs, ranges).
        floor: what must be moved and computed.
        naive: the formula in plain `jnp` operations, what one would write without this package;
            takes the arrays. None where `reference` is that.
        torch: name of the function of `torch_ops.py` that computes the same, or None.
        uses: of `test` (small enough to run against the reference here), `bench` (timed here)
            and `aot` (compiled for machines that are not here).
    """

    name: str
    call: Callable[..., Any]
    inputs: Callable[[Array], tuple[Any, ...]]
    floor: Floor
    naive: Callable[..., Any] | None = None
    torch: str | None = None
    uses: frozenset[str]

    def shapes(self) -> tuple[Any, ...]:
        """The arrays' shapes and dtypes; nothing is allocated."""
        return jax.eval_shape(self.inputs, jax.random.key(0))


def specs(op: str) -> tuple[Spec, ...]:
    """The specs of an op."""
    return importlib.import_module(f"pallas_kernels.{op}.specs").SPECS
