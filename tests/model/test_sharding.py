"""One rule table from logical axes to the mesh, and a small model on meshes against one device."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from clover_jax.cache import empty_cache
from clover_jax.diffusion.corrupt import Example, NoiseConfig, make_batch
from clover_jax.diffusion.generate import Generator, Request
from clover_jax.diffusion.loss import LossConfig, training_loss
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.placement import initialised, place, place_rows, state_shardings
from clover_jax.model.transformer import param_specs, unstack
from clover_jax.params import ParamSpec, abstract, named_leaves, zeros
from clover_jax.presets import clover_35b_a3b
from clover_jax.sharding import PRESETS, AxisRules, make_mesh, parse_mesh, shardings
from clover_jax.train.step import OptimiserConfig, init_state
from tests.helpers.limits import assert_close
from tests.model.small import (
    QUICK,
    clean_input,
    committed,
    config,
    jitted,
    random_params,
    random_tokens,
)

# Heads, vocabulary and experts that 8 devices divide; KV heads that only 2 do, as in the 35B.
CFG = config(
    **{
        "attention.num_heads": 8, "attention.num_kv_heads": 2, "delta.num_key_heads": 8,
        "delta.num_value_heads": 16, "moe.num_experts": 16, "moe.top_k": 3,
    }
)  # fmt: skip
PAIR = CFG.replace(num_layers=2, full_attention_interval=2, block_length=4)  # for gradients
LOSS = LossConfig(follow_above=0.05, chunk=16)
# Sizes, rules, rows: some that the mesh divides, some that it does not (case S1).
MESHES = {
    "1x1x1": ("tensor", 3),
    "8x1x1": ("fsdp", 8),
    "1x8x1": ("tensor", 8),
    "1x1x8": ("tensor", 3),
    "2x2x2": ("fsdp", 4),
    "1x4x2": ("tensor", 3),
}
HEAVY = pytest.mark.slow  # a mesh compiles programs of its own
on_meshes = pytest.mark.parametrize("mesh", MESHES)


def env_of(mesh: str) -> tuple[Env, int]:
    rules, rows = MESHES[mesh]
    return Env(mesh=make_mesh(*parse_mesh(mesh)), rules=PRESETS[rules]), rows


def serve(env: Env, rows: int) -> dict[str, Any]:
    """Prefill of uneven prompts over two KV tiles a device, a fused commit and preview, an AR step.

    1,024 cells: eight tiles, which devices share where they share neither rows nor KV heads.
    """
    params = place(random_params(CFG), CFG, env)
    n_valid = np.array([40, 13, 0, 29, 1, 40, 7, 22][:rows], np.int32)
    extend = jitted("extend", CFG, env, logits="all")
    prompt = extend(
        params, random_tokens(CFG, rows, 40, seed=3), n_valid, empty_cache(CFG, rows, 1024, env)
    )
    block = random_tokens(CFG, rows, CFG.block_length, seed=1)
    masked = np.random.default_rng(2).random(block.shape) < 0.5
    clean = clean_input(random_tokens(CFG, rows, CFG.block_length), [5] * rows)
    full = np.full(rows, CFG.block_length, np.int32)
    cache, logits, stats = jitted("commit_and_preview", CFG, env)(
        params, clean, block, masked, full, prompt.cache
    )
    step = jitted("extend", CFG, env, logits="last")(
        params, block[:, :1], np.ones(rows, np.int32), cache
    )
    seen = np.arange(40)[None] < n_valid[:, None]
    return {
        "prompt": np.where(seen[..., None], prompt.logits, 0),
        "block": np.asarray(logits),
        "step": np.asarray(step.logits),
        "touched": np.asarray(stats.router.touched),
        **committed(step.cache),
    }


@functools.cache
def served_by_one(rows: int) -> dict[str, Any]:
    return serve(Env(), rows)


@pytest.mark.parametrize(
    "mesh", [m if m == "2x2x2" else pytest.param(m, marks=HEAVY) for m in MESHES]
)
def test_a_mesh_computes_what_one_device_does(mesh: str):
    env, rows = env_of(mesh)
    got, want = serve(env, rows), served_by_one(rows)
    np.testing.assert_array_equal(got.pop("touched"), want["touched"])
    for name, tensor in got.items():
        assert_close(
            "logits" if tensor.shape[-1] == CFG.vocab_size else "continuation",
            name,
            tensor,
            want[name],
        )


def decoded(env: Env, mode: Literal["block", "ar"]) -> list[tuple[int, ...]]:
    """Tokens of three answers."""
    requests = [
        Request(prompt=tuple(range(3, 3 + n)), max_tokens=12, sampling=SamplerConfig(threshold=0.2))
        for n in (5, 40, 17)
    ]
    params = jax.tree.map(jnp.asarray, random_params(CFG))
    generator = Generator(CFG, params, tokenizer=None, env=env, prefill_chunk=16)
    return [c.token_ids for c in generator.complete(requests, mode=mode)]


@HEAVY
@pytest.mark.parametrize("mode", ("block", "ar"))
def test_a_mesh_writes_the_same_tokens(mode: Literal["block", "ar"]):
    """Three answers on 2x2x2, which divides neither rows nor prompts; a near-tie would differ."""
    assert decoded(env_of("2x2x2")[0], mode) == decoded(Env(), mode)


def gradients(env: Env, rows: int) -> tuple[Any, dict[str, Any]]:
    """Metrics of the loss, and the gradient of each weight."""
    rng = np.random.default_rng(0)
    tokens = lambda n: rng.integers(2, PAIR.vocab_size, n).astype(np.int32)
    examples = [(Example(i, tokens(20 + i), ((5, 20 + i),)),) for i in range(rows)]
    noise = NoiseConfig(complementary=True)
    batch = make_batch(examples, time=32, blocks=6, block=4, pad_id=0, seed=0, epoch=0, noise=noise)
    forbidden = jnp.zeros(PAIR.vocab_size, bool)
    objective = lambda params, batch: training_loss(
        params, batch, forbidden, cfg=PAIR, env=env, loss=LOSS
    )
    run = jax.jit(jax.grad(objective, has_aux=True), compiler_options=QUICK)
    grads, metrics = run(place(random_params(PAIR), PAIR, env), place_rows(batch, env))
    return metrics, named_leaves(grads)


@functools.cache
def gradients_of_one(rows: int) -> tuple[Any, dict[str, Any]]:
    return gradients(Env(), rows)


@HEAVY
@on_meshes
def test_a_mesh_has_the_gradients_of_one_device(mesh: str):
    """There with the experts' tokens in chunks, of which the last is not full."""
    env, rows = env_of(mesh)
    env = dataclasses.replace(env, moe_chunk=24)
    (metrics, grads), (want_metrics, want) = gradients(env, rows), gradients_of_one(rows)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, want_metrics[name], rtol=1e-5, err_msg=name)
    for name, grad in grads.items():
        assert_close("gradient", name, grad, want[name])


