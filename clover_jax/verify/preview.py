"""Compares our preview pass, reveal rule and training loss with the torch oracle's."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.cache import DecodeCache, empty_cache
from clover_jax.checkpoint.hf_map import pieces
from clover_jax.config import ModelConfig
from clover_jax.diffusion.corrupt import Batch
from clover_jax.diffusion.loss import LossConfig, as_arrays, training_loss
from clover_jax.diffusion.reveal import choose_tokens, reveal_mask
from clover_jax.diffusion.sampling_config import SamplerConfig, sampler_params
from clover_jax.model.attention import attention_inputs, attention_output
from clover_jax.model.bd_gdn import block_conv, block_gdn
from clover_jax.model.block import (
    LayerIndex,
    Layout,
    LinearLayer,
    NoisyLayout,
    Streams,
    full_layer,
    linear_layer,
)
from clover_jax.model.deltanet import PrefixState, gdn_inputs, split_heads
from clover_jax.model.moe import moe, route, router_logits
from clover_jax.model.norm import rms_norm
from clover_jax.model.rope import rope_tables
from clover_jax.model.stack import each_layer, existing_experts
from clover_jax.model.transformer import (
    CleanInput,
    NoisyInput,
    Params,
    commit_and_preview,
    extend,
    forward,
    preview,
)
from clover_jax.params import named_leaves
from clover_jax.verify.causal import ROUTED, versions
from clover_jax.verify.compare import Report, Tap, compare_logits, compare_tap
from clover_jax.verify.limits import LIMITS, Limits
from clover_jax.verify.ours import ENV, LayerInputs
from clover_jax.verify.trace import Tensors, as_float
from pallas_kernels.block_attention import KV_TILE, BlockKV, block_attention

# A layer's tensors in the order in which it computes them.
TAPS = (
    "mixer_in", "q", "k", "v", "beta", "g", "history_share", "o", "mixer_out",
    "moe_in", "router_logits", "experts", "moe_out", "hidden",
)  # fmt: skip
PARTS = ("loss", "ar_loss", "diffusion_loss", "router_balance", "router_z")


def compare_preview(
    cfg: ModelConfig,
    params: Params,
    theirs: Tensors,
    their_versions: dict[str, Any],
    *,
    threshold: float,
    precision: str,
    progress: Callable[[str], None],
) -> Report:
    """Every tap of the block over their prefix, the logits over ours, and the reveal rule.

    Args:
        cfg: the model, with a block operator.
        params: our weights.
        theirs: what `oracles/torch_preview.py` wrote, what it was asked included; without
            `preview.logits` the taps alone are compared.
        their_versions: what it says about itself.
        threshold: of the reveal rule.
        precision: of our matmuls, "highest" or "default".
        progress: called with what is being done.
    """
    limits, dtype = LIMITS[cfg.dtype], cfg.dtype
    ids, block, masked = (np.asarray(theirs[f"request.{n}"]) for n in ("ids", "block", "masked"))
    masked = masked.astype(bool)
    taps: list[Tap] = []
    with jax.default_matmul_precision(precision):
        for i, found, coreset_margin in preview_taps(params, theirs, cfg=cfg):
            progress(f"layer {i} of {cfg.num_layers}")
            clear = None
            for name in (name for name in TAPS if name in found):
                path = f"preview.hidden.{i}" if name == "hidden" else f"preview.layers.{i}.{name}"
                if name == "experts":
                    margin = np.asarray(coreset_margin)
                    tap, clear = _compare_experts(i, found[name], theirs[path], margin, limits)
                else:
                    where = clear if name in ROUTED else None
                    tap = compare_tap(i, name, found[name], theirs[path], dtype, where=where)
                taps.append(tap)
        logits = []
        if "preview.logits" in theirs:
            for path, got in _whole_previews(params, ids, block, masked, cfg):
                progress(f"logits, {path}")
                logits.append(compare_logits(path, got, theirs["preview.logits"], limits))
            taps.append(_compare_reveal(theirs, masked, threshold, limits))
    return Report(
        against="torch-preview",
        versions={"ours": versions(), "theirs": their_versions},
        dtype=dtype,
        precision=precision,
        rows=len(ids),
        length=ids.shape[1],
        taps=tuple(taps),
        logits=tuple(logits),
    )


def preview_taps(
    params: Params, theirs: Tensors, *, cfg: ModelConfig
) -> Iterator[tuple[int, dict, Any]]:
    """Our tensors of every layer, each part fed theirs, over their prefix.

    Yields:
        The layer, its tensors, and per row how near the coreset's crossing was.
    """
    allowed = existing_experts(cfg)
    length = theirs["ids"].shape[1]
    for i, p in enumerate(each_layer(params.layers)):
        at, own = f"preview.layers.{i}.", f"prefix.layers.{i}."
        before = theirs[f"preview.hidden.{i - 1}" if i else "preview.embed"]
        parts = LayerInputs(before, *(theirs[at + n] for n in LayerInputs._fields[1:]))
        prefix = {n.removeprefix(own): a for n, a in theirs.items() if n.startswith(own)}
        run = _linear_taps if isinstance(p, LinearLayer) else _full_taps
        found, margin = run(
            p, parts, prefix, None if allowed is None else allowed[i], length=length, cfg=cfg
        )
        yield i, found, margin


@functools.partial(jax.jit, static_argnames=("length", "cfg"))
def _linear_taps(
    p: LinearLayer, x: LayerInputs, prefix: dict, allowed: Any, *, length: int, cfg: ModelConfig
) -> tuple[dict, Any]:
    rows, n = x.mixer_in.shape[:2]
    valid = jnp.ones((rows, 1, n), bool)
    state = PrefixState(prefix["state"].astype(jnp.float32), prefix["ring"].astype(cfg.dtype))
    own = p.linear_attn
    inputs = gdn_inputs(own, x.mixer_in, valid[:, 0])
    assert cfg.bd_gdn is not None
    q, k, v = split_heads(block_conv(own, state.ring, inputs.qkv, cfg.bd_gdn), cfg)
    empty = jnp.full((rows, 1), length == 0)
    out, o, share = block_gdn(
        own, x.mixer_in[:, None], valid, state, None, empty, cfg=cfg, env=ENV
    )  # fmt: skip
    mixer = {"q": q, "k": k, "v": v, "beta": inputs.beta, "g": inputs.g}
    mixer |= {"history_share": share[:, 0], "o": o[:, 0], "mixer_out": out[:, 0]}
    cache = _one_layer_cache(cfg, rows, length)
    cache = cache._replace(state=state.state[None, None], ring=state.ring[None, None])
    return _around(p, x, mixer, cache, allowed, cfg)


@functools.partial(jax.jit, static_argnames=("length", "cfg"))
def _full_taps(
    p: Any, x: LayerInputs, prefix: dict, allowed: Any, *, length: int, cfg: ModelConfig
) -> tuple[dict, Any]:
    rows, n = x.mixer_in.shape[:2]
    layout = _layout(rows, n, length, cfg).noisy
    assert layout is not None
    rope = jax.tree.map(lambda a: a[:, 0], layout.rope)
    q, k, v, gate = attention_inputs(p.self_attn, x.mixer_in, rope, cfg=cfg)
    cache = _one_layer_cache(cfg, rows, length)
    cells = [(0, 0), (0, cache.capacity - length), (0, 0), (0, 0)]
    keys, values = (jnp.pad(prefix[name], cells)[None] for name in ("k", "v"))
    mixed = block_attention(
        q, keys, values, 0, jnp.full((rows, n), length, jnp.int32),
        BlockKV(k[:, None], v[:, None], layout.valid),
        scale=cfg.attention.head_dim**-0.5, differentiable=False, impl="xla",
    )  # fmt: skip
    out = attention_output(p.self_attn, mixed, gate)
    cache = cache._replace(k=keys.astype(cfg.dtype), v=values.astype(cfg.dtype))
    return _around(p, x, {"mixer_out": out}, cache, allowed, cfg)


def _around(
    p: Any, x: LayerInputs, mixer: dict, cache: DecodeCache, allowed: Any, cfg: ModelConfig
) -> tuple[dict, Any]:
    """The mixer's tensors, those around it, and the layer as a whole."""
    rows, n = x.moe_in.shape[:2]
    norm = functools.partial(rms_norm, eps=cfg.rms_norm_eps)
    valid, blocks = jnp.ones((rows, n), bool), (1, n)
    moe_out, _ = moe(p.mlp, x.moe_in, valid, allowed, blocks, cfg=cfg, env=ENV)
    routing, stats = route(p.mlp, x.moe_in, valid, allowed, blocks, cfg=cfg)
    call: Any = linear_layer if isinstance(p, LinearLayer) else full_layer
    layout = _layout(rows, n, cache.length, cfg)
    streams = Streams(None, x.before[:, None])
    hidden = call(p, streams, cache, LayerIndex(0, 0, allowed), layout, cfg=cfg, env=ENV)[0].noisy
    found = {
        "mixer_in": norm(x.before, p.input_layernorm),
        **mixer,
        "moe_in": norm(x.before + x.mixer_out, p.post_attention_layernorm),
        "router_logits": router_logits(p.mlp, x.moe_in, allowed),
        "experts": routing.expert,
        "moe_out": moe_out,
        "hidden": hidden[:, 0],
    }
    return found, jnp.minimum(stats.margin, stats.coreset_margin)


