"""The costs of a branch: messages, bytes and attended pairs, counted from the geometry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from ringjax._src.comm.devices import device_named
from ringjax._src.comm.head_exchange import HeadParts
from ringjax._src.comm.layout import Layout
from ringjax._src.online_softmax import accumulator
from ringjax._src.pattern import Branch, selected_before
from ringjax._src.planning.spec import AttentionSpec

_EXPOSED = 0.5  # share of a ring's communication that is not hidden even where computation takes longer
Moves = Literal["keys", "queries"]
Op = Literal["collective-permute", "all-gather", "reduce-scatter", "all-to-all", "all-reduce"]


class Message(NamedTuple):
    """A collective that each of `devices` devices executes `number` times, with an operand of `bytes` bytes."""

    op: Op
    dtype: str
    bytes: int
    number: int
    devices: int

    @property
    def sent(self) -> int:
        """Bytes that leave a device."""
        share = {
            "collective-permute": 1,
            "all-gather": self.devices - 1,
            "reduce-scatter": (self.devices - 1) / self.devices,
            "all-to-all": (self.devices - 1) / self.devices,
            "all-reduce": 2 * (self.devices - 1) / self.devices,
        }[self.op]
        return int(self.bytes * share) * self.number


class Group(NamedTuple):
    """Devices that share a segment."""

    devices: int  # their number
    exchange: int = 1  # number of neighboring devices that exchange heads; 1 if none do
    parts: HeadParts = HeadParts(1, 1)  # how an exchange shares the heads
    directions: int = 1  # in which rows rotate in the backward pass

    @property
    def ring(self) -> int:
        """Number of teams that form a ring."""
        return self.devices // self.exchange


class RowBytes(NamedTuple):
    """Bytes of a branch's selected rows on one device."""

    keys: int  # keys and values, in their own dtype
    queries: int  # in their own dtype
    ids: int  # segment ids, or 0
    key_sums: int  # gradients of keys and values
    query_sums: int  # gradient of the queries
    per_query: int  # one number per query row


def row_bytes(spec: AttentionSpec, rows: int) -> RowBytes:
    """Returns the sizes for this many packed key rows on a device."""
    dtype = np.dtype(spec.dtype)
    sums = accumulator(dtype).itemsize
    width = rows * spec.head_dim
    own = width * dtype.itemsize
    ids = rows * 4 if spec.has_ids else 0
    return RowBytes(
        2 * own, spec.q_per_kv * own, ids, 2 * width * sums, spec.q_per_kv * width * sums, spec.q_per_kv * rows * sums
    )


def _ring_forward(spec: AttentionSpec, rows: int, group: Group) -> tuple[Message, ...]:
    size, hops = row_bytes(spec, rows), group.ring - 1
    return _messages("collective-permute", group.ring, (spec.dtype, size.keys, hops), ("int32", size.ids, hops))


def _ring_backward(spec: AttentionSpec, rows: int, group: Group, moves: Moves) -> tuple[Message, ...]:
    size, num, sums = row_bytes(spec, rows), group.ring, _sums(spec)
    returned = 0 if num == 1 else num if group.directions == 1 else num - 1
    if moves == "keys":
        gradients = _messages("collective-permute", num, (sums, size.key_sums, returned))
        return (*_ring_forward(spec, rows, group), *gradients)
    return _messages(
        "collective-permute",
        num,
        (spec.dtype, 2 * size.queries, num - 1),
        (sums, 2 * size.per_query, num - 1),
        ("int32", size.ids, num - 1),
        (sums, size.query_sums, returned),
    )


def _gather_forward(spec: AttentionSpec, rows: int, group: Group) -> tuple[Message, ...]:
    size = row_bytes(spec, rows)
    return _messages("all-gather", group.devices, (spec.dtype, size.keys, 1), ("int32", size.ids, 1))


def _gather_backward(spec: AttentionSpec, rows: int, group: Group, moves: Moves) -> tuple[Message, ...]:
    back = group.devices * row_bytes(spec, rows).key_sums
    return (*_gather_forward(spec, rows, group), *_messages("reduce-scatter", group.devices, (_sums(spec), back, 1)))


def _exchange_forward(spec: AttentionSpec, rows: int, group: Group) -> tuple[Message, ...]:
    size, copies, num = row_bytes(spec, rows), group.parts.query, group.exchange
    there = (spec.dtype, size.queries + copies * size.keys, 1), ("int32", copies * size.ids, 1)
    back = (_sums(spec), size.query_sums + size.per_query, 1)
    ring = _ring_forward(*_team_rows(spec, rows, group))
    return (*_messages("all-to-all", num, *there), *ring, *_messages("all-to-all", num, back))


