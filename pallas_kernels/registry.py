"""Which implementation serves a call. A named one never falls back.

An op is a package with one module per implementation (`reference`, `xla`, `pallas_tpu`,
`pallas_gpu`); each module has the op's entry function and, where it cannot serve every call, a
function `<entry>_unsupported` of the same arguments that says why in text, or None. Modules are
imported when first asked for: Pallas itself takes two seconds to import.
"""

import importlib
from collections.abc import Callable
from typing import Any, Literal, get_args

type Impl = Literal["auto", "reference", "xla", "pallas_tpu", "pallas_gpu"]

IMPLS: tuple[str, ...] = get_args(Impl.__value__)[1:]
PLATFORM = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}
# (entry, implementation) that `auto` may take: kernels that a device run, recorded in the op's
# README, showed right and faster than xla. No device run has been made yet.
PROVEN: tuple[tuple[str, str], ...] = ()


def call(api: str, entry: str, impl: str, *args: Any, **kwargs: Any) -> Any:
    """Run `entry` of the op whose api module is `api`, as `impl` ("auto" chooses).

    Raises:
        ValueError: no such implementation, or it cannot serve this call; the text says why.
    """
    if impl == "auto":
        proven = [i for e, i in PROVEN if e == entry]
        impl = next((i for i in proven if not unsupported(api, entry, i, *args, **kwargs)), "xla")
    else:
        reason = unsupported(api, entry, impl, *args, **kwargs)
        if reason:
            raise ValueError(f"{entry} cannot run as {impl!r}: {reason}")
    return getattr(_module(api, impl), entry)(*args, **kwargs)


def unsupported(api: str, entry: str, impl: str, *args: Any, **kwargs: Any) -> str | None:
    """Why `impl` cannot serve this call, or None."""
    if impl not in IMPLS or not hasattr(_module(api, impl), entry):
        have = [i for i in IMPLS if hasattr(_module(api, i), entry)]
        return f"implementations are {', '.join(have)}"
    if impl in PLATFORM:
        from pallas_kernels.compat import platform

        if platform() != PLATFORM[impl]:
            return (
                f"it needs a {PLATFORM[impl]} and this is a {platform()}; "
                f"compat.interpreted({PLATFORM[impl]!r}) runs it in Pallas' interpreter"
            )
    check: Callable[..., str | None] | None = getattr(
        _module(api, impl), f"{entry}_unsupported", None
    )
    return check(*args, **kwargs) if check else None


def explain(api: str, entry: str, *args: Any, **kwargs: Any) -> dict[str, str]:
    """For each implementation, `serves this call` or why it does not."""
    return {
        impl: unsupported(api, entry, impl, *args, **kwargs) or "serves this call" for impl in IMPLS
    }


def _module(api: str, impl: str) -> Any:
    name = f"{api.removesuffix('.api')}.{impl}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
