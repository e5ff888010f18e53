"""One branch on a ring: its rows taken, sent round, met, and put back.

Legend: ``B`` batch, ``c`` rows of a shard, ``K`` key/value heads, ``G`` query heads per key/value head, ``H`` head dim.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src import dropout
from ringjax._src import online_softmax as softmax
from ringjax._src.branches.chunk_pairs import starts, visits
from ringjax._src.comm.layout import Layout
from ringjax._src.comm.ring_comm import AxisName, Circle, Strategy
from ringjax._src.dropout import RowHashes
from ringjax._src.kernels import hops, meet
from ringjax._src.kernels.backend import Backend, Case, case_of
from ringjax._src.kernels.hops import KeyRows, Meeting, Queries, Visits
from ringjax._src.kernels.walk import Walk
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.planning.plan import BranchPlan
from ringjax._src.rows.select import from_bits, to_bits
from ringjax._src.rows.shard import ShardRows


class Shard(NamedTuple):
    """What a device holds, or views of it.

    Attributes:
        query: (B, c, K, G, H).
        key: (B, c, K, H).
        value: (B, c, K, H).
        ids: Segment ids (B, c), or None.
        seeds: For dropout, of each head (B, K, G), or None.
    """

    query: Array
    key: Array
    value: Array
    ids: Array | None
    seeds: Array | None = None


Cargo = KeyRows | tuple[Array, Array, Array | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Journey:
    """How the rows of one branch travel."""

    branch: BranchPlan
    rows: ShardRows
    layout: Layout
    axis_name: AxisName
    axis_size: int
    kv_heads: int
    group: int  # query heads per key/value head
    is_causal: bool
    scale: float
    divisor: int
    backend: Backend
    seeds: Array | None = None  # for dropout
    dropout_rate: float = 0.0

    @property
    def circle(self) -> Circle:
        """The rings on which they travel."""
        strategy: Strategy = "all_gather" if self.branch.where == "all_gather" else "ring"
        return Circle(self.axis_name, self.axis_size, self.branch.group, strategy, is_uniform=not self.rows.is_aligned)

    def view(self, *arrays: Array) -> tuple[Array, ...]:
        """Arrays (B, c, ...) in the form in which the other methods take them."""
        return tuple(self.rows.view(to_bits(x)) for x in arrays)

    def view_shard(self, shard: Shard) -> Shard:
        """The same for all that a device holds."""
        query, key, value = self.view(*shard[:3])
        return Shard(query, key, value, None if shard.ids is None else self.rows.view(shard.ids), shard.seeds)

    def piece(self, index: Array) -> Journey:
        """The part of the heads that travels after `index` others."""
        num = len(self.rows.heads) // self.branch.pieces
        return dataclasses.replace(self, rows=self.rows.piece(index * num, num))

    def keys(self, shard: Shard) -> KeyRows:
        """The selected keys and values."""
        ids = self._ids(shard)
        kv = jnp.stack([self._taken(x, ids, 1) for x in (shard.key, shard.value)])
        return KeyRows(kv, ids)

    def queries(self, shard: Shard) -> Queries:
        """The selected queries."""
        ids = self._ids(shard)
        return Queries(self._taken(shard.query, ids, self.group), ids)

    def forward(self, queries: Queries, keys: KeyRows, begun: KeyRows, tiles: Array | None) -> hops.Found:
        """The partial of the selected queries over all that they see in this branch; counts tiles where given some."""
        acc = softmax.accumulator(queries.q.dtype)

        def visit(found: hops.Found, keys: KeyRows, device: Array, is_own: bool) -> hops.Found:
            stamps = self._stamps(self._me, device)
            for pairs in self._visits(self._me, device, is_own):
                found = self._meet(found, self._meeting(queries, keys, pairs, stamps))
            return found

        empty = softmax.empty_like(jnp.zeros_like(queries.q, dtype=acc))
        return self.circle.visit_all(keys, begun, hops.Found(empty, tiles), visit)

    def merge(self, merged: PartialSoftmax, part: PartialSoftmax) -> PartialSoftmax:
        """The partial of all rows with that of the selected queries merged in."""
        return self.rows.merge(merged, part, self.kv_heads, self._starts)

    def before_backward(self, shard: Shard, dout: Array, lse: Array, delta: Array) -> Queries:
        """The selected queries with all that their gradient needs."""
        queries = self.queries(shard)
        taken = [self._taken(x, queries.ids, self.group) for x in (dout, softmax.for_backward(lse), delta)]
        return queries._replace(dout=taken[0], lse=taken[1][..., 0], delta=taken[2][..., 0])

    def cargo(self, queries: Queries, keys: KeyRows) -> Cargo:
        """What goes round in the backward pass; arrays of a kind are stacked, to go in one message."""
        if self.branch.moves == "keys":
            return keys
        assert queries.dout is not None and queries.lse is not None and queries.delta is not None
        return jnp.stack([queries.q, queries.dout]), jnp.stack([queries.lse, queries.delta]), queries.ids

    def backward(self, queries: Queries, keys: KeyRows, begun: Cargo) -> tuple[Array, Array]:
        """Gradients of the selected queries (N, C, n * G, H), and keys and values (2, N, C, n, H)."""
        assert queries.lse is not None
        acc = queries.lse.dtype
        dq, dkv = jnp.zeros_like(queries.q, dtype=acc), jnp.zeros_like(keys.kv, dtype=acc)

        def meet(
            sums: tuple[Array, Array], queries: Queries, keys: KeyRows, devices: tuple[Array, Array], is_own: bool
        ) -> tuple[Array, Array]:
            stamps = self._stamps(*devices)
            for pairs in self._visits(*devices, is_own):
                sums = self._meet_backward(sums, self._meeting(queries, keys, pairs, stamps))
            return sums

        def keys_come(dq: Array, dkv: Array, keys: KeyRows, device: Array, is_own: bool) -> tuple[Array, Array]:
            return meet((dq, dkv), queries, keys, (self._me, device), is_own)

        def queries_come(
            dkv: Array, dq: Array, cargo: tuple[Array, Array, Array | None], device: Array, is_own: bool
        ) -> tuple[Array, Array]:
            (q, dout), (lse, delta), ids = cargo
            arrived = Queries(q, ids, dout, lse, delta)
            dq, dkv = meet((dq, dkv), arrived, keys, (device, self._me), is_own)
            return dkv, dq

        if self.branch.moves == "keys":
            return self.circle.sum_all(keys, begun, dkv, dq, keys_come)
        dkv, dq = self.circle.sum_all(self.cargo(queries, keys), begun, dq, dkv, queries_come)
        return dq, dkv

    def _meeting(self, queries: Queries, keys: KeyRows, pairs: Visits, stamps: RowHashes | None) -> Meeting:
        return Meeting(queries, keys, pairs, self._walk(pairs), self.scale, self.divisor, stamps)

    def _meet(self, found: hops.Found, meeting: Meeting) -> hops.Found:
        """What the queries find in one visit, merged in."""
        return self.backend.run(
            self._case(meeting.queries),
            found,
            lambda found: hops.forward(found, meeting, len(self.rows.heads)),
            lambda kernels, found: hops.Found(meet.forward(kernels, found.partial, meeting, self._full), found.tiles),
        )

    def _meet_backward(self, sums: tuple[Array, Array], meeting: Meeting) -> tuple[Array, Array]:
        """The gradients of one visit, added."""
        return self.backend.run(
            self._case(meeting.queries),
            sums,
            lambda sums: hops.backward(sums, meeting, len(self.rows.heads)),
            lambda kernels, sums: meet.backward(kernels, sums, meeting, self._full),
        )

    def _case(self, queries: Queries) -> Case:
        return case_of(queries.q, self.rows.rows, self.group)

    @property
    def _full(self) -> Array:
        """Rows of each head in a chunk; those that are not there are marked."""
        return jnp.full((len(self.rows.heads),), self.rows.rows, jnp.int32)

    def add(self, grads: tuple[Array, ...], found: tuple[Array, Array]) -> tuple[Array, ...]:
        """The gradients of all rows with those of the selected rows added."""
        dq, (dk, dv) = found
        return self.rows.add(grads, (dq, dk, dv), self.kv_heads, self._starts)

    @property
    def _me(self) -> Array:
        return lax.axis_index(self.axis_name)

    @property
    def _starts(self) -> Array:
        return starts(self.rows, self.layout, self.axis_size, self._me)

    def _visits(self, query_device: Array, key_device: Array, is_own: bool) -> list[Visits]:
        return visits(self.rows, self.layout, self.axis_size, self.is_causal, query_device, key_device, is_own)

    def _walk(self, pairs: Visits) -> Walk:
        is_causal = self.is_causal and (pairs.is_diagonal or pairs.places is not None)
        is_ragged = self.rows.sizes.padded(self.rows.rows) != self.rows.rows
        return Walk(self.rows.sizes, self.rows.rows, self.group, is_causal, is_ragged, self.dropout_rate)

    def _stamps(self, query_device: Array, key_device: Array) -> RowHashes | None:
        """Hashes of the rows of two devices, queries (N, C, n * G) and keys (N, C, n): nobody has to send them."""
        if self.seeds is None:
            return None
        mine, theirs = (
            self.rows.places(starts(self.rows, self.layout, self.axis_size, device), missing=0)[..., 1]
            for device in (query_device, key_device)
        )  # (C, heads, n)
        seeds = jnp.moveaxis(self.seeds[:, jnp.asarray(self.rows.heads)], 1, 0)[:, :, None, None]  # (heads, B, 1, 1, G)
        places = jnp.moveaxis(mine, 1, 0)[:, None, :, :, None]
        queries = dropout.query_hashes(seeds, places, self.rows.branch)
        batch, chunks, rows = self.seeds.shape[0], self.rows.chunks, self.rows.rows
        keys = jnp.repeat(jnp.moveaxis(dropout.key_hashes(theirs), 1, 0), batch, axis=0)
        return RowHashes(queries.reshape(-1, chunks, rows * self.group), keys)

    def _ids(self, shard: Shard) -> Array | None:
        if shard.ids is None:
            return None
        taken = self.rows.take(shard.ids, 1, self._starts)
        return taken.reshape(-1, self.rows.chunks, self.rows.rows)

    def _taken(self, x: Array, ids: Array | None, group: int) -> Array:
        """Selected rows (N, C, n * group, width); 0 where the ids say padding, which may hold NaN."""
        taken = from_bits(self.rows.take(x, self.kv_heads, self._starts))
        taken = taken.reshape(-1, self.rows.chunks, self.rows.rows * group, taken.shape[-1] // group)
        if ids is None:
            return taken
        return jnp.where(jnp.repeat(ids, group, axis=2)[..., None] >= 0, taken, jnp.zeros((), taken.dtype))
