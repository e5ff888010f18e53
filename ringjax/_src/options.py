"""Types of the options of the attention functions, for their overloads."""

from __future__ import annotations

from typing import TypedDict

from jax import Array
from jaxtyping import Float, Int

from ringjax._src.comm.mesh import Ring
from ringjax._src.comm.ring_comm import AxisName, StrategyName
from ringjax._src.kernels.dispatch import Implementation
from ringjax._src.kernels.interface import BlockSizes


class AttentionOptions(TypedDict, total=False):
    """Options that all attention functions share."""

    is_causal: bool
    segment_ids: Int[Array, "B T"] | None
    seq_len: int | None
    scale: float | None
    dropout_rate: float
    dropout_rng: Array | None
    sink_logits: Float[Array, " N"] | None
    implementation: Implementation | None
    block_sizes: BlockSizes | None


class CallOptions(AttentionOptions, total=False):
    """Options of `dilated_attention`."""

    ring: Ring | None


class RingOptions(AttentionOptions, total=False):
    """Options of `ring_dilated_attention`."""

    axis_name: AxisName
    layout: str
    head_axis: AxisName | None
    batch_axis: AxisName | None
    strategy: StrategyName
    memory_budget: int | None
