"""Compiled programs are kept between starts, and a start that has to compile says so."""

import logging
import os
import sys
import tempfile
from pathlib import Path

import jax

# Programs worth a line; the many small ones compile in no time.
_NAMES = {
    "jit_prefill": "the prefill",
    "jit_run_block": "the denoising loop",
    "jit_run_step": "the denoising step",
    "jit_train_step": "the training step",
}


def keep_compiled_programs() -> None:
    """Switch JAX's persistent compilation cache on, in the user's cache folder.

    A cache folder that the user chose (JAX_COMPILATION_CACHE_DIR) stays. Without a writable one
    every start compiles.
    """
    if jax.config.jax_compilation_cache_dir is None:
        folder = _writable_folder()
        if folder is None:
            print("no cache folder can be written: every start compiles", file=sys.stderr)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    # Everything is kept: a start runs dozens of small programs, too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    logger = logging.getLogger("jax._src.compiler")
    if not any(isinstance(handler, _Announcement) for handler in logger.handlers):
        logger.addHandler(_Announcement())
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # a library that sets up the root logger would print every line


def _writable_folder() -> Path | None:
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = base / "clover_jax" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None


class _Announcement(logging.Handler):
    """Names a program that is about to be compiled: JAX logs its cache misses before it compiles.

    Should a JAX version word its log otherwise, the line is missing and nothing else.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Handler interface."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        if "CACHE MISS" in str(record.msg) and arguments and arguments[0] in _NAMES:
            name = _NAMES[str(arguments[0])]
            print(f"compiling {name} for this model, cached for the next start", file=sys.stderr)
        if record.levelno >= logging.WARNING:
            logging.getLogger("jax").handle(record)
