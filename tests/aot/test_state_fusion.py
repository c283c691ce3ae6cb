"""Full compilation of the operator's kernels for machines that are not here."""

import pytest

from pallas_kernels.aot import SMEM_LIMIT, compile_spec
from pallas_kernels.state_fusion.pallas_tpu import VMEM_BYTES
from pallas_kernels.state_fusion.specs import SPECS

pytestmark = pytest.mark.aot
NAMES = [spec.name for spec in SPECS if "aot" in spec.uses]


@pytest.mark.parametrize("machine", ("v5e", "v5p", "v6e"))
@pytest.mark.parametrize("name", NAMES)
def test_tpu(name, machine):
    figures = compile_spec("state_fusion", name, machine)
    assert figures.kernels == 1
    assert figures.on_chip_bytes <= VMEM_BYTES
    assert figures.bundles
    assert figures.optimal_us
    # Clover's block keeps everything in registers; 64 positions have twice the vectors.
    assert figures.spills <= (0 if name == "preview_35b" else figures.bundles // 50)


@pytest.mark.parametrize("name", NAMES)
def test_h200(name):
    figures = compile_spec("state_fusion", name, "h200")
    assert (figures.kernels, figures.spills) == (1, 0)
    assert figures.on_chip_bytes <= SMEM_LIMIT
