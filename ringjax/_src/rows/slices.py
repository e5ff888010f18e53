"""Reading and writing the rows of one head inside a loop over heads.

Each class reads rows (num, rows, width) of one head out of an array and writes them back:

- `ColumnSlice`: the array is (segments, rows, columns * width). A row of the array holds ``r`` consecutive positions
  side by side, so the selected rows of a head are a column, which XLA slices in place.
- `WindowSlice`: the array is (batch, length, heads * width). Rows are taken from a window of whole segments, so that
  nothing longer than a few segments is ever copied.
- `RowGather`: the array is (batch, length, heads * width), and rows are gathered by index.
- `ChunkSlice`: the array is (tasks, chunks, rows, width), already packed.

Dense arrays have three axes because XLA:CPU copies arrays whose reshape leaves an axis of size 1 in the middle.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src import indexing


class ColumnSlice(NamedTuple):
    """Rows of one head in `num` segments starting at `segment`."""

    segment: Array
    num: int
    column: Array  # which of
    columns: int  # this many columns

    def read(self, x: Array) -> Array:
        """Returns rows (num, rows, width)."""
        width = x.shape[2] // self.columns
        return indexing.dynamic_slice(x, self._corner(width), (self.num, x.shape[1], width))

    def write(self, x: Array, rows: Array) -> Array:
        """Returns the array with these rows (num, rows, width) replaced."""
        return indexing.dynamic_update_slice(x, rows, self._corner(rows.shape[2]))

    def _corner(self, width: int) -> tuple[Array, Array, Array]:
        return self.segment, jnp.zeros_like(self.segment), self.column * width


class WindowSlice(NamedTuple):
    """Rows of one head in `num` segments starting at position `start`."""

    batch: Array
    start: Array
    num: int
    offset: Array
    head: Array
    heads: int
    segment_length: int
    rate: int

    def read(self, x: Array) -> Array:
        """Returns rows (num, rows, width); rows past the end of a segment are 0."""
        return indexing.dynamic_index_in_dim(self._window(x), self.offset, axis=2, keepdims=False)

    def write(self, x: Array, rows: Array) -> Array:
        """Returns the array with these rows (num, rows, width) replaced."""
        window = indexing.dynamic_update_index_in_dim(self._window(x), rows, self.offset, axis=2)
        window = window.reshape(self.num, -1, rows.shape[2])[:, : self.segment_length]
        return indexing.dynamic_update_slice(x, window.reshape(1, -1, rows.shape[2]), self._corner(rows.shape[2]))

    def _window(self, x: Array) -> Array:
        """Returns (num, rows, r, width) of the head."""
        width, num_rows = x.shape[2] // self.heads, -(-self.segment_length // self.rate)
        window = indexing.dynamic_slice(x, self._corner(width), (1, self.num * self.segment_length, width))
        window = window.reshape(self.num, self.segment_length, width)
        window = jnp.pad(window, [(0, 0), (0, num_rows * self.rate - self.segment_length), (0, 0)])
        return window.reshape(self.num, num_rows, self.rate, width)

    def _corner(self, width: int) -> tuple[Array, Array, Array]:
        return self.batch, self.start, self.head * width


class RowGather(NamedTuple):
    """Rows of one head at indices `rows`; a row past the end of the array is read as 0 and not written."""

    rows: Array
    head: Array
    heads: int

    def read(self, x: Array) -> Array:
        """Returns rows (batch, rows, width)."""
        width = x.shape[2] // self.heads
        column = indexing.dynamic_slice_in_dim(x, self.head * width, width, axis=2)
        return column.at[:, self.rows].get(mode="fill", fill_value=0)

    def write(self, x: Array, rows: Array) -> Array:
        """Returns the array with these rows (batch, rows, width) replaced."""
        start = self.head * rows.shape[2]
        column = indexing.dynamic_slice_in_dim(x, start, rows.shape[2], axis=2)
        return indexing.dynamic_update_slice_in_dim(x, column.at[:, self.rows].set(rows, mode="drop"), start, axis=2)


class ChunkSlice(NamedTuple):
    """One chunk of `num` tasks starting at `task`."""

    task: Array
    num: int
    chunk: Array

    def read(self, x: Array) -> Array:
        """Returns rows (num, rows, width)."""
        return indexing.dynamic_slice(x, self._corner(), (self.num, 1, *x.shape[2:]))[:, 0]

    def write(self, x: Array, rows: Array) -> Array:
        """Returns the array with these rows (num, rows, width) replaced."""
        return indexing.dynamic_update_slice(x, rows[:, None], self._corner())

    def _corner(self) -> tuple[Array, Array, Array, Array]:
        zero = jnp.zeros_like(self.task)
        return self.task, self.chunk, zero, zero


def to_bits(x: Array) -> Array:
    """Reinterprets bfloat16 as uint16: XLA:CPU converts bfloat16 arrays that a loop slices to float32 as a whole."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: Array) -> Array:
    """Inverts `to_bits`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
