"""Both kernels in Pallas' interpreters, lowered for the machines that are not here, and sharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from clover_jax.sharding import AxisRules, make_mesh
from clover_jax.verify.limits import LIMITS, relative_rms
from pallas_kernels.block_attention import BlockKV, block_attention, pallas_gpu, pallas_tpu
from pallas_kernels.block_attention.contract import AXES, OUT_AXES
from pallas_kernels.block_attention.specs import SPECS
from pallas_kernels.compat import MACHINES, interpreted, target
from tests.helpers.limits import assert_close
from tests.model.small import QUICK

pytestmark = pytest.mark.slow  # interpreters

GROUP, SCALE = 1, 0.3
LOWERED = [s for s in SPECS if s.name in ("preview_35b_131k", "prefill_35b_512", "decode_35b_4k")]


def inputs(
    limit, *, heads=2, kv_heads=1, channel=8, capacity=256, own=False, blocks=1,
    dtype="float32", seed=0,
):  # fmt: skip
    """Random operands; cells past a row's largest limit and other layers are NaN."""
    rng = np.random.default_rng(seed)
    limit = np.asarray(limit, np.int32)
    rows, queries = limit.shape
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    q = draw(rows, queries, heads, channel)
    used = np.arange(capacity) < limit.max(axis=1, keepdims=True)
    k, v = (np.full((2, rows, kv_heads, capacity, channel), np.nan, np.float32) for _ in range(2))
    for cells in (k, v):  # the first cells are the same for any capacity
        fill = np.moveaxis(draw(2304, rows, kv_heads, channel)[:capacity], 0, 2)
        cells[GROUP] = np.where(used[:, None, :, None], fill, np.nan)
    cast = lambda a: jnp.asarray(a).astype(dtype)
    if own:
        n = queries // blocks
        own_k, own_v = (draw(rows, blocks, n, kv_heads, channel) for _ in range(2))
        valid = rng.random((rows, blocks, n)) < 0.7
        own = BlockKV(cast(own_k), cast(own_v), jnp.asarray(valid))
    return cast(q), cast(k), cast(v), jnp.int32(GROUP), jnp.asarray(limit), own or None


call = functools.partial(block_attention, scale=SCALE)


quick = functools.partial(jax.jit, compiler_options=QUICK)


def run(where, args, *, detect_races=False):
    """In that machine's interpreter."""
    with interpreted(where, detect_races=detect_races):
        return quick(functools.partial(call, impl=f"pallas_{where}"))(*args)


def check(name, got, args):
    """Against the reference, under the limit of the operands' dtype."""
    want = call(*args, impl="reference")
    assert got.dtype == args[0].dtype
    error = relative_rms(np.float32(got), np.float32(want))
    assert np.isfinite(np.float32(got)).all(), name
    assert error <= LIMITS[str(got.dtype)].op, f"{name}: {error:.1e}"


EDGES = [[0, 1, 5], [127, 128, 129], [255, 256, 3], [0, 0, 0]]  # of a chunk of 128 cells, per query
TPU = {
    "edges": dict(limit=EDGES),
    "preview": dict(limit=EDGES, own=True, heads=4, kv_heads=2),
    "bfloat16": dict(limit=EDGES, own=True, dtype="bfloat16", channel=128),
    "one query": dict(limit=[[0], [128], [200]], heads=3),
    "less than a tile": dict(limit=[[70, 3], [0, 69]], capacity=70),
    "two blocks": dict(limit=[[3] * 8 + [11] * 8], own=True, blocks=2),
    "three KV tiles": dict(limit=[[1023], [1024], [1025], [2049], [0]], capacity=2304),
    "two query tiles": dict(limit=[[1, 2, 3, 4, 5, 6, 7, 8, 131]], heads=64),
}


@pytest.mark.parametrize("case", TPU)
def test_tpu_kernel(case):
    args = inputs(**TPU[case])
    check(case, run("tpu", args), args)


GPU = {
    "edges": dict(limit=[[0, 1], [63, 65], [255, 256], [0, 0]], dtype="bfloat16", channel=64),
    "preview, 65 rows": dict(limit=[[130] * 13], heads=5, own=True, dtype="bfloat16", channel=128),
    "three splits, two query tiles": dict(
        limit=[[520, 1, 2, 3, 649]], heads=26, capacity=768, dtype="bfloat16", channel=64
    ),
}


@pytest.mark.parametrize("case", GPU)
def test_gpu_kernel(case):
    args = inputs(**GPU[case])
    check(case, run("gpu", args), args)


def test_gpu_kernel_has_no_races():
    args = inputs(**GPU["preview, 65 rows"])
    check("with race detection", run("gpu", args, detect_races=True), args)


@pytest.mark.parametrize(
    ("where", "dtype", "small", "large"),
    [
        ("tpu", "bfloat16", 384, 640),
        ("gpu", "bfloat16", 384, 640),
    ],
)
def test_capacity_never_matters(where, dtype, small, large):
    """Bit-equal: a prefix is cut into the same pieces whatever the cache could hold."""
    limit = [[small, 5], [small - 1, 1]]
    few, many = (
        run(where, inputs(limit, capacity=c, dtype=dtype, channel=64)) for c in (small, large)
    )
    np.testing.assert_array_equal(np.float32(few), np.float32(many))


