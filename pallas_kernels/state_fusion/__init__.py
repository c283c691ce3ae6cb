"""The BD-GDN block operator. Contract: `api.state_fusion`."""

from pallas_kernels.state_fusion.api import state_fusion

__all__ = ["state_fusion"]
