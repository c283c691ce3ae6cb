"""Expert matmuls: rows through the gated MLP of their expert. Contract: `api.grouped_glu`."""

from pallas_kernels.grouped_matmul.api import Plan, grouped_glu, plan

__all__ = ["Plan", "grouped_glu", "plan"]
