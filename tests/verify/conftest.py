"""Commands run inside the test's process here: they must not set its compilation cache."""

from collections.abc import Iterator

import jax
import pytest

from clover_jax.cli import verify


@pytest.fixture(autouse=True)
def no_cache_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "keep_compiled_programs", lambda: None)


@pytest.fixture(autouse=True, scope="package")
def quick_compilation() -> Iterator[None]:
    """Programs run once or twice here: compiling them is what takes the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
