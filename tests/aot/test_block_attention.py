"""What the compilers of v5e, v5p, v6e and H200 say of the attention kernels."""

import pytest

from pallas_kernels.aot import SMEM_LIMIT, compile_spec
from pallas_kernels.block_attention.pallas_tpu import VMEM
from pallas_kernels.block_attention.specs import SPECS

pytestmark = pytest.mark.aot
TPUS = ("v5e", "v5p", "v6e")
COMPILED = [s for s in SPECS if "aot" in s.uses]


@pytest.mark.parametrize("machine", TPUS)
@pytest.mark.parametrize("spec", COMPILED, ids=lambda s: s.name)
def test_tpu_kernel_compiles(spec, machine):
    figures = compile_spec("block_attention", spec.name, machine)
    assert (figures.kernels, figures.spills) == (1, 0)
    assert figures.on_chip_bytes <= VMEM
    # The estimate is for a full cache: above the floor of a shorter prefix.
    assert figures.flops is not None and figures.flops >= 0.9 * spec.floor.flops
    assert figures.bytes_accessed is not None and figures.bytes_accessed >= spec.floor.bytes


@pytest.mark.parametrize("machine", TPUS)
@pytest.mark.parametrize("name", ("preview_nano", "decode_nano"))
def test_tpu_kernel_compiles_for_float32(name, machine):
    """At HIGHEST precision, as a CPU computes."""
    figures = compile_spec("block_attention", name, machine)
    assert (figures.kernels, figures.spills) == (1, 0)
    assert figures.on_chip_bytes <= VMEM


@pytest.mark.parametrize("spec", COMPILED, ids=lambda s: s.name)
def test_gpu_kernel_compiles(spec):
    figures = compile_spec("block_attention", spec.name, "h200")
    assert (figures.kernels, figures.spills) == (1, 0)
    assert figures.on_chip_bytes <= SMEM_LIMIT


def test_gpu_kernel_refuses_float32():
    with pytest.raises(RuntimeError, match="q is float32: wgmma would round it"):
        compile_spec("block_attention", "preview_nano", "h200")
