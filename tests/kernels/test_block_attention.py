"""Attention over cached cells and the own block against one dense softmax in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_attention import KV_TILE, BlockKV, block_attention
from pallas_kernels.block_attention.specs import SPECS
from tests.helpers.limits import assert_close
from tests.model.small import QUICK

GROUPS, ROWS, HEADS, KV_HEADS, CHANNEL = 2, 2, 4, 2, 6
BLOCKS, BLOCK = 2, 3
QUERIES, GROUP, SCALE = BLOCKS * BLOCK, 1, 0.7
LIMITS = {  # of every query, per row
    "nothing and all": [[0, 1, 2, 3, KV_TILE, 2 * KV_TILE], [0] * 6],
    "around a tile": [[KV_TILE - 1, KV_TILE, KV_TILE + 1] * 2, [1, 1, 1, 200, 200, 200]],
    "first tile": [[5] * 6, [1, 2, 3, 4, 5, 6]],
}


def inputs(capacity: int, sharp: float = 1.0):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    q = sharp * draw(ROWS, QUERIES, HEADS, CHANNEL)
    cells = (GROUPS, ROWS, KV_HEADS, 2 * KV_TILE, CHANNEL)  # the first ones for any capacity
    k, v = (draw(*cells)[..., :capacity, :] for _ in range(2))
    own = BlockKV(*(draw(ROWS, BLOCKS, BLOCK, KV_HEADS, CHANNEL) for _ in range(2)), OWN_VALID)
    return np.float32(q), k, v, own


OWN_VALID = np.array([[[1, 1, 1], [1, 0, 1]], [[1, 0, 0], [0, 0, 0]]], bool)


def dense(q, k, v, limit, own, first=None):
    first = np.zeros_like(limit) if first is None else first
    out = np.zeros(q.shape)
    for r in range(ROWS):
        for i in range(q.shape[1]):
            for h in range(HEADS):
                g = h // (HEADS // KV_HEADS)
                keys, values = (a[GROUP, r, g, first[r, i] : limit[r, i]] for a in (k, v))
                if own is not None:
                    seen = own.valid[r, i // BLOCK]
                    keys = np.concatenate([keys, own.k[r, i // BLOCK, seen, g]])
                    values = np.concatenate([values, own.v[r, i // BLOCK, seen, g]])
                if len(keys):
                    logits = SCALE * (keys.astype(np.float64) @ q[r, i, h])
                    w = np.exp(logits - logits.max())
                    out[r, i, h] = w / w.sum() @ values
    return out


@functools.partial(jax.jit, static_argnames="impl")
def attend(q, k, v, limit, own, first=None, *, impl="xla"):
    group = jnp.int32(GROUP)
    return block_attention(q, k, v, group, limit, own, first, scale=SCALE, impl=impl)


@pytest.mark.parametrize("with_own", (False, True), ids=("causal", "block"))
def test_xla_is_the_dense_softmax(with_own):
    for case, limit in LIMITS.items():
        for sharp in (1.0, 40.0):
            q, k, v, own = inputs(2 * KV_TILE, sharp)
            own = own if with_own else None
            limit = np.array(limit, np.int32)
            got = attend(q, k, v, limit, own)
            assert_close("op", f"{case}, sharpness {sharp}", got, dense(q, k, v, limit, own))


@pytest.mark.parametrize("spec", [s for s in SPECS if "test" in s.uses], ids=lambda s: s.name)
def test_workloads(spec):
    """Every way to compute a workload, the plain formula of the benchmark included."""
    ways = lambda *a: (spec.call(*a, impl="reference"), spec.call(*a, impl="xla"), spec.naive(*a))
    want, xla, naive = jax.jit(ways, compiler_options=QUICK)(*spec.inputs(jax.random.key(0)))
    assert_close("op", "xla", xla, want)
    assert_close("op", "naive", naive, want)


@settings(max_examples=30, deadline=None)
@given(
    limit=st.lists(st.integers(0, 2 * KV_TILE), min_size=ROWS * QUERIES, max_size=ROWS * QUERIES),
    valid=st.lists(st.booleans(), min_size=ROWS * QUERIES, max_size=ROWS * QUERIES),
)
def test_any_limits_and_any_valid_positions(limit, valid):
    q, k, v, own = inputs(2 * KV_TILE)
    limit = np.array(limit, np.int32).reshape(ROWS, QUERIES)
    own = own._replace(valid=np.array(valid).reshape(own.valid.shape))
    assert_close("op", "xla", attend(q, k, v, limit, own), dense(q, k, v, limit, own))


CELLS = st.lists(st.integers(0, 2 * KV_TILE), min_size=ROWS * QUERIES, max_size=ROWS * QUERIES)


@settings(max_examples=30, deadline=None)
@given(first=CELLS, limit=CELLS)
def test_any_first_cells(first, limit):
    """Whole tiles before the first cell, first cells at or past the limit."""
    q, k, v, own = inputs(2 * KV_TILE)
    first, limit = (np.array(a, np.int32).reshape(ROWS, QUERIES) for a in (first, limit))
    got = attend(q, k, v, limit, own, first)
    assert_close("op", "xla", got, dense(q, k, v, limit, own, first))


def test_cells_before_the_first_cannot_matter():
    """Bit-equal whatever they hold, in the same tile and in one before."""
    q, k, v, own = inputs(2 * KV_TILE)
    limit = np.full((ROWS, QUERIES), 2 * KV_TILE, np.int32)
    for border in (5, KV_TILE, KV_TILE + 5):
        first = np.full_like(limit, border)
        hidden = (np.arange(2 * KV_TILE) < border)[:, None]
        other = (np.where(hidden, np.float32(1e4), a) for a in (k, v))
        np.testing.assert_array_equal(
            attend(q, *other, limit, own, first), attend(q, k, v, limit, own, first)
        )


def test_invalid_positions_cannot_matter():
    q, k, v, own = inputs(2 * KV_TILE)
    limit = np.array(LIMITS["around a tile"], np.int32)
    keep = OWN_VALID[..., None, None]
    spoiled = BlockKV(*(np.where(keep, a, np.float32(np.nan)) for a in own[:2]), OWN_VALID)
    np.testing.assert_array_equal(attend(q, k, v, limit, spoiled), attend(q, k, v, limit, own))


@pytest.mark.parametrize("with_own", (False, True), ids=("causal", "block"))
@pytest.mark.parametrize("first", (None, [[0, 1, 1, 3, 2, 4], [0, 0, 0, 3, 1, 2]]))
def test_reference_is_the_dense_softmax(first, with_own):
    q, k, v, own = inputs(4)
    limit = np.array([[0, 1, 2, 3, 4, 4], [0, 0, 0, 0, 2, 2]], np.int32)
    own = own if with_own else None
    own = own and BlockKV(*map(jnp.asarray, own))
    first = first and np.array(first, np.int32)
    got = block_attention(
        *map(jnp.asarray, (q, k, v)), GROUP, jnp.asarray(limit), own,
        None if first is None else jnp.asarray(first),
        scale=SCALE, impl="reference",
    )  # fmt: skip
    assert_close("op", "reference", got, dense(q, k, v, limit, own, first))


@pytest.mark.parametrize("with_own", (False, True), ids=("causal", "block"))
@pytest.mark.parametrize("junk", (np.nan, 1e4))
def test_unused_cells_cannot_matter(junk, with_own):
    q, k, v, own = inputs(2 * KV_TILE)
    own = own if with_own else None
    limit = np.array(LIMITS["around a tile"], np.int32)
    clean = attend(q, k, v, limit, own)
    unused = np.arange(2 * KV_TILE)[None] >= limit.max(axis=1, keepdims=True)
    spoil = lambda a: np.where(unused[None, :, None, :, None], np.float32(junk), a)
    np.testing.assert_array_equal(attend(q, spoil(k), spoil(v), limit, own), clean)


def test_capacity_never_matters():
    """A row's result is bit-equal in a cache of one tile and of two."""
    limit = np.array(LIMITS["first tile"], np.int32)
    small, large = (attend(*inputs(c)[:3], limit, None) for c in (KV_TILE, 2 * KV_TILE))
    np.testing.assert_array_equal(small, large)


