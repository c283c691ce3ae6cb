"""The process that compiles one pass: `python -m clover_jax.plan.worker JOB`, see `compiled`.

Prints one JSON object: {"result": ...}, or {"error": ...} for what is the user's to mend.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from clover_jax.cache import cache_shapes, cache_shardings
from clover_jax.config import ModelConfig
from clover_jax.data.pipeline import DataConfig
from clover_jax.diffusion.corrupt import make_batch
from clover_jax.diffusion.loss import LossConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.placement import state_shardings
from clover_jax.model.transformer import extend, param_specs, preview
from clover_jax.params import abstract
from clover_jax.plan.compiled import TRAIN, CompiledPass, Job
from clover_jax.plan.hlo import collectives
from clover_jax.sharding import MESH_AXES, PRESETS, make_mesh, shardings
from clover_jax.train.loop import ENV
from clover_jax.train.step import OptimiserConfig, init_state, train_step
from pallas_kernels.compat import MACHINES

LOSS_CHUNK = 512  # positions whose logits exist at once on a device: 0.5 GB of 248,320 each


def run(job: Job) -> CompiledPass:
    """Lower and compile the pass, and read the result."""
    cfg = ModelConfig.from_json(job.config)
    mesh = _mesh(job)
    lower = _train_step if job.kind in TRAIN else _pass
    env = ENV if job.kind in TRAIN else Env()
    lowered = lower(job, cfg, dataclasses.replace(env, mesh=mesh, rules=PRESETS[job.rules]))
    began = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        refused = str(error).split("RESOURCE_EXHAUSTED:", 1)[1].strip().splitlines()[0]
        return CompiledPass(kind=job.kind, target=job.target, refused=refused)
    seconds = time.monotonic() - began
    memory, found = compiled.memory_analysis(), collectives(compiled.as_text())
    return CompiledPass(
        kind=job.kind,
        target=job.target,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        collectives=found.by_kind,
        in_unknown_loops=found.in_unknown_loops,
        compile_seconds=round(seconds, 1),
    )


def _mesh(job: Job) -> Mesh:
    """Fake devices as they come; of a machine that is not here, neighbours beside each other."""
    if job.target == "cpu":
        return make_mesh(*job.mesh)
    name, _, sizes = job.target.partition(":")
    topology: dict[str, Any] = dict(MACHINES[name].topology)
    if name == "h200":
        topology["topology"] = f"1x1x{sizes}"
    else:
        topology["topology_name"] = job.target
    devices = topologies.get_topology_desc(**topology).devices
    # Eight ways on a torus of 4x4x4: `jax.make_mesh` would refuse to split one of its axes.
    grid = mesh_utils.create_device_mesh(job.mesh, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def _placed(shapes: Any, places: Any) -> Any:
    """The abstract arrays, each where it lies on the mesh."""
    at = lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p)
    return jax.tree.map(at, shapes, places)


def _by_row(tree: Any, env: Env) -> Any:
    """Inputs, whose first axis is the rows of a batch."""

    def place(x: Any) -> NamedSharding:
        assert env.mesh is not None
        axes = ("rows", *(None,) * (x.ndim - 1))
        return NamedSharding(env.mesh, env.partition(axes, x.shape))

    return _placed(tree, jax.tree.map(place, tree))


def _pass(job: Job, cfg: ModelConfig, env: Env) -> Any:
    """A pass of decoding, over stacked layers; a causal one donates its cache."""
    specs = param_specs(cfg)
    params = _placed(abstract(specs), shardings(specs, env.mesh, env.rules))  # pyright: ignore
    shapes = cache_shapes(cfg, job.rows, job.context)
    places = cache_shardings(shapes, env)
    time = {"prefill": job.chunk, "AR step": 1}.get(job.kind, cfg.block_length)
    tokens = jax.ShapeDtypeStruct((job.rows, time), jnp.int32)
    counts = jax.ShapeDtypeStruct((job.rows,), jnp.int32)
    masked = jax.ShapeDtypeStruct((job.rows, time), jnp.bool)
    tokens, counts, masked = _by_row((tokens, counts, masked), env)
    cache = _placed(shapes, places)
    if job.kind == "preview":
        function: Callable[..., Any] = lambda p, t, m, n, c: preview(
            p, t, m, n, c, cfg=cfg, env=env
        )
        return jax.jit(function).lower(params, tokens, masked, counts, cache)

    def causal(p: Any, t: Any, n: Any, c: Any) -> Any:
        out = extend(
            p, t, n, c, cfg=cfg, env=env, logits="last" if job.kind == "AR step" else "none"
        )
        return out.cache, out.logits

    return jax.jit(causal, donate_argnums=3, out_shardings=(places, None)).lower(
        params, tokens, counts, cache
    )


def _train_step(job: Job, cfg: ModelConfig, env: Env) -> Any:
    """A step of both streams: float32 masters, bfloat16 pass, layers recomputed."""
    masters = abstract(param_specs(cfg.replace(dtype="float32")))
    optimiser = OptimiserConfig(kind=job.optimiser, learning_rate=1e-4, steps=1000)
    state: Any = jax.eval_shape(lambda p: init_state(p, optimiser), masters)
    batch = make_batch(
        [()] * job.rows, time=job.context, blocks=job.context // cfg.block_length,
        block=cfg.block_length, pad_id=0, seed=0, epoch=0, noise=DataConfig().noise,
    )  # fmt: skip
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch))
    return train_step.lower(
        _placed(state, state_shardings(state, cfg, env)),
        _by_row(shapes, env),
        jax.ShapeDtypeStruct((cfg.vocab_size,), jnp.bool),
        jax.ShapeDtypeStruct((), jnp.float32),
        None,
        cfg=cfg.replace(dtype="float32"),
        env=dataclasses.replace(env, remat=True),
        loss=LossConfig(chunk=LOSS_CHUNK),
        optimiser=optimiser.rule,
        accumulate=job.accumulate,
        compute_dtype="bfloat16",
    )


def main() -> None:
    """The command line; see the module's docstring."""
    try:
        said = {"result": dataclasses.asdict(run(msgspec.json.decode(sys.argv[1], type=Job)))}
    except CloverError as error:
        said = {"error": str(error)}
    print(msgspec.json.encode(said).decode())


if __name__ == "__main__":
    main()
