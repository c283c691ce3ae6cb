"""The training loss: cross entropy, which position a logit speaks of, weights, router terms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.diffusion import loss as loss_module
from clover_jax.diffusion.corrupt import Batch, Example, NoiseConfig, make_batch
from clover_jax.diffusion.loss import (
    LossConfig,
    as_arrays,
    block_weight,
    cross_entropy,
    router_losses,
    training_loss,
)
from clover_jax.env import Env
from clover_jax.model.block import Streams
from clover_jax.model.moe import RouterStats
from clover_jax.model.stack import StackStats
from clover_jax.model.transformer import Params, PassOutput
from clover_jax.params import named_leaves
from tests.helpers.limits import assert_close
from tests.model.small import config, random_params

# --- cross entropy ------------------------------------------------------------------------------

ONE_VIEW = NoiseConfig(complementary=False)
N, WIDTH, VOCAB = 11, 5, 7
RNG = np.random.default_rng(0)
HEAD = RNG.normal(size=(WIDTH, VOCAB)).astype(np.float32)
HIDDEN = RNG.normal(size=(N, WIDTH)).astype(np.float32)
TARGETS = np.array([0, 1, 2, 4, 6, 0, 1, 2, 4, 6, 1], np.int32)
WEIGHT = np.array([1, 0, 0.5, 2, 1, 1, 0, 1, 1, 0.05, 1], np.float32)
FORBIDDEN = np.array([False, False, False, True, False, True, False])


def head(lm_head) -> Params:
    return Params(embed_tokens=None, layers=(), norm=None, lm_head=lm_head)


def entropy(hidden=HIDDEN, targets=TARGETS, weight=WEIGHT, *, chunk=4, lm_head=HEAD):
    args = map(jnp.asarray, (hidden, targets, weight, FORBIDDEN))
    return cross_entropy(head(jnp.asarray(lm_head)), *args, chunk=chunk, env=Env())


def numpy_entropy():
    """Sums and the gradient of the loss with respect to lm_head, in float64, term by term."""
    total = correct = 0.0
    gradient = np.zeros((WIDTH, VOCAB))
    allowed = np.flatnonzero(~FORBIDDEN)
    for h, target, w in zip(HIDDEN.astype(np.float64), TARGETS, WEIGHT, strict=True):
        logits = h @ HEAD[:, allowed].astype(np.float64)
        prob = np.exp(logits) / np.exp(logits).sum()
        own = np.flatnonzero(allowed == target)[0]
        total -= w * np.log(prob[own])
        correct += w * (prob.argmax() == own)
        gradient[:, allowed] += w * np.outer(h, prob - (np.arange(len(allowed)) == own))
    return total, correct, gradient


@pytest.mark.parametrize("chunk", (1, 4, N, 64))
def test_cross_entropy_is_numpys(chunk):
    """Chunks that divide the rows, that leave a remainder, and one that holds them all."""
    total, correct, _ = numpy_entropy()
    got = entropy(chunk=chunk)
    np.testing.assert_allclose(got.loss, total, rtol=1e-6)
    np.testing.assert_allclose(got.correct, correct, rtol=1e-6)
    np.testing.assert_allclose(got.weight, WEIGHT.sum(dtype=np.float64), rtol=1e-6)


def test_gradient_of_chunks_is_numpys():
    got = jax.grad(lambda w: entropy(lm_head=w).loss)(jnp.asarray(HEAD))
    assert_close("op", "gradient", got, numpy_entropy()[2])
    np.testing.assert_array_equal(np.asarray(got)[:, FORBIDDEN], 0)


def test_entropy_of_right_positions_is_numpys():
    """Value and gradient (by central differences) of the sum over positions predicted right."""

    def numpys(lm_head: np.ndarray) -> float:
        allowed, total = np.flatnonzero(~FORBIDDEN), 0.0
        for h, target, w in zip(HIDDEN.astype(np.float64), TARGETS, WEIGHT, strict=True):
            logits = h @ lm_head.astype(np.float64)[:, allowed]
            prob = np.exp(logits) / np.exp(logits).sum()
            if allowed[prob.argmax()] == target:
                total -= w * (prob * np.log(prob)).sum()
        return total

    measure = lambda w: (
        cross_entropy(
            head(w),
            *map(jnp.asarray, (HIDDEN, TARGETS, WEIGHT, FORBIDDEN)),
            chunk=4,
            certainty=True,
            env=Env(),
        ).entropy
    )
    np.testing.assert_allclose(measure(jnp.asarray(HEAD)), numpys(HEAD), rtol=1e-5)
    assert numpys(HEAD) > 0.1 and entropy().entropy == 0
    gradient = np.asarray(jax.grad(measure)(jnp.asarray(HEAD)), np.float64)
    for seed in range(3):
        step = 1e-5 * np.random.default_rng(seed).normal(size=HEAD.shape)
        rise = numpys(HEAD + step) - numpys(HEAD - step)
        np.testing.assert_allclose((gradient * 2 * step).sum(), rise, rtol=1e-3)


def test_leading_axes_do_not_matter():
    two = [np.concatenate([a, a[:1]]).reshape(3, 4, *a.shape[1:]) for a in (HIDDEN, TARGETS)]
    weight = np.concatenate([WEIGHT, np.zeros(1, np.float32)]).reshape(3, 4)
    np.testing.assert_allclose(entropy(*two, weight).loss, entropy().loss, rtol=1e-6)


def test_positions_without_weight_do_not_matter():
    """Not even ones whose target is forbidden, which has an infinite loss."""
    skip = WEIGHT == 0
    hidden = np.where(skip[:, None], np.float32(1e3), HIDDEN)
    targets = np.where(skip, np.int32(3), TARGETS)
    assert skip.any()
    for a, b in zip(entropy(hidden, targets), entropy(), strict=True):
        np.testing.assert_array_equal(a, b)
    gradient = jax.grad(lambda w: entropy(hidden, targets, lm_head=w).loss)(jnp.asarray(HEAD))
    assert_close("op", "gradient", gradient, numpy_entropy()[2])


def test_forbidden_ids_are_outside_the_softmax():
    """However large their logits are."""
    lm_head = np.where(FORBIDDEN, np.float32(1e4), HEAD)
    for a, b in zip(entropy(lm_head=lm_head), entropy(), strict=True):
        np.testing.assert_array_equal(a, b)


# --- a model that knows the answer ----------------------------------------------------------------

FAKE = config(vocab_size=40, block_length=4, **{"moe.num_experts": 4})
ALLOWED = jnp.zeros(40, bool)
ONLY_DIFFUSION = LossConfig(ar=0.0, balance=0.0, router_z=0.0, diffusion=1.0)


def numbered(prompt: int, response: int, sample: int = 0) -> Example:
    """No token stands next to its like."""
    tokens = list(range(1, prompt + response + 1))
    return Example.single(sample, tokens[:prompt], tokens[prompt:])


def laid_out(examples, *, masked: str = "noise") -> Batch:
    """Blocks of 4; `all` positions masked, or the `first` of each block, or noise."""
    rows = [(example,) for example in examples]
    batch = make_batch(
        rows,
        time=16,
        blocks=3,
        block=4,
        pad_id=39,
        seed=0,
        epoch=0,
        noise=ONE_VIEW,
    )
    there = (batch.block_n_valid > 0)[..., None]
    if masked == "all":
        return batch._replace(block_masked=np.broadcast_to(there, batch.block_masked.shape))
    if masked == "first":
        return batch._replace(block_masked=there & (np.arange(4) == 0)[None, None])
    return batch


def neutral_stats() -> StackStats:
    """Router statistics of one layer, one row and one position."""
    experts = jnp.full((1, 1, 4), 0.5, jnp.float32)
    one = jnp.ones((1, 1), jnp.float32)
    return StackStats(RouterStats(experts > 0, experts, experts / 2, one, one, one), None)


def run(monkeypatch, noisy, *, cfg=FAKE, batch=None, options=ONLY_DIFFUSION, clean=None):
    """`training_loss` where row i of a stream gives all its weight to the token named for it."""
    if batch is None:
        batch = laid_out([numbered(5, 6), numbered(3, 12, 1)], masked="all")
    batch = as_arrays(batch)
    after = jnp.concatenate([batch.tokens[:, 1:], batch.tokens[:, :1]], axis=1)
    tokens = Streams(after if clean is None else clean, noisy(batch))
    hidden = Streams(*(jax.nn.one_hot(t, 40, dtype=jnp.float32) for t in tokens))
    monkeypatch.setattr(
        loss_module,
        "forward",
        lambda *args, **options: PassOutput(hidden, None, None, neutral_stats()),
    )
    params = head(jnp.float32(30) * jnp.eye(40, dtype=jnp.float32))
    return training_loss(params, batch, ALLOWED, cfg=cfg, env=Env(), loss=options)[1]


def names_own(batch):
    return batch.block_tokens


def names_next(batch):
    return jnp.concatenate([batch.block_tokens[..., 1:], batch.block_tokens[..., :1]], axis=-1)


@pytest.mark.parametrize("masked", ("all", "first", "noise"))
@pytest.mark.parametrize("position", ("same", "shifted"))
def test_one_reading_of_logits(monkeypatch, position, masked):
    """D4: no loss where the model's reading is the config's, a loud one where it is not.

    With the first position of each block masked only, the shifted reading rests on the clean
    stream's last token before the block alone.
    """
    cfg = FAKE.replace(logits_position=position)
    right, wrong = (names_own, names_next)[:: 1 if position == "same" else -1]
    batch = laid_out([numbered(5, 6), numbered(3, 12, 1)], masked=masked)
    good = run(monkeypatch, right, cfg=cfg, batch=batch)
    assert float(good["diffusion_loss"]) < 1e-6
    assert float(good["diffusion_accuracy"]) == 1
    bad = run(monkeypatch, wrong, cfg=cfg, batch=batch)
    # The first position of a block is right in the shifted reading whatever the blocks say.
    floor = 25 if position == "same" else 0 if masked == "first" else 10
    assert float(bad["diffusion_loss"]) >= floor
    assert float(bad["diffusion_accuracy"]) < 0.5 or masked == "first"


def test_the_first_token_of_a_block_rests_on_the_token_before_it(monkeypatch):
    """Shifted: a clean stream that names its own token fails exactly the first positions."""
    cfg = FAKE.replace(logits_position="shifted")
    batch = laid_out([numbered(5, 8), numbered(3, 12, 1)], masked="all")
    got = run(monkeypatch, names_next, cfg=cfg, batch=batch, clean=jnp.asarray(batch.tokens))
    assert float(got["diffusion_accuracy"]) == pytest.approx(0.75)  # 3 of 4 in every block
    got = run(monkeypatch, names_own, batch=batch, clean=jnp.asarray(batch.tokens))
    assert float(got["diffusion_accuracy"]) == 1


def test_the_clean_stream_predicts_the_next_token(monkeypatch):
    """Of the response only, the stop included."""
    got = run(monkeypatch, names_own)
    assert float(got["ar_loss"]) < 1e-6
    assert float(got["ar_accuracy"]) == 1
    batch = laid_out([numbered(5, 6)], masked="all")
    wrong = np.array(batch.tokens)
    wrong[0, 4:10] = batch.tokens[0, 5:11]  # right at the six positions that count
    got = run(monkeypatch, names_own, batch=batch, clean=jnp.asarray(wrong))
    assert float(got["ar_accuracy"]) == 1
    wrong[0, 9] = 0  # the stop is missed
    got = run(monkeypatch, names_own, batch=batch, clean=jnp.asarray(wrong))
    assert float(got["ar_accuracy"]) == pytest.approx(5 / 6)


def test_weights_of_masked_positions(monkeypatch):
    """Unmasked positions and absent blocks count nothing, pads after the stop 0.05 each.

    5 + 6 tokens: block 0 has its first position masked and wrong, block 1 its stop (right) and
    one pad (wrong).
    """
    batch = laid_out([numbered(5, 6)])
    masked = np.zeros((1, 3, 4), bool)
    masked[0, 0, 0] = masked[0, 1, 1] = masked[0, 1, 3] = True
    masked[0, 2] = True  # there is no such block
    batch = batch._replace(block_masked=masked)

    def model(batch):
        named = np.array(batch.block_tokens)
        named[0, 0] = named[0, 2] = 0  # all of block 0, masked or not
        named[0, 1, 3] = 0
        return jnp.asarray(named)

    got = run(monkeypatch, model, batch=batch)
    assert float(got["diffusion_accuracy"]) == pytest.approx(1 / 2.05)
    assert float(got["diffusion_loss"]) == pytest.approx(30 * 1.05 / 2.05, rel=1e-4)


def test_inverse_t_weighs_blocks_alike(monkeypatch):
    """One mask in block 0, wrong, and three in block 1, right: 1/4 of the terms, 1/2 of the sum."""
    batch = laid_out([numbered(5, 8)])
    masked = np.zeros((1, 3, 4), bool)
    masked[0, 0, 2] = masked[0, 1, 0] = masked[0, 1, 1] = masked[0, 1, 2] = True
    batch = batch._replace(block_masked=masked)

    def model(batch):
        named = np.array(batch.block_tokens)
        named[0, 0] = 0
        return jnp.asarray(named)

    unit = run(monkeypatch, model, batch=batch)
    assert float(unit["diffusion_loss"]) == pytest.approx(30 / 4, rel=1e-5)
    options = LossConfig(ar=0.0, balance=0.0, router_z=0.0, diffusion_weighting="inverse_t")
    weighted = run(monkeypatch, model, batch=batch, options=options)
    assert float(weighted["diffusion_loss"]) == pytest.approx(30 / 2, rel=1e-5)


def test_the_loss_is_the_weighted_sum_of_its_parts(monkeypatch):
    options = LossConfig(ar=0.7, diffusion=0.4, balance=0.02, router_z=0.003)
    batch = laid_out([numbered(5, 6)], masked="all")
    got = run(
        monkeypatch, names_next, batch=batch, options=options, clean=jnp.asarray(batch.tokens)
    )
    # One position, 2 of 4 experts: f = 0.5 and p = 0.25 each; balanced, so top_k.
    assert float(got["router_balance"]) == pytest.approx(2)
    want = 0.7 * got["ar_loss"] + 0.4 * got["diffusion_loss"]
    want += 0.02 * got["router_balance"] + 0.003 * got["router_z"]
    assert float(got["loss"]) == pytest.approx(float(want), rel=1e-6)
    assert float(got["ar_loss"]) > 1
    assert float(got["diffusion_loss"]) > 1


def test_without_diffusion_there_are_no_blocks(monkeypatch):
    seen = []
    batch = as_arrays(laid_out([numbered(5, 6)]))
    hidden = jax.nn.one_hot(batch.tokens, 40, dtype=jnp.float32)

    def forward(params, clean, noisy, cache, **options):
        seen.append(noisy)
        return PassOutput(Streams(hidden, None), None, None, neutral_stats())

    monkeypatch.setattr(loss_module, "forward", forward)
    options = LossConfig(diffusion=0.0)
    _, got = training_loss(
        head(jnp.eye(40, dtype=jnp.float32)), batch, ALLOWED, cfg=FAKE, env=Env(), loss=options
    )
    assert seen == [None]
    assert "diffusion_loss" not in got


# --- router -------------------------------------------------------------------------------------


def router(assigned, prob, z) -> StackStats:
    """Statistics [layers, rows, experts] and [layers, rows]."""
    assigned, prob, z = (jnp.asarray(a, jnp.float32) for a in (assigned, prob, z))
    return StackStats(RouterStats(assigned > 0, assigned, prob, z, z, z), None)


FOUR = config(**{"moe.num_experts": 4, "moe.top_k": 2})


def test_balance_is_top_k_when_balanced():
    """Three rows of unequal length, 10 positions together."""
    lengths = np.array([5, 4, 1])[None, :, None]
    stats = router(lengths * np.full(4, 0.5), lengths * np.full(4, 0.25), np.zeros((1, 3)))
    balance, z = router_losses(stats, FOUR)
    assert float(balance) == pytest.approx(2)
    assert float(z) == 0


def test_balance_of_a_collapsed_layer():
    """Experts 0 and 1 take everything: 4 (1 * 0.6 + 1 * 0.3); a balanced layer beside it has 2."""
    collapsed = [[[6, 6, 0, 0], [4, 4, 0, 0]], [[3, 3, 3, 3], [2, 2, 2, 2]]]
    prob = np.array([[0.6, 0.3, 0.05, 0.05], [0.25] * 4])[:, None] * np.array([6, 4])[:, None]
    stats = router(collapsed, prob, [[6.0, 14.0], [1.0, 0.0]])
    balance, z = router_losses(stats, FOUR)
    assert float(balance) == pytest.approx((3.6 + 2) / 2)
    assert float(z) == pytest.approx((20 / 10 + 1 / 10) / 2)


def test_layers_are_not_pooled():
    """Two layers that collapse on different experts look balanced together."""
    assigned = [[[8, 8, 0, 0]], [[0, 0, 8, 8]]]
    prob = [[[4, 4, 0, 0]], [[0, 0, 4, 4]]]
    balance, _ = router_losses(router(assigned, prob, np.zeros((2, 1))), FOUR)
    assert float(balance) == pytest.approx(4)


def test_rows_of_pads_do_not_change_router_losses():
    assigned, prob, z = np.array([[[2, 1, 1, 0]]]), np.array([[[0.8, 0.6, 0.4, 0.2]]]), [[3.0]]
    add = lambda a: np.concatenate([a, np.zeros((1, 5, *np.shape(a)[2:]))], axis=1)
    want = router_losses(router(assigned, prob, z), FOUR)
    got = router_losses(router(add(assigned), add(prob), add(z)), FOUR)
    for a, b in zip(got, want, strict=True):
        assert float(a) == float(b) > 0


def test_gradient_of_balance_flows_through_probabilities_only():
    """d/dP_e = experts f_e / positions."""
    stats = router([[[6, 2, 0, 0]]], [[[2.0, 1.0, 0.5, 0.5]]], [[0.0]])
    gradient = jax.grad(
        lambda a: router_losses(StackStats(stats.router._replace(**a), None), FOUR)[0]
    )({"assigned": stats.router.assigned, "prob": stats.router.prob})
    np.testing.assert_allclose(gradient["prob"][0, 0], 4 * np.array([1.5, 0.5, 0, 0]) / 4)


# --- a real model -------------------------------------------------------------------------------

REAL = config(full_attention_interval=2, vocab_size=60).replace(num_layers=2, **{"delta.chunk": 4})
MASK = REAL.mask_token_id
BLOCKS_ONLY = LossConfig(ar=0.0, balance=0.0, router_z=0.0)


def spoken(seed: int, prompt: int, response: int) -> Example:
    """Tokens 10 to 49; the prompt's second token is 50 + seed and stands nowhere else."""
    tokens = np.random.default_rng(seed).integers(10, 50, prompt + response)
    tokens[1] = 50 + seed
    return Example.single(seed, tokens[:prompt].tolist(), tokens[prompt:].tolist())


