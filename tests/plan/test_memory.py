"""Counts against numbers worked out by hand from the published config (qwen36.md, section 4)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from clover_jax.config import ModelConfig
from clover_jax.errors import CloverError
from clover_jax.plan import memory
from clover_jax.plan.devices import AS_IS, DEVICES, FORMATS
from clover_jax.plan.memory import GRADIENTS, ROUTED, planned_env, whole
from clover_jax.presets import clover_35b_a3b, clover_nano, clover_tiny, qwen36_35b_a3b
from clover_jax.sharding import PRESETS
from clover_jax.train.step import OptimiserConfig

ONE = planned_env((1, 1, 1), PRESETS["tensor"])
TEXT_PARAMETERS = 34_660_610_688  # published
EXPERTS = 40 * 256 * 3_145_728
ROUTERS = 40 * 2048 * 256
NORMS = 81 * 2048 + 10 * 2 * 256 + 30 * 128  # layers and final; q and k; GDN
DECAYS = 30 * 2 * 32
# Clover's: right taps in bf16, three float32 numbers per head.
TAPS, SOFTMAX = 30 * 3 * 8192, 30 * 3 * 32


def test_weights_are_the_published_parameters():
    parts = memory.weights(qwen36_35b_a3b(), ONE, AS_IS)
    # Two bytes each, and two more for what is kept in float32.
    assert whole(parts.values()).total == 2 * (TEXT_PARAMETERS + ROUTERS + NORMS + DECAYS)
    assert parts[ROUTED].total == 2 * EXPERTS
    assert parts["embedding"].total == parts["lm_head"].total == 1_017_118_720
    assert all(p.total == p.device for p in parts.values())
    clover = whole(memory.weights(clover_35b_a3b(), ONE, AS_IS).values()).total
    assert clover - whole(parts.values()).total == 2 * TAPS + 4 * SOFTMAX


@pytest.mark.parametrize(("form", "bits"), [(FORMATS[1], 8), (FORMATS[2], 4)])
def test_quantised_weights_count_their_scales(form, bits):
    parts = memory.weights(qwen36_35b_a3b(), ONE, form)
    # A two-byte scale for 128 inputs, which divide all of the model's.
    assert parts[ROUTED].total == EXPERTS * bits // 8 + EXPERTS // 128 * 2
    assert parts["embedding"].total == 1_017_118_720, "a table, not a matrix"
    assert parts["lm_head"].total == 508_559_360 * bits // 8 + 508_559_360 // 128 * 2
    attention = 10 * 27_262_976
    assert parts["attention mixers"].total == (
        attention * bits // 8 + attention // 128 * 2 + 10 * 2 * 256 * 4
    )


def test_ragged_groups_have_a_scale_of_their_own():
    """nano's experts have 48 hidden units: less than a group, still one scale per output."""
    cfg = clover_nano()
    into, out = 8 * 32 * 128 * 96, 8 * 32 * 48 * 128
    scales = 8 * 32 * (96 + 128)
    assert memory.weights(cfg, ONE, FORMATS[2])[ROUTED].total == (into + out) // 2 + 2 * scales


def test_caches_are_the_published_ones():
    parts = memory.caches(clover_35b_a3b(), 8, 131072, ONE)
    assert parts["KV cells"].total == 8 * 131072 * 20_480
    assert parts["GDN states"].total == 8 * 62_914_560
    assert parts["conv rings"].total == 8 * 1_474_560


def test_training_state():
    """Muon keeps one number for its matrices and AdamW two for the rest, in float32."""
    cfg = clover_35b_a3b()
    total = TEXT_PARAMETERS + TAPS + SOFTMAX
    gates = 30 * 2 * 2048 * 32 + 40 * 2048  # a, b; of the shared expert
    adam = 2 * 508_559_360 + ROUTERS + NORMS + DECAYS + gates + 30 * 4 * 8192 + TAPS + SOFTMAX
    rates = {"learning_rate": 1e-3, "steps": 10}
    muon = memory.training(cfg, OptimiserConfig(**rates), ONE)
    assert muon["float32 masters"].total == muon[GRADIENTS].total == 4 * total
    counters = muon["optimiser state"].total - 4 * (total + adam)
    assert 0 < counters < 100
    adamw = memory.training(cfg, OptimiserConfig(kind="adamw", ema=0.99, **rates), ONE)
    assert 0 < adamw["optimiser state"].total - 4 * 3 * total < 100


def test_a_mesh_splits_what_its_rules_say():
    cfg = clover_35b_a3b()
    env = planned_env((2, 4, 8), PRESETS["tensor"])
    parts = memory.weights(cfg, env, AS_IS)
    assert parts[ROUTED].device == parts[ROUTED].total // 32, "over expert x tensor"
    assert parts["embedding"].device == parts["embedding"].total // 8, "over tensor"
    assert parts["norms"].device == parts["norms"].total
    kept = memory.caches(cfg, 8, 131072, env)
    # Eight rows over data x expert; two KV heads do not divide by eight, so their cells do.
    assert kept["KV cells"].device == kept["KV cells"].total // 64
    assert kept["GDN states"].device == kept["GDN states"].total // 64
    state = OptimiserConfig(learning_rate=1e-3, steps=10)
    split = memory.training(cfg, state, planned_env((8, 1, 8), PRESETS["fsdp"]))
    for part in split.values():
        assert 64 * part.device == pytest.approx(part.total, rel=0.05), "a state lies as its weight"


@settings(deadline=None, max_examples=25)
@given(
    st.tuples(*(st.sampled_from([1, 2, 4]) for _ in range(2)), st.sampled_from([1, 2])),
    st.sampled_from(sorted(PRESETS)),
    st.integers(1, 9),
    st.sampled_from([64, 512, 1536]),
)
def test_devices_hold_at_least_the_whole(sizes, rules, rows, capacity):
    cfg: ModelConfig = clover_tiny()
    env = planned_env(sizes, PRESETS[rules])
    devices = sizes[0] * sizes[1] * sizes[2]
    optimiser = OptimiserConfig(learning_rate=1e-3, steps=10, ema=0.9)
    found = [
        *(memory.weights(cfg, env, form) for form in FORMATS),
        memory.caches(cfg, rows, capacity, env),
        memory.training(cfg, optimiser, env),
    ]
    for parts in found:
        for name, part in parts.items():
            assert part.device <= part.total <= devices * part.device, name


def test_a_mesh_that_does_not_divide_is_refused():
    with pytest.raises(CloverError, match="size 256 does not divide over 3 devices"):
        memory.weights(clover_35b_a3b(), planned_env((1, 3, 1), PRESETS["tensor"]), AS_IS)


def test_the_issues_devices_are_there():
    asked = {
        "GB300": 288, "H200": 141, "RTX PRO 6000": 96, "H100": 80, "RTX 5070 Ti": 16,
        "TPU v5e": 16, "TPU v5p": 95, "TPU v6e": 32,
    }  # fmt: skip
    assert {d.name: d.memory for d in DEVICES} == {n: gb * 10**9 for n, gb in asked.items()}
    assert all(d.source for d in DEVICES)
