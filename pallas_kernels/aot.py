"""What the compilers of machines that are not here say of each kernel.

    python -m pallas_kernels.aot [--op OP] [--spec NAME] [--machine v5e v5p v6e h200] [--json]

Every Pallas kernel is compiled to machine code at the shapes of its specs, by libtpu and by the
CUDA plugin (dependency group `aot`); nothing runs. The figures are the compiler's: a count of VLIW
bundles is a static schedule, `optimal_us` is its estimate from our own cost, and neither is a time.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pallas_kernels.spec import OPS, specs

SMEM_LIMIT = 227 * 1024  # bytes of shared memory that one Hopper block may use

# What the compilers read once, when they start: hence a process for each compilation.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock file refuses a second process otherwise
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """One kernel at one shape on one machine. None: that machine's compiler does not say.

    Attributes:
        op: the op's folder.
        spec: the workload.
        machine: of `compat.MACHINES`.
        kernels: Pallas kernels in the program.
        temp_bytes: device memory beside arguments and results.
        spills: of vector registers: stores and loads in the schedule (TPU), bytes (GPU).
        on_chip_bytes: VMEM that the largest kernel allocates (TPU), shared memory (GPU).
        bundles: VLIW bundles of all kernels' static schedules (TPU).
        registers: per thread, of the hungriest kernel (GPU).
        flops: of our cost estimate (TPU).
        bytes_accessed: of our cost estimate (TPU).
        optimal_us: the compiler's lower bound from that estimate (TPU), microseconds.
    """

    op: str
    spec: str
    machine: str
    kernels: int
    temp_bytes: int
    spills: int
    on_chip_bytes: int
    bundles: int | None = None
    registers: int | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    optimal_us: float | None = None


def compile_spec(op: str, spec: str, machine: str) -> Figures:
    """Compile one spec's Pallas kernel for one machine, in a process of its own.

    Raises:
        RuntimeError: the kernel refuses the call, or does not compile; the text is the compiler's.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        (dump / "gpu").mkdir()
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump / 'tpu'} --xla_jf_dump_llo_text=true",
            "MOSAIC_GPU_DUMP_TO": str(dump / "gpu"),
        }
        worker = [sys.executable, "-m", __spec__.name, "--worker", op, spec, machine]
        done = subprocess.run(worker, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{op} {spec} for {machine}:\n{done.stderr[-3000:]}")
        said = json.loads(done.stdout.splitlines()[-1])
        seen = _gpu_figures(dump / "gpu") if machine == "h200" else _tpu_figures(dump / "tpu")
    return Figures(op=op, spec=spec, machine=machine, **said, **seen)


def _worker(op: str, name: str, machine: str) -> dict[str, Any]:
    """In the process that compiles: what JAX itself says of the compiled program."""
    import jax

    from pallas_kernels.compat import MACHINES, target

    it = MACHINES[machine]
    spec = next(s for s in specs(op) if s.name == name)
    place = it.sharding()
    impl = f"pallas_{it.platform}"
    with target(it):
        traced = jax.jit(
            lambda *arrays: spec.call(*arrays, impl=impl), in_shardings=place, out_shardings=place
        ).trace(*spec.shapes())
        compiled = traced.lower().compile()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    text = compiled.as_text() or ""
    seconds = cost.get("optimal_seconds")
    return {
        "kernels": len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu)', text)),
        "temp_bytes": int(memory.temp_size_in_bytes) if memory else 0,
        "flops": cost.get("flops"),
        "bytes_accessed": cost.get("bytes accessed"),
        "optimal_us": None if seconds is None else 1e6 * seconds,
    }


def _tpu_figures(dump: Path) -> dict[str, Any]:
    """From the scheduler's dumps, of the Pallas kernels only."""
    bundles = spills = vmem = 0
    for schedule in dump.glob("*schedule-analysis_final_bundles.txt"):
        text = schedule.read_text()
        if "-TLP-" in schedule.name or "tpu_custom_call" not in text:
            continue  # the program around the kernels, or XLA's own operations
        match = re.search(r"total scheduled bundles:\s*(\d+)", text)
        bundles += int(match[1]) if match else 0
        stem = re.sub(r"-\d+-schedule-analysis.*", "", schedule.name)
        (use,) = dump.glob(f"{stem}-*-final_hlo-static-per-bundle-utilization.txt")
        spills += _spilled(use.read_text())
        (allocations,) = dump.glob(f"{stem}-*-pre-finalize-registers-and-allocations.txt")
        sizes = re.findall(r"space=vmem, size = (0x[0-9a-f]+)", allocations.read_text())
        vmem = max(vmem, sum(int(s, 16) for s in sizes))
    return {"bundles": bundles, "spills": spills, "on_chip_bytes": vmem}


def _spilled(utilization: str) -> int:
    lines = utilization.splitlines()
    columns = [c.strip() for c in lines[1].split(",")]
    at = [columns.index("VLOAD:FILL"), columns.index("VSTORE:SPILL")]
    rows = (line.split() for line in lines[lines.index("== UTILIZATION:") + 1 :])
    return sum(int(row[i]) for row in rows if len(row) == len(columns) for i in at)


def _gpu_figures(dump: Path) -> dict[str, Any]:
    """From ptxas and Mosaic GPU's resource files."""
    log = "\n".join(p.read_text() for p in dump.glob("*.ptxas"))
    resources = "\n".join(p.read_text() for p in dump.glob("*.resources.txt"))
    numbers = lambda pattern, text: [int(n) for n in re.findall(pattern, text)]
    return {
        "spills": sum(numbers(r"(\d+) bytes spill", log)),
        "registers": max(numbers(r"Used (\d+) registers", log)),
        "on_chip_bytes": max(numbers(r"smem_scratch_bytes=(\d+)", resources)),
    }


def table(figures: list[Figures]) -> str:
    """Markdown, as the ops' READMEs show it."""
    lines = [
        "| spec | machine | kernels | on chip | spills | bundles / registers | bytes | estimate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for f in figures:
        code = f"{f.bundles} bundles" if f.registers is None else f"{f.registers} registers"
        moved = "" if f.bytes_accessed is None else f"{f.bytes_accessed / 1e6:.2f} MB"
        best = "" if f.optimal_us is None else f"{f.optimal_us:.1f} µs"
        lines.append(
            f"| {f.spec} | {f.machine} | {f.kernels} | {f.on_chip_bytes / 1024:.0f} KiB "
            f"| {f.spills} | {code} | {moved} | {best} |"
        )
    return "\n".join(lines)


def _compiled(arguments: argparse.Namespace) -> Iterator[Figures]:
    for op in arguments.op:
        for spec in specs(op):
            if "aot" in spec.uses and (not arguments.spec or spec.name in arguments.spec):
                for machine in arguments.machine:
                    print(f"{op} {spec.name} {machine}", file=sys.stderr, flush=True)
                    yield compile_spec(op, spec.name, machine)


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--spec", nargs="+", help="names; default: all that are to be compiled")
    machines = ("v5e", "v5p", "v6e", "h200")
    parser.add_argument("--machine", nargs="+", choices=machines, default=machines)
    parser.add_argument("--json", action="store_true", help="one object per line, not a table")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(_worker(*arguments.worker)))
        return
    try:
        figures = list(_compiled(arguments))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    if not figures:
        sys.exit(f"error: no spec to compile is called {', '.join(arguments.spec)}")
    if arguments.json:
        print("\n".join(json.dumps(dataclasses.asdict(f)) for f in figures))
    else:
        print(table(figures))


if __name__ == "__main__":
    main()