def test_what_a_run_carries_is_split_as_its_weights_are():
    """Weights, moments and averages; stacked, and each layer by itself."""
    env = Env(mesh=make_mesh(2, 2, 2), rules=PRESETS["fsdp"])
    assert env.mesh is not None
    params = abstract(param_specs(PAIR))
    want = named_leaves(shardings(param_specs(PAIR), env.mesh, env.rules))
    assert named_leaves(state_shardings(params, PAIR, env)) == want
    optimiser = OptimiserConfig(learning_rate=1e-2, steps=9, ema=0.9)
    state = jax.eval_shape(lambda p: init_state(p, optimiser), params)
    found = named_leaves(state_shardings(state, PAIR, env))
    for name, at in want.items():
        own = (s for n, s in found.items() if n.endswith(f".{name}"))
        bearers = list(own) if name != "norm" else [found["params.norm"], found["ema.norm"]]
        assert len(bearers) >= 2 and set(bearers) == {at}, name
    alone = jax.eval_shape(unstack, params)
    for name, at in named_leaves(state_shardings(alone, PAIR, env)).items():
        stacked = want[
            name.replace("layers.0.", "layers.linear.").replace("layers.1.", "layers.full.")
        ]
        lead = 0 if "layers" not in name else 2 if "layers.0" in name else 1
        assert tuple(at.spec) == tuple(stacked.spec)[lead:], name


