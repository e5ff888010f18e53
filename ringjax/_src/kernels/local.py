"""The parts of branches that need no other device, by the kernels of a target; `xla.py` does the same.

On TPU the selected rows are copied together first, in the form in which rows travel: a kernel there reads whole tiles,
and docs/kernels.md compares the ways. On GPU and CPU the kernels read them where they stand.
Legend: ``B`` batch, ``c`` rows that the device holds, ``K`` key/value heads, ``G`` query heads per key/value head,
``H`` head dim, ``m`` rows of a segment.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ringjax._src import online_softmax as softmax
from ringjax._src.kernels import meet
from ringjax._src.kernels.backend import Kernels, case_of
from ringjax._src.kernels.hops import KeyRows, Meeting, Queries, Visits
from ringjax._src.kernels.kernel import Look
from ringjax._src.kernels.strided import How, Joint, Rows, Strides
from ringjax._src.kernels.walk import Walk
from ringjax._src.kernels.xla import BlockOptions, Grads
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.rows.indices import PartTable
from ringjax._src.rows.shard import ShardRows


class Dense(NamedTuple):
    """What a device holds: query (B, c, K, G, H), key and value (B, c, K, H), ids (B, c) or None."""

    query: Array
    key: Array
    value: Array
    ids: Array | None


def forward(
    kernels: Kernels, dense: Dense, prior: PartialSoftmax, table: PartTable, options: BlockOptions, *, keep_rows: bool
) -> tuple[PartialSoftmax, Array | None]:
    """Merges a part of a branch into `prior`, (B, c, K, G, H) and (B, c, K, G).

    Returns:
        The merged partial, and with `keep_rows` the part's own rows (B * segments, m, heads * G * H).
    """
    kernel = meet.STRIDED.get(kernels.target)
    if kernel is not None and not keep_rows:
        rows, strides, look, spans = _in_place(kernels, dense, table, options, is_gradient=False)
        flat = PartialSoftmax(_rows(prior.out), prior.lse.reshape(-1))
        part = kernel.forward(flat, rows, spans, How(look, strides, kernels.interpret))
        return PartialSoftmax(*(x.reshape(y.shape) for x, y in zip(part, prior, strict=True))), None
    part_rows = _PartRows(dense, table, options)
    meeting = part_rows.meeting()
    found = softmax.empty_like(jnp.zeros_like(meeting.queries.q, dtype=prior.lse.dtype))
    found = meet.forward(kernels, found, meeting, part_rows.counts)
    return part_rows.merge(prior, found), part_rows.kept(found.out) if keep_rows else None


def backward(
    kernels: Kernels,
    dense: Dense,
    own: Array | None,
    lse: Array,
    dout: Array,
    delta: Array,
    prior: Grads,
    table: PartTable,
    options: BlockOptions,
) -> Grads:
    """Adds a part's gradients to `prior`, from the joint softmax.

    Args:
        kernels, dense, table, options: As for `forward`.
        own: The part's own rows, as `forward` keeps them, or None; see `xla.backward`.
        lse: The joint log-sum-exp.
        dout: The cotangent, like the query.
        delta: Sum of cotangent times joint output, like `lse`.
        prior: Gradients of earlier branches.
    """
    lse = softmax.for_backward(lse)
    kernel = meet.STRIDED.get(kernels.target)
    if kernel is not None and own is None:
        rows, strides, look, spans = _in_place(kernels, dense, table, options, is_gradient=True)
        joint = Joint(_rows(dout), lse.reshape(-1), delta.reshape(-1))
        dq, dk, dv = (_rows(x) for x in prior)
        dq, dkv = kernel.backward(dq, (dk, dv), rows, joint, spans, How(look, strides, kernels.interpret))
        return Grads(*(x.reshape(y.shape) for x, y in zip((dq, *dkv), prior, strict=True)))
    part_rows = _PartRows(dense, table, options)
    meeting = part_rows.meeting()
    dout = part_rows.taken(dout, options.group)
    lse, delta = (part_rows.taken(x, options.group)[..., 0] for x in (lse, delta))
    if own is not None:  # delta is that of the part's own output
        delta = meet.delta(kernels, dout, part_rows.given(own), lse.dtype)
    queries = meeting.queries._replace(dout=dout, lse=lse, delta=delta)
    zeros = jnp.zeros_like(queries.q, dtype=lse.dtype), jnp.zeros_like(meeting.keys.kv, dtype=lse.dtype)
    dq, (dk, dv) = meet.backward(kernels, zeros, meeting._replace(queries=queries), part_rows.counts)
    return part_rows.add(prior, (dq, dk, dv))


class _Where(NamedTuple):
    rows: Rows
    strides: Strides
    look: Look
    spans: Array


def _in_place(kernels: Kernels, dense: Dense, table: PartTable, options: BlockOptions, *, is_gradient: bool) -> _Where:
    """Where each task finds its rows in the dense arrays."""
    heads, offsets, counts = (jnp.asarray(x) for x in (table.heads, table.offsets, table.counts))
    case = case_of(dense.query, table.rows, options.group)
    blocks = case.blocks(kernels.target, kernels.sizes, is_gradient=is_gradient, has_marks=dense.ids is not None)
    look = Look(
        blocks=blocks,
        rows=table.rows,
        group=options.group,
        head_tasks=options.batch * table.segments,
        is_causal=options.is_causal,
        is_ragged=True if table.is_ragged else bool(table.rows % blocks.key),
        lines=() if dense.ids is None else ("same",),
        scale=options.scale,
        divisor=options.divisor,
    )
    batch = jnp.arange(options.batch, dtype=jnp.int32)[None, :, None] * options.length
    segment = jnp.arange(table.segments, dtype=jnp.int32)[None, None, :] * table.segment_length + table.start
    start, head = jnp.broadcast_arrays(batch + segment + offsets[:, None, None], heads[:, None, None])
    tasks = jnp.stack([start.ravel(), start.ravel(), head.ravel()], axis=1)
    marks = None if dense.ids is None else dense.ids.reshape(1, -1).astype(jnp.int32)
    rows = Rows(_rows(dense.query), (_rows(dense.key), _rows(dense.value)), tasks, marks, marks)
    return _Where(rows, Strides(table.rate, options.kv_heads, 0), look, look.query_spans(counts, None, None))


class _PartRows:
    """The rows of a part, copied together and put back."""

    def __init__(self, dense: Dense, table: PartTable, options: BlockOptions) -> None:
        self.rows = ShardRows.of_part(table)
        self.table, self.options = table, options
        self.starts = jnp.arange(table.segments, dtype=jnp.int32) * table.segment_length
        self.counts = jnp.asarray(table.counts)
        self._walk = Walk(table.sizes, table.rows, options.group, options.is_causal, table.is_ragged)
        self._dense = dense
        self._ids = None if dense.ids is None else self._take(dense.ids.astype(jnp.int32), 1).reshape(-1, 1, table.rows)

    def meeting(self) -> Meeting:
        """The rows of each segment meet each other."""
        queries = Queries(self.taken(self._dense.query, self.options.group), self._ids)
        keys = KeyRows(jnp.stack([self.taken(x, 1) for x in (self._dense.key, self._dense.value)]), self._ids)
        zero = jnp.zeros((1,), jnp.int32)
        visits = Visits(zero, zero, is_diagonal=True)
        return Meeting(queries, keys, visits, self._walk, self.options.scale, self.options.divisor)

    def taken(self, x: Array, group: int) -> Array:
        """Selected rows (N, 1, m * group, width) of (B, c, K, ...); 0 where the ids say padding, which may hold NaN."""
        rows = self._take(x, self.options.kv_heads)
        rows = rows.reshape(-1, 1, self.table.rows * group, rows.shape[-1] // group)
        if self._ids is None:
            return rows
        return jnp.where(jnp.repeat(self._ids, group, axis=2)[..., None] >= 0, rows, jnp.zeros((), rows.dtype))

    def kept(self, out: Array) -> Array:
        """Rows (N, 1, m * G, H) as (B * segments, m, heads * G * H)."""
        by_head = out.reshape(len(self.table.heads), -1, self.table.rows, self.options.group * out.shape[-1])
        return by_head.transpose(1, 2, 0, 3).reshape(*by_head.shape[1:3], -1)

    def given(self, own: Array) -> Array:
        """What `kept` was given."""
        by_head = own.reshape(*own.shape[:2], len(self.table.heads), -1).transpose(2, 0, 1, 3)
        return by_head.reshape(-1, 1, self.table.rows * self.options.group, by_head.shape[-1] // self.options.group)

    def merge(self, prior: PartialSoftmax, found: PartialSoftmax) -> PartialSoftmax:
        views = PartialSoftmax(*(self._view(x) for x in prior))
        merged = self.rows.merge(views, found, self.options.kv_heads, self.starts)
        return PartialSoftmax(*(self._put(x, y) for x, y in zip(prior, merged, strict=True)))

    def add(self, prior: Grads, found: tuple[Array, ...]) -> Grads:
        sums = self.rows.add(tuple(self._view(x) for x in prior), found, self.options.kv_heads, self.starts)
        return Grads(*(self._put(x, y) for x, y in zip(prior, sums, strict=True)))

    def _take(self, x: Array, num_heads: int) -> Array:
        return self.rows.take(self._view(x), num_heads, self.starts)

    def _view(self, x: Array) -> Array:
        """The positions of this part."""
        return self.rows.view(x[:, self.table.start : self._end])

    def _put(self, x: Array, part: Array) -> Array:
        """`x` with the positions of this part replaced."""
        part = part.reshape(x.shape[0], self._end - self.table.start, *x.shape[2:])
        return part if part.shape == x.shape else x.at[:, self.table.start : self._end].set(part)

    @property
    def _end(self) -> int:
        return self.table.start + self.table.segments * self.table.segment_length


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])
