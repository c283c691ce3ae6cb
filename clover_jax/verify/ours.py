"""Our side of a comparison: every layer on the inputs of another implementation, and whole passes.

The taps come from the functions that the layers are made of, each fed the other side's tensors, so
that an error shows where it arises and nowhere else. `hidden.{i}` is the layer itself.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from clover_jax.cache import empty_cache
from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.model.attention import attention_inputs, attention_output
from clover_jax.model.block import (
    CleanLayout,
    LayerIndex,
    Layout,
    LinearLayer,
    Streams,
    full_layer,
    linear_layer,
)
from clover_jax.model.deltanet import PrefixState, causal_conv, causal_gdn, gdn_inputs, split_heads
from clover_jax.model.moe import moe, router_logits
from clover_jax.model.norm import rms_norm
from clover_jax.model.rope import rope_tables
from clover_jax.model.stack import each_layer, existing_experts
from clover_jax.model.transformer import Params, extend, unembed
from clover_jax.verify.trace import Tensors
from pallas_kernels.block_attention import KV_TILE, block_attention

ENV = Env()
# A layer's tensors in the order in which it computes them.
TAPS = (
    "mixer_in", "q", "k", "v", "beta", "g", "history_share", "o", "state", "mixer_out",
    "moe_in", "router_logits", "experts", "moe_out", "hidden",
)  # fmt: skip


class Fed(NamedTuple):
    """What the other side fed to the parts of one layer, each [rows, time, width]."""

    mixer_in: Any
    mixer_out: Any
    moe_in: Any


def layer_taps(params: Params, theirs: Tensors, *, cfg: ModelConfig) -> Iterator[tuple[int, dict]]:
    """Our tensors of every layer whose inputs the other side recorded.

    Args:
        params: our weights.
        theirs: a trace with taps.
        cfg: the model.

    Yields:
        The layer and its tensors by the names of the trace, without `layers.{i}.`; `hidden` is
        what the whole layer gives.
    """
    allowed = existing_experts(cfg)
    for i, p in enumerate(each_layer(params.layers)):
        at = f"layers.{i}."
        before = theirs.get(f"hidden.{i - 1}" if i else "embed")
        if before is None and i == 0:
            before = params.embed_tokens[theirs["ids"]]
        parts = [theirs.get(at + name) for name in Fed._fields]
        if before is None or any(part is None for part in parts):
            continue
        found = _taps(p, before, Fed(*parts), None if allowed is None else allowed[i], cfg=cfg)
        yield i, {name: found[name] for name in TAPS if name in found}


def own_taps(
    params: Params, ids: Int[Array, "rows time"], *, cfg: ModelConfig
) -> Iterator[tuple[int, dict]]:
    """As `layer_taps`, every layer fed our own residual stream."""
    x, allowed = params.embed_tokens[ids], existing_experts(cfg)
    for i, p in enumerate(each_layer(params.layers)):
        found = _taps(p, x, None, None if allowed is None else allowed[i], cfg=cfg)
        x = found["hidden"]
        yield i, {name: found[name] for name in TAPS if name in found}


def running_hidden(
    params: Params, ids: Int[Array, "rows time"], *, cfg: ModelConfig
) -> Iterator[Float[Array, "rows time width"]]:
    """The residual stream after each layer, every layer fed our own."""
    x = params.embed_tokens[ids]
    allowed = existing_experts(cfg)
    for i, p in enumerate(each_layer(params.layers)):
        x = _whole_layer(p, x, None if allowed is None else allowed[i], cfg=cfg)
        yield x


@functools.partial(jax.jit, static_argnames="cfg")
def _taps(p: Any, before: Array, fed: Fed | None, allowed: Any, *, cfg: ModelConfig) -> dict:
    """Every part on what the other side fed to it, or on our own."""
    mixer_in = rms_norm(before, p.input_layernorm, eps=cfg.rms_norm_eps)
    mixer = _mixer(p, mixer_in if fed is None else fed.mixer_in, cfg)
    between = before + (mixer["mixer_out"] if fed is None else fed.mixer_out)
    moe_in = rms_norm(between, p.post_attention_layernorm, eps=cfg.rms_norm_eps)
    return {
        "mixer_in": mixer_in,
        **mixer,
        "moe_in": moe_in,
        **_mixture(p, moe_in if fed is None else fed.moe_in, allowed, cfg),
        "hidden": _layer(p, before, allowed, cfg),
    }


def _mixer(p: Any, x: Array, cfg: ModelConfig) -> dict:
    """Inner tensors of the GDN or attention part, fed the normed input."""
    rows, time = x.shape[:2]
    if isinstance(p, LinearLayer):
        d, valid = cfg.delta, jnp.ones((rows, time), bool)
        inputs = gdn_inputs(p.linear_attn, x, valid)
        window = jnp.pad(inputs.qkv, ((0, 0), (d.conv_kernel - 1, 0), (0, 0)))
        q, k, v = split_heads(causal_conv(window, p.linear_attn.conv1d), cfg)
        empty = PrefixState(
            jnp.zeros((rows, d.num_value_heads, d.key_head_dim, d.value_head_dim), jnp.float32),
            jnp.zeros((rows, d.conv_kernel - 1, d.conv_channels), inputs.qkv.dtype),
        )
        out, o, after, _ = causal_gdn(p.linear_attn, x, valid, empty, cfg=cfg, env=ENV)
        found = {"q": q, "k": k, "v": v, "beta": inputs.beta, "g": inputs.g}
        return {**found, "o": o, "state": after.state, "mixer_out": out}
    clean = _layout(rows, time, cfg).clean
    assert clean is not None
    q, k, v, gate = attention_inputs(p.self_attn, x, clean.rope, cfg=cfg)
    limit = jnp.broadcast_to(jnp.arange(1, time + 1, dtype=jnp.int32), (rows, time))
    extra = 0 if time <= KV_TILE else -time % KV_TILE
    cells = lambda a: jnp.pad(jnp.moveaxis(a, 1, 2), ((0, 0), (0, 0), (0, extra), (0, 0)))[None]
    scale = cfg.attention.head_dim**-0.5
    mixed = block_attention(q, cells(k), cells(v), 0, limit, None, scale=scale, impl="xla")
    return {"mixer_out": attention_output(p.self_attn, mixed, gate)}


def _mixture(p: Any, x: Array, allowed: Any, cfg: ModelConfig) -> dict:
    valid = jnp.ones(x.shape[:2], bool)
    out, _ = moe(p.mlp, x, valid, allowed, None, cfg=cfg, env=ENV)
    return {"router_logits": router_logits(p.mlp, x, allowed), "moe_out": out}


def _layer(p: Any, x: Array, allowed: Any, cfg: ModelConfig) -> Array:
    call: Any = linear_layer if isinstance(p, LinearLayer) else full_layer
    at, layout = LayerIndex(0, 0, allowed), _layout(x.shape[0], x.shape[1], cfg)
    return call(p, Streams(x, None), None, at, layout, cfg=cfg, env=ENV)[0].clean


@functools.partial(jax.jit, static_argnames="cfg")
def _whole_layer(p: Any, x: Array, allowed: Any, *, cfg: ModelConfig) -> Array:
    return _layer(p, x, allowed, cfg)


def _layout(rows: int, time: int, cfg: ModelConfig) -> Layout:
    at = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), (rows, time))
    a = cfg.attention
    rope = rope_tables(at, rotary_dim=a.rotary_dim, theta=a.rope_theta)
    return Layout(CleanLayout(jnp.zeros((rows,), jnp.int32), jnp.ones(at.shape, bool), rope), None)


compiled_extend = jax.jit(extend, static_argnames=("cfg", "env", "logits"))


class CausalPasses:
    """Logits of the same tokens through every way of reading them."""

    def __init__(self, params: Params, cfg: ModelConfig, rows: int, capacity: int):
        self._params, self._cfg, self._rows, self._capacity = params, cfg, rows, capacity
        self._extend: Callable = functools.partial(compiled_extend, cfg=cfg, env=ENV)

    def read(
        self, ids: np.ndarray, pieces: list[int], first: int = 0
    ) -> tuple[Float[Array, "rows time vocab"], Any]:
        """Logits from position `first` on, and the cache, reading `pieces` tokens at a time.

        All pieces but the last of one length take one program, padded on the right.
        """
        assert sum(pieces) == ids.shape[1]
        cache = empty_cache(self._cfg, self._rows, self._capacity)
        width, at, parts = max(pieces), 0, []
        for n in pieces:
            size = 1 if n == 1 else width
            part = np.zeros((self._rows, size), np.int32)
            part[:, :n] = ids[:, at : at + n]
            n_valid = np.full(self._rows, n, np.int32)
            wanted = at + n > first
            out = self._extend(
                self._params, part, n_valid, cache, logits="all" if wanted else "none"
            )
            cache = out.cache
            if wanted:
                parts.append(out.logits[:, max(first - at, 0) : n])
            at += n
        return jnp.concatenate(parts, axis=1), cache

    def continuation(self, cache: Any, n: int) -> np.ndarray:
        """n greedy tokens after a cache, int32 [rows, n]."""
        tokens, logits = [], unembed(self._params, cache.hidden)
        ones = np.ones(self._rows, np.int32)
        for _ in range(n):
            tokens.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
            out = self._extend(self._params, tokens[-1][:, None], ones, cache, logits="all")
            logits, cache = out.logits[:, 0], out.cache
        return np.asarray(jnp.stack(tokens, axis=1))
