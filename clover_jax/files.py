"""Files that appear whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from clover_jax.errors import CloverError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` once the block ends without an error.

    Raises:
        CloverError: the file cannot be written.
    """
    building = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield building
        building.replace(path)
    except OSError as error:
        raise CloverError(f"{path} cannot be written: {error}") from None
    finally:
        building.unlink(missing_ok=True)
