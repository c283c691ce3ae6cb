"""Test settings, made before any JAX use: CPU, 8 fake devices, full precision, strict types."""

import os

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
