"""What the planner knows of devices: memory, and speed of arithmetic and links, to choose how segments are shared.

The figures come from the vendors' public data sheets: NVIDIA A100 80GB SXM, H100 SXM and DGX B200 (dense), and the
"System architecture" pages of Google Cloud TPU v5e, v5p and v6e. A link is counted in one direction: on TPUs that is
the bidirectional bandwidth of a chip divided by twice its number of ports. Latencies are typical of a collective of
a few bytes. CPU devices are simulated: they share the cores of one machine, and messages are copies in memory; its
figures were measured on two x86 cores.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ringjax._src.validation import check_choice

Platform = Literal["cpu", "tpu", "cuda"]
TERA, GIGA = 10**12, 10**9


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """Speed of one device."""

    name: str
    platform: Platform
    half_flops: float  # flops per second in bfloat16 and float16
    float_flops: float  # flops per second in float32, at the precision that the kernels use
    link: float  # bytes per second to the next device of a ring, in one direction
    latency: float  # seconds that a message of a few bytes takes
    half_rows: int  # rows of a segment at which the kernels reach half of their speed
    memory_bytes: int = 0  # size of device memory; 0 if unknown
    memory_bandwidth: float = 0.0  # bytes per second to and from device memory; 0 if unknown
    machine_size: int | None = None  # devices connected by `link`; larger groups span machines. None if all are
    machine_link: float = 0.0  # bytes per second per device between machines
    is_torus: bool = False  # whether devices are connected to their neighbors only: messages to others take more links
    shares_cores: bool = False  # whether all devices share the cores of one machine

    def flops(self, dtype: str) -> float:
        """Returns the peak flops per second for a dtype."""
        return self.half_flops if dtype in ("bfloat16", "float16") else self.float_flops

    def hop_bandwidth(self, ring_devices: int) -> float:
        """Returns the bytes per second of the slowest hop in rings of `ring_devices` neighboring devices.

        Example:
            >>> DEVICES["h100"].hop_bandwidth(8) / 10**9, DEVICES["h100"].hop_bandwidth(16) / 10**9
            (450.0, 50.0)
        """
        is_inside = self.machine_size is None or self.machine_size % ring_devices == 0
        return self.link if is_inside else self.machine_link

    def exchange_bandwidth(self, devices: int) -> float:
        """Returns the bytes per second that a device sends in an all-to-all of neighboring devices.

        On a ring of ``d`` devices connected to their neighbors, a message takes ``d / 4`` links on average, and each
        device has two.
        """
        return self.hop_bandwidth(devices) / (max(1.0, devices / 8) if self.is_torus else 1.0)


def _gpu(
    name: str, half: float, single: float, memory: int, bandwidth: float, nvlink: float, network: float
) -> DeviceModel:
    """Returns a GPU; `nvlink` counts both directions, `network` is one adapter per GPU in one direction."""
    return DeviceModel(
        name,
        "cuda",
        half * TERA,
        single * TERA,
        nvlink / 2 * GIGA,
        latency=15e-6,
        half_rows=256,
        memory_bytes=memory * GIGA,
        memory_bandwidth=bandwidth * GIGA,
        machine_size=8,
        machine_link=network * GIGA,
    )


def _tpu(name: str, half: float, memory: int, bandwidth: float, links: float, ports: int) -> DeviceModel:
    """Returns a TPU; the kernels multiply float32 in six bfloat16 passes."""
    return DeviceModel(
        name,
        "tpu",
        half * TERA,
        half * TERA / 6,
        links / (2 * ports) * GIGA,
        latency=3e-6,
        half_rows=768,
        memory_bytes=memory * 2**30,
        memory_bandwidth=bandwidth * GIGA,
        is_torus=True,
    )


DEVICES = {
    device.name: device
    for device in (
        _gpu("a100", half=312, single=19.5, memory=80, bandwidth=2039, nvlink=600, network=25),
        _gpu("h100", half=989, single=67, memory=80, bandwidth=3350, nvlink=900, network=50),
        _gpu("b200", half=2250, single=75, memory=180, bandwidth=7700, nvlink=1800, network=50),
        _tpu("v5e", half=197, memory=16, bandwidth=819, links=400, ports=4),
        _tpu("v5p", half=459, memory=95, bandwidth=2765, links=1200, ports=6),
        _tpu("v6e", half=918, memory=32, bandwidth=1638, links=800, ports=4),
        DeviceModel("cpu", "cpu", 0.15 * TERA, 0.15 * TERA, 4 * GIGA, latency=2e-4, half_rows=48, shares_cores=True),
    )
}
ACCELERATORS = {name: device for name, device in DEVICES.items() if device.memory_bytes}
_DEFAULTS = {"cpu": "cpu", "tpu": "v5p", "cuda": "h100"}
DEVICE_NAMES = (*_DEFAULTS, *ACCELERATORS)
_KINDS = {  # parts of `device_kind`, the more specific first
    "v5 lite": "v5e",
    "v5e": "v5e",
    "v5": "v5p",
    "v6": "v6e",
    "a100": "a100",
    "h100": "h100",
    "h200": "h100",
    "b200": "b200",
}


def device_named(name: str) -> DeviceModel:
    """Returns the device with this name; the name of a platform gives a typical device.

    Example:
        >>> device_named("tpu").name, device_named("v5e").name
        ('v5p', 'v5e')
    """
    check_choice("device", name, DEVICE_NAMES)
    return DEVICES[_DEFAULTS.get(name, name)]


def device_of_kind(platform: str, kind: str) -> str:
    """Returns the name of the device of a JAX platform and `device_kind`.

    Example:
        >>> device_of_kind("tpu", "TPU v5 lite"), device_of_kind("gpu", "NVIDIA H100 80GB HBM3")
        ('v5e', 'h100')
    """
    name = "cuda" if platform in ("gpu", "cuda", "rocm") else platform if platform == "tpu" else "cpu"
    known = known_device(kind)
    return known if known is not None and DEVICES[known].platform == name else _DEFAULTS[name]


def known_device(kind: str) -> str | None:
    """Returns the name of the device of a `device_kind`, or None if there are no figures for it."""
    return next((device for part, device in _KINDS.items() if part in kind.lower()), None)
