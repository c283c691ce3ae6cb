"""What the compilers say of the real passes on a mesh: memory of a device, and collectives.

Each pass is compiled ahead of time, from shapes alone, in a process of its own (`worker`): fake
devices and machines that are not here have to be asked for before JAX starts. Nothing runs.
"""

import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from typing import Any, Literal

import msgspec

from clover_jax.errors import CloverError
from clover_jax.plan.hlo import Collective
from pallas_kernels.aot import ENVIRONMENT

TARGETS = "cpu, v5e:2x2, v5p:4x4x4, v6e:8x8 (any topology libtpu knows), or h200:8"
SERVE = ("prefill", "preview", "commit", "AR step")
TRAIN = ("train step",)
_WARNING = "Involuntary full rematerialization"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One pass to compile.

    Attributes:
        config: the model's canonical JSON.
        kind: of the pass.
        mesh: sizes of data, expert and tensor.
        rules: name of a preset of `sharding`.
        target: see `TARGETS`.
        rows: of the batch.
        context: cells of the cache; of a train step, tokens of a row.
        chunk: tokens of a prefill pass.
        optimiser: of a train step.
        accumulate: parts that a train step's rows run in.
    """

    config: str
    kind: str
    mesh: tuple[int, int, int]
    rules: str
    target: str
    rows: int
    context: int
    chunk: int
    optimiser: Literal["muon", "adamw"]
    accumulate: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledPass:
    """One device's share of a compiled pass; bytes by the compiler.

    Attributes:
        kind: of the pass.
        target: what it was compiled for.
        arguments: weights, caches or training state, and inputs.
        outputs: results; what takes the place of a donated argument is in both.
        aliased: that part.
        temporaries: activations, gradients and other buffers that live during the pass.
        collectives: by kind, see `hlo`.
        in_unknown_loops: runs among them that were counted once, in loops of unknown length.
        involuntary: warnings that the partitioner gathered an array whole to split it otherwise.
        compile_seconds: on this machine.
        refused: the compiler's own words if the pass does not fit its machine; all else is 0 then.
    """

    kind: str
    target: str
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0
    collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)
    in_unknown_loops: int = 0
    involuntary: int = 0
    compile_seconds: float = 0.0
    refused: str | None = None

    @property
    def peak(self) -> int:
        """Bytes that a device needs at once, by these figures."""
        return self.arguments + self.temporaries + self.outputs - self.aliased


def compile_pass(job: Job) -> CompiledPass:
    """Compile one pass in a process of its own.

    Raises:
        CloverError: an unknown target, one without its compiler, a mesh of another size, or a pass
            that cannot be compiled.
    """
    check_target(job.target, job.mesh)
    flags = ENVIRONMENT["XLA_FLAGS"]
    if job.target == "cpu":
        flags += f" --xla_force_host_platform_device_count={math.prod(job.mesh)}"
    if job.target.startswith("h200"):  # a Triton matmul has no tiling but by timing it on a device
        flags += " --xla_gpu_enable_triton_gemm=false"
    environment = {**os.environ, **ENVIRONMENT, "XLA_FLAGS": flags}
    worker = [sys.executable, "-m", "clover_jax.plan.worker", json.dumps(dataclasses.asdict(job))]
    ran = subprocess.run(worker, env=environment, capture_output=True, text=True, check=False)
    said: dict[str, Any] = {}
    if ran.returncode == 0:
        said = msgspec.json.decode(ran.stdout.splitlines()[-1])
    if "result" not in said:
        why = said.get("error") or (ran.stderr.strip().splitlines() or ["no message"])[-1]
        raise CloverError(f"{job.kind} could not be compiled for {job.target}: {why}")
    involuntary = len(re.findall(_WARNING, ran.stderr))
    return msgspec.convert({**said["result"], "involuntary": involuntary}, CompiledPass)


def check_target(target: str, mesh: tuple[int, int, int]) -> None:
    """Whether this mesh can be compiled for, here.

    Raises:
        CloverError: an unknown target, one without its compiler, or a mesh of another size.
    """
    if target == "cpu":
        return
    name, sign, sizes = target.partition(":")
    shape = sizes.split("x")
    known = name in ("v5e", "v5p", "v6e", "h200") and sign
    if not known or not all(s.isascii() and s.isdigit() and int(s) for s in shape):
        raise CloverError(f"target is {target!r}: expected {TARGETS}")
    if math.prod(map(int, shape)) != math.prod(mesh):
        raise CloverError(
            f"target {target} has {math.prod(map(int, shape))} devices and mesh "
            f"{'x'.join(map(str, mesh))} {math.prod(mesh)}: choose sizes with one product"
        )
    module = "jax_cuda13_plugin" if name == "h200" else "libtpu"
    if importlib.util.find_spec(module) is None:
        raise CloverError(
            f"target {target} needs the compiler {module}: install the dependency group `aot` "
            "(uv run --group aot clover plan ...), or take --target cpu"
        )