def _one_layer_cache(cfg: ModelConfig, rows: int, length: int) -> DecodeCache:
    """A cache of one group with one GDN layer, with `length` tokens in it."""
    one = cfg.replace(num_layers=2, full_attention_interval=2, **{"moe.experts_per_layer": None})
    cache = empty_cache(one, rows, max(length, KV_TILE))
    return cache._replace(length=jnp.full((rows,), length, jnp.int32))


def _layout(rows: int, n: int, length: Any, cfg: ModelConfig) -> Layout:
    before = jnp.broadcast_to(jnp.asarray(length, jnp.int32).reshape(-1, 1), (rows, 1))
    at = before[..., None] + jnp.arange(n, dtype=jnp.int32)[None, None]
    a = cfg.attention
    rope = rope_tables(at, rotary_dim=a.rotary_dim, theta=a.rope_theta)
    return Layout(None, NoisyLayout(before, jnp.ones(at.shape, bool), rope, None))


def _whole_previews(
    params: Params, ids: np.ndarray, block: np.ndarray, masked: np.ndarray, cfg: ModelConfig
) -> Iterator[tuple[str, Any]]:
    """Logits of the block: after a prefill, and in one pass with the prefix's last tokens."""
    rows, length = ids.shape
    n = np.full(rows, block.shape[1], np.int32)
    append = jax.jit(functools.partial(extend, cfg=cfg, env=ENV))
    look = jax.jit(functools.partial(preview, cfg=cfg, env=ENV))
    fused = jax.jit(functools.partial(commit_and_preview, cfg=cfg, env=ENV))
    taken = lambda count: np.full(rows, count, np.int32)
    cache = empty_cache(cfg, rows, length + block.shape[1])
    if length:
        cache = append(params, ids, taken(length), cache).cache
    yield "preview", look(params, block, masked, n, cache)[0]
    if length:
        last = min(length, block.shape[1])
        cache = empty_cache(cfg, rows, length + block.shape[1])
        if length > last:
            cache = append(params, ids[:, :-last], taken(length - last), cache).cache
        clean = CleanInput(jnp.asarray(ids[:, -last:]), jnp.asarray(taken(last)))
        yield "fused with a commit", fused(params, clean, block, masked, n, cache)[1]


