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

In the backward pass, the sums of the gradients of keys follow them, one hop behind. In one direction, a last hop
returns them to the device of their keys. In two directions, if the plan finds that faster, they return directly after
the last round, from either side. The same ring; entries: the devices whose keys and sums are on device ``i``.

    one direction                       two directions
    round   0  1  2  3  4  home         round   0  1     2     home
    i = 0   0  4  3  2  1  0            i = 0   0  4, 1  3, 2  0, 0
    i = 1   1  0  4  3  2  1            i = 1   1  0, 2  4, 3  1, 1

With one query head per key/value head, rotating the queries instead sends fewer bytes, and keys stay.
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
        keys_move, zeros = self.plan.moves == "keys", self.zero_grads(queries, keys)
        payload: Payload = keys if keys_move else StackedQueries.stack(queries)
        rotate_all = self._rotate_both_ways if self.plan.directions == 2 else self._rotate_one_way
        stays, moves = rotate_all(HeldRows(queries, keys, *zeros), payload, zeros[0] if keys_move else zeros[1])
        return (stays, moves) if keys_move else (moves, stays)

    def _rotate_one_way(self, held: HeldRows, payload: Payload, stays: Array) -> tuple[Array, Array]:
        """Returns the gradients of the rows that stay, and of those that rotate, which follow them home."""
        comm, last_hop = self.comm, self.comm.ring_devices - 1

        def add_hop(payload: Payload, moves: Array, stays: Array, hop: Array | int) -> tuple[Array, Array]:
            arriving = comm.rotate(moves)
            stays, share = self._attend_hop(held, stays, payload, hop)
            return arriving + share, stays

        def step(carry: tuple[Payload, Array, Array], hop: Array) -> tuple[Payload, Array, Array]:
            payload, moves, stays = carry
            next_payload = comm.rotate(payload)
            return next_payload, *add_hop(payload, moves, stays, hop)

        if last_hop == 0:
            return self._attend_hop(held, stays, payload, 0, is_own=True)
        in_flight = comm.rotate(payload)
        stays, moves = self._attend_hop(held, stays, payload, 0, is_own=True)
        in_flight, moves = lax.optimization_barrier((in_flight, moves))  # else XLA may send both together, after hop 0
        payload, moves, stays = scan_hops(step, (in_flight, moves, stays), 1, last_hop)
        moves, stays = add_hop(payload, moves, stays, last_hop)
        return stays, comm.rotate(moves)

    def _rotate_both_ways(self, held: HeldRows, payload: Payload, stays: Array) -> tuple[Array, Array]:
        """Returns the gradients of the rows that stay, and of those that rotate, which come home from both sides."""
        comm, num = self.comm, self.comm.ring_devices
        both, is_even = (num - 1) // 2, num % 2 == 0  # rounds in which rows arrive from both sides
        ahead = (1, -1)

        def add_round(carry: InBothWays, hop: Array | int, to: tuple[int, ...] = ahead) -> InBothWays:
            """Attends to what has arrived, and sends it on in the directions `to`."""
            arrived, sums, stays = carry
            sent = tuple(comm.rotate(x, way) for x, way in zip(arrived, to, strict=False))
            arriving = tuple(comm.rotate(x, way) for x, way in zip(sums, ahead, strict=False))
            shares: list[Array] = []
            for rows, passed in zip(arrived, (hop, num - hop), strict=False):
                stays, share = self._attend_hop(held, stays, rows, passed)
                shares.append(share)
            sums = tuple(x + y for x, y in zip(arriving, shares, strict=True)) if sums else tuple(shares)
            return InBothWays(sent, sums, stays)

        in_flight = tuple(comm.rotate(payload, way) for way in ahead)
        stays, own = self._attend_hop(held, stays, payload, 0, is_own=True)
        in_flight, own = lax.optimization_barrier((in_flight, own))  # as above
        carry, last_to = InBothWays(in_flight, (), stays), (1,) if is_even else ()
        carry = add_round(carry, 1, ahead if both > 1 else last_to)
        carry = scan_hops(add_round, carry, 2, both)
        if both > 1:
            carry = add_round(carry, both, last_to)
        front, back = carry.sums[0], comm.rotate(carry.sums[1], both)
        if is_even:  # the last round uses one direction
            last = add_round(carry._replace(sums=(front,)), both + 1, ())
            front, stays = last.sums[0], last.stays
        else:
            stays = carry.stays
        return stays, own + comm.rotate(front, -(num // 2)) + back

    def _attend_hop(
        self, held: HeldRows, stays: Array, payload: Payload, hop: Array | int, *, is_own: bool = False
    ) -> tuple[Array, Array]:
        """Adds to the gradient of the rows that stay; returns it and the share of the payload's gradient."""
        me, source = self.comm.device(), self.comm.source(hop)
        if isinstance(payload, PackedKeys):
            sums, devices = (stays, held.zero_dkv), {"query_device": me, "key_device": source}
            return self.attend_chunks_bwd(sums, held.queries, payload, **devices, is_own=is_own)
        sums, devices = (held.zero_dq, stays), {"query_device": source, "key_device": me}
        dq, dkv = self.attend_chunks_bwd(sums, payload.unstack(), held.keys, **devices, is_own=is_own)
        return dkv, dq


class HeldRows(NamedTuple):
    """What a device holds during the backward pass."""

    queries: PackedQueries
    keys: PackedKeys
    zero_dq: Array
    zero_dkv: Array


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


class InBothWays(NamedTuple):
    """State of a round: what has come from behind and from ahead, in this order; the last may have only the former."""

    arrived: tuple[Payload, ...]
    sums: tuple[Array, ...]  # gradients of what arrived in the round before, or nothing yet
    stays: Array  # gradient of the rows that stay
