"""Machines: memory and bandwidth of one device, by their makers' figures."""

import dataclasses

GB = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: as it is sold.
        memory: bytes; the maker's GB as 10^9, which is at most what a program finds there. What the
            runtime keeps for itself is not subtracted.
        bandwidth: of its memory, bytes per second.
        host_link: to its host's memory, bytes per second in one direction.
        source: of the figures.
    """

    name: str
    memory: int
    bandwidth: float
    host_link: float
    source: str


# PCIe x16 in one direction: 64 GB/s of generation 5, 32 of generation 4. NVLink-C2C: 450.
DEVICES = (
    Device(
        name="GB300", memory=288 * GB, bandwidth=8000e9, host_link=450e9,
        source="NVIDIA, Blackwell Ultra: 288 GB HBM3e, 8 TB/s; NVLink-C2C 900 GB/s both ways",
    ),
    Device(
        name="H200", memory=141 * GB, bandwidth=4800e9, host_link=64e9,
        source="NVIDIA, H200 data sheet: 141 GB HBM3e, 4.8 TB/s; PCIe 5",
    ),
    Device(
        name="RTX PRO 6000", memory=96 * GB, bandwidth=1792e9, host_link=64e9,
        source="NVIDIA, RTX PRO 6000 Blackwell: 96 GB GDDR7, 1,792 GB/s; PCIe 5",
    ),
    Device(
        name="H100", memory=80 * GB, bandwidth=3350e9, host_link=64e9,
        source="NVIDIA, H100 SXM data sheet: 80 GB HBM3, 3.35 TB/s; PCIe 5",
    ),
    Device(
        name="RTX 5070 Ti", memory=16 * GB, bandwidth=896e9, host_link=64e9,
        source="NVIDIA, GeForce RTX 5070 Ti: 16 GB GDDR7, 896 GB/s; PCIe 5",
    ),
    Device(
        name="TPU v5e", memory=16 * GB, bandwidth=819e9, host_link=32e9,
        source="docs.cloud.google.com/tpu/docs/v5e: 16 GB, 819 GB/s; PCIe 4 assumed",
    ),
    Device(
        name="TPU v5p", memory=95 * GB, bandwidth=2765e9, host_link=32e9,
        source="docs.cloud.google.com/tpu/docs/v5p: 95 GB, 2,765 GB/s; PCIe 4 assumed",
    ),
    Device(
        name="TPU v6e", memory=32 * GB, bandwidth=1638e9, host_link=64e9,
        source="docs.cloud.google.com/tpu/docs/v6e: 32 GB, 1,638 GB/s; PCIe 5",
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How projections and experts are stored; everything else keeps its own dtype.

    Attributes:
        name: of the format.
        bits: of one number; None: the dtype of its spec, so nothing is changed.
        group: inputs of one output that share a scale.
        scale_bits: of that scale.
    """

    name: str
    bits: int | None = None
    group: int = 128
    scale_bits: int = 16


AS_IS = WeightFormat(name="as is")
FORMATS = (AS_IS, WeightFormat(name="int8", bits=8), WeightFormat(name="int4", bits=4))
