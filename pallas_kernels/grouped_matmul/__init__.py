"""Expert matmuls: each row of x times the matrix of its expert. Contract: `api.grouped_matmul`."""

from pallas_kernels.grouped_matmul.api import Plan, grouped_matmul, plan

__all__ = ["Plan", "grouped_matmul", "plan"]
