"""The kernel ops on a mesh: each device runs them on its part (`jax.shard_map`).

Without a mesh each function here is the op itself. What is not an op (projections, norms,
embedding) is left to the partitioner, with constraints at the layers' borders.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from clover_jax.cache import cell_partition
from clover_jax.env import Env
from clover_jax.sharding import axes_of
from pallas_kernels.block_attention import BlockKV, attention_part, block_attention
from pallas_kernels.block_attention.math import Part, finish, unfold

type Axes = tuple[str | None, ...]


def over_mesh(env: Env, f: Callable[..., Any], args: Any, axes: Any, out_axes: Any) -> Any:
    """`f(*args)`, each device on its part of rows and heads, which never influence each other.

    Args:
        env: the mesh and its rules.
        f: an op.
        args: its arguments, trees of arrays; None where there is none.
        axes: a tree like `args` of the arrays' logical axes.
        out_axes: those of the result. Each must be an axis of an argument.
    """
    if env.mesh is None:
        return f(*args)
    found: dict[str, Any] = {}

    def one(names: Axes, x: Any) -> PartitionSpec:
        spec = env.partition(names, x.shape) if x is not None else PartitionSpec()
        found.update({n: e for n, e in zip(names, spec, strict=False) if n is not None})
        return spec

    in_specs = jax.tree.map(one, axes, args, is_leaf=_is_axes)
    out_specs = jax.tree.map(
        lambda names: PartitionSpec(*(n if n is None else found[n] for n in names)),
        out_axes,
        is_leaf=_is_axes,
    )
    return _spread(env, f, in_specs, out_specs)(*args)


def attention(
    q: Float[Array, "rows queries heads channel"],
    k: Float[Array, "groups rows kv_heads capacity channel"],
    v: Float[Array, "groups rows kv_heads capacity channel"],
    group: Any,
    limit: Int[Array, "rows queries"],
    own: BlockKV | None,
    first: Int[Array, "rows queries"] | None,
    *,
    scale: float,
    env: Env,
) -> Float[Array, "rows queries heads channel"]:
    """`block_attention`, with the cells where `cell_partition` puts them.

    Where the KV heads are split, each device has their query heads. Where the cells are, it has all
    heads: it attends to its own cells, one device also to the block itself, and the parts are
    merged by their maxima and sums (three reductions over the devices of a row). Where neither is,
    each device has its share of the query heads and takes their KV head.
    """
    impl = env.impl("block_attention")
    if env.mesh is None:
        return block_attention(q, k, v, group, limit, own, first, scale=scale, impl=impl)
    mesh, spec = env.mesh, cell_partition(k.shape, env)
    _, rows, by_head, by_cell, _ = spec
    spread_cells, heads = axes_of(by_cell), by_head
    kv_head = None
    if by_head is None and not spread_cells:
        heads, kv_head = _one_kv_head(q.shape[2], k.shape[2], env)

    def part(
        q: Array, k: Array, v: Array, group: Array, limit: Array,
        own: BlockKV | None, first: Array | None,
    ) -> Array:  # fmt: skip
        if kv_head is not None:
            read = kv_head()
            take = lambda a, axis: lax.dynamic_slice_in_dim(a, read, 1, axis)
            k, v = take(k, 2), take(v, 2)
            own = None if own is None else own._replace(k=take(own.k, 3), v=take(own.v, 3))
        if not spread_cells:
            return block_attention(q, k, v, group, limit, own, first, scale=scale, impl=impl)
        cells = k.shape[3]
        place = lax.axis_index(spread_cells)
        here = lambda a: jnp.clip(a - place * cells, 0, cells)
        if own is not None:
            own = own._replace(valid=own.valid & (place == 0))
        seen = attention_part(
            q, k, v, group, here(limit), own, None if first is None else here(first), scale=scale
        )
        merged = merge_over(seen, spread_cells)
        return unfold(finish(merged), q.shape[1]).astype(q.dtype)

    by_row = PartitionSpec(rows)
    of_q = PartitionSpec(rows, None, heads)
    of_own = None
    if own is not None:
        of_kv = PartitionSpec(rows, None, None, by_head)
        of_own = BlockKV(of_kv, of_kv, by_row)  # pyright: ignore[reportArgumentType]
    in_specs = (of_q, spec, spec, PartitionSpec(), by_row, of_own, by_row)
    run = jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=of_q, check_vma=False)
    return run(q, k, v, jnp.asarray(group, jnp.int32), limit, own, first)


def merge_over(part: Part, axes: tuple[str, ...]) -> Part:
    """The union of the devices' parts over disjoint keys."""
    top = lax.pmax(lax.stop_gradient(part.top), axes)
    weight = jnp.exp(part.top - top)
    return Part(top, lax.psum(weight * part.total, axes), lax.psum(weight * part.mixed, axes))


