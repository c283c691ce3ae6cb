"""Every numerical limit between implementations, and the comparisons that read them.

Loosening a limit is its own commit with the reason in its message.
"""

import dataclasses
import math

import numpy as np

TOP1_MARGIN = 1e-3  # top-1 must agree wherever the two best logits are further apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one kind of comparison.

    The first four are relative RMS errors, ||ours - theirs|| / ||theirs||.

    Attributes:
        op: a single operation, fed their input.
        layer: a layer or a scan over time, fed their input.
        hidden: the residual stream after any layer, each layer fed our own.
        gradient: of the training loss, by parameter.
        logits: largest absolute difference over the largest logit: rounding grows with the size.
        kl: largest KL(theirs || ours) of any position, nats.
        margin: below this gap of two logits a different token is a near-tie, not an error.
        routing: the same for the gap between the last expert that is chosen and the next.
    """

    op: float
    layer: float
    hidden: float
    gradient: float
    logits: float
    kl: float
    margin: float
    routing: float


_FLOAT32 = Limits(
    op=1e-6,
    layer=5e-6,
    hidden=1e-5,
    gradient=1e-5,
    logits=1e-5,
    kl=1e-8,
    margin=TOP1_MARGIN,
    routing=1e-3,
)
# Eight bits of mantissa, and frameworks round at different places. What the trained nano meets on a
# prompt of its own; on random tokens more routers nearly tie, and what follows is not bounded.
_BFLOAT16 = Limits(
    op=1e-2,
    layer=2e-2,
    hidden=5e-2,
    gradient=1e-1,
    logits=5e-2,
    kl=1e-1,
    margin=0.5,
    routing=5e-2,
)
LIMITS = {
    "float32": _FLOAT32,
    "bfloat16": _BFLOAT16,
    # llama.cpp's softmax and sigmoid are approximations of float32.
    "llama.cpp f32": dataclasses.replace(_FLOAT32, logits=1e-4, kl=1e-6),
    # Ours computes with the unrounded weights.
    "llama.cpp bf16": _BFLOAT16,
    # Other weights, eight bits each: judged by KL alone; the trained nano meets this on its tasks.
    "llama.cpp q8_0": dataclasses.replace(_BFLOAT16, logits=2e-1, kl=5e-1, margin=math.inf),
}


def relative_rms(ours: np.ndarray, theirs: np.ndarray) -> float:
    """||ours - theirs|| / ||theirs||; the shapes agree."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.linalg.norm(ours - theirs) / max(float(np.linalg.norm(theirs)), 1e-30))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64; NaN where a logit is +inf or NaN."""
    logits = np.asarray(logits, np.float64)
    with np.errstate(invalid="ignore"):
        logits = logits - logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def kl(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """KL(theirs || ours) of each position, nats; ids with -inf in both are outside."""
    p, q = log_softmax(theirs), log_softmax(ours)
    gap = np.subtract(p, q, out=np.zeros_like(p), where=~np.isneginf(p))
    return (np.exp(p) * gap).sum(axis=-1)
