"""Every numerical limit of the suite, and the comparison that reads it.

Loosening a limit is its own commit with the reason in its message.
"""

import numpy as np

# Relative RMS error, ||got - want|| / ||want||.
RELATIVE_RMS = {
    "op": 1e-6,
    "layer": 5e-6,
    "hidden": 1e-5,
    "gradient": 1e-5,
}
# Largest absolute difference.
MAX_ABS = {
    "logits": 1e-4,
    "rows_batched": 1e-4,
    "continuation": 1e-5,
}
KL = 1e-8
TOP1_MARGIN = 1e-3  # top-1 must agree wherever the two best logits are further apart


def assert_close(kind: str, name: str, got: object, want: object) -> None:
    """Compare `got` with `want` under the limit of `kind`; `name` says what it is."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    assert np.isfinite(got).all(), f"{name}: not finite"
    if kind in RELATIVE_RMS:
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
        limit = RELATIVE_RMS[kind]
    else:
        error, limit = np.abs(got - want).max(initial=0), MAX_ABS[kind]
    assert error <= limit, f"{name}: {kind} error {error:.2e} is over its limit {limit:.0e}"
