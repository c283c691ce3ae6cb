"""Expert MLPs against a loop over rows: values, gradients, what is read, and the layout."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.sharding import AxisRules, make_mesh
from clover_jax.verify.limits import LIMITS, relative_rms
from pallas_kernels.compat import MACHINES, interpreted, target
from pallas_kernels.grouped_matmul import contract, expert_glu, pallas_gpu, pallas_tpu, xla
from pallas_kernels.grouped_matmul.layout import plan
from pallas_kernels.grouped_matmul.specs import SPECS
from tests.helpers.limits import assert_close
from tests.model.small import QUICK

EXPERTS, WIDTH, HIDDEN, ROWS, K = 8, 6, 3, 12, 2
CASES = {  # the experts of 12 rows
    "everyone": np.sort(np.stack([np.arange(ROWS) % 8, (np.arange(ROWS) * 3 + 1) % 8], 1), 1),
    "three experts": np.sort(np.stack([np.arange(ROWS) % 3, (np.arange(ROWS) + 1) % 3], 1), 1),
    "one gets all": np.tile([[6, EXPERTS]], (ROWS, 1)),  # and the other is no expert of this call
    "no rows": np.tile([[0, 1]], (ROWS, 1)),
}
make_plan = jax.jit(plan, static_argnames=("num_experts", "tile"))


def operands(rows, *, experts=EXPERTS, k=K, width=WIDTH, hidden=HIDDEN, dtype=jnp.float32, seed=0):
    """x, expert, weight, valid, w_in, w_out; numpy, so that a test can change them."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape, fan_in: (rng.normal(size=shape) * fan_in**-0.5).astype(dtype)
    ids = np.sort(np.stack([rng.permutation(experts)[:k] for _ in range(rows)]), axis=1)
    return [
        draw(rows, width, fan_in=1),
        ids.astype(np.int32),
        rng.random((rows, k)).astype(np.float32),
        np.ones(rows, bool),
        draw(experts, width, 2 * hidden, fan_in=width),
        draw(experts, hidden, width, fan_in=hidden),
    ]


def chosen(expert, valid, experts):
    """Pairs (row, j) that count, and the experts nobody chose."""
    here = valid[:, None] & (expert >= 0) & (expert < experts)
    return here, np.setdiff1d(np.arange(experts), expert[here])


def loop(x, expert, weight, valid, w_in, w_out, cotangent=None):
    """The plain sums in float64; with a cotangent also the gradients by name."""
    x, weight, w_in, w_out = (np.asarray(a, np.float64) for a in (x, weight, w_in, w_out))
    d = {"x": np.zeros_like(x), "weight": np.zeros_like(weight)}
    d |= {"w_in": np.zeros_like(w_in), "w_out": np.zeros_like(w_out)}
    y = np.zeros_like(x)
    here, _ = chosen(expert, valid, len(w_in))
    for r, j in zip(*np.nonzero(here), strict=True):
        e = int(expert[r, j])
        gate, up = np.split(x[r] @ w_in[e], 2)
        sigmoid = 1 / (1 + np.exp(-gate))
        h = gate * sigmoid * up
        y[r] += weight[r, j] * (h @ w_out[e])
        if cotangent is None:
            continue
        dy = np.asarray(cotangent[r], np.float64)
        d["weight"][r, j] = dy @ (h @ w_out[e])
        dh = weight[r, j] * (w_out[e] @ dy)
        d_gate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_gate_up = np.concatenate([d_gate, dh * gate * sigmoid])
        d["x"][r] += w_in[e] @ d_gate_up
        d["w_in"][e] += np.outer(x[r], d_gate_up)
        d["w_out"][e] += weight[r, j] * np.outer(h, dy)
    return y, d


def poisoned(args):
    """NaN wherever nothing may be read: rows that are not valid, experts that nobody chose."""
    x, expert, weight, valid, w_in, w_out = map(np.copy, args)
    _, unused = chosen(expert, valid, len(w_in))
    x[~valid], weight[~valid], w_in[unused], w_out[unused] = [np.nan] * 4
    return [x, expert, weight, valid, w_in, w_out]


def compare(name, got, args):
    """Float32 under the op's limit, bfloat16 under its own."""
    want, _ = loop(*args)
    if got.dtype == jnp.float32:
        assert_close("op", name, got, want)
    else:
        assert relative_rms(np.asarray(got), want) <= LIMITS["bfloat16"].op, name
    assert not np.asarray(got, np.float32)[~args[3]].any(), f"{name}: rows not valid"


@functools.partial(jax.jit, static_argnames=("tile", "impl"))
def run(args, cotangent, *, tile, impl):
    """Forward alone, forward under differentiation, gradients: the first two are other programs."""
    x, expert, weight, valid, w_in, w_out = args

    def weighted(x, weight, w_in, w_out):
        y = expert_glu(x, expert, weight, valid, w_in, w_out, tile=tile, impl=impl)
        return jnp.sum(y * cotangent), y

    grads, y = jax.grad(weighted, argnums=(0, 1, 2, 3), has_aux=True)(x, weight, w_in, w_out)
    alone = expert_glu(*args, tile=tile, impl=impl)
    return alone, y, dict(zip(("x", "weight", "w_in", "w_out"), grads, strict=True))


def check_gradients(name, got, want, unused):
    for leaf, gradient in got.items():
        assert_close("gradient", f"{name} {leaf}", gradient, want[leaf])
    for leaf in ("w_in", "w_out"):
        assert not np.asarray(got[leaf])[unused].any(), f"{name}: gradient of unused {unused}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("impl", "tile"), [("reference", 1), ("xla", 1), ("xla", 4)])
def test_values_and_gradients_are_the_loop(case, impl, tile):
    """Case E1 of cases.md; the weights of unused experts do get a gradient of exactly 0."""
    args = operands(ROWS)
    args[1] = CASES[case].astype(np.int32)
    args[3] = (np.arange(ROWS) != 4) & (case != "no rows")
    cotangent = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
    want, want_grads = loop(*args, cotangent)
    alone, y, grads = run(args, cotangent, tile=tile, impl=impl)
    assert_close("op", "alone", alone, want)
    assert_close("op", "differentiated", y, want)
    check_gradients(impl, grads, want_grads, chosen(args[1], args[3], EXPERTS)[1])


@pytest.mark.parametrize("spec", [s for s in SPECS if "test" in s.uses], ids=lambda s: s.name)
def test_specs(spec):
    assert spec.naive is not None

    @functools.partial(jax.jit, compiler_options=QUICK)
    def everything(key):
        args = spec.inputs(key)
        results = spec.call(*args, impl="reference"), spec.call(*args, impl="xla")
        return args[1], *results, spec.naive(*args)

    expert, want, got, naive = everything(jax.random.key(0))
    assert_close("op", "xla", got, want)
    assert_close("op", "naive", naive, want)
    weights = spec.shapes()[4:]
    touched = np.unique(expert).size * sum(4 * np.prod(w.shape[1:]) for w in weights)
    assert 0 <= spec.floor.bytes - touched <= 0.4 * touched, "the floor is not of these experts"


SIZES = ((1, 1), (1, 4), (7, 1), (7, 4))  # rows, tile
some_rows = functools.partial(jax.jit, static_argnames=("tile", "impl"))(expert_glu)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data(), size=st.sampled_from(SIZES))
def test_any_choice_of_any_rows(data, size):
    """Empty experts, one row, no valid row, ids of other devices; NaN where nothing is read."""
    rows, tile = size
    args = operands(rows)
    ids = st.lists(st.integers(-2, EXPERTS + 1), min_size=K, max_size=K, unique=True).map(sorted)
    args[1] = np.array(data.draw(st.lists(ids, min_size=rows, max_size=rows)), np.int32)
    args[3] = np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    compare("xla", some_rows(*poisoned(args), tile=tile, impl="xla"), args)


def test_a_coreset_is_only_a_choice():
    """Rows that chose among four experts: bit-equal to the op that holds only those."""
    kept = np.array([1, 3, 4, 6])
    args = operands(ROWS, experts=len(kept))
    full = operands(ROWS)
    inside = [*args[:4], full[4][kept], full[5][kept]]
    outside = [args[0], kept.astype(np.int32)[args[1]], *args[2:4], full[4], full[5]]
    for tile in (1, 4):
        a, b = (some_rows(*some, tile=tile, impl="xla") for some in (inside, outside))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("tile", (1, 4))
