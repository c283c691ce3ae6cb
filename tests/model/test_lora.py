"""Low-rank adapters: start, merge and their gradients, against formulas written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.errors import CloverError
from clover_jax.model.attention import attention_inputs, attention_output
from clover_jax.model.leaves import choose, known_kinds, leaf_kind, matrix_axes
from clover_jax.model.lora import SETS, LoRAConfig, LowRank, init, merge, size, unstack_adapter
from clover_jax.model.rope import rope_tables
from clover_jax.model.transformer import param_specs, restack, unstack
from clover_jax.params import abstract, named_leaves, path_name
from clover_jax.presets import clover_35b_a3b, qwen36_35b_a3b
from tests.checkpoint.folders import assert_same
from tests.helpers.limits import assert_close
from tests.model.small import config, random_tree

CFG = config(full_attention_interval=2)  # four layers in two groups
LORA = LoRAConfig(rank=3, alpha=5.0, targets=("linear", "lm_head"), train=("block", "norms"))
KEPT = {
    "embed_tokens",
    "linear_attn.conv1d",
    "linear_attn.A_log",
    "linear_attn.dt_bias",
    "mlp.gate",
}


@functools.cache
def weights(stacked: bool = True):
    params = jax.tree.map(jnp.asarray, random_tree(param_specs(CFG)))
    return params if stacked else unstack(params)


# Compiled once: one by one, the operations of all leaves take much longer.
started = jax.jit(init, static_argnames="lora")
merged = jax.jit(merge, static_argnames="lora")


@functools.cache
def adapter(stacked: bool = True, changed: bool = True):
    """At its start, or with random values everywhere."""
    start = started(weights(stacked), lora=LORA, key=jax.random.key(7))
    rng = np.random.default_rng(0)
    noise = lambda a: a + jnp.asarray(0.1 * rng.normal(size=a.shape), jnp.float32)
    return jax.tree.map(noise, start) if changed else start


def by_name(tree):
    """Path -> leaf, the two factors together."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, LowRank))
    return {path_name(path): leaf for path, leaf in flat}


def matrices(weight, kind: str) -> np.ndarray:
    """A weight as [stack, in, out], in float64."""
    inputs, outputs = matrix_axes(kind)
    shape = weight.shape
    stack = int(np.prod(shape[: len(shape) - inputs - outputs]))
    width = int(np.prod(shape[len(shape) - outputs :]))
    return np.asarray(weight, np.float64).reshape(stack, -1, width)


def factors(change: LowRank, stack: int) -> tuple[np.ndarray, np.ndarray]:
    """[stack, in, rank] and [stack, rank, out], in float64."""
    a, b = (np.asarray(x, np.float64) for x in (change.lora_A, change.lora_B))
    return a.reshape(stack, -1, LORA.rank), b.reshape(stack, LORA.rank, -1)


# --- start and merge ------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", (True, False))
def test_a_new_adapter_changes_no_bit(stacked):
    assert_same(merged(weights(stacked), adapter(stacked, False), lora=LORA), weights(stacked))


def test_a_new_adapter_changes_no_bit_of_bfloat16():
    """And is float32 itself, so that small updates are not lost."""
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights())
    start = started(half, lora=LORA, key=jax.random.key(0))
    assert {a.dtype for a in jax.tree.leaves(start)} == {jnp.dtype(jnp.float32)}
    assert_same(merged(half, start, lora=LORA), half)


@pytest.mark.parametrize("stacked", (True, False))
def test_start_values(stacked):
    """lora_A fills ±1 / sqrt(inputs), in every leaf differently; lora_B is zero."""
    firsts = []
    for name, leaf in by_name(adapter(stacked, False)).items():
        weight = named_leaves(weights(stacked))[name]
        if not isinstance(leaf, LowRank):
            np.testing.assert_array_equal(leaf, weight, err_msg=name)
            continue
        w = matrices(weight, leaf_kind(name))
        a, b = factors(leaf, len(w))
        bound = w.shape[1] ** -0.5
        assert 0.9 * bound < np.abs(a).max() <= bound, name
        assert abs(a.mean()) < 0.2 * bound, name
        assert not b.any(), name
        firsts.append(a[0, 0, 0] / bound)
    assert len(set(firsts)) == len(firsts) > 20


