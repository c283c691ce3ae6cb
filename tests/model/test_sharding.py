"""One rule table from logical axes to the mesh, and a model on 8 devices against one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from clover_jax.cache import ROW_AXES, empty_cache
from clover_jax.errors import CloverError
from clover_jax.model.transformer import param_specs
from clover_jax.params import ParamSpec, named_leaves, zeros
from clover_jax.presets import clover_35b_a3b
from clover_jax.sharding import AxisRules, make_mesh, shardings
from tests.helpers.limits import assert_close
from tests.model.small import (
    clean_input,
    committed,
    config,
    jitted,
    random_params,
    random_tokens,
)

CFG = config()


def fused(params, cache, rows: int, place=lambda x: x):
    block = random_tokens(CFG, rows, CFG.block_length, seed=1)
    masked = np.random.default_rng(2).random(block.shape) < 0.5
    clean = clean_input(random_tokens(CFG, rows, CFG.block_length), [8, 3])
    call = jitted("commit_and_preview", CFG)
    n_valid = np.array([8, 5], np.int32)
    return call(params, *jax.tree.map(place, (clean, block, masked, n_valid)), cache)


def test_eight_devices_compute_what_one_does():
    rows, params = 2, random_params(CFG)
    want_cache, want, want_stats = fused(params, empty_cache(CFG, rows, 64), rows)
    mesh = make_mesh(2, 2, 2)
    spread = jax.device_put(params, shardings(param_specs(CFG), mesh, AxisRules()))
    by_row = lambda axis: NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))
    cache = jax.device_put(empty_cache(CFG, rows, 64), jax.tree.map(by_row, ROW_AXES))
    with jax.set_mesh(mesh):
        cache, logits, stats = fused(
            spread, cache, rows, lambda a: jax.device_put(jnp.asarray(a), by_row(0))
        )
    assert len(spread.layers.linear.mlp.experts.down_proj.sharding.device_set) == 8
    for r, n in enumerate((8, 5)):
        assert_close("logits", f"row {r}", logits[r, :n], want[r, :n])
    for part, tensor in committed(cache).items():
        assert_close("continuation", part, tensor, committed(want_cache)[part])
    np.testing.assert_array_equal(stats.router.touched, want_stats.router.touched)


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


def test_what_does_not_fit_is_named():
    with pytest.raises(CloverError, match="mesh 4x4x1 needs 16 devices, here are 8"):
        make_mesh(4, 4, 1)
    odd = ParamSpec((3, 4), ("heads", None), zeros, jnp.float32)
    with pytest.raises(CloverError, match="axis heads of size 3 does not divide over 2"):
        shardings(odd, make_mesh(1, 1, 2), AxisRules())
    with pytest.raises(CloverError, match=r"no sharding rule for axis .*'wings'"):
        AxisRules().spec(("wings",))
    with pytest.raises(CloverError, match="use a mesh axis twice"):
        AxisRules().spec(("heads", "channels"))
