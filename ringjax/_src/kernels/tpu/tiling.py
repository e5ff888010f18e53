"""How the TPU kernels divide a block into tiles, by TPU generation: a table chosen by the compiler's schedules.

The matrix units of a grid step idle while the vector units compute exponentials, unless the compiler finds another tile
to multiply meanwhile. `benchmarks/tpu_costs.py` reports the cycles of the kernels; docs/kernels.md has the results.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from ringjax._src.kernels.blocks import KernelConfig

LANES = 128  # of a vector register
VMEM_BYTES = 48 * 2**20  # at most, for a kernel; every generation has 64 MiB or more
_FOLDED_ROWS = 1024  # query rows of a grid step that several tasks fill


class Tiling(NamedTuple):
    """Sizes of tiles, and how many tasks share a grid step."""

    query_rows: int = 256  # query rows of a tile
    ahead: int = 1  # how many tiles ahead scores are computed, in blocks without a mask; 1 with a mask
    has_wide_units: bool = True  # whether matrix units are 256 x 256, which products of shape (128, M) fill best
    tasks: int = 1  # tasks of a grid step, more than 1 only if a task has one query block and one key block


# Cycles of a step of 1024 x 1024 without a mask (bfloat16, head dim 128; libtpu 0.0.42.1), by which this was chosen:
#                                       v5e, v5p       v6e
#   forward, 256 rows, 0 ahead        4599, 4536      3697   (512 rows: 4724, 4696, 3154; 1024: 4922, 4891, 2859)
#   forward, 256 rows, 1 ahead        4632, 4681      2696
#   gradient, dq as (M, H)          10437, 10437      5401
#   gradient, dq as (H, M)          10605, 10604      5006
_NARROW, _WIDE = Tiling(ahead=0, has_wide_units=False), Tiling()
_GENERATIONS = {  # by device kind
    "TPU v5 lite": _NARROW,
    "TPU v5e": _NARROW,
    "TPU v5": _NARROW,
    "TPU v5p": _NARROW,
    "TPU v6 lite": _WIDE,
    "TPU v6e": _WIDE,
}


def tiling(config: KernelConfig, num_tasks: int, *, device_kind: str | None = None) -> Tiling:
    """Returns the tiling of the kernels.

    Args:
        config: The kernel configuration.
        num_tasks: Number of tasks.
        device_kind: Generation of the TPU, as JAX names it; by default that of the devices that the program is traced
            for, if known.
    """
    known = _GENERATIONS.get(device_kind or _device_kind(), _WIDE)
    tasks = 1
    if config.query_blocks == config.key_blocks == 1:
        most = max(1, _FOLDED_ROWS // config.blocks.query)
        tasks = next(num for num in range(most, 0, -1) if num_tasks % num == 0)
    return known._replace(tasks=tasks)


def _device_kind() -> str:
    """Returns the kind of the devices of the current mesh or, without one, of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind
