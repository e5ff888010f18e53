"""Compilation targets: descriptions of accelerators for their compilers, and their memory limits.

This module needs neither a device nor a compiler. The figures come from public specifications of the vendors.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Literal

from ringjax._src.comm.devices import DEVICES

KIB, MIB = 2**10, 2**20
_SIZE = re.compile("[1-9][0-9]{0,5}")  # along one axis of a grid


# Vector memory of one core, by generation of TPUs.
_VMEM_BYTES = {"v5e": 128 * MIB, "v5p": 64 * MIB, "v6e": 128 * MIB}
# By default, exchanges of heads are synchronous. SparseCores, where the chip has them, execute them on their own; with
# their option, exchanges on v5e stay synchronous.
_ASYNC_EXCHANGES = (("xla_tpu_enable_async_all_to_all", "true"),)
_OFFLOADED_EXCHANGES = (("xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all", "true"),)


@dataclasses.dataclass(frozen=True)
class TpuTarget:
    """A grid of TPU chips.

    Args:
        topology: Generation and grid, such as ``"v5e:2x4"`` or ``"v5p:2x2x2"``.
        options: XLA options that differ from the defaults.

    Raises:
        ValueError: If the generation is unknown, or the grid is not a list of sizes separated by ``x``.

    Example:
        >>> TpuTarget("v5p:2x2x2").devices
        8
    """

    topology: str
    options: tuple[tuple[str, str], ...] = ()
    platform: Literal["tpu"] = "tpu"

    def __post_init__(self) -> None:
        generation, _, grid = self.topology.partition(":")
        if generation not in _VMEM_BYTES or not all(map(_SIZE.fullmatch, grid.split("x"))):
            raise ValueError(
                f"`topology` must be one of {tuple(_VMEM_BYTES)}, a colon and a grid such as 2x4, "
                f"got {self.topology!r}."
            )

    @property
    def name(self) -> str:
        """Generation and grid, same as `topology`."""
        return self.topology

    @property
    def generation(self) -> str:
        """Generation of the chips."""
        return self.topology.partition(":")[0]

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chips along each axis."""
        return tuple(int(size) for size in self.topology.partition(":")[2].split("x"))

    @property
    def devices(self) -> int:
        """Number of chips; each is one device."""
        return math.prod(self.grid)

    @property
    def memory_bytes(self) -> int:
        """Memory of one device in bytes."""
        return DEVICES[self.generation].memory_bytes

    @property
    def kernel_memory_bytes(self) -> int:
        """On-chip memory available to a kernel: VMEM."""
        return _VMEM_BYTES[self.generation]


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """Specifications of a GPU."""

    product: str  # name as reported by the driver
    capability: tuple[int, int]  # compute capability, major and minor
    multiprocessors: int
    float_units: int  # single-precision units per multiprocessor
    shared_kib: int  # shared memory per multiprocessor; a block may use 1 KiB less
    l2_bytes: int
    clock_ghz: float  # maximum
    nvlinks: int  # number of links

    @property
    def has_accelerated_features(self) -> bool:
        """Whether to compile for this architecture only (``sm_90a`` instead of ``sm_90``)."""
        return self.capability >= (9, 0)


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
    "shared_memory_per_block": 48 * KIB,  # without opting in to more
}


# By default, at most one collective of a GPU program is in flight.
_BOTH_DIRECTIONS = (("xla_gpu_experimental_parallel_collective_overlap_limit", "2"),)