SPOKEN = [spoken(0, 5, 11), spoken(1, 9, 3), spoken(2, 3, 16), spoken(3, 7, 8)]
NOBODY = Example(0, (), ())


@functools.cache
def compiled():
    """Gradients and metrics of the diffusion loss alone."""
    forbidden = jnp.arange(60) == MASK
    objective = functools.partial(
        training_loss, forbidden=forbidden, cfg=REAL, env=Env(moe_path="dense"), loss=BLOCKS_ONLY
    )
    return jax.jit(jax.grad(objective, has_aux=True))


def measure(examples, change=None):
    """(gradients, metrics, batch)."""
    rows = [(example,) for example in examples]
    batch = make_batch(
        rows,
        time=24,
        blocks=2,
        block=8,
        pad_id=0,
        seed=1,
        epoch=0,
        noise=ONE_VIEW,
    )
    batch = batch if change is None else change(batch)
    return *compiled()(jax.tree.map(jnp.asarray, random_params(REAL)), batch), batch


@pytest.mark.slow
def test_a_batch_is_the_weighted_sum_of_its_halves():
    """Halves of unequal weight: sums and weights add up, means do not."""
    whole = measure(SPOKEN)
    halves = [measure([*SPOKEN[:1], NOBODY, NOBODY, NOBODY]), measure([NOBODY, *SPOKEN[1:]])]
    weights = {
        "ar": [batch.target_weight.sum() for *_, batch in halves],
        "diffusion": [(batch.block_weight * batch.block_masked).sum() for *_, batch in halves],
    }
    for name, (a, b) in weights.items():
        assert abs(a - b) > 0.2 * (a + b)
        for part in ("loss", "accuracy"):
            x, y = (float(metrics[f"{name}_{part}"]) for _, metrics, _ in halves)
            want = (a * x + b * y) / (a + b)
            assert float(whole[1][f"{name}_{part}"]) == pytest.approx(want, rel=1e-5)
        x, y = (float(metrics[f"{name}_loss"]) for _, metrics, _ in halves)
        assert abs(x - y) > 0.01
    a, b = weights["diffusion"]
    parts = (named_leaves(tree) for tree in (whole[0], halves[0][0], halves[1][0]))
    for (name, got), x, y in zip(*(p.items() for p in parts), strict=True):
        want = (a * np.asarray(x[1], np.float64) + b * np.asarray(y[1], np.float64)) / (a + b)
        assert_close("gradient", name, got, want)


