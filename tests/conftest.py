"""Test settings, made before any JAX use: CPU, 8 fake devices, full precision, strict types."""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax

# Two workers share two cores: one thread pool each would oversubscribe them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(["clover_jax", "pallas_kernels"], "beartype.beartype")

import pytest  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    if jax.device_count() != 8:
        raise pytest.UsageError("JAX was started before conftest.py could ask for 8 CPU devices")


# Every compiled program maps memory of its own, and past the kernel's limit on maps (65,530 by
# default) LLVM ends the process with a segmentation fault. A session compiles thousands. Counting
# takes up to 50 ms, and a test of seconds adds some thousand maps: hence not after every test.
_MAPS, _MAX_MAPS, _SECONDS_BETWEEN_COUNTS = (
    Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count"), 5.0,
)  # fmt: skip
_counted_at = 0.0


@pytest.fixture(autouse=True)
def _memory_maps_stay_below_the_limit() -> Iterator[None]:
    global _counted_at
    yield
    if not _MAPS.exists() or time.monotonic() - _counted_at < _SECONDS_BETWEEN_COUNTS:
        return
    _counted_at = time.monotonic()
    if _MAPS.read_bytes().count(b"\n") > int(_MAX_MAPS.read_text()) // 2:
        jax.clear_caches()
        gc.collect()
