"""Commands run inside the test's process here: they must not set its compilation cache."""

from collections.abc import Iterator

import pytest

from clover_jax.cli import verify
from tests.helpers.compilation import unoptimised


@pytest.fixture(autouse=True)
def no_cache_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "keep_compiled_programs", lambda: None)


@pytest.fixture(autouse=True, scope="package")
def quick_compilation() -> Iterator[None]:
    """Programs run once or twice here: compiling them is what takes the time."""
    with unoptimised():
        yield