def _compare_experts(
    layer: int, ours: Any, theirs: Any, margin: np.ndarray, limits: Limits
) -> tuple[Tap, np.ndarray]:
    """Chosen experts; also bool, where the choice is clear: in rows without a near-tie."""
    apart = (np.asarray(ours) != np.asarray(theirs)).any(axis=-1)
    clear = np.broadcast_to((margin >= limits.routing)[:, None], apart.shape)
    tap = Tap(
        layer=layer, tap="experts", max_abs=0.0, relative_rms=float(apart.mean()), limit=1.0,
        differing=int((apart & clear).sum()), near_ties=int((~clear).sum()),
    )  # fmt: skip
    return tap, clear


def _compare_reveal(theirs: Tensors, masked: np.ndarray, threshold: float, limits: Limits) -> Tap:
    """Our choice on their logits."""
    logits = jnp.asarray(theirs["preview.logits"], jnp.float32)
    settings = sampler_params([SamplerConfig(threshold=threshold)] * len(masked))
    keys = jax.random.split(jax.random.key(0), masked.shape)  # greedy: no draw is made
    tokens, confidence, _ = choose_tokens(logits, keys, settings)
    everywhere = jnp.ones(masked.shape, bool)
    revealed, _ = reveal_mask(jnp.asarray(masked), confidence, everywhere, settings.threshold)
    wanted = as_float(theirs["reveal.revealed"]) > 0
    apart = np.asarray(revealed) != wanted
    apart |= wanted & (np.asarray(tokens) != np.asarray(theirs["reveal.tokens"]))
    near = apart & (np.abs(as_float(theirs["reveal.confidence"]) - threshold) < limits.margin)
    error = np.abs(as_float(confidence) - as_float(theirs["reveal.confidence"])).max()
    return Tap(
        layer=None, tap="reveal", max_abs=float(error), relative_rms=float(apart.mean()), limit=1.0,
        differing=int((apart & ~near).sum()), near_ties=int(near.sum()),
    )  # fmt: skip


