"""Mixture of experts (qwen36 section 3.5): softmax router, top-k, renormalised, plus one shared.

The router runs in float32 and a row's experts are added up in ascending expert id, so the expert
paths differ in speed only: `gather` and `grouped` are the kernel op `expert_glu`, which reads the
experts that were chosen; `ragged` and `dense`, written out here, are what it is compared with.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.model import on_mesh
from clover_jax.model.coreset import coreset
from clover_jax.params import ParamSpec, normal
from pallas_kernels.grouped_matmul import expert_glu

ROUTING = "routing"  # the name under which rematerialisation keeps the chosen experts


@struct.dataclass
class ExpertParams:
    """Routed experts; of gate_up_proj's last axis the first half is the gate."""

    gate_up_proj: Any  # [experts, d, 2 width]
    down_proj: Any  # [experts, width, d]


@struct.dataclass
class SharedExpertParams:
    """The expert that always runs."""

    gate_proj: Any  # [d, width]
    up_proj: Any  # [d, width]
    down_proj: Any  # [width, d]


@struct.dataclass
class MoEParams:
    """Weights of one MoE layer."""

    gate: Any  # [d, experts], the router
    experts: ExpertParams
    shared_expert: SharedExpertParams
    shared_expert_gate: Any  # [d, 1]


class Routing(NamedTuple):
    """Each position's experts in ascending id and their weights."""

    expert: Int[Array, "rows time k"]
    weight: Float[Array, "rows time k"]


class RouterStats(NamedTuple):
    """What one layer's routing did, per batch row. Sums run over valid positions only."""

    touched: Bool[Array, "rows experts"]  # experts that ran for this row
    assigned: Float[Array, "rows experts"]  # sum of top-k membership
    prob: Float[Array, "rows experts"]  # sum of router softmax
    z: Float[Array, " rows"]  # sum of logsumexp(logits)²
    margin: Float[Array, " rows"]  # smallest gap between the k-th and the next router logit
    coreset_margin: Float[Array, " rows"]  # smallest |share - top_p|, inf without a coreset
    coreset: Bool[Array, "rows blocks experts"] | None = None  # membership, if it may be frozen


def moe_specs(cfg: ModelConfig) -> MoEParams:
    """Specs of one MoE layer."""
    m, d, w = cfg.moe, cfg.hidden_size, normal(cfg.initializer_range)
    spec = lambda shape, axes: ParamSpec(shape, axes, w, cfg.dtype)
    into = spec((d, m.shared_intermediate), ("embed", "expert_width"))
    return MoEParams(
        gate=ParamSpec((d, m.num_experts), ("embed", None), w, jnp.float32),
        experts=ExpertParams(
            gate_up_proj=spec((m.num_experts, d, 2 * m.intermediate), ("experts", "embed", None)),
            down_proj=spec((m.num_experts, m.intermediate, d), ("experts", None, "embed")),
        ),
        shared_expert=SharedExpertParams(
            gate_proj=into,
            up_proj=into,
            down_proj=spec((m.shared_intermediate, d), ("expert_width", "embed")),
        ),
        shared_expert_gate=spec((d, 1), ("embed", None)),
    )


def moe(
    p: MoEParams,
    x: Float[Array, "rows time width"],
    valid: Bool[Array, "rows time"],
    allowed: Bool[Array, " experts"] | None,
    blocks: tuple[int, int] | None,
    frozen: Bool[Array, "rows experts"] | None = None,
    *,
    cfg: ModelConfig,
    env: Env,
) -> tuple[Float[Array, "rows time width"], RouterStats]:
    """Routed experts plus the gated shared expert.

    Args:
        p: layer weights.
        x: normed inputs.
        valid: positions that exist; the others touch no expert and count nowhere.
        allowed: experts that exist in this layer; the others get -inf before the softmax.
        blocks: (blocks, block) when the last blocks·block positions are denoised blocks, whose
            experts come from a coreset if the config has one.
        frozen: coresets of earlier steps of the rows' blocks; a row without a member chooses anew.
        cfg: sizes and switches.
        env: expert path.
    """
    routing, stats = route(p, x, valid, allowed, blocks, frozen, cfg=cfg)
    y = expert_mlp(p.experts, x, routing, valid, cfg=cfg, env=env)
    s = p.shared_expert
    shared = (jax.nn.silu(x @ s.gate_proj) * (x @ s.up_proj)) @ s.down_proj
    return y + jax.nn.sigmoid(x @ p.shared_expert_gate) * shared, stats


