"""What the compiler says of a small model's passes, against what is counted."""

import dataclasses
import importlib.util

import pytest

from clover_jax.errors import CloverError
from clover_jax.plan import compiled, memory, worker
from clover_jax.plan.compiled import Job
from clover_jax.plan.devices import AS_IS
from clover_jax.plan.memory import planned_env, whole
from clover_jax.presets import clover_tiny
from clover_jax.sharding import PRESETS

CFG = clover_tiny().replace(num_layers=2, full_attention_interval=2)
JOB = Job(
    config=CFG.to_json(), kind="commit", mesh=(1, 2, 2), rules="tensor", target="cpu", rows=4,
    context=512, chunk=16, optimiser="muon", accumulate=1,
)  # fmt: skip


def test_arguments_are_what_is_counted():
    found = worker.run(JOB)
    env = planned_env(JOB.mesh, PRESETS[JOB.rules])
    weights = whole(memory.weights(CFG, env, AS_IS).values()).device
    cache = whole(memory.caches(CFG, JOB.rows, JOB.context, env).values()).device
    inputs = 2 * (8 + 1) * 4  # two rows of a block and their lengths
    # A commit reads neither the head nor what only previews use.
    unread = 64 * 160 // 2 * 4 + 3 * 2 // 2 * 4 + 3 * (2 * 32 + 32) // 2 * 4
    assert found.arguments == pytest.approx(weights + cache + inputs - unread, rel=0.005)
    assert found.aliased == pytest.approx(cache, rel=0.005), "a commit writes where the cache was"
    assert found.temporaries > 0 and found.peak > found.arguments
    assert found.collectives, "experts and heads are on several devices"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AR step", "train step"])
def test_a_process_of_its_own(kind):
    """More devices than this process has."""
    job = dataclasses.replace(JOB, kind=kind, mesh=(4, 2, 2), rows=16, context=64, rules="fsdp")
    found = compiled.compile_pass(job)
    assert (found.kind, found.refused) == (kind, None)
    assert found.arguments > 0 and found.temporaries > 0 and found.collectives


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gpu", "target is 'gpu': expected cpu, v5e:2x2"),
        ("v5p:", "target is 'v5p:'"),
        ("v5p:2x0x2", "target is"),
        ("v4:2x2x1", "target is"),
        ("v5p:4x4x4", "has 64 devices and mesh 1x2x2 4"),
    ],
)
def test_targets_that_are_none(target, message):
    with pytest.raises(CloverError, match=message):
        compiled.check_target(target, (1, 2, 2))


@pytest.mark.parametrize(("target", "module"), [("v5e:2x2", "libtpu"), ("h200:4", "cuda13")])
def test_a_compiler_that_is_not_installed(target, module, monkeypatch):
    compilers = ("libtpu", "jax_cuda13_plugin")
    find = importlib.util.find_spec
    absent = lambda name: None if name in compilers else find(name)
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(CloverError, match=f"{module}.*dependency group `aot`"):
        compiled.check_target(target, (1, 2, 2))


@pytest.mark.slow
def test_what_the_worker_refuses_is_said():
    job = dataclasses.replace(JOB, mesh=(1, 3, 1))
    with pytest.raises(CloverError, match="could not be compiled for cpu: axis experts of size 8"):
        compiled.compile_pass(job)
