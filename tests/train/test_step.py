"""The optimiser: rates by step, what decays, what is clipped. Nothing of the model is compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from clover_jax.errors import CloverError
from clover_jax.model.lora import LoRAConfig, init
from clover_jax.model.transformer import param_specs, unstack
from clover_jax.params import named_leaves
from clover_jax.train.step import OptimiserConfig, TrainState, init_state
from tests.model.small import config, random_tree

CFG = config(full_attention_interval=2).replace(num_layers=2)
# Leaves, by the last part of their names, that weight decay must leave alone.
VECTORS = {
    "A_log", "dt_bias", "norm", "conv1d", "conv_right_weight", "input_layernorm",
    "post_attention_layernorm", "q_norm", "k_norm", "bd_softmax_logit_scale",
    "bd_softmax_history_bias", "bd_softmax_history_c",
}  # fmt: skip
MATRICES = {
    "embed_tokens", "lm_head", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj",
    "q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_up_proj", "gate_proj", "up_proj",
    "down_proj", "shared_expert_gate",
}  # fmt: skip


@functools.cache
def weights():
    return jax.tree.map(jnp.asarray, random_tree(param_specs(CFG)))


@functools.cache
def updated(options: OptimiserConfig, gradient: float, stacked: bool = True):
    """(weights, updates of the first step with every gradient the same, optimiser state)."""
    params = weights() if stacked else unstack(weights())

    @jax.jit
    def first(params):
        grads = jax.tree.map(lambda p: jnp.full_like(p, gradient), params)
        with jax.numpy_dtype_promotion("standard"):
            optimiser = options.make(options.rate(1))
            return optimiser.update(grads, optimiser.init(params), params)

    return params, *first(params)


def test_rates():
    """Up over 10 steps, level, down to 0 over the last 30 of 100."""
    rate = OptimiserConfig(learning_rate=0.5, steps=100, warmup=10, decay_share=0.3).rate
    want = {0: 0, 1: 0.05, 5: 0.25, 10: 0.5, 40: 0.5, 70: 0.5, 71: 0.5 * 29 / 30, 85: 0.25}
    want |= {99: 0.5 / 30, 100: 0}
    for step, value in want.items():
        assert rate(step) == pytest.approx(value, abs=1e-12), step


def test_rates_without_a_warmup():
    rate = OptimiserConfig(learning_rate=0.5, steps=10, warmup=0, decay_share=0.5).rate
    got = [rate(step) for step in range(11)]
    np.testing.assert_allclose(got, [0.5] * 6 + [0.4, 0.3, 0.2, 0.1, 0], atol=1e-7)


def test_rates_on_a_cosine():
    """Up over 10 steps, then half a cosine down to 0 at step 110."""
    options = {"learning_rate": 0.5, "warmup": 10, "schedule": "cosine"}
    rate = OptimiserConfig(steps=110, decay_share=0.9, **options).rate
    want = {0: 0, 5: 0.25, 10: 0.5, 35: 0.25 + 0.25 * 0.5**0.5, 60: 0.25, 110: 0, 111: 0}
    want |= {10 + 100 // 3: 0.25 + 0.25 * np.cos(np.pi * 0.33)}
    for step, value in want.items():
        assert rate(step) == pytest.approx(value, abs=1e-12), step
    assert OptimiserConfig(steps=10, **options).rate(10) == 0.5  # all of it warm-up


@pytest.mark.parametrize("stacked", (True, False))
@pytest.mark.parametrize("kind", ("muon", "adamw"))
def test_only_matrices_decay(stacked, kind):
    """Without gradients, a weight moves by -rate * decay * weight, or not at all."""
    options = OptimiserConfig(kind=kind, learning_rate=0.5, steps=10, warmup=0, weight_decay=0.1)
    params, updates, _ = updated(options, 0.0, stacked)
    updates, kinds = named_leaves(updates), set()
    for name, weight in named_leaves(params).items():
        kind = name.rsplit(".", 1)[-1]
        kinds.add(kind)
        assert kind in VECTORS | MATRICES, f"{name}: say whether it decays"
        want = -0.05 * np.asarray(weight) if kind in MATRICES else np.zeros(weight.shape)
        np.testing.assert_allclose(updates[name], want, rtol=1e-6, err_msg=name)
    assert kinds == VECTORS | MATRICES


@pytest.mark.parametrize("gradient", (100.0, 1e-6))
def test_large_gradients_are_clipped(gradient):
    """Adam's first moment after a step is a tenth of the clipped gradient."""
    options = OptimiserConfig(
        kind="adamw", learning_rate=0.5, steps=10, warmup=0, clip=0.7, weight_decay=0.0
    )
    params, _, state = updated(options, gradient)
    norm = gradient * sum(p.size for p in jax.tree.leaves(params)) ** 0.5
    got = optax.tree.norm(optax.tree.get(state, "mu"))
    assert float(got) == pytest.approx(0.1 * min(norm, 0.7), rel=1e-5)
    assert (norm > 0.7) == (gradient == 100.0)


