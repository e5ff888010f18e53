"""The costs of a branch: messages, bytes and attended pairs, counted from the geometry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from ringjax._src.comm.layout import Layout
from ringjax._src.online_softmax import accumulator
from ringjax._src.pattern import Branch, selected_before
from ringjax._src.planning.spec import AttentionSpec

Moves = Literal["keys", "queries"]
Op = Literal["collective-permute", "all-gather", "reduce-scatter"]


class Message(NamedTuple):
    """A collective that every device executes: `number` times, each with an operand of `bytes` bytes."""

    op: Op
    dtype: str
    bytes: int
    number: int

    def times(self, number: int) -> Message:
        """Returns the message sent this many times as often."""
        return self._replace(number=self.number * number)

    def sent(self, ring_devices: int) -> int:
        """Returns the bytes that leave a device."""
        share = {
            "collective-permute": 1,
            "all-gather": ring_devices - 1,
            "reduce-scatter": (ring_devices - 1) / ring_devices,
        }[self.op]
        return int(self.bytes * share) * self.number


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


def _ring_forward(spec: AttentionSpec, rows: int, ring_devices: int) -> tuple[Message, ...]:
    size, hops = row_bytes(spec, rows), ring_devices - 1
    permute: Op = "collective-permute"
    return _messages((permute, spec.dtype, size.keys, hops), (permute, "int32", size.ids, hops))


def _ring_backward(spec: AttentionSpec, rows: int, ring_devices: int, moves: Moves) -> tuple[Message, ...]:
    size, hops = row_bytes(spec, rows), ring_devices - 1
    sums = accumulator(np.dtype(spec.dtype)).name
    permute: Op = "collective-permute"
    if moves == "keys":
        return (*_ring_forward(spec, rows, ring_devices), Message(permute, sums, size.key_sums, ring_devices))
    return _messages(
        (permute, spec.dtype, 2 * size.queries, hops),
        (permute, sums, 2 * size.per_query, hops),
        (permute, "int32", size.ids, hops),
        (permute, sums, size.query_sums, ring_devices),
    )


def _gather_forward(spec: AttentionSpec, rows: int, ring_devices: int) -> tuple[Message, ...]:
    size = row_bytes(spec, rows)
    return _messages(("all-gather", spec.dtype, size.keys, 1), ("all-gather", "int32", size.ids, 1))


def _gather_backward(spec: AttentionSpec, rows: int, ring_devices: int, moves: Moves) -> tuple[Message, ...]:
    sums = accumulator(np.dtype(spec.dtype)).name
    back = Message("reduce-scatter", sums, ring_devices * row_bytes(spec, rows).key_sums, 1)
    return (*_gather_forward(spec, rows, ring_devices), back)


class Sharing(NamedTuple):
    """Messages of one way to share a segment, for a number of packed rows and of devices."""

    forward: Callable[[AttentionSpec, int, int], tuple[Message, ...]]
    backward: Callable[[AttentionSpec, int, int, Moves], tuple[Message, ...]]
    moves: tuple[Moves, ...]  # what can move in the backward pass


SHARING = {
    "ring": Sharing(_ring_forward, _ring_backward, ("keys", "queries")),
    "all_gather": Sharing(_gather_forward, _gather_backward, ("keys",)),
}


def cheapest_moves(spec: AttentionSpec, rows: int, ring_devices: int, where: str) -> Moves:
    """Returns what moves in the backward pass: whichever sends fewer bytes."""
    sharing = SHARING[where]

    def sent(moves: Moves) -> int:
        return sum(m.sent(ring_devices) for m in sharing.backward(spec, rows, ring_devices, moves))

    return min(sharing.moves, key=sent)


def pairs_per_device(branch: Branch, layout: Layout, ring_size: int, length: int, is_causal: bool) -> np.ndarray:
    """Counts the attended pairs of one batch entry per device, over all key/value heads: (ring_size,)."""
    w, chunk = branch.segment_length, length // layout.multiple(ring_size)
    edges = np.sort(np.concatenate([np.arange(0, length, w), np.arange(0, length, chunk), [length]]))
    edges = edges[np.diff(edges, prepend=-1) > 0]  # a sort is several times faster than the hashing of np.union1d
    device = np.empty(layout.multiple(ring_size), np.int64)
    device[list(layout.order(ring_size))] = np.repeat(np.arange(ring_size), layout.chunks)
    owner, segment = device[edges[:-1] // chunk], edges[:-1] // w
    pairs = np.zeros(ring_size)
    counts = branch.rows(w)
    for offset in set(branch.offsets):
        heads = branch.offsets.count(offset)
        count = counts[branch.offsets.index(offset)]
        rank = selected_before(edges, w, branch.rate, np.array(offset), np.array(count))
        rows = np.diff(rank).astype(float)  # of each piece that lies in one segment and one chunk
        before = np.cumsum(rows) - rows
        first = np.searchsorted(segment, segment)
        last = np.searchsorted(segment, segment, side="right") - 1
        seen = before - before[first] + (rows + 1) / 2 if is_causal else before[last] + rows[last] - before[first]
        np.add.at(pairs, owner, heads * rows * seen)
    return pairs


def _messages(*rows: tuple[Op, str, int, int]) -> tuple[Message, ...]:
    return tuple(Message(*row) for row in rows if row[2] and row[3])
