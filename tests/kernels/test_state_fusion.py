"""The operator of a GDN layer in a preview, every switch of it, against loops in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.sharding import AxisRules, make_mesh
from pallas_kernels.state_fusion import Switches, state_fusion
from pallas_kernels.state_fusion.contract import AXES, OUT_AXES, by_shard
from pallas_kernels.state_fusion.specs import CLOVER, COSTLIEST, SPECS
from tests.helpers.limits import assert_close

KEY_HEADS, GROUP, KEY, VALUE, TAPS = 2, 2, 6, 3, 4
# Machine code that is not optimised compiles in half the time.
QUICK = {"xla_backend_optimization_level": 0}
NAMES = tuple(AXES)
FLOATS = NAMES[: NAMES.index("valid")]
# One by one they are tested through the model, in tests/model/test_bd_gdn.py.
SWITCHES = {
    "clover": {},
    "exp scale, empty dropped": {"logit_scale": "exp", "empty_history": "drop"},
    "scaled read, beta values": {"history_query": "scaled", "block_value": "beta"},
    "added, decay bias": {"operator": "added", "block_bias": "decay"},
    "no history, taps reversed": {"operator": "no_history", "right_order": "next_last"},
    "costliest": COSTLIEST._asdict(),
}


def inputs(
    n_valid: tuple[int, ...] = (5, 3, 0), block: int = 5, *, key_heads: int = KEY_HEADS,
    key: int = KEY, value: int = VALUE, taps: int = TAPS, seed: int = 0, sharp: float = 1,
) -> dict[str, np.ndarray]:  # fmt: skip
    """What stands at a position that is not valid is NaN; every second prefix is empty."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    rows, heads = len(n_valid), key_heads * GROUP
    channels = 2 * key_heads * key + heads * value
    valid = np.arange(block)[None] < np.array(n_valid)[:, None]
    poison = lambda x: np.where(valid[..., None], x, np.float32(np.nan))
    return {
        "ring": draw(rows, taps - 1, channels),
        "block_qkv": poison(draw(rows, block, channels)),
        "taps": draw(taps, channels),
        "right_taps": draw(taps - 1, channels),
        "state": draw(rows, heads, key, value),
        "g": poison(-np.abs(draw(rows, block, heads))),
        "beta": poison(rng.uniform(size=(rows, block, heads)).astype(np.float32)),
        "logit_scale": np.float32(sharp) * draw(heads),
        "history_bias": draw(heads),
        "history_c": draw(heads),
        "valid": valid,
        "empty": np.arange(rows) % 2 == 1,
    }


def loop(x: dict[str, np.ndarray], s: Switches, key_heads: int = KEY_HEADS):
    """Values [rows, block, heads, value] and share, position by position."""
    x = {n: a.astype(np.float64) if a.dtype != bool else a for n, a in x.items()}
    rows, n, _ = x["block_qkv"].shape
    heads, key, value = x["state"].shape[1:]
    silu = lambda a: a / (1 + np.exp(-a))
    unit = lambda a: a / np.sqrt((a * a).sum() + 1e-6)
    out, share = np.zeros((rows, n, heads, value)), np.zeros((rows, n, heads))
    right = x["right_taps"] if s.right_order == "next_first" else x["right_taps"][::-1]
    for r in range(rows):
        keep = x["valid"][r]
        there = lambda name: np.where(keep[:, None], x[name][r], 0)  # noqa: B023
        pre, g, beta = there("block_qkv"), there("g"), there("beta")
        window = np.concatenate([x["ring"][r], pre])
        mixed = np.zeros_like(pre)
        for t in range(n):
            for j in range(len(x["taps"])):
                mixed[t] += window[t + j] * x["taps"][j]
            for d in range(len(right)):
                mixed[t] += pre[t + d + 1] * right[d] if t + d + 1 < n else 0
        mixed, c, count = silu(mixed), np.cumsum(g, axis=0), max(int(keep.sum()), 1)
        for h in range(heads):
            at = h // GROUP * key
            q = [unit(row[at : at + key]) for row in mixed]
            k = [unit(row[key_heads * key + at :][:key]) for row in mixed]
            v = [row[2 * key_heads * key + h * value :][:value] for row in mixed]
            how = {"plain": float, "exp": np.exp, "softplus": lambda a: np.logaddexp(0, a)}
            scale = how[s.logit_scale](x["logit_scale"][h])
            for i in range(n):
                read = x["state"][r, h].T @ q[i]
                read = read if s.history_query == "unit" else read / np.sqrt(key)
                score = np.log(count)
                if s.history_logit == "read_norm":
                    score = np.log(1 + np.sqrt(read @ read))
                slot = x["history_bias"][h] + x["history_c"][h] * score
                slot += c[i, h] if s.block_bias == "decay" else 0
                if s.operator != "state_slot" or (s.empty_history == "drop" and x["empty"][r]):
                    slot = -np.inf
                keys = [j for j in range(n) if keep[j]]
                logits = [slot]
                for j in keys:
                    bias = -abs(c[i, h] - c[j, h]) + np.log(beta[j, h] + 1e-6)
                    bias = bias if s.block_bias == "decay" else 0
                    logits.append(scale * (q[i] @ k[j]) + bias)
                w = np.zeros(len(logits))
                if max(logits) > -np.inf:
                    w = np.exp(np.array(logits) - max(logits))
                    w /= w.sum()
                share[r, i, h] = w[0]
                out[r, i, h] = read if s.operator == "added" else w[0] * read
                for weight, j in zip(w[1:], keys, strict=True):
                    out[r, i, h] += weight * v[j] * (beta[j, h] if s.block_value == "beta" else 1)
    return out, share


