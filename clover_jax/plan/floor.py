"""The least time of a pass: bytes that it must read and write, over the memory's bandwidth.

Counted are weights (of the routed experts those that are touched), KV cells and GDN states.
Activations, logits, collectives and arithmetic are left out: no machine is faster than this floor,
and a real one is slower.
"""

import dataclasses
from typing import Literal, NamedTuple

from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.plan import memory
from clover_jax.plan.devices import DEVICES, Device, WeightFormat
from clover_jax.plan.memory import ROUTED
from pallas_kernels.block_attention import KV_TILE

Pass = Literal["AR step", "preview", "commit"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What passes over a model have to move.

    Attributes:
        cfg: the model.
        env: how it is split; all bytes are those of one device.
        form: of the stored weights.
        rows: of the batch.
        context: committed tokens of each row.
    """

    cfg: ModelConfig
    env: Env
    form: WeightFormat
    rows: int
    context: int


class Traffic(NamedTuple):
    """Bytes that one device moves in a pass."""

    weights: int  # all but the routed experts
    experts: int
    kv: int
    states: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def expected_experts(cfg: ModelConfig, tokens: int) -> float:
    """Distinct experts of a layer if each token drew its top-k evenly and for itself.

    Real routing overlaps more, so this is an upper guide, not a measurement.
    """
    m = cfg.moe
    return m.num_experts * (1 - (1 - m.top_k / m.num_experts) ** tokens)


def traffic(load: Load, kind: Pass, experts: float) -> Traffic:
    """Least bytes of a pass.

    Args:
        load: the model and its batch.
        kind: an AR step reads one row of the embedding per token and gives logits; a preview does
            so for a block and writes nothing; a commit gives no logits and writes states and cells.
        experts: distinct routed experts that a layer touches, by all rows that share its devices;
            each device is taken to hold an even share of them.
    """
    cfg = load.cfg
    parts = memory.weights(cfg, load.env, load.form)
    tokens = load.rows * (1 if kind == "AR step" else cfg.block_length)
    table = parts.pop("embedding")
    head = parts.pop("lm_head", table)  # tied: the table is the head
    fixed = sum(p.device for name, p in parts.items() if name != ROUTED)
    if kind != "commit":
        fixed += head.device
    fixed += table.device * min(tokens, cfg.vocab_size) // cfg.vocab_size
    cells = _cells(load, load.context)
    written = 0 if kind == "preview" else _cells(load, load.context + tokens // load.rows) - cells
    states = _states(load)
    return Traffic(
        fixed,
        round(parts[ROUTED].device * experts / cfg.moe.num_experts),
        cells + written,
        states if kind == "preview" else 2 * states,
    )


class Speed(NamedTuple):
    """Floors of a decoding mode on a device."""

    passes_ms: dict[str, float]
    tokens_per_s: float  # of one row
    tpf: float  # all forwards


def ar_speed(load: Load, device: Device) -> Speed:
    """One token per pass; one row touches its own top-k experts, several the expected union."""
    experts = expected_experts(load.cfg, _rows_together(load))
    seconds = traffic(load, "AR step", experts).total / device.bandwidth
    return Speed({"AR step": 1e3 * seconds}, 1 / seconds, 1.0)


def block_speed(load: Load, device: Device, *, tpf_previews: float, experts: float) -> Speed:
    """Previews of a block, then its commit.

    Args:
        load: the model and its batch.
        device: what it runs on.
        tpf_previews: tokens that a preview fixes, in the mean.
        experts: that a preview touches in a layer. A commit has no coreset: it touches those that
            are expected of its tokens.
    """
    length = load.cfg.block_length
    preview, commit = _block_seconds(load, device, experts)
    previews = length / tpf_previews
    return Speed(
        {"preview": 1e3 * preview, "commit": 1e3 * commit},
        length / (previews * preview + commit),
        length / (previews + 1),
    )


def tpf_needed(load: Load, device: Device, *, tokens_per_s: float, experts: float) -> float | None:
    """Tokens per preview at which the floor is that speed; None: the commits alone take longer."""
    preview, commit = _block_seconds(load, device, experts)
    left = 1 / tokens_per_s - commit / load.cfg.block_length
    return preview / left if left > 0 else None


def host_preview_ms(load: Load, device: Device, *, experts: float) -> float:
    """A preview whose touched experts come over the host link while the rest is read."""
    moved = traffic(load, "preview", experts)
    own = (moved.total - moved.experts) / device.bandwidth
    return 1e3 * max(own, moved.experts / device.host_link)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published speed, batch 1, bf16."""

    device: str
    tokens_per_s: float
    of: str

    @property
    def on(self) -> Device:
        """The device it was measured on."""
        return next(d for d in DEVICES if d.name == self.device)


# The launch article's; neither TPF nor experts touched were published (nor in what context).
CLAIMS = (
    Claim("GB300", 680.0, "Clover"),
    Claim("H200", 515.0, "Clover"),
    Claim("H200", 365.0, "a DFlash2 set-up on a Qwen of this size"),
)


def _block_seconds(load: Load, device: Device, experts: float) -> tuple[float, float]:
    preview = traffic(load, "preview", experts)
    tokens = _rows_together(load) * load.cfg.block_length
    commit = traffic(load, "commit", expected_experts(load.cfg, tokens))
    return preview.total / device.bandwidth, commit.total / device.bandwidth


def _rows_together(load: Load) -> int:
    """Rows whose experts lie on the same devices: those that the data axis does not keep apart."""
    mesh = load.env.mesh
    data = 1 if mesh is None else mesh.shape["data"]
    return load.rows if load.rows % data else load.rows // data


def _cells(load: Load, tokens: int) -> int:
    """Bytes of the KV cells of so many tokens per row; the cache's own shapes are whole tiles."""
    capacity = -(-max(load.context, 1) // KV_TILE) * KV_TILE
    found = memory.caches(load.cfg, load.rows, capacity, load.env)["KV cells"]
    return round(found.device * tokens / capacity)


def _states(load: Load) -> int:
    found = memory.caches(load.cfg, load.rows, KV_TILE, load.env)
    return found["GDN states"].device + found["conv rings"].device
