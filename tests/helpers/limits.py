"""Comparisons of the suite; limits between implementations are in `clover_jax/verify/limits.py`."""

import numpy as np

from clover_jax.verify.limits import LIMITS, TOP1_MARGIN, relative_rms

__all__ = ["KL", "TOP1_MARGIN", "assert_close"]

KL = LIMITS["float32"].kl
MAX_ABS = {  # largest absolute difference between two of our own ways
    "logits": 1e-4,
    "rows_batched": 1e-4,
    "continuation": 1e-5,
}


def assert_close(kind: str, name: str, got: object, want: object) -> None:
    """Compare `got` with `want` under the limit of `kind`; `name` says what it is."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    assert np.isfinite(got).all(), f"{name}: not finite"
    if kind in MAX_ABS:
        error, limit = np.abs(got - want).max(initial=0), MAX_ABS[kind]
    else:
        error, limit = relative_rms(got, want), getattr(LIMITS["float32"], kind)
    assert error <= limit, f"{name}: {kind} error {error:.2e} is over its limit {limit:.0e}"
