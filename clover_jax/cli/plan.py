"""`clover plan`: counts at once, compiles pass by pass, prints and draws."""

import dataclasses
import sys

import msgspec

from clover_jax import presets
from clover_jax.cli.commands import Plan
from clover_jax.config import ModelConfig
from clover_jax.errors import CloverError
from clover_jax.plan import compiled, picture, report
from clover_jax.plan.floor import expected_experts
from clover_jax.sharding import PRESETS, parse_mesh


def plan(flags: Plan) -> int:
    """Prints the plan; returns the exit status."""
    request = _request(flags, presets.named(flags.preset))
    found = report.make_plan(request)  # before minutes of compiling: what can be refused at once
    if flags.compile:
        passes = []
        kinds = compiled.TRAIN if flags.mode == "train" else compiled.SERVE
        if request.cfg.bd_gdn is None:
            kinds = tuple(k for k in kinds if k != "preview")
        for kind in kinds:
            print(f"compiling the {kind} for {flags.target}", file=sys.stderr, flush=True)
            passes.append(compiled.compile_pass(_job(flags, request, kind)))
        found = report.make_plan(request, passes)
    if flags.plot is not None:
        picture.draw({f"{flags.preset}\n{flags.mode}, {flags.mesh}": found}, flags.plot)
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(dataclasses.asdict(found))).decode())
    else:
        print("\n".join(report.lines(found)))
    return 0


def _request(flags: Plan, cfg: ModelConfig) -> report.Request:
    rules = flags.rules or ("fsdp" if flags.mode == "train" else "tensor")
    if rules not in PRESETS:
        raise CloverError(f"--rules is {rules!r}: expected one of {', '.join(PRESETS)}")
    for name in ("batch", "context", "chunk", "accumulate"):
        if getattr(flags, name) < 1:
            raise CloverError(f"--{name} is {getattr(flags, name)}: expected at least 1")
    if flags.context > cfg.max_position_embeddings:
        raise CloverError(
            f"--context is {flags.context}: {flags.preset} holds {cfg.max_position_embeddings}"
        )
    if flags.mode == "train" and flags.context % cfg.block_length:
        raise CloverError(
            f"--context is {flags.context}: expected whole blocks of {cfg.block_length} to train"
        )
    if not 1 <= flags.tpf <= cfg.block_length:
        raise CloverError(f"--tpf is {flags.tpf}: expected 1 to {cfg.block_length}")
    even = expected_experts(cfg, flags.batch * cfg.block_length)
    experts = even if flags.experts is None else flags.experts
    if not cfg.moe.top_k <= experts <= cfg.moe.num_experts:
        raise CloverError(
            f"--experts is {experts}: expected {cfg.moe.top_k} (top-k) to {cfg.moe.num_experts}"
        )
    sizes = parse_mesh(flags.mesh)
    if flags.compile:
        compiled.check_target(flags.target, sizes)
    return report.Request(
        name=flags.preset,
        cfg=cfg,
        mode=flags.mode,
        mesh=sizes,
        rules=rules,
        rows=flags.batch,
        context=flags.context,
        optimiser=flags.optimiser,
        tpf=flags.tpf,
        experts=experts,
    )


def _job(flags: Plan, request: report.Request, kind: str) -> compiled.Job:
    return compiled.Job(
        config=request.cfg.to_json(),
        kind=kind,
        mesh=request.mesh,
        rules=request.rules,
        target=flags.target,
        rows=request.rows,
        context=request.context,
        chunk=flags.chunk,
        optimiser=flags.optimiser,
        accumulate=flags.accumulate,
    )
