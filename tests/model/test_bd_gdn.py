"""The block operator, every switch of it, against the formula in numpy loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import BDGDNConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.bd_gdn import block_gdn
from clover_jax.model.deltanet import PrefixState, causal_gdn, gdn_specs
from tests.helpers.limits import assert_close
from tests.model import oracle
from tests.model.small import QUICK, config, random_tree

CFG, ROWS, PREFIX, BLOCK = config(), 2, 7, 6
N_VALID = (BLOCK, 4)
NAMES = ("output", "values", "share")
PARAMS = jax.tree.map(jnp.asarray, random_tree(gdn_specs(CFG)))
SWITCHES = {
    "clover": {},
    "logit scale is stored as its log": {"logit_scale": "exp"},
    "logit scale through softplus": {"logit_scale": "softplus"},
    "history logit from the read": {"history_logit": "read_norm"},
    "scaled read": {"history_query": "scaled"},
    "scaled read in the logit": {"history_query": "scaled", "history_logit": "read_norm"},
    "beta in the values": {"block_value": "beta"},
    "decay bias": {"block_bias": "decay"},
    "history dropped at an empty prefix": {"empty_history": "drop"},
    "no right conv": {"right_conv": False},
    "right taps reversed": {"right_order": "next_last"},
    "causal": {"operator": "causal"},
    "causal, no right conv": {"operator": "causal", "right_conv": False},
    "two directions": {"operator": "two_direction"},
    "read added": {"operator": "added"},
    "scaled read added, decay bias": {
        "operator": "added",
        "history_query": "scaled",
        "block_bias": "decay",
    },
    "no history": {"operator": "no_history"},
}


causal_layer = jax.jit(causal_gdn, static_argnames=("cfg", "env"), compiler_options=QUICK)
block_layer = jax.jit(block_gdn, static_argnames=("cfg", "env"), compiler_options=QUICK)


def inputs():
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return draw(ROWS, PREFIX, CFG.hidden_size), draw(ROWS, BLOCK, CFG.hidden_size)


def real_prefix():
    """State and ring that a causal pass leaves, ours and the oracle's, per row."""
    x, _ = inputs()
    d = CFG.delta
    empty = PrefixState(
        jnp.zeros((ROWS, d.num_value_heads, d.key_head_dim, d.value_head_dim), jnp.float32),
        jnp.zeros((ROWS, d.conv_kernel - 1, d.conv_channels), jnp.float32),
    )
    valid = jnp.ones((ROWS, PREFIX), bool)
    out, _, after, _ = causal_layer(PARAMS, jnp.asarray(x), valid, empty, cfg=CFG, env=Env())
    p, want = oracle_params(), []
    for row in x.astype(np.float64):
        state, ring = np.zeros(empty.state.shape[1:]), np.zeros(empty.ring.shape[1:])
        outputs = []
        for token in row:
            y, state, ring = oracle.gdn_token(p, token, state, ring, CFG)
            outputs.append(y)
        want.append((np.stack(outputs), state, ring))
    return out, after, want


def oracle_params():
    as_float64 = {n: np.asarray(a, np.float64) for n, a in vars(PARAMS).items()}
    return PARAMS.replace(**as_float64)


def test_causal_layer_is_the_recurrence():
    out, after, want = real_prefix()
    for r, (outputs, state, ring) in enumerate(want):
        assert_close("layer", f"output of row {r}", out[r], outputs)
        assert_close("layer", f"state of row {r}", after.state[r], state)
        assert_close("layer", f"ring of row {r}", after.ring[r], ring)


@pytest.mark.parametrize("empty", (False, True), ids=("after a prefix", "empty prefix"))
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_block_layer_is_the_formula(switches, empty):
    cfg = CFG.replace(bd_gdn=BDGDNConfig(**switches))
    _, prefix, wanted = real_prefix()
    if empty:
        prefix = PrefixState(*(jnp.zeros_like(a) for a in prefix))
        wanted = [(None, np.zeros_like(s), np.zeros_like(ring)) for _, s, ring in wanted]
    _, x = inputs()
    valid = np.arange(BLOCK)[None] < np.array(N_VALID)[:, None]
    out, values, share = block_layer(
        PARAMS,
        jnp.asarray(x)[:, None],
        jnp.asarray(valid)[:, None],
        prefix,
        None,
        jnp.full((ROWS, 1), empty),
        cfg=cfg,
        env=Env(),
    )
    p = oracle_params()
    for r, n in enumerate(N_VALID):
        _, state, ring = wanted[r]
        want = oracle.gdn_block(p, x[r, :n].astype(np.float64), state, ring, empty, cfg)
        for name, a, b in zip(NAMES, (out, values, share), want, strict=True):
            assert_close("layer", f"{name} of row {r}", a[r, 0, :n], b)


