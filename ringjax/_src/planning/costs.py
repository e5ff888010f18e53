"""What a branch costs on a ring: messages, pairs of rows, bytes. Plain numbers, counted from the geometry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ringjax._src.comm.layout import Layout
from ringjax._src.online_softmax import accumulator
from ringjax._src.pattern import Branch, selected_before

if TYPE_CHECKING:
    from ringjax._src.planning.geometry import Request

Moves = Literal["keys", "queries"]
Op = Literal["collective-permute", "all-gather", "reduce-scatter"]


class Message(NamedTuple):
    """A collective that every device executes: `number` times, each with an operand of `bytes` bytes."""

    op: Op
    dtype: str
    bytes: int
    number: int

    def times(self, number: int) -> Message:
        """The message sent so many times as often."""
        return self._replace(number=self.number * number)

    def sent(self, group: int) -> int:
        """Bytes that leave a device."""
        share = {"collective-permute": 1, "all-gather": group - 1, "reduce-scatter": (group - 1) / group}[self.op]
        return int(self.bytes * share) * self.number


class RowBytes(NamedTuple):
    """Bytes of a branch's selected rows on one device."""

    keys: int  # keys and values, in their own dtype
    queries: int  # in their own dtype
    ids: int  # segment ids, or 0
    key_sums: int  # gradients of keys and values
    query_sums: int  # gradient of the queries
    per_query: int  # one number per query row


def row_bytes(request: Request, rows: int) -> RowBytes:
    """For `rows` rows per key/value head in all chunks of a device and the whole batch."""
    dtype = np.dtype(request.dtype)
    sums = accumulator(dtype).itemsize
    width = rows * request.head_dim
    own = width * dtype.itemsize
    ids = rows * 4 if request.has_ids else 0
    return RowBytes(
        2 * own, request.group * own, ids, 2 * width * sums, request.group * width * sums, request.group * rows * sums
    )


def forward_messages(request: Request, rows: int, group: int, where: str) -> tuple[Message, ...]:
    """What a branch sends in the forward pass."""
    size = row_bytes(request, rows)
    if where == "all_gather":
        return _messages(("all-gather", request.dtype, size.keys, 1), ("all-gather", "int32", size.ids, 1))
    hops = group - 1
    permute: Op = "collective-permute"
    return _messages((permute, request.dtype, size.keys, hops), (permute, "int32", size.ids, hops))


def backward_messages(request: Request, rows: int, group: int, where: str, moves: Moves) -> tuple[Message, ...]:
    """What a branch sends in the backward pass."""
    size = row_bytes(request, rows)
    sums = accumulator(np.dtype(request.dtype)).name
    if where == "all_gather":
        back = Message("reduce-scatter", sums, group * size.key_sums, 1)
        return (*forward_messages(request, rows, group, where), back)
    permute: Op = "collective-permute"
    hops = group - 1
    if moves == "keys":
        return (*forward_messages(request, rows, group, where), Message(permute, sums, size.key_sums, group))
    return _messages(
        (permute, request.dtype, 2 * size.queries, hops),
        (permute, sums, 2 * size.per_query, hops),
        (permute, "int32", size.ids, hops),
        (permute, sums, size.query_sums, group),
    )


def cheaper_moves(request: Request, rows: int, group: int) -> Moves:
    """Whether keys or queries go round in the backward pass: whichever sends fewer bytes."""

    def sent(moves: Moves) -> int:
        return sum(m.sent(group) for m in backward_messages(request, rows, group, "ring", moves))

    return "keys" if sent("keys") <= sent("queries") else "queries"


def pairs_per_device(branch: Branch, layout: Layout, ring_size: int, length: int, is_causal: bool) -> np.ndarray:
    """(query, key) pairs of one batch entry that each device computes, over all key/value heads: (ring_size,)."""
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
