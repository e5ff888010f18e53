"""Keys without value, with which the softmax of a query may start: attention sinks and keys of zeros.

Such keys add to the softmax denominator only. So instead of an empty partial softmax, branches are merged into one with
output 0 and the log-sum-exp of the extra keys, and neither branches nor kernels know of them.

- A *sink* has a learned logit per query head.
- *Zero keys* (``padding="zeros"``) fill up segments that are too short, as torchscale does. Their score is 0.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src import online_softmax as softmax
from ringjax._src.branches.protocol import Shard
from ringjax._src.comm.ordering import after
from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.indexing import quotient, remainder
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.planning.spec import AttentionSpec


def joint_start(spec: AttentionSpec, shard: Shard) -> PartialSoftmax:
    """Returns the partial softmax (B, c, K, G, H) into which all branches are merged.

    With ``mixing="detached"`` each branch has its own zero keys, see `branch_start`.
    """
    start = empty(shard)
    if shard.sink is not None:
        start = _with_keys(start, shard, shard.sink[:, None])
    if spec.has_zero_keys and spec.pattern.mixing == "exact":
        counts = (_num_zero_keys(spec, shard, i, first_head(spec)) for i in range(len(spec.pattern.segment_lengths)))
        start = _with_keys(start, shard, _log(functools.reduce(jnp.add, counts), start.lse.dtype))
    return start


def branch_start(spec: AttentionSpec, shard: Shard, branch: int, head: Array | int) -> PartialSoftmax:
    """Returns the partial softmax over the zero keys of one branch; `head` is the first key/value head of `shard`."""
    start = empty(shard)
    if not spec.has_zero_keys:
        return start
    return _with_keys(start, shard, _log(_num_zero_keys(spec, shard, branch, head), start.lse.dtype))


def empty(shard: Shard) -> PartialSoftmax:
    """Returns the partial softmax of the queries of a device over no keys."""
    return softmax.empty_like(jnp.zeros_like(shard.query, dtype=softmax.accumulator(shard.query.dtype)))


def first_head(spec: AttentionSpec) -> Array | int:
    """Returns the index of the first key/value head of this device."""
    return 0 if spec.head_axis is None else lax.axis_index(spec.head_axis) * spec.local_kv_heads


def count_lengths(spec: AttentionSpec, shard: Shard, axis_name: AxisName | None) -> Shard:
    """Adds the length of each sequence that has padding, for zero keys; the count needs all devices of the ring.

    `axis_name` is that of the ring if branches communicate, so that the order of collectives matters; otherwise None.
    """
    if shard.ids is None or not spec.has_zero_keys:
        return shard
    lengths = (shard.ids >= 0).sum(axis=1, dtype=jnp.int32)
    if spec.ring_size > 1:
        assert spec.axis_name is not None
        lengths = lax.psum(after(lengths, shard.query, axis_name), spec.axis_name)
    return shard._replace(ids=after(shard.ids, lengths, axis_name), lengths=lengths)


def _with_keys(start: PartialSoftmax, shard: Shard, lse: Array) -> PartialSoftmax:
    """Adds keys whose values are zero, given their log-sum-exp, for rows that are not padding."""
    if shard.ids is not None:
        lse = jnp.where(shard.ids[:, :, None, None] >= 0, lse, -jnp.inf)
    return PartialSoftmax(start.out, jnp.logaddexp(start.lse, jnp.broadcast_to(lse, start.lse.shape)))


def _num_zero_keys(spec: AttentionSpec, shard: Shard, branch: int, head: Array | int) -> Array:
    """Counts the zero keys that each row of this device attends to in one branch: (B or 1, c, K, 1).

    A segment of ``w`` positions is padded to ``ceil(w / r)`` rows per head, of which those within the segment and
    the sequence exist. Rows that the head does not select attend to none.
    """
    _, r, _, _, offsets = given = spec.pattern.branches(spec.kv_heads, spec.seq_len)[branch]
    w = given.segment_length
    offset = jnp.asarray(offsets, jnp.int32)[head + jnp.arange(spec.local_kv_heads, dtype=jnp.int32)][None, None]
    length = jnp.int32(spec.seq_len) if shard.lengths is None else shard.lengths[:, None, None]
    position = spec.local_positions()[None, :, None]
    clamped = jnp.minimum(w, length)  # a shorter sequence is one segment
    end = jnp.minimum(clamped, length - quotient(position, w) * w)  # of the positions in the segment that exist
    num_rows = lambda positions: jnp.where(positions > 0, quotient(positions - 1, r) + 1, 0)  # noqa: E731
    is_selected = remainder(remainder(position, w), r) == offset
    return jnp.where(is_selected, num_rows(clamped) - num_rows(end - offset), 0)[..., None]


def _log(count: Array, dtype: jnp.dtype) -> Array:
    return jnp.where(count > 0, jnp.log(jnp.maximum(count, 1).astype(dtype)), -jnp.inf)