@pytest.mark.parametrize("first", (None, [[0, 3, 127, 5, 128, 40], [0, 1, 2, 60, 130, 199]]))
def test_gradients(first):
    """Of every input, against a dense softmax; two tiles, ragged blocks."""
    q, k, v, own = inputs(2 * KV_TILE)
    limit = np.array(LIMITS["around a tile"], np.int32)
    first = first and np.array(first, np.int32)
    w = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def plain(q, k, v, own, **_):
        repeat = lambda a: jnp.repeat(a, HEADS // KV_HEADS, axis=-2)
        keys, values = (repeat(jnp.moveaxis(a[GROUP], 1, 2)) for a in (k, v))
        cells = SCALE * jnp.einsum("rihc,rthc->rhit", q, keys)
        cell, low = np.arange(2 * KV_TILE), np.zeros_like(limit) if first is None else first
        seen = (cell < limit[..., None]) & (cell >= low[..., None])
        cells = jnp.where(seen[:, None], cells, -1e30)
        mine = np.arange(QUERIES)[:, None] // BLOCK == np.arange(QUERIES)[None] // BLOCK
        mine = mine[None] & own.valid.reshape(ROWS, 1, QUERIES)
        flat = lambda a: repeat(a.reshape(ROWS, QUERIES, KV_HEADS, CHANNEL))
        block = SCALE * jnp.einsum("rihc,rjhc->rhij", q, flat(own.k))
        block = jnp.where(mine[:, None], block, -1e30)
        probs = jax.nn.softmax(jnp.concatenate([cells, block], axis=-1), axis=-1)
        both = jnp.concatenate([values, flat(own.v)], axis=1)
        return jnp.einsum("rhit,rthc->rihc", probs, both)

    xla = functools.partial(attend, limit=limit, first=first)

    @functools.partial(jax.jit, static_argnums=0)
    def grads(call, q, k, v, own_k, own_v):
        loss = lambda q, k, v, a, b: jnp.sum(w * call(q, k, v, own=BlockKV(a, b, own.valid)))
        return jax.grad(loss, argnums=(0, 1, 2, 3, 4))(q, k, v, own_k, own_v)

    got, want = (grads(call, q, k, v, own.k, own.v) for call in (xla, plain))
    for name, a, b in zip(("q", "k", "v", "own k", "own v"), got, want, strict=True):
        assert_close("gradient", f"gradient of {name}", a, b)
    unused = np.arange(2 * KV_TILE)[None] >= limit.max(axis=1, keepdims=True)
    assert not np.moveaxis(got[1], 2, 3)[GROUP][unused].any()
    assert not np.asarray(got[1])[1 - GROUP].any()


def test_reverse_mode_keeps_nothing_of_a_tile():
    """Twice the cells cost their own gradients, not an accumulator of the queries per tile."""
    loss = lambda q, k, v, limit: jnp.sum(attend(q, k, v, limit, None))

    def work(tiles):
        q, k, v, _ = inputs(tiles * KV_TILE)
        q = jnp.repeat(q, 64 // QUERIES + 1, axis=1)
        limit = jnp.full(q.shape[:2], tiles * KV_TILE, jnp.int32)
        memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v, limit).compile()
        return memory.memory_analysis().temp_size_in_bytes, q.nbytes, k.nbytes + v.nbytes

    (few, queries, cells), (many, _, more_cells) = work(8), work(16)
    assert many - few < more_cells - cells + 4 * queries


def test_gradients_of_the_reference():
    """By name; xla against the reference, which is differentiable as it stands."""
    q, k, v, own = inputs(4)
    q, limit = q[:, :3], np.array([[0, 1, 4], [2, 2, 0]], np.int32)
    own = BlockKV(*(jnp.asarray(a[:, :1]) for a in own))
    w = jnp.asarray(np.random.default_rng(1).normal(size=q.shape).astype(np.float32))

    def grads(impl):
        def loss(q, k, v, own_k, own_v):
            out = block_attention(
                q, k, v, GROUP, jnp.asarray(limit), BlockKV(own_k, own_v, own.valid),
                scale=SCALE, impl=impl,
            )  # fmt: skip
            return jnp.sum(w * out)

        return jax.jit(jax.grad(loss, range(5)), compiler_options=QUICK)(
            *map(jnp.asarray, (q, k, v)), own.k, own.v
        )

    names = ("q", "k", "v", "own k", "own v")
    for name, a, b in zip(names, grads("xla"), grads("reference"), strict=True):
        assert_close("gradient", f"gradient of {name}", a, b)


def test_what_does_not_fit_is_refused():
    q, k, v, own = inputs(2 * KV_TILE)
    ragged = (a[..., : KV_TILE + 1, :] for a in (k, v))
    heads = (np.concatenate([a, a[:, :, :1]], axis=2) for a in (k, v))
    limit = np.zeros((2, 6), np.int32)
    for cells, blocks, text in (
        (ragged, None, f"capacity {KV_TILE + 1} is not a multiple"),
        (heads, None, "q has 4 heads: not a multiple of k's 3 KV heads"),
        ((k, v.astype(jnp.bfloat16)), None, "q, k, v are float32, float32, bfloat16"),
        ((k, v), BlockKV(*(a[:, :1] for a in own)), "6 queries, own has 1 blocks of 3"),
    ):
        with pytest.raises(ValueError, match=text):
            attend.__wrapped__(
                jnp.asarray(q), *map(jnp.asarray, cells), jnp.asarray(limit),
                blocks and BlockKV(*map(jnp.asarray, blocks)),
            )  # fmt: skip


def test_unknown_implementation_is_named():
    q, k, v, _ = map(jnp.asarray, (*inputs(4)[:3], 0))
    with pytest.raises(
        ValueError,
        match="block_attention cannot run as 'cuda': implementations are reference, xla, pallas_",
    ):
        block_attention.__wrapped__(
            q, k, v, 0, jnp.zeros((2, 6), jnp.int32), None,
            scale=1.0, impl="cuda",
        )  # fmt: skip
