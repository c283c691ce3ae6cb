"""One decoder layer on up to two streams.

The clean stream is causal and may write the cache; noisy blocks read. A prefill or commit has a
clean stream only, a preview noisy blocks only; a fused commit and the training forward have both,
and then the blocks see what the clean rows of the same pass leave behind.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from clover_jax.cache import DecodeCache
from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.model import on_mesh
from clover_jax.model.attention import (
    AttentionParams,
    attention_inputs,
    attention_output,
    attention_specs,
)
from clover_jax.model.bd_gdn import block_gdn
from clover_jax.model.deltanet import GDNParams, PrefixState, causal_gdn, gdn_specs
from clover_jax.model.moe import MoEParams, RouterStats, moe, moe_specs
from clover_jax.model.norm import rms_norm
from clover_jax.params import ParamSpec, zeros
from pallas_kernels.block_attention import KV_TILE, BlockKV


@struct.dataclass
class LinearLayer:
    """A GDN layer."""

    input_layernorm: Any  # [d]
    linear_attn: GDNParams
    post_attention_layernorm: Any  # [d]
    mlp: MoEParams


@struct.dataclass
class FullLayer:
    """A gated full-attention layer."""

    input_layernorm: Any  # [d]
    self_attn: AttentionParams
    post_attention_layernorm: Any  # [d]
    mlp: MoEParams


class Streams(NamedTuple):
    """Hidden states."""

    clean: Float[Array, "rows time width"] | None
    noisy: Float[Array, "rows blocks block width"] | None


class CleanLayout(NamedTuple):
    """Where the clean rows stand."""

    start: Int[Array, " rows"]  # tokens before the pass
    valid: Bool[Array, "rows time"]
    rope: tuple[Array, Array]
    first: Int[Array, "rows time"] | None = None  # row of the pass where its sample begins


class NoisyLayout(NamedTuple):
    """Where the blocks stand."""

    before: Int[Array, "rows blocks"]  # tokens of its sample before each block
    valid: Bool[Array, "rows blocks block"]
    rope: tuple[Array, Array]
    index: Int[Array, "rows blocks"] | None  # clean rows of this pass before each block; None: all
    first: Int[Array, "rows blocks"] | None = None  # row of the pass where its sample begins


class Layout(NamedTuple):
    """Positions of both streams."""

    clean: CleanLayout | None
    noisy: NoisyLayout | None


class LayerTaps(NamedTuple):
    """GDN values before the gated norm, for calibration: causal, and of the block operator."""

    causal: Float[Array, "rows time value_heads value"] | None
    block: Float[Array, "rows blocks block value_heads value"] | None


class LayerStats(NamedTuple):
    """What a layer did, per batch row."""

    router: RouterStats
    history_share: Float[Array, " rows"] | None  # mean softmax share of the history slot


class LayerIndex(NamedTuple):
    """A layer's place in the cache and its experts."""

    group: Any  # int or traced
    layer: Any  # GDN layer within the group
    allowed: Bool[Array, " experts"] | None
    coreset: Bool[Array, "rows experts"] | None = None  # frozen, of the rows' blocks


def linear_layer_specs(cfg: ModelConfig) -> LinearLayer:
    """Specs of a GDN layer."""
    norm = ParamSpec((cfg.hidden_size,), ("embed",), zeros, jnp.float32)
    return LinearLayer(norm, gdn_specs(cfg), norm, moe_specs(cfg))


def full_layer_specs(cfg: ModelConfig) -> FullLayer:
    """Specs of an attention layer."""
    norm = ParamSpec((cfg.hidden_size,), ("embed",), zeros, jnp.float32)
    return FullLayer(norm, attention_specs(cfg), norm, moe_specs(cfg))


