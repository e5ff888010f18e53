"""Which chunks of queries attend to which chunks of keys, for the rows of two devices.

Contiguous: device ``i`` has chunk ``i``; its queries attend to all chunks of the segment, or, if causal, up to chunk
``i``. Zigzag: device ``i`` of ``p`` has a front chunk ``i`` and a back chunk ``2p - 1 - i``. If causal and all
devices share a segment, every pair of devices has the same work, as pairs of a query chunk and a key chunk:

    keys of     the same device                     an earlier device              a later device
    pairs       front-front, back-back (diagonal),  back-front, front-front        back-front, back-back
                back-front

If segments are shorter, they hold either front chunks or back chunks, so the pair back-front has no work.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from ringjax._src.comm.layout import layout_named
from ringjax._src.kernels.interface import ChunkPairs, RowPositions
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.rows.selection import RowSelection


def chunk_pairs(
    spec: AttentionSpec, rows: RowSelection, query_device: Array, key_device: Array, *, is_own: bool
) -> list[ChunkPairs]:
    """Returns the chunk pairs for the queries of one device and the keys of a device that shares their segment.

    Args:
        spec: The attention call.
        rows: The selection of the branch.
        query_device: The device of the queries.
        key_device: The device of the keys.
        is_own: Whether the devices are the same.
    """
    if not rows.is_aligned:
        return [_by_position(spec, rows, query_device, key_device)]
    spans_all = rows.segment_length == spec.stored_length
    if not spec.is_causal:
        every = [(a, b) for a in range(rows.chunks) for b in range(rows.chunks) if a == b or spans_all]
        return [_pairs(*zip(*every, strict=True))]
    if is_own:
        same = tuple(range(rows.chunks))
        diagonal = _pairs(same, same)._replace(is_diagonal=True)
        return [diagonal, *([_pairs((1,), (0,))] if rows.chunks == 2 and spans_all else [])]
    if rows.chunks == 1:
        return [_pairs((0,), (0,))._replace(active=(key_device < query_device)[None])]
    which = jnp.where(key_device < query_device, 0, 1).astype(jnp.int32)  # front-front or back-back
    if not spans_all:
        return [ChunkPairs(which[None], which[None])]
    one, zero = jnp.ones_like(which), jnp.zeros_like(which)
    return [ChunkPairs(jnp.stack([one, which]), jnp.stack([zero, which]))]


def chunk_starts(spec: AttentionSpec, device: Array) -> Array:
    """Returns the start position of each chunk of a device, (chunks,)."""
    return jnp.stack(layout_named(spec.layout).starts(device, spec.ring_size, spec.chunk_length)).astype(jnp.int32)


def _pairs(query: tuple[int, ...], key: tuple[int, ...]) -> ChunkPairs:
    return ChunkPairs(jnp.array(query, jnp.int32), jnp.array(key, jnp.int32))


def _by_position(spec: AttentionSpec, rows: RowSelection, query_device: Array, key_device: Array) -> ChunkPairs:
    """Returns every pair of chunks, active if some query may attend to some key."""
    every = [(a, b) for a in range(rows.chunks) for b in range(rows.chunks)]
    pairs = _pairs(*zip(*every, strict=True))
    of_query, of_key = (chunk_starts(spec, device) for device in (query_device, key_device))
    key_ranges = functools.partial(rows.key_ranges, of_query[pairs.query], of_key[pairs.key], spec.is_causal)
    whole = key_ranges(jnp.zeros((1,), jnp.int32), jnp.full((1,), rows.num_rows, jnp.int32))
    positions = RowPositions(rows.positions(of_query, missing=-1), rows.positions(of_key, missing=-2))
    active = (whole[..., 1] > whole[..., 0]).any(axis=(1, 2))
    return pairs._replace(active=active, positions=positions, key_ranges=key_ranges)
