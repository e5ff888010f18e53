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
returns them to the device of their keys. In two directions, if the plan finds that faster, they return directly from
the farthest device on either side. The same ring; entries: the devices whose keys and sums are on device ``i``.

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

from ringjax._src.branches.shared import KeySendingBranch, PackedKeys, PackedQueries
from ringjax._src.comm.ring_comm import scan_range
from ringjax._src.kernels.interface import Residuals
from ringjax._src.online_softmax import PartialSoftmax

WAYS = (1, -1)  # ahead and behind; if keys travel in one direction only, a `zip` with them ends after the first


class RingBranch(KeySendingBranch):
    """Rotates keys, or in the backward pass queries, along the devices that share a segment."""

    def send(self, keys: PackedKeys) -> tuple[PackedKeys, ...]:
        """Sends the keys to the next device and, on rings of at least 3, to the previous one."""
        return tuple(self.comm.rotate(keys, way) for way in WAYS[: self.comm.ring_devices - 1])

    def attend_all(self, queries: PackedQueries, keys: PackedKeys, in_flight: tuple[PackedKeys, ...]) -> PartialSoftmax:
        """Computes the attention of the packed queries to the keys of all devices of the ring."""
        comm, num = self.comm, self.comm.ring_devices
        me = comm.device()
        partial = self.empty_partial(queries)
        partial = self.attend_chunks(partial, queries, keys, query_device=me, key_device=me, is_own=True)

        def attend_round(
            partial: PartialSoftmax, arrived: tuple[PackedKeys, ...], number: Array | int
        ) -> PartialSoftmax:
            for source, payload in zip((comm.source(number), comm.source(num - number)), arrived, strict=False):
                partial = self.attend_chunks(partial, queries, payload, query_device=me, key_device=source)
            return partial

        def step(
            carry: tuple[tuple[PackedKeys, ...], PartialSoftmax], number: Array
        ) -> tuple[tuple[PackedKeys, ...], PartialSoftmax]:
            arrived, partial = carry
            sent = tuple(comm.rotate(keys, way) for keys, way in zip(arrived, WAYS, strict=False))
            return sent, attend_round(partial, arrived, number)

        two_sided = (num - 1) // 2  # rounds in which keys arrive from both sides
        arrived, partial = scan_range(step, (in_flight, partial), 1, two_sided)
        if two_sided and num % 2 == 0:
            last = comm.rotate(arrived[0])
            partial, arrived = attend_round(partial, arrived, two_sided), (last,)
        return attend_round(partial, arrived, num // 2)

    def attend_all_bwd(self, queries: PackedQueries, keys: PackedKeys) -> tuple[Array, Array]:
        """Computes the packed gradients: of the queries, and of keys and values.

        The *payload* rotates, its gradient follows one hop behind, and the gradient of the held rows accumulates.
        """
        keys_move, zeros = self.plan.moves == "keys", self.zero_grads(queries, keys)
        payload: Payload = keys if keys_move else StackedQueries.stack(queries)
        rotate_all = self._rotate_both_ways if self.plan.directions == 2 else self._rotate_one_way
        dheld, dpayload = rotate_all(HeldRows(queries, keys, *zeros), payload, zeros[0] if keys_move else zeros[1])
        return (dheld, dpayload) if keys_move else (dpayload, dheld)

    def _rotate_one_way(self, held: HeldRows, payload: Payload, dheld: Array) -> tuple[Array, Array]:
        """Returns the gradients of the held rows, and of the payload, which follow it home."""
        comm, last_hop = self.comm, self.comm.ring_devices - 1

        def add_hop(payload: Payload, dheld: Array, dpayload: Array, hop: Array | int) -> tuple[Array, Array]:
            arriving = comm.rotate(dpayload)
            dheld, share = self._attend_hop(held, dheld, payload, hop)
            return dheld, arriving + share

        def step(carry: tuple[Payload, Array, Array], hop: Array) -> tuple[Payload, Array, Array]:
            payload, dheld, dpayload = carry
            next_payload = comm.rotate(payload)
            return next_payload, *add_hop(payload, dheld, dpayload, hop)

        if last_hop == 0:
            return self._attend_hop(held, dheld, payload, 0, is_own=True)
        in_flight = comm.rotate(payload)
        dheld, own = self._attend_hop(held, dheld, payload, 0, is_own=True)
        in_flight, own = lax.optimization_barrier((in_flight, own))  # else XLA may send the payload after hop 0
        payload, dheld, dpayload = scan_range(step, (in_flight, dheld, own), 1, last_hop)
        dheld, dpayload = add_hop(payload, dheld, dpayload, last_hop)
        return dheld, comm.rotate(dpayload)

    def _rotate_both_ways(self, held: HeldRows, payload: Payload, dheld: Array) -> tuple[Array, Array]:
        """Returns the gradients of the held rows, and of the payload, which come home from both sides."""
        comm, num = self.comm, self.comm.ring_devices
        two_sided, is_even = (num - 1) // 2, num % 2 == 0  # if even, the last of num // 2 rounds is one-sided

        def add_round(carry: TwoWayState, number: Array | int, to: tuple[int, ...] = WAYS) -> TwoWayState:
            """Attends to what has arrived, and sends it on in the directions `to`."""
            arrived, sums, dheld = carry
            sent = tuple(comm.rotate(x, way) for x, way in zip(arrived, to, strict=False))
            arriving = tuple(comm.rotate(x, way) for x, way in zip(sums, WAYS, strict=False))
            shares: list[Array] = []
            for rows, hop in zip(arrived, (number, num - number), strict=False):
                dheld, share = self._attend_hop(held, dheld, rows, hop)
                shares.append(share)
            sums = tuple(x + y for x, y in zip(arriving, shares, strict=True)) if sums else tuple(shares)
            return TwoWayState(sent, sums, dheld)

        in_flight = tuple(comm.rotate(payload, way) for way in WAYS)
        dheld, own = self._attend_hop(held, dheld, payload, 0, is_own=True)
        in_flight, own = lax.optimization_barrier((in_flight, own))  # as in `_rotate_one_way`
        carry, last_to = TwoWayState(in_flight, (), dheld), WAYS[:1] if is_even else ()
        carry = add_round(carry, 1, WAYS if two_sided > 1 else last_to)  # not in the scan, as there are no sums yet
        carry = scan_range(add_round, carry, 2, two_sided)
        if two_sided > 1:
            carry = add_round(carry, two_sided, last_to)
        went_ahead, went_behind = carry.sums
        home = comm.rotate(went_behind, two_sided)  # the sums of either side go straight home
        if is_even:
            carry = add_round(carry._replace(sums=(went_ahead,)), two_sided + 1, ())
            (went_ahead,) = carry.sums
        return carry.dheld, own + comm.rotate(went_ahead, -(num // 2)) + home

    def _attend_hop(
        self, held: HeldRows, dheld: Array, payload: Payload, hop: Array | int, *, is_own: bool = False
    ) -> tuple[Array, Array]:
        """Adds to the gradient of the held rows; returns it and this device's share of the payload's gradient."""
        me, source = self.comm.device(), self.comm.source(hop)
        if isinstance(payload, PackedKeys):
            sums, devices = (dheld, held.zero_dkv), {"query_device": me, "key_device": source}
            return self.attend_chunks_bwd(sums, held.queries, payload, **devices, is_own=is_own)
        sums, devices = (held.zero_dq, dheld), {"query_device": source, "key_device": me}
        dq, dkv = self.attend_chunks_bwd(sums, payload.unstack(), held.keys, **devices, is_own=is_own)
        return dkv, dq


class HeldRows(NamedTuple):
    """The rows of this device in the backward pass: if keys rotate, only `queries` are read, and vice versa."""

    queries: PackedQueries
    keys: PackedKeys
    zero_dq: Array  # from zeros, this device's share of the gradient of an arriving payload is summed
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


class TwoWayState(NamedTuple):
    """State of a round, from behind and from ahead; in the last round of an even ring, only from behind."""

    arrived: tuple[Payload, ...]
    sums: tuple[Array, ...]  # gradients of what arrived in the round before, or nothing yet
    dheld: Array  # gradient of the held rows