def _exchange_backward(spec: AttentionSpec, rows: int, group: Group, moves: Moves) -> tuple[Message, ...]:
    size, copies, num, sums = row_bytes(spec, rows), group.parts.query, group.exchange, _sums(spec)
    there = [(spec.dtype, 2 * size.queries + copies * size.keys, 1), (sums, 2 * size.per_query, 1)]
    if spec.dtype == sums:  # arrays of one dtype travel in one message
        there = [(sums, there[0][1] + there[1][1], 1)]
    there.append(("int32", copies * size.ids, 1))
    ring = _ring_backward(*_team_rows(spec, rows, group), moves)
    back = (sums, size.query_sums + copies * size.key_sums, 1)
    return (*_messages("all-to-all", num, *there), *ring, *_messages("all-to-all", num, back))


def _team_rows(spec: AttentionSpec, rows: int, group: Group) -> tuple[AttentionSpec, int, Group]:
    """Returns what rotates after an exchange: fewer heads, and the rows of more devices."""
    q_per_kv = spec.q_per_kv // group.parts.query
    return spec._replace(q_per_kv=q_per_kv), rows * group.parts.query, group


class Sharing(NamedTuple):
    """Messages of one way to share a segment, for a number of packed rows and a group of devices."""

    forward: Callable[[AttentionSpec, int, Group], tuple[Message, ...]]
    backward: Callable[[AttentionSpec, int, Group, Moves], tuple[Message, ...]]
    moves: tuple[Moves, ...]  # what can move in the backward pass
    is_two_way: bool = False  # whether `backward` can rotate in both directions, see `Group.directions`


ROTATION = Sharing(_ring_forward, _ring_backward, ("keys", "queries"), is_two_way=True)
GATHERING = Sharing(_gather_forward, _gather_backward, ("keys",))
EXCHANGE = Sharing(_exchange_forward, _exchange_backward, ("keys", "queries"), is_two_way=True)
SHARING: dict[str, Sharing] = {}  # by strategy, see `branches/registry.py`


def cheapest_moves(spec: AttentionSpec, rows: int, group: Group, where: str) -> Moves:
    """Returns what moves in the backward pass: whichever sends fewer bytes."""
    sharing = SHARING[where]
    return min(sharing.moves, key=lambda moves: sum(m.sent for m in sharing.backward(spec, rows, group, moves)))


