"""The layer stack: a nested scan over groups of (GDN layers, one attention layer), and its twin.

Parameters come stacked (`Groups`) or as a plain tuple of layers; the function is the same. The
scan compiles once per group shape; the tuple avoids the copies that slicing stacked weights costs,
so small models decode faster with it.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float

from clover_jax.cache import DecodeCache
from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.model.block import (
    FullLayer,
    LayerIndex,
    LayerTaps,
    Layout,
    LinearLayer,
    Streams,
    full_layer,
    full_layer_specs,
    linear_layer,
    linear_layer_specs,
)
from clover_jax.model.moe import ROUTING, RouterStats
from clover_jax.params import stack


@struct.dataclass
class Groups:
    """Stacked layers."""

    linear: LinearLayer  # leaves [group, layer, ...]
    full: FullLayer  # leaves [group, ...]


type Layers = Groups | tuple[LinearLayer | FullLayer, ...]


class StackStats(NamedTuple):
    """Per-layer statistics, layer axis first."""

    router: RouterStats  # leaves [layers, rows, ...]
    history_share: Float[Array, "linear_layers rows"] | None


def stack_specs(cfg: ModelConfig) -> Groups:
    """Specs of all layers, stacked."""
    linear = stack(linear_layer_specs(cfg), cfg.linear_per_group, "layer")
    return Groups(
        linear=stack(linear, cfg.num_groups, "group"),
        full=stack(full_layer_specs(cfg), cfg.num_groups, "group"),
    )


def each_layer(layers: Layers) -> Iterator[LinearLayer | FullLayer]:
    """The layers in order; of stacked ones, one copy at a time."""
    if isinstance(layers, tuple):
        yield from layers
        return
    groups, per_group = jax.tree.leaves(layers.linear)[0].shape[:2]
    for g in range(groups):
        for j in range(per_group):
            yield jax.tree.map(lambda a, g=g, j=j: a[g, j], layers.linear)
        yield jax.tree.map(lambda a, g=g: a[g], layers.full)


def stack_layers(layers: tuple[LinearLayer | FullLayer, ...], cfg: ModelConfig) -> Groups:
    """Inverse of `each_layer`."""
    per_group = cfg.linear_per_group
    linear = [
        jax.tree.map(lambda *a: jnp.stack(a), *layers[i : i + per_group])
        for i in range(0, len(layers), per_group + 1)
    ]
    stacked = lambda trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
    return Groups(linear=stacked(linear), full=stacked(layers[per_group :: per_group + 1]))


def apply_stack(
    layers: Layers,
    streams: Streams,
    cache: DecodeCache | None,
    layout: Layout,
    allowed: Bool[Array, "layers experts"] | None,
    coreset: Bool[Array, "layers rows experts"] | None = None,
    *,
    cfg: ModelConfig,
    env: Env,
    taps: bool = False,
) -> tuple[Streams, DecodeCache | None, StackStats, LayerTaps | None]:
    """All layers.

    Args:
        layers: stacked or a tuple.
        streams: embedded inputs.
        cache: the prefix; written iff there is a clean stream. None: empty, differentiable.
        layout: positions.
        allowed: experts that exist, per layer.
        coreset: frozen ones of the rows' blocks, per layer.
        cfg: the model.
        env: rematerialisation and implementation choices.
        taps: also return every GDN layer's values before the gated norm.
    """
    existing = existing_experts(cfg)
    if existing is not None:
        allowed = existing if allowed is None else existing & allowed
    if isinstance(layers, tuple):
        return _unrolled(layers, streams, cache, layout, (allowed, coreset), cfg, env, taps)
    writes = streams.clean is not None
    # A layer at a time: a whole group's values would be the largest thing in memory.
    keep = jax.checkpoint_policies.save_only_these_names(ROUTING)
    remat = functools.partial(jax.checkpoint, policy=keep, prevent_cse=False)
    run_linear = functools.partial(linear_layer, cfg=cfg, env=env)
    run_full = functools.partial(full_layer, cfg=cfg, env=env)
    if env.remat:
        run_linear, run_full = remat(run_linear), remat(run_full)

    def group(carry: tuple, xs: tuple) -> tuple[tuple, tuple]:
        p, g, experts = xs

        def linear(carry: tuple, xs: tuple) -> tuple[tuple, tuple]:
            p, j, experts = xs
            streams, own = carry
            streams, own, stats, values = run_linear(
                p, streams, own if writes else cache, LayerIndex(g, j, *experts), layout
            )
            return (streams, own if writes else None), (stats, values if taps else None)

        n = cfg.linear_per_group
        first, last = (jax.tree.map(lambda a, i=i: a[i], experts) for i in (np.s_[:n], n))
        carry, (linear_stats, values) = lax.scan(linear, carry, (p.linear, jnp.arange(n), first))
        streams, own = carry
        last = LayerIndex(g, None, *last)
        streams, own, full_stats = run_full(p.full, streams, own if writes else cache, last, layout)
        return (streams, own if writes else None), (linear_stats, full_stats, values)

    grouped = lambda a: a.reshape(cfg.num_groups, cfg.full_attention_interval, *a.shape[1:])
    (streams, own), (linear_stats, full_stats, values) = lax.scan(
        group,
        (streams, cache if writes else None),
        (layers, jnp.arange(cfg.num_groups), jax.tree.map(grouped, (allowed, coreset))),
    )
    flat = lambda a: a.reshape(-1, *a.shape[2:])
    router = jax.tree.map(
        lambda a, b: flat(jnp.concatenate([a, b[:, None]], axis=1)),
        linear_stats.router,
        full_stats.router,
    )
    share = None if linear_stats.history_share is None else flat(linear_stats.history_share)
    values = jax.tree.map(flat, values)
    return streams, own if writes else cache, StackStats(router, share), values


def _unrolled(
    layers: tuple[LinearLayer | FullLayer, ...],
    streams: Streams,
    cache: DecodeCache | None,
    layout: Layout,
    experts: tuple[Any, Any],
    cfg: ModelConfig,
    env: Env,
    taps: bool,
) -> tuple[Streams, DecodeCache | None, StackStats, LayerTaps | None]:
    stats, values, left = [], [], []
    for i, p in enumerate(layers):
        g, j = divmod(i, cfg.full_attention_interval)
        at = LayerIndex(g, j, *(None if a is None else a[i] for a in experts))
        if isinstance(p, LinearLayer):
            # Alone: XLA would copy all layers' states at each write (jax 0.11.2, CPU).
            own = None if cache is None else _layer_alone(cache, g, j)
            streams, own, layer_stats, tap = linear_layer(
                p, streams, own, at._replace(group=0, layer=0), layout, cfg=cfg, env=env
            )
            left.append(own)
            values.append(tap)
        else:
            streams, cache, layer_stats = full_layer(
                p, streams, cache, at, layout, cfg=cfg, env=env
            )
        stats.append(layer_stats)
    stacked = lambda trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
    if cache is not None and streams.clean is not None:
        together = lambda parts, old: jnp.concatenate(parts).reshape(old.shape)
        cache = cache._replace(
            state=together([own.state for own in left], cache.state),
            ring=together([own.ring for own in left], cache.ring),
        )
    shares = [s.history_share for s in stats if s.history_share is not None]
    return (
        streams,
        cache,
        StackStats(stacked([s.router for s in stats]), jnp.stack(shares) if shares else None),
        stacked(values) if taps else None,
    )


def _layer_alone(cache: DecodeCache, group: int, layer: int) -> DecodeCache:
    """The cache with the state and ring of one GDN layer as its only ones."""
    one = lambda a: a[group : group + 1, layer : layer + 1]
    return cache._replace(state=one(cache.state), ring=one(cache.ring))


def existing_experts(cfg: ModelConfig) -> Array | None:
    """bool [layers, experts] of a pruned checkpoint: the first `experts_per_layer[l]` ids exist."""
    if cfg.moe.experts_per_layer is None:
        return None
    counts = np.asarray(cfg.moe.experts_per_layer)
    return jnp.asarray(np.arange(cfg.moe.num_experts)[None] < counts[:, None])
