"""The query rows of one chunk against the key rows of another, in plain XLA: what a device does with what it is sent.

Legend: ``N`` tasks (heads times batch), ``C`` chunks, ``n`` rows of a chunk, ``G`` query heads per key/value head,
``H`` head dim. Unlike in `ringjax._src.kernels.xla` the rows of a head stand together, as they travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src import online_softmax as softmax
from ringjax._src.dropout import RowHashes
from ringjax._src.kernels.rows import attend, gradients
from ringjax._src.kernels.walk import Places, Sight, State, Walk
from ringjax._src.kernels.xla import over_rows, tasks_together
from ringjax._src.online_softmax import PartialSoftmax


class Queries(NamedTuple):
    """Query rows q (N, C, n * G, H) and their segment ids (N, C, n) or None; for a backward pass also what came out.

    Attributes:
        q, ids: The rows.
        dout: The cotangent, like q.
        lse: The joint log-sum-exp (N, C, n * G), in the form of `softmax.for_backward`.
        delta: Sum of cotangent times output, like `lse`.
    """

    q: Array
    ids: Array | None
    dout: Array | None = None
    lse: Array | None = None
    delta: Array | None = None


class KeyRows(NamedTuple):
    """Keys and values, stacked (2, N, C, n, H), and their segment ids (N, C, n) or None."""

    kv: Array
    ids: Array | None


class Visits(NamedTuple):
    """Pairs of chunks that meet, one after the other.

    Attributes:
        query: Chunk of the queries, (visits,).
        key: Chunk of the keys, (visits,).
        is_needed: Which visits have anything to compute, (visits,), or None for all.
        places: Where the rows stand, or None where their order says it all: `query` and `key` of all chunks and heads
            (C, heads, rows, 2), `ranges` of all visits and heads (visits, heads, blocks, 2).
        is_diagonal: Whether the chunks are the same, so that causality masks inside.
        ranges: With places, gives `places.ranges` for blocks of rows of any first row and last row + 1.
    """

    query: Array
    key: Array
    is_needed: Array | None = None
    places: Places | None = None
    is_diagonal: bool = False
    ranges: Callable[..., Array] | None = None


class Meeting(NamedTuple):
    """Queries that meet keys: in which pairs of chunks and order, with which scale, divisor of the output, stamps."""

    queries: Queries
    keys: KeyRows
    visits: Visits
    walk: Walk
    scale: float
    divisor: int
    stamps: RowHashes | None = None  # of queries (N, C, n * G) and keys (N, C, n)


class Found(NamedTuple):
    """The partial of the queries so far, (N, C, n * G, H) and (N, C, n * G), and the tiles computed, if counted."""

    partial: PartialSoftmax
    tiles: Array | None


def forward(found: Found, meeting: Meeting, heads: int) -> Found:
    """Merges what the queries find among the keys into what they found before."""
    queries, keys, visits, walk, scale, *_ = meeting
    acc = found.partial.lse.dtype

    def visit(found: Found, at: _At) -> Found:
        merged = found.partial
        q = walk.padded(at.query_rows(queries.q).astype(acc), walk.group) * scale
        k, v = (walk.padded(at.key_rows(x).astype(acc), 1) for x in keys.kv)
        marks = *at.ids(queries.ids, keys.ids, walk), at.stamps(meeting.stamps, walk)
        part = over_rows(_seeing(attend, at, walk), *marks, q, k, v)
        rows = walk.rows * walk.group
        old = PartialSoftmax(*(at.query_rows(x) for x in merged))
        new = softmax.merge(old, PartialSoftmax(*(x[:, :rows] for x in part)))
        tiles = None if found.tiles is None else found.tiles + at.num * walk.tiles(at.places)
        return Found(PartialSoftmax(*(at.with_query_rows(x, y) for x, y in zip(merged, new, strict=True))), tiles)

    return _over_visits(visit, found, queries.q.shape[0], visits, walk, heads)


def backward(sums: tuple[Array, Array], meeting: Meeting, heads: int) -> tuple[Array, Array]:
    """Adds the gradients to those of queries (N, C, n * G, H) and of keys and values (2, N, C, n, H)."""
    queries, keys, visits, walk, scale, divisor, _ = meeting
    acc = sums[0].dtype
    dout_rows, lse_rows, delta_rows = queries.dout, queries.lse, queries.delta
    assert dout_rows is not None and lse_rows is not None and delta_rows is not None

    def visit(sums: tuple[Array, Array], at: _At) -> tuple[Array, Array]:
        dq, dkv = sums
        q = walk.padded(at.query_rows(queries.q).astype(acc), walk.group) * scale
        dout = walk.padded(at.query_rows(dout_rows).astype(acc), walk.group) / divisor
        lse, delta = (walk.padded(at.query_rows(x)[..., None], walk.group)[..., 0] for x in (lse_rows, delta_rows))
        k, v = (walk.padded(at.key_rows(x).astype(acc), 1) for x in keys.kv)
        marks = *at.ids(queries.ids, keys.ids, walk), at.stamps(meeting.stamps, walk)
        dq_rows, dk, dv = over_rows(_seeing(gradients, at, walk), *marks, q, k, v, dout, lse, delta)
        dq = at.with_query_rows(dq, at.query_rows(dq) + dq_rows[:, : walk.rows * walk.group] * scale)
        return dq, at.add_key_rows(dkv, jnp.stack([dk, dv])[:, :, : walk.rows])

    return _over_visits(visit, sums, queries.q.shape[0], visits, walk, heads)


class _At(NamedTuple):
    """One visit of `num` tasks from `task` on."""

    task: Array
    num: int
    query: Array  # chunk
    key: Array  # chunk
    places: Places | None  # of the one task

    def query_rows(self, x: Array) -> Array:
        return lax.dynamic_slice(x, self._corner(self.query, x.ndim), (self.num, 1, *x.shape[2:]))[:, 0]

    def with_query_rows(self, x: Array, rows: Array) -> Array:
        return lax.dynamic_update_slice(x, rows[:, None].astype(x.dtype), self._corner(self.query, x.ndim))

    def key_rows(self, x: Array) -> Array:
        return lax.dynamic_slice(x, self._corner(self.key, x.ndim), (self.num, 1, *x.shape[2:]))[:, 0]

    def add_key_rows(self, kv: Array, rows: Array) -> Array:
        corner = (jnp.zeros_like(self.task), *self._corner(self.key, kv.ndim - 1))
        old = lax.dynamic_slice(kv, corner, (2, self.num, 1, *kv.shape[3:]))
        return lax.dynamic_update_slice(kv, old + rows[:, :, None], corner)

    def ids(self, query_ids: Array | None, key_ids: Array | None, walk: Walk) -> tuple[Array | None, Array | None]:
        if query_ids is None or key_ids is None:
            return None, None
        mine, theirs = self.query_rows(query_ids), self.key_rows(key_ids)
        return tuple(walk.padded(x[..., None], 1)[..., 0] for x in (mine, theirs))  # type: ignore[return-value]

    def stamps(self, stamps: RowHashes | None, walk: Walk) -> RowHashes | None:
        if stamps is None:
            return None
        mine = walk.padded(self.query_rows(stamps.query)[..., None], walk.group)
        return RowHashes(mine[..., 0], walk.padded(self.key_rows(stamps.key)[..., None], 1)[..., 0])

    def _corner(self, chunk: Array, ndim: int) -> tuple[Array, ...]:
        zero = jnp.zeros_like(self.task)
        return self.task, chunk, *(zero,) * (ndim - 2)


def _seeing(block: Callable[..., tuple[Array, ...]], at: _At, walk: Walk) -> Callable[..., tuple[Array, ...]]:
    def see(
        query_ids: Array | None, key_ids: Array | None, stamps: RowHashes | None, *rows: Array
    ) -> tuple[Array, ...]:
        count = jnp.zeros_like(at.task) + walk.rows
        return block(*rows, sight=Sight(count, query_ids, key_ids, at.places, stamps), walk=walk)

    return see


def _over_visits(
    visit: Callable[[State, _At], State], state: State, tasks: int, visits: Visits, walk: Walk, heads: int
) -> State:
    """Runs `visit` on every needed pair of chunks, for all tasks."""
    num = 1 if visits.places is not None else tasks_together(tasks, walk)
    steps = tasks // num

    def pair(which: Array, state: State) -> State:
        def body(index: Array, state: State) -> State:
            task = jnp.asarray(index, jnp.int32) * num
            places = None
            if visits.places is not None:
                head = task // (tasks // heads)
                chunks = visits.query[which], visits.key[which], which
                query, key, ranges = (x[i, head] for x, i in zip(visits.places, chunks, strict=True))
                places = Places(walk.padded(query[None], 1, -1)[0], walk.padded(key[None], 1, -2)[0], ranges)
            return visit(state, _At(task, num, visits.query[which], visits.key[which], places))

        return lax.fori_loop(0, steps, body, state)

    def needed(which: Array, state: State) -> State:
        which = jnp.asarray(which, jnp.int32)
        if visits.is_needed is None:
            return pair(which, state)
        return lax.cond(visits.is_needed[which], lambda s: pair(which, s), lambda s: s, state)

    if len(visits.query) == 1:
        return needed(jnp.int32(0), state)
    return lax.fori_loop(0, len(visits.query), needed, state)