@pytest.mark.parametrize("stacked", (True, False))
def test_merged_weights_are_numpys(stacked):
    """W + alpha / rank · A B, matrix by matrix; other leaves are taken over or kept."""
    got = named_leaves(merged(weights(stacked), adapter(stacked), lora=LORA))
    changes, kept = by_name(adapter(stacked)), set()
    for name, weight in named_leaves(weights(stacked)).items():
        kind, change = leaf_kind(name), changes.get(name)
        if isinstance(change, LowRank):
            w = matrices(weight, kind)
            a, b = factors(change, len(w))
            assert_close("op", name, matrices(got[name], kind), w + 5 / 3 * a @ b)
        else:
            want = weight if change is None else change
            np.testing.assert_array_equal(got[name], want, err_msg=name)
            kept |= {kind} if change is None else set()
    assert kept == KEPT


def test_merged_attention_is_a_two_term_forward():
    """x W + s (x A) B through each projection, heads and all."""
    layer, sum_of_both = (
        jax.tree.map(lambda a: a[1], tree.layers.full.self_attn)
        for tree in (weights(), merged(weights(), adapter(), lora=LORA))
    )
    change = jax.tree.map(lambda a: a[1], adapter().layers.full.self_attn)
    x = jax.random.normal(jax.random.key(0), (2, 5, CFG.hidden_size), jnp.float32)
    s = jnp.float32(LORA.scale)
    two = lambda w, c: (
        jnp.einsum("...td,dhc->...thc", x, w)
        + s * jnp.einsum("...tr,rhc->...thc", x @ c.lora_A, c.lora_B)
    )
    at = jnp.zeros((2, 5), jnp.int32)
    rope = rope_tables(at, rotary_dim=8, theta=CFG.attention.rope_theta)
    # Norms are trained in full: v and the gate have none before them.
    _, _, v, gate = attention_inputs(sum_of_both, x, rope, cfg=CFG)
    assert_close("op", "v", v, two(layer.v_proj, change.v_proj))
    assert_close("op", "gate", gate, jnp.split(two(layer.q_proj, change.q_proj), 2, axis=-1)[1])
    mixed = jax.random.normal(jax.random.key(1), gate.shape, jnp.float32)
    y = mixed * jax.nn.sigmoid(gate)
    thin = jnp.einsum("...thc,hcr->...tr", y, change.o_proj.lora_A)
    want = jnp.einsum("...thc,hcd->...td", y, layer.o_proj) + s * thin @ change.o_proj.lora_B
    assert_close("op", "output", attention_output(sum_of_both, mixed, gate), want)


def test_gradients_are_those_of_the_weights_seen_through_the_factors():
    """dL/dA = s dL/dW B^T, dL/dB = s A^T dL/dW, and dL/dW itself where a leaf is trained whole."""
    rng = np.random.default_rng(1)
    pull = jax.tree.map(lambda w: rng.normal(size=w.shape).astype(np.float32), weights())

    def loss(change):
        whole = merge(weights(), change, LORA)
        return sum(jax.tree.leaves(jax.tree.map(lambda w, g: jnp.sum(w * g), whole, pull)))

    grads, pulls = by_name(jax.jit(jax.grad(loss))(adapter())), named_leaves(pull)
    assert grads.keys() == by_name(adapter()).keys()
    for name, change in by_name(adapter()).items():
        if not isinstance(change, LowRank):
            assert_close("op", name, grads[name], pulls[name])
            continue
        dw = matrices(pulls[name], leaf_kind(name))
        a, b = factors(change, len(dw))
        da, db = factors(grads[name], len(dw))
        assert_close("op", f"{name} A", da, 5 / 3 * dw @ b.swapaxes(1, 2))
        assert_close("op", f"{name} B", db, 5 / 3 * a.swapaxes(1, 2) @ dw)


