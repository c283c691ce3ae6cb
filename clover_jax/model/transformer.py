"""The passes of the model: `extend` (causal, writes), `preview` (denoises, reads), and both.

`extend` serves prefill (fixed chunk length), commit (block length) and the AR step (length 1).
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from clover_jax.cache import ROW_AXES, DecodeCache
from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.block import CleanLayout, LayerTaps, Layout, NoisyLayout, Streams
from clover_jax.model.norm import rms_norm
from clover_jax.model.rope import rope_tables
from clover_jax.model.stack import (
    Layers,
    StackStats,
    apply_stack,
    each_layer,
    stack_layers,
    stack_specs,
)
from clover_jax.params import ParamSpec, normal, zeros


@struct.dataclass
class Params:
    """All weights of a model."""

    embed_tokens: Any  # [vocab, d]
    layers: Layers
    norm: Any  # [d]
    lm_head: Any  # [d, vocab]; None when tied to embed_tokens


class CleanInput(NamedTuple):
    """Tokens of a causal pass, right-padded.

    A row may hold several samples, one after the other, in a pass without a cache: `start` is the
    column of the first token of each token's sample. None: a row is one sample.
    """

    tokens: Int[Array, "rows time"]
    n_valid: Int[Array, " rows"]
    start: Int[Array, "rows time"] | None = None


class NoisyInput(NamedTuple):
    """Blocks to denoise. `masked` says which positions are masks, whatever their token."""

    tokens: Int[Array, "rows blocks block"]
    masked: Bool[Array, "rows blocks block"]
    n_valid: Int[Array, "rows blocks"]
    index: Int[Array, "rows blocks"] | None  # clean rows before each block; None: all of them
    start: Int[Array, "rows blocks"] | None = None  # column of the first token of its sample
    coreset: Bool[Array, "rows layers experts"] | None = None  # frozen; see `moe.moe`


class PassOutput(NamedTuple):
    """What a pass returns; row axis first, in `stats` second."""

    hidden: Any  # Streams of final-normed hidden states, or None
    logits: Any  # as asked for, float32, or None
    cache: Any  # DecodeCache, or None
    stats: StackStats
    taps: LayerTaps | None = None


type Logits = Literal["none", "last", "all", "block"]


def param_specs(cfg: ModelConfig) -> Params:
    """Specs of all weights, layers stacked."""
    w = normal(cfg.initializer_range)
    vocab = (cfg.vocab_size, cfg.hidden_size)
    return Params(
        embed_tokens=ParamSpec(vocab, ("vocab", "embed"), w, cfg.dtype),
        layers=stack_specs(cfg),
        norm=ParamSpec((cfg.hidden_size,), ("embed",), zeros, jnp.float32),
        lm_head=None
        if cfg.tie_word_embeddings
        else ParamSpec(vocab[::-1], ("embed", "vocab"), w, cfg.dtype),
    )


def unstack(params: Params) -> Params:
    """The same weights with layers as a tuple: no slicing copies while decoding."""
    if isinstance(params.layers, tuple):
        return params
    return params.replace(layers=tuple(each_layer(params.layers)))  # pyright: ignore


def restack(params: Params, cfg: ModelConfig) -> Params:
    """Inverse of `unstack`."""
    if not isinstance(params.layers, tuple):
        return params
    return params.replace(layers=stack_layers(params.layers, cfg))  # pyright: ignore


def outside_layers(params: Params, cfg: ModelConfig, env: Env) -> Params:
    """Embedding, last norm and head as a pass uses them (`Env.gathered`), without the layers."""
    alone = lambda tree: tree.replace(layers=())
    return env.gathered(alone(params), alone(param_specs(cfg)))


def unembed(params: Params, hidden: Float[Array, "*rows width"]) -> Float[Array, "*rows vocab"]:
    """Logits of final-normed hidden states, float32."""
    head = params.embed_tokens.T if params.lm_head is None else params.lm_head
    return (hidden @ head).astype(jnp.float32)


def align_logits(
    x: Float[Array, "*rows block width"],
    previous: Float[Array, "*rows width"],
    position: Literal["same", "shifted"],
) -> Float[Array, "*rows block width"]:
    """Logits (or hidden states) of blocks, moved to the position that they speak of.

    The one place that knows the reading; sampler and loss both come through here.

    Args:
        x: row i is what the model gave at position i.
        previous: the same of the last token before the block, from its causal pass.
        position: `same`: row i speaks of position i. `shifted`: row i speaks of position i + 1,
            so `previous` speaks of position 0 and the last row of no position of this block.
    """
    if position == "same":
        return x
    return jnp.concatenate([previous[..., None, :], x[..., :-1, :]], axis=-2)


def before_blocks(
    hidden: Float[Array, "rows time width"],
    index: Int[Array, "rows blocks"],
    start: Int[Array, "rows blocks"] | None = None,
) -> Float[Array, "rows blocks width"]:
    """Clean hidden states of the last token before each block, `previous` of `align_logits`.

    Args:
        hidden: of the clean stream.
        index: clean tokens before each block.
        start: as `NoisyInput.start`. A block that begins its sample gets zeros, as an empty cache
            has: nothing has been said before it.
    """
    first = jnp.zeros_like(index) if start is None else start
    last = jnp.maximum(index - 1, 0)
    found = jnp.take_along_axis(hidden[:, None], last[..., None, None], axis=2)[:, :, 0]
    return jnp.where((index > first)[..., None], found, 0)


def forward(
    params: Params,
    clean: CleanInput | None,
    noisy: NoisyInput | None,
    cache: DecodeCache | None,
    *,
    cfg: ModelConfig,
    env: Env,
    logits: Logits = "none",
    experts: Bool[Array, "layers experts"] | None = None,
    taps: bool = False,
) -> PassOutput:
    """One pass over the weights for all rows at once; the other passes are named uses of it.

    Args:
        params: weights.
        clean: causal rows; written to the cache if there is one.
        noisy: blocks to denoise; they see the prefix, the clean rows before them and themselves.
        cache: the prefix, or None for an empty one (then the pass is differentiable).
        cfg: what is computed.
        env: where and how.
        logits: `last` of each row's clean tokens, `all` clean tokens, those of each `block`, or
            `none` (then the caller unembeds the hidden states that it needs).
        experts: which experts exist, per layer; default all.
        taps: also return GDN values before the gated norm.

    Raises:
        CloverError: blocks without a mask token, or rows of several samples that cannot be served.
    """
    _check_packing(clean, noisy, cache)
    own = outside_layers(params, cfg, env)
    rows = (clean or noisy).tokens.shape[0]  # pyright: ignore[reportOptionalMemberAccess]
    start = jnp.zeros((rows,), jnp.int32) if cache is None else cache.length
    rope = lambda at: rope_tables(
        at, rotary_dim=cfg.attention.rotary_dim, theta=cfg.attention.rope_theta
    )
    x_clean, x_noisy, lay_clean, lay_noisy = None, None, None, None
    if clean is not None:
        at = jnp.arange(clean.tokens.shape[1], dtype=jnp.int32)[None]
        x_clean = env.constrain(own.embed_tokens[clean.tokens], "rows", None, None)
        position = start[:, None] + at if clean.start is None else at - clean.start
        valid = at < clean.n_valid[:, None]
        lay_clean = CleanLayout(start, valid, rope(position), clean.start)
    if noisy is not None:
        if cfg.mask_token_id is None:
            raise CloverError("config mask_token_id is null: this model cannot preview a block")
        at = jnp.arange(noisy.tokens.shape[2], dtype=jnp.int32)[None, None]
        shown = jnp.where(noisy.masked, cfg.mask_token_id, noisy.tokens)
        x_noisy = env.constrain(own.embed_tokens[shown], "rows", None, None, None)
        if noisy.index is not None:
            before = start[:, None] + noisy.index
            if noisy.start is not None:
                before = before - noisy.start
        else:
            before = (start if clean is None else start + clean.n_valid)[:, None]
        lay_noisy = NoisyLayout(
            before,
            at < noisy.n_valid[..., None],
            rope(before[..., None] + at),
            None if clean is None else noisy.index,
            noisy.start,
        )
    streams, cache, stats, values = apply_stack(
        params.layers,
        Streams(x_clean, x_noisy),
        cache,
        Layout(lay_clean, lay_noisy),
        experts,
        None if noisy is None or noisy.coreset is None else jnp.moveaxis(noisy.coreset, 1, 0),
        cfg=cfg,
        env=env,
        taps=taps,
    )
    hidden = Streams(
        *(None if x is None else rms_norm(x, own.norm, eps=cfg.rms_norm_eps) for x in streams)
    )
    if cache is not None and clean is not None:
        cache = _advance(cache, hidden.clean, clean.n_valid)
    return PassOutput(hidden, _logits(own, hidden, cache, clean, logits, cfg), cache, stats, values)


def extend(
    params: Params,
    tokens: Int[Array, "rows time"],
    n_valid: Int[Array, " rows"],
    cache: DecodeCache,
    *,
    cfg: ModelConfig,
    env: Env,
    logits: Literal["none", "last", "all"] = "none",
    experts: Bool[Array, "layers experts"] | None = None,
) -> PassOutput:
    """Causal pass: appends `n_valid` tokens of each row to the cache."""
    clean = CleanInput(tokens, n_valid)
    return _pass(params, clean, None, cache, cfg, env, logits, experts)


def preview(
    params: Params,
    tokens: Int[Array, "rows block"],
    masked: Bool[Array, "rows block"],
    n_valid: Int[Array, " rows"],
    cache: DecodeCache,
    *,
    cfg: ModelConfig,
    env: Env,
    experts: Bool[Array, "layers experts"] | None = None,
    coreset: Bool[Array, "rows layers experts"] | None = None,
) -> tuple[Float[Array, "rows block vocab"], StackStats]:
    """Denoising pass over one block per row: logits of each position's own token.

    A `coreset` that earlier steps chose (`stats.router.coreset`) stays where it has members.
    """
    noisy = NoisyInput(tokens[:, None], masked[:, None], n_valid[:, None], None, coreset=coreset)
    out = _pass(params, None, noisy, cache, cfg, env, "block", experts)
    return out.logits[:, 0], out.stats


def commit_and_preview(
    params: Params,
    clean: CleanInput,
    tokens: Int[Array, "rows block"],
    masked: Bool[Array, "rows block"],
    n_valid: Int[Array, " rows"],
    cache: DecodeCache,
    *,
    cfg: ModelConfig,
    env: Env,
    experts: Bool[Array, "layers experts"] | None = None,
    coreset: Bool[Array, "rows layers experts"] | None = None,
) -> tuple[DecodeCache, Float[Array, "rows block vocab"], StackStats]:
    """Commit a finished block and preview the next one in one pass over the weights."""
    noisy = NoisyInput(tokens[:, None], masked[:, None], n_valid[:, None], None, coreset=coreset)
    out = _pass(params, clean, noisy, cache, cfg, env, "block", experts)
    return out.cache, out.logits[:, 0], out.stats


def next_token_logits(
    params: Params, cache: DecodeCache, *, env: Env
) -> Float[Array, "rows vocab"]:
    """Causal logits of the token after each row's prefix."""
    if env.rows == "batched":
        return unembed(params, cache.hidden)
    rows = cache.rows
    count = lax.optimization_barrier(jnp.int32(rows))

    def body(r: Array, out: Array) -> Array:
        one = unembed(params, lax.dynamic_slice_in_dim(cache.hidden, r, 1, 0))
        return lax.dynamic_update_slice_in_dim(out, one, r, 0)

    return lax.fori_loop(
        0, count, body, jnp.zeros((rows, params.embed_tokens.shape[0]), jnp.float32)
    )