MUON = {
    "in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
    "gate_up_proj", "gate_proj", "up_proj", "down_proj",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stacked", (True, False))
def test_muon_orthogonalises_each_matrix(stacked):
    """Its update of a projection, stacked or not, per head fan-in and per expert, is rate · 0.2 ·
    sqrt(max(fan in, fan out)) times a matrix whose singular values are near 1; AdamW's first one is
    1 + 0.09 / 0.19 (Nesterov, bias corrected) times a sign.
    """
    options = OptimiserConfig(
        kind="muon", learning_rate=0.5, steps=10, warmup=0, clip=1e9, weight_decay=0.0
    )
    params = weights() if stacked else unstack(weights())
    grads = jax.tree.map(
        lambda p: jax.random.normal(jax.random.key(p.size), p.shape, jnp.float32), params
    )
    with jax.numpy_dtype_promotion("standard"):
        optimiser = options.make(0.5)
        updates, _ = jax.jit(optimiser.update)(grads, optimiser.init(params), params)
    seen = set()
    for name, update in named_leaves(updates).items():
        kind, u = name.rsplit(".", 1)[-1], np.asarray(update, np.float64) / 0.5
        if kind not in MUON:
            np.testing.assert_allclose(np.abs(u), 1 + 0.09 / 0.19, rtol=1e-3, err_msg=name)
            continue
        seen.add(kind)
        if kind in ("q_proj", "k_proj", "v_proj"):
            u = u.reshape(*u.shape[:-2], -1)
        if kind == "o_proj":
            u = u.reshape(*u.shape[:-3], -1, u.shape[-1])
        values = np.linalg.svd(u, compute_uv=False) / (0.2 * max(u.shape[-2:]) ** 0.5)
        assert np.quantile(values, 0.1) > 0.3 and values.max() < 1.3, name
    assert seen == MUON


def test_runs_of_other_lengths_share_their_programs():
    options = OptimiserConfig(
        learning_rate=0.5, steps=10, warmup=3, decay_share=0.1, schedule="cosine"
    )
    assert options.rule == OptimiserConfig(learning_rate=0.1, steps=99).rule
    assert options.rule != OptimiserConfig(learning_rate=0.1, steps=99, clip=2.0).rule


def test_state_before_the_first_step():
    params = weights()
    state = init_state(params, OptimiserConfig(kind="adamw", learning_rate=0.5, steps=10))
    assert isinstance(state, TrainState)
    assert state.params is params
    assert (state.step.dtype, int(state.step)) == (jnp.int32, 0)
    assert state.ema is None
    for name, a in named_leaves(optax.tree.get(state.optimiser, "mu")).items():
        assert not np.asarray(a).any(), name


@pytest.mark.parametrize("kind", ("muon", "adamw"))
def test_the_factors_of_an_adapter_decay(kind):
    """Muon leaves them to AdamW: a first step of any gradient is its sign."""
    lora = LoRAConfig(rank=2, targets=("q_proj", "experts"), train=("norms",))
    adapter = init(weights(), lora, jax.random.key(0))
    options = OptimiserConfig(
        kind=kind, learning_rate=0.5, steps=10, clip=1e9, weight_decay=0.1
    ).make(0.5)
    grads = jax.tree.map(lambda a: jnp.full_like(a, -0.3), adapter)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(options.update)(grads, options.init(adapter), adapter)
    step = 0.5 if kind == "adamw" else 0.5 * (1 + 0.09 / 0.19)
    for name, weight in named_leaves(adapter).items():
        decay = 0.05 * np.asarray(weight) if ".lora_" in name else 0
        got = named_leaves(updates)[name]
        np.testing.assert_allclose(got, step - decay, rtol=1e-4, err_msg=name)


BAD = {
    "no steps": {"steps": 0},
    "no rate": {"learning_rate": 0.0},
    "rate is no number": {"learning_rate": float("nan")},
    "negative warm-up": {"warmup": -1},
    "decay for longer than the run": {"decay_share": 1.5},
    "negative decay": {"weight_decay": -0.1},
    "nothing passes the clip": {"clip": 0.0},
    "average that never moves": {"ema": 1.0},
    "freezing for no steps": {"freeze": ("gate",)},
    "freezing nothing": {"freeze_steps": 3},
    "freezing what no model has": {"freeze": ("router",), "freeze_steps": 3},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_bad_settings_are_refused(changes):
    with pytest.raises(CloverError, match=next(iter(changes))):
        OptimiserConfig(**({"learning_rate": 0.1, "steps": 10} | changes))
