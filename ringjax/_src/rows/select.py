"""Between the dense sequence and the rows of one part of a branch.

The loops over a part hold the sequence as three axes (XLA:CPU copies arrays whose reshape leaves an axis of size 1 in
the middle), in one of two forms, both mere reshapes of (B, T, heads, ...):

- `Columns`, where the part is the whole sequence and ``r`` divides ``w``: (B * segments, rows, r * width). A row holds
  ``r`` neighboring positions side by side, so a head's selected rows are one column, read and written in place.
- `Windows`, everywhere else: (B, T, width). A head's rows are picked out of a window of whole segments, and put back
  into it, so that nothing longer than a few segments is ever copied.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src.rows.indices import PartTable


def segmented(x: Array, table: PartTable) -> Array:
    """A sequence (B, T, ...) in the form that the boxes of this part read and write."""
    batch, length, *rest = x.shape
    width = math.prod(rest)
    if table.is_aligned(length):
        return x.reshape(batch * table.segments, table.rows, table.rate * width)
    return x.reshape(batch, length, width)


class Columns(NamedTuple):
    """The rows of one head in `num` segments from `segment` on, as a column of a (segments, rows, r * width) array."""

    segment: Array
    num: int
    column: Array  # which of
    columns: int  # this many columns

    def read(self, x: Array) -> Array:
        """Rows (num, rows, width)."""
        width = x.shape[2] // self.columns
        return lax.dynamic_slice(x, self._corner(width), (self.num, x.shape[1], width))

    def write(self, x: Array, rows: Array) -> Array:
        """The array with these rows (num, rows, width) in the place of the old ones."""
        return lax.dynamic_update_slice(x, rows, self._corner(rows.shape[2]))

    def _corner(self, width: int) -> tuple[Array, Array, Array]:
        return self.segment, jnp.zeros_like(self.segment), self.column * width


class Windows(NamedTuple):
    """The rows of one head in `num` segments from position `start` on, picked out of a (batch, length, width) array."""

    batch: Array
    start: Array
    num: int
    offset: Array
    head: Array
    heads: int
    table: PartTable

    def read(self, x: Array) -> Array:
        """Rows (num, rows, width); rows past the end of a segment are 0."""
        return lax.dynamic_index_in_dim(self._window(x), self.offset, axis=2, keepdims=False)

    def write(self, x: Array, rows: Array) -> Array:
        """The array with these rows (num, rows, width) in the place of the old ones."""
        window = lax.dynamic_update_index_in_dim(self._window(x), rows, self.offset, axis=2)
        window = window.reshape(self.num, -1, rows.shape[2])[:, : self.table.segment_length]
        return lax.dynamic_update_slice(x, window.reshape(1, -1, rows.shape[2]), self._corner(rows.shape[2]))

    def _window(self, x: Array) -> Array:
        """(num, rows, r, width) of the head."""
        table, width = self.table, x.shape[2] // self.heads
        window = lax.dynamic_slice(x, self._corner(width), (1, self.num * table.segment_length, width))
        window = window.reshape(self.num, table.segment_length, width)
        window = jnp.pad(window, [(0, 0), (0, table.rows * table.rate - table.segment_length), (0, 0)])
        return window.reshape(self.num, table.rows, table.rate, width)

    def _corner(self, width: int) -> tuple[Array, Array, Array]:
        return self.batch, self.start, self.head * width


class Picked(NamedTuple):
    """The rows of one head at `rows` of a (batch, length, width) array; a row past its end is 0 and is not written."""

    rows: Array
    head: Array
    heads: int

    def read(self, x: Array) -> Array:
        """Rows (batch, rows, width)."""
        width = x.shape[2] // self.heads
        column = lax.dynamic_slice_in_dim(x, self.head * width, width, axis=2)
        return column.at[:, self.rows].get(mode="fill", fill_value=0)

    def write(self, x: Array, rows: Array) -> Array:
        """The array with these rows (batch, rows, width) in the place of the old ones."""
        start = self.head * rows.shape[2]
        column = lax.dynamic_slice_in_dim(x, start, rows.shape[2], axis=2)
        return lax.dynamic_update_slice_in_dim(x, column.at[:, self.rows].set(rows, mode="drop"), start, axis=2)


Box = Columns | Windows | Picked


def to_bits(x: Array) -> Array:
    """bfloat16 as its bits: XLA:CPU widens whole bfloat16 arrays before a loop that slices them, but not bits."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: Array) -> Array:
    """What `to_bits` was given."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