def prefill(
    params: Params,
    tokens: Int[Array, "rows time"],
    n_valid: Int[Array, " rows"],
    cache: DecodeCache,
    *,
    chunk: int,
    cfg: ModelConfig,
    env: Env,
) -> DecodeCache:
    """Causal pass over prompts of any length, in chunks on a grid anchored at each row's token 0.

    A continued row first fills up to its next grid point, so that chunk borders do not depend on
    where earlier turns ended.
    """
    padded = jnp.pad(tokens, ((0, 0), (0, chunk)))

    def body(carry: tuple[Array, DecodeCache]) -> tuple[Array, DecodeCache]:
        done, cache = carry
        take = jnp.minimum(chunk - cache.length % chunk, n_valid - done)
        at = done[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
        part = jnp.take_along_axis(padded, at, axis=1)
        return done + take, extend(params, part, take, cache, cfg=cfg, env=env).cache  # pyright: ignore

    carry = (jnp.zeros_like(n_valid), cache)
    return lax.while_loop(lambda c: jnp.any(c[0] < n_valid), body, carry)[1]


def _check_packing(
    clean: CleanInput | None, noisy: NoisyInput | None, cache: DecodeCache | None
) -> None:
    starts = [x.start is not None for x in (clean, noisy) if x is not None]
    if not any(starts):
        return
    if cache is not None:
        raise CloverError(
            "start is given with a cache, whose rows are one sample each: leave it out, or pass "
            "no cache (packed rows exist in training only)"
        )
    if clean is None or not all(starts) or (noisy is not None and noisy.index is None):
        raise CloverError(
            "start is given for one stream of packed rows: expected it for the clean tokens and, "
            "if there are blocks, for them too, with their index"
        )


def _advance(cache: DecodeCache, hidden: Any, n_valid: Array) -> DecodeCache:
    last = jnp.maximum(n_valid - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    return cache._replace(
        hidden=jnp.where((n_valid > 0)[:, None], newest, cache.hidden),
        length=cache.length + n_valid,
    )


def _logits(
    params: Params,
    hidden: Streams,
    cache: DecodeCache | None,
    clean: CleanInput | None,
    logits: Logits,
    cfg: ModelConfig,
) -> Array | None:
    if logits == "none":
        return None
    if logits == "block":
        assert cache is not None and hidden.noisy is not None
        return unembed(
            params, align_logits(hidden.noisy, cache.hidden[:, None], cfg.logits_position)
        )
    assert hidden.clean is not None and clean is not None
    if logits == "all":
        return unembed(params, hidden.clean)
    if cache is not None:
        return unembed(params, cache.hidden)
    last = jnp.maximum(clean.n_valid - 1, 0)[:, None, None]
    return unembed(params, jnp.take_along_axis(hidden.clean, last, axis=1)[:, 0])


def _pass(
    params: Params,
    clean: CleanInput | None,
    noisy: NoisyInput | None,
    cache: DecodeCache,
    cfg: ModelConfig,
    env: Env,
    logits: Logits,
    experts: Array | None,
) -> PassOutput:
    """`forward` for serving: all rows at once, or one fixed one-row program mapped over them."""

    def run(inputs: tuple, cache: DecodeCache) -> PassOutput:
        clean, noisy = inputs
        out = forward(params, clean, noisy, cache, cfg=cfg, env=env, logits=logits, experts=experts)
        return out._replace(hidden=None)

    if env.rows == "batched":
        return run((clean, noisy), cache)
    return _map_rows(run, (clean, noisy), cache, writes=clean is not None)


def _map_rows(run: Any, inputs: tuple, cache: DecodeCache, *, writes: bool) -> PassOutput:
    """Every row through the same one-row program: results bit-equal at every batch size."""
    row = lambda tree, axes, r: jax.tree.map(
        lambda a, axis: lax.dynamic_slice_in_dim(a, r, 1, axis), tree, axes
    )
    put = lambda tree, part, axes, r: jax.tree.map(
        lambda a, b, axis: lax.dynamic_update_slice_in_dim(a, b, r, axis), tree, part, axes
    )
    rows = cache.rows
    first = jax.tree.map(lambda _: 0, inputs)
    shapes = jax.eval_shape(lambda: run(row(inputs, first, 0), row(cache, ROW_AXES, 0)))
    result = (shapes.logits, shapes.stats)
    axes = (jax.tree.map(lambda _: 0, shapes.logits), jax.tree.map(lambda _: 1, shapes.stats))
    buffers = jax.tree.map(
        lambda s, axis: jnp.zeros((*s.shape[:axis], rows, *s.shape[axis + 1 :]), s.dtype),
        result,
        axes,
    )

    def body(r: Array, carry: tuple) -> tuple:
        buffers, own = carry
        apart = lax.optimization_barrier
        part = apart((row(inputs, first, r), row(own if writes else cache, ROW_AXES, r)))
        out = apart(run(*part))
        buffers = put(buffers, (out.logits, out.stats), axes, r)
        return buffers, put(own, out.cache, ROW_AXES, r) if writes else None

    # A hidden trip count: a loop that XLA knows to run once is inlined and fused differently.
    count = lax.optimization_barrier(jnp.int32(rows))
    (logits, stats), own = lax.fori_loop(0, count, body, (buffers, cache if writes else None))
    return PassOutput(None, logits, own if writes else cache, stats)
