"""What one device holds of an attention call, and the call as that device sees it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src.branches.protocol import Shard
from ringjax._src.comm.mesh import RingInfo
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.vma import match_vma


def device_shard(spec: AttentionSpec, info: RingInfo | None, given: Shard) -> tuple[AttentionSpec, Shard]:
    """Returns the call and the arrays of one device, with padding marked by negative ids.

    Args:
        spec: The call on whole arrays; its batch and ring are those of `given` and `info` afterwards.
        info: The ring, or None on a single device.
        given: The arrays of the device, with queries (B, c, N, H) and seeds (B, N).
    """
    query, key, value, ids, seeds = given
    if ids is not None and info is not None:
        ids = narrow_ids(ids)
    index = [] if info is None or info.axis_name is None else [lax.axis_index(info.axis_name)]
    (query, key, value, *_), ids = match_vma((query, key, value, *index), ids)
    spec = ring_spec(spec, info, batch=query.shape[0])
    if spec.seq_len < spec.stored_length:
        ids = _marked_padding(spec, query, ids)
    return spec._replace(has_ids=ids is not None), grouped(Shard(query, key, value, ids, seeds))


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


def grouped(shard: Shard) -> Shard:
    """Reshapes queries (B, c, N, H) to (B, c, K, G, H) and seeds (B, N) to (B, K, G)."""
    query, key, value, ids, seeds = shard
    batch, length, _, dim = query.shape
    query = query.reshape(batch, length, key.shape[2], -1, dim)
    return Shard(query, key, value, ids, None if seeds is None else seeds.reshape(batch, key.shape[2], -1))


def _marked_padding(spec: AttentionSpec, query: Array, ids: Array | None) -> Array:
    """Returns segment ids that are negative at padding."""
    given = jnp.zeros_like(query, shape=query.shape[:2], dtype=jnp.int32) if ids is None else ids
    return jnp.where(spec.local_positions()[None, :] < spec.seq_len, given, -1)
