"""Accelerators as values: what a compiler must be told of them, and the limits that a program must keep.

Nothing here touches a device or needs a compiler's package. The figures are the public ones of the makers.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Literal

KIB, MIB, GIB = 2**10, 2**20, 2**30
_SIZE = re.compile("[1-9][0-9]{0,5}")  # along one axis of a grid


@dataclasses.dataclass(frozen=True)
class TpuChip:
    """A generation of TPUs: memory in HBM and in the vector memory (VMEM) of one core."""

    hbm_bytes: int
    vmem_bytes: int


TPU_CHIPS = {
    "v5e": TpuChip(hbm_bytes=16 * GIB, vmem_bytes=128 * MIB),
    "v5p": TpuChip(hbm_bytes=95 * GIB, vmem_bytes=64 * MIB),
    "v6e": TpuChip(hbm_bytes=32 * GIB, vmem_bytes=128 * MIB),
}


@dataclasses.dataclass(frozen=True)
class TpuTarget:
    """Some TPU chips, wired as a grid.

    Args:
        topology: Generation and grid, such as ``"v5e:2x4"`` or ``"v5p:2x2x2"``.
        options: XLA options that differ from the compiler's own.

    Raises:
        ValueError: If the generation is not known, or the grid is not numbers with ``x`` between them.

    Example:
        >>> TpuTarget("v5p:2x2x2").devices
        8
    """

    topology: str
    options: tuple[tuple[str, str], ...] = ()
    platform: Literal["tpu"] = "tpu"

    def __post_init__(self) -> None:
        generation, _, grid = self.topology.partition(":")
        if generation not in TPU_CHIPS or not all(map(_SIZE.fullmatch, grid.split("x"))):
            raise ValueError(
                f"`topology` must be one of {tuple(TPU_CHIPS)}, a colon and a grid such as 2x4, got {self.topology!r}."
            )

    @property
    def name(self) -> str:
        """Generation and grid."""
        return self.topology

    @property
    def chip(self) -> TpuChip:
        """What one chip has."""
        return TPU_CHIPS[self.topology.partition(":")[0]]

    @property
    def grid(self) -> tuple[int, ...]:
        """Chips along each axis."""
        return tuple(int(size) for size in self.topology.partition(":")[2].split("x"))

    @property
    def devices(self) -> int:
        """Number of chips; each is one device."""
        return math.prod(self.grid)

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return self.chip.hbm_bytes

    @property
    def kernel_memory_bytes(self) -> int:
        """What a kernel may use near the compute units: VMEM."""
        return self.chip.vmem_bytes


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """What the maker says of a GPU.

    Attributes:
        product: Name as the driver gives it.
        capability: Compute capability, major and minor.
        has_accelerated_features: Whether code is made for this architecture only (``sm_90a`` instead of ``sm_90``).
        multiprocessors: Streaming multiprocessors.
        float_units: Single-precision units of one multiprocessor.
        shared_kib: Shared memory of one multiprocessor, in KiB; one block may have 1 KiB less.
        l2_bytes: Second-level cache.
        clock_ghz: Highest clock.
        bandwidth: Bytes per second from device memory.
        memory_bytes: Device memory.
        nvlinks: Links to other GPUs.
    """

    product: str
    capability: tuple[int, int]
    has_accelerated_features: bool
    multiprocessors: int
    float_units: int
    shared_kib: int
    l2_bytes: int
    clock_ghz: float
    bandwidth: int
    memory_bytes: int
    nvlinks: int


# The same on every generation since Volta (CUDA programming guide, "Technical specifications per compute capability").
_CUDA_LIMITS: dict[str, int] = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "registers_per_core_limit": 64 * KIB,
    "registers_per_block_limit": 64 * KIB,
    "shared_memory_per_block": 48 * KIB,  # what a kernel gets without asking
}


@dataclasses.dataclass(frozen=True)
class CudaTarget:
    """Some GPUs of one kind: in one machine, all linked with each other, or in several.

    Attributes:
        name: What it is called here.
        facts: Of one GPU.
        devices: Number of GPUs in all.
        machines: Machines that share them equally.
        options: XLA options that a ring needs and that the compiler does not set by itself on these GPUs. (To hide
            messages behind work, it has a scheduler that it turns on only from Hopper on.)
    """

    name: str
    facts: GpuFacts
    devices: int = 8
    machines: int = 1
    options: tuple[tuple[str, str], ...] = ()
    platform: Literal["cuda"] = "cuda"

    @property
    def topology(self) -> str:
        """Partitions, machines, and GPUs of a machine."""
        return f"1x{self.machines}x{self.devices // self.machines}"

    @property
    def architecture(self) -> str:
        """What `ptxas` calls it."""
        major, minor = self.facts.capability
        return f"sm_{major}{minor}{'a' if self.facts.has_accelerated_features else ''}"

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return self.facts.memory_bytes

    @property
    def kernel_memory_bytes(self) -> int:
        """What a kernel may use near the compute units: shared memory of a block that asks for all."""
        return (self.facts.shared_kib - 1) * KIB

    def description(self) -> str:
        """The device in the text form of the message that XLA's GPU compiler reads."""
        facts = self.facts
        major, minor = facts.capability
        extension = "ACCELERATED_FEATURES" if facts.has_accelerated_features else "NONE"
        info = [f"{field}: {value}" for field, value in _CUDA_LIMITS.items()]
        info += [
            f"shared_memory_per_core: {facts.shared_kib * KIB}",
            f"shared_memory_per_block_optin: {self.kernel_memory_bytes}",
            f"core_count: {facts.multiprocessors}",
            f"fpus_per_core: {facts.float_units}",
            f"l2_cache_size: {facts.l2_bytes}",
            f"clock_rate_ghz: {facts.clock_ghz}",
            f"memory_bandwidth: {facts.bandwidth}",
            f"device_memory_size: {facts.memory_bytes}",
            f"cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}",
            f"device_interconnect_info {{ active_links: {facts.nvlinks} }}",
            f'name: "{facts.product}"',
        ]
        lines = ["gpu_device_info {", *(f"  {line}" for line in info), "}"]
        return "\n".join([*lines, 'platform_name: "CUDA"', f'device_description_str: "{facts.product}"', ""])


