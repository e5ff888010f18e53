"""How the TPU kernels divide a block into tiles, by TPU generation: a table chosen by the compiler's schedules.

The matrix units of a grid step idle while the vector units compute exponentials, unless the compiler finds another tile
to multiply meanwhile. `benchmarks/tpu_costs.py` reports the cycles of other choices; docs/kernels.md has the results.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from ringjax._src.kernels.blocks import KernelConfig

LANES = 128  # of a vector register
_DIAGONAL_ROWS = 256
_FOLDED_ROWS = 1024  # query rows of a grid step that several tasks fill


class Tiling(NamedTuple):
    """Sizes of tiles, and how many tasks share a grid step."""

    query_rows: int  # query rows that are computed at a time in a block without masked pairs
    diagonal_rows: int  # the same in a block on the diagonal, where tiles past the diagonal are skipped
    tasks: int = 1  # tasks of a grid step, more than 1 only if a task has one query block and one key block


class _Rows(NamedTuple):
    forward: int
    gradient: int


# Query rows at a time. Cycles of a step of 1024 x 1024 (bfloat16, head dim 128) with 256 / 512 / 1024 rows at a time:
#   forward:  v5e 4442 / 4724 / 4922   v5p 4498 / 4696 / 4891   v6e 3697 / 3154 / 2952
#   gradient: v5e 10605 / 10592 / 10602   v5p 10604 / 10592 / 10602   v6e 5007 / 5059 / 5043
_GENERATIONS = {
    "TPU v5 lite": _Rows(forward=256, gradient=512),
    "TPU v5e": _Rows(forward=256, gradient=512),
    "TPU v5": _Rows(forward=256, gradient=512),
    "TPU v5p": _Rows(forward=256, gradient=512),
    "TPU v6 lite": _Rows(forward=1024, gradient=256),
    "TPU v6e": _Rows(forward=1024, gradient=256),
}
_UNKNOWN = _Rows(forward=512, gradient=512)


def tiling(config: KernelConfig, num_tasks: int, *, is_bwd: bool, device_kind: str | None = None) -> Tiling:
    """Returns the tiling of a pass.

    Args:
        config: The kernel configuration.
        num_tasks: Number of tasks.
        is_bwd: Whether this is the backward pass.
        device_kind: Generation of the TPU, as JAX names it; by default that of the devices that the program is traced
            for, if known.
    """
    known = _GENERATIONS.get(device_kind or _device_kind(), _UNKNOWN)
    rows = min(known.gradient if is_bwd else known.forward, config.blocks.query)
    diagonal_rows = min(_DIAGONAL_ROWS, config.blocks.query)
    tasks = 1
    if config.query_blocks == config.key_blocks == 1:
        most = max(1, _FOLDED_ROWS // config.blocks.query)
        tasks = next(num for num in range(most, 0, -1) if num_tasks % num == 0)
    return Tiling(rows, diagonal_rows, tasks)


def _device_kind() -> str:
    """Returns the kind of the devices of the current mesh or, without one, of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind
