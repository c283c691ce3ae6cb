"""Parameter counts of the released models, start values, and what is derived from specs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import bytes_per_row, bytes_per_token
from clover_jax.model.attention import attention_specs
from clover_jax.model.deltanet import gdn_specs
from clover_jax.model.transformer import param_specs
from clover_jax.params import (
    ParamSpec,
    abstract,
    cast,
    count,
    initialise,
    map_specs,
    named_leaves,
    num_bytes,
    zeros,
)
from clover_jax.presets import clover_35b_a3b, qwen36_35b_a3b
from tests.model.small import config, random_params


def test_qwen36_has_its_published_sizes():
    cfg = qwen36_35b_a3b()
    specs = param_specs(cfg)
    linear, full = specs.layers.linear, specs.layers.full
    both = lambda pick: count([pick(linear), pick(full)])
    norms = both(lambda p: [p.input_layernorm, p.post_attention_layernorm])
    shared = lambda p: [p.mlp.shared_expert, p.mlp.shared_expert_gate]
    assert count(specs.embed_tokens) == count(specs.lm_head) == 508_559_360
    assert count(linear.linear_attn) == 1_011_553_920 == 30 * count(gdn_specs(cfg))
    assert count(full.self_attn) == 272_634_880 == 10 * count(attention_specs(cfg))
    assert both(lambda p: p.mlp.experts) == 32_212_254_720
    assert both(shared) == 125_911_040
    assert both(lambda p: p.mlp.gate) == 20_971_520
    assert norms + count(specs.norm) == 165_888
    assert count(specs) == 34_660_610_688


def test_clover_adds_the_block_operator_only():
    assert count(param_specs(clover_35b_a3b())) == 34_660_610_688 + 740_160


def test_bytes_are_bf16_but_for_what_must_be_float32():
    specs = param_specs(clover_35b_a3b())
    exact = ("gate", "A_log", "dt_bias", "norm", "layernorm", "logit_scale", "history_")
    for name, spec in named_leaves(specs).items():
        last = name.split(".")[-1]
        want = jnp.float32 if any(part in last for part in exact) else jnp.bfloat16
        if last == "shared_expert_gate" or last.startswith("gate_"):
            want = jnp.bfloat16
        assert jnp.dtype(spec.dtype) == want, name
    shapes = jax.tree.leaves(abstract(specs))
    assert num_bytes(specs) == sum(s.size * s.dtype.itemsize for s in shapes)


def test_cache_sizes_are_the_published_ones():
    assert bytes_per_token(qwen36_35b_a3b()) == 20_480
    assert bytes_per_row(qwen36_35b_a3b()) == 62_914_560 + 1_474_560


def test_start_values_depend_on_key_and_path_only():
    cfg, key = config(), jax.random.key(7)
    specs = gdn_specs(cfg)
    first, second = initialise(specs, key), initialise(specs, key)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    other = initialise(specs, jax.random.key(8))
    assert np.abs(np.asarray(first.out_proj - other.out_proj)).max() > 0
    # A neighbour of another shape changes no other leaf.
    wider = specs.replace(in_proj_z=ParamSpec((64, 99), (None, None), zeros, jnp.float32))
    np.testing.assert_array_equal(initialise(wider, key).out_proj, first.out_proj)
    # Leaves of one shape are drawn apart.
    assert np.abs(np.asarray(first.in_proj_a - first.in_proj_b)).max() > 0


def test_start_values_of_the_block_operator_are_neutral():
    p = initialise(gdn_specs(config()), jax.random.key(0))
    assert not np.asarray(p.conv_right_weight).any()
    assert not np.asarray(p.bd_softmax_history_bias).any()
    for name in ("bd_softmax_logit_scale", "bd_softmax_history_c", "norm"):
        np.testing.assert_array_equal(getattr(p, name), 1)
    a, step = np.exp(p.A_log), np.log1p(np.exp(p.dt_bias))
    assert a.min() >= 1 and a.max() <= 16
    assert step.min() >= 0.99e-3 and step.max() <= 0.101


def test_cast_puts_every_leaf_in_its_dtype():
    cfg = config(dtype="bfloat16")
    specs = param_specs(cfg)
    down = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), random_params(config()))
    got = cast(specs, down)
    want = map_specs(lambda s: jnp.dtype(s.dtype), specs)
    jax.tree.map(lambda a, dtype: np.testing.assert_equal(a.dtype, dtype), got, want)
    assert got.layers.linear.linear_attn.A_log.dtype == jnp.float32


def test_specs_name_one_axis_a_dimension():
    with pytest.raises(TypeError, match="declares axes"):
        ParamSpec((2, 3), ("embed",), zeros, jnp.float32)
