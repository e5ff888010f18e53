"""Types of the options of the attention functions, for their overloads."""

from __future__ import annotations

from ringjax._src.comm.mesh import Ring
from ringjax._src.comm.ring_comm import AxisName, StrategyName
from ringjax._src.kernels.dispatch import Implementation
from ringjax._src.kernels.interface import BlockSizes
from ringjax._src.reference import SharedOptions


class _KernelOptions(SharedOptions, total=False):
    implementation: Implementation | None
    block_sizes: BlockSizes | None


class CallOptions(_KernelOptions, total=False):
    """Options of `dilated_attention`."""

    ring: Ring | None


class RingOptions(_KernelOptions, total=False):
    """Options of `ring_dilated_attention`."""

    axis_name: AxisName
    layout: str
    head_axis: AxisName | None
    batch_axis: AxisName | None
    strategy: StrategyName
    memory_budget: int | None
