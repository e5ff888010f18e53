"""Run-time checks that what a caller passes is in the layout of the ring; see `Ring.debug`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ringjax._src import debug
from ringjax._src.comm.mesh import Ring


def report_split_documents(ring: Ring, ids: Array) -> None:
    """Reports sequences in which rows of one document are not adjacent, as if ids were in another order."""

    def is_split() -> Array:
        ordered = ring.unshard(ids)
        return _num_runs(ordered) > _num_runs(jnp.sort(ordered, axis=1))

    fault = "not in the layout of the ring, as documents are split (use `ring.shard(segment_ids, fill=-1)`)"
    debug.report("segment_ids", fault, is_split, always=ring.debug)


def report_early_padding(ring: Ring | None, ids: Array) -> None:
    """Reports sequences in which padding precedes other rows: their zero keys (``padding="zeros"``) are undefined."""

    def is_early() -> Array:
        is_real = (ids if ring is None else ring.unshard(ids)) >= 0
        return (is_real[:, 1:] & ~is_real[:, :-1]).any(axis=1)

    fault = 'not padded at the end only, as `padding="zeros"` requires'
    debug.report("segment_ids", fault, is_early, always=ring is not None and ring.debug)


def report_misplaced_positions(ring: Ring, positions: Array, ids: Array | None) -> None:
    """Reports positions (B, T) or (1, T) that do not increase by 1 from row to row of a document in sequence order."""

    def is_misplaced() -> Array:
        ordered = ring.unshard(positions)
        is_wrong = ordered[:, 1:] != ordered[:, :-1] + 1
        if ids is None:
            return is_wrong
        documents = ring.unshard(ids)
        return is_wrong & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)

    fault = "not in the layout of the ring (use `ring.positions` or `ring.shard`)"
    debug.report("positions", fault, is_misplaced, always=ring.debug)


def _num_runs(ids: Array) -> Array:
    """Returns the number of runs of equal, non-negative ids in each sequence (B, T)."""
    is_start = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return (is_start & (ids >= 0)).sum(axis=1)
