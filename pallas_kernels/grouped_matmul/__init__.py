"""Expert matmuls: rows through the gated MLPs of their experts. Contract: `api.expert_glu`."""

from pallas_kernels.grouped_matmul.api import expert_glu

__all__ = ["expert_glu"]
