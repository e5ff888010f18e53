"""The arrays of one device in an attention call, and the spec of the call on that device."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src import debug, dropout
from ringjax._src.branches.protocol import Shard
from ringjax._src.comm.mesh import RingInfo
from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.online_softmax import accumulator
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.vma import match_vma


def device_shard(spec: AttentionSpec, info: RingInfo | None, given: Shard) -> tuple[AttentionSpec, Shard]:
    """Returns the call and the arrays of one device, with padding marked by negative ids.

    Args:
        spec: The call on whole arrays; its batch and ring are those of `given` and `info` afterwards.
        info: The ring, or None on a single device.
        given: The arrays of the device, with queries (B, c, N, H), seeds (B, N) and sinks (B, N).
    """
    query, key, value, ids, seeds, sink, _ = given
    if ids is not None and info is not None:
        ids = narrow_ids(ids)
    index = [] if info is None or info.axis_name is None else [lax.axis_index(info.axis_name)]
    sinks = [] if sink is None else [sink]
    (query, key, value, *others), ids = match_vma((query, key, value, *sinks, *index), ids)
    sink = None if sink is None else others[0]
    spec = ring_spec(spec, info, batch=query.shape[0])
    if spec.seq_len < spec.stored_length:
        ids = _marked_padding(spec, query, ids)
    return spec._replace(has_ids=ids is not None), by_kv_head(Shard(query, key, value, ids, seeds, sink))


def narrow_ids(ids: Array) -> Array:
    """Casts segment ids to int32, in which devices compare them."""
    if not jnp.can_cast(ids.dtype, jnp.int32):
        raise ValueError(
            f"`segment_ids` must have an integer dtype that fits int32 on several devices, got {ids.dtype}."
        )
    return ids.astype(jnp.int32)


def ring_spec(spec: AttentionSpec, info: RingInfo | None, *, batch: int) -> AttentionSpec:
    """Returns the call of a device on a ring; `batch` is the number of entries on the device."""
    if info is None:
        return spec._replace(batch=batch)
    fields = dataclasses.asdict(info)
    return spec._replace(batch=batch, ring_size=fields.pop("axis_size"), **fields)


def by_kv_head(shard: Shard) -> Shard:
    """Reshapes queries (B, c, N, H) to (B, c, K, G, H), and seeds and sinks (B, N) to (B, K, G)."""
    batch, length, _, dim = shard.query.shape
    kv_heads = shard.key.shape[2]
    per_head = lambda x: None if x is None else x.reshape(batch, kv_heads, -1)  # noqa: E731
    query = shard.query.reshape(batch, length, kv_heads, -1, dim)
    return shard._replace(query=query, seeds=per_head(shard.seeds), sink=per_head(shard.sink))


def wide_sinks(sink_logits: Array | None, query: Array) -> Array | None:
    """Returns the logits of attention sinks for each batch entry and head, in the accumulator dtype."""
    if sink_logits is None:
        return None
    debug.report_nan(sink_logits=sink_logits)
    wide = jnp.asarray(sink_logits).astype(accumulator(query.dtype))
    return jnp.broadcast_to(wide, (query.shape[0], query.shape[2]))


def dropout_seeds(
    rate: float,
    rng: Array | None,
    query: Array,
    batch_axis: AxisName | None = None,
    head_axis: AxisName | None = None,
) -> Array | None:
    """Returns the dropout seeds of batch entries and heads, which are sharded over the given axes, if any."""
    if rng is None or rate == 0:
        return None
    batch, _, heads, _ = query.shape
    batch_index, head_index = (0 if axis is None else lax.axis_index(axis) for axis in (batch_axis, head_axis))
    return dropout.seeds_of(
        dropout.key_bits(rng), batch=batch, heads=heads, first_entry=batch_index * batch, first_head=head_index * heads
    )


def _marked_padding(spec: AttentionSpec, query: Array, ids: Array | None) -> Array:
    """Returns segment ids that are negative at padding."""
    given = jnp.zeros_like(query, shape=query.shape[:2], dtype=jnp.int32) if ids is None else ids
    return jnp.where(spec.local_positions()[None, :] < spec.seq_len, given, -1)
