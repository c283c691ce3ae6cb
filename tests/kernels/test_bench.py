"""The benchmark of the ops: figures that must agree, and rivals that are none."""

import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import bench
from pallas_kernels.aot import _spilled
from pallas_kernels.spec import specs
from pallas_kernels.worker import WorkerError, last_words, running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setattr(bench, "ROUND_SECONDS", 1e-4)
    monkeypatch.setattr(bench, "READ_BYTES", 2**20)
    monkeypatch.setattr(bench, "MATMUL", 64)


def test_figures_agree():
    report = bench.measure(["gated_delta"], ["decode_nano"], None, device=False)
    (result,) = report.results
    (spec,) = (s for s in specs("gated_delta") if s.name == "decode_nano")
    assert set(result.us) == {"xla", "naive"} and result.dtype == "float32"
    seconds = result.us["xla"] / 1e6
    assert result.gb_per_s == pytest.approx(spec.floor.bytes / seconds / 1e9)
    assert result.gflop_per_s == pytest.approx(spec.floor.flops / seconds / 1e9)
    bound = max(
        result.gb_per_s / report.read_gb_per_s, result.gflop_per_s / report.matmul_gflop_per_s
    )
    assert result.share == pytest.approx(bound)
    line = bench.table(report).splitlines()[-1]
    assert line.startswith("| gated_delta | decode_nano | float32 |")


def test_nothing_to_time_is_said():
    with pytest.raises(RuntimeError, match="is called \\['none'\\]: nothing to time"):
        bench.measure(["gated_delta"], ["none"], None, device=False)


def test_a_rival_that_computes_something_else_is_refused(tmp_path: Path):
    script = tmp_path / "wrong.py"
    script.write_text(
        "import json, sys, numpy\n"
        "print(json.dumps({}), flush=True)\n"
        "asked = json.loads(sys.stdin.readline())\n"
        "arrays = list(numpy.load(asked['arrays']).values())\n"
        "numpy.save(asked['out'], numpy.zeros_like(arrays[2]))\n"
        "print(json.dumps({'ok': True}), flush=True)\n"
    )
    (spec,) = (s for s in specs("gated_delta") if s.name == "decode_nano")
    arrays = jax.jit(spec.inputs)(jax.random.key(0))
    with (
        running(Path(sys.executable), script) as worker,
        pytest.raises(RuntimeError, match=r"gated_delta is .* away from ours"),
    ):
        bench._torch_timed(worker, tmp_path, spec, arrays)


def test_a_worker_that_ends_says_why(tmp_path: Path):
    script = tmp_path / "ends.py"
    script.write_text("raise SystemExit('no torch here')")
    with pytest.raises(WorkerError, match="no torch here"), running(Path(sys.executable), script):
        raise AssertionError("it runs")
    with (
        pytest.raises(WorkerError, match="nowhere cannot be run"),
        running(tmp_path / "nowhere", script),
    ):
        raise AssertionError("it runs")


@pytest.mark.parametrize(
    ("complaints", "words"),
    (
        ("", "it ended without a word"),
        ("a warning\nno torch here\n", "no torch here"),
        ("Traceback:\n  File x\n    f()\nOSError: no\nfile\n", "OSError: no\nfile"),
    ),
)
def test_last_words_are_the_exception(complaints: str, words: str):
    assert last_words(complaints) == words


@pytest.mark.verify
@pytest.mark.parametrize("op", ("block_attention", "gated_delta", "grouped_matmul", "state_fusion"))
def test_torch_computes_the_same(op: str, tmp_path: Path):
    python = Path(__file__).parents[2] / ".venv-oracle" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-oracle: see clover_jax/verify/oracles/README.md")
    script = Path(bench.__file__).with_name("torch_ops.py")
    small = [s for s in specs(op) if s.torch and "nano" in s.name]
    assert small
    with running(python, script) as worker:
        for spec in small:
            arrays = jax.jit(spec.inputs)(jax.random.key(0))
            assert bench._torch_timed(worker, tmp_path, spec, arrays)(1) > 0


def test_spills_are_the_two_columns_of_the_schedule():
    text = (
        "== CAPACTIY:\nMXU, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU\n 4 3 3 1 1 2\n"
        "== UTILIZATION:\n0 1 2 0 0 0\n0 0 0 1 1 0\n0 3 0 1 0 2\n"
    )
    assert _spilled(text) == 3
