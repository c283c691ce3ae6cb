"""The training forward: noisy blocks anywhere in the clean stream equal block-by-block decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.env import Env
from clover_jax.model.transformer import CleanInput, NoisyInput, before_blocks, forward, unembed
from clover_jax.params import named_leaves, path_name
from tests.helpers.limits import assert_close
from tests.model.oracle import Row
from tests.model.small import QUICK, config, jitted, random_params, random_tokens

CFG, ENV = config(), Env()
ROWS, TIME, BLOCK = 2, 24, CFG.block_length
# Boundaries anywhere: at nothing, inside a chunk, at a chunk's end, at the end of the stream.
INDEX = np.array([[0, 5, 24], [7, 16, 23]], np.int32)
N_VALID = np.array([[8, 8, 5], [8, 3, 8]], np.int32)
N_CLEAN = np.array([TIME, TIME - 1], np.int32)
TOKENS = random_tokens(CFG, ROWS, TIME)
DRAFT = random_tokens(CFG, ROWS, INDEX.shape[1], BLOCK, seed=1)
MASKED = np.random.default_rng(2).random(DRAFT.shape) < 0.5
VALID = np.arange(TIME) < N_CLEAN[:, None], np.arange(BLOCK) < N_VALID[..., None]
WEIGHTS = tuple(
    np.random.default_rng(3).normal(size=(*shape, CFG.vocab_size)).astype(np.float32)
    for shape in (TOKENS.shape, DRAFT.shape)
)


def both_streams(params, tokens, draft, masked, *, cfg=CFG, env=ENV):
    """Logits of both streams, statistics and GDN values."""
    clean = CleanInput(tokens, jnp.asarray(N_CLEAN))
    noisy = NoisyInput(draft, masked, *map(jnp.asarray, (N_VALID, INDEX)))
    out = forward(params, clean, noisy, None, cfg=cfg, env=env, taps=True)
    return [unembed(params, hidden) for hidden in out.hidden], out.stats, out.taps


run = jax.jit(both_streams, static_argnames=("cfg", "env"), compiler_options=QUICK)


@functools.cache
def trained():
    return run(random_params(CFG), TOKENS, DRAFT, MASKED)


@functools.cache
def gradients():
    """Of the weighted sum of both streams' logits at valid positions."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    @jax.grad
    def of_sum(params):
        # Settings that compile fast, and others than those of the forward pass above.
        cfg, env = CFG.replace(**{"delta.chunk": 4}), Env(moe_path="dense", boundary_batch=1)
        inputs = map(jnp.asarray, (TOKENS, DRAFT, MASKED))
        logits, *_ = both_streams(params, *inputs, cfg=cfg, env=env)
        parts = zip(logits, WEIGHTS, VALID, strict=True)
        return sum(jnp.sum(jnp.where(v[..., None], x * w, 0.0)) for x, w, v in parts)

    return named_leaves(of_sum(jax.tree.map(jnp.asarray, random_params(CFG))))


def weighted_by_oracle(params) -> float:
    """The same sum in float64, every block after its own prefix."""
    total = 0.0
    for r in range(ROWS):
        row, logits = Row(params, CFG), []
        for t in range(N_CLEAN[r] + 1):
            for b in np.flatnonzero(INDEX[r] == t):
                block, _ = row.preview(DRAFT[r, b], MASKED[r, b], N_VALID[r, b])
                total += (block * WEIGHTS[1][r, b, : N_VALID[r, b]]).sum()
            if t < N_CLEAN[r]:
                logits.append(row.extend(TOKENS[r, t : t + 1])[0])
        total += (np.stack(logits) * WEIGHTS[0][r, : N_CLEAN[r]]).sum()
    return total


@functools.cache
def one_by_one():
    """Clean logits, and each block's preview after committing what lies before it."""
    commit, preview = jitted("extend", CFG, logits="all"), jitted("preview", CFG)
    params, empty = random_params(CFG), empty_cache(CFG, ROWS, 64)
    clean = commit(params, TOKENS, N_CLEAN, empty)
    blocks = []
    for b in range(INDEX.shape[1]):
        cache = commit(params, TOKENS, INDEX[:, b], empty).cache
        blocks.append(preview(params, DRAFT[:, b], MASKED[:, b], N_VALID[:, b], cache))
    return clean, blocks


def test_clean_stream_is_the_prefill():
    (clean, _), _, _ = trained()
    want = one_by_one()[0].logits
    for r, n in enumerate(N_CLEAN):
        assert_close("logits", f"row {r}", clean[r, :n], want[r, :n])


@pytest.mark.parametrize("b", range(INDEX.shape[1]))
def test_noisy_block_is_its_preview(b):
    (_, noisy), _, _ = trained()
    want = one_by_one()[1][b][0]
    for r, n in enumerate(N_VALID[:, b]):
        name = f"row {r}, boundary {INDEX[r, b]}"
        assert_close("logits", name, noisy[r, b, :n], want[r, :n])