@pytest.mark.slow
def test_tail_tokens_do_not_matter():
    """E3 and N2 of padding: other tokens past the samples' ends change no metric or gradient."""

    def other(batch: Batch) -> Batch:
        past = np.arange(24)[None] >= batch.n_valid[:, None]
        absent = (batch.block_n_valid == 0)[..., None]
        return batch._replace(
            tokens=np.where(past, np.int32(33), batch.tokens),
            block_tokens=np.where(absent, np.int32(34), batch.block_tokens),
            block_masked=batch.block_masked | absent,
        )

    (want, metrics, _), (got, others, _) = measure(SPOKEN), measure(SPOKEN, other)
    for name in metrics:
        assert float(others[name]) == pytest.approx(float(metrics[name]), rel=1e-6), name
    for (name, a), b in zip(named_leaves(got).items(), named_leaves(want).values(), strict=True):
        assert_close("gradient", name, a, b)


def test_every_weight_learns_from_the_blocks():
    """Both streams: the blocks' loss reaches the clean stream through state, ring and keys."""
    grads, metrics, _ = measure(SPOKEN)
    for name, leaf in named_leaves(grads).items():
        leaf = np.asarray(leaf)
        assert np.isfinite(leaf).all(), name
        assert np.abs(leaf).max() > 1e-6, name
    assert 0 < float(metrics["history_share"]) < 1
    embed = np.abs(np.asarray(grads.embed_tokens)).max(axis=1)
    assert (embed[50:54] > 1e-7).all()  # tokens that stand in prompts only
    assert embed[MASK] > 1e-6
    assert (embed[54:] == 0).all()
    assert (np.asarray(grads.lm_head)[:, MASK] == 0).all()  # a forbidden id


