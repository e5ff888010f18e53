"""A branch whose keys rotate along a ring of devices: [Ring Attention](https://arxiv.org/abs/2310.01889).

In the forward pass, keys travel in both directions, which halves the rounds. A ring of 5 devices; entries: the devices
whose keys device ``i`` attends to. Keys are sent on before each round computes, so that sending and computing overlap.
If the number of devices is even, the last round uses one direction.

    round   0  1     2
    i = 0   0  4, 1  3, 2
    i = 1   1  0, 2  4, 3
    i = 2   2  1, 3  0, 4
    i = 3   3  2, 4  1, 0
    i = 4   4  3, 0  2, 1

In the backward pass, keys travel in one direction, gradients of keys rotate one hop behind them, and a last rotation
returns them to the device of their keys: two directions would need a second set of accumulators. With one query head
per key/value head, rotating the queries instead sends fewer bytes, and keys stay.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src.branches.shared import PackedKeys, PackedQueries, SharedBranch
from ringjax._src.comm.ring_comm import scan_hops
from ringjax._src.kernels.interface import Residuals
from ringjax._src.online_softmax import PartialSoftmax


class RingBranch(SharedBranch):
    """Rotates keys, or in the backward pass queries, along the devices that share a segment."""

    def send(self, keys: PackedKeys) -> tuple[PackedKeys, ...]:
        """Sends the keys to the next device and, on rings of at least 3, to the previous one."""
        num = self.comm.ring_devices
        return tuple(self.comm.rotate(keys, hops) for hops in ((1, -1) if num > 2 else (1,) if num > 1 else ()))

    def attend_all(self, queries: PackedQueries, keys: PackedKeys, in_flight: tuple[PackedKeys, ...]) -> PartialSoftmax:
        """Computes the attention of the packed queries to the keys of all devices of the ring."""
        comm, num = self.comm, self.comm.ring_devices
        me = comm.device()
        partial = self.empty_partial(queries)
        partial = self.attend_chunks(partial, queries, keys, query_device=me, key_device=me, is_own=True)

        def attend_round(partial: PartialSoftmax, arrived: tuple[PackedKeys, ...], hop: Array | int) -> PartialSoftmax:
            for source, payload in zip((comm.source(hop), comm.source(num - hop)), arrived, strict=False):
                partial = self.attend_chunks(partial, queries, payload, query_device=me, key_device=source)
            return partial

        def step(
            carry: tuple[tuple[PackedKeys, ...], PartialSoftmax], hop: Array
        ) -> tuple[tuple[PackedKeys, ...], PartialSoftmax]:
            arrived, partial = carry
            after = tuple(comm.rotate(keys, hops) for keys, hops in zip(arrived, (1, -1), strict=False))
            return after, attend_round(partial, arrived, hop)

        both = (num - 1) // 2  # rounds in which keys arrive from both sides
        arrived, partial = scan_hops(step, (in_flight, partial), 1, both)
        if both and num % 2 == 0:
            last = comm.rotate(arrived[0])
            partial, arrived = attend_round(partial, arrived, both), (last,)
        return attend_round(partial, arrived, num // 2)

    def attend_all_bwd(self, queries: PackedQueries, keys: PackedKeys) -> tuple[Array, Array]:
        """Computes the packed gradients: of the queries, and of keys and values.

        The *payload* rotates, its gradient follows one hop behind, and the gradient of the rows that stay accumulates.
        """
        comm, last_hop, keys_move = self.comm, self.comm.ring_devices - 1, self.plan.moves == "keys"
        me = comm.device()
        zero_dq, zero_dkv = self.zero_grads(queries, keys)

        def attend_hop(
            stays: Array, payload: Payload, hop: Array | int, *, is_own: bool = False
        ) -> tuple[Array, Array]:
            source = comm.source(hop)
            if isinstance(payload, PackedKeys):
                devices = {"query_device": me, "key_device": source}
                return self.attend_chunks_bwd((stays, zero_dkv), queries, payload, **devices, is_own=is_own)
            devices = {"query_device": source, "key_device": me}
            dq, dkv = self.attend_chunks_bwd((zero_dq, stays), payload.unstack(), keys, **devices, is_own=is_own)
            return dkv, dq

        def add_hop(payload: Payload, moves: Array, stays: Array, hop: Array | int) -> tuple[Array, Array]:
            arriving = comm.rotate(moves)
            stays, share = attend_hop(stays, payload, hop)
            return arriving + share, stays

        def step(carry: tuple[Payload, Array, Array], hop: Array) -> tuple[Payload, Array, Array]:
            payload, moves, stays = carry
            next_payload = comm.rotate(payload)
            return next_payload, *add_hop(payload, moves, stays, hop)

        payload: Payload = keys if keys_move else StackedQueries.stack(queries)
        if last_hop == 0:
            stays, moves = attend_hop(zero_dq if keys_move else zero_dkv, payload, 0, is_own=True)
            return (stays, moves) if keys_move else (moves, stays)
        in_flight = comm.rotate(payload)
        stays, moves = attend_hop(zero_dq if keys_move else zero_dkv, payload, 0, is_own=True)
        in_flight, moves = lax.optimization_barrier((in_flight, moves))  # else XLA may send both together, after hop 0
        payload, moves, stays = scan_hops(step, (in_flight, moves, stays), 1, last_hop)
        moves, stays = add_hop(payload, moves, stays, last_hop)
        moves = comm.rotate(moves)
        return (stays, moves) if keys_move else (moves, stays)


class StackedQueries(NamedTuple):
    """Packed queries and residuals, with arrays of one type stacked so that they are sent in one message."""

    rows: Array  # query and dout
    stats: Array  # lse and delta
    ids: Array | None

    @classmethod
    def stack(cls, queries: PackedQueries) -> StackedQueries:
        """Stacks queries."""
        assert queries.residuals is not None
        dout, lse, delta, _ = queries.residuals
        return cls(jnp.stack([queries.query, dout]), jnp.stack([lse, delta]), queries.ids)

    def unstack(self) -> PackedQueries:
        """Inverts `stack`."""
        (query, dout), (lse, delta) = self.rows, self.stats
        return PackedQueries(query, self.ids, Residuals(dout, lse, delta))


Payload = PackedKeys | StackedQueries
