"""Clover-35B-A3B compiled for machines that are not here: memory and collectives of every pass.

    uv run --group aot --extra experiments python experiments/mesh_plans/run.py [PLAN ...]

Each plan is what `clover plan --json` prints with the flags in PLANS. A plan is written after each
pass and goes on where it was stopped: a pass takes up to some minutes to compile. Then the table
and the pictures are made from all that is there.
"""

import dataclasses
import sys
from pathlib import Path

import msgspec

from clover_jax.plan import compiled, picture, report
from clover_jax.plan.compiled import CompiledPass, Job
from clover_jax.plan.floor import expected_experts
from clover_jax.plan.report import Plan, Request
from clover_jax.presets import clover_35b_a3b

HERE = Path(__file__).parent
# target, mesh, rows, tokens of a row
PLANS = {
    "serve_cpu64": ("cpu", (2, 4, 8), 8, 131_072),
    "serve_h200x8": ("h200:8", (1, 4, 2), 8, 131_072),
    "serve_v5p_4x4x4": ("v5p:4x4x4", (2, 4, 8), 8, 131_072),
    "serve_v6e_8x8": ("v6e:8x8", (2, 4, 8), 8, 131_072),
    "train_cpu64": ("cpu", (8, 8, 1), 64, 4096),
    "train_h200x8": ("h200:8", (1, 8, 1), 8, 4096),
    "train_v5p_4x4x4": ("v5p:4x4x4", (8, 8, 1), 64, 4096),
    "train_v6e_8x8": ("v6e:8x8", (8, 8, 1), 64, 4096),
}


def request_of(name: str) -> Request:
    """What the plan of this name asks for."""
    _, mesh, rows, context = PLANS[name]
    cfg, train = clover_35b_a3b(), name.startswith("train")
    return Request(
        name=clover_35b_a3b.__name__,
        cfg=cfg,
        mode="train" if train else "serve",
        mesh=mesh,
        rules="fsdp" if train else "tensor",
        rows=rows,
        context=context,
        optimiser="adamw",  # muon's batched matrices lose their split (see README.md)
        tpf=4.0,
        experts=expected_experts(cfg, rows * cfg.block_length),
    )


def compile_plan(name: str) -> None:
    """Compile what is missing of a plan."""
    request, path = request_of(name), HERE / f"{name}.json"
    done: list[CompiledPass] = list(load(path).compiled) if path.exists() else []
    for kind in compiled.TRAIN if request.mode == "train" else compiled.SERVE:
        if kind in {c.kind for c in done}:
            continue
        print(f"{name}: {kind}", file=sys.stderr, flush=True)
        job = Job(
            config=request.cfg.to_json(),
            kind=kind,
            mesh=request.mesh,
            rules=request.rules,
            target=PLANS[name][0],
            rows=request.rows,
            context=request.context,
            chunk=2048,
            optimiser=request.optimiser,
            accumulate=1,
        )
        done.append(compiled.compile_pass(job))
        plan = report.make_plan(request, done)
        text = msgspec.json.format(msgspec.json.encode(dataclasses.asdict(plan)))
        path.write_bytes(text + b"\n")


def load(path: Path) -> Plan:
    """A plan that was written."""
    return msgspec.json.decode(path.read_bytes(), type=Plan)


def table(plans: dict[str, Plan]) -> str:
    """Markdown, one line per pass; GiB on a device, MB that it sends at least."""
    lines = [
        "| plan | pass | arguments | temporaries | peak | collectives | sent | compiled in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, plan in plans.items():
        for c in plan.compiled:
            if c.refused is not None:
                lines.append(f"| {name} | {c.kind} | refused: {c.refused} | | | | | |")
                continue
            sizes = " | ".join(f"{n / 2**30:.2f}" for n in (c.arguments, c.temporaries, c.peak))
            runs = ", ".join(f"{k.runs} {kind}" for kind, k in c.collectives.items())
            if c.in_unknown_loops:
                runs += f" ({c.in_unknown_loops} in loops counted once)"
            sent = sum(k.sent_bytes for k in c.collectives.values())
            lines.append(
                f"| {name} | {c.kind} | {sizes} | {runs} | {sent / 1e6:,.0f} "
                f"| {c.compile_seconds:.0f} s |"
            )
    return "\n".join(lines)


def main() -> None:
    """The command line; see the module's docstring."""
    for name in sys.argv[1:]:
        compile_plan(name)
    plans = {n: load(HERE / f"{n}.json") for n in PLANS if (HERE / f"{n}.json").exists()}
    print(table(plans))
    for mode in ("serve", "train"):  # on scales of their own
        bars = {n.replace("_", "\n", 1): p for n, p in plans.items() if n.startswith(mode)}
        if bars:
            picture.draw(bars, HERE / f"{mode}.png")


if __name__ == "__main__":
    main()
