"""Rows that stand together, as they travel, met by the kernels of a target; `hops.py` does the same.

Legend: ``N`` tasks (heads times batch), ``C`` chunks, ``n`` rows of a chunk, ``G`` query heads per key/value head,
``H`` head dim.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ringjax._src import online_softmax as softmax
from ringjax._src.kernels import pallas_gpu as gpu
from ringjax._src.kernels import pallas_tpu as tpu
from ringjax._src.kernels import strided
from ringjax._src.kernels.backend import Kernels, case_of
from ringjax._src.kernels.cpu import calls as cpu
from ringjax._src.kernels.hops import KeyRows, Meeting, Queries, Visits
from ringjax._src.kernels.kernel import Line, Look
from ringjax._src.kernels.tpu_call import Joint, Marks, Rows
from ringjax._src.online_softmax import PartialSoftmax

STRIDED = {"gpu": gpu, "cpu": cpu}  # kernels that find rows where they stand


def forward(kernels: Kernels, found: PartialSoftmax, meeting: Meeting, counts: Array) -> PartialSoftmax:
    """Merges what the queries find among the keys into what they found before; `counts` rows of each head (heads,)."""
    look = _look(kernels, meeting, counts, is_gradient=False)
    queries, keys = meeting.queries, meeting.keys
    marks = _marks(meeting, look)
    for which in range(len(meeting.visits.query)):
        chunks, spans = _where(meeting.visits, which, look, counts)
        if kernels.target == "tpu":
            rows = Rows(queries.q, keys.kv, chunks, spans, marks)
            found = tpu.forward(found, rows, look=look, interpret=kernels.interpret)
        else:
            flat, strides = _flat(queries, keys, chunks, marks, look)
            prior = PartialSoftmax(_rows(found.out), found.lse.reshape(-1))
            part = STRIDED[kernels.target].forward(prior, flat, spans, strided.How(look, strides, kernels.interpret))
            found = PartialSoftmax(*(x.reshape(y.shape) for x, y in zip(part, found, strict=True)))
    return found


def backward(kernels: Kernels, sums: tuple[Array, Array], meeting: Meeting, counts: Array) -> tuple[Array, Array]:
    """Adds the gradients to those of queries (N, C, n * G, H) and of keys and values (2, N, C, n, H)."""
    dq, dkv = sums
    look = _look(kernels, meeting, counts, is_gradient=True)
    queries, keys = meeting.queries, meeting.keys
    dout, lse, delta = queries.dout, queries.lse, queries.delta
    assert dout is not None and lse is not None and delta is not None
    marks = _marks(meeting, look)
    for which in range(len(meeting.visits.query)):
        chunks, spans = _where(meeting.visits, which, look, counts)
        if kernels.target == "tpu":
            rows = Rows(queries.q, keys.kv, chunks, spans, marks)
            joint = Joint(dout, jnp.stack([lse, delta], axis=2))
            dq = tpu.query_gradient(dq, rows, joint, look=look, interpret=kernels.interpret)
            rows = rows._replace(spans=look.key_spans(spans))
            dkv = tpu.key_gradient(dkv, rows, joint, look=look, interpret=kernels.interpret)
        else:
            flat, strides = _flat(queries, keys, chunks, marks, look)
            came_out = strided.Joint(_rows(dout), lse.reshape(-1), delta.reshape(-1))
            how, found = strided.How(look, strides, kernels.interpret), (_rows(dq), (_rows(dkv),))
            new_dq, (new_dkv,) = STRIDED[kernels.target].backward(*found, flat, came_out, spans, how)
            dq, dkv = new_dq.reshape(dq.shape), new_dkv.reshape(dkv.shape)
    return dq, dkv


def delta(kernels: Kernels, dout: Array, out: Array, dtype: jnp.dtype) -> Array:
    """Sum of cotangent times output (..., H), as the kernels of a target need it."""
    return (cpu if kernels.target == "cpu" else softmax).delta(dout, out, dtype)


def _look(kernels: Kernels, meeting: Meeting, counts: Array, *, is_gradient: bool) -> Look:
    queries, _, visits, walk, scale, divisor, _ = meeting
    case = case_of(queries.q, walk.rows, walk.group)
    lines: list[Line] = ["same"] if queries.ids is not None else []
    if visits.places is not None:
        lines += ["same", "before"] if walk.is_causal else ["same"]
    blocks = case.blocks(kernels.target, kernels.sizes, is_gradient=is_gradient, has_marks=bool(lines))
    return Look(
        blocks=blocks,
        rows=walk.rows,
        group=walk.group,
        head_tasks=queries.q.shape[0] // counts.shape[0],
        is_causal=walk.is_causal and visits.places is None,
        is_ragged=walk.is_ragged or bool(walk.rows % blocks.key),
        lines=tuple(lines),
        scale=scale,
        divisor=divisor,
    )


def _where(visits: Visits, which: int, look: Look, counts: Array) -> tuple[Array, Array]:
    """The chunks of a visit (2,), and its query spans."""
    is_needed = None if visits.is_needed is None else visits.is_needed[which]
    ranges = None if visits.ranges is None else visits.ranges(*look.query_block_rows())[which]
    return jnp.stack([visits.query[which], visits.key[which]]), look.query_spans(counts, is_needed, ranges)


def _marks(meeting: Meeting, look: Look) -> Marks | None:
    """Marks of all rows: ids, where there are any; then segment and, if causal, position, where places are given."""
    if not look.lines:
        return None
    queries, keys, visits, walk, *_ = meeting
    mine: list[Array] = []
    theirs: list[Array] = []
    if queries.ids is not None and keys.ids is not None:
        mine.append(queries.ids)
        theirs.append(jnp.where(keys.ids < 0, -2, keys.ids))  # padding is not the same as padding
    if visits.places is not None:
        for x, marks in ((visits.places.query, mine), (visits.places.key, theirs)):
            every = jnp.repeat(x.swapaxes(0, 1), look.head_tasks, axis=0)  # (N, C, n, 2)
            marks += [every[..., i] for i in range(2 if walk.is_causal else 1)]
    query, key = (jnp.stack(marks, axis=2) for marks in (mine, theirs))
    return Marks(jnp.repeat(query, walk.group, axis=3), key)


def _flat(
    queries: Queries, keys: KeyRows, chunks: Array, marks: Marks | None, look: Look
) -> tuple[strided.Rows, strided.Strides]:
    """The same as rows in one file."""
    tasks, num_chunks = queries.q.shape[:2]
    task = jnp.arange(tasks, dtype=jnp.int32)
    starts = [(task * num_chunks + chunk) * look.rows for chunk in chunks]
    table = jnp.stack([*starts, jnp.zeros_like(task)], axis=1)
    lines = (None, None) if marks is None else (_lines(marks.query[..., :: look.group]), _lines(marks.key))
    rows = strided.Rows(_rows(queries.q), (_rows(keys.kv),), table, *lines)
    return rows, strided.Strides(1, 1, tasks * num_chunks * look.rows)


def _lines(marks: Array) -> Array:
    """Marks (N, C, L, n) as (L, N * C * n)."""
    return marks.transpose(2, 0, 1, 3).reshape(marks.shape[2], -1)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])