# Row 0: a prompt of 5, then blocks at 5 and at 13. The second one holds 3 tokens of the response.
BLOCK_AT, MASKS = 13, [1, 4, 6]


def one_token(stream: str | None = None, *place):
    """Losses where only position 1 of row 0's second block counts, after a change of tokens."""

    def change(batch: Batch) -> Batch:
        weight, masked = np.zeros_like(batch.block_weight), np.array(batch.block_masked)
        masked[0, 1] = False
        masked[0, 1, MASKS] = True
        weight[0, 1, MASKS[0]] = 1
        batch = batch._replace(block_weight=weight, block_masked=masked)
        if stream is None:
            return batch
        tokens = np.array(getattr(batch, stream))
        assert (tokens[place] != 7).all()
        tokens[place] = 7
        return batch._replace(**{stream: tokens})

    metrics = measure(SPOKEN, change)[1]
    return float(metrics["diffusion_loss"]), float(metrics["ar_loss"])


HIDDEN_FROM_IT = {
    "other masks of the block": ("block_shown", 0, 1, MASKS[1:]),
    "another block": ("block_shown", 0, 0),
    "its own place in the clean stream": ("tokens", 0, BLOCK_AT + 1),
    "clean tokens from the boundary on": ("tokens", 0, slice(BLOCK_AT, None)),
    "another sample": ("tokens", 1),
    "blocks of another sample": ("block_shown", 1),
}
SHOWN_TO_IT = {
    "an unmasked token of the block": ("block_shown", 0, 1, 2),
    "a pad after the stop": ("block_shown", 0, 1, 5),
    "the last clean token before it": ("tokens", 0, BLOCK_AT - 1),
    "the first token of the prompt": ("tokens", 0, 0),
}


