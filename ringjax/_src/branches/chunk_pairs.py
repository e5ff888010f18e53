"""Which chunks of two devices meet, when one has received the rows of the other."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from ringjax._src.comm.layout import Layout
from ringjax._src.kernels.hops import Visits
from ringjax._src.kernels.walk import Places
from ringjax._src.rows.shard import ShardRows


def visits(
    rows: ShardRows,
    layout: Layout,
    ring_size: int,
    is_causal: bool,
    query_device: Array,
    key_device: Array,
    is_own: bool,
) -> list[Visits]:
    """What the queries of one device do with the keys of a device of its group.

    Args:
        rows: The branch.
        layout: Order of the sequence.
        ring_size: Devices on the axis.
        is_causal: Whether queries see only keys up to their position.
        query_device: Whose queries.
        key_device: Whose keys.
        is_own: Whether the two are the same device.
    """
    if not rows.is_aligned:
        return [_by_position(rows, layout, ring_size, is_causal, query_device, key_device)]
    spans_all = rows.segment_length == ring_size * rows.chunks * rows.chunk_length
    if not is_causal:
        every = [(a, b) for a in range(rows.chunks) for b in range(rows.chunks) if a == b or spans_all]
        return [_full(*zip(*every, strict=True))]
    if rows.chunks == 1:
        return (
            [_diagonal((0,))] if is_own else [_full((0,), (0,))._replace(is_needed=(key_device < query_device)[None])]
        )
    # Zigzag: of the front chunk, which others come before, and the back chunk, which others come after, one has work.
    if is_own:
        return [_diagonal((0, 1)), *([_full((1,), (0,))] if spans_all else [])]
    busy = jnp.where(key_device < query_device, 0, 1).astype(jnp.int32)
    if not spans_all:
        return [Visits(busy[None], busy[None])]
    one, zero = jnp.ones_like(busy), jnp.zeros_like(busy)
    return [Visits(jnp.stack([one, busy]), jnp.stack([zero, busy]))]


def starts(rows: ShardRows, layout: Layout, ring_size: int, device: Array) -> Array:
    """Position at which each of a device's chunks starts, (chunks,)."""
    return jnp.stack(layout.starts(device, ring_size, rows.chunk_length)).astype(jnp.int32)


def _full(query: tuple[int, ...], key: tuple[int, ...]) -> Visits:
    return Visits(jnp.array(query, jnp.int32), jnp.array(key, jnp.int32))


def _diagonal(chunks: tuple[int, ...]) -> Visits:
    return _full(chunks, chunks)._replace(is_diagonal=True)


def _by_position(
    rows: ShardRows, layout: Layout, ring_size: int, is_causal: bool, query_device: Array, key_device: Array
) -> Visits:
    """Every pair of chunks in which some query may see some key."""
    pairs = [(a, b) for a in range(rows.chunks) for b in range(rows.chunks)]
    mine, theirs = (starts(rows, layout, ring_size, device) for device in (query_device, key_device))
    every = _full(*zip(*pairs, strict=True))
    ranges = functools.partial(rows.ranges, mine[every.query], theirs[every.key], is_causal)
    first = jnp.arange(0, rows.sizes.padded(rows.rows), rows.sizes.query, dtype=jnp.int32)
    of_blocks = ranges(first, first + rows.sizes.query)
    places = Places(rows.places(mine, missing=-1), rows.places(theirs, missing=-2), of_blocks)
    is_needed = (of_blocks[..., 1] > of_blocks[..., 0]).any(axis=(1, 2))
    return every._replace(is_needed=is_needed, places=places, ranges=ranges)