def test_tpu_tiles_past_a_limit_are_not_copied():
    tiles = [int(pallas_tpu.tile_to_copy(jnp.int32(t), jnp.int32(1025), 1024)) for t in range(4)]
    assert tiles == [0, 1, 1, 1]
    assert int(pallas_tpu.tile_to_copy(jnp.int32(3), jnp.int32(0), 1024)) == 0


@pytest.mark.parametrize("where", ("tpu", "gpu"))
def test_gradients_are_those_of_xla(where):
    """By name; in float32 except where the kernel takes bfloat16 only."""
    dtype, channel = ("float32", 8) if where == "tpu" else ("bfloat16", 64)
    q, k, v, group, limit, own = inputs(
        [[128] * 3], own=True, capacity=128, dtype=dtype, channel=channel
    )
    k, v = (jnp.nan_to_num(a) for a in (k, v))

    def loss(q, k, v, own_k, own_v, impl):
        blocks = BlockKV(own_k, own_v, own.valid)
        out = block_attention(q, k, v, group, limit, blocks, scale=SCALE, impl=impl)
        return jnp.sum(jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).astype(dtype) * out.ravel())

    floats = (q, k, v, own.k, own.v)
    grads = lambda impl: quick(jax.grad(functools.partial(loss, impl=impl), range(5)))(*floats)
    want = grads("xla")
    with interpreted(where):
        got = grads(f"pallas_{where}")
    for name, a, b in zip(("q", "k", "v", "own k", "own v"), got, want, strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b), err_msg=name)


def primitives(jaxpr):
    """Names of all primitives of a program, inner programs included."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for inner in jaxprs_in_params(eqn.params):
            found |= primitives(inner)
    return found


@pytest.mark.parametrize("spec", LOWERED, ids=lambda s: s.name)
@pytest.mark.parametrize("machine", ("v5e", "h200"))
def test_lowers(spec, machine):
    """For the machine, without its compiler; and it is the kernel that runs."""
    it = MACHINES[machine]
    impl = f"pallas_{it.platform}"
    with target(it):
        traced = jax.jit(lambda *arrays: spec.call(*arrays, impl=impl)).trace(*spec.shapes())
        platform, kernel, custom_call = {
            "tpu": ("tpu", "pallas_call", "tpu_custom_call"),
            "gpu": ("cuda", "mpmd_map", "mosaic_gpu"),
        }[it.platform]
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert kernel in primitives(traced.jaxpr.jaxpr)
    assert custom_call in text


def test_what_kernels_refuse():
    wide = inputs([[1] * 16], heads=256, channel=256, own=True)
    odd = inputs([[1] * 6], own=True, blocks=2)
    bounded = (*wide, wide[4])  # any `first`
    half = jax.tree.map(lambda a: a.astype(jnp.float16) if a.dtype == jnp.float32 else a, odd)
    say = pallas_tpu.block_attention_unsupported
    assert "bfloat16 or float32" in (say(*half) or "")
    assert "several blocks must be whole sublanes" in (say(*odd) or "")
    assert "bytes of VMEM" in (say(*wide) or "")
    assert "first is given" in (say(*bounded) or "")
    say = pallas_gpu.block_attention_unsupported
    assert "bfloat16 only" in (say(*odd) or "")
    assert "first is given" in (say(*bounded) or "")
    assert "head dim 8" in (say(*inputs([[1]], dtype="bfloat16")) or "")
    ragged = inputs([[1]], dtype="bfloat16", channel=64, capacity=96)
    assert "capacity 96" in (say(*ragged) or "")
    with pytest.raises(ValueError, match="it needs a gpu and this is a cpu"):
        call(*ragged, impl="pallas_gpu")
    for make in (
        lambda: pallas_tpu.Tiles(queries=1, cells=100, group=1, channel=8, itemsize=4),
        lambda: pallas_gpu.Tiles(warpgroups=3, stages=2, splits=1, least=4, channel=64),
    ):
        with pytest.raises(ValueError, match=r"positive"):
            make()


@pytest.mark.parametrize("impl", ("xla", "pallas_tpu"))
def test_sharded_is_unsharded(impl):
    """Rows and KV heads over 2 x 2 devices, with the contract's axes."""
    args = inputs([[130, 5], [0, 7]], heads=4, kv_heads=2, own=True)
    rules = AxisRules()
    names = ("q", "k", "v", "group", "limit")
    of_own = BlockKV(*(rules.spec(AXES[f"own.{name}"]) for name in BlockKV._fields))
    specs = (*(rules.spec(AXES[name]) for name in names), of_own)
    assert specs[0] == PartitionSpec(("data", "expert"), None, "tensor", None)
    split = jax.shard_map(
        functools.partial(call, impl=impl),
        mesh=make_mesh(2, 1, 2),
        in_specs=specs,
        out_specs=rules.spec(OUT_AXES),
        check_vma=False,
    )
    want = call(*args, impl="reference")
    if impl == "xla":
        got = quick(split)(*args)
    else:
        with interpreted("tpu"):
            got = quick(split)(*args)
    assert_close("op", impl, got, want)
