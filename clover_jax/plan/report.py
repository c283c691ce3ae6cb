"""A plan: what was counted and compiled, which devices it fits on, and the speed floor."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from clover_jax.config import ModelConfig
from clover_jax.plan import floor, memory
from clover_jax.plan.compiled import CompiledPass
from clover_jax.plan.devices import AS_IS, DEVICES, FORMATS, WeightFormat
from clover_jax.plan.floor import CLAIMS, Load
from clover_jax.plan.memory import GRADIENTS, ROUTED, Bytes, planned_env
from clover_jax.sharding import PRESETS
from clover_jax.train.step import OptimiserConfig

type Mode = Literal["serve", "train"]
HOST = ", experts in host memory"
TEMPORARIES = "activations and other temporaries"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is planned.

    Attributes:
        name: of the model.
        cfg: the model.
        mode: decoding, or training of all weights.
        mesh: sizes of data, expert and tensor.
        rules: name of a preset of `sharding`.
        rows: of the batch.
        context: cells of the cache, prompt and answer together; in training, tokens of a row.
        optimiser: of training.
        tpf: tokens that a preview fixes, in the mean.
        experts: that a preview touches in a layer.
    """

    name: str
    cfg: ModelConfig
    mode: Mode
    mesh: tuple[int, int, int]
    rules: str
    rows: int
    context: int
    optimiser: Literal["muon", "adamw"]
    tpf: float
    experts: float


class Fit(NamedTuple):
    """Whether a device holds its share; `spare` bytes are negative where it does not."""

    device: str
    weights: str
    needed: int
    spare: int


class FloorLine(NamedTuple):
    """Floors on one device, milliseconds and tokens per second of one row.

    `host_preview_ms` is a preview's whose touched experts come from host memory.
    """

    device: str
    ar_ms: float
    preview_ms: float
    commit_ms: float
    ar_tokens_per_s: float
    block_tokens_per_s: float
    host_preview_ms: float


