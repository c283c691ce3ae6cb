"""T1: samples packed in one row are samples alone, through the whole model and its loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.diffusion.corrupt import Example, NoiseConfig, make_batch
from clover_jax.diffusion.loss import LossConfig, training_loss
from clover_jax.diffusion.on_policy import follow
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.transformer import CleanInput, NoisyInput, forward
from clover_jax.params import named_leaves
from tests.helpers.limits import assert_close
from tests.model.small import QUICK, config, random_params

# One GDN and one attention layer; the first token of a block rests on the clean stream.
CFG = config(full_attention_interval=2, vocab_size=60).replace(
    num_layers=2, logits_position="shifted"
)
FORBIDDEN = jnp.arange(60) == CFG.mask_token_id
LENGTHS = (1, 5, 13, 30)
PROMPTS = (0, 2, 0, 11)  # two samples begin with a block
TIME, BLOCKS, BLOCK = 52, 8, CFG.block_length
# In chunks of 8: borders inside chunks, and at 48 one at a chunk's start.
ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0), (1, 2, 3, 0))


def sample(i: int, seed: int = 0) -> Example:
    tokens = np.random.default_rng([seed, i]).integers(10, 60, LENGTHS[i]).tolist()
    return Example.single(i, tokens[: PROMPTS[i]], tokens[PROMPTS[i] :])


ONE_VIEW = NoiseConfig(complementary=False)
SAMPLES = [sample(i) for i in range(4)]
USED = [len(e.blocks(BLOCK)) for e in SAMPLES]


def batch_of(rows, *, noise=ONE_VIEW, **options):
    return make_batch(
        rows, time=TIME, blocks=BLOCKS, block=BLOCK, pad_id=0, seed=3, epoch=0, noise=noise,
        **options,
    )  # fmt: skip


def in_one_row(order, changed=(), **options):
    """All in the first of four rows, so that programs are shared; `changed` have other tokens."""
    row = tuple(sample(i, seed=i in changed) for i in order)
    return batch_of([row, (), (), ()], **options)


def in_rows(**options):
    """A sample a row."""
    return batch_of([(e,) for e in SAMPLES], **options)


def places(order):
    """(sample, its columns, its blocks) of a packed row."""
    column = block = 0
    for i in order:
        yield i, slice(column, column + LENGTHS[i]), slice(block, block + USED[i])
        column, block = column + LENGTHS[i], block + USED[i]


@functools.partial(jax.jit, static_argnames="cfg")
def passed(params, batch, cfg=CFG):
    """One pass over both streams."""
    b = batch
    noisy = NoisyInput(
        b.block_tokens, b.block_masked, b.block_n_valid, b.block_index, b.block_start
    )
    clean = CleanInput(b.tokens, b.n_valid, b.start)
    return forward(params, clean, noisy, None, cfg=cfg, env=Env())


def hidden(params, batch):
    """Final hidden states of both streams."""
    return passed(params, batch).hidden


@functools.partial(jax.jit, compiler_options=QUICK)
def gradients(params, batch):
    """Of the training loss, and its parts."""
    loss = functools.partial(
        training_loss, forbidden=FORBIDDEN, cfg=CFG, env=Env(moe_path="dense"), loss=LossConfig()
    )
    grads, parts = jax.grad(loss, has_aux=True)(params, batch)
    return named_leaves(grads), parts


@functools.cache
def params(decay=None):
    """Random weights; with `decay`, every head forgets that fast."""
    tree = jax.tree.map(jnp.asarray, random_params(CFG))
    if decay is None:
        return tree
    linear = tree.layers.linear
    gdn = linear.linear_attn.replace(A_log=jnp.full_like(linear.linear_attn.A_log, np.log(decay)))
    return tree.replace(layers=tree.layers.replace(linear=linear.replace(linear_attn=gdn)))


def assert_same_hidden(order, got, want):
    """Of every sample, in both streams."""
    for i, columns, blocks in places(order):
        assert_close("hidden", f"clean {i}", got.clean[0, columns], want.clean[i, : LENGTHS[i]])
        assert_close("hidden", f"blocks {i}", got.noisy[0, blocks], want.noisy[i, : USED[i]])


@functools.cache
def hidden_alone(decay=None):
    """By the program of a run that does not pack."""
    batch = in_rows()
    assert batch.start is None
    return hidden(params(decay), batch)


@functools.cache
def gradients_alone(decay=None):
    """By the program of a run that packs."""
    return gradients(params(decay), in_rows(packed=True))


@pytest.mark.parametrize("decay", (None, 1e3, 1e30))
@pytest.mark.parametrize("order", ORDERS)
def test_packed_samples_are_samples_alone(order, decay):
    """Also with log decays of about -1e3 and -1e30 a token."""
    assert_same_hidden(order, hidden(params(decay), in_one_row(order)), hidden_alone(decay))


@pytest.mark.parametrize("decay", (None, 1e30))
@pytest.mark.parametrize("order", ORDERS)
def test_packing_changes_no_loss_and_no_gradient(order, decay):
    grads, parts = gradients(params(decay), in_one_row(order))
    want_grads, want_parts = gradients_alone(decay)
    for name in set(parts) - {"history_share"}:  # that one is a mean over rows
        assert float(parts[name]) == pytest.approx(float(want_parts[name]), rel=1e-5), name
    for name, leaf in grads.items():
        assert_close("gradient", name, leaf, want_grads[name])


def test_an_empty_prefix_is_the_samples_own():
    """The history slot is dropped where a sample begins, and only there: shares, 0 at a border."""
    cfg, order = CFG.replace(**{"bd_gdn.empty_history": "drop"}), ORDERS[2]
    got, want = (passed(params(), b, cfg) for b in (in_one_row(order), in_rows(packed=True)))
    assert_same_hidden(order, got.hidden, want.hidden)
    shares = np.asarray(want.stats.history_share)[0]  # means over a row's blocks
    assert shares[0] == 0 and shares[1] > 0.01 and shares[3] > 0.01
    assert float(got.stats.history_share[0, 0]) == pytest.approx(
        np.average(shares, weights=USED), rel=1e-5
    )


@pytest.mark.parametrize(("order", "changed"), [(ORDERS[2], 3), (ORDERS[0], 3), (ORDERS[1], 0)])
def test_other_samples_cannot_matter(order, changed):
    """Bit for bit, whether another one stands before, behind or between."""
    got, want = (hidden(params(), in_one_row(order, c)) for c in ((changed,), ()))
    for i, columns, blocks in places(order):
        same = [
            np.array_equal(a[0, at], b[0, at])
            for a, b, at in zip(got, want, (columns, blocks), strict=True)
        ]
        assert same == [i != changed] * 2, i


def test_noise_that_follows_the_model():
    """What a block's first view leaves masked is what it leaves alone."""
    options = {"noise": NoiseConfig(frontier_share=1.0)}
    call = functools.partial(
        follow, forbidden=FORBIDDEN, threshold=0.05, cfg=CFG, env=Env(moe_path="dense")
    )
    call = jax.jit(call, compiler_options=QUICK)
    order = ORDERS[1]
    got = call(params(), in_one_row(order, **options))
    want = call(params(), in_rows(packed=True, **options))
    for i, _, blocks in places(order):
        for view in (0, BLOCKS):
            here = (0, slice(view + blocks.start, view + blocks.stop))
            for name in ("block_masked", "block_n_valid"):
                a, b = (np.asarray(getattr(x, name)) for x in (got, want))
                np.testing.assert_array_equal(a[here], b[i, view : view + USED[i]], name)
    first, second = np.split(np.asarray(want.block_masked), 2, axis=1)
    assert first.sum() - second.sum() > sum(USED)  # more than one a block: the threshold's doing


def test_what_packing_cannot_serve_is_refused():
    batch = jax.tree.map(jnp.asarray, in_one_row(ORDERS[0]))
    clean = CleanInput(batch.tokens, batch.n_valid, batch.start)
    noisy = NoisyInput(
        batch.block_tokens,
        batch.block_masked,
        batch.block_n_valid,
        batch.block_index,
        batch.block_start,
    )
    call = functools.partial(forward, params(), cfg=CFG, env=Env())
    with pytest.raises(CloverError, match="start is given with a cache"):
        call(clean, None, empty_cache(CFG, 1, 64))
    for one, other in (
        (clean, noisy._replace(start=None)),
        (clean._replace(start=None), noisy),
        (None, noisy),
        (clean, noisy._replace(index=None)),
    ):
        with pytest.raises(CloverError, match="start is given for one stream"):
            call(one, other, None)
