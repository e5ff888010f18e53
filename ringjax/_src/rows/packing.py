"""Packed rows: copies of the selected rows of dense arrays, in the form in which devices send them.

Legend: ``N`` tasks (heads times batch, times segments if a branch needs no other device), ``C`` chunks, ``n`` rows of a
chunk, ``G`` query heads per key/value head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src import indexing
from ringjax._src import online_softmax as softmax
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

    @classmethod
    def of_segments(cls, rows: RowSelection, kv_heads: int) -> RowPacker:
        """Returns the packer of a branch that needs no other device: each segment is a task of its own."""
        return cls(rows, kv_heads, jnp.arange(rows.chunks, dtype=jnp.int32) * rows.chunk_length, chunks=1)

    def view(self, x: Array) -> Array:
        """Returns the view of a dense array (B, T, ...) that the other methods take; to be called outside of loops."""
        return self.rows.view(to_bits(x))

    def pack(self, view: Array, ids: Array | None, q_per_kv: int) -> Array:
        """Packs an array with heads as (N, C, n * q_per_kv, width); 0 for padding, which may hold NaN."""
        packed = from_bits(self._copied(view, self.kv_heads))
        packed = packed.reshape(-1, self.chunks, self.rows.num_rows * q_per_kv, packed.shape[-1] // q_per_kv)
        if ids is None:
            return packed
        return jnp.where(jnp.repeat(ids, q_per_kv, axis=2)[..., None] >= 0, packed, jnp.zeros((), packed.dtype))

    def pack_ids(self, view: Array | None) -> Array | None:
        """Packs an array without heads, such as segment ids, as (N, C, n)."""
        return None if view is None else self._copied(view, 1).reshape(-1, self.chunks, self.rows.num_rows)

    def merge(self, merged: PartialSoftmax, part: PartialSoftmax) -> PartialSoftmax:
        """Merges packed rows, (..., G, H) and (..., G), into views of dense arrays."""
        dim = part.out.shape[-1]

        def update(old: tuple[Array, Array], rows: tuple[Array, Array]) -> tuple[Array, Array]:
            split = lambda x: x.reshape(*x.shape[:-1], -1, dim)  # noqa: E731
            new = softmax.merge(PartialSoftmax(split(old[0]), old[1]), PartialSoftmax(split(rows[0]), rows[1]))
            return new.out.reshape(old[0].shape), new.lse

        return PartialSoftmax(*self._updated(merged, part, update))

    def add(self, sums: tuple[Array, ...], rows: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds packed rows to views of dense arrays."""
        return self._updated(sums, rows, lambda old, new: tuple(a + b for a, b in zip(old, new, strict=True)))

    def _copied(self, view: Array, num_heads: int) -> Array:
        """Copies the rows of an array with `num_heads` heads to (heads, batch * chunks, n, width)."""
        rows, batch = self.rows, self._batch(view)
        shape = (
            batch * rows.chunks,
            rows.num_rows,
            view.shape[2] // (num_heads * (rows.rate if rows.is_aligned else 1)),
        )

        def body(i: Array, packed: Array) -> Array:
            read = rows.all_chunks(i, batch, num_heads, self.starts).read(view)
            return indexing.dynamic_update_index_in_dim(packed, read.reshape(shape), i, axis=0)

        return lax.fori_loop(0, len(rows.heads), body, jnp.zeros_like(view, shape=(len(rows.heads), *shape)))

    def _updated(
        self, views: tuple[Array, ...], packed: tuple[Array, ...], update: Callable[..., tuple[Array, ...]]
    ) -> tuple[Array, ...]:
        """Replaces the rows in views of dense arrays by ``update(old, new)``, one head at a time."""
        rows, batch = self.rows, self._batch(views[0])
        packed = tuple(x.reshape(len(rows.heads), batch * rows.chunks, rows.num_rows, -1) for x in packed)

        def body(i: Array, views: tuple[Array, ...]) -> tuple[Array, ...]:
            at = rows.all_chunks(i, batch, self.kv_heads, self.starts)
            old = tuple(at.read(view) for view in views)
            new = (indexing.dynamic_index_in_dim(x, i, keepdims=False) for x in packed)
            updated = update(old, tuple(x.reshape(y.shape) for x, y in zip(new, old, strict=True)))
            return tuple(at.write(view, x) for view, x in zip(views, updated, strict=True))

        return lax.fori_loop(0, len(rows.heads), body, tuple(views))

    def _batch(self, view: Array) -> int:
        return view.shape[0] // self.rows.chunks if self.rows.is_aligned else view.shape[0]
