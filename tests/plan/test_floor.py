"""The speed floor against qwen36.md, section 4, and arithmetic written out here."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.plan import floor
from clover_jax.plan.devices import AS_IS, DEVICES
from clover_jax.plan.floor import Load
from clover_jax.plan.memory import planned_env
from clover_jax.presets import clover_35b_a3b
from clover_jax.sharding import PRESETS

ONE = Load(
    cfg=clover_35b_a3b(), env=planned_env((1, 1, 1), PRESETS["tensor"]), form=AS_IS,
    rows=1, context=4096,
)  # fmt: skip
H200 = next(d for d in DEVICES if d.name == "H200")
# bf16 bytes of a forward: 3,879,593,216 + 251,658,240 n; ours keeps some weights in float32
# (routers, norms, decays), has Clover's own, and reads a row of the embedding per token.
FLOAT32 = 2 * (40 * 2048 * 256 + 81 * 2048 + 10 * 512 + 30 * (128 + 64))
CLOVER = 2 * 30 * 3 * 8192 + 4 * 30 * 3 * 32
FIXED = 3_879_593_216 + FLOAT32 + CLOVER
EXPERT, HEAD, CELL, STATES = 251_658_240, 1_017_118_720, 20_480, 62_914_560 + 1_474_560


@pytest.mark.parametrize("experts", [8.0, 64.0, 163.3])
def test_bytes_of_a_preview(experts):
    moved = floor.traffic(ONE, "preview", experts)
    assert moved.weights == FIXED + 32 * 4096
    assert moved.experts == round(EXPERT * experts)
    assert moved.kv == 4096 * CELL and moved.states == STATES


def test_bytes_of_causal_passes():
    commit, step = floor.traffic(ONE, "commit", 64.0), floor.traffic(ONE, "AR step", 8.0)
    assert commit.weights == FIXED - HEAD + 32 * 4096, "a commit needs no logits"
    assert step.weights == FIXED + 4096
    assert commit.kv == (4096 + 32) * CELL and step.kv == (4096 + 1) * CELL
    assert commit.states == step.states == 2 * STATES, "read and written"
    assert step.total == step.weights + 8 * EXPERT + step.kv + step.states


@pytest.mark.parametrize(("experts", "ms"), [(64.0, 4.16), (128.0, 7.52), (256.0, 14.23)])
def test_milliseconds_on_an_h200(experts, ms):
    moved = floor.traffic(ONE, "preview", experts)
    assert 1e3 * (moved.weights + moved.experts) / H200.bandwidth == pytest.approx(ms, rel=0.004)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (4, 30.5), (8, 57.4), (32, 163.3)])
def test_expected_experts(tokens, experts):
    assert floor.expected_experts(ONE.cfg, tokens) == pytest.approx(experts, abs=0.06)


def test_speeds_of_both_modes():
    seconds = floor.traffic(ONE, "AR step", 8.0).total / 4.8e12
    assert floor.ar_speed(ONE, H200).tokens_per_s == pytest.approx(1 / seconds)
    # 8 previews that fix 4 tokens each, and a commit.
    preview = floor.traffic(ONE, "preview", 64.0).total / 4.8e12
    commit = floor.traffic(ONE, "commit", 256 * (1 - (31 / 32) ** 32)).total / 4.8e12
    block = floor.block_speed(ONE, H200, tpf_previews=4.0, experts=64.0)
    assert block.tokens_per_s == pytest.approx(32 / (8 * preview + commit))
    assert block.tpf == 32 / 9
    host = floor.host_preview_ms(ONE, H200, experts=64.0)
    assert host == pytest.approx(1e3 * 64 * EXPERT / 64e9), "the link is the slower path"


@settings(deadline=None, max_examples=20)
@given(st.floats(1, 32), st.floats(8, 256), st.sampled_from(DEVICES))
def test_tokens_a_preview_needs_is_the_inverse(tpf, experts, device):
    speed = floor.block_speed(ONE, device, tpf_previews=tpf, experts=experts).tokens_per_s
    found = floor.tpf_needed(ONE, device, tokens_per_s=speed, experts=experts)
    assert found == pytest.approx(tpf, rel=1e-6)


def test_no_number_of_tokens_makes_up_for_the_commits():
    commit = floor.block_speed(ONE, H200, tpf_previews=32.0, experts=8.0).passes_ms["commit"]
    assert floor.tpf_needed(ONE, H200, tokens_per_s=1e3 * 32 / commit, experts=8.0) is None


def test_a_device_moves_its_share():
    """Over expert x tensor the experts; what is not split is moved by every device."""
    env = planned_env((1, 4, 8), PRESETS["tensor"])
    split = floor.traffic(dataclasses.replace(ONE, env=env), "preview", 64.0)
    whole = floor.traffic(ONE, "preview", 64.0)
    assert split.experts == whole.experts // 32
    assert whole.weights / 8 < split.weights < whole.weights / 4
    # The cells of one row over all 32 devices: rows do not divide, cells do (8 tiles by 8 only).
    assert whole.kv / 32 <= split.kv <= whole.kv / 8


def test_rows_of_other_data_groups_touch_other_experts():
    """Eight rows on two data groups are four rows each."""
    load = dataclasses.replace(ONE, rows=8, env=planned_env((2, 1, 1), PRESETS["tensor"]))
    four = dataclasses.replace(ONE, rows=4)
    ours, theirs = (floor.ar_speed(x, H200).tokens_per_s for x in (load, four))
    # Each group has its half of cells and states, and its own copy of the weights.
    assert ours == pytest.approx(theirs, rel=1e-4)
