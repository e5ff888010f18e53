"""Packed rows: copies of the selected rows of dense arrays, in the form in which devices send them.

Legend: ``N`` tasks (heads times batch, times segments if a branch needs no other device), ``C`` chunks, ``n`` rows of a
chunk, ``G`` query heads per key/value head.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.rows.selection import RowSelection
from ringjax._src.rows.slices import from_bits, to_bits


@dataclasses.dataclass(frozen=True, eq=False)
class RowPacker:
    """Copies rows from dense arrays to packed arrays, and results back."""

    rows: RowSelection  # the selection
    kv_heads: int  # key/value heads of the dense arrays
    starts: Array  # start position of each chunk of the selection, (chunks,)
    chunks: int  # chunks C of the packed arrays; 1 to make each chunk a task of its own

    def view(self, x: Array) -> Array:
        """Returns the view of a dense array (B, T, ...) that the other methods take; to be called outside of loops."""
        return self.rows.view(to_bits(x))

    def pack(self, view: Array, ids: Array | None, q_per_kv: int) -> Array:
        """Packs an array with heads as (N, C, n * q_per_kv, width); 0 for padding, which may hold NaN."""
        packed = from_bits(self.rows.pack(view, self.kv_heads, self.starts))
        packed = packed.reshape(-1, self.chunks, self.rows.num_rows * q_per_kv, packed.shape[-1] // q_per_kv)
        if ids is None:
            return packed
        return jnp.where(jnp.repeat(ids, q_per_kv, axis=2)[..., None] >= 0, packed, jnp.zeros((), packed.dtype))

    def pack_ids(self, view: Array | None) -> Array | None:
        """Packs an array without heads, such as segment ids, as (N, C, n)."""
        if view is None:
            return None
        return self.rows.pack(view, 1, self.starts).reshape(-1, self.chunks, self.rows.num_rows)

    def merge(self, merged: PartialSoftmax, part: PartialSoftmax) -> PartialSoftmax:
        """Merges packed rows into views of dense arrays."""
        return self.rows.merge(merged, part, self.kv_heads, self.starts)

    def add(self, sums: tuple[Array, ...], rows: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds packed rows to views of dense arrays."""
        return self.rows.add(sums, rows, self.kv_heads, self.starts)