class ClaimLine(NamedTuple):
    """What a published speed would take at the floor: tokens per preview, by experts touched."""

    device: str
    tokens_per_s: float
    of: str
    ar_floor_tokens_per_s: float
    tpf_needed: dict[str, float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes are those of one device unless they are `Bytes`, of the whole and of one device."""

    request: Request
    parts: dict[str, Bytes]
    compiled: tuple[CompiledPass, ...]
    fits: tuple[Fit, ...]
    floors: tuple[FloorLine, ...]
    claims: tuple[ClaimLine, ...]


def make_plan(request: Request, compiled: Sequence[CompiledPass] = ()) -> Plan:
    """Count everything but activations, which `compiled` has.

    Raises:
        CloverError: the mesh does not divide a weight.
    """
    r = request
    env = planned_env(r.mesh, PRESETS[r.rules])
    temporaries = max((c.temporaries for c in compiled), default=None)
    if r.mode == "train":
        optimiser = OptimiserConfig(kind=r.optimiser, learning_rate=1e-4, steps=1000)
        parts = memory.training(r.cfg, optimiser, env)
        if temporaries is not None:
            del parts[GRADIENTS]  # they are among the temporaries
        kept, forms = parts, {"float32 masters": 0}
    else:
        parts = memory.weights(r.cfg, env, AS_IS)
        kept = memory.caches(r.cfg, r.rows, r.context, env)
        parts |= kept
        forms = dict(_weight_forms(r, env))
    if temporaries is not None:
        extra = {TEMPORARIES: Bytes(temporaries * math.prod(r.mesh), temporaries)}
        parts, kept = parts | extra, kept | extra
    rest = memory.whole(kept.values()).device
    fits = tuple(
        Fit(d.name, form, size + rest, d.memory - size - rest)
        for d in DEVICES
        for form, size in forms.items()
    )
    serve = r.mode == "serve" and r.cfg.bd_gdn is not None
    return Plan(
        request=r,
        parts=parts,
        compiled=tuple(compiled),
        fits=fits,
        floors=tuple(_floors(r, env)) if serve else (),
        claims=tuple(_claims(r)) if serve and r.name == "clover_35b_a3b" else (),
    )


def _weight_forms(r: Request, env: Any) -> Iterator[tuple[str, int]]:
    """Bytes of a device's weights in each format, all of them and with the experts elsewhere.

    With the experts in host memory the device has room for two layers' touched ones: one that
    computes while the next arrives.
    """
    for form in FORMATS:
        parts = memory.weights(r.cfg, env, form)
        yield _label(r.cfg, form), memory.whole(parts.values()).device
    for form in FORMATS:
        parts = memory.weights(r.cfg, env, form)
        routed = parts.pop(ROUTED).device
        tokens = r.rows * r.cfg.block_length
        touched = floor.expected_experts(r.cfg, tokens) / r.cfg.moe.num_experts
        buffers = round(2 * routed / r.cfg.num_layers * touched)
        name = f"{_label(r.cfg, form)}{HOST}"
        yield name, memory.whole(parts.values()).device + buffers


def _label(cfg: ModelConfig, form: WeightFormat) -> str:
    return cfg.dtype if form.bits is None else form.name


def _floors(r: Request, env: Any) -> Iterator[FloorLine]:
    load = Load(cfg=r.cfg, env=env, form=AS_IS, rows=r.rows, context=r.context)
    for device in DEVICES:
        ar = floor.ar_speed(load, device)
        block = floor.block_speed(load, device, tpf_previews=r.tpf, experts=r.experts)
        yield FloorLine(
            device.name,
            ar.passes_ms["AR step"],
            block.passes_ms["preview"],
            block.passes_ms["commit"],
            ar.tokens_per_s,
            block.tokens_per_s,
            floor.host_preview_ms(load, device, experts=r.experts),
        )


def claim_experts(cfg: ModelConfig) -> dict[str, float]:
    """Experts per layer that the published speeds are read at."""
    even = floor.expected_experts(cfg, cfg.block_length)
    return {"32": 32.0, "64": 64.0, "128": 128.0, f"{even:.0f} (even)": even, "256": 256.0}


def _claims(r: Request) -> Iterator[ClaimLine]:
    one = Load(
        cfg=r.cfg, env=planned_env((1, 1, 1), PRESETS["tensor"]), form=AS_IS, rows=1, context=4096
    )
    for claim in CLAIMS:
        needed = {
            name: floor.tpf_needed(one, claim.on, tokens_per_s=claim.tokens_per_s, experts=n)
            for name, n in claim_experts(r.cfg).items()
        }
        ar = floor.ar_speed(one, claim.on).tokens_per_s
        yield ClaimLine(claim.device, claim.tokens_per_s, claim.of, ar, needed)


def lines(plan: Plan) -> list[str]:
    """The plan as text."""
    r = plan.request
    what = "cache of" if r.mode == "serve" else "training rows of"
    out = [
        f"{r.name}, {r.mode}: {r.rows} rows, {what} {r.context:,} tokens; mesh "
        f"{'x'.join(map(str, r.mesh))} (data x expert x tensor), {math.prod(r.mesh)} devices, "
        f"rules {r.rules}",
        "",
        f"{'GiB':<36}{'all':>12}{'per device':>12}",
        *(_part_line(name, size) for name, size in plan.parts.items()),
        _part_line("sum", memory.whole(plan.parts.values())),
    ]
    if not plan.compiled:
        out.append("activations are not counted: they come from the compiler")
    return [*out, *_compiled_lines(plan), *_fit_lines(plan), *_floor_lines(plan)]


def _part_line(name: str, size: Bytes) -> str:
    return f"{name:<36}{_gib(size.total):>12}{_gib(size.device):>12}"


def _compiled_lines(plan: Plan) -> Iterator[str]:
    if not plan.compiled:
        return
    yield ""
    yield f"compiled for {plan.compiled[0].target}, per device, GiB"
    yield f"{'pass':<12}{'arguments':>11}{'temporaries':>13}{'peak':>9}  collectives"
    for c in plan.compiled:
        if c.refused is not None:
            yield f"{c.kind:<12}the compiler refuses it: {c.refused}"
            continue
        sizes = f"{_gib(c.arguments):>11}{_gib(c.temporaries):>13}{_gib(c.peak):>9}"
        moved = ", ".join(
            f"{k.runs} {name} ({k.sent_bytes / 1e6:.1f} MB)" for name, k in c.collectives.items()
        )
        yield f"{c.kind:<12}{sizes}  {moved or 'none'}"
        if c.in_unknown_loops:
            yield f"{'':<12}{c.in_unknown_loops} of them counted once, in loops of unknown length"
        if c.involuntary:
            yield f"{'':<12}{c.involuntary} involuntary full rematerialisations"
    yield "(runs of a pass, loops multiplied out; MB that one device sends at least, as a ring)"


def _fit_lines(plan: Plan) -> Iterator[str]:
    by_device: dict[str, list[Fit]] = {}
    for fit in plan.fits:
        by_device.setdefault(fit.device, []).append(fit)
    forms = list(dict.fromkeys(fit.weights for fit in plan.fits))
    count = math.prod(plan.request.mesh)
    for kept in (False, True):
        columns = [f for f in forms if f.endswith(HOST) == kept]
        if not columns:
            continue
        yield ""
        yield f"on {count} of each device{HOST if kept else ''}; GiB per device, weights as"
        heads = (f"{f.removesuffix(HOST):>23}" for f in columns)
        yield f"{'':<14}{'has':>9}" + "".join(heads)
        chosen = [[f for f in fits if f.weights in columns] for fits in by_device.values()]
        needs = "".join(f"{_gib(f.needed):>23}" for f in chosen[0])
        yield f"{'needs':<14}{'':>9}{needs}"
        for fits in chosen:
            limit = fits[0].needed + fits[0].spare
            cells = "".join(f"{_verdict(f.spare):>23}" for f in fits)
            yield f"{fits[0].device:<14}{_gib(limit):>9}{cells}"


def _verdict(spare: int) -> str:
    return f"{_gib(spare)} left" if spare >= 0 else f"does not fit by {_gib(-spare)}"


def _floor_lines(plan: Plan) -> Iterator[str]:
    r = plan.request
    if not plan.floors:
        return
    forwards = r.cfg.block_length / (r.cfg.block_length / r.tpf + 1)
    yield ""
    yield (
        f"speed floor (weights, cells and states over the memory's bandwidth; no activations, "
        f"collectives or arithmetic), {r.context:,} tokens committed, a preview fixes {r.tpf:g} "
        f"tokens (TPF over all forwards {forwards:.2f}) and touches {r.experts:.0f} experts a "
        "layer; "
        "AR and block in tokens/s of a row; a host preview's experts come from host memory"
    )
    yield (
        f"{'device':<14}{'AR step':>11}{'preview':>11}{'commit':>11}"
        f"{'AR':>10}{'block':>10}{'host preview':>18}"
    )
    for f in plan.floors:
        yield (
            f"{f.device:<14}{f.ar_ms:>8.3f} ms{f.preview_ms:>8.3f} ms{f.commit_ms:>8.3f} ms"
            f"{f.ar_tokens_per_s:>10,.0f}{f.block_tokens_per_s:>10,.0f}"
            f"{f.host_preview_ms:>15.2f} ms"
        )
    yield from _claim_lines(plan.claims)


def _claim_lines(claims: Sequence[ClaimLine]) -> Iterator[str]:
    if not claims:
        return
    yield ""
    yield "tokens a preview has to fix for a published speed, at the floor (one device, one row,"
    yield "bf16, 4,096 tokens committed), by experts that it touches in a layer"
    names = list(claims[0].tpf_needed)
    yield f"{'device':<8}{'tokens/s':>9}{'AR floor':>10}" + "".join(f"{n:>12}" for n in names)
    for c in claims:
        cells = ("never" if n is None else f"{n:.2f}" for n in c.tpf_needed.values())
        head = f"{c.device:<8}{c.tokens_per_s:>9.0f}{c.ar_floor_tokens_per_s:>10.0f}"
        yield head + "".join(f"{cell:>12}" for cell in cells) + f"  {c.of}"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"
