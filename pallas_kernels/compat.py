"""The one place that imports Pallas, and what stands in for machines that are not here.

`pl.pallas_call` is for TPUs (Mosaic), `plgpu.kernel` for NVIDIA Hopper (Mosaic GPU): jax 0.11 has
no other living route to either. Under `interpreted(...)` a kernel runs in Pallas' interpreter on
this machine, under `target(...)` it is traced for a machine that only its compiler knows.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
from jax._src import config
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

__all__ = ["MACHINES", "Machine", "interpreted", "pl", "platform", "plgpu", "pltpu", "target"]

_H200 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4814720000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150121545728 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" runtime_version { major: 13 minor: 0 } dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200" """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that its compiler knows; one device of it.

    Attributes:
        platform: `tpu` or `gpu`, as JAX says it.
        kind: JAX's device kind.
        topology: arguments of `get_topology_desc`.
        cores: streaming multiprocessors of a GPU, tensor cores of a TPU.
    """

    platform: Literal["tpu", "gpu"]
    kind: str
    topology: tuple[tuple[str, str], ...]
    cores: int

    def sharding(self) -> SingleDeviceSharding:
        """Placement on one such device, for `jit(..., in_shardings=...)` and compilation.

        Needs the compiler: libtpu for TPUs, jax-cuda13-plugin for GPUs (dependency group `aot`).
        """
        arguments: dict[str, Any] = dict(self.topology)
        return SingleDeviceSharding(topologies.get_topology_desc(**arguments).devices[0])


def _tpu(kind: str, topology: str) -> Machine:
    arguments = (("platform", "tpu"), ("topology_name", topology))
    return Machine(platform="tpu", kind=kind, topology=arguments, cores=1)


MACHINES = {
    "v5e": _tpu("TPU v5 lite", "v5e:2x2"),
    "v5p": _tpu("TPU v5", "v5p:2x2x1"),
    "v6e": _tpu("TPU v6 lite", "v6e:2x2"),
    "h200": Machine(
        platform="gpu",
        kind="NVIDIA H200",
        topology=(
            ("platform", "cuda"),
            ("topology_name", "h200"),
            ("target_config", _H200),
            ("topology", "1x1x8"),
        ),
        cores=132,
    ),
}


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: what a kernel traced here and now will run on."""
    params = config.pallas_tpu_interpret_mode_context_manager.value
    if params is not None:
        return "gpu" if isinstance(params, plgpu.InterpretGPUParams) else "tpu"
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


@contextlib.contextmanager
def interpreted(where: Literal["tpu", "gpu"], *, detect_races: bool = False) -> Iterator[None]:
    """Kernels traced inside run in Pallas' simulator of that machine.

    Memory nobody wrote is NaN, and a read past the end of a buffer raises.
    """
    if where == "tpu":
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=detect_races)):
            yield
    else:
        machine = _abstract(MACHINES["h200"])
        params = plgpu.InterpretGPUParams(detect_races=detect_races)
        with plgpu.force_gpu_interpret_mode(params), jax.sharding.use_abstract_mesh(machine):
            yield


@contextlib.contextmanager
def target(machine: Machine) -> Iterator[None]:
    """Kernels traced inside are for `machine`, whatever this process runs on."""
    with jax.sharding.use_abstract_mesh(_abstract(machine)):
        yield


def _abstract(machine: Machine) -> AbstractMesh:
    device = AbstractDevice(
        device_kind=machine.kind, num_cores=machine.cores, platform=machine.platform
    )
    return AbstractMesh((), (), abstract_device=device)
