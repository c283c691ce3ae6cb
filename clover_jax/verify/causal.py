"""Compares our causal path with a trace of another implementation's."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.config import ModelConfig
from clover_jax.model.transformer import Params
from clover_jax.verify import ours
from clover_jax.verify.compare import (
    Report,
    compare_continuation,
    compare_logits,
    compare_routing,
    compare_tap,
)
from clover_jax.verify.limits import Limits
from clover_jax.verify.trace import Tensors, as_float

ROUTED = ("moe_out", "hidden")  # taps that follow from the choice of experts
SINGLE = 16  # tokens at the end that are also read one at a time


def versions() -> dict[str, Any]:
    """Of our side, with the platform and the precision's default."""
    return {
        "clover_jax": version("clover-jax"),
        "jax": jax.__version__,
        "platform": jax.default_backend(),
    }


def splits(length: int, first: int) -> dict[str, list[int]]:
    """Ways of reading `length` tokens, as piece lengths; logits are wanted from `first` on."""
    ways = {"whole": [length] if not first else [first, length - first]}
    piece = 64 if length > 64 else max(1, length // 3)
    whole, rest = divmod(length, piece)
    if length > 1:
        ways[f"pieces of {piece}"] = [piece] * whole + [rest] * (rest > 0)
        single = min(SINGLE, length - 1, length - first)
        ways[f"last {single} one at a time"] = [length - single] + [1] * single
    return ways


def compare_causal(
    cfg: ModelConfig,
    params: Params,
    theirs: Tensors,
    their_versions: dict[str, Any],
    *,
    against: str,
    precision: str,
    progress: Callable[[str], None],
    limits: Limits,
) -> Report:
    """Every tap, the residual stream, the logits by three ways of reading, the continuation.

    Args:
        cfg: the model.
        params: our weights.
        theirs: a trace; what it lacks is left out.
        their_versions: what its writer says about itself.
        against: name of the other side.
        precision: of our matmuls, "highest" or "default".
        progress: called with what is being done.
        limits: of this kind of comparison.
    """
    ids = np.asarray(theirs["ids"])
    rows, length = ids.shape
    taps, running, logits, continued = [], [], [], []
    with jax.default_matmul_precision(precision):
        if "embed" in theirs:
            taps.append(
                compare_tap(None, "embed", params.embed_tokens[ids], theirs["embed"], limits)
            )
        for i, found in ours.layer_taps(params, theirs, cfg=cfg):
            progress(f"layer {i} of {cfg.num_layers}")
            clear = None
            for name, tensor in found.items():
                recorded = theirs.get(f"hidden.{i}" if name == "hidden" else f"layers.{i}.{name}")
                if recorded is None:
                    continue
                if name == "router_logits":
                    tap, clear = compare_routing(i, tensor, recorded, limits, top_k=cfg.moe.top_k)
                else:
                    where = clear if name in ROUTED else None
                    tap = compare_tap(i, name, tensor, recorded, limits, where=where)
                taps.append(tap)
        if any(name.startswith("hidden.") for name in theirs):
            for i, hidden in enumerate(ours.running_hidden(params, jnp.asarray(ids), cfg=cfg)):
                if f"hidden.{i}" in theirs:
                    recorded = theirs[f"hidden.{i}"]
                    running.append(
                        compare_tap(
                            i, "running hidden", hidden, recorded, limits, limit=limits.hidden
                        )
                    )
        if "logits" in theirs:
            first = length - theirs["logits"].shape[1]
            n = theirs["continuation"].shape[1] if "continuation" in theirs else 0
            passes = ours.CausalPasses(params, cfg, rows, length + n)
            for path, pieces in splits(length, first).items():
                progress(f"logits, {path}")
                got, cache = passes.read(ids, pieces, first)
                want = theirs["logits"][:, length - first - got.shape[1] :]
                logits.append(compare_logits(path, got, want, limits))
            if n:
                progress("continuation")
                tokens = passes.continuation(cache, n)
                theirs_margin = as_float(theirs["continuation.margin"])
                continued = [
                    compare_continuation(*row, limits)
                    for row in zip(
                        tokens, np.asarray(theirs["continuation"]), theirs_margin, strict=True
                    )
                ]
    return Report(
        against=against,
        versions={"ours": versions(), "theirs": their_versions},
        dtype=cfg.dtype,
        precision=precision,
        rows=rows,
        length=length,
        taps=tuple(taps),
        running=tuple(running),
        logits=tuple(logits),
        continuation=tuple(continued),
    )


def our_trace(
    params: Params, ids: np.ndarray, *, taps: bool, first: int, cfg: ModelConfig
) -> Tensors:
    """Our side as a trace: logits from position `first` on and, if asked for, every tap."""
    rows, length = ids.shape
    tensors: Tensors = {"ids": ids}
    if taps:
        tensors["embed"] = params.embed_tokens[ids]
        for i, found in ours.own_taps(params, jnp.asarray(ids), cfg=cfg):
            hidden = {f"hidden.{i}": found.pop("hidden")}
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in found.items()} | hidden
    passes = ours.CausalPasses(params, cfg, rows, length)
    pieces = [first, length - first] if first else [length]
    tensors["logits"], _ = passes.read(ids, pieces, first)
    return tensors
