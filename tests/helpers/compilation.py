"""Programs that are compiled quickly: for tests whose cost is compilation, not running."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def unoptimised() -> Iterator[None]:
    """XLA leaves out most optimisations inside; nothing compiled so is left for later tests.

    `jit` keeps programs in memory without regard to this setting.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        jax.clear_caches()