def test_statistics_cover_both_streams():
    _, stats, taps = trained()
    clean, blocks = one_by_one()
    parts = [clean.stats, *(block[1] for block in blocks)]
    for name in ("assigned", "prob", "z"):
        want = sum(np.asarray(getattr(part.router, name)) for part in parts)
        assert_close("layer", name, getattr(stats.router, name), want)
    touched = np.any([np.asarray(part.router.touched) for part in parts], axis=0)
    np.testing.assert_array_equal(stats.router.touched, touched)
    shares = np.stack([block[1].history_share for block in blocks], axis=-1)
    want = (shares * N_VALID).sum(axis=-1) / N_VALID.sum(axis=-1)
    assert_close("layer", "history share", stats.history_share, want)
    layers, heads = CFG.linear_per_group, (CFG.delta.num_value_heads, CFG.delta.value_head_dim)
    assert taps.causal.shape == (layers, ROWS, TIME, *heads)
    assert taps.block.shape == (layers, *DRAFT.shape, *heads)


def test_every_weight_learns():
    for name, leaf in gradients().items():
        assert np.isfinite(leaf).all(), name
        lead = {"layers.l": 2, "layers.f": 1}.get(name[:8], 0)  # every layer of a stacked leaf
        each = np.abs(np.asarray(leaf)).reshape(*leaf.shape[:lead], -1).max(axis=-1)
        assert (each > 1e-6).all(), name


@pytest.mark.slow
def test_rematerialisation_keeps_the_routing():
    """Of a layer group only its inputs and the experts it chose are kept; gradients are equal."""
    cfg = CFG.replace(**{"delta.chunk": 4})

    def of_sum(params, env):
        logits, *_ = both_streams(
            params, *map(jnp.asarray, (TOKENS, DRAFT, MASKED)), cfg=cfg, env=env
        )
        parts = zip(logits, WEIGHTS, VALID, strict=True)
        return sum(jnp.sum(jnp.where(v[..., None], x * w, 0.0)) for x, w, v in parts)

    env = Env(moe_path="dense", boundary_batch=1, remat=True)
    params = jax.tree.map(jnp.asarray, random_params(CFG))
    routing = (ROWS, TIME + INDEX.shape[1] * BLOCK, CFG.moe.top_k)

    def kept(env: Env) -> int:
        """Saved integer arrays of the routing's shape, layers stacked."""
        _, pull = jax.eval_shape(lambda p: jax.vjp(lambda p: of_sum(p, env), p), params)
        return sum(
            a.shape[-3:] == routing and jnp.issubdtype(a.dtype, jnp.integer)
            for a in jax.tree.leaves(pull)
        )

    assert kept(env) == 2  # of the GDN layers and of the attention layer
    quick = functools.partial(jax.jit, compiler_options=QUICK)
    recomputed = named_leaves(quick(jax.grad(lambda p: of_sum(p, env)))(params))
    for name, leaf in gradients().items():
        assert_close("layer", name, recomputed[name], leaf)


def test_gradients_are_the_oracles_finite_differences():
    """Along random directions in which every leaf counts about the same."""
    params, grads = random_params(CFG), gradients()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        step = {n: rng.normal(size=g.shape) / np.linalg.norm(g) for n, g in grads.items()}
        along = [np.sum(np.asarray(g, np.float64) * step[n]) for n, g in grads.items()]
        moved = lambda e: jax.tree_util.tree_map_with_path(
            lambda path, a: a.astype(np.float64) + e * step[path_name(path)],  # noqa: B023
            params,
        )
        slope = (weighted_by_oracle(moved(1e-6)) - weighted_by_oracle(moved(-1e-6))) / 2e-6
        assert abs(sum(along) - slope) < 1e-4 * np.linalg.norm(along), (sum(along), slope)


def test_future_and_other_blocks_cannot_matter():
    """A block sees the clean tokens before its boundary and itself, nothing else."""
    later, block = TOKENS.copy(), DRAFT.copy()
    later[:, 16:] = 9  # past the boundaries of blocks 0 and 1
    block[:, 2] = 9
    (want_clean, want), *_ = trained()
    (clean, noisy), *_ = run(random_params(CFG), later, block, MASKED)
    for r in range(ROWS):
        for b in (0, 1):
            n = N_VALID[r, b]
            assert_close("layer", f"block {b}", noisy[r, b, :n], want[r, b, :n])
        assert_close("layer", "clean", clean[r, :16], want_clean[r, :16])
    assert np.abs(np.asarray(noisy[:, 2] - want[:, 2])).max() > 0.1


def test_nothing_stands_before_a_block_that_begins_its_sample():
    """Shifted reading: not the block's own first token, which has seen what is asked for."""
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 3)), jnp.float32)
    index = jnp.asarray([[0, 1, 4], [2, 6, 3]], jnp.int32)
    want = np.stack([[np.zeros(3), hidden[0, 0], hidden[0, 3]], hidden[1, jnp.asarray([1, 5, 2])]])
    np.testing.assert_array_equal(before_blocks(hidden, index), want)
    start = jnp.asarray([[0, 1, 1], [2, 3, 3]], jnp.int32)
    want[0, 1] = want[1, 0] = want[1, 2] = 0
    np.testing.assert_array_equal(before_blocks(hidden, index, start), want)


def test_blocks_without_a_clean_stream_stand_at_an_empty_prefix():
    params = jax.tree.map(jnp.asarray, random_params(CFG))
    noisy = NoisyInput(*(jnp.asarray(a[:, :1]) for a in (DRAFT, MASKED, N_VALID)), None)
    got = forward(params, None, noisy, None, cfg=CFG, env=Env())
    want, _ = jitted("preview", CFG)(
        params, DRAFT[:, 0], MASKED[:, 0], N_VALID[:, 0], empty_cache(CFG, ROWS, 64)
    )
    assert_close("logits", "logits", unembed(params, got.hidden.noisy[:, 0]), want)
