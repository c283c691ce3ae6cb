"""Collectives counted from a program's text."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from clover_jax.plan.hlo import Collective, collectives
from clover_jax.sharding import make_mesh

# As libtpu writes: layouts with tiles, a start and a done, a collective inside of an async call.
TPU = """
HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%async_computation (p: bf16[64,16]) -> bf16[8,16] {
  ROOT %scatter = bf16[8,16]{1,0:T(8,128)(2,1)} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}

%fewer (t: (s32[], f32[4,16])) -> pred[] {
  %bound = s32[]{:T(128)} constant(3)
  %at = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[]{:T(512)} compare(%at, %bound), direction=LT
}

%by_data (t: (s32[], f32[4,16])) -> pred[] {
  %limit = s32[]{:T(128)} get-tuple-element(%t), index=1
  %at.2 = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt.2 = pred[]{:T(512)} compare(%at.2, %limit), direction=LT
}

%all (t: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  ROOT %every = (bf16[2,4]{1,0}, bf16[2,4]{1,0}) all-to-all(%x, %y), replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

%body (t: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %gather-start = (f32[4,16]{1,0:T(8,128)}, f32[16,16]{1,0:T(8,128)S(1)}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %gather-done = f32[16,16]{1,0:T(8,128)S(1)} all-gather-done(%gather-start)
}

ENTRY %main (a: f32[4,16]) -> f32[4,16] {
  %loop = (s32[], /*index=1*/f32[4,16]{1,0:T(8,128)}) while(%t), condition=%add, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %counted = (s32[], f32[4,16]{1,0:T(8,128)}) while(%t), condition=%fewer, body=%all
  %open = (s32[], f32[4,16]{1,0:T(8,128)}) while(%t), condition=%by_data, body=%all
  %scatter-start = ((f32[4,8]{1,0}), f32[2,8]{1,0}) reduce-scatter-start(%a), replica_groups=[4,2]<=[8], to_apply=%add
  %scatter-done = f32[2,8]{1,0} reduce-scatter-done(%scatter-start)
  %both = (f32[8]{0:T(128)}, bf16[8]{0:T(128)}) all-reduce(%a, %b), replica_groups=mesh['x'=2,'y'=4] {'x'}, to_apply=%add
  %start = ((bf16[64,16]{1,0}), bf16[8,16]{1,0}, u32[]) async-start(%z), calls=%async_computation
  ROOT %moved = f32[4,16]{1,0:T(8,128)} collective-permute(%a), source_target_pairs={{0,1},{1,0}}
}
"""  # noqa: E501


def test_text_of_an_accelerator():
    found = collectives(TPU)
    assert found.in_unknown_loops == 1, "a loop that ends by its data counts once"
    gathered = 16 * 16 * 4
    assert found.by_kind == {
        "all-gather": Collective(7, 7 * gathered, 7 * gathered * 3 // 4),
        "all-reduce": Collective(1, 8 * 4 + 8 * 2, 8 * 4 + 8 * 2),  # two devices: once each way
        "reduce-scatter": Collective(2, 8 * 16 * 2 + 2 * 8 * 4, 7 * 8 * 16 * 2 + 2 * 8 * 4),
        "all-to-all": Collective(3 + 1, 4 * 2 * 2 * 4 * 2, 4 * 2 * 2 * 4 * 2 // 2),
        "collective-permute": Collective(1, 4 * 16 * 4, 4 * 16 * 4),
    }


def test_loops_of_a_real_program():
    """A reduction in a scan of 3 inside a scan of 5, and one in a loop that data ends."""
    mesh = make_mesh(1, 1, 8)

    def f(x):
        total = lambda x: lax.psum(x, "tensor")
        inner = lambda x, _: (jnp.sin(total(x)), None)
        outer = lambda x, _: (lax.scan(inner, x, None, length=3)[0], None)
        x = lax.scan(outer, x, None, length=5)[0]
        return lax.while_loop(lambda x: x[0] < 1, lambda x: jnp.cos(total(x)), x)

    run = jax.shard_map(f, mesh=mesh, in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False)
    shape = jax.ShapeDtypeStruct((8 * 16,), jnp.float32)
    found = collectives(jax.jit(run).lower(shape).compile().as_text())
    assert found.by_kind.keys() == {"all-reduce"}
    runs, result, sent = found.by_kind["all-reduce"]
    assert (runs, found.in_unknown_loops) == (16, 1)
    assert result == 16 * 64 and sent == 16 * 2 * 64 * 7 // 8


def test_a_program_without_any():
    text = jax.jit(jnp.sin).lower(jnp.ones(3)).compile().as_text()
    assert collectives(text) == ({}, 0)
