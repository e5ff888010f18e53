"""What branches that share segments between devices have in common: packing, pieces, and attention to packed rows.

A `KeySendingBranch` implements `send`, `attend_all` and `attend_all_bwd`. A branch that also sends queries is a
`SharedBranch` with `send_rows`, `attend_rows`, `return_rows` and, for the backward pass, `send_rows_bwd`,
`attend_all_bwd`, `return_rows_bwd`. Branches with
large messages send their heads in several *pieces*, one after the other, to save memory. Shapes have the letters of
`kernels/interface.py`. The forward pass of a `KeySendingBranch`:

    start         stages.send        send_rows            pack keys, send
    finish        stages.attend      attend_rows          pack queries, attend_all -> attend_chunks -> dispatch.attend
                  stages.collect     return_rows          merge into the dense arrays
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from ringjax._src import dropout, indexing
from ringjax._src import online_softmax as softmax
from ringjax._src.branches.chunk_pairs import chunk_pairs, chunk_starts
from ringjax._src.branches.extra_keys import branch_start, first_head
from ringjax._src.branches.pieces import Stages, State, in_turn, pipelined
from ringjax._src.branches.protocol import InFlight, Kept, Shard
from ringjax._src.comm.ordering import after
from ringjax._src.comm.ring_comm import RingComm
from ringjax._src.dropout import RowHashes
from ringjax._src.kernels.dispatch import attend, attend_bwd, delta
from ringjax._src.kernels.interface import AttendConfig, Grads, Operands, Residuals
from ringjax._src.kernels.xla import block_loop
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.planning.branch_plan import BranchPlan
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.rows.packing import RowPacker
from ringjax._src.rows.selection import RowSelection, frozen


class PackedQueries(NamedTuple):
    """Packed queries (N, C, n * G, H) with their segment ids (N, C, n) or None, and what the backward pass needs."""

    query: Array
    ids: Array | None
    residuals: Residuals | None = None


class PackedKeys(NamedTuple):
    """Packed keys and values, stacked (2, N, C, n, H), with their segment ids (N, C, n) or None."""

    kv: Array
    ids: Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class SharedBranch(abc.ABC):
    """Base class of branches whose segments are shared by several devices.

    Attributes:
        spec: The attention call.
        name: Name of the branch in profiles.
        plan: The plan of the branch.
        rows: Its selection on this device.
        seeds: Dropout seed of each head, (B, K, G), or None.
        team_size: Number of neighboring devices that have exchanged heads and act as one device.
        overlaps_pieces: Whether pieces are sent while others are attended to; it takes the memory of more pieces.
    """

    spec: AttentionSpec
    name: str
    plan: BranchPlan
    rows: RowSelection
    seeds: Array | None = None
    team_size: int = 1
    overlaps_pieces: ClassVar[bool] = False

    # The communication.

    @abc.abstractmethod
    def send_rows(self, views: Shard) -> InFlight:
        """Packs rows and starts to send them."""

    @abc.abstractmethod
    def attend_rows(self, views: Shard, in_flight: InFlight) -> PartialSoftmax:
        """Computes the attention of the packed queries that are on this device, once rows have been sent."""

    @abc.abstractmethod
    def attend_all_bwd(self, queries: PackedQueries, keys: PackedKeys) -> tuple[Array, Array]:
        """Computes the packed gradients of what `send_rows_bwd` returns: (N, C, n * G, H) and (2, N, C, n, H)."""

    @property
    def comm(self) -> RingComm:
        """The devices that share a segment."""
        assert self.spec.axis_name is not None
        size = self.team_size
        return RingComm(self.spec.axis_name, self.spec.ring_size * size, self.plan.ring_devices // size, size)

    def return_rows(self, part: PartialSoftmax) -> PartialSoftmax:
        """Returns results to the devices of the queries, if queries were sent."""
        return part

    def send_rows_bwd(self, queries: PackedQueries, keys: PackedKeys) -> tuple[PackedQueries, PackedKeys]:
        """Sends what `attend_all_bwd` takes, if that is not what a device holds."""
        return queries, keys

    def return_rows_bwd(self, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        """Inverts `send_rows_bwd`, for gradients."""
        return grads

    # The branch protocol.

    def start(self, shard: Shard) -> InFlight:
        """Packs and sends rows, or the first piece of them; pieces that do not overlap are sent later."""
        if self.plan.pieces > 1 and not self.overlaps_pieces:
            return None
        return self._stages(shard).send(jnp.int32(0), None)

    def finish(self, shard: Shard, in_flight: InFlight, merged: PartialSoftmax) -> tuple[PartialSoftmax, Kept]:
        """Attends and merges."""
        views = PartialSoftmax(*(self.rows.view(x) for x in merged))
        state = views, self._no_rows(merged.out) if self._is_detached else None
        found, kept = self._run(self._stages(shard), in_flight, state)
        return PartialSoftmax(*(self.rows.put_view(x, y) for x, y in zip(merged, found, strict=True))), kept

    def start_bwd(self, shard: Shard, residuals: Residuals, kept: Kept) -> InFlight:
        """Starts the backward pass.

        An exchange sends its first piece; a branch in one piece computes its packed gradients, whose last message then
        overlaps with local branches; pieces that do not overlap are sent later.
        """
        if self.plan.pieces > 1 and not self.overlaps_pieces:
            return None
        stages, first = self._stages_bwd(shard, residuals, kept), jnp.int32(0)
        sent = stages.send(first, residuals.lse)
        return sent if self.overlaps_pieces else stages.attend(first, sent)

    def finish_bwd(self, shard: Shard, residuals: Residuals, kept: Kept, in_flight: InFlight, grads: Grads) -> Grads:
        """Computes the packed gradients, as far as they are not yet, and adds them to `grads`."""
        stages, dense = self._stages_bwd(shard, residuals, kept), (grads.query, *grads.kv)
        sums = tuple(self.rows.view(x) for x in dense)
        if self.plan.pieces == 1 and not self.overlaps_pieces:
            sums = stages.collect(jnp.int32(0), in_flight, sums)
        else:  # on CPU devices, an exchange continues when earlier branches have added their gradients
            sums = self._run(stages, after(in_flight, sums, self.spec.axis_name), sums)
        dq, dk, dv = (self.rows.put_view(x, y) for x, y in zip(dense, sums, strict=True))
        return Grads(dq, (dk, dv))

    # Pieces.

    def _run(self, stages: Stages, in_flight: InFlight, state: State) -> State:
        """Passes all pieces through their stages."""
        num = self.plan.pieces
        if num > 1 and not self.overlaps_pieces:
            return in_turn(stages, num, state)
        has_hops = self.plan.ring_devices > self.plan.exchange_devices
        return pipelined(stages, num, in_flight, state, self.spec.axis_name if has_hops else None)

    def _stages(self, shard: Shard) -> Stages:
        """Returns what the forward pass does with a piece."""
        views, zero_keys = self._views(shard), None
        if self._is_detached and self.spec.has_zero_keys:
            zero_keys = self._packer.view(branch_start(self.spec, shard, self.rows.branch, first_head(self.spec)).lse)

        def send(index: Array, done: object) -> InFlight:
            index, ids = self._ordered(index, views.ids, done)
            return self._piece(index).send_rows(views._replace(ids=ids))

        def attend(index: Array, in_flight: InFlight) -> PartialSoftmax:
            return self._piece(index).attend_rows(views, in_flight)

        def collect(
            index: Array, part: PartialSoftmax, state: tuple[PartialSoftmax, Array | None]
        ) -> tuple[PartialSoftmax, Array | None]:
            branch, (merged, kept) = self._piece(index), state
            part = branch.return_rows(part)
            if zero_keys is not None:
                lse = branch._packer.pack(zero_keys, None, self.spec.q_per_kv)[..., 0]
                part = softmax.merge(part, PartialSoftmax(jnp.zeros_like(part.out), lse))
            if kept is not None:
                kept = indexing.dynamic_update_index_in_dim(kept, part.out.astype(kept.dtype), index, axis=0)
            return branch._packer.merge(merged, part), kept

        return Stages(send, attend, collect)

    def _stages_bwd(self, shard: Shard, residuals: Residuals, kept: Kept) -> Stages:
        """Returns what the backward pass does with a piece."""
        views = self._views(shard)
        of_residuals = Residuals(*(self._packer.view(x) for x in residuals[:3]))

        def send(index: Array, done: object) -> InFlight:
            index, ids = self._ordered(index, views.ids, done)
            own = None if kept is None else indexing.dynamic_index_in_dim(kept, index, keepdims=False)
            branch = self._piece(index)
            return branch.send_rows_bwd(*branch._pack_all(views._replace(ids=ids), of_residuals, own))

        def attend(index: Array, in_flight: InFlight) -> tuple[Array, Array]:
            return self._piece(index).attend_all_bwd(*in_flight)

        def collect(index: Array, grads: tuple[Array, Array], sums: tuple[Array, ...]) -> tuple[Array, ...]:
            branch = self._piece(index)
            dq, (dk, dv) = branch.return_rows_bwd(grads)
            return branch._packer.add(sums, (dq, dk, dv))

        return Stages(send, attend, collect)

    def _ordered(self, index: Array, ids: Array | None, done: object) -> tuple[Array, Array | None]:
        """Returns the index of a piece and segment ids, on CPU devices after `done`: all messages depend on them."""
        return after(index, done, self.spec.axis_name), after(ids, done, self.spec.axis_name)

    def _piece(self, index: Array) -> Self:
        """Restricts the branch to the heads of one piece."""
        if self.plan.pieces == 1 and not self.overlaps_pieces:
            return self
        # a single piece of an exchange is sliced too, as its messages must depend on the index, see `_ordered`
        num = len(self.rows.heads) // self.plan.pieces
        return dataclasses.replace(self, rows=self.rows.head_range(index * num, num))

    def _no_rows(self, like: Array) -> Array:
        """Returns zeros for the output rows of each piece, packed, in the dtype of the queries."""
        rows, spec = self.rows, self.spec
        tasks = len(rows.heads) // self.plan.pieces * spec.batch
        shape = self.plan.pieces, tasks, rows.chunks, rows.num_rows * spec.q_per_kv, spec.head_dim
        return jnp.zeros_like(like, shape=shape, dtype=spec.dtype)

    def count_tiles(self) -> Array:
        """Counts the score tiles that this device computes in the forward pass in plain XLA."""
        me, num_tasks = self.comm.device(), self.spec.batch * len(self.rows.heads)
        tiles = jnp.zeros_like(me)
        for hop in range(self.comm.ring_devices):
            for pairs in chunk_pairs(self.spec, self.rows, me, self.comm.source(hop), is_own=hop == 0):
                is_causal = self.spec.is_causal and (pairs.is_diagonal or pairs.positions is not None)
                loop = block_loop(self._packed_rows, self.spec.q_per_kv, is_causal)
                if pairs.key_ranges is not None:
                    tiles += loop.count_tiles(pairs.key_ranges(*loop.block_rows())) * self.spec.batch
                else:
                    active = len(pairs.query) if pairs.active is None else pairs.active.sum().astype(jnp.int32)
                    tiles += active * (num_tasks * int(loop.count_tiles()))
        return tiles

    # Attention to packed rows.

    def attend_chunks(
        self,
        partial: PartialSoftmax,
        queries: PackedQueries,
        keys: PackedKeys,
        *,
        query_device: Array,
        key_device: Array,
        is_own: bool = False,
    ) -> PartialSoftmax:
        """Merges the attention of the queries of one device to the keys of another into `partial`."""
        for operands in self._operands(queries, keys, query_device, key_device, is_own):
            partial = attend(partial, operands, self._config)
        return partial

    def attend_chunks_bwd(
        self,
        grads: tuple[Array, Array],
        queries: PackedQueries,
        keys: PackedKeys,
        *,
        query_device: Array,
        key_device: Array,
        is_own: bool = False,
    ) -> tuple[Array, Array]:
        """Adds the gradients of queries, and of keys and values, for the rows of two devices."""
        assert queries.residuals is not None
        sums = Grads(grads[0], (grads[1],))
        for operands in self._operands(queries, keys, query_device, key_device, is_own):
            sums = attend_bwd(sums, operands, queries.residuals, self._config)
        return sums.query, sums.kv[0]

    def empty_partial(self, queries: PackedQueries) -> PartialSoftmax:
        """Returns the partial softmax of the packed queries over no keys."""
        return softmax.empty_like(jnp.zeros_like(queries.query, dtype=softmax.accumulator(queries.query.dtype)))

    def zero_grads(self, queries: PackedQueries, keys: PackedKeys) -> tuple[Array, Array]:
        """Returns zeros of the shape of the packed gradients, in the accumulator dtype."""
        acc = softmax.accumulator(keys.kv.dtype)
        return jnp.zeros_like(queries.query, dtype=acc), jnp.zeros_like(keys.kv, dtype=acc)

    def _operands(
        self, queries: PackedQueries, keys: PackedKeys, query_device: Array, key_device: Array, is_own: bool
    ) -> list[Operands]:
        hashes = self._hashes(query_device, key_device)
        every = chunk_pairs(self.spec, self.rows, query_device, key_device, is_own=is_own)
        given = queries.query, (keys.kv,), self._packed_rows
        return [Operands(*given, pairs, queries.ids, keys.ids, hashes) for pairs in every]

    @functools.cached_property
    def _packed_rows(self) -> RowSelection:
        """The selection of packed rows: missing rows are masked by position, so every head has all of them."""
        counts = frozen([self.rows.num_rows] * len(self.rows.heads))
        return dataclasses.replace(self.rows, counts=counts)

    @property
    def _config(self) -> AttendConfig:
        return self.spec.attend_config

    @property
    def _is_detached(self) -> bool:
        return self.spec.pattern.mixing == "detached"

    def _hashes(self, query_device: Array, key_device: Array) -> RowHashes | None:
        """Returns the hashes of the rows of two devices, of queries (N, C, n * G) and keys (N, C, n), for dropout."""
        if self.seeds is None:
            return None
        of_query, of_key = (
            jnp.moveaxis(self.rows.positions(chunk_starts(self.spec, device), missing=0)[..., 1], 1, 0)
            for device in (query_device, key_device)
        )  # (heads, C, n)
        seeds = jnp.moveaxis(self.seeds[:, jnp.asarray(self.rows.heads)], 1, 0)[:, :, None, None]  # (heads, B, 1, 1, G)
        queries = dropout.query_hashes(seeds, of_query[:, None, :, :, None], self.rows.branch)
        keys = jnp.repeat(dropout.key_hashes(of_key), self.seeds.shape[0], axis=0)
        return RowHashes(queries.reshape(*keys.shape[:2], -1), keys)

    # Packing.

    @property
    def _packer(self) -> RowPacker:
        starts = chunk_starts(self.spec, self.comm.device())
        return RowPacker(self.rows, self.spec.local_kv_heads, starts, self.rows.chunks)

    def _views(self, shard: Shard) -> Shard:
        query, key, value = (self._packer.view(x) for x in shard[:3])
        return Shard(query, key, value, None if shard.ids is None else self.rows.view(shard.ids))

    def pack_keys(self, views: Shard) -> PackedKeys:
        """Packs the selected keys and values of this device."""
        packer = self._packer
        ids = packer.pack_ids(views.ids)
        return PackedKeys(jnp.stack([packer.pack(x, ids, 1) for x in (views.key, views.value)]), ids)

    def pack_queries(self, views: Shard) -> PackedQueries:
        """Packs the selected queries of this device."""
        packer = self._packer
        ids = packer.pack_ids(views.ids)
        return PackedQueries(packer.pack(views.query, ids, self.spec.q_per_kv), ids)

    def _pack_all(self, views: Shard, of_residuals: Residuals, own: Array | None) -> tuple[PackedQueries, PackedKeys]:
        """Packs what the backward pass needs; delta is that of the branch's `own` output, if given."""
        queries, keys = self.pack_queries(views), self.pack_keys(views)
        dout, lse, joint_delta = (self._packer.pack(x, queries.ids, self.spec.q_per_kv) for x in of_residuals[:3])
        own_delta = joint_delta[..., 0]
        if own is not None:
            own_delta += delta(dout, own, lse.dtype, self._config)
        return queries._replace(residuals=Residuals(dout, lse[..., 0], own_delta)), keys


class KeySendingBranch(SharedBranch):
    """Base class of branches that send keys and values, while queries stay on their device."""

    @abc.abstractmethod
    def send(self, keys: PackedKeys) -> InFlight:
        """Starts to send packed keys to the devices that share the segment."""

    @abc.abstractmethod
    def attend_all(self, queries: PackedQueries, keys: PackedKeys, in_flight: InFlight) -> PartialSoftmax:
        """Computes the attention of the packed queries to the keys of all devices that share the segment."""

    def send_rows(self, views: Shard) -> InFlight:
        """Packs and sends the keys."""
        keys = self.pack_keys(views)
        return keys, self.send(keys)

    def attend_rows(self, views: Shard, in_flight: InFlight) -> PartialSoftmax:
        """Computes the attention of the queries of this device."""
        keys, sent = in_flight
        return self.attend_all(self.pack_queries(views), keys, sent)