def test_every_switch_matters():
    """No two variants agree, so that a switch cannot be lost on the way."""
    _, prefix, _ = real_prefix()
    _, x = inputs()
    valid, outputs = jnp.ones((ROWS, 1, BLOCK), bool), []
    for switches in SWITCHES.values():
        cfg = CFG.replace(bd_gdn=BDGDNConfig(**switches))
        empty = jnp.asarray([[False], [True]])
        call = block_layer(
            PARAMS, jnp.asarray(x)[:, None], valid, prefix, None, empty, cfg=cfg, env=Env()
        )
        outputs.append(np.asarray(call[0]))
    for i, a in enumerate(outputs):
        for b in outputs[:i]:
            assert np.abs(a - b).max() > 1e-3


def test_causal_operator_is_the_causal_layer():
    """Without its right taps the causal rival runs the base's layer."""
    cfg = CFG.replace(bd_gdn=BDGDNConfig(operator="causal", right_conv=False))
    _, prefix, _ = real_prefix()
    _, x = inputs()
    x, valid = jnp.asarray(x), jnp.ones((ROWS, BLOCK), bool)
    empty = jnp.zeros((ROWS, 1), bool)
    want, *_ = causal_layer(PARAMS, x, valid, prefix, cfg=cfg, env=Env())
    got, *_ = block_layer(
        PARAMS, x[:, None], valid[:, None], prefix, None, empty, cfg=cfg, env=Env()
    )
    assert_close("layer", "output", got[:, 0], want)


@pytest.mark.parametrize("chunk", (1, 3, 64))
def test_chunk_length_does_not_matter(chunk):
    x = jnp.asarray(np.concatenate(inputs(), axis=1))
    _, prefix, _ = real_prefix()
    valid = np.arange(x.shape[1])[None] < np.array([x.shape[1], 5])[:, None]
    run = lambda c: causal_layer(
        PARAMS, x, jnp.asarray(valid), prefix, cfg=CFG.replace(**{"delta.chunk": c}), env=Env()
    )
    (want, _, want_after, _), (got, _, after, _) = run(CFG.delta.chunk), run(chunk)
    for r, n in enumerate(np.sum(valid, axis=1)):
        assert_close("layer", f"output of row {r}", got[r, :n], want[r, :n])
    assert_close("layer", "state", after.state, want_after.state)
    np.testing.assert_array_equal(after.ring, want_after.ring)


def test_reference_kernels_serve_the_layer():
    _, prefix, _ = real_prefix()
    _, x = inputs()
    x, valid = jnp.asarray(x), jnp.ones((ROWS, BLOCK), bool)
    env = Env(impls=(("gated_delta", "reference"), ("state_fusion", "reference")))
    for name, run in (
        ("causal", lambda e: causal_layer(PARAMS, x, valid, prefix, cfg=CFG, env=e)[0]),
        (
            "block",
            lambda e: block_layer(
                PARAMS, x[:, None], valid[:, None], prefix, None, jnp.zeros((ROWS, 1), bool),
                cfg=CFG, env=e,
            )[0],
        ),
    ):  # fmt: skip
        assert_close("layer", name, run(env), run(Env()))


def test_a_base_model_has_no_block_operator():
    cfg = CFG.replace(bd_gdn=None)
    _, prefix, _ = real_prefix()
    x = jnp.zeros((ROWS, 1, BLOCK, CFG.hidden_size), jnp.float32)
    with pytest.raises(CloverError, match="bd_gdn is null"):
        block_gdn(
            PARAMS, x, jnp.ones((ROWS, 1, BLOCK), bool), prefix, None, jnp.zeros((ROWS, 1), bool),
            cfg=cfg, env=Env(),
        )  # fmt: skip
