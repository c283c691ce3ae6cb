"""Prefixes of 131,072 tokens: what they cost, that any cell of them is read, and exactness at 8K.

The cells of these caches are drawn, not computed: `experiments/long_context` fills them by passes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import (
    DecodeCache,
    bytes_per_row,
    bytes_per_token,
    cache_shapes,
    empty_cache,
)
from clover_jax.env import Env
from clover_jax.model import on_mesh
from clover_jax.model.attention import attention_inputs
from clover_jax.model.block import (
    CleanLayout,
    LayerIndex,
    Layout,
    NoisyLayout,
    Streams,
    full_layer,
    full_layer_specs,
)
from clover_jax.model.norm import rms_norm
from clover_jax.model.rope import rope_tables
from clover_jax.params import path_name
from clover_jax.presets import clover_35b_a3b, clover_nano
from clover_jax.sharding import make_mesh
from pallas_kernels.block_attention import KV_TILE, BlockKV
from tests.helpers.limits import assert_close
from tests.model import oracle
from tests.model.small import QUICK, committed, jitted, random_params, random_tokens, random_tree

CELLS, PARTS = 131_072, 8
NANO = clover_nano()
HEADS, KV_HEADS, CHANNEL = 4, 2, 16
# In every eighth of the cells, at its borders and at those of a tile.
DEPTHS = np.array(
    [
        0, KV_TILE - 1, KV_TILE, 16_383, 16_384, 32_768, 40_000, 50_001, 65_535, 65_536, 70_007,
        90_000, 100_000, 114_688, CELLS - KV_TILE, CELLS - 1,
    ]
)  # fmt: skip
SHARP = 48.0  # logit of a needle: everything else, of logits up to 6, keeps e^-36 of the weight


@pytest.mark.parametrize("preset", (clover_nano, clover_35b_a3b))
def test_memory_grows_in_the_attention_layers_only(preset):
    cfg = preset()
    size = lambda *arrays: sum(a.size * a.dtype.itemsize for a in arrays)
    for tokens in (KV_TILE, 8_192, CELLS):
        shapes = cache_shapes(cfg, 1, tokens)
        assert size(shapes.k, shapes.v) == tokens * bytes_per_token(cfg)
        assert size(shapes.state, shapes.ring) == bytes_per_row(cfg)


class Haystack(NamedTuple):
    q: np.ndarray  # [1, needles, heads, channel], each the direction of a needle's key
    looked_for: np.ndarray  # [needles, heads]: which needle that is
    k: np.ndarray
    v: np.ndarray
    planted: np.ndarray  # [needles, heads, channel]: its value
    block: BlockKV


@functools.cache
def haystack() -> Haystack:
    """Random cells with a needle at each depth, and queries whose heads look for different ones."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    n = len(DEPTHS)
    k, v = (draw(1, 1, KV_HEADS, CELLS, CHANNEL) for _ in "kv")
    key = draw(n, CHANNEL)
    key *= np.sqrt(CHANNEL) / np.linalg.norm(key, axis=-1, keepdims=True)
    k[0, 0, :, DEPTHS] = SHARP * CHANNEL**-0.5 * key[:, None]
    looked_for = (np.arange(n)[:, None] + np.arange(HEADS)) % n
    values = v[0, 0, np.arange(HEADS) // (HEADS // KV_HEADS), DEPTHS[looked_for]]
    block = BlockKV(*(draw(1, 1, n, KV_HEADS, CHANNEL) for _ in "kv"), np.ones((1, 1, n), bool))
    return Haystack(key[looked_for][None], looked_for, k, v, values, block)


@pytest.mark.parametrize("parts", (1, PARTS), ids=("one device", "eight devices"))
def test_needles_are_read_from_any_depth(parts):
    """By the rows of a block and by causal rows; not by a row that ends before its needle."""
    hay = haystack()
    env = Env() if parts == 1 else Env(mesh=make_mesh(1, 1, parts))
    if parts > 1:
        assert on_mesh.cell_partition(hay.k.shape, env)[3] == "tensor"
        assert len(set(DEPTHS // (CELLS // parts))) == parts

    @jax.jit
    def attend(q: Any, k: Any, v: Any, limit: Any, own: Any) -> Any:
        return on_mesh.attention(q, k, v, 0, limit, own, None, scale=CHANNEL**-0.5, env=env)

    everything = np.full((1, len(DEPTHS)), CELLS, np.int32)
    for name, own in (("block", hay.block), ("causal", None)):
        got = attend(hay.q, hay.k, hay.v, everything, own)[0]
        np.testing.assert_allclose(got, hay.planted, rtol=1e-5, atol=1e-6, err_msg=name)
    for less in (0, 1):
        limit = DEPTHS[None].astype(np.int32) + 1 - less
        got = np.asarray(attend(hay.q, hay.k, hay.v, limit, None))[0]
        read = np.abs(got - hay.planted).max(axis=-1) < 1e-5
        np.testing.assert_array_equal(read, DEPTHS[hay.looked_for] < limit.T, err_msg=str(less))


@pytest.mark.slow
@pytest.mark.parametrize("stream", ("preview", "step"))
def test_a_layer_reads_needles(stream):
    """Nano's attention layer on 131,072 cells is the layer on the needles alone.

    One needle for every head of every row; the rows stand after the same position in both.
    """
    a, n = NANO.attention, 8 if stream == "preview" else 1
    p = jax.tree.map(jnp.asarray, random_tree(full_layer_specs(NANO)))
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    x = draw(1, n, NANO.hidden_size)
    at = jnp.arange(CELLS, CELLS + n, dtype=jnp.int32)[None]
    rope = rope_tables(at, rotary_dim=a.rotary_dim, theta=a.rope_theta)
    normed = rms_norm(jnp.asarray(x), p.input_layernorm, eps=NANO.rms_norm_eps)
    q = np.asarray(attention_inputs(p.self_attn, normed, rope, cfg=NANO)[0]).reshape(-1, a.head_dim)
    key = SHARP * np.sqrt(a.head_dim) * q / np.sum(q * q, axis=-1, keepdims=True)
    value = draw(len(key), a.head_dim)
    valid = jnp.ones((1, n), bool)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def layer(p: Any, x: Any, cache: DecodeCache) -> Any:
        if stream == "step":
            streams, layout = Streams(x, None), Layout(CleanLayout(cache.length, valid, rope), None)
        else:
            blocks = NoisyLayout(
                cache.length[:, None], valid[:, None], tuple(t[:, None] for t in rope), None
            )
            streams, layout = Streams(None, x[:, None]), Layout(None, blocks)
        at = LayerIndex(jnp.int32(0), None, None)
        out, _, _ = full_layer(p, streams, cache, at, layout, cfg=NANO, env=Env())
        return out.clean if stream == "step" else out.noisy

    empty = empty_cache(NANO.replace(num_layers=4), 1, CELLS + KV_TILE)
    background = [draw(*empty.k.shape) for _ in "kv"]
    places = np.linspace(0, CELLS - 1, len(key)).astype(int)  # the first and the last cell, too

    def run(cells: list[np.ndarray], places: Any, length: int) -> Any:
        k, v = (c.copy() for c in cells)
        k[0, 0][:, places], v[0, 0][:, places] = key, value
        return layer(p, x, empty._replace(k=k, v=v, length=np.array([length], np.int32)))

    alone = run([np.zeros_like(c) for c in background], slice(len(key)), len(key))
    assert_close("layer", "output", run(background, places, CELLS), alone)
    without = np.asarray(run(background, slice(-len(key), None), CELLS))  # past the prefix
    assert np.abs(without - np.asarray(alone)).max() > 1e-2


LONG, CHUNK = 8_192, 512
# Every expert is chosen: among 8,192 tokens some router nearly ties, and then rounding decides.
PAIR = NANO.replace(
    num_layers=2, full_attention_interval=2, block_length=8, max_position_embeddings=2 * LONG,
    **{"moe.num_experts": 4, "moe.top_k": 4},
)  # fmt: skip
TOKENS = random_tokens(PAIR, LONG)
STOPS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 4_000, LONG - 1, LONG)


@functools.cache
def long_params() -> Any:
    """The first head of the GDN layer forgets 3 % in 8,192 tokens, the others sooner."""

    def remember(path: tuple, a: np.ndarray) -> np.ndarray:
        if not path_name(path).endswith("A_log"):
            return a
        return np.where(np.arange(a.shape[-1]) == 0, np.float32(-12), a)

    return jax.tree_util.tree_map_with_path(remember, random_params(PAIR))


@functools.cache
def reference() -> tuple[oracle.Row, dict[int, np.ndarray]]:
    """The prefix token by token in float64, and the logits at the stops.

    Only there is attention computed: it is the last mixer, so no other position needs it.
    """
    row = oracle.Row(long_params(), PAIR)
    linear, full = row.layers
    experts = list(range(PAIR.moe.num_experts))
    norm = functools.partial(oracle.centred_norm, cfg=PAIR)

    def mlp(p: Any, x: np.ndarray) -> np.ndarray:
        return x + oracle.moe(p.mlp, norm(x, p.post_attention_layernorm), experts, experts, PAIR)

    a = PAIR.attention
    keys, values = (np.empty((LONG, a.num_kv_heads, a.head_dim)) for _ in "kv")
    logits = {}
    for t, x in enumerate(row.params.embed_tokens[TOKENS]):
        mixed, row.state[0], row.ring[0] = oracle.gdn_token(
            linear.linear_attn, norm(x, linear.input_layernorm), row.state[0], row.ring[0], PAIR
        )
        x = mlp(linear, x + mixed)
        q, keys[t], values[t], gate = oracle.qkv(
            full.self_attn, norm(x, full.input_layernorm), t, PAIR
        )
        if t + 1 in STOPS:
            mixed = oracle.attend(q, keys[: t + 1], values[: t + 1]) * oracle.sigmoid(gate)
            x = mlp(full, x + np.einsum("hc,hcd->d", mixed, full.self_attn.o_proj))
            logits[t + 1] = row._unembed(x)
    row.keys[1], row.values[1], row.length = list(keys), list(values), LONG
    return row, logits


def assert_prefix(cache: DecodeCache) -> None:
    """The cache, and a preview and an AR step's logits from it, are the reference's."""
    row, logits = reference()
    got = committed(cache)
    for name, found, want in (
        ("state", got["state"][0, 0, 0], row.state[0]),
        ("ring", got["ring"][0, 0, 0], row.ring[0]),
        ("keys", got["k"][0, 0, :, :LONG], np.stack(row.keys[1], axis=1)),
        ("values", got["v"][0, 0, :, :LONG], np.stack(row.values[1], axis=1)),
    ):
        assert_close("hidden", name, found, want)
    block = random_tokens(PAIR, 1, PAIR.block_length, seed=1)
    masked = np.arange(PAIR.block_length)[None] % 3 > 0
    n = np.full(1, PAIR.block_length, np.int32)
    seen, _ = jitted("preview", PAIR)(long_params(), block, masked, n, cache)
    want, _ = row.preview(block[0], masked[0], PAIR.block_length)
    assert_close("logits", "preview", seen[0], want)
    assert_close("logits", "next token", next_logits(cache), logits[LONG])


def next_logits(cache: DecodeCache) -> np.ndarray:
    return np.asarray(jitted("next_token_logits", PAIR)(long_params(), cache))[0]


@pytest.mark.slow
def test_chunked_prefill_is_exact_at_8k():
    """Against every token by itself; the prompt comes in turns that end on and off the grid."""
    prefill = jitted("prefill", PAIR, chunk=CHUNK)
    cache, done = empty_cache(PAIR, 1, LONG + PAIR.block_length), 0
    for stop in STOPS:
        piece = np.zeros((1, LONG), np.int32)
        piece[0, : stop - done] = TOKENS[done:stop]
        cache = prefill(long_params(), piece, np.array([stop - done], np.int32), cache)
        assert_close("logits", f"after {stop}", next_logits(cache), reference()[1][stop])
        done = stop
    assert_prefix(cache)


@pytest.mark.slow
def test_one_pass_is_exact_at_8k():
    """The same of 8,192 tokens in one causal pass."""
    cache = empty_cache(PAIR, 1, LONG + PAIR.block_length)
    n_valid = np.array([LONG], np.int32)
    assert_prefix(jitted("extend", PAIR)(long_params(), TOKENS[None], n_valid, cache).cache)
