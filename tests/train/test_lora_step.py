"""Whole steps of a small model: parts of a batch, adapters, averages, freezing, bfloat16.

Compiling is what these tests cost: each of the programs below is compiled once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from clover_jax.diffusion.corrupt import Example, NoiseConfig, make_batch
from clover_jax.diffusion.loss import LossConfig, as_arrays
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.leaves import leaf_kind
from clover_jax.model.lora import LoRAConfig, init
from clover_jax.model.transformer import param_specs, unstack
from clover_jax.params import named_leaves
from clover_jax.train.step import OptimiserConfig, TrainState, _cast, init_state, train_step
from tests.helpers.compilation import unoptimised
from tests.helpers.limits import assert_close
from tests.model.small import config, random_tree

pytestmark = pytest.mark.slow  # a program each

CFG = config(full_attention_interval=2).replace(num_layers=2, block_length=4)
OPTIMISER = OptimiserConfig(
    kind="adamw", learning_rate=1e-2, steps=9, clip=1e9, ema=0.9, freeze=("gate",), freeze_steps=2
)
# Router terms are those of the parts: without them the parts add up to the batch.
LOSS = LossConfig(follow_above=0.05, balance=0.0, router_z=0.0, chunk=64)
LORA = LoRAConfig(rank=2, alpha=6.0, targets=("q_proj", "out_proj", "experts"), train=("gate",))
STEP: dict[str, Any] = {"cfg": CFG, "env": Env(moe_path="dense"), "loss": LOSS}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    with unoptimised():
        yield


def batch():
    """Rows of very different lengths: parts of the batch have very different weights."""
    rng = np.random.default_rng(0)
    tokens = lambda n: rng.integers(6, CFG.vocab_size, n).tolist()
    sizes = [(4, 9), (2, 1), (5, 11), (9, 2)]
    examples = [Example.single(i, tokens(p), tokens(r)) for i, (p, r) in enumerate(sizes)]
    return as_arrays(
        make_batch(
            [(example,) for example in examples],
            time=16, blocks=3, block=4, pad_id=0, seed=0, epoch=0,
            noise=NoiseConfig(frontier_share=0.5),
        )
    )  # fmt: skip


def weights():
    return unstack(jax.tree.map(jnp.asarray, random_tree(param_specs(CFG))))


def start(trained=None, **changes) -> TrainState:
    options = dataclasses.replace(OPTIMISER, **changes)
    return init_state(weights() if trained is None else trained, options)


def step(state: TrainState, *args: Any, **options: Any):
    optimiser = dataclasses.replace(OPTIMISER, **options.pop("optimiser", {}))
    forbidden = jnp.zeros(CFG.vocab_size, bool)
    return train_step(
        state, batch(), forbidden, jnp.float32(1e-2), *args,
        optimiser=optimiser.rule, **STEP, **options,
    )  # fmt: skip


def gradients(state: TrainState) -> dict[str, np.ndarray]:
    """Of the first step: Adam's first moment is a tenth of them."""
    moment = optax.tree.get(state.optimiser, "mu")
    return {name: 10 * np.asarray(a) for name, a in named_leaves(moment).items()}


@functools.cache
def run(accumulate: int) -> list[tuple[TrainState, dict]]:
    """The states and metrics of three steps of full fine-tuning, on the host."""
    state, out, programs = start(), [], set()
    for _ in range(3 if accumulate == 1 else 1):
        state, metrics = step(state, accumulate=accumulate)
        out.append(jax.device_get((state, metrics)))
        programs.add(train_step._cache_size())
    assert len(programs) == 1  # thawing compiles nothing
    return out


@functools.cache
def adapter_step():
    """One step of an adapter at its start, in two parts: (adapter before, state, metrics)."""
    frozen = weights()
    adapter = init(frozen, LORA, jax.random.key(0))
    before = jax.device_get(adapter)
    state, metrics = step(start(adapter), frozen, lora=LORA, accumulate=2)
    for a, b in zip(jax.tree.leaves(frozen), jax.tree.leaves(weights()), strict=True):
        np.testing.assert_array_equal(a, b)  # neither donated nor changed
    return before, jax.device_get(state), jax.device_get(metrics)


def test_leaves_are_frozen_first():
    """The router stays for two steps, decay and all, then learns; the program is the same."""
    before = named_leaves(jax.device_get(weights()))
    for i, (state, _) in enumerate(run(1)):
        now = named_leaves(state.params)
        for name, value in now.items():
            still = np.array_equal(value, before[name])
            assert still == (leaf_kind(name) == "mlp.gate" and i < 2), (i, name)
        before = now


