"""`clover plan`."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Clover

PLAN = ("plan", "--no-compile")


def test_serving_plan(clover: Clover, tmp_path: Path):
    picture = tmp_path / "plan.png"
    asked = ("--mesh", "2x4x8", "--context", "131072", "--batch", "8", "--experts", "128")
    ran = clover(*PLAN, *asked, "--plot", picture)
    assert ran.status == 0 and ran.err == ""
    assert "2x4x8 (data x expert x tensor), 64 devices, rules tensor" in ran.out
    assert "KV cells                                   20.00        0.31" in ran.out
    assert "activations are not counted" in ran.out
    assert "touches 128 experts a layer" in ran.out and "DFlash2" in ran.out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_verdicts(clover: Clover):
    """69.4 GB of weights on one device, against its memory; and the experts elsewhere."""
    found = json.loads(clover(*PLAN, "--json").out)
    spare = {(device, weights): spare for device, weights, _, spare in found["fits"]}
    needed = 69_365_004_032 + 4096 * 20_480 + 62_914_560 + 1_474_560 + 4096 + 4
    assert spare["H100", "bfloat16"] == 80 * 10**9 - needed > 0
    assert spare["RTX 5070 Ti", "bfloat16"] == 16 * 10**9 - needed < 0
    assert spare["RTX 5070 Ti", "int4"] < 0 < spare["TPU v6e", "int4"]
    assert spare["RTX 5070 Ti", "int4, experts in host memory"] > 0
    assert "does not fit by 49.84" in clover(*PLAN).out, "GiB"
    assert [speed for _, speed, *_ in found["claims"]] == [680, 515, 365]


def test_training_plan(clover: Clover):
    ran = clover(*PLAN, "--mode", "train", "--mesh", "8x8x1", "--batch", "64")
    assert ran.status == 0 and "rules fsdp" in ran.out
    assert "gradients" in ran.out and "optimiser state" in ran.out and "AR step" not in ran.out


def test_a_base_has_no_previews(clover: Clover):
    ran = clover(*PLAN, "--preset", "qwen36_35b_a3b")
    assert ran.status == 0 and "preview" not in ran.out


@pytest.mark.slow
def test_compiled_plan(clover: Clover):
    asked = ("--preset", "clover_tiny", "--mesh", "1x2x2", "--batch", "4", "--context", "512")
    ran = clover("plan", *asked, "--chunk", "16")
    assert ran.status == 0
    assert "compiling the preview for cpu" in ran.err
    assert "activations and other temporaries" in ran.out and "all-reduce" in ran.out
    for kind in ("prefill", "preview", "commit", "AR step"):
        assert f"\n{kind} " in ran.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mesh", "8"), "mesh is '8': expected three sizes"),
        (("--mesh", "2x0x2"), "expected three sizes"),
        (("--mesh", "1x3x1"), "does not divide over 3 devices"),
        (("--preset", "clover"), "preset is 'clover'"),
        (("--rules", "none"), "--rules is 'none': expected one of"),
        (("--batch", "0"), "--batch is 0"),
        (("--context", "1000000"), "--context is 1000000"),
        (("--mode", "train", "--context", "100"), "whole blocks of 32"),
        (("--tpf", "0.5"), "--tpf is 0.5"),
        (("--experts", "7"), "--experts is 7"),
        (("--plot", "/nowhere/plan.png"), "/nowhere/plan.png cannot be written"),
    ],
)
def test_refusals(clover: Clover, flags: tuple[str, ...], message: str):
    ran = clover(*PLAN, *flags)
    assert ran.status == 2 and ran.out == ""
    assert ran.err.startswith("error: ") and message in ran.err


def test_targets_are_checked_first(clover: Clover):
    ran = clover("plan", "--target", "v9:2")
    assert ran.status == 2 and "target is 'v9:2'" in ran.err
