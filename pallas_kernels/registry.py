"""Which implementation serves a call. A named one never falls back."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

type Impl = Literal["auto", "reference", "xla"]


def select(op: str, impl: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function for `impl`; `auto` is `xla` until a Pallas kernel has earned its place.

    Raises:
        ValueError: an implementation this op does not have.
    """
    name = "xla" if impl == "auto" else impl
    if name not in table:
        raise ValueError(f"{op} has no implementation {impl!r}: it has {sorted(table)}")
    return table[name]
