"""What the compilers of v5e, v5p, v6e and H200 say of the expert kernels at 35B shapes."""

import pytest

from pallas_kernels.aot import SMEM_LIMIT, compile_spec
from pallas_kernels.grouped_matmul.pallas_tpu import VMEM_LIMIT
from pallas_kernels.grouped_matmul.specs import SPECS

pytestmark = pytest.mark.aot
TPUS = ("v5e", "v5p", "v6e")
COMPILED = [s for s in SPECS if "aot" in s.uses]


@pytest.mark.parametrize("machine", TPUS)
@pytest.mark.parametrize("spec", COMPILED, ids=lambda s: s.name)
def test_tpu_kernel_compiles(spec, machine):
    figures = compile_spec("grouped_matmul", spec.name, machine)
    assert figures.kernels == 1, "both matmuls are one kernel"
    assert figures.spills == 0
    assert figures.on_chip_bytes <= VMEM_LIMIT
    # Tiles are padded, and any of them may be used: our estimate is above the floor.
    assert figures.flops is not None and figures.flops >= spec.floor.flops
    assert figures.bytes_accessed is not None and figures.bytes_accessed >= spec.floor.bytes


@pytest.mark.parametrize("machine", TPUS)
def test_tpu_kernel_compiles_for_float32(machine):
    """At HIGHEST precision, as a CPU computes; it does spill registers, see the README."""
    figures = compile_spec("grouped_matmul", "preview_35b_f32", machine)
    assert figures.kernels == 1
    assert figures.on_chip_bytes <= VMEM_LIMIT


@pytest.mark.parametrize("spec", COMPILED, ids=lambda s: s.name)
def test_gpu_kernels_compile(spec):
    figures = compile_spec("grouped_matmul", spec.name, "h200")
    assert figures.kernels == 2, "gate and up, then down"
    assert figures.spills == 0
    assert figures.on_chip_bytes <= SMEM_LIMIT // 2, "two blocks on a multiprocessor"


def test_gpu_kernels_refuse_float32():
    with pytest.raises(RuntimeError, match="x is float32; wgmma multiplies bfloat16"):
        compile_spec("grouped_matmul", "preview_35b_f32", "h200")
