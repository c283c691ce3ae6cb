"""What is known of a weight by its name: its kind, which axes its inputs are, how to choose it."""

import functools
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from clover_jax.errors import CloverError
from clover_jax.model.transformer import param_specs
from clover_jax.params import named_leaves
from clover_jax.presets import clover_tiny

_LAYER = re.compile(r"^layers\.(linear|full|\d+)\.")


class MatrixAxes(NamedTuple):
    """How many axes are a matrix's inputs and how many its outputs, which are the last ones.

    Axes before them (layers, experts) make a batch of matrices.
    """

    inputs: int
    outputs: int


_PLAIN = MatrixAxes(1, 1)
_INTO_HEADS = MatrixAxes(1, 2)
# The projections, by the last part of their names.
MATRICES = {
    "in_proj_qkv": _PLAIN,
    "in_proj_z": _PLAIN,
    "in_proj_a": _PLAIN,
    "in_proj_b": _PLAIN,
    "out_proj": _PLAIN,
    "q_proj": _INTO_HEADS,
    "k_proj": _INTO_HEADS,
    "v_proj": _INTO_HEADS,
    "o_proj": MatrixAxes(2, 1),
    "gate_up_proj": _PLAIN,
    "gate_proj": _PLAIN,
    "up_proj": _PLAIN,
    "down_proj": _PLAIN,
    "shared_expert_gate": _PLAIN,
    "lm_head": _PLAIN,
}


def leaf_kind(path: str) -> str:
    """A leaf's dotted path without its layer's place, stacked or not: `self_attn.q_proj`."""
    return _LAYER.sub("", path)


def matrix_axes(kind: str) -> MatrixAxes | None:
    """The axes of a projection; None for any other leaf."""
    return MATRICES.get(kind.rpartition(".")[-1])


@functools.cache
def known_kinds() -> tuple[str, ...]:
    """Kinds of all leaves that a model can have."""
    return tuple(dict.fromkeys(map(leaf_kind, named_leaves(param_specs(clover_tiny())))))


def choose(names: Iterable[str], kinds: Iterable[str], what: str) -> frozenset[str]:
    """The kinds that names mean.

    Args:
        names: each a kind or, if there is none of that name, the last dotted parts of some
            (`down_proj`: shared and routed experts, `experts.down_proj`: routed ones); `*` stands
            for anything.
        kinds: to choose from.
        what: the setting that holds the names, for the message.

    Raises:
        CloverError: a name that means none of them.
    """
    kinds = tuple(kinds)
    chosen: set[str] = set()
    for name in names:
        found = [k for k in kinds if fnmatchcase(f".{k}", f"*.{name}")]
        found = [name] if name in found else found
        if not found:
            raise CloverError(
                f"{what} names {name!r}: expected names of {', '.join(kinds)}, or their last parts"
            )
        chosen.update(found)
    return frozenset(chosen)