def write_cells(
    cells: Float[Array, "groups rows kv_heads capacity channel"],
    new: Float[Array, "rows time kv_heads channel"],
    start: Int[Array, " rows"],
    valid: Bool[Array, "rows time"],
    group: Any,
    env: Env,
) -> Float[Array, "groups rows kv_heads capacity channel"]:
    """New keys or values of valid positions in their cells; pads and overflow are dropped."""

    def write(cells: Array, new: Array, start: Array, valid: Array, group: Any) -> Array:
        capacity = cells.shape[3]
        cell = start[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None]
        if by_cell:
            cell = cell - lax.axis_index(by_cell) * capacity
        cell = jnp.where(valid & (cell >= 0), cell, capacity)
        # Every axis but the channels is an index: a scatter of all heads' channels at once makes
        # the TPU's compiler prefer another layout and copy the whole cache there and back.
        row = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None, None]
        head = jnp.arange(new.shape[2], dtype=jnp.int32)[None, :, None]
        new = jnp.moveaxis(new, 2, 1)
        return cells.at[group, row, head, cell[:, None]].set(new, mode="drop")

    if env.mesh is None:
        by_cell = ()
        return write(cells, new, start, valid, group)
    spec = cell_partition(cells.shape, env)
    by_cell = axes_of(spec[3])
    of_new, by_row = PartitionSpec(spec[1], None, spec[2]), PartitionSpec(spec[1])
    in_specs = (spec, of_new, by_row, by_row, PartitionSpec())
    run = jax.shard_map(write, mesh=env.mesh, in_specs=in_specs, out_specs=spec, check_vma=False)
    return run(cells, new, start, valid, jnp.asarray(group, jnp.int32))


def experts(
    f: Callable[..., Array],
    x: Float[Array, "rows time width"],
    expert: Int[Array, "rows time k"],
    weight: Float[Array, "rows time k"],
    valid: Bool[Array, "rows time"],
    w_in: Float[Array, "experts width gate_up"],
    w_out: Float[Array, "experts hidden width"],
    *,
    env: Env,
) -> Float[Array, "rows time width"]:
    """`f` of these arguments, with every device's experts on every row that its group holds.

    Where an axis splits both rows and experts, its devices gather each other's rows, run their own
    experts on all of them and scatter the sums: nothing is dropped whatever the router does, and
    what moves is rows x width twice. The other axes of the experts hold copies of the same rows,
    whose partial sums are added (case S1: a sum runs over the axes that split experts only).
    """
    tokens = (x, expert, weight, valid)
    if env.mesh is None:
        return _in_chunks(lambda *a: f(*a, w_in, w_out), tokens, env.moe_chunk)
    rows = env.partition(("rows",), x.shape[:1])
    split = env.partition(("experts", None, None), w_in.shape)
    by_expert = axes_of(split[0])
    shared = tuple(a for a in axes_of(rows[0]) if a in by_expert)
    copies = tuple(a for a in by_expert if a not in shared)

    def one(
        x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array
    ) -> Array:
        if shared:
            gather = lambda a: lax.all_gather(a, shared, axis=0, tiled=True)
            x, expert, weight, valid = map(gather, (x, expert, weight, valid))
        if by_expert:
            expert = expert - lax.axis_index(by_expert) * w_in.shape[0]
        y = f(x, expert, weight, valid, w_in, w_out)
        if copies:
            y = lax.psum(y, copies)
        return lax.psum_scatter(y, shared, scatter_dimension=0, tiled=True) if shared else y

    def part(
        x: Array, expert: Array, weight: Array, valid: Array, w_in: Array, w_out: Array
    ) -> Array:
        tokens = (x, expert, weight, valid)
        return _in_chunks(lambda *a: one(*a, w_in, w_out), tokens, env.moe_chunk)  # pyright: ignore

    in_specs = (rows, rows, rows, rows, split, split)
    run = jax.shard_map(part, mesh=env.mesh, in_specs=in_specs, out_specs=rows, check_vma=False)
    return run(*tokens, w_in, w_out)


def _in_chunks(f: Callable[..., Array], args: tuple[Array, ...], chunk: int | None) -> Array:
    """`f` of args [rows, time, ...] on at most `chunk` tokens of each row at a time."""
    rows, time = args[0].shape[:2]
    if chunk is None or time <= chunk:
        return f(*args)
    extra = -time % chunk

    def apart(a: Array) -> Array:
        a = jnp.pad(a, ((0, 0), (0, extra), *((0, 0) for _ in a.shape[2:])))
        return jnp.moveaxis(a.reshape(rows, -1, chunk, *a.shape[2:]), 1, 0)

    y = lax.map(jax.checkpoint(lambda part: f(*part)), tuple(map(apart, args)))
    return jnp.moveaxis(y, 0, 1).reshape(rows, time + extra, -1)[:, :time]


def _one_kv_head(heads: int, kv_heads: int, env: Env) -> tuple[Any, Callable[[], Array] | None]:
    """How query heads are split so that a device's share reads one KV head, and which one."""
    split = env.partition(("heads",), (heads,))[0]
    per_device, per_kv = heads // env.ways("heads", heads), heads // kv_heads
    if per_kv % per_device:
        return None, None
    return split, lambda: lax.axis_index(axes_of(split)) * per_device // per_kv


def _spread(env: Env, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(f, mesh=env.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _is_axes(x: Any) -> bool:
    return type(x) is tuple and all(i is None or isinstance(i, str) for i in x)