@jax.named_scope("linear_layer")
def linear_layer(
    p: LinearLayer,
    streams: Streams,
    cache: DecodeCache | None,
    at: LayerIndex,
    layout: Layout,
    *,
    cfg: ModelConfig,
    env: Env,
) -> tuple[Streams, DecodeCache | None, LayerStats, LayerTaps]:
    """x + mixer(norm x), then x + moe(norm x). Without a cache the prefix is empty."""
    p = env.gathered(p, linear_layer_specs(cfg))
    clean, noisy = streams
    prefix = _prefix_state(cache, at, _rows(streams), cfg)
    source, causal_taps, block_taps, share = prefix, None, None, None
    if clean is not None:
        assert layout.clean is not None
        x = rms_norm(clean, p.input_layernorm, eps=cfg.rms_norm_eps)
        boundaries = layout.noisy is not None and layout.noisy.index is not None
        y, causal_taps, after, stream = causal_gdn(
            p.linear_attn,
            x,
            layout.clean.valid,
            prefix,
            _position(layout.clean),
            cfg=cfg,
            env=env,
            boundaries=boundaries,
        )
        clean = clean + y
        source = after if stream is None else stream
        if cache is not None:
            cache = cache._replace(
                state=_write_layer(cache.state, after.state, at),
                ring=_write_layer(cache.ring, after.ring, at),
            )
    if noisy is not None:
        assert layout.noisy is not None
        y, block_taps, share = block_gdn(
            p.linear_attn,
            rms_norm(noisy, p.input_layernorm, eps=cfg.rms_norm_eps),
            layout.noisy.valid,
            source,
            layout.noisy.index,
            layout.noisy.before == 0,
            None if layout.noisy.first is None else layout.noisy.before,
            cfg=cfg,
            env=env,
        )
        noisy = noisy + y
        share = _mean_over_valid(share, layout.noisy.valid)
    streams, router = _mlp(p, Streams(clean, noisy), at, layout, cfg, env)
    return streams, cache, LayerStats(router, share), LayerTaps(causal_taps, block_taps)


@jax.named_scope("full_layer")
def full_layer(
    p: FullLayer,
    streams: Streams,
    cache: DecodeCache | None,
    at: LayerIndex,
    layout: Layout,
    *,
    cfg: ModelConfig,
    env: Env,
) -> tuple[Streams, DecodeCache | None, LayerStats]:
    """As `linear_layer`, with gated attention as the mixer."""
    p = env.gathered(p, full_layer_specs(cfg))
    clean, noisy = streams
    attend = lambda q, limit, own, first: env.constrain(
        on_mesh.attention(
            q,
            k_cells,
            v_cells,
            group,
            limit,
            own,
            first,
            scale=cfg.attention.head_dim**-0.5,
            env=env,
        ),
        *("rows", None, "heads", None),
    )
    if cache is not None:
        k_cells, v_cells, group = cache.k, cache.v, at.group
    if clean is not None:
        lay = layout.clean
        assert lay is not None
        x = rms_norm(clean, p.input_layernorm, eps=cfg.rms_norm_eps)
        q, k, v, gate = attention_inputs(p.self_attn, x, lay.rope, cfg=cfg)
        if cache is None:
            k_cells, v_cells, group = _as_cells(k), _as_cells(v), 0
        else:
            cache = _write_cells(cache, k, v, lay, at.group, env)
            k_cells, v_cells = cache.k, cache.v
        step = jnp.arange(1, clean.shape[1] + 1, dtype=jnp.int32)[None]
        limit = jnp.where(lay.valid, lay.start[:, None] + step, 0)
        clean = clean + attention_output(p.self_attn, attend(q, limit, None, lay.first), gate)
    if noisy is not None:
        lay = layout.noisy
        assert lay is not None
        x = rms_norm(noisy, p.input_layernorm, eps=cfg.rms_norm_eps)
        q, k, v, gate = attention_inputs(p.self_attn, x, lay.rope, cfg=cfg)
        if cache is None and clean is None:  # an empty prefix: cells that nobody sees
            flat = lambda a: _as_cells(a.reshape(a.shape[0], -1, *a.shape[3:]))
            k_cells, v_cells, group = flat(k), flat(v), 0
        cells, first = lay.before, None
        if lay.first is not None:
            cells = lay.first + lay.before
            first = jnp.repeat(lay.first, q.shape[2], axis=1)
        limit = jnp.where(lay.valid, cells[..., None], 0).reshape(q.shape[0], -1)
        own = BlockKV(k, v, lay.valid)
        mixed = attend(q.reshape(q.shape[0], -1, *q.shape[3:]), limit, own, first)
        noisy = noisy + attention_output(p.self_attn, mixed.reshape(q.shape), gate)
    if clean is not None and cache is not None:
        # Reads before the next write. Inside a `cond` XLA does not see it, and copies the cache.
        cache, clean, noisy = lax.optimization_barrier((cache, clean, noisy))
    streams, router = _mlp(p, Streams(clean, noisy), at, layout, cfg, env)
    return streams, cache, LayerStats(router, None)