@pytest.mark.parametrize("place", HIDDEN_FROM_IT.values(), ids=HIDDEN_FROM_IT)
def test_nothing_leaks_into_a_masked_position(place):
    assert one_token(*place)[0] == one_token()[0]


@pytest.mark.parametrize("place", SHOWN_TO_IT.values(), ids=SHOWN_TO_IT)
def test_what_a_masked_position_sees_matters(place):
    assert abs(one_token(*place)[0] - one_token()[0]) > 1e-5


def test_blocks_do_not_touch_the_clean_stream():
    (_, want), (_, got) = one_token(), one_token("block_shown", 0)
    assert got == want


def test_an_empty_batch_has_no_loss_and_no_gradient():
    """No sample, no weight: 0 rather than 0 / 0, which would spoil every parameter."""
    grads, metrics, _ = measure([NOBODY] * 4)
    for name, value in {**metrics, **named_leaves(grads)}.items():
        assert np.isfinite(np.asarray(value)).all(), name
    for name, leaf in named_leaves(grads).items():
        np.testing.assert_array_equal(leaf, 0, err_msg=name)


def test_weights_of_block_positions():
    """Masked or substituted, in blocks that exist; 1/t is the block's length over its masks."""
    zeros = np.zeros((1, 3, 4), np.float32)
    shown = zeros.astype(np.int32)
    shown[0, :, 1] = 7  # a substitute in each block
    masked = zeros.astype(bool)
    masked[0, :, 0] = masked[0, 2, 2] = True
    batch = Batch(
        tokens=None, n_valid=None, target_weight=None, block_index=None,
        block_tokens=zeros.astype(np.int32), block_shown=shown, block_masked=masked,
        block_n_valid=np.array([[4, 0, 3]], np.int32), block_weight=zeros + 0.5,
        block_follows=None,
    )  # fmt: skip
    want = np.array([[[0.5, 0.5, 0, 0], [0, 0, 0, 0], [0.5, 0.5, 0.5, 0]]])
    np.testing.assert_array_equal(block_weight(batch, LossConfig()), want)
    by_level = want * np.array([4 / 1, 1, 3 / 2])[None, :, None]
    got = block_weight(batch, LossConfig(diffusion_weighting="inverse_t"))
    np.testing.assert_allclose(got, by_level, rtol=1e-6)