def test_average():
    """ema · average + (1 - ema) · new, from the start values on."""
    average = named_leaves(jax.device_get(weights()))
    for state, _ in run(1):
        new = named_leaves(state.params)
        for name, value in named_leaves(state.ema).items():
            assert value.dtype == np.float32
            average[name] = 0.9 * average[name].astype(np.float64) + 0.1 * new[name]
            np.testing.assert_allclose(value, average[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_parts_add_up_to_the_batch():
    """T2: the loss is normalised over all rows, whatever the number of parts."""
    (whole, metrics), (parts, summed) = run(1)[0], run(4)[0]
    assert metrics.keys() == summed.keys()
    for name, value in metrics.items():
        # Of what is no sum over positions, the parts' mean counts.
        if name not in ("router_balance", "router_z", "history_share"):
            np.testing.assert_allclose(summed[name], value, rtol=2e-6, err_msg=name)
    got, want = gradients(parts), gradients(whole)
    for name in want:
        limit = 2e-6 * max(np.abs(want[name]).max(), 1e-3)
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=limit, err_msg=name)
    assert sum(np.abs(g).max() > 1e-4 for g in want.values()) > 30


def test_parts_have_different_weights():
    """Else the test before would also pass for a mean of means."""
    by_row = np.asarray(batch().target_weight[:, 1:].sum(1))
    assert by_row.max() > 5 * by_row.min()


def test_only_the_adapter_learns_and_by_the_chain_rule():
    """dL/dB = s A^T dL/dW; lora_B is 0, so A has no gradient; in two parts, against the whole."""
    adapter, state, metrics = adapter_step()
    full, got = gradients(run(1)[0][0]), gradients(state)
    np.testing.assert_allclose(metrics["loss"], run(1)[0][1]["loss"], rtol=2e-6)
    starts = {n: np.asarray(a) for n, a in named_leaves(adapter).items()}
    changed = [n.removesuffix(".lora_A") for n in starts if n.endswith(".lora_A")]
    assert {leaf_kind(n) for n in changed} == {
        "self_attn.q_proj", "linear_attn.out_proj",
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    }  # fmt: skip
    assert len(got) == 2 * len(changed) + 2  # and each layer's router, which is frozen at first
    for name in changed:
        a, b = starts[f"{name}.lora_A"], got[f"{name}.lora_B"]
        formula = "eir,eio->ero" if ".experts." in name else "ir,i...->r..."
        assert_close("hidden", name, b, 3 * np.einsum(formula, a, full[name]))
        assert np.abs(b).max() > 1e-4
        assert not got[f"{name}.lora_A"].any()


def test_bfloat16_pass_with_float32_masters():
    """N2: decays, norms and routers stay float32 in the pass, all masters do; so do adapters."""
    optimiser = {"ema": None, "freeze": (), "freeze_steps": 0}
    state, metrics = step(start(**optimiser), compute_dtype="bfloat16", optimiser=optimiser)
    dtypes = {
        a.dtype for a in jax.tree.leaves((state.params, optax.tree.get(state.optimiser, "mu")))
    }
    assert dtypes == {jnp.dtype(jnp.float32)}
    assert state.ema is None
    exact = run(1)[0][1]["ar_loss"]
    # Rounded to 8 bits, and so near the float32 loss but not that.
    assert 1e-6 < abs(float(metrics["ar_loss"]) - exact) < 0.02 * exact
    copy = named_leaves(_cast(weights(), CFG.replace(dtype="bfloat16")))
    kinds = {leaf_kind(n): a.dtype for n, a in copy.items()}
    assert {kind for kind, dtype in kinds.items() if dtype == jnp.float32} == {
        "linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm", "mlp.gate", "norm",
        "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm",
        "linear_attn.bd_softmax_logit_scale", "linear_attn.bd_softmax_history_bias",
        "linear_attn.bd_softmax_history_c",
    }  # fmt: skip
    assert set(kinds.values()) == {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}


def test_what_a_step_refuses():
    for parts in (3, 0, 8):
        with pytest.raises(CloverError, match=f"accumulate is {parts}: .* the batch's 4 rows"):
            step(start(), accumulate=parts)
    with pytest.raises(CloverError, match="together, or neither"):
        step(start(), lora=LORA)
    with pytest.raises(CloverError, match="together, or neither"):
        step(start(), weights())
    adapter = init(weights(), LoRAConfig(targets=("q_proj",)), jax.random.key(0))
    with pytest.raises(CloverError, match="freeze names 'gate'"):
        start(adapter)
