"""The static description of an attention call."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringjax._src.comm.devices import Platform, device_named
from ringjax._src.comm.layout import layout_named
from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.kernels.interface import AttendConfig, BlockSizes
from ringjax._src.online_softmax import accumulator
from ringjax._src.pattern import DilationPattern
from ringjax._src.rows.sizes import QUERY_ROWS, ring_query_rows


class AttentionSpec(NamedTuple):
    """Everything about an attention call that is known before it is traced; a plan is made for a spec."""

    pattern: DilationPattern
    seq_len: int  # length of the sequence without padding
    stored_length: int  # length with padding
    batch: int  # batch entries per device
    kv_heads: int  # key/value heads, over all devices
    q_per_kv: int  # query heads per key/value head
    head_dim: int  # dimensions per head
    is_causal: bool
    dtype: str  # dtype of query, key and value
    has_ids: bool  # whether there are segment ids
    has_sinks: bool = False  # whether there are attention sinks
    ring_size: int = 1  # devices that share the sequence
    layout: str = "contiguous"  # layout of the sequence
    strategy: str = "ring"  # how branches share segments
    memory_budget: int | None = None  # bytes per device, or None
    head_shards: int = 1  # devices that share the heads
    device: str = "cpu"  # name of the devices, see `devices.py`
    inner_devices: int | None = None  # devices on the inner mesh axis, if the ring is over several axes
    axis_name: AxisName | None = None  # mesh axis of the ring, or None without a ring
    head_axis: AxisName | None = None  # mesh axis of the heads, or None
    scale: float = 1.0  # factor applied to the scores
    dropout_rate: float = 0.0  # probability of dropping a weight
    implementation: str | None = None  # the kernels that the caller asked for, or None
    block_sizes: BlockSizes | None = None  # block sizes of the Pallas kernels, or None
    returns_lse: bool = False  # whether the caller asked for the log-sum-exp
    saves_memory: bool = False  # whether to prefer less memory to less time, because the budget is small

    @property
    def platform(self) -> Platform:
        """The platform whose memory the budget limits."""
        return device_named(self.device).platform

    @property
    def shard_length(self) -> int:
        """Positions per device."""
        return self.stored_length // self.ring_size

    @property
    def chunk_length(self) -> int:
        """Positions per chunk of the layout."""
        return self.stored_length // layout_named(self.layout).multiple(self.ring_size)

    @property
    def local_kv_heads(self) -> int:
        """Key/value heads per device."""
        return self.kv_heads // self.head_shards

    @property
    def has_zero_keys(self) -> bool:
        """Whether queries may attend to keys of zeros, see `DilationPattern.padding`."""
        if self.pattern.padding != "zeros" or self.is_causal:
            return False
        branches = self.pattern.branches(self.kv_heads, self.seq_len)
        return self.has_ids or any(self.seq_len % b.segment_length or b.segment_length % b.rate for b in branches)

    @property
    def query_block_rows(self) -> int:
        """Most rows of a query block in plain XLA."""
        if self.ring_size == 1:
            return QUERY_ROWS
        row_bytes = self.local_kv_heads * self.q_per_kv * self.head_dim * accumulator(np.dtype(self.dtype)).itemsize
        return ring_query_rows(self.batch * self.shard_length * row_bytes, self.ring_size)

    def local_positions(self) -> Array:
        """Returns the position in the sequence of each row of this device."""
        chunk = jnp.arange(self.chunk_length, dtype=jnp.int32)
        if self.axis_name is None:
            return chunk
        starts = layout_named(self.layout).starts(lax.axis_index(self.axis_name), self.ring_size, self.chunk_length)
        return jnp.concatenate([start + chunk for start in starts])

    @property
    def attend_config(self) -> AttendConfig:
        """Options of the kernels. Split heads divide the output by the number of branches."""
        divisor = len(self.pattern.segment_lengths) if self.pattern.heads == "split" else 1
        return AttendConfig(
            is_causal=self.is_causal,
            scale=self.scale,
            output_divisor=divisor,
            dropout_rate=self.dropout_rate,
            implementation=self.implementation,
            block_sizes=self.block_sizes,
        )
