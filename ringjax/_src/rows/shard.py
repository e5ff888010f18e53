"""The rows of one branch on one device of a ring: which they are, and where they stand in the sequence.

A device holds one or two *chunks* of the sequence, each a run of neighboring positions. Where segments consist of
whole chunks and the rate divides a chunk, each head selects every r-th row of a chunk, and all chunks look alike:
*aligned*.
Elsewhere the rows of a head are counted out: as many as any chunk may have, with those that are not there masked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringjax._src import online_softmax as softmax
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.pattern import selected_before
from ringjax._src.rows.indices import PartTable
from ringjax._src.rows.select import Box, Columns, Picked
from ringjax._src.rows.sizes import WalkSizes

Rows = Array | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ShardRows:
    """What a device of a ring selects in one branch.

    Attributes:
        branch: Number of the branch in the pattern.
        segment_length: ``w``.
        rate: ``r``.
        chunks: Chunks per device.
        chunk_length: Positions per chunk.
        rows: Most rows that a head selects in a chunk.
        is_aligned: Whether each head selects that many in every chunk, at the same places.
        heads: Key/value heads that take part, (heads,).
        offsets: Residue of each, (heads,).
        counts: Rows that each selects in a whole segment, (heads,).
        sizes: How the rows of a chunk are cut into blocks.
    """

    branch: int
    segment_length: int
    rate: int
    chunks: int
    chunk_length: int
    rows: int
    is_aligned: bool
    heads: np.ndarray
    offsets: np.ndarray
    counts: np.ndarray
    sizes: WalkSizes

    def for_heads(self, first: Array, num: int) -> ShardRows:
        """The same for `num` of the heads, from `first` on, which is known at run time only; numbered from 0."""
        return dataclasses.replace(self.piece(first, num), heads=np.arange(num, dtype=np.int32))

    def piece(self, first: Array | int, num: int) -> ShardRows:
        """The same for `num` of the heads that take part, from the `first` of them on."""
        some = (lax.dynamic_slice_in_dim(jnp.asarray(x), first, num) for x in (self.heads, self.offsets, self.counts))
        heads, offsets, counts = some
        return dataclasses.replace(self, heads=heads, offsets=offsets, counts=counts)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.heads.nbytes + self.offsets.nbytes + self.counts.nbytes

    @classmethod
    def of_part(cls, table: PartTable) -> ShardRows:
        """The rows of a part of a branch that needs no other device: each of its segments is a chunk."""
        return cls(
            branch=table.branch,
            segment_length=table.segment_length,
            rate=table.rate,
            chunks=table.segments,
            chunk_length=table.segment_length,
            rows=table.rows,
            is_aligned=table.rows * table.rate == table.segment_length,
            heads=table.heads,
            offsets=table.offsets,
            counts=table.counts,
            sizes=table.sizes,
        )

    def view(self, x: Array) -> Array:
        """An array (B, c, ...) with three axes, as the other methods want it: a reshape, to be done outside loops."""
        batch, length = x.shape[:2]
        return x.reshape((batch * self.chunks, self.rows, -1) if self.is_aligned else (batch, length, -1))

    def take(self, view: Array, num_heads: int, starts: Array) -> Array:
        """The selected rows (heads, B * chunks, rows, width).

        Args:
            view: Of an array with this many heads; 1 for one without.
            num_heads: Key/value heads of the array.
            starts: Position at which each of the device's chunks starts, (chunks,).
        """
        batch = view.shape[0] // self.chunks if self.is_aligned else view.shape[0]
        width = view.shape[2] // (num_heads * (self.rate if self.is_aligned else 1))
        shape = (batch * self.chunks, self.rows, width)
        taken = jnp.zeros_like(view, shape=(len(self.heads), *shape))

        def body(i: Array, taken: Array) -> Array:
            rows = self._box(i, batch, num_heads, starts).read(view)
            return lax.dynamic_update_index_in_dim(taken, rows.reshape(shape), i, axis=0)

        return lax.fori_loop(0, len(self.heads), body, taken)

    def merge(self, merged: PartialSoftmax, part: PartialSoftmax, num_heads: int, starts: Array) -> PartialSoftmax:
        """The views `merged` with the partial of the selected rows, (..., G, H) and (..., G), merged in."""
        dim = part.out.shape[-1]

        def new(old: tuple[Array, Array], rows: tuple[Array, Array]) -> tuple[Array, Array]:
            split = lambda x: x.reshape(*x.shape[:-1], -1, dim)  # noqa: E731
            joint = softmax.merge(PartialSoftmax(split(old[0]), old[1]), PartialSoftmax(split(rows[0]), rows[1]))
            return joint.out.reshape(old[0].shape), joint.lse

        return PartialSoftmax(*self._replace(new, merged, part, num_heads, starts))

    def add(self, sums: tuple[Array, ...], rows: tuple[Array, ...], num_heads: int, starts: Array) -> tuple[Array, ...]:
        """The views `sums` with `rows` added to the selected rows."""
        plus = lambda old, new: tuple(a + b for a, b in zip(old, new, strict=True))  # noqa: E731
        return self._replace(plus, sums, rows, num_heads, starts)

    def _replace(
        self,
        new: Callable[..., tuple[Array, ...]],
        views: tuple[Array, ...],
        rows: tuple[Array, ...],
        num_heads: int,
        starts: Array,
    ) -> tuple[Array, ...]:
        batch = views[0].shape[0] // self.chunks if self.is_aligned else views[0].shape[0]
        rows = tuple(x.reshape(len(self.heads), batch * self.chunks, self.rows, -1) for x in rows)

        def body(i: Array, views: tuple[Array, ...]) -> tuple[Array, ...]:
            box = self._box(i, batch, num_heads, starts)
            old = tuple(box.read(view) for view in views)
            own = tuple(lax.dynamic_index_in_dim(x, i, keepdims=False) for x in rows)
            put = new(old, tuple(x.reshape(y.shape) for x, y in zip(own, old, strict=True)))
            return tuple(box.write(view, x) for view, x in zip(views, put, strict=True))

        return lax.fori_loop(0, len(self.heads), body, tuple(views))

    def _box(self, i: Array, batch: int, num_heads: int, starts: Array) -> Box:
        """The rows of the i-th head that takes part; of all heads alike in an array without heads."""
        i = jnp.asarray(i, jnp.int32)
        head = jnp.asarray(self.heads)[i] if num_heads > 1 else jnp.zeros_like(i)
        offset = jnp.asarray(self.offsets)[i]
        if self.is_aligned:
            return Columns(jnp.zeros_like(i), batch * self.chunks, offset * num_heads + head, self.rate * num_heads)
        positions, exists = self._positions(starts[:, None], offset, jnp.asarray(self.counts)[i])
        local = positions - starts[:, None] + self.chunk_length * jnp.arange(self.chunks, dtype=jnp.int32)[:, None]
        return Picked(jnp.where(exists, local, self.chunks * self.chunk_length).ravel(), head, num_heads)

    def places(self, starts: Array, *, missing: int) -> Array:
        """Segment (`missing` for rows that are not there) and position of each row: (chunks, heads, rows, 2)."""
        offsets, counts = jnp.asarray(self.offsets)[:, None], jnp.asarray(self.counts)[:, None]
        positions, exists = self._positions(starts[:, None, None], offsets[None], counts[None])
        return jnp.stack([jnp.where(exists, positions // self.segment_length, missing), positions], axis=-1)

    def ranges(self, query_starts: Array, key_starts: Array, is_causal: bool, first: Rows, end: Rows) -> Array:
        """The rows of one chunk that each block of query rows of another may see: (pairs, heads, blocks, 2).

        Args:
            query_starts: Position at which the chunk of the queries starts, (pairs,).
            key_starts: The same of the keys.
            is_causal: Whether queries see only keys up to their position.
            first: First row of each block, (blocks,).
            end: Last row + 1 of each block.
        """
        offsets, counts = (jnp.asarray(x)[None, :, None] for x in (self.offsets, self.counts))
        first, end = (jnp.asarray(x)[None, None, :] for x in (first, end))
        query_starts, key_starts = query_starts[:, None, None], key_starts[:, None, None]
        before = self._before(query_starts, offsets, counts)
        own = self._before(query_starts + self.chunk_length, offsets, counts) - before  # rows of the query chunk
        w = self.segment_length
        low = self._position(before + first, offsets, counts) // w * w
        last = self._position(before + jnp.minimum(end, own) - 1, offsets, counts)
        high = last + 1 if is_causal else (last // w + 1) * w
        key_end = key_starts + self.chunk_length
        rank = lambda x: self._before(jnp.clip(x, key_starts, key_end), offsets, counts)  # noqa: E731
        ranges = jnp.stack([rank(low), rank(high)], axis=-1) - self._before(key_starts, offsets, counts)[..., None]
        exists = (first < own) & (counts > 0)
        return jnp.where(exists[..., None], ranges, 0)

    def _positions(self, start: Array, offset: Array, count: Array) -> tuple[Array, Array]:
        """Positions of the rows of a chunk, and which of them are there."""
        row = jnp.arange(self.rows, dtype=jnp.int32).reshape((1,) * (jnp.ndim(start) - 1) + (-1,))
        positions = self._position(self._before(start, offset, count) + row, offset, count)
        return positions, (positions < start + self.chunk_length) & (count > 0)

    def _before(self, position: Array, offset: Array, count: Array) -> Array:
        """How many positions before this one are selected."""
        return selected_before(position, self.segment_length, self.rate, offset, count)

    def _position(self, rank: Array, offset: Array, count: Array) -> Array:
        """The position that is selected after `rank` others."""
        count = jnp.maximum(count, 1)
        return rank // count * self.segment_length + offset + rank % count * self.rate