@HEAVY
def test_each_device_makes_its_own_part():
    """Sharded start values are those of one device, and split as the rules say."""
    env, _ = env_of("2x2x2")
    assert env.mesh is not None
    got, want = (initialised(PAIR, jax.random.key(3), e) for e in (env, Env(mesh=make_mesh())))
    placed = named_leaves(shardings(param_specs(PAIR), env.mesh, env.rules))
    for name, leaf in named_leaves(got).items():
        assert leaf.sharding == placed[name], name
        np.testing.assert_allclose(leaf, named_leaves(want)[name], rtol=1e-6, err_msg=name)


def test_a_shard_is_a_part():
    mesh = make_mesh(2, 2, 2)
    placed = named_leaves(shardings(param_specs(clover_35b_a3b()), mesh, AxisRules()))
    specs = named_leaves(param_specs(clover_35b_a3b()))
    parts = {
        "embed_tokens": 2,
        "layers.linear.linear_attn.in_proj_qkv": 2,
        "layers.linear.linear_attn.A_log": 2,
        "layers.full.self_attn.q_proj": 2,
        "layers.full.self_attn.k_proj": 2,
        "layers.full.mlp.experts.gate_up_proj": 4,
        "layers.full.mlp.gate": 1,
        "norm": 1,
    }
    for name, ways in parts.items():
        shape = specs[name].shape
        assert np.prod(placed[name].shard_shape(shape)) * ways == np.prod(shape), name


def test_what_the_mesh_does_not_divide():
    """Rows and KV heads stay whole, cells take what they leave; other axes are refused."""
    rules, mesh = AxisRules(), make_mesh(2, 2, 2)
    cells = ("group", "rows", "kv_heads", "cells", None)
    for sizes, want in (
        ((1, 4, 2, 8, 4), (None, ("data", "expert"), "tensor")),
        ((1, 2, 2, 8, 4), (None, "data", "tensor", "expert")),
        ((1, 3, 2, 4, 4), (None, None, "tensor", ("data", "expert"))),
        ((1, 1, 1, 8, 4), (None, None, None, ("data", "expert", "tensor"))),
        ((1, 1, 1, 1, 4), ()),
    ):
        got = rules.partition(cells, sizes, mesh)
        assert tuple(got) == tuple(PartitionSpec(*want, *(None,) * (5 - len(want)))), sizes
    with pytest.raises(CloverError, match="axis heads of size 3 does not divide over 2"):
        shardings(ParamSpec((3, 4), ("heads", None), zeros, jnp.float32), mesh, rules)


def test_bad_meshes_and_rules_are_named():
    with pytest.raises(CloverError, match="mesh 4x4x1 needs 16 devices, here are 8"):
        make_mesh(4, 4, 1)
    for text in ("2x2", "2x0x1", "axbxc", "2x2x2x1", ""):
        with pytest.raises(CloverError, match="expected three sizes"):
            parse_mesh(text)
    with pytest.raises(CloverError, match=r"no sharding rule for axis .*'wings'"):
        AxisRules().spec(("wings",))
    with pytest.raises(CloverError, match=r"no sharding rule for axis .*'wings'"):
        AxisRules().replace(wings=("data",))
    with pytest.raises(CloverError, match="use a mesh axis twice"):
        AxisRules().spec(("heads", "channels"))
    with pytest.raises(CloverError, match="rows is mapped on a mesh of 8 devices"):
        Env(mesh=make_mesh(2, 2, 2), rows="mapped")
