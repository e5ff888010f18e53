"""The local block on TPU: Mosaic kernels over rows that stand together.

Legend: ``N`` tasks, ``C`` chunks, ``n`` key rows of a chunk, ``G`` query heads per key/value head, ``H`` head dim,
``L`` lines of marks; a block has ``M`` query rows and ``S`` key rows. Numbers per query row travel as rows (1, M): a
column in memory would be padded to 128 lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from ringjax._src import online_softmax as softmax
from ringjax._src.kernels.kernel import Look, dot, quotient
from ringjax._src.kernels.tpu_call import Call, Joint, Rows, Specs
from ringjax._src.online_softmax import PartialSoftmax, Running

_LANES = 128


@functools.partial(jax.jit, static_argnames=("look", "interpret"))
def forward(prior: PartialSoftmax, rows: Rows, *, look: Look, interpret: bool = False) -> PartialSoftmax:
    """Merges what the queries find in the keys into `prior`, (N, C, n * G, H) and (N, C, n * G), float32."""
    out, lse = forward_call(prior, rows, look).run(interpret)
    return PartialSoftmax(out, lse[:, :, 0])


def forward_call(prior: PartialSoftmax, rows: Rows, look: Look) -> Call:
    """The kernel of `forward` with its blocks."""
    at = Specs(look, rows.q.shape, "query")
    sums = [(prior.out, at.query), (prior.lse[:, :, None], at.numbers("query", 1))]
    return Call(
        name="forward",
        kernel=functools.partial(_forward_kernel, look=look),
        specs=at,
        multiplies=2,
        scalars=(rows.chunks, rows.spans),
        inputs=[*at.rows(rows), *sums],
        sums=2,
        scratch=[(look.blocks.query, at.dim), *[(look.blocks.query, 1)] * 2],
    )


def _forward_kernel(chunks: Any, spans: Any, q: Any, kv: Any, *refs: Any, look: Look) -> None:  # noqa: ANN401
    *marks, prior_out, prior_lse, out, lse, acc, peak, total = refs
    table, nth = _spans_here(spans, look)

    @pl.when(nth == 0)
    def _() -> None:
        part = PartialSoftmax(prior_out[0, 0], _to_column(prior_lse[0, 0]))
        acc[...], peak[...], total[...] = softmax.resume(part)

    def step(is_masked: bool) -> None:
        k, v = _inside(kv[0, 0, 0], table.block, look.rows), _inside(kv[1, 0, 0], table.block, look.rows)
        scores = dot(q[0, 0], k, 1, 1) * look.scale
        if is_masked:
            scores = jnp.where(_seen(look, table, marks, is_transposed=False), scores, -jnp.inf)
        state, weights = softmax.rescale(Running(acc[...], peak[...], total[...]), scores)
        acc[...] = state.acc + dot(weights.astype(v.dtype), v, 1, 0)
        peak[...], total[...] = state.peak, state.total + weights.sum(axis=1, keepdims=True)

    _on_span(step, table, nth, look, masked_first=False)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        part = softmax.finish(Running(acc[...], peak[...], total[...]))
        out[0, 0], lse[0, 0] = part.out, _to_row(part.lse)


@functools.partial(jax.jit, static_argnames=("look", "interpret"))
def query_gradient(dq: Array, rows: Rows, joint: Joint, *, look: Look, interpret: bool = False) -> Array:
    """Adds the gradient of the queries to `dq` (N, C, n * G, H), float32."""
    return query_gradient_call(dq, rows, joint, look).run(interpret)[0]


def query_gradient_call(dq: Array, rows: Rows, joint: Joint, look: Look) -> Call:
    """The kernel of `query_gradient` with its blocks."""
    at = Specs(look, rows.q.shape, "query")
    return Call(
        name="query_gradient",
        kernel=functools.partial(_query_gradient_kernel, look=look),
        specs=at,
        multiplies=3,
        scalars=(rows.chunks, rows.spans),
        inputs=[*at.rows(rows), *at.joint(joint), (dq, at.query)],
        sums=1,
        scratch=[(look.blocks.query, at.dim), *[(look.blocks.query, 1)] * 2],
    )


def _query_gradient_kernel(chunks: Any, spans: Any, q: Any, kv: Any, *refs: Any, look: Look) -> None:  # noqa: ANN401
    *marks, dout, stats, prior, dq, acc, lse, delta = refs
    table, nth = _spans_here(spans, look)

    @pl.when(nth == 0)
    def _() -> None:
        acc[...] = jnp.zeros(acc.shape, acc.dtype)
        lse[...], delta[...] = (_to_column(stats[0, 0, i : i + 1]) for i in (0, 1))

    def step(is_masked: bool) -> None:
        k, v = _inside(kv[0, 0, 0], table.block, look.rows), _inside(kv[1, 0, 0], table.block, look.rows)
        scores = dot(q[0, 0], k, 1, 1) * look.scale
        if is_masked:
            scores = jnp.where(_seen(look, table, marks, is_transposed=False), scores, -jnp.inf)
        probs = jnp.exp(scores - lse[...])
        dscores = probs * (dot(dout[0, 0], v, 1, 1) / look.divisor - delta[...])
        acc[...] += dot(dscores.astype(k.dtype), k, 1, 0)

    _on_span(step, table, nth, look, masked_first=False)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        dq[0, 0] = prior[0, 0] + acc[...] * look.scale


@functools.partial(jax.jit, static_argnames=("look", "interpret"))
def key_gradient(dkv: Array, rows: Rows, joint: Joint, *, look: Look, interpret: bool = False) -> Array:
    """Adds the gradient of keys and values to `dkv` (2, N, C, n, H), float32."""
    return key_gradient_call(dkv, rows, joint, look).run(interpret)[0]


def key_gradient_call(dkv: Array, rows: Rows, joint: Joint, look: Look) -> Call:
    """The kernel of `key_gradient` with its blocks."""
    at = Specs(look, rows.q.shape, "key")
    return Call(
        name="key_gradient",
        kernel=functools.partial(_key_gradient_kernel, look=look),
        specs=at,
        multiplies=4,
        scalars=(rows.chunks, rows.spans),
        inputs=[*at.rows(rows), *at.joint(joint), (dkv, at.kv)],
        sums=1,
        scratch=[(look.blocks.key, at.dim)] * 2,
    )


def _key_gradient_kernel(chunks: Any, spans: Any, q: Any, kv: Any, *refs: Any, look: Look) -> None:  # noqa: ANN401
    *marks, dout, stats, prior, dkv, dk, dv = refs
    table, nth = _spans_here(spans, look)

    @pl.when(nth == 0)
    def _() -> None:
        dk[...], dv[...] = (jnp.zeros(x.shape, x.dtype) for x in (dk, dv))

    def step(is_masked: bool) -> None:
        rows = look.rows * look.group
        q_rows, dout_rows = (_inside(x[0, 0], table.block, rows) for x in (q, dout))
        lse, delta = (stats[0, 0, i : i + 1] for i in (0, 1))
        if rows % look.blocks.query:
            column = table.block * look.blocks.query + jax.lax.broadcasted_iota(jnp.int32, lse.shape, 1)
            lse, delta = jnp.where(column < rows, lse, jnp.inf), jnp.where(column < rows, delta, 0.0)
        k, v = kv[0, 0, 0], kv[1, 0, 0]
        scores = dot(k, q_rows, 1, 1) * look.scale
        if is_masked:
            scores = jnp.where(_seen(look, table, marks, is_transposed=True), scores, -jnp.inf)
        probs = jnp.exp(scores - lse)
        dscores = probs * (dot(v, dout_rows, 1, 1) / look.divisor - delta)
        dv[...] += dot(probs.astype(dout_rows.dtype), dout_rows, 1, 0)
        dk[...] += dot(dscores.astype(q_rows.dtype), q_rows, 1, 0)

    _on_span(step, table, nth, look, masked_first=True)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        dkv[0, 0, 0] = prior[0, 0, 0] + dk[...] * look.scale
        dkv[1, 0, 0] = prior[1, 0, 0] + dv[...] / look.divisor


class _Here(NamedTuple):
    """Where a step of the grid stands: its blocks, and what its spans say."""

    own: Array  # number of the outer block
    block: Array  # number of the inner block
    first: Array
    whole: Array
    end: Array
    present: Array  # key rows


def _spans_here(spans: Any, look: Look) -> tuple[_Here, Array]:  # noqa: ANN401
    task, own, nth = (pl.program_id(i) for i in range(3))
    head = quotient(task, look.head_tasks)
    first, whole, end, count = (spans[head, i, own] for i in range(4))
    return _Here(own, first + nth, first, whole, end, count), nth


def _on_span(step: Callable[[bool], None], here: _Here, nth: Array, look: Look, *, masked_first: bool) -> None:
    """Runs `step` if the inner block is met, with a mask if it needs one."""
    is_met, is_before = here.block < here.end, here.block < here.whole
    if not look.needs_mask:
        pl.when(is_met)(lambda: step(False))
        return
    pl.when(is_met & (is_before if masked_first else ~is_before))(lambda: step(True))
    if not look.lines:
        pl.when(is_met & (~is_before if masked_first else is_before))(lambda: step(False))


def _seen(look: Look, here: _Here, marks: Sequence[Any], *, is_transposed: bool) -> Array:
    """Which pairs (M, S) of a step see each other; (S, M) if transposed."""
    shape = (look.blocks.key, look.blocks.query) if is_transposed else (look.blocks.query, look.blocks.key)
    query_block, key_block = (here.block, here.own) if is_transposed else (here.own, here.block)
    query_axis, key_axis = (1, 0) if is_transposed else (0, 1)
    row = query_block * look.blocks.query + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis)
    column = key_block * look.blocks.key + jax.lax.broadcasted_iota(jnp.int32, shape, key_axis)
    mine, theirs = ([x[0, 0, i : i + 1] for i in range(len(look.lines))] for x in marks) if marks else ([], [])
    if is_transposed:
        theirs = [_to_column(x) for x in theirs]
    else:
        mine = [_to_column(x) for x in mine]
    return look.seen(quotient(row, look.group), column, here.present, mine, theirs)


def _inside(rows: Array, block: Array, total: int) -> Array:
    """Rows of a block with 0 past the end of the array, where memory may hold anything."""
    size = rows.shape[0]
    if total % size == 0:
        return rows
    row = block * size + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where(row < total, rows, jnp.zeros((), rows.dtype))


def _to_column(row: Array) -> Array:
    """(1, M) as (M, 1): through a square of lanes, which is what the hardware can transpose."""
    return jnp.broadcast_to(row, (_LANES, row.shape[1])).T[:, :1]


def _to_row(column: Array) -> Array:
    """(M, 1) as (1, M)."""
    return jnp.broadcast_to(column, (column.shape[0], _LANES)).T[:1]
