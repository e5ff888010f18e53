"""Row selections: which rows one branch selects on one device.

A selection covers *chunks*, runs of consecutive positions of equal length: the segments of a branch that needs no other
device, or else the chunks of the sequence that the device holds. If each head selects every r-th row, the same rows in
all chunks, the selection is *aligned*. Otherwise it has as many rows as any chunk may need; missing rows are masked.

A selection has one entry per key/value head and none per position, so its size does not grow with the sequence. In a
plan its arrays are read-only numpy arrays, which traces and threads can share; a selection that is restricted to some
heads (`head_range`) holds traced arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array

from ringjax._src import indexing
from ringjax._src.pattern import selected_before
from ringjax._src.rows.sizes import XlaBlockSizes
from ringjax._src.rows.slices import ColumnSlice, RowGather, WindowSlice


@dataclasses.dataclass(frozen=True, eq=False)
class RowSelection:
    """The rows that one branch selects in the chunks of one device."""

    branch: int  # index of the branch in the pattern
    segment_length: int  # ``w``
    rate: int  # ``r``
    first: int  # index on the device of the first position; nonzero only for a shorter last segment
    chunks: int  # number of chunks
    chunk_length: int  # positions per chunk
    num_rows: int  # most rows that a head selects in a chunk
    is_aligned: bool  # whether every head selects that many rows in every chunk, at the same offsets
    heads: np.ndarray  # key/value heads that run the branch, (heads,)
    offsets: np.ndarray  # residue of each head, (heads,)
    counts: np.ndarray  # rows that each head selects in a whole segment (packed rows: in a chunk), (heads,)
    blocks: XlaBlockSizes  # block sizes of plain XLA
    is_ragged: bool  # whether some head has fewer rows than the blocks of plain XLA hold
    has_empty_heads: bool  # whether some of `heads` may select no row, and nothing else masks them; their count is 0

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return self.heads.nbytes + self.offsets.nbytes + self.counts.nbytes

    def local_heads(self, first: Array | int, num: int) -> RowSelection:
        """Restricts a selection of all heads to `num` heads starting at `first`, renumbered from 0."""
        return dataclasses.replace(self.head_range(first, num), heads=frozen(range(num)))

    def head_range(self, first: Array | int, num: int) -> RowSelection:
        """Restricts the selection to `num` of its heads, starting at index `first`."""
        arrays = (self.heads, self.offsets, self.counts)
        heads, offsets, counts = (indexing.dynamic_slice_in_dim(jnp.asarray(x), first, num) for x in arrays)
        return dataclasses.replace(self, heads=heads, offsets=offsets, counts=counts)  # type: ignore[arg-type]

    # Access in place, one head and some chunks at a time.

    def dense_view(self, x: Array) -> Array:
        """Reshapes (B, T, ...) to the three axes that `head_slice` reads and writes."""
        batch, length = x.shape[:2]
        if self._has_columns(length):
            return x.reshape(batch * self.chunks, self.num_rows, -1)
        return x.reshape(batch, length, -1)

    def head_slice(
        self, i: Array, chunk: Array, num: int, *, length: int, num_heads: int, has_heads: bool = True
    ) -> ColumnSlice | WindowSlice:
        """Returns the slice of the i-th head in `num` chunks starting at `chunk`, counted over the batch.

        Args:
            i: Index into `heads`.
            chunk: Index of the first chunk.
            num: Number of chunks, of one batch entry unless the selection has columns.
            length: Length T of the dense array.
            num_heads: Key/value heads of the dense array.
            has_heads: Whether the array to be sliced has a head axis; segment ids do not.
        """
        head, offset = jnp.asarray(self.heads)[i], jnp.asarray(self.offsets)[i]
        if not has_heads:
            head, num_heads = jnp.zeros_like(head), 1
        if self._has_columns(length):
            return ColumnSlice(chunk, num, offset * num_heads + head, self.rate * num_heads)
        entry, nth = indexing.quotient(chunk, self.chunks), indexing.remainder(chunk, self.chunks)
        start = self.first + nth * self.chunk_length
        return WindowSlice(entry, start, num, offset, head, num_heads, self.chunk_length, self.rate)

    def max_chunks_together(self, batch: int, length: int) -> int:
        """Returns how many chunks `head_slice` can take at once."""
        return batch * self.chunks if self._has_columns(length) else self.chunks

    def _has_columns(self, length: int) -> bool:
        return self.is_aligned and self.chunks * self.chunk_length == length

    # Access to all chunks of a head at once.

    def view(self, x: Array) -> Array:
        """Reshapes (B, T, ...) to three axes, as `all_chunks` expects; to be called outside of loops."""
        x = x[:, self.first : self.first + self.chunks * self.chunk_length]
        batch, length = x.shape[:2]
        return x.reshape((batch * self.chunks, self.num_rows, -1) if self.is_aligned else (batch, length, -1))

    def put_view(self, x: Array, view: Array) -> Array:
        """Inverts `view`: returns `x` with the positions of this selection replaced."""
        length = self.chunks * self.chunk_length
        view = view.reshape(x.shape[0], length, *x.shape[2:])
        return view if view.shape == x.shape else x.at[:, self.first : self.first + length].set(view)

    def all_chunks(self, i: Array, batch: int, num_heads: int, starts: Array) -> ColumnSlice | RowGather:
        """Returns the slice of the i-th head in all chunks of a view.

        Args:
            i: Index into `heads`.
            batch: Number of batch entries.
            num_heads: Key/value heads of the array; 1 for an array without heads.
            starts: Start position of each chunk, (chunks,).
        """
        i = jnp.asarray(i, jnp.int32)
        head = jnp.asarray(self.heads)[i] if num_heads > 1 else jnp.zeros_like(i)
        offset = jnp.asarray(self.offsets)[i]
        if self.is_aligned:
            return ColumnSlice(jnp.zeros_like(i), batch * self.chunks, offset * num_heads + head, self.rate * num_heads)
        positions, exists = self._positions(starts[:, None], offset, jnp.asarray(self.counts)[i])
        local = positions - starts[:, None] + self.chunk_length * jnp.arange(self.chunks, dtype=jnp.int32)[:, None]
        return RowGather(jnp.where(exists, local, self.chunks * self.chunk_length).ravel(), head, num_heads)

    # Positions in the sequence.

    def positions(self, starts: Array, *, missing: int) -> Array:
        """Returns segment (`missing` for missing rows) and position of each row: (chunks, heads, num_rows, 2)."""
        offsets, counts = jnp.asarray(self.offsets)[:, None], jnp.asarray(self.counts)[:, None]
        positions, exists = self._positions(starts[:, None, None], offsets[None], counts[None])
        return jnp.stack(
            [jnp.where(exists, indexing.quotient(positions, self.segment_length), missing), positions], axis=-1
        )

    def key_ranges(self, query_starts: Array, key_starts: Array, is_causal: bool, first: Array, end: Array) -> Array:
        """Returns the key rows that blocks of query rows may attend to: (pairs, heads, blocks, 2).

        Args:
            query_starts: Start position of the query chunk of each pair, (pairs,).
            key_starts: Start position of the key chunk of each pair, (pairs,).
            is_causal: Whether queries attend only to keys up to their position.
            first: First row of each block, (blocks,).
            end: Last row + 1 of each block, (blocks,).
        """
        offsets, counts = (jnp.asarray(x)[None, :, None] for x in (self.offsets, self.counts))
        first, end = first[None, None, :], end[None, None, :]
        query_starts, key_starts = query_starts[:, None, None], key_starts[:, None, None]
        before = self._rank(query_starts, offsets, counts)
        num_queries = self._rank(query_starts + self.chunk_length, offsets, counts) - before
        w = self.segment_length
        low = indexing.quotient(self._position(before + first, offsets, counts), w) * w
        last = self._position(before + jnp.minimum(end, num_queries) - 1, offsets, counts)
        high = last + 1 if is_causal else (indexing.quotient(last, w) + 1) * w
        key_end = key_starts + self.chunk_length
        rank = lambda x: self._rank(jnp.clip(x, key_starts, key_end), offsets, counts)  # noqa: E731
        ranges = jnp.stack([rank(low), rank(high)], axis=-1) - self._rank(key_starts, offsets, counts)[..., None]
        exists = (first < num_queries) & (counts > 0)
        return jnp.where(exists[..., None], ranges, 0)

    def index_in_chunks(self, num_rows: int) -> Array:
        """Returns where the first `num_rows` rows of the sequence are in its chunks, (heads, num_rows).

        Chunks have `self.num_rows` rows each, of which the last may be missing. The index of a row past the end of the
        sequence is out of range.
        """
        offsets, counts = jnp.asarray(self.offsets)[:, None], jnp.asarray(self.counts)[:, None]
        rank = jnp.arange(num_rows, dtype=jnp.int32)[None]
        chunk = indexing.quotient(self._position(rank, offsets, counts), self.chunk_length)
        return chunk * self.num_rows + rank - self._rank(chunk * self.chunk_length, offsets, counts)

    def index_in_order(self, num_chunks: int) -> Array:
        """Inverts `index_in_chunks`: (heads, num_chunks * self.num_rows), out of range for missing rows."""
        offsets, counts = (jnp.asarray(x)[:, None, None] for x in (self.offsets, self.counts))
        start = jnp.arange(num_chunks, dtype=jnp.int32)[None, :, None] * self.chunk_length
        before, end = (self._rank(x, offsets, counts) for x in (start, start + self.chunk_length))
        rank = before + jnp.arange(self.num_rows, dtype=jnp.int32)[None, None]
        index = jnp.where(rank < end, rank, jnp.iinfo(jnp.int32).max)
        return index.reshape(index.shape[0], -1)

    def _positions(self, start: Array, offset: Array, count: Array) -> tuple[Array, Array]:
        """Returns the positions of the rows of a chunk, and which of the rows exist."""
        row = jnp.arange(self.num_rows, dtype=jnp.int32).reshape((1,) * (jnp.ndim(start) - 1) + (-1,))
        positions = self._position(self._rank(start, offset, count) + row, offset, count)
        return positions, (positions < start + self.chunk_length) & (count > 0)

    def _rank(self, position: Array, offset: Array, count: Array) -> Array:
        """Counts the selected positions before this one."""
        return selected_before(position, self.segment_length, self.rate, offset, count)

    def _position(self, rank: Array, offset: Array, count: Array) -> Array:
        """Inverts `_rank`."""
        count = jnp.maximum(count, 1)
        segment, row = indexing.quotient(rank, count), indexing.remainder(rank, count)
        return segment * self.segment_length + offset + row * self.rate


def frozen(values: Iterable[int]) -> np.ndarray:
    """Returns a read-only int32 array."""
    array = np.array(list(values), np.int32)
    array.flags.writeable = False
    return array