@jax.named_scope("mlp")
def _mlp(
    p: LinearLayer | FullLayer,
    streams: Streams,
    at: LayerIndex,
    layout: Layout,
    cfg: ModelConfig,
    env: Env,
) -> tuple[Streams, RouterStats]:
    """Both streams in one pass over the experts; only blocks get a coreset."""
    clean, noisy = streams
    parts, valid, blocks = [], [], None
    if clean is not None and layout.clean is not None:
        parts.append(clean)
        valid.append(layout.clean.valid)
    if noisy is not None and layout.noisy is not None:
        blocks = (noisy.shape[1], noisy.shape[2])
        parts.append(noisy.reshape(noisy.shape[0], -1, noisy.shape[-1]))
        valid.append(layout.noisy.valid.reshape(noisy.shape[0], -1))
    x = jnp.concatenate(parts, axis=1)
    y, stats = moe(
        p.mlp,
        rms_norm(x, p.post_attention_layernorm, eps=cfg.rms_norm_eps),
        jnp.concatenate(valid, axis=1),
        at.allowed,
        blocks,
        at.coreset,
        cfg=cfg,
        env=env,
    )
    x = env.constrain(x + y, "rows", None, None)
    time = 0 if clean is None else clean.shape[1]
    return Streams(
        None if clean is None else x[:, :time],
        None if noisy is None else x[:, time:].reshape(noisy.shape),
    ), stats


def _position(lay: CleanLayout) -> Int[Array, "rows time"] | None:
    """Of each row in its sample, where rows hold several."""
    if lay.first is None:
        return None
    return jnp.arange(lay.first.shape[1], dtype=jnp.int32)[None] - lay.first


def _rows(streams: Streams) -> int:
    stream = streams.clean if streams.clean is not None else streams.noisy
    assert stream is not None
    return stream.shape[0]


def _prefix_state(
    cache: DecodeCache | None, at: LayerIndex, rows: int, cfg: ModelConfig
) -> PrefixState:
    if cache is not None:
        return PrefixState(_read_layer(cache.state, at), _read_layer(cache.ring, at))
    d = cfg.delta
    return PrefixState(
        jnp.zeros((rows, d.num_value_heads, d.key_head_dim, d.value_head_dim), jnp.float32),
        jnp.zeros((rows, d.conv_kernel - 1, d.conv_channels), cfg.dtype),
    )


def _read_layer(a: Array, at: LayerIndex) -> Array:
    return lax.dynamic_slice(a, _place(a, at), (1, 1, *a.shape[2:]))[0, 0]


def _write_layer(a: Array, new: Array, at: LayerIndex) -> Array:
    # A slice update happens in place; `.at[].set` is a scatter, which copies in a loop.
    return lax.dynamic_update_slice(a, new[None, None], _place(a, at))


def _place(a: Array, at: LayerIndex) -> tuple[Any, ...]:
    index = (at.group, at.layer, *(0,) * (a.ndim - 2))
    return tuple(jnp.asarray(i, jnp.int32) for i in index)


def _write_cells(
    cache: DecodeCache, k: Array, v: Array, lay: CleanLayout, group: Any, env: Env
) -> DecodeCache:
    write = lambda cells, new: on_mesh.write_cells(cells, new, lay.start, lay.valid, group, env)
    return cache._replace(k=write(cache.k, k), v=write(cache.v, v))


def _as_cells(x: Float[Array, "rows time kv_heads channel"]) -> Array:
    """A pass's own keys as a cache of one group; past one tile, whole tiles."""
    time = x.shape[1]
    extra = 0 if time <= KV_TILE else -time % KV_TILE
    return jnp.pad(jnp.moveaxis(x, 1, 2), ((0, 0), (0, 0), (0, extra), (0, 0)))[None]


def _mean_over_valid(share: Array, valid: Array) -> Float[Array, " rows"]:
    """Mean over a row's valid positions and heads."""
    count = jnp.maximum(jnp.sum(valid, axis=(1, 2), dtype=jnp.int32), 1).astype(jnp.float32)
    total = jnp.sum(jnp.where(valid[..., None], share, 0.0), axis=(1, 2))
    return jnp.mean(total, axis=-1) / count
