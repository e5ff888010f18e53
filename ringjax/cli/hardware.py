"""Peak figures of accelerators, for estimates.

The figures come from the vendors' public data sheets: NVIDIA A100 80GB SXM, H100 SXM and DGX B200 (dense), and the
"System architecture" pages of Google Cloud TPU v5e, v5p and v6e. A ring uses one link in one direction: on TPUs that
is the bidirectional bandwidth of a chip divided by twice its number of ports.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ringjax._src.aot.targets import CUDA_TARGETS, TPU_CHIPS

Platform = Literal["cpu", "tpu", "cuda"]
TERA, GIGA = 10**12, 10**9


@dataclasses.dataclass(frozen=True)
class Device:
    """Peak figures of one device.

    Attributes:
        name: Name on the command line.
        platform: Platform of the device.
        half_flops: Flops per second in bfloat16 and float16.
        float_flops: Flops per second in float32, at the precision that the kernels use.
        memory_bytes: Size of device memory.
        bandwidth: Bytes per second to and from device memory.
        link: Bytes per second to the next device of a ring, in one direction.
        machine_size: Number of devices connected by `link`; larger rings span machines. None if all devices are.
        machine_link: Bytes per second per device between machines.
    """

    name: str
    platform: Platform
    half_flops: float
    float_flops: float
    memory_bytes: int
    bandwidth: float
    link: float
    machine_size: int | None = None
    machine_link: float = 0.0

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


def _gpu(name: str, half: float, single: float, nvlink: float, network: float) -> Device:
    """Returns a GPU; `nvlink` counts both directions, `network` is one adapter per GPU in one direction."""
    facts = CUDA_TARGETS[name.upper()].facts
    memory, bandwidth = facts.memory_bytes, facts.bandwidth
    return Device(name, "cuda", half * TERA, single * TERA, memory, bandwidth, nvlink / 2 * GIGA, 8, network * GIGA)


def _tpu(name: str, half: float, bandwidth: float, links: float, ports: int) -> Device:
    """Returns a TPU; the kernels multiply float32 in six bfloat16 passes."""
    memory = TPU_CHIPS[name].hbm_bytes
    return Device(name, "tpu", half * TERA, half * TERA / 6, memory, bandwidth * GIGA, links / (2 * ports) * GIGA)


DEVICES = {
    device.name: device
    for device in (
        _gpu("a100", half=312, single=19.5, nvlink=600, network=25),
        _gpu("h100", half=989, single=67, nvlink=900, network=50),
        _gpu("b200", half=2250, single=75, nvlink=1800, network=50),
        _tpu("v5e", half=197, bandwidth=819, links=400, ports=4),
        _tpu("v5p", half=459, bandwidth=2765, links=1200, ports=6),
        _tpu("v6e", half=918, bandwidth=1638, links=800, ports=4),
    )
}
