"""Commands run inside the test's process here: they must not set its compilation cache."""

import pytest

from clover_jax.cli import verify


@pytest.fixture(autouse=True)
def no_cache_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "keep_compiled_programs", lambda: None)
