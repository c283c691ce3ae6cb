"""Compares our preview pass, reveal rule and training loss with the torch oracle's."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from clover_jax.cache import DecodeCache, empty_cache
from clover_jax.checkpoint.hf_map import pieces
from clover_jax.config import ModelConfig
from clover_jax.diffusion.corrupt import Batch
from clover_jax.diffusion.loss import LossConfig, as_arrays, training_loss
from clover_jax.diffusion.reveal import choose_tokens, reveal_mask
from clover_jax.diffusion.sampling_config import SamplerConfig, sampler_params
from clover_jax.model.attention import attention_inputs, attention_output
from clover_jax.model.bd_gdn import block_gdn, mixed_block
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
    forward,
    preview,
)
from clover_jax.params import named_leaves
from clover_jax.verify.causal import ROUTED, versions
from clover_jax.verify.compare import Report, Tap, compare_logits, compare_tap
from clover_jax.verify.limits import LIMITS, Limits
from clover_jax.verify.ours import ENV, TAPS, Fed, compiled_extend
from clover_jax.verify.trace import Tensors, as_float
from pallas_kernels.block_attention import KV_TILE, BlockKV, block_attention

# What the training oracle is asked: rows of one sample each, whose noise masks and nothing else.
TRAINING_REQUEST = (
    "tokens", "n_valid", "target_weight", "block_index", "block_tokens", "block_masked",
    "block_n_valid", "block_weight", "forbidden",
)  # fmt: skip
PARTS = ("loss", "ar_loss", "diffusion_loss", "router_balance", "router_z")


_preview = jax.jit(preview, static_argnames=("cfg", "env"))
_commit_and_preview = jax.jit(commit_and_preview, static_argnames=("cfg", "env"))
_loss_and_gradients = jax.jit(
    jax.value_and_grad(training_loss, has_aux=True), static_argnames=("cfg", "env", "loss")
)
_forward = jax.jit(forward, static_argnames=("cfg", "env"))


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
    limits = LIMITS[cfg.dtype]
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
                    tap = compare_tap(i, name, found[name], theirs[path], limits, where=where)
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
        dtype=cfg.dtype,
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
        fed = Fed(*(theirs[at + name] for name in Fed._fields))
        prefix = {n.removeprefix(own): a for n, a in theirs.items() if n.startswith(own)}
        run = _linear_taps if isinstance(p, LinearLayer) else _full_taps
        found, margin = run(
            p, before, fed, prefix, None if allowed is None else allowed[i], length=length, cfg=cfg
        )
        yield i, found, margin


@functools.partial(jax.jit, static_argnames=("length", "cfg"))
def _linear_taps(
    p: LinearLayer, before: Array, fed: Fed, prefix: dict, allowed: Any, *,
    length: int, cfg: ModelConfig,
) -> tuple[dict, Any]:  # fmt: skip
    rows, n = before.shape[:2]
    valid = jnp.ones((rows, 1, n), bool)
    state = PrefixState(prefix["state"].astype(jnp.float32), prefix["ring"].astype(cfg.dtype))
    own = p.linear_attn
    inputs = gdn_inputs(own, fed.mixer_in, valid[:, 0])
    assert cfg.bd_gdn is not None
    q, k, v = split_heads(mixed_block(own, state.ring, inputs.qkv, cfg.bd_gdn), cfg)
    empty = jnp.full((rows, 1), length == 0)
    out, o, share = block_gdn(
        own, fed.mixer_in[:, None], valid, state, None, empty, cfg=cfg, env=ENV
    )  # fmt: skip
    mixer = {"q": q, "k": k, "v": v, "beta": inputs.beta, "g": inputs.g}
    mixer |= {"history_share": share[:, 0], "o": o[:, 0], "mixer_out": out[:, 0]}
    cache = _one_layer_cache(cfg, rows, length)
    cache = cache._replace(state=state.state[None, None], ring=state.ring[None, None])
    return _around(p, before, fed, mixer, cache, allowed, cfg)


@functools.partial(jax.jit, static_argnames=("length", "cfg"))
def _full_taps(
    p: Any, before: Array, fed: Fed, prefix: dict, allowed: Any, *, length: int, cfg: ModelConfig
) -> tuple[dict, Any]:
    rows, n = before.shape[:2]
    layout = _layout(rows, n, length, cfg).noisy
    assert layout is not None
    rope = jax.tree.map(lambda a: a[:, 0], layout.rope)
    q, k, v, gate = attention_inputs(p.self_attn, fed.mixer_in, rope, cfg=cfg)
    cache = _one_layer_cache(cfg, rows, length)
    cells = [(0, 0), (0, 0), (0, cache.capacity - length), (0, 0)]
    keys, values = (jnp.pad(jnp.moveaxis(prefix[name], 1, 2), cells)[None] for name in ("k", "v"))
    mixed = block_attention(
        q, keys, values, 0, jnp.full((rows, n), length, jnp.int32),
        BlockKV(k[:, None], v[:, None], layout.valid),
        scale=cfg.attention.head_dim**-0.5, impl="xla",
    )  # fmt: skip
    out = attention_output(p.self_attn, mixed, gate)
    cache = cache._replace(k=keys.astype(cfg.dtype), v=values.astype(cfg.dtype))
    return _around(p, before, fed, {"mixer_out": out}, cache, allowed, cfg)


def _around(
    p: Any, before: Array, fed: Fed, mixer: dict, cache: DecodeCache, allowed: Any,
    cfg: ModelConfig,
) -> tuple[dict, Any]:  # fmt: skip
    """The mixer's tensors, those around it, and the layer as a whole."""
    rows, n = before.shape[:2]
    norm = functools.partial(rms_norm, eps=cfg.rms_norm_eps)
    valid, blocks = jnp.ones((rows, n), bool), (1, n)
    moe_out, _ = moe(p.mlp, fed.moe_in, valid, allowed, blocks, cfg=cfg, env=ENV)
    routing, stats = route(p.mlp, fed.moe_in, valid, allowed, blocks, cfg=cfg)
    call: Any = linear_layer if isinstance(p, LinearLayer) else full_layer
    layout = _layout(rows, n, cache.length, cfg)
    streams = Streams(None, before[:, None])
    hidden = call(p, streams, cache, LayerIndex(0, 0, allowed), layout, cfg=cfg, env=ENV)[0].noisy
    found = {
        "mixer_in": norm(before, p.input_layernorm),
        **mixer,
        "moe_in": norm(before + fed.mixer_out, p.post_attention_layernorm),
        "router_logits": router_logits(p.mlp, fed.moe_in, allowed),
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
    taken = lambda count: np.full(rows, count, np.int32)
    cache = empty_cache(cfg, rows, length + block.shape[1])
    if length:
        cache = compiled_extend(params, ids, taken(length), cache, cfg=cfg, env=ENV).cache
    yield "preview", _preview(params, block, masked, n, cache, cfg=cfg, env=ENV)[0]
    if length:
        last = min(length, block.shape[1])
        cache = empty_cache(cfg, rows, length + block.shape[1])
        if length > last:
            cache = compiled_extend(
                params, ids[:, :-last], taken(length - last), cache, cfg=cfg, env=ENV
            ).cache
        clean = CleanInput(jnp.asarray(ids[:, -last:]), jnp.asarray(taken(last)))
        fused = _commit_and_preview(params, clean, block, masked, n, cache, cfg=cfg, env=ENV)
        yield "fused with a commit", fused[1]


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
    limits = LIMITS[cfg.dtype]
    asked = {name: np.asarray(theirs[f"request.{name}"]) for name in TRAINING_REQUEST}
    forbidden = jnp.asarray(asked.pop("forbidden").astype(bool))
    batch = Batch(
        **asked | {"block_masked": asked["block_masked"].astype(bool)},
        block_shown=asked["block_tokens"],
        block_follows=np.zeros(asked["block_index"].shape, bool),
    )
    arrays = as_arrays(batch)
    with jax.default_matmul_precision(precision):
        (_, parts), grads = _loss_and_gradients(
            params, arrays, forbidden, cfg=cfg, env=ENV, loss=loss
        )
        clean = CleanInput(arrays.tokens, arrays.n_valid)
        noisy = NoisyInput(
            arrays.block_tokens, arrays.block_masked, arrays.block_n_valid, arrays.block_index
        )
        hidden = _forward(params, clean, noisy, None, cfg=cfg, env=ENV).hidden
    exists = {
        "clean": np.arange(batch.tokens.shape[1]) < np.asarray(batch.n_valid)[:, None],
        "noisy": np.broadcast_to(
            np.asarray(batch.block_n_valid)[..., None] > 0, batch.block_tokens.shape
        ),
    }
    taps = []
    for name, where in exists.items():
        pair = as_float(getattr(hidden, name))[where], as_float(theirs[f"train.{name}"])[where]
        taps.append(compare_tap(None, f"{name} stream", *pair, limits, limit=limits.hidden))
    for name in PARTS:
        pair = parts[name], theirs[f"train.{name}"]
        taps.append(compare_tap(None, name, *pair, limits, limit=limits.hidden))
    leaves = named_leaves(grads)
    for path, tensors in pieces(cfg).items():
        leaf = np.asarray(leaves[path])
        for piece in tensors:
            name = f"grad.{piece.name}"
            pair = piece.to_file(leaf), as_float(theirs[name]).reshape(piece.file_shapes[0])
            taps.append(compare_tap(None, name, *pair, limits, limit=limits.gradient))
    return Report(
        against="torch-preview, training",
        versions={"ours": versions(), "theirs": their_versions},
        dtype=cfg.dtype,
        precision=precision,
        rows=batch.tokens.shape[0],
        length=batch.tokens.shape[1],
        taps=tuple(taps),
    )
