"""Between the dense sequence and the rows of one branch.

A sequence (B, T, ...) seen by a branch is ``(B * segments, rows, r, ...)``: row ``j`` of a head with offset ``o`` in
segment ``z`` stands at ``[z, j, o]``. Where ``r`` divides ``w`` and ``w`` divides ``T`` this is a reshape and moves
nothing; else the segments are padded. A head's rows are then a box, read and written in place.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ringjax.indices import BranchTable


def segmented(x: Array, table: BranchTable, fill: float = 0) -> Array:
    """Views a sequence (B, T, ...) as (B * segments, rows, r, ...), padded with `fill` where it does not fit."""
    batch, length, *rest = x.shape
    x = _pad(x, 1, table.segments * table.segment_length - length, fill)
    x = x.reshape(batch * table.segments, table.segment_length, *rest)
    x = _pad(x, 1, table.rows * table.rate - table.segment_length, fill)
    return x.reshape(batch * table.segments, table.rows, table.rate, *rest)


def dense(x: Array, table: BranchTable, length: int) -> Array:
    """The sequence (B, T, ...) of a view that `segmented` made."""
    segments, _, _, *rest = x.shape
    x = x.reshape(segments, table.rows * table.rate, *rest)[:, : table.segment_length]
    return x.reshape(segments // table.segments, -1, *rest)[:, :length]


class Box:
    """The rows of one head in `num` segments of a view: a place to read from and to write to."""

    def __init__(self, segment: Array, num: int, offset: Array, head: Array):
        self.segment, self.num, self.offset, self.head = segment, num, offset, head

    def read(self, view: Array, *, has_heads: bool = True) -> Array:
        """Rows (num, rows, ...) of a view (segments, rows, r, heads, ...), or (segments, rows, r) without heads."""
        start, sizes = self._corner(view, has_heads)
        return lax.dynamic_slice(view, start, sizes).reshape(self.num, view.shape[1], *view.shape[4:])

    def write(self, view: Array, rows: Array) -> Array:
        """The view with these rows in the place of the old ones."""
        start, sizes = self._corner(view, True)
        return lax.dynamic_update_slice(view, rows.reshape(sizes), start)

    def _corner(self, view: Array, has_heads: bool) -> tuple[list[Array], list[int]]:
        zero = jnp.zeros_like(self.segment)
        start = [self.segment, zero, self.offset, self.head]
        sizes = [self.num, view.shape[1], 1, 1]
        if not has_heads:
            return start[:3], sizes[:3]
        return start + [zero] * (view.ndim - 4), sizes + list(view.shape[4:])


def _pad(x: Array, axis: int, amount: int, fill: float) -> Array:
    if amount == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, amount)
    return jnp.pad(x, widths, constant_values=fill)
