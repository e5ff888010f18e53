"""Peak figures of accelerators, for estimates: those of the planner, with memory sizes and bandwidths."""

from __future__ import annotations

import dataclasses

from ringjax._src.aot.targets import CUDA_TARGETS, TPU_CHIPS
from ringjax._src.comm.devices import DEVICES as MODELS
from ringjax._src.comm.devices import GIGA, DeviceModel, Platform


@dataclasses.dataclass(frozen=True)
class Device:
    """Peak figures of one device."""

    model: DeviceModel  # speed of arithmetic and links
    memory_bytes: int  # size of device memory
    bandwidth: float  # bytes per second to and from device memory

    @property
    def name(self) -> str:
        """Name on the command line."""
        return self.model.name

    @property
    def platform(self) -> Platform:
        """Platform of the device."""
        return self.model.platform


_TPU_BANDWIDTH = {"v5e": 819, "v5p": 2765, "v6e": 1638}  # GB/s of HBM, as on the pages of the chips
_TPUS = [Device(MODELS[name], TPU_CHIPS[name].hbm_bytes, speed * GIGA) for name, speed in _TPU_BANDWIDTH.items()]
_GPU_FACTS = {name: CUDA_TARGETS[name.upper()].facts for name in ("a100", "h100", "b200")}
_GPUS = [Device(MODELS[name], facts.memory_bytes, facts.bandwidth) for name, facts in _GPU_FACTS.items()]
DEVICES = {device.name: device for device in (*_GPUS, *_TPUS)}