CUDA_TARGETS = {
    target.name: target
    for target in (
        CudaTarget(
            "A100",
            GpuFacts(
                product="NVIDIA A100-SXM4-80GB",
                capability=(8, 0),
                has_accelerated_features=False,
                multiprocessors=108,
                float_units=64,
                shared_kib=164,
                l2_bytes=40 * MIB,
                clock_ghz=1.41,
                bandwidth=2_039_000_000_000,
                memory_bytes=80_000_000_000,
                nvlinks=12,
            ),
            options=(("xla_gpu_enable_latency_hiding_scheduler", "True"),),
        ),
        CudaTarget(
            "H100",
            GpuFacts(
                product="NVIDIA H100 80GB HBM3",
                capability=(9, 0),
                has_accelerated_features=True,
                multiprocessors=132,
                float_units=128,
                shared_kib=228,
                l2_bytes=50 * MIB,
                clock_ghz=1.98,
                bandwidth=3_350_000_000_000,
                memory_bytes=80_000_000_000,
                nvlinks=18,
            ),
        ),
        CudaTarget(
            "B200",
            GpuFacts(
                product="NVIDIA B200",
                capability=(10, 0),
                has_accelerated_features=True,
                multiprocessors=148,
                float_units=128,
                shared_kib=228,
                l2_bytes=126 * MIB,
                clock_ghz=1.965,
                bandwidth=7_700_000_000_000,
                memory_bytes=180_000_000_000,
                nvlinks=18,
            ),
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class CpuTarget:
    """Some CPU devices of this machine, which need no other compiler; they share its memory.

    Example:
        >>> CpuTarget(8).name
        'cpu:8'
    """

    devices: int
    options: tuple[tuple[str, str], ...] = ()
    platform: Literal["cpu"] = "cpu"

    @property
    def name(self) -> str:
        """The number of devices."""
        return f"cpu:{self.devices}"

    @property
    def memory_bytes(self) -> int:
        """The share of one device in the memory of the machine."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.devices


Target = TpuTarget | CudaTarget | CpuTarget


def target_named(name: str) -> Target:
    """The target of a name: GPUs of `CUDA_TARGETS`, or a TPU topology.

    Args:
        name: Such as ``"H100"`` (eight of them in a machine), ``"cuda:h100:1x8x8"`` (eight such machines),
            ``"v5e:2x4"``, which is also ``"tpu:v5e:2x4"``, or ``"cpu:8"``.

    Raises:
        ValueError: If there is none of that name.

    Example:
        >>> target_named("cuda:h100:1x8x8").devices, target_named("tpu:v5p:8x8x8").devices
        (64, 512)
    """
    if name in CUDA_TARGETS:
        return CUDA_TARGETS[name]
    platform, _, rest = name.partition(":")
    if platform == "tpu":
        return TpuTarget(rest)
    if platform == "cpu":
        if not _SIZE.fullmatch(rest):
            raise ValueError(f"`name` must be cpu and a number of devices, such as cpu:8, got {name!r}.")
        return CpuTarget(int(rest))
    if platform != "cuda":
        return TpuTarget(name)
    gpu, _, topology = rest.partition(":")
    sizes = topology.split("x") if topology else ["1", "1", "8"]
    if gpu.upper() not in CUDA_TARGETS or len(sizes) != 3 or sizes[0] != "1" or not all(map(_SIZE.fullmatch, sizes)):
        kinds = ", ".join(kind.lower() for kind in CUDA_TARGETS)
        raise ValueError(
            f"`name` must be cuda, one of {kinds}, and 1 x machines x GPUs of a machine, such as cuda:h100:1x8x8, "
            f"got {name!r}."
        )
    machines, gpus = int(sizes[1]), int(sizes[2])
    return dataclasses.replace(CUDA_TARGETS[gpu.upper()], devices=machines * gpus, machines=machines)