@functools.partial(
    jax.jit, static_argnames=("switches", "impl", "key_heads"), compiler_options=QUICK
)
def run(x, *, switches=CLOVER, impl, key_heads=KEY_HEADS):
    args = (x[name] for name in NAMES)
    return state_fusion(*args, key_heads=key_heads, switches=switches, impl=impl)


@functools.partial(
    jax.jit, static_argnames=("switches", "impl", "key_heads"), compiler_options=QUICK
)
def gradients(x, weights, *, switches, impl, key_heads=KEY_HEADS):
    """Of a weighted sum of both results, by name."""

    def weighted(floats):
        args = ({**x, **floats}[name] for name in NAMES)
        out = state_fusion(*args, key_heads=key_heads, switches=switches, impl=impl)
        return sum(jnp.sum(a * w) for a, w in zip(out, weights, strict=True))

    return jax.grad(weighted)({n: x[n] for n in FLOATS})


def weights_like(results, seed=1):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=a.shape).astype(np.float32) for a in results)


def assert_same(name, got, want):
    assert_close("op", f"{name} out", got[0], want[0])
    assert_close("op", f"{name} share", got[1], want[1])


@pytest.mark.parametrize("changes", SWITCHES.values(), ids=SWITCHES)
def test_the_formula(changes):
    switches, x = CLOVER._replace(**changes), inputs()
    want = loop(x, switches)
    for impl in ("reference", "xla"):
        assert_same(impl, run(x, switches=switches, impl=impl), want)


@pytest.mark.parametrize("name", ("clover", "added, decay bias", "costliest"))
def test_gradients(name):
    switches, x = CLOVER._replace(**SWITCHES[name]), inputs()
    weights = weights_like(run(x, switches=switches, impl="xla"))
    grads = [gradients(x, weights, switches=switches, impl=i) for i in ("xla", "reference")]
    for name in FLOATS:
        assert_close("gradient", f"gradient of {name}", *(g[name] for g in grads))


def test_without_right_taps():
    x = inputs()
    want = loop({**x, "right_taps": np.zeros_like(x["right_taps"])}, CLOVER)
    for impl in ("reference", "xla"):
        assert_same(impl, run({**x, "right_taps": None}, impl=impl), want)


def test_large_logits():
    """A slot that takes all or nothing: nothing overflows, and the gradient is finite."""
    x = inputs((5,), sharp=1e3)
    x["history_bias"] = np.array([500, -500, 0, 1e4], np.float32)
    want = loop(x, CLOVER)
    for impl in ("reference", "xla"):
        assert_same(impl, run(x, impl=impl), want)
        grads = gradients(x, weights_like(want), switches=CLOVER, impl=impl)
        assert all(np.isfinite(g).all() for g in grads.values())