def test_rows_do_not_see_each_other(tile):
    """Bit-equal whatever the other rows hold; one row's program mapped, whatever the batch."""
    args = operands(ROWS)
    want = some_rows(*args, tile=tile, impl="xla")
    others = operands(ROWS, seed=1)[:3]
    for theirs, ours in zip(others, args, strict=False):
        theirs[0] = ours[0]
    got = some_rows(*others, np.arange(ROWS) != 7, *args[4:], tile=tile, impl="xla")
    np.testing.assert_array_equal(got[0], want[0])
    weights = [jnp.asarray(w) for w in args[4:]]
    one = lambda row: expert_glu(*[a[None] for a in row], *weights, tile=tile, impl="xla")[0]
    mapped = jax.jit(lambda rows: jax.lax.map(one, rows))
    everyone = mapped(tuple(args[:4]))
    np.testing.assert_array_equal(mapped(tuple(a[2:5] for a in args[:4])), everyone[2:5])
    assert_close("op", "mapped", everyone, want)


def test_one_row_fetches_its_own_experts_only():
    """The batched form of few rows must not turn into one of all experts."""
    (spec,) = [s for s in SPECS if s.name == "decode_17m"]
    shapes = spec.shapes()
    program = jax.jit(functools.partial(spec.call, impl="xla")).lower(*shapes).compile()
    temp = program.memory_analysis().temp_size_in_bytes
    k, per_expert = shapes[1].shape[1], sum(4 * np.prod(w.shape[1:]) for w in shapes[4:])
    assert temp < 1.1 * k * per_expert


# Kernels, interpreted: (rows, tile) around a whole tile of 8 and 16 rows.


@functools.cache
def program(impl, tile):
    return functools.partial(expert_glu, tile=tile, impl=impl)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "hidden", "dtype"),
    [
        *((rows, 128, jnp.float32) for rows in (7, 8, 9)),
        (1, 256, jnp.float32),  # in two parts
        (1, 256, jnp.bfloat16),
        (18, 384, jnp.bfloat16),
    ],
)
def test_tpu_kernel_interpreted(rows, hidden, dtype):
    """All rows choose expert 2, which gets a second tile; row 0 of several is not valid."""
    args = operands(rows, experts=4, width=128, hidden=hidden, dtype=dtype)
    args[1] = np.stack([np.arange(rows) % 2, np.full(rows, 2)], 1).astype(np.int32)
    args[3] = (np.arange(rows) > 0) | (rows == 1)
    with interpreted("tpu"):
        call = program("pallas_tpu", 8)
        assert "expert_glu_tpu" in str(jax.make_jaxpr(call)(*args))
        compare("pallas_tpu", jax.jit(call)(*poisoned(args)), args)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "tile"), [(1, 1), (7, 8), (8, 8), (10, 8)])
def test_gpu_kernels_interpreted(rows, tile):
    args = operands(rows, experts=2, width=64, hidden=64, dtype=jnp.bfloat16)
    args[1] = np.tile([[1, EXPERTS]], (rows, 1)).astype(np.int32)
    args[3] = (np.arange(rows) > 0) | (rows == 1)
    with interpreted("gpu"):
        call = program("pallas_gpu", tile)
        text = str(jax.make_jaxpr(call)(*args))
        assert "expert_glu_gate_up_gpu" in text
        assert "expert_glu_down_gpu" in text
        compare("pallas_gpu", jax.jit(call)(*poisoned(args)), args)


def test_gpu_kernels_in_several_blocks():
    """Two blocks of the hidden width, three of the width, both sums in more than one stage."""
    args = operands(3, experts=3, width=192, hidden=128, dtype=jnp.bfloat16)
    with interpreted("gpu"):
        compare("pallas_gpu", jax.jit(program("pallas_gpu", 16))(*poisoned(args)), args)


@pytest.mark.parametrize("where", ("tpu", "gpu"))
def test_kernels_without_a_valid_row(where):
    args = operands(3, experts=2, width=128, hidden=128, dtype=jnp.bfloat16)
    args[3] = np.zeros(3, bool)
    with interpreted(where):
        got = jax.jit(program(f"pallas_{where}", 8))(*poisoned(args))
    assert not np.asarray(got, np.float32).any()


def test_gradients_without_gathered_weights(monkeypatch: pytest.MonkeyPatch):
    """Past GATHERED_BYTES, calls loop over the tiles in both directions."""
    monkeypatch.setattr(xla, "GATHERED_BYTES", 0)
    args = operands(9)
    args[3] = np.arange(9) != 4
    cotangent = np.random.default_rng(5).normal(size=args[0].shape).astype(np.float32)
    want, want_grads = loop(*args, cotangent)
    _, y, grads = run(args, cotangent, tile=4, impl="xla")
    assert_close("op", "forward", y, want)
    check_gradients("loop", grads, want_grads, chosen(args[1], args[3], EXPERTS)[1])