def backward_directions(
    spec: AttentionSpec, messages: tuple[Message, ...], group: Group, work: Callable[[], float]
) -> Literal[1, 2]:
    """Returns in how many directions rows and the sums of their gradients rotate in the backward pass.

    In one direction, the sums follow their rows around the ring, one hop behind, and are home after a last hop. In two,
    there are half as many rounds, on twice as many links of a torus, but the last messages travel farther: the sums
    return directly from up to half of the ring away, which is counted as if no computation hid it. So two directions
    are faster unless computation takes longer than communication. They hold more rows, see `plan.checked_plan`. Devices
    that share cores gain nothing from sending at once.

    Args:
        spec: The attention call.
        messages: What a device sends in one direction; the last hops are those of sums.
        group: The devices that share a segment.
        work: Returns the seconds of computation.
    """
    device, num = device_named(spec.device), group.ring
    if num < 3 or device.shares_cores or spec.saves_memory:
        return 1
    hops = [x for x in messages if x.op == "collective-permute"]
    sums, payload, seconds = hops[-1].bytes, sum(x.bytes for x in hops[:-1]), work()
    bandwidth = message_bandwidth(spec, hops[0], group.exchange)
    at_once, links = (2, num // 2) if device.is_torus else (1, 2)
    one = max(seconds, (num - 1) * (payload + sums) / bandwidth) + sums / bandwidth + num * device.latency
    hopping = ((num - 1) * payload + (num - 3) * sums) / (at_once * bandwidth)
    two = max(seconds, hopping) + links * sums / bandwidth + (num // 2 + 1) * device.latency
    return 2 if two < one else 1


def dense_exchange(spec: AttentionSpec, parts: HeadParts) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Returns the messages of an exchange of whole arrays over all devices, forward and backward."""
    num, group = spec.ring_size, Group(spec.ring_size, spec.ring_size, parts)
    ids = spec.batch * spec.shard_length * 4 if spec.has_ids else 0
    gathered = _messages("all-gather", num, ("int32", ids, 1))
    given = spec._replace(has_ids=False), spec.batch * spec.shard_length * spec.local_kv_heads, group
    return (*_exchange_forward(*given), *gathered), (*_exchange_backward(*given, "keys"), *gathered)


def length_messages(spec: AttentionSpec) -> tuple[Message, ...]:
    """Returns the message that counts the rows of sequences with padding, for zero keys; forward only."""
    counts = spec.batch * 4 if spec.has_zero_keys and spec.has_ids else 0
    return _messages("all-reduce", spec.ring_size, ("int32", counts, int(spec.ring_size > 1)))


def sink_messages(spec: AttentionSpec) -> tuple[Message, ...]:
    """Returns the message that adds the gradients of attention sinks; backward only."""
    sums = accumulator(np.dtype(spec.dtype)).itemsize if spec.has_sinks else 0
    size = spec.batch * spec.local_kv_heads * spec.q_per_kv * sums
    return _messages("all-reduce", spec.ring_size, (_sums(spec), size, int(spec.ring_size > 1)))


def pass_seconds(spec: AttentionSpec, messages: tuple[Message, ...], team_size: int, work: float) -> float:
    """Estimates the time of a pass: hops overlap with computation, and other messages do not.

    Args:
        spec: The attention call.
        messages: The messages of the pass.
        team_size: Number of neighboring devices that form a team, between which hops go; 1 without teams.
        work: Seconds of computation.
    """
    device = device_named(spec.device)
    hopping = waiting = latency = 0.0
    for message in messages:
        is_hop = message.op == "collective-permute"
        bandwidth = message_bandwidth(spec, message, team_size)
        hopping += is_hop * message.sent / bandwidth
        waiting += (not is_hop) * message.sent / bandwidth
        latency += message.number * device.latency
    exposed = hopping if device.shares_cores else max(hopping - work, _EXPOSED * hopping)
    return work + exposed + waiting + latency


def message_bandwidth(spec: AttentionSpec, message: Message, team_size: int) -> float:
    """Returns the bytes per second that a device sends: those of the network if the message leaves the machine.

    On a ring over several mesh axes, the devices of a machine are those of the inner one. See `pass_seconds`.
    """
    device, is_hop = device_named(spec.device), message.op == "collective-permute"
    span = message.devices * (team_size if is_hop else 1)  # neighboring devices among which the message travels
    if device.machine_link and spec.inner_devices is not None and span > spec.inner_devices:
        return device.machine_link
    return device.hop_bandwidth(span) if is_hop else device.exchange_bandwidth(span)


class Runs(NamedTuple):
    """Runs of positions that lie in one segment and in one chunk."""

    edges: np.ndarray  # where they start, and the end of the sequence, (runs + 1,)
    device: np.ndarray  # that holds each, (runs,)
    segment: np.ndarray  # index of the segment of each, (runs,)


def runs_of(branch: Branch, layout: Layout, ring_size: int, length: int) -> Runs:
    """Returns the runs of a branch on a ring."""
    w, chunk = branch.segment_length, length // layout.multiple(ring_size)
    edges = np.sort(np.concatenate([np.arange(0, length, w), np.arange(0, length, chunk), [length]]))
    edges = edges[np.diff(edges, prepend=-1) > 0]  # a sort is several times faster than the hashing of np.union1d
    device = np.empty(layout.multiple(ring_size), np.int64)
    device[list(layout.order(ring_size))] = np.repeat(np.arange(ring_size), layout.chunks)
    return Runs(edges, device[edges[:-1] // chunk], edges[:-1] // w)


def pairs_per_device(branch: Branch, layout: Layout, ring_size: int, length: int, is_causal: bool) -> np.ndarray:
    """Counts the attended pairs of one batch entry by device of the query and key/value head: (ring_size, heads)."""
    w, (edges, device, segment) = branch.segment_length, runs_of(branch, layout, ring_size, length)
    counts, offsets = branch.rows(w), np.array(branch.offsets, np.int64)
    pairs = np.zeros((ring_size, len(offsets)))
    for offset in set(branch.offsets):
        count = counts[branch.offsets.index(offset)]
        rank = selected_before(edges, w, branch.rate, np.array(offset), np.array(count))
        rows = np.diff(rank).astype(float)  # of each run
        before = np.cumsum(rows) - rows
        first = np.searchsorted(segment, segment)
        last = np.searchsorted(segment, segment, side="right") - 1
        seen = before - before[first] + (rows + 1) / 2 if is_causal else before[last] + rows[last] - before[first]
        pairs[:, offsets == offset] = np.bincount(device, rows * seen, minlength=ring_size)[:, None]
    return pairs


def _sums(spec: AttentionSpec) -> str:
    return accumulator(np.dtype(spec.dtype)).name


def _messages(op: Op, devices: int, *rows: tuple[str, int, int]) -> tuple[Message, ...]:
    """Returns messages given by dtype, bytes and number, without those that are empty."""
    return tuple(Message(op, *row, devices) for row in rows if row[1] and row[2])