def test_stacking_and_unstacking():
    """Also where no GDN layer has a change, from which the number of layers could be read."""
    assert_same(restack(unstack_adapter(adapter(), CFG), CFG), adapter())
    assert_same(
        merged(weights(False), unstack_adapter(adapter(), CFG), lora=LORA),
        unstack(merged(weights(), adapter(), lora=LORA)),
    )
    lora = LoRAConfig(targets=("attention",))
    change = started(weights(), lora=lora, key=jax.random.key(0))
    apart = unstack_adapter(change, CFG)
    assert len(apart.layers) == 4
    assert_same(restack(apart, CFG), change)
    assert unstack_adapter(apart, CFG) is apart


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "trained", "gigabytes"),
    [
        # rank · (in + out) of every matrix, and bytes of the matrices in bfloat16
        (
            ("attention", "gdn"),
            16 * (30 * (2048 + 8192 + 2048 + 4096 + 4096 + 2048)
                  + 10 * (2048 + 8192 + 2 * (2048 + 512) + 4096 + 2048)),
            2.56,
        ),
        (("shared_expert",), 16 * 40 * 3 * (2048 + 512), 0.25),
        (("experts",), 16 * 40 * 256 * (2048 + 1024 + 512 + 2048), 64.4),
    ],
)  # fmt: skip
def test_size_of_adapters_of_the_35b(targets, trained, gigabytes):
    """The figures of `merge`'s docstring."""
    params = abstract(param_specs(clover_35b_a3b()))
    lora = LoRAConfig(rank=16, targets=targets)
    got = size(params, jax.eval_shape(lambda p, k: init(p, lora, k), params, jax.random.key(0)))
    assert got.trained == trained
    assert got.total == 34_661_350_848
    assert got.merged_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


# --- names ----------------------------------------------------------------------------------------


def test_names_choose_leaves():
    kinds = known_kinds()
    chosen = lambda *names: choose(names, kinds, "test")
    assert chosen("q_proj") == {"self_attn.q_proj"}
    assert chosen("down_proj") == {"mlp.experts.down_proj", "mlp.shared_expert.down_proj"}
    assert chosen("experts.down_proj") == {"mlp.experts.down_proj"}
    assert chosen("norm") == {"norm"}  # not the GDN layers' norm
    assert chosen("gate") == {"mlp.gate"}  # not the shared expert's
    assert len(chosen("bd_softmax_*")) == 3
    assert chosen() == frozenset()


def test_kinds_of_leaves():
    assert leaf_kind("layers.linear.linear_attn.norm") == "linear_attn.norm"
    assert leaf_kind("layers.full.self_attn.q_proj") == "self_attn.q_proj"
    assert leaf_kind("layers.17.mlp.gate") == "mlp.gate"
    assert leaf_kind("lm_head") == "lm_head"
    stacked, apart = ({*map(leaf_kind, named_leaves(weights(s)))} for s in (True, False))
    assert stacked == apart == {*known_kinds()}


@pytest.mark.parametrize("name", SETS)
def test_every_set_has_leaves(name):
    matrix = name not in ("block", "norms", "router")
    low_rank, whole = LoRAConfig(
        **{"targets": (), ("targets", "train")[not matrix]: (name,)}
    ).select(known_kinds())
    chosen, other = (low_rank, whole) if matrix else (whole, low_rank)
    assert len(chosen) >= (1 if name == "router" else 2) and not other


BAD = {
    "unknown target": (
        {"targets": ("q_prj",)},
        "targets names 'q_prj': expected names of .*q_proj",
    ),
    "no matrix": ({"targets": ("A_log",)}, "targets names 'A_log'"),
    "unknown leaf": ({"train": ("bias",)}, "train names 'bias': expected names of .*A_log"),
    "both": ({"train": ("o_proj",)}, "both name self_attn.o_proj"),
    "nothing": ({"targets": ()}, "nothing to train"),
    "rank": ({"rank": 0}, "rank is 0"),
    "alpha": ({"alpha": 0.0}, "alpha is 0.0"),
    "alpha is no number": ({"alpha": float("nan")}, "alpha is nan"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(CloverError, match=message):
        LoRAConfig(**changes)


def test_leaves_that_this_model_does_not_have():
    params = abstract(param_specs(qwen36_35b_a3b().replace(tie_word_embeddings=True)))
    for changes, name in (({"targets": ("lm_head",)}, "lm_head"), ({"train": ("block",)}, "bd_")):
        lora = LoRAConfig(**changes)
        with pytest.raises(CloverError, match=name):
            jax.eval_shape(lambda p, k, lora=lora: init(p, lora, k), params, jax.random.key(0))