def test_kernel_gradients():
    """Those of xla, around the kernel's forward pass."""
    args = operands(5, experts=4, width=128, hidden=128)
    args[1] = np.tile(np.array([[0, 2]], np.int32), (5, 1))
    args[3] = np.arange(5) != 1
    cotangent = np.random.default_rng(1).normal(size=(5, 128)).astype(np.float32)
    _, want = loop(*args, cotangent)
    with interpreted("tpu"):
        _, _, got = run(args, cotangent, tile=8, impl="pallas_tpu")
    check_gradients("pallas_tpu", got, want, [1, 3])


def test_tpu_kernel_fetches_each_chosen_expert_once():
    """The blocks that the grid asks for, in its order; a repeated block is not fetched again."""
    expert = (np.arange(20)[:, None] % 4 + np.array([[0, 4, 9]])).astype(np.int32)
    live = np.tile((np.arange(20) % 4 != 3)[:, None], (1, 3))  # nobody chooses 3, 7 and 12
    to = make_plan(expert, live, num_experts=16, tile=4)
    held = lambda t: pallas_tpu.held(t, 0, to.tile_expert, to.used[None], parts=1)[1]
    asked = jax.vmap(held)(jnp.arange(len(to.tile_expert))).tolist()
    fetched = [e for e, before in zip(asked, [None, *asked], strict=False) if e != before]
    assert to.used < len(asked)
    assert fetched == sorted(set(expert[live].tolist()))


def shapes_of(rows, width, hidden, dtype):
    shape = jax.ShapeDtypeStruct
    choice = shape((rows, 8), jnp.int32), shape((rows, 8), jnp.float32), shape((rows,), jnp.bool_)
    w_in, w_out = shape((256, width, 2 * hidden), dtype), shape((256, hidden, width), dtype)
    return shape((rows, width), dtype), *choice, w_in, w_out


@pytest.mark.parametrize("machine", ("v5e", "h200"))
@pytest.mark.parametrize(("rows", "tile"), [(1, 1), (32, 8), (256, 64)])
def test_kernels_lower_without_their_compilers(machine, rows, tile):
    it = MACHINES[machine]
    platform = {"tpu": "tpu", "gpu": "cuda"}[it.platform]
    call = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}[it.platform]
    with target(it):
        traced = jax.jit(program(f"pallas_{it.platform}", tile)).trace(
            *shapes_of(rows, 2048, 512, jnp.bfloat16)
        )
        assert call in traced.lower(lowering_platforms=(platform,)).as_text()


def test_kernels_refuse_in_text():
    def refusal(where, rows=4, width=128, hidden=128, dtype=jnp.bfloat16):
        with target(MACHINES[where]), pytest.raises(ValueError) as error:
            impl = f"pallas_{MACHINES[where].platform}"
            jax.eval_shape(program(impl, 8), *shapes_of(rows, width, hidden, dtype))
        return str(error.value)

    assert "x is float32; wgmma multiplies bfloat16" in refusal("h200", dtype=jnp.float32)
    assert "hidden width 48 must be multiples of 64" in refusal("h200", hidden=48)
    assert "width 96 and" in refusal("h200", width=96)
    assert "hidden width 48 must be multiples of 128" in refusal("v5e", hidden=48)
    assert "x is float16; it takes float32 and bfloat16" in refusal("v5e", dtype=jnp.float16)
    assert "exceed 33554432 B" in refusal("v5e", width=1 << 16)


def test_block_sizes():
    """Whole experts where they can have two tiles; quarters where they cannot; what fits."""
    tpu = functools.partial(pallas_tpu.tiling, width=2048, hidden=512, dtype=jnp.bfloat16)
    assert (tpu(rows=32, tile=8).part, tpu(rows=1, tile=1).part) == (512, 128)
    wide = pallas_tpu.tiling(32, 4096, 1536, jnp.bfloat16, 8)
    assert wide.part < 1536 and 1536 % wide.part == 0
    with pytest.raises(ValueError, match="does not fit"):
        pallas_tpu.Tiling(tile=8, part=96, vmem=0)
    gpu = pallas_gpu.tiling(8, 2048, 128)
    assert 2 * gpu.smem <= 227 << 10
    with pytest.raises(ValueError, match="shared memory"):
        pallas_gpu.Tiling(tile=64, columns=128, depth=128, stages=6)
    with pytest.raises(ValueError, match="wgmma and swizzle"):
        pallas_gpu.Tiling(tile=8, columns=128, depth=96, stages=2)


