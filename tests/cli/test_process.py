"""What only a process of its own shows: imports, closed pipes, the cache folder, Ctrl-C."""

import importlib.metadata
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.diffusion.generate import Generator
from tests.cli.conftest import Clover

HELP_ONLY = """
import sys
from clover_jax.cli import main
status = [main(arguments.split()) for arguments in sys.argv[1:]]
heavy = {"jax", "flax", "numpy", "tokenizers", "orbax"} & sys.modules.keys()
assert status == [0, 0, 0, 2], status
assert not heavy, heavy
"""


def test_help_and_errors_import_nothing_heavy():
    commands = ["--help", "generate --help", "--version", "generate --bogus"]
    ran = subprocess.run(
        [sys.executable, "-c", HELP_ONLY, *commands],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "subcommands" in ran.stdout and "--threshold" in ran.stdout
    assert f"clover {importlib.metadata.version('clover-jax')}" in ran.stdout


@pytest.mark.parametrize("arguments", ["--version", "--help"])
def test_reader_that_went_away(arguments: str):
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from clover_jax.cli import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", code, arguments],
        stdout=write, stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    os.close(write)
    assert ran.stderr == b""
    assert ran.returncode == 141


def test_interrupt(clover: Clover, model: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "stream", interrupted)
    ran = clover("generate", "hi", "--checkpoint", model)
    assert (ran.status, ran.out) == (130, "") and ran.err.strip() == "interrupted"


@pytest.mark.usefixtures("clover")  # puts JAX's settings back
class TestCacheFolder:
    def test_user_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        keep_compiled_programs()
        folder = tmp_path / "clover_jax" / "compiled"
        assert folder.is_dir()
        assert jax.config.jax_compilation_cache_dir == str(folder)
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0

    def test_home_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        keep_compiled_programs()
        expected = tmp_path / ".cache" / "clover_jax" / "compiled"
        assert jax.config.jax_compilation_cache_dir == str(expected)

    def test_folder_that_cannot_be_made(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir is None
        assert "every start compiles" in capsys.readouterr().err

    def test_compiler_log_stays_quiet(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        """Its debug lines are read, not shown, by whatever root logger a library sets up."""
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        keep_compiled_programs()
        log = logging.getLogger("jax._src.compiler")
        log.debug("PERSISTENT COMPILATION CACHE MISS for %r with key %r", "jit_other", "k")
        assert caplog.records == []
        log.warning("a real warning")
        assert [record.getMessage() for record in caplog.records] == ["a real warning"]

    def test_chosen_folder_stays(self, tmp_path: Path):
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
