"""Compares tensors, logits and continuations under the limits; a report says what is past them."""

import dataclasses
from typing import Any

import numpy as np

from clover_jax.verify.limits import Limits, kl, relative_rms
from clover_jax.verify.trace import as_float

# A single operation; every other tap is a layer or a scan over time.
OPS = ("embed", "mixer_in", "q", "k", "v", "beta", "g", "moe_in", "router_logits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tap:
    """One tensor of one layer.

    Attributes:
        layer: None for what belongs to no layer.
        tap: its name in the trace.
        max_abs: largest absolute difference.
        relative_rms: ||ours - theirs|| / ||theirs||.
        limit: of the relative RMS.
        differing: positions that choose other experts although the choice is clear.
        near_ties: positions whose experts are nearly tied: another choice there is no error, and
            what follows from the choice is not compared.
    """

    layer: int | None
    tap: str
    max_abs: float
    relative_rms: float
    limit: float
    differing: int = 0
    near_ties: int = 0

    @property
    def ok(self) -> bool:
        """Whether it is inside its limit."""
        return self.relative_rms <= self.limit and not self.differing

    @property
    def where(self) -> str:
        """Layer and tap as text."""
        return self.tap if self.layer is None else f"layer {self.layer} {self.tap}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logits:
    """Logits of many positions, by one way of reading the tokens.

    Attributes:
        path: how we read them.
        positions: how many.
        kl_mean: KL(theirs || ours), nats.
        kl_p99: its 99th percentile.
        kl_max: its maximum.
        max_abs: largest absolute difference of a logit.
        peak: their largest absolute logit.
        top1: share of positions with the same best token.
        differing: positions with another best token although it is clear.
        near_ties: positions with another best token where the gap is below the margin.
        ok: whether all are inside the limits.
    """

    path: str
    positions: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    max_abs: float
    peak: float
    top1: float
    differing: int
    near_ties: int
    ok: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuation:
    """Greedy tokens of one row, ours against theirs.

    Attributes:
        tokens: how many were compared.
        equal: how many agree before the first difference.
        margin: their gap of the two best logits at the first difference, None if there is none.
        ok: no difference, or a near-tie.
    """

    tokens: int
    equal: int
    margin: float | None
    ok: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A comparison of two implementations.

    Attributes:
        against: the other side.
        versions: of both sides and what they ran on.
        dtype: of the weights.
        precision: of our matmuls.
        rows: rows of tokens.
        length: tokens of a row.
        taps: each fed the other side's input.
        running: the residual stream after each layer, every layer fed our own.
        logits: by way of reading.
        continuation: greedy, by row.
    """

    against: str
    versions: dict[str, Any]
    dtype: str
    precision: str
    rows: int
    length: int
    taps: tuple[Tap, ...] = ()
    running: tuple[Tap, ...] = ()
    logits: tuple[Logits, ...] = ()
    continuation: tuple[Continuation, ...] = ()

    @property
    def first_diverging(self) -> Tap | None:
        """The first tensor past its limit, in the order of the computation."""
        return next((tap for tap in (*self.taps, *self.running) if not tap.ok), None)

    @property
    def ok(self) -> bool:
        """Whether everything is inside its limit."""
        compared = (*self.taps, *self.running, *self.logits, *self.continuation)
        return bool(compared) and all(item.ok for item in compared)


def compare_tap(
    layer: int | None,
    tap: str,
    ours: Any,
    theirs: Any,
    limits: Limits,
    *,
    where: np.ndarray | None = None,
    limit: float | None = None,
) -> Tap:
    """One tensor of both sides.

    Args:
        layer: its layer, None for what belongs to no layer.
        tap: its name; operations have a narrower limit than layers.
        ours: our tensor.
        theirs: theirs.
        limits: of this comparison.
        where: bool over the leading axes; only those positions are compared.
        limit: of the relative RMS, instead of the tap's own.
    """
    mine, other = as_float(ours), as_float(theirs)
    if mine.shape != other.shape:
        return Tap(layer=layer, tap=f"{tap} shape {mine.shape}, theirs {other.shape}",
                   max_abs=np.inf, relative_rms=np.inf, limit=0.0)  # fmt: skip
    if where is not None:
        mine, other = mine[where], other[where]
    exists = np.isfinite(other)
    if not (np.isfinite(mine) == exists).all():
        error, largest = np.inf, np.inf
    else:
        error = relative_rms(mine[exists], other[exists])
        largest = float(np.abs(mine[exists] - other[exists]).max(initial=0.0))
    if limit is None:
        limit = limits.op if tap in OPS else limits.layer
    near = 0 if where is None else int((~where).sum())
    return Tap(
        layer=layer, tap=tap, max_abs=largest, relative_rms=error, limit=limit, near_ties=near
    )  # fmt: skip


def compare_routing(
    layer: int, ours: Any, theirs: Any, limits: Limits, *, top_k: int
) -> tuple[Tap, np.ndarray]:
    """Router logits and the choices they lead to; also bool, where the choice is clear."""
    mine, other = as_float(ours), as_float(theirs)
    found = compare_tap(layer, "router_logits", mine, other, limits)
    if mine.shape != other.shape:
        return found, np.ones(other.shape[:-1], bool)
    differing, _ = choices_apart(mine, other, top_k, limits.routing)
    clear = gap(other, top_k) >= limits.routing
    found = dataclasses.replace(found, differing=differing, near_ties=int((~clear).sum()))
    return found, clear


def choices_apart(ours: np.ndarray, theirs: np.ndarray, k: int, margin: float) -> tuple[int, int]:
    """Positions whose k best ids differ: clear ones, and those where their gap is below margin."""
    best = lambda logits: np.sort(np.argsort(-logits, axis=-1, kind="stable")[..., :k], axis=-1)
    apart = (best(ours) != best(theirs)).any(axis=-1)
    near = apart & (gap(theirs, k) < margin)
    return int((apart & ~near).sum()), int(near.sum())


def gap(logits: np.ndarray, k: int) -> np.ndarray:
    """Between the k-th best logit and the next; inf where there is none."""
    ranked = -np.sort(-logits, axis=-1)
    if k == logits.shape[-1]:
        return np.full(logits.shape[:-1], np.inf)
    return ranked[..., k - 1] - ranked[..., k]


def compare_logits(path: str, ours: Any, theirs: Any, limits: Limits) -> Logits:
    """Logits [..., vocab] of both sides."""
    mine, other = as_float(ours), as_float(theirs)
    apart = kl(other, mine)
    differing, near = choices_apart(mine, other, 1, limits.margin)
    finite = np.isfinite(other)
    largest = float(np.abs(mine[finite] - other[finite]).max(initial=0.0))
    peak = float(np.abs(other[finite]).max(initial=0.0))
    ok = largest <= limits.logits * peak and apart.max() <= limits.kl and not differing
    return Logits(
        path=path,
        positions=apart.size,
        kl_mean=float(apart.mean()),
        kl_p99=float(np.quantile(apart, 0.99)),
        kl_max=float(apart.max()),
        max_abs=largest,
        peak=peak,
        top1=1 - (differing + near) / apart.size,
        differing=differing,
        near_ties=near,
        ok=bool(ok and np.isfinite(mine[finite]).all()),
    )


def compare_continuation(
    ours: np.ndarray, theirs: np.ndarray, margins: np.ndarray, limits: Limits
) -> Continuation:
    """Greedy tokens of one row; after the first difference the texts are no longer the same."""
    apart = np.flatnonzero(ours != theirs)
    if not apart.size:
        return Continuation(tokens=ours.size, equal=ours.size, margin=None, ok=True)
    margin = float(margins[apart[0]])
    return Continuation(
        tokens=ours.size, equal=int(apart[0]), margin=margin, ok=margin < limits.margin
    )