@pytest.mark.parametrize("shape", [(2, 2, 2), (8, 1, 1), (1, 8, 1)], ids=str)
def test_eight_devices_compute_what_one_does(shape):
    """Each device takes its rows through its experts; the parts are summed over "experts"."""
    # The op's own rule: an axis splits rows or experts, not both (`on_mesh.experts` gathers first).
    rules, mesh = AxisRules().replace(rows=("data",)), make_mesh(*shape)
    args = operands(8)
    args[3] = np.arange(8) != 5
    (summed,) = (dict(rules.table)[a] for a in contract.SUMMED_AXES)

    def part(x, expert, weight, valid, w_in, w_out):
        first = jax.lax.axis_index(summed) * w_in.shape[0]
        y = expert_glu(x, expert - first, weight, valid, w_in, w_out, tile=4, impl="xla")
        return jax.lax.psum(y, summed)

    spread = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=tuple(map(rules.spec, contract.AXES)),
        out_specs=rules.spec(contract.OUT_AXES),
        check_vma=False,
    )
    got = jax.jit(spread)(*args)
    assert len(got.sharding.device_set) == 8
    compare("sharded", got, args)


PLANS = ((1, 1, 4, 8), (7, 1, 3, 2), (12, 2, 8, 4), (30, 1, 2, 1), (4, 4, 16, 8))


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data(), size=st.sampled_from(PLANS))
def test_plan_places_every_assignment_once_in_tiles_of_one_expert(data, size):
    rows, k, num_experts, tile = size
    n = rows * k
    ids = st.integers(0, num_experts - 1)
    expert = np.array(data.draw(st.lists(ids, min_size=n, max_size=n)), np.int32)
    assigned = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
    shaped = expert.reshape(rows, k), assigned.reshape(rows, k)
    to = make_plan(*shaped, num_experts=num_experts, tile=tile)
    slot, source, tile_expert, used = map(np.asarray, to)
    slot, row = slot.reshape(-1), np.arange(n) // k
    assert len(source) == tile * len(tile_expert)
    assert (slot[assigned] < tile * used).all()
    assert (slot[~assigned] >= len(source)).all()
    assert len(np.unique(slot[assigned])) == assigned.sum()
    np.testing.assert_array_equal(source[slot[assigned]], row[assigned])
    assert (source < rows).sum() == assigned.sum()
    np.testing.assert_array_equal(tile_expert[slot[assigned] // tile], expert[assigned])
    counts = np.bincount(expert[assigned], minlength=num_experts)
    assert used == np.ceil(counts / tile).sum()
    for e in range(num_experts):  # stable: rows of an expert keep their order
        assert (np.diff(slot[assigned & (expert == e)]) > 0).all()
    if tile > 1:  # sorted, so that an expert's tiles follow each other
        assert (np.diff(tile_expert[:used]) >= 0).all()


def test_contract():
    args = operands(2)
    call = lambda change, tile=1: expert_glu.__wrapped__(
        *[jnp.asarray(change.get(i, a)) for i, a in enumerate(args)], tile=tile, impl="xla"
    )
    with pytest.raises(ValueError, match="w_in's last axis is 6, expected 4"):
        call({5: args[5][:, :2]})
    with pytest.raises(ValueError, match="w_out is bfloat16 and x is float32"):
        call({5: args[5].astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match="weight is bfloat16, expected float32"):
        call({2: args[2].astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match="tile is 0, expected at least one"):
        call({}, tile=0)
    with pytest.raises(
        ValueError,
        match="expert_glu cannot run as 'cuda': implementations are reference, xla, pallas_tpu",
    ):
        expert_glu.__wrapped__(*map(jnp.asarray, args), tile=1, impl="cuda")


def test_auto_is_xla_until_a_device_run_says_more():
    with target(MACHINES["v5e"]):
        args = shapes_of(4, 128, 128, jnp.float32)
        assert "pallas" in str(jax.make_jaxpr(program("pallas_tpu", 8))(*args))
        assert "pallas" not in str(jax.make_jaxpr(program("auto", 8))(*args))
