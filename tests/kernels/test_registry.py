"""Every op has every implementation, and a named one never falls back."""

import importlib
from pathlib import Path

import jax
import pytest

from pallas_kernels.registry import IMPLS, explain
from pallas_kernels.spec import OPS, specs

ROOT = Path(__file__).parents[2] / "pallas_kernels"
ENTRIES = {
    "block_attention": "block_attention",
    "gated_delta": "gated_delta",
    "grouped_matmul": "expert_glu",
    "state_fusion": "state_fusion",
}


@pytest.mark.parametrize("op", OPS)
def test_files_are_the_implementations(op: str):
    for impl in IMPLS:
        assert hasattr(importlib.import_module(f"pallas_kernels.{op}.{impl}"), ENTRIES[op])
        assert (ROOT / op / f"{impl}.py").exists()
    assert (ROOT / op / "README.md").exists()
    names = [spec.name for spec in specs(op)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("op", OPS)
def test_reasons_on_this_machine(op: str):
    said = explain(f"pallas_kernels.{op}.api", ENTRIES[op])
    assert said["reference"] == said["xla"] == "serves this call"
    for impl, machine in (("pallas_tpu", "a tpu"), ("pallas_gpu", "a gpu")):
        assert f"needs {machine} and this is a cpu" in said[impl]


def test_a_named_kernel_is_refused_here():
    (spec,) = [s for s in specs("gated_delta") if s.name == "decode_nano"]
    with pytest.raises(ValueError, match="gated_delta cannot run as 'pallas_tpu': it needs a tpu"):
        spec.call(*spec.inputs(jax.random.key(0)), impl="pallas_tpu")