@dataclasses.dataclass(frozen=True)
class CudaTarget:
    """GPUs of one kind, fully connected within a machine, in one or more machines."""

    name: str
    facts: GpuFacts
    devices: int = 8  # in total
    machines: int = 1  # each with the same number of GPUs
    options: tuple[tuple[str, str], ...] = _BOTH_DIRECTIONS  # XLA options that a ring needs and that are not defaults
    platform: Literal["cuda"] = "cuda"

    @property
    def topology(self) -> str:
        """Number of partitions, machines, and GPUs per machine."""
        return f"1x{self.machines}x{self.devices // self.machines}"

    @property
    def architecture(self) -> str:
        """Architecture name for `ptxas`."""
        major, minor = self.facts.capability
        return f"sm_{major}{minor}{'a' if self.facts.has_accelerated_features else ''}"

    @property
    def memory_bytes(self) -> int:
        """Memory of one device in bytes."""
        return DEVICES[self.name.lower()].memory_bytes

    @property
    def kernel_memory_bytes(self) -> int:
        """On-chip memory available to a kernel: the maximum shared memory of a block."""
        return (self.facts.shared_kib - 1) * KIB

    def description(self) -> str:
        """Returns the target config of XLA's GPU compiler, as a text-format protocol buffer."""
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
            f"memory_bandwidth: {DEVICES[self.name.lower()].memory_bandwidth:.0f}",
            f"device_memory_size: {self.memory_bytes}",
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
                multiprocessors=108,
                float_units=64,
                shared_kib=164,
                l2_bytes=40 * MIB,
                clock_ghz=1.41,
                nvlinks=12,
            ),
            # the default since Hopper
            options=(*_BOTH_DIRECTIONS, ("xla_gpu_enable_latency_hiding_scheduler", "True")),
        ),
        CudaTarget(
            "H100",
            GpuFacts(
                product="NVIDIA H100 80GB HBM3",
                capability=(9, 0),
                multiprocessors=132,
                float_units=128,
                shared_kib=228,
                l2_bytes=50 * MIB,
                clock_ghz=1.98,
                nvlinks=18,
            ),
        ),
        CudaTarget(
            "B200",
            GpuFacts(
                product="NVIDIA B200",
                capability=(10, 0),
                multiprocessors=148,
                float_units=128,
                shared_kib=228,
                l2_bytes=126 * MIB,
                clock_ghz=1.965,
                nvlinks=18,
            ),
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class CpuTarget:
    """Simulated CPU devices, which share the memory of this machine.

    Example:
        >>> CpuTarget(8).name
        'cpu:8'
    """

    devices: int
    options: tuple[tuple[str, str], ...] = ()
    platform: Literal["cpu"] = "cpu"

    @property
    def name(self) -> str:
        """Platform and number of devices."""
        return f"cpu:{self.devices}"

    @property
    def memory_bytes(self) -> int:
        """Memory of this machine divided by the number of devices."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.devices


Target = TpuTarget | CudaTarget | CpuTarget
"""A compilation target: TPU chips, GPUs or CPU devices."""


def target_named(name: str) -> Target:
    """Returns the target with a name.

    Args:
        name: ``"cuda:h100:1x8x8"`` for eight machines of eight GPUs, ``"H100"`` for one such machine, ``"tpu:v5e:2x4"``
            or ``"v5e:2x4"`` for a grid of TPU chips, or ``"cpu:8"`` for eight CPU devices.

    Returns:
        The target.

    Raises:
        ValueError: If the platform, the accelerator or the topology in `name` is unknown.

    Example:
        >>> from ringjax.aot import target_named
        >>> target_named("cuda:h100:1x8x8").devices, target_named("tpu:v5p:8x8x8").devices
        (64, 512)
    """
    if name in CUDA_TARGETS:
        return CUDA_TARGETS[name]
    platform, _, rest = name.partition(":")
    if platform == "tpu":
        return _tpu(rest)
    if platform == "cpu":
        if not _SIZE.fullmatch(rest):
            raise ValueError(f"`name` must be cpu and a number of devices, such as cpu:8, got {name!r}.")
        return CpuTarget(int(rest))
    if platform != "cuda":
        return _tpu(name)
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


def _tpu(topology: str) -> TpuTarget:
    """Returns a grid of TPU chips with the options that exchanges need."""
    return TpuTarget(topology, _ASYNC_EXCHANGES if topology.startswith("v5e") else _OFFLOADED_EXCHANGES)