def route(
    p: MoEParams,
    x: Float[Array, "rows time width"],
    valid: Bool[Array, "rows time"],
    allowed: Bool[Array, " experts"] | None,
    blocks: tuple[int, int] | None,
    frozen: Bool[Array, "rows experts"] | None = None,
    *,
    cfg: ModelConfig,
) -> tuple[Routing, RouterStats]:
    """Top-k experts of every position; see `moe` for the arguments."""
    m = cfg.moe
    logits = router_logits(p, x, allowed)
    probs = jax.nn.softmax(logits, axis=-1)
    expert, margin = _top_k(logits, m.top_k)
    keep = valid[..., None] & jnp.isfinite(logits)
    chosen = _members(expert, m.num_experts) & keep
    coreset_margin, members = jnp.full(valid.shape[:1], jnp.inf, jnp.float32), None
    if blocks is not None and m.coreset is not None:
        size = blocks[0] * blocks[1]
        by_block = lambda a: a[:, -size:].reshape(a.shape[0], *blocks, *a.shape[2:])
        members, crossing = coreset(
            by_block(probs), by_block(chosen), by_block(valid), cfg=m.coreset, top_k=m.top_k
        )
        if frozen is not None:
            kept = jnp.any(frozen, axis=-1)[:, None]
            members = jnp.where(kept[..., None], frozen[:, None], members)
            crossing = jnp.where(kept, jnp.inf, crossing)
        inside = jnp.where(members[:, :, None], by_block(logits), -jnp.inf)
        restricted, gap = _top_k(inside.reshape(x.shape[0], size, -1), m.top_k)
        expert = jnp.concatenate([expert[:, :-size], restricted], axis=1)
        margin = jnp.concatenate([margin[:, :-size], jnp.minimum(margin[:, -size:], gap)], axis=1)
        coreset_margin = jnp.min(crossing, axis=1)
    # A recomputation under remat takes these: a rounding may not change which experts ran.
    expert = checkpoint_name(jnp.sort(expert, axis=-1), ROUTING)
    if m.norm_topk_prob:  # the renormalised probabilities, also where those round to 0
        weight = jax.nn.softmax(jnp.take_along_axis(logits, expert, axis=-1), axis=-1)
    else:
        weight = jnp.take_along_axis(probs, expert, axis=-1)
    stats = RouterStats(
        touched=jnp.any(_members(expert, m.num_experts) & keep, axis=1),
        assigned=jnp.sum(chosen.astype(jnp.float32), axis=1),
        prob=jnp.sum(jnp.where(keep, probs, 0.0), axis=1),
        z=jnp.sum(jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0), axis=1),
        margin=jnp.min(jnp.where(valid, margin, jnp.inf), axis=1),
        coreset_margin=coreset_margin,
        coreset=members if m.coreset is not None and m.coreset.frozen else None,
    )
    return Routing(expert, weight), stats


def router_logits(
    p: MoEParams, x: Float[Array, "rows time width"], allowed: Bool[Array, " experts"] | None
) -> Float[Array, "rows time experts"]:
    """Float32, -inf at experts that do not exist."""
    logits = jnp.matmul(x.astype(jnp.float32), p.gate, precision=lax.Precision.HIGHEST)
    return logits if allowed is None else jnp.where(allowed[None, None], logits, -jnp.inf)


def _top_k(
    logits: Float[Array, "*rows experts"], k: int
) -> tuple[Int[Array, "*rows k"], Float[Array, "*rows"]]:
    """The k best ids (ties: lower id), and the gap to the next logit that exists."""
    best, expert = lax.top_k(logits, min(k + 1, logits.shape[-1]))
    if k == logits.shape[-1]:
        return expert, jnp.full(logits.shape[:-1], jnp.inf, jnp.float32)
    following = best[..., k]
    gap = jnp.where(jnp.isfinite(following), best[..., k - 1] - following, jnp.inf)
    return expert[..., :k], gap


