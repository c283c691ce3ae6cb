"""The ladder of parity with transformers: ops, layers on its own inputs, the stack, logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.env import Env
from clover_jax.model.attention import attention_inputs, attention_output
from clover_jax.model.block import (
    CleanLayout,
    LayerIndex,
    Layout,
    Streams,
    full_layer,
    linear_layer,
)
from clover_jax.model.deltanet import PrefixState, causal_conv, causal_gdn, gdn_inputs, split_heads
from clover_jax.model.moe import moe
from clover_jax.model.norm import rms_norm
from clover_jax.model.rope import apply_rope, rope_tables
from clover_jax.model.transformer import extend
from pallas_kernels.block_attention import block_attention
from tests.helpers.limits import KL, TOP1_MARGIN, assert_close
from tests.model import golden
from tests.model.small import QUICK

CFG, ENV = golden.config(), Env()
PREFILL = 43  # then one token at a time
LINEAR = [i for i in range(CFG.num_layers) if (i + 1) % CFG.full_attention_interval]
FULL = [i for i in range(CFG.num_layers) if i not in LINEAR]
quick = functools.partial(jax.jit, compiler_options=QUICK)


@pytest.fixture(scope="module")
def want() -> dict[str, np.ndarray]:
    return golden.tensors()


def layout(rows: int, time: int) -> Layout:
    at = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), (rows, time))
    a = CFG.attention
    rope = rope_tables(at, rotary_dim=a.rotary_dim, theta=a.rope_theta)
    start = jnp.zeros((rows,), jnp.int32)
    return Layout(CleanLayout(start, jnp.ones((rows, time), bool), rope), None)


@quick
def gdn_ops(p, x):
    inputs = gdn_inputs(p, x, jnp.ones(x.shape[:2], bool))
    window = jnp.pad(inputs.qkv, ((0, 0), (CFG.delta.conv_kernel - 1, 0), (0, 0)))
    q, k, v = split_heads(causal_conv(window, p.conv1d), CFG)
    return {"q": q, "k": k, "v": v, "beta": inputs.beta, "g": inputs.g}


@quick
def gdn_mixer(p, x):
    d, rows = CFG.delta, x.shape[0]
    prefix = PrefixState(
        jnp.zeros((rows, d.num_value_heads, d.key_head_dim, d.value_head_dim), jnp.float32),
        jnp.zeros((rows, d.conv_kernel - 1, d.conv_channels), jnp.float32),
    )
    out, o, after, _ = causal_gdn(p, x, jnp.ones(x.shape[:2], bool), prefix, cfg=CFG, env=ENV)
    return out, o, after


@quick
def attention_mixer(p, x):
    clean = layout(*x.shape[:2]).clean
    q, k, v, gate = attention_inputs(p, x, clean.rope, cfg=CFG)
    limit = jnp.broadcast_to(jnp.arange(1, x.shape[1] + 1), x.shape[:2])
    cells = lambda a: jnp.moveaxis(a, 1, 2)[None]
    mixed = block_attention(
        q, cells(k), cells(v), 0, limit, None,
        scale=CFG.attention.head_dim**-0.5, impl="xla",
    )  # fmt: skip
    return attention_output(p, mixed, gate)


@quick
def moe_layer(p, x):
    return moe(p, x, jnp.ones(x.shape[:2], bool), None, None, cfg=CFG, env=ENV)


@quick
def whole_layer(p, x):
    at, lay = LayerIndex(0, 0, None), layout(*x.shape[:2])
    call = linear_layer if hasattr(p, "linear_attn") else full_layer
    return call(p, Streams(x, None), None, at, lay, cfg=CFG, env=ENV)[0].clean


@pytest.mark.parametrize("i", LINEAR)
def test_gdn_ops(want, i):
    got = gdn_ops(golden.layers()[i].linear_attn, want[f"layers.{i}.mixer_in"])
    for name, tensor in got.items():
        assert_close("op", f"layer {i} {name}", tensor, want[f"layers.{i}.{name}"])


def test_norms(want):
    norm = quick(functools.partial(rms_norm, eps=CFG.rms_norm_eps))
    for i, p in list(enumerate(golden.layers()))[1:]:
        got = norm(want[f"hidden.{i - 1}"], p.input_layernorm)
        assert_close("op", f"input norm of layer {i}", got, want[f"layers.{i}.mixer_in"])
        between = want[f"hidden.{i - 1}"] + want[f"layers.{i}.mixer_out"]
        got = norm(between, p.post_attention_layernorm)
        assert_close("op", f"second norm of layer {i}", got, want[f"layers.{i}.moe_in"])
    got = norm(want[f"hidden.{CFG.num_layers - 1}"], golden.params().norm)
    assert_close("op", "final norm", got, want["final_norm"])


def test_rope(want):
    a = CFG.attention
    positions = jnp.asarray(want["rope.positions"])
    cos, sin = rope_tables(positions, rotary_dim=a.rotary_dim, theta=a.rope_theta)
    for name, table in (("cos", cos), ("sin", sin)):  # theirs repeats both halves
        assert_close("op", name, jnp.tile(table, 2), want[f"rope.{name}"])
    got = apply_rope(jnp.asarray(want["rope.q"]), cos, sin)
    assert_close("op", "rotated query", got, want["rope.q_rotated"])


@pytest.mark.parametrize("i", LINEAR)
def test_gdn_mixer(want, i):
    out, o, after = gdn_mixer(golden.layers()[i].linear_attn, want[f"layers.{i}.mixer_in"])
    assert_close("layer", f"layer {i} before the gated norm", o, want[f"layers.{i}.o"])
    assert_close("layer", f"layer {i} mixer", out, want[f"layers.{i}.mixer_out"])
    assert_close("layer", f"layer {i} state", after.state, want[f"layers.{i}.state"])
    ring = want[f"layers.{i}.conv_state"][:, :, 1:].swapaxes(1, 2)
    assert_close("op", f"layer {i} ring", after.ring, ring)


@pytest.mark.parametrize("i", FULL)
def test_attention_mixer(want, i):
    got = attention_mixer(golden.layers()[i].self_attn, want[f"layers.{i}.mixer_in"])
    assert_close("layer", f"layer {i} mixer", got, want[f"layers.{i}.mixer_out"])


@pytest.mark.parametrize("i", range(CFG.num_layers))
def test_moe(want, i):
    got, stats = moe_layer(golden.layers()[i].mlp, want[f"layers.{i}.moe_in"])
    assert_close("layer", f"layer {i} moe", got, want[f"layers.{i}.moe_out"])
    logits = want[f"layers.{i}.router_logits"]
    top = np.sort(np.argsort(-logits, axis=-1)[..., : CFG.moe.top_k], axis=-1)
    for r in range(len(logits)):
        counts = np.bincount(top[r].ravel(), minlength=CFG.moe.num_experts)
        np.testing.assert_array_equal(stats.assigned[r], counts)


def test_hidden_after_every_layer(want):
    """Every layer on our own input, so that errors add up; before, on theirs."""
    x = golden.params().embed_tokens[want["ids"]]
    for i, p in enumerate(golden.layers()):
        theirs = want[f"hidden.{i - 1}"] if i else x
        assert_close("layer", f"layer {i}", whole_layer(p, theirs), want[f"hidden.{i}"])
        x = whole_layer(p, x)
        assert_close("hidden", f"hidden {i}", x, want[f"hidden.{i}"])


def check_logits(name: str, got: np.ndarray, want: np.ndarray) -> None:
    assert_close("logits", name, got, want)
    log_p, log_q = (np.asarray(x, np.float64) for x in (want, got))
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (log_p, log_q))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1).max()
    assert kl <= KL, f"{name}: KL {kl:.2e}"
    best = np.sort(want, axis=-1)
    clear = best[..., -1] - best[..., -2] > TOP1_MARGIN
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


@pytest.fixture(scope="module")
def commit():
    return quick(functools.partial(extend, cfg=CFG, env=ENV, logits="all"))


def test_logits(want, commit):
    rows, time = want["ids"].shape
    n_valid = np.full(rows, time, np.int32)
    out = commit(golden.params(), want["ids"], n_valid, empty_cache(CFG, rows, 128))
    check_logits("logits", np.asarray(out.logits), want["logits"])
    for i in LINEAR:
        g, j = divmod(i, CFG.full_attention_interval)
        state = want[f"layers.{i}.state"]
        assert_close("hidden", f"layer {i} state", out.cache.state[g, j], state)


def test_prefill_then_one_token_at_a_time(want, commit):
    rows, time = want["ids"].shape
    params, n_valid = golden.params(), np.full(rows, PREFILL, np.int32)
    out = commit(params, want["ids"], n_valid, empty_cache(CFG, rows, 128))
    got = [np.asarray(out.logits[:, PREFILL - 1])]
    for t in range(PREFILL, time):
        out = commit(params, want["ids"][:, t : t + 1], np.ones(rows, np.int32), out.cache)
        got.append(np.asarray(out.logits[:, 0]))
    check_logits("continued logits", np.stack(got, axis=1), want["continued.logits"])
