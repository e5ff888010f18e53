"""How the TPU kernels divide a block into tiles, by TPU generation: a table chosen by the compiler's schedules.

The matrix units of a grid step idle while the vector units compute exponentials, unless the compiler finds another tile
to multiply meanwhile. `benchmarks/tpu_costs.py` reports the cycles of other choices; docs/kernels.md has the results.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from ringjax._src.kernels.blocks import KernelConfig

LANES = 128  # of a vector register
_FOLDED_ROWS = 1024  # query rows of a grid step that several tasks fill


class Tiling(NamedTuple):
    """Sizes of tiles, and how many tasks share a grid step."""

    query_rows: int = 256  # query rows of a tile
    ahead: int = 1  # how many tiles ahead scores are computed, in blocks without a mask; 1 with a mask
    tasks: int = 1  # tasks of a grid step, more than 1 only if a task has one query block and one key block


# TABLE
_AHEAD = {"TPU v5 lite": 0, "TPU v5e": 0, "TPU v5": 0, "TPU v5p": 0, "TPU v6 lite": 1, "TPU v6e": 1}
_AHEAD_UNKNOWN = 1


def tiling(config: KernelConfig, num_tasks: int, *, device_kind: str | None = None) -> Tiling:
    """Returns the tiling of the kernels.

    Args:
        config: The kernel configuration.
        num_tasks: Number of tasks.
        device_kind: Generation of the TPU, as JAX names it; by default that of the devices that the program is traced
            for, if known.
    """
    ahead = _AHEAD.get(device_kind or _device_kind(), _AHEAD_UNKNOWN)
    tasks = 1
    if config.query_blocks == config.key_blocks == 1:
        most = max(1, _FOLDED_ROWS // config.blocks.query)
        tasks = next(num for num in range(most, 0, -1) if num_tasks % num == 0)
    return Tiling(ahead=ahead, tasks=tasks)


def _device_kind() -> str:
    """Returns the kind of the devices of the current mesh or, without one, of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind
