"""Between the dense sequence and the rows of one branch.

A branch sees a sequence (B, T, ...) as a *view* (B * segments, rows, r * width): row ``j`` of a segment holds ``r``
neighbouring positions side by side, so a head's selected rows, the same residue in each, are one column of the view.
Where ``r`` divides ``w`` and ``w`` divides ``T`` a view is a reshape and moves nothing; else the segments are padded.
(Three axes and no more: XLA:CPU copies arrays whose reshape leaves an axis of size 1 in the middle.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ringjax.indices import BranchTable


def segmented(x: Array, table: BranchTable, fill: float = 0) -> Array:
    """The view (B * segments, rows, r * width) of a sequence (B, T, ...), padded with `fill` where it does not fit."""
    batch, length, *rest = x.shape
    width = math.prod(rest)
    segments = batch * table.segments
    if table.segments * table.segment_length != length or table.rows * table.rate != table.segment_length:
        x = _pad(x.reshape(batch, length, width), table.segments * table.segment_length - length, fill)
        x = x.reshape(segments, table.segment_length, width)
        x = _pad(x, table.rows * table.rate - table.segment_length, fill)
    return x.reshape(segments, table.rows, table.rate * width)


def dense(view: Array, table: BranchTable, shape: tuple[int, ...]) -> Array:
    """The sequence of this shape, (B, T, ...), whose view this is."""
    batch, length = shape[:2]
    if table.segments * table.segment_length != length or table.rows * table.rate != table.segment_length:
        x = view.reshape(view.shape[0], table.rows * table.rate, -1)[:, : table.segment_length]
        view = x.reshape(batch, table.segments * table.segment_length, -1)[:, :length]
    return view.reshape(shape)


class Box(NamedTuple):
    """The rows of one head in some segments of a view: a place to read from and to write to.

    Attributes:
        segment: First segment.
        num: Number of segments.
        column: Which of the view's columns.
        columns: How many columns the view has, each the width of one head.
    """

    segment: Array
    num: int
    column: Array
    columns: int

    def read(self, view: Array) -> Array:
        """Rows (num, rows, width)."""
        width = view.shape[2] // self.columns
        return lax.dynamic_slice(view, self._corner(width), (self.num, view.shape[1], width))

    def write(self, view: Array, rows: Array) -> Array:
        """The view with these rows (num, rows, width) in the place of the old ones."""
        return lax.dynamic_update_slice(view, rows, self._corner(rows.shape[2]))

    def _corner(self, width: int) -> tuple[Array, Array, Array]:
        return self.segment, jnp.zeros_like(self.segment), self.column * width


def _pad(x: Array, amount: int, fill: float) -> Array:
    return jnp.pad(x, [(0, 0), (0, amount), (0, 0)], constant_values=fill) if amount else x
