"""The operator of a GDN layer in a preview. Contract: `api.state_fusion`."""

from pallas_kernels.state_fusion.api import block_conv, state_fusion
from pallas_kernels.state_fusion.contract import Switches

__all__ = ["Switches", "block_conv", "state_fusion"]
