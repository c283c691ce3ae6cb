"""Both Pallas kernels of the operator in their interpreters, and lowered for machines not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.state_fusion import pallas_tpu, state_fusion
from pallas_kernels.state_fusion.specs import CLOVER, COSTLIEST, SPECS
from tests.helpers.limits import assert_close
from tests.kernels.test_state_fusion import NAMES, QUICK, assert_same, inputs, run

pytestmark = pytest.mark.slow  # interpreters

jitted = functools.partial(jax.jit, compiler_options=QUICK)

HEAD = {"tpu": 128, "gpu": 64}
PRIMITIVE = {"tpu": "pallas_call", "gpu": "mpmd_map"}
EVERY_CHANNEL_RANGE = {"key_heads": 2}
# One position, one short of a tile of positions, a tile, one more; NaN wherever nothing counts.
CASES = [
    ("tpu", (1,), 1, CLOVER, {}),
    ("tpu", (7, 4), 7, COSTLIEST, EVERY_CHANNEL_RANGE),
    ("tpu", (8, 0), 8, CLOVER._replace(operator="added"), {}),
    ("tpu", (9,), 9, CLOVER._replace(block_bias="decay", block_value="beta"), {"taps": 3}),
    ("gpu", (1,), 1, CLOVER, {}),
    ("gpu", (9, 4), 9, COSTLIEST, {**EVERY_CHANNEL_RANGE, "value": 128}),
    ("gpu", (63, 0), 63, CLOVER._replace(operator="added"), {}),
    ("gpu", (64,), 64, CLOVER._replace(block_bias="decay", block_value="beta"), {"taps": 3}),
]  # fmt: skip


def kernel(machine, switches, key_heads):
    return functools.partial(
        state_fusion, key_heads=key_heads, switches=switches, impl=f"pallas_{machine}"
    )


def small(machine, n_valid, block, **options):
    sizes = {"key_heads": 1, "key": HEAD[machine], "value": HEAD[machine], **options}
    return inputs(n_valid, block, **sizes), sizes["key_heads"]


def arrays(x):
    return [None if x[name] is None else jnp.asarray(x[name]) for name in NAMES]


@pytest.mark.parametrize(("machine", "n_valid", "block", "switches", "options"), CASES)
def test_interpreted(machine, n_valid, block, switches, options, monkeypatch):
    monkeypatch.setattr(pallas_tpu, "STATE_BYTES", 1)  # one key head a step: several steps
    x, key_heads = small(machine, n_valid, block, **options)
    call = kernel(machine, switches, key_heads)
    with compat.interpreted(machine):
        assert PRIMITIVE[machine] in str(jax.make_jaxpr(call)(*arrays(x)))
        got = jitted(call)(*arrays(x))
    want = run(x, switches=switches, impl="reference", key_heads=key_heads)
    assert_same(machine, got, want)


@pytest.mark.parametrize("machine", HEAD)
def test_bfloat16_without_right_taps(machine):
    x, key_heads = small(machine, (5,), 5)
    x |= {n: jnp.asarray(x[n], jnp.bfloat16) for n in ("ring", "block_qkv", "taps")}
    x["right_taps"] = None
    with compat.interpreted(machine):
        got = jitted(kernel(machine, CLOVER, key_heads))(*arrays(x))
    assert_same(machine, got, run(x, impl="reference", key_heads=key_heads))


def test_no_races_on_the_gpu():
    x, key_heads = small("gpu", (5,), 5)
    with compat.interpreted("gpu", detect_races=True):
        got = jitted(kernel("gpu", CLOVER, key_heads))(*arrays(x))
    assert_same("gpu", got, run(x, impl="xla", key_heads=key_heads))


@pytest.mark.parametrize("machine", HEAD)
def test_mapped_and_differentiated(machine):
    """A vmap of the kernel is one kernel of more rows; its gradient is that of xla."""
    x, key_heads = small(machine, (3,), 3)
    mapped = ("ring", "block_qkv", "state", "valid")
    twice = {n: jnp.stack([jnp.asarray(x[n])] * 2) for n in mapped}
    once = {n: jnp.asarray(a) for n, a in x.items() if n not in mapped}

    def value(call, once, parts):
        out, share = call(*arrays({**once, **parts}))
        return jnp.sum(out) + jnp.sum(share)

    def gradients(call):
        slope = jax.grad(functools.partial(value, call), allow_int=True)
        return jitted(jax.vmap(slope, in_axes=(None, 0)))(once, twice)["logit_scale"]

    with compat.interpreted(machine):
        got = gradients(kernel(machine, CLOVER, key_heads))
    xla = functools.partial(state_fusion, key_heads=key_heads, switches=CLOVER, impl="xla")
    assert_close("gradient", "logit_scale", got, gradients(xla))


@pytest.mark.parametrize(("machine", "platform", "target"), [
    ("tpu", "tpu", "tpu_custom_call"), ("gpu", "cuda", "mosaic_gpu"),
])  # fmt: skip
def test_lowered_without_the_machine(machine, platform, target):
    here = compat.MACHINES["v5e" if machine == "tpu" else "h200"]
    for spec in (s for s in SPECS if s.name in ("preview_35b", "preview_35b_costliest")):
        call = functools.partial(spec.call, impl=f"pallas_{machine}")
        with compat.target(here):
            lowered = jax.jit(call).trace(*spec.shapes()).lower(lowering_platforms=(platform,))
        assert lowered.as_text().count(f"custom_call @{target}") == 1


@pytest.mark.parametrize(("machine", "sizes", "text"), [
    ("tpu", {"key": 32, "value": 32}, "head dims are 32 and 32: it takes multiples of 128"),
    ("tpu", {"key_heads": 1, "value": 512},
     "the v channels start at 256, which is no multiple of the 1024"),
    ("tpu", {"key": 128, "value": 128, "block": 2000}, "bytes of VMEM, over"),
    ("gpu", {"key": 32, "value": 32}, "head dims are 32 and 32: it takes 64 and 128"),
    ("gpu", {"block": 65}, "the block has 65 positions: it takes at most 64"),
    ("gpu", {"key": 128, "value": 128, "switches": COSTLIEST}, "bytes of shared memory, over"),
])  # fmt: skip
def test_what_a_kernel_cannot_serve(machine, sizes, text):
    head = {"key": HEAD[machine], "value": HEAD[machine], "key_heads": 2, "switches": CLOVER}
    sizes = {**head, "block": 4, **sizes}
    switches, block = sizes.pop("switches"), sizes.pop("block")
    x = jax.tree.map(jnp.asarray, inputs((block,), block, **sizes))
    with compat.interpreted(machine), pytest.raises(ValueError) as error:
        kernel(machine, switches, sizes["key_heads"])(*arrays(x))
    assert text in str(error.value)


def test_a_float32_call_at_the_large_shape_is_served_by_both():
    (spec,) = (s for s in SPECS if s.name == "preview_35b_float32")
    for machine, name in (("tpu", "v5e"), ("gpu", "h200")):
        with compat.target(compat.MACHINES[name]):
            call = functools.partial(spec.call, impl=f"pallas_{machine}")
            out, share = jax.eval_shape(call, *spec.shapes())
        assert (out.shape, share.shape) == ((1, 32, 32, 128), (1, 32, 32))


def test_tiles():
    large = (1, 32, 128, 128)
    assert pallas_tpu.Tile.choose(large, 16) == pallas_tpu.Tile(4)
    assert pallas_tpu.Tile.choose((1, 2, 128, 512), 1) is None
    assert pallas_tpu.Tile(3).reason(large, 16) == "3 heads do not divide 16"
    np.testing.assert_equal(pallas_tpu.Tile(4).reason(large, 16), None)
