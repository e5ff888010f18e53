"""Branches whose devices exchange heads: [DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509).

Before the attention, a device has the selected rows of its own chunks for all heads; after the exchange, it has the
rows of a whole *team* of devices for some of the heads, so it attends to whole segments. If several teams share a
segment, keys rotate along a ring of teams.

    8 devices share a segment and exchange heads among 4:
    teams {0, 1, 2, 3} and {4, 5, 6, 7}, rings {0, 4}, {1, 5}, {2, 6} and {3, 7}

`AllToAllBranch` sends the rows that one branch selects. `DenseAllToAllBranch` sends whole arrays once for all branches
whose segments do not align with the chunks of the devices, and runs them as on one device.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from ringjax._src import indexing
from ringjax._src import online_softmax as softmax
from ringjax._src.branches.local import LocalBranch
from ringjax._src.branches.protocol import InFlight, Kept, Shard
from ringjax._src.branches.ring import RingBranch
from ringjax._src.branches.shared import PackedKeys, PackedQueries, SharedBranch
from ringjax._src.comm.head_exchange import HeadExchange, NamedAxes, head_parts
from ringjax._src.comm.layout import layout_named
from ringjax._src.comm.ring_comm import RingComm
from ringjax._src.kernels.interface import Grads, Residuals
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.planning import geometry
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.rows.selection import RowSelection


class AllToAllBranch(SharedBranch):
    """Exchanges the selected rows of all heads for all rows of some heads, and attends as a `RingBranch` of teams."""

    overlaps_pieces = True

    def send_rows(self, views: Shard) -> InFlight:
        """Packs and exchanges rows."""
        return self._to_team(self.pack_queries(views), self.pack_keys(views))

    def attend_rows(self, views: Shard, in_flight: InFlight) -> PartialSoftmax:
        """Attends to the rows of the team, and of other teams."""
        queries, keys = in_flight
        return self._team.attend_all(queries, keys, self._team.send(keys))

    def return_rows(self, part: PartialSoftmax) -> PartialSoftmax:
        """Returns the results to the devices of the rows, in the accumulator dtype."""
        return PartialSoftmax(*self._from_team((part.out, "kbcngh"), (part.lse, "kbcng")))

    def send_rows_bwd(self, queries: PackedQueries, keys: PackedKeys) -> tuple[PackedQueries, PackedKeys]:
        """Exchanges packed rows and residuals."""
        return self._to_team(queries, keys)

    def attend_all_bwd(self, queries: PackedQueries, keys: PackedKeys) -> tuple[Array, Array]:
        """Computes the packed gradients of the rows of the team."""
        return self._team.attend_all_bwd(queries, keys)

    def return_rows_bwd(self, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        """Returns the gradients to the devices of the rows, in the accumulator dtype."""
        dq, dkv = self._from_team((grads[0], "kbcngh"), (grads[1], "skbcnh"))
        return dq, dkv

    def count_tiles(self) -> Array:
        """Counts the score tiles that this device computes in the forward pass in plain XLA."""
        return self._team.count_tiles()

    @functools.cached_property
    def _exchange(self) -> HeadExchange:
        return head_exchange(self.spec, self.plan.exchange_devices, len(self.rows.heads))

    @functools.cached_property
    def _team(self) -> RingBranch:
        """The ring of teams, with the heads of this device."""
        (kv, query), selection = self._exchange.parts, self.plan.selections[1]
        num, q_per_kv = len(self.rows.heads) // kv, self.spec.q_per_kv // query
        heads = self.rows.head_range(self._exchange.kv_part() * num, num)
        rows = dataclasses.replace(selection, heads=heads.heads, offsets=heads.offsets, counts=heads.counts)
        seeds = self.seeds
        if seeds is not None:
            seeds = indexing.dynamic_slice_in_dim(seeds, self._exchange.query_part() * q_per_kv, q_per_kv, axis=2)
        team_size = self.plan.exchange_devices
        spec = geometry.team_spec(self.spec, self.plan.branch, team_size)._replace(q_per_kv=q_per_kv)
        return RingBranch(spec, self.name, self.plan, rows, seeds, team_size)

    def _to_team(self, queries: PackedQueries, keys: PackedKeys) -> tuple[PackedQueries, PackedKeys]:
        """Exchanges packed rows of this device for those of its team."""
        named = {"query": (queries.query, "kbcngh"), "kv": (keys.kv, "skbcnh")}
        if queries.residuals is not None:
            dout, lse, delta, _ = queries.residuals
            named |= {"dout": (dout, "kbcngh"), "lse": (lse, "kbcng"), "delta": (delta, "kbcng")}
        if queries.ids is not None:
            named |= {"ids": (queries.ids, "kbcn")}
        sent = [NamedAxes(_split_axes(x, axes, self._sizes(self.rows)), axes) for x, axes in named.values()]
        received = self._exchange.to_heads(*sent)
        found = {
            name: _merge_axes(self._in_order(x, axes), axes)
            for x, (name, (_, axes)) in zip(received, named.items(), strict=True)
        }
        ids = found.get("ids")
        residuals = Residuals(found["dout"], found["lse"], found["delta"]) if "dout" in found else None
        return PackedQueries(found["query"], ids, residuals), PackedKeys(found["kv"], ids)

    def _from_team(self, *given: tuple[Array, str]) -> list[Array]:
        """Returns packed rows of the team to the devices that they belong to."""
        sent = []
        for x, axes in given:
            rows = _split_axes(x, axes, self._sizes(self._team.rows))
            sent.append(NamedAxes(self._in_chunks(rows, axes), axes))
        received = self._exchange.to_rows(*sent)
        return [_merge_axes(x, axes) for x, (_, axes) in zip(received, given, strict=True)]

    def _sizes(self, rows: RowSelection) -> dict[str, int]:
        return {"s": 2, "b": self.spec.batch, "k": len(rows.heads), "c": rows.chunks, "n": rows.num_rows}

    def _in_order(self, x: Array, axes: str) -> Array:
        """Joins the chunks of all devices, if the team has them all, and removes missing rows."""
        team = self._team.rows
        if team.chunks != self.rows.chunks:
            x = _reshape_chunks(x, axes, 1)
        if self.rows.is_aligned:
            return x
        return _take_rows(x, axes, self._team_chunks.index_in_chunks(team.num_rows))

    def _in_chunks(self, x: Array, axes: str) -> Array:
        """Inverts `_in_order`."""
        if not self.rows.is_aligned:
            x = _take_rows(x, axes, self._team_chunks.index_in_order(self.rows.chunks * self.spec.ring_size))
        return x if x.shape[axes.index("c")] == self.rows.chunks else _reshape_chunks(x, axes, self.rows.chunks)

    @property
    def _team_chunks(self) -> RowSelection:
        """The selection in the chunks of devices, with the heads of the team."""
        team = self._team.rows
        return dataclasses.replace(self.rows, heads=team.heads, offsets=team.offsets, counts=team.counts)


@dataclasses.dataclass(frozen=True, eq=False)
class DenseAllToAllBranch:
    """Exchanges whole arrays over all devices of the ring and runs several branches as on one device.

    Attributes:
        spec: The attention call.
        name: Name of the branches in profiles.
        exchange: The exchange of all heads of a device.
        branches: The branches, for the heads that the device receives.
    """

    spec: AttentionSpec
    name: str
    exchange: HeadExchange
    branches: tuple[LocalBranch, ...]

    def start(self, shard: Shard) -> InFlight:
        """Exchanges query, key and value."""
        return self._to_heads(shard)[0]

    def finish(self, shard: Shard, in_flight: InFlight, merged: PartialSoftmax) -> tuple[PartialSoftmax, Kept]:
        """Attends on the heads of this device, and returns and merges the results."""
        acc = softmax.accumulator(shard.query.dtype)
        found, kept = softmax.empty_like(jnp.zeros_like(in_flight.query, dtype=acc)), []
        for branch in self.branches:
            found, rows = branch.finish(in_flight, None, found)
            kept.append(rows)
        part = self._to_rows((found.out, "bcnkgh"), (found.lse, "bcnkg"))
        return softmax.merge(merged, PartialSoftmax(*part)), kept

    def start_bwd(self, shard: Shard, residuals: Residuals, kept: Kept) -> InFlight:
        """Exchanges rows and residuals, computes the gradients, and returns them."""
        given = (residuals.dout, "bcnkgh"), (residuals.lse, "bcnkg"), (residuals.delta, "bcnkg")
        team, received = self._to_heads(shard, *given)
        of_heads = Residuals(*received)
        zeros = [jnp.zeros_like(x, dtype=residuals.lse.dtype) for x in team[:3]]
        grads = Grads(zeros[0], (zeros[1], zeros[2]))
        for branch, rows in zip(self.branches, kept or [None] * len(self.branches), strict=True):
            grads = branch.finish_bwd(team, of_heads, rows, None, grads)
        return self._to_rows((grads.query, "bcnkgh"), *((x, "bcnkh") for x in grads.kv))

    def finish_bwd(self, shard: Shard, residuals: Residuals, kept: Kept, in_flight: InFlight, grads: Grads) -> Grads:
        """Adds the gradients."""
        dq, dk, dv = in_flight
        return Grads(grads.query + dq, (grads.kv[0] + dk, grads.kv[1] + dv))

    def count_tiles(self) -> int:
        """Counts the score tiles that this device computes."""
        return sum(branch.count_tiles() for branch in self.branches)

    def _to_heads(self, shard: Shard, *residuals: tuple[Array, str]) -> tuple[Shard, list[Array]]:
        """Exchanges the arrays of this device for whole sequences of its heads."""
        given = [(shard.query, "bcnkgh"), (shard.key, "bcnkh"), (shard.value, "bcnkh"), *residuals]
        sent = [NamedAxes(self._split_chunks(x), axes) for x, axes in given]
        query, key, value, *others = map(_join_chunks, self.exchange.to_heads(*sent))
        ids, seeds = shard.ids, shard.seeds
        if ids is not None:
            ids = _join_chunks(self.exchange.gather_rows(NamedAxes(self._split_chunks(ids), "bcn")))
        if seeds is not None:
            parts = self.exchange.kv_part() * key.shape[2], self.exchange.query_part() * query.shape[3]
            seeds = indexing.dynamic_slice_in_dim(seeds, parts[0], key.shape[2], axis=1)
            seeds = indexing.dynamic_slice_in_dim(seeds, parts[1], query.shape[3], axis=2)
        return Shard(query, key, value, ids, seeds, lengths=shard.lengths), others

    def _to_rows(self, *given: tuple[Array, str]) -> list[Array]:
        """Inverts `_to_heads`."""
        sent = [NamedAxes(self._split_chunks(x), axes) for x, axes in given]
        return [_join_chunks(x) for x in self.exchange.to_rows(*sent)]

    def _split_chunks(self, x: Array) -> Array:
        return x.reshape(x.shape[0], layout_named(self.spec.layout).chunks, -1, *x.shape[2:])


def head_exchange(spec: AttentionSpec, devices: int, kv_heads: int) -> HeadExchange:
    """Returns the exchange of this many key/value heads of a device among neighboring devices."""
    parts = head_parts(devices, kv_heads, spec.q_per_kv)
    assert parts is not None
    assert spec.axis_name is not None
    return HeadExchange(RingComm(spec.axis_name, spec.ring_size, devices), parts)


def _join_chunks(x: Array) -> Array:
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _split_axes(x: Array, axes: str, sizes: dict[str, int]) -> Array:
    """Separates the axes of packed rows: tasks are heads (k) times batch (b), and rows (n) hold all query heads (g)."""
    return x.reshape([sizes.get(axis, x.shape[-1] if axis == "h" else -1) for axis in axes])


def _merge_axes(x: Array, axes: str) -> Array:
    """Inverts `_split_axes`."""
    shape: list[int] = []
    for axis, size in zip(axes, x.shape, strict=True):
        if axis in "bg":
            shape[-1] *= size
        else:
            shape.append(size)
    return x.reshape(shape)


def _reshape_chunks(x: Array, axes: str, chunks: int) -> Array:
    """Reshapes the axes of chunks and their rows."""
    c = axes.index("c")
    return x.reshape(*x.shape[:c], chunks, -1, *x.shape[c + 2 :])


def _take_rows(x: Array, axes: str, index: Array) -> Array:
    """Takes the rows of each head, of a single chunk, at `index` (heads, rows); those out of range are 0."""
    k, n = axes.index("k"), axes.index("n")
    take = lambda x, index: jnp.take(x, index, axis=n - 1, mode="fill", fill_value=0)  # noqa: E731
    return jax.vmap(take, in_axes=(k, 0), out_axes=k)(x, index)