def compare_training(
    cfg: ModelConfig,
    params: Params,
    theirs: Tensors,
    their_versions: dict[str, Any],
    *,
    loss: LossConfig,
    precision: str,
) -> Report:
    """Loss, its parts, both streams' final hidden states, and every parameter's gradient.

    Args:
        cfg: the model, with a block operator.
        params: our weights.
        theirs: what `oracles/torch_preview.py --train` wrote, what it was asked included.
        their_versions: what it says about itself.
        loss: weights of the terms, the same that the oracle was given.
        precision: of our matmuls.
    """
    limits, dtype = LIMITS[cfg.dtype], cfg.dtype
    asked = {name: np.asarray(theirs[f"request.{name}"]) for name in (*Batch._fields, "forbidden")}
    forbidden = jnp.asarray(asked.pop("forbidden").astype(bool))
    batch = Batch(**asked | {"block_masked": asked["block_masked"].astype(bool)})
    arrays = as_arrays(batch)
    with jax.default_matmul_precision(precision):
        run = functools.partial(training_loss, cfg=cfg, env=ENV, loss=loss)
        (_, parts), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(
            params, arrays, forbidden
        )
        clean = CleanInput(arrays.tokens, arrays.n_valid)
        noisy = NoisyInput(
            arrays.block_tokens, arrays.block_masked, arrays.block_n_valid, arrays.block_index
        )
        both = jax.jit(functools.partial(forward, cfg=cfg, env=ENV, cache=None))
        hidden = both(params, clean, noisy).hidden
    exists = {
        "clean": np.arange(batch.tokens.shape[1]) < np.asarray(batch.n_valid)[:, None],
        "noisy": np.broadcast_to(
            np.asarray(batch.block_n_valid)[..., None] > 0, batch.block_tokens.shape
        ),
    }
    taps = []
    for name, where in exists.items():
        ours_there = as_float(getattr(hidden, name))[where]
        found = compare_tap(None, name, ours_there, as_float(theirs[f"train.{name}"])[where], dtype)
        taps.append(_with_limit(found, f"{name} stream", limits.hidden))
    for name in PARTS:
        found = compare_tap(None, name, parts[name], theirs[f"train.{name}"], dtype)
        taps.append(_with_limit(found, name, limits.hidden))
    leaves = named_leaves(grads)
    for path, tensors in pieces(cfg).items():
        leaf = np.asarray(leaves[path])
        for piece in tensors:
            name = f"grad.{piece.name}"
            want = as_float(theirs[name]).reshape(piece.file_shapes[0])
            found = compare_tap(None, name, piece.to_file(leaf), want, dtype)
            taps.append(_with_limit(found, name, limits.gradient))
    return Report(
        against="torch-preview, training",
        versions={"ours": versions(), "theirs": their_versions},
        dtype=dtype,
        precision=precision,
        rows=batch.tokens.shape[0],
        length=batch.tokens.shape[1],
        taps=tuple(taps),
    )


def _with_limit(tap: Tap, name: str, limit: float) -> Tap:
    return Tap(layer=None, tap=name, max_abs=tap.max_abs, relative_rms=tap.relative_rms,
               limit=limit)  # fmt: skip