def _members(expert: Int[Array, "*rows k"], num_experts: int) -> Bool[Array, "*rows experts"]:
    ids = jnp.arange(num_experts, dtype=jnp.int32).reshape(*(1,) * expert.ndim, num_experts)
    return jnp.any(expert[..., None] == ids, axis=-2)


def expert_mlp(
    p: ExpertParams,
    x: Float[Array, "rows time width"],
    routing: Routing,
    valid: Bool[Array, "rows time"],
    *,
    cfg: ModelConfig,
    env: Env,
) -> Float[Array, "rows time width"]:
    """sum over a position's experts of weight · down(silu(gate x) · up x), in x's dtype."""
    run = functools.partial(_local_experts, cfg=cfg, env=env)
    return on_mesh.experts(run, x, *routing, valid, p.gate_up_proj, p.down_proj, env=env)


def _local_experts(
    x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array,
    *, cfg: ModelConfig, env: Env,
) -> Array:  # fmt: skip
    """What these experts add; ids outside of them are another device's."""
    rows, time, width = x.shape
    path = env.moe_path
    if path == "auto":
        path = "gather" if time == 1 else "grouped"
    flat = x.reshape(rows * time, width)
    expert, weight = (a.reshape(rows * time, -1) for a in (expert, weight))
    if path in ("gather", "grouped"):
        y = expert_glu(
            flat, expert, weight, valid.reshape(-1), w_in, w_out,
            tile=1 if path == "gather" else _tile(time, cfg, env), impl=env.impl("expert_glu"),
        )  # fmt: skip
        return y.reshape(x.shape)
    here = (expert >= 0) & (expert < w_in.shape[0])
    each = _PATHS[path](ExpertParams(w_in, w_out), flat, expert, here)
    total = jnp.zeros((rows * time, width), jnp.float32)
    for j in range(cfg.moe.top_k):  # ascending expert id
        part = weight[:, j, None] * each[:, j].astype(jnp.float32)
        total = total + jnp.where(here[:, j, None], part, 0.0)
    return jnp.where(valid[..., None], total.reshape(x.shape), 0.0).astype(x.dtype)


def _tile(time: int, cfg: ModelConfig, env: Env) -> int:
    """Rows of a tile: about what one expert gets from one batch row, a power of two from 8 on."""
    if env.moe_tile is not None:
        return env.moe_tile
    mean = time * cfg.moe.top_k / cfg.moe.num_experts
    return max(8, min(128, 1 << max(0, round(mean) - 1).bit_length()))


def _glu(gate_up: Array) -> Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _ragged(p: ExpertParams, x: Array, expert: Array, here: Array) -> Float[Array, "n k width"]:
    """`lax.ragged_dot`: native on TPU, every expert on CPU and CUDA. Rows not `here` go last."""
    n, k = expert.shape
    num = p.gate_up_proj.shape[0]
    group = jnp.where(here, expert, num).reshape(-1)
    order = jnp.argsort(group, stable=True)
    sizes = jnp.bincount(group, length=num).astype(jnp.int32)
    h = _glu(lax.ragged_dot(x[order // k], p.gate_up_proj, sizes))
    y = lax.ragged_dot(h, p.down_proj, sizes)
    return jnp.zeros_like(y).at[order].set(y).reshape(n, k, -1)


def _dense(p: ExpertParams, x: Array, expert: Array, here: Array) -> Float[Array, "n k width"]:
    """Every expert on every row, then a choice: the plain form the others are tested against."""
    expert = jnp.where(here, expert, 0)
    y = jnp.einsum("nef,efd->ned", _glu(jnp.einsum("nd,edf->nef", x, p.gate_up_proj)), p.down_proj)
    return jnp.take_along_axis(y, expert[..., None], axis=1)


_PATHS = {"ragged": _ragged, "dense": _dense}
