"""The causal gated delta rule. Contract: `api.gated_delta`."""

from pallas_kernels.gated_delta.api import (
    DeltaTrace,
    boundary_state,
    commit_state,
    gated_delta,
    gated_delta_trace,
)

__all__ = ["DeltaTrace", "boundary_state", "commit_state", "gated_delta", "gated_delta_trace"]