def test_gradient_is_the_loops_finite_difference():
    x = inputs((5, 3))
    weights = weights_like(loop(x, COSTLIEST))
    grads = gradients(x, weights, switches=COSTLIEST, impl="reference")
    value = lambda y: sum((a * w).sum() for a, w in zip(loop(y, COSTLIEST), weights, strict=True))
    rng = np.random.default_rng(3)
    for name in FLOATS:
        direction = np.where(np.isnan(x[name]), 0, rng.normal(size=x[name].shape))
        at = lambda e: value({**x, name: x[name] + e * direction})  # noqa: B023
        slope = (at(1e-5) - at(-1e-5)) / 2e-5
        along = np.sum(np.asarray(grads[name], np.float64) * direction)
        assert along == pytest.approx(slope, rel=1e-4, abs=1e-4), name


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(((1, 1, 2), (3, 4, 4), (2, 9, 3))),
    switches=st.sampled_from((CLOVER, COSTLIEST)),
    data=st.data(),
)
def test_any_rows_are_served_alone(shape, switches, data):
    """Ragged, one position, all masked, masks with holes, empty prefixes."""
    rows, block, taps = shape
    x = inputs((block,) * rows, block, taps=taps, seed=data.draw(st.integers(0, 99)))
    x["valid"] = np.array(data.draw(st.lists(
        st.lists(st.booleans(), min_size=block, max_size=block), min_size=rows, max_size=rows
    )))  # fmt: skip
    x["empty"] = np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    x["state"] = np.where(x["empty"][:, None, None, None], np.float32(0), x["state"])
    want = run(x, switches=switches, impl="reference")
    assert_same("xla", run(x, switches=switches, impl="xla"), want)


@pytest.mark.parametrize("spec", [s for s in SPECS if "test" in s.uses], ids=lambda s: s.name)
def test_specs(spec):
    arrays = spec.inputs(jax.random.key(1))
    call = lambda f: jax.jit(f, compiler_options=QUICK)(*arrays)
    want = call(functools.partial(spec.call, impl="reference"))
    assert_same("xla", call(functools.partial(spec.call, impl="xla")), want)
    if spec.naive is not None:
        assert_same("naive", call(spec.naive), want)


def test_bfloat16_inputs_are_converted_first():
    x = inputs((5,))
    names = ("ring", "block_qkv", "taps", "right_taps")
    half = {n: jnp.asarray(x[n], jnp.bfloat16) for n in names}
    want = run({**x, **{n: a.astype(jnp.float32) for n, a in half.items()}}, impl="reference")
    for impl in ("reference", "xla"):
        assert_same(impl, run({**x, **half}, impl=impl), want)


def test_eight_devices_compute_what_one_does():
    """Heads and rows split: the channels are dealt first, so that a part has whole heads."""
    rows, ways = 4, 2
    x = inputs((5, 3, 4, 0))
    want = run(x, switches=COSTLIEST, impl="xla")
    mesh, rules = make_mesh(rows, 1, ways), AxisRules()
    deal = lambda a: by_shard(jnp.asarray(a), ways, key_channels=KEY_HEADS * KEY)
    dealt = {n: deal(a) if "channels" in AXES[n] else a for n, a in x.items()}
    local = functools.partial(
        state_fusion, key_heads=KEY_HEADS // ways, switches=COSTLIEST, impl="xla"
    )
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(rules.spec(axes) for axes in AXES.values()),
        out_specs=tuple(rules.spec(axes) for axes in OUT_AXES),
    )
    assert_same("sharded", jax.jit(sharded)(*dealt.values()), want)


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({}, {"key_heads": 3}, "key_heads is 3: expected a divisor of the 4 value heads"),
        ({"taps": np.zeros((3, 36), np.float32)}, {}, "rows of ring is 3: expected 2, one fewer"),
        ({}, {"key_heads": 1}, "channels of block_qkv is 36: expected 24: q | k of 1 heads"),
        ({}, {"switches": CLOVER._replace(operator="causal")},
         "switch operator is 'causal': expected one of state_slot, added, no_history"),
        ({"ring": jnp.zeros((3, 3, 36), jnp.bfloat16)}, {},
         "dtype of ring is bfloat16: expected that of block_qkv, float32"),
        ({}, {"impl": "cuda"}, "cannot run as 'cuda': implementations are reference, xla"),
        ({}, {"impl": "pallas_tpu"}, "it needs a tpu and this is a cpu"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changes, options, text):
    x = {**inputs(), **changes}
    options = {"key_heads": KEY_HEADS, "switches": CLOVER, "impl": "xla", **options}
    call = getattr(state_fusion, "__wrapped__", state_fusion)
    with pytest.raises(ValueError) as error:
        call(*(None if a is None else jnp.asarray(a) for a in x.values()), **options)
    assert text in str(error.value)
