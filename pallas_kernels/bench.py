"""Wall time of the ops against the plain formula, torch, and what this machine can do at best.

    python -m pallas_kernels.bench [--op OP] [--spec NAME] [--torch-python FILE] [--json FILE]

Everything is measured in rounds that visit each contender once, so that a slow moment of the
machine hits all of them; figures are medians over rounds, ratios within this one run. The ceilings
(a matmul, a read of memory larger than the caches) are measured in the same rounds. `share` is
the time that the floor of the spec would take at those ceilings, over the time taken: 100 % means
that nothing could be saved. `--device` adds the Pallas kernels of the accelerator that is here.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.spec import OPS, Spec, specs
from pallas_kernels.worker import Worker, running

ROUNDS = 9
ROUND_SECONDS = 0.03  # of one contender: below that the clock and the scheduler show
READ_BYTES = 2**29  # larger than any cache
MATMUL = 1024
SAME = 2e-2  # relative RMS to torch: bfloat16 rounds at different places

type Timed = Callable[[int], float]  # repeats -> seconds of all of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One spec. Times are microseconds.

    Attributes:
        op: the op's folder.
        spec: the workload.
        dtype: of its first array.
        us: contender -> median time of one call.
        gb_per_s: the floor's bytes over the time of `xla` (or the Pallas kernel, on a device).
        gflop_per_s: the floor's operations over that time.
        share: of what the ceilings allow, that time against the floor's.
    """

    op: str
    spec: str
    dtype: str
    us: dict[str, float]
    gb_per_s: float
    gflop_per_s: float
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One run on one machine.

    Attributes:
        device: what JAX calls it.
        date: of the run.
        versions: of jax and, if it took part, torch.
        read_gb_per_s: measured ceiling.
        matmul_gflop_per_s: measured ceiling, float32 or, on a device, bfloat16.
        results: by spec.
    """

    device: str
    date: str
    versions: dict[str, str]
    read_gb_per_s: float
    matmul_gflop_per_s: float
    results: tuple[Result, ...]


def _jax_timed(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Timed:
    compiled = jax.jit(function).lower(*arrays).compile()

    def run(repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            out = compiled(*arrays)
        jax.block_until_ready(out)
        return time.perf_counter() - began

    return run


def _torch_timed(worker: Worker, folder: Path, spec: Spec, arrays: tuple[Any, ...]) -> Timed:
    """The spec's twin in `torch_ops.py`, on the same arrays; numpy has no bfloat16.

    Raises:
        RuntimeError: what comes back is not our result: then it is no rival.
    """
    wide = lambda a: np.asarray(a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a)
    leaves = jax.tree.leaves(arrays)
    told, out = folder / "arrays.npz", folder / "out.npy"
    np.savez(told, *(wide(a) for a in leaves))
    kinds = [str(a.dtype) for a in leaves]
    worker.ask(function=spec.torch, arrays=str(told), dtypes=kinds, out=str(out))
    ours = jax.jit(functools.partial(spec.call, impl="xla"))(*arrays)
    want, got = wide(jax.tree.leaves(ours)[0]), np.load(out)
    apart = np.linalg.norm(got - want) / np.linalg.norm(want)
    if not apart < SAME:
        raise RuntimeError(f"torch's {spec.torch} is {apart:.1e} away from ours: {SAME} allowed")
    return lambda repeats: worker.ask(repeats=repeats)["seconds"]


@contextmanager
def _torch(python: Path | None) -> Iterator[tuple[Worker, Path] | None]:
    """`torch_ops.py` and a folder to hand arrays over in."""
    if python is None:
        yield None
        return
    script = Path(__file__).with_name("torch_ops.py")
    with tempfile.TemporaryDirectory() as folder, running(python, script) as worker:
        yield worker, Path(folder)


def _ceilings() -> dict[str, Timed]:
    """A read of `READ_BYTES` and a square matmul."""
    on_cpu = jax.default_backend() == "cpu"
    big = jnp.ones((READ_BYTES // 4,), jnp.float32)
    square = jnp.ones((MATMUL, MATMUL), jnp.float32 if on_cpu else jnp.bfloat16)
    return {"read": _jax_timed(jnp.sum, (big,)), "matmul": _jax_timed(jnp.matmul, (square, square))}


def _contenders(spec: Spec, arrays: tuple[Any, ...], device: bool) -> dict[str, Timed]:
    impls = ["xla", *([f"pallas_{jax.default_backend()}"] if device else [])]
    timed = {
        impl: _jax_timed(lambda *a, impl=impl: spec.call(*a, impl=impl), arrays) for impl in impls
    }
    naive = spec.naive or (lambda *a: spec.call(*a, impl="reference"))
    return timed | {"naive": _jax_timed(naive, arrays)}


def _medians(contenders: dict[str, Timed]) -> dict[str, float]:
    """Seconds of one call, by contender."""
    repeats = {}
    for name, run in contenders.items():
        run(1)
        repeats[name] = max(1, round(ROUND_SECONDS / max(run(1), 1e-7)))
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            seen[name].append(run(repeats[name]) / repeats[name])
    return {name: statistics.median(times) for name, times in seen.items()}


def measure(
    ops: Sequence[str], names: Sequence[str] | None, torch_python: Path | None, *, device: bool
) -> Report:
    """Times every spec that is to be timed.

    Raises:
        RuntimeError: there is none, or torch does not run or computes something else.
    """
    chosen = [
        (op, spec)
        for op in ops
        for spec in specs(op)
        if "bench" in spec.uses and (not names or spec.name in names)
    ]
    if not chosen:
        raise RuntimeError(f"no spec of {', '.join(ops)} is called {names}: nothing to time")
    results, ceilings = [], _ceilings()
    versions = {"jax": jax.__version__}
    with _torch(torch_python) as torch:
        versions |= {} if torch is None else torch[0].greeting
        for op, spec in chosen:
            print(f"{op} {spec.name}", file=sys.stderr, flush=True)
            arrays = jax.block_until_ready(jax.jit(spec.inputs)(jax.random.key(0)))
            contenders = _contenders(spec, arrays, device)
            if torch is not None and spec.torch is not None:
                contenders |= {"torch": _torch_timed(*torch, spec, arrays)}
            dtype = str(jax.tree.leaves(arrays)[0].dtype)
            results.append((_medians(ceilings | contenders), op, spec, dtype))
    read = READ_BYTES / statistics.median(seconds["read"] for seconds, *_ in results)
    matmul = 2 * MATMUL**3 / statistics.median(seconds["matmul"] for seconds, *_ in results)
    return Report(
        device=jax.devices()[0].device_kind,
        date=datetime.date.today().isoformat(),
        versions=versions,
        read_gb_per_s=read / 1e9,
        matmul_gflop_per_s=matmul / 1e9,
        results=tuple(_result(*r, read=read, matmul=matmul) for r in results),
    )


def _result(
    seconds: dict[str, float], op: str, spec: Spec, dtype: str, read: float, matmul: float
) -> Result:
    """One line, against the ceilings."""
    times = {name: s for name, s in seconds.items() if name not in ("read", "matmul")}
    ours = next((s for name, s in times.items() if name.startswith("pallas")), times["xla"])
    return Result(
        op=op,
        spec=spec.name,
        dtype=dtype,
        us={name: 1e6 * s for name, s in times.items()},
        gb_per_s=spec.floor.bytes / ours / 1e9,
        gflop_per_s=spec.floor.flops / ours / 1e9,
        share=max(spec.floor.bytes / read, spec.floor.flops / matmul) / ours,
    )


def table(report: Report) -> str:
    """Markdown, as the READMEs show it."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [
        f"{report.device}, {report.date}, {versions}; ceilings: read "
        f"{report.read_gb_per_s:.1f} GB/s, matmul {report.matmul_gflop_per_s:.0f} GFLOP/s",
        "",
        "| op | spec | dtype | time | naive | torch | GB/s | GFLOP/s | share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in report.results:
        name = next((n for n in r.us if n.startswith("pallas")), "xla")
        ratio = lambda other, us=r.us, name=name: (
            f"{us[other] / us[name]:.2f}x" if other in us else ""
        )
        lines.append(
            f"| {r.op} | {r.spec} | {r.dtype} | {r.us[name]:.0f} µs | {ratio('naive')} "
            f"| {ratio('torch')} | {r.gb_per_s:.1f} | {r.gflop_per_s:.1f} | {100 * r.share:.0f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--spec", nargs="+", help="names; default: all that are to be timed")
    parser.add_argument("--torch-python", type=Path, help="a Python that has torch")
    parser.add_argument("--device", action="store_true", help="time the Pallas kernels too")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    try:
        report = measure(
            arguments.op, arguments.spec, arguments.torch_python, device=arguments.device
        )
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")


if __name__ == "__main__":
    main()
