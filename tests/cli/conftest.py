"""A small random model in a folder, and the command line as a function."""

import dataclasses
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from clover_jax import checkpoint
from clover_jax.cli import main
from clover_jax.config import ModelConfig
from clover_jax.data.bpe import train_bpe, write_tokenizer
from clover_jax.presets import clover_tiny
from tests.model.small import random_params

GENERATION = {
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_new_tokens": 20,
    "do_sample": False,
    "clover": {"threshold": 0.02},  # random weights are never surer
}


@dataclasses.dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str


type Clover = Callable[..., Ran]


def config() -> ModelConfig:
    """One GDN and one attention layer: the cheapest model to compile."""
    return clover_tiny().replace(num_layers=2, full_attention_interval=2, vocab_size=320)


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with a tokenizer."""
    files = tmp_path_factory.mktemp("tokenizer")
    learnt = train_bpe(
        ["user assistant cats ants legs three two the of and"] * 3, config().vocab_size
    )
    write_tokenizer(files, learnt, model_max_length=512)
    (files / "generation_config.json").write_text(json.dumps(GENERATION))
    folder = tmp_path_factory.mktemp("models") / "clover"
    checkpoint.save(folder, config(), random_params(config()), files_from=files)
    return folder


@pytest.fixture
def clover(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> Iterator[Clover]:
    """Runs `clover` in this process; the compilation cache is put back as it was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = main([str(a) for a in arguments])
        return Ran(status, *capsys.readouterr())

    settings = {
        name: getattr(jax.config, name)
        for name in (
            "jax_compilation_cache_dir",
            "jax_persistent_cache_min_compile_time_secs",
            "jax_persistent_cache_min_entry_size_bytes",
        )
    }
    logger = logging.getLogger("jax._src.compiler")
    level, handlers, propagate = logger.level, [*logger.handlers], logger.propagate
    compilation_cache.reset_cache()
    yield run
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate
