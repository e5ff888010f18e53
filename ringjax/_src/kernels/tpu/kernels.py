"""The TPU kernels. A grid step attends from one query block to one key block of a task.

Legend: ``N`` tasks, ``C`` chunks, ``n`` key rows of a chunk, ``G`` query heads per key/value head, ``H`` head dim; a
block has ``M`` query rows and ``S`` key rows. Numbers per query row are stored as rows (1, M): a column in memory would
be padded to 128 lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from ringjax._src import online_softmax as softmax
from ringjax._src.indexing import quotient
from ringjax._src.kernels.blocks import KernelConfig, dot
from ringjax._src.online_softmax import PartialSoftmax, Running

_LANES = 128


def forward_kernel(chunks: Any, ranges: Any, q: Any, kv: Any, *refs: Any, config: KernelConfig) -> None:  # noqa: ANN401
    """Merges the attention of a query block to its key blocks into the prior output and lse."""
    *mask_inputs, prior_out, prior_lse, out, lse, acc, maximum, denominator = refs
    step, nth = _grid_step(ranges, config)

    @pl.when(nth == 0)
    def _() -> None:
        part = PartialSoftmax(prior_out[0, 0], _to_column(prior_lse[0, 0]))
        acc[...], maximum[...], denominator[...] = softmax.resume(part)

    def attend(is_masked: bool) -> None:
        k, v = (_zero_past_end(kv[i, 0, 0], step.inner_block, config.num_rows) for i in (0, 1))
        scores = dot(q[0, 0], k, 1, 1) * config.scale
        if is_masked:
            scores = jnp.where(_mask(config, step, mask_inputs, is_transposed=False), scores, -jnp.inf)
        state, weights = softmax.rescale(Running(acc[...], maximum[...], denominator[...]), scores)
        acc[...] = state.acc + dot(weights.astype(v.dtype), v, 1, 0)
        maximum[...], denominator[...] = state.max, state.denominator + weights.sum(axis=1, keepdims=True)

    _run_in_range(attend, step, config, masked_first=False)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        part = softmax.finish(Running(acc[...], maximum[...], denominator[...]))
        out[0, 0], lse[0, 0] = part.out, _to_row(part.lse)


def query_gradient_kernel(chunks: Any, ranges: Any, q: Any, kv: Any, *refs: Any, config: KernelConfig) -> None:  # noqa: ANN401
    """Adds the gradient of a query block to the prior one."""
    *mask_inputs, dout, stats, prior, dq, acc, lse, delta = refs
    step, nth = _grid_step(ranges, config)

    @pl.when(nth == 0)
    def _() -> None:
        acc[...] = jnp.zeros(acc.shape, acc.dtype)
        lse[...], delta[...] = (_to_column(stats[0, 0, i : i + 1]) for i in (0, 1))

    def attend(is_masked: bool) -> None:
        k, v = (_zero_past_end(kv[i, 0, 0], step.inner_block, config.num_rows) for i in (0, 1))
        scores = dot(q[0, 0], k, 1, 1) * config.scale
        if is_masked:
            scores = jnp.where(_mask(config, step, mask_inputs, is_transposed=False), scores, -jnp.inf)
        probs = jnp.exp(scores - lse[...])
        dscores = probs * (dot(dout[0, 0], v, 1, 1) / config.output_divisor - delta[...])
        acc[...] += dot(dscores.astype(k.dtype), k, 1, 0)

    _run_in_range(attend, step, config, masked_first=False)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        dq[0, 0] = prior[0, 0] + acc[...] * config.scale


def key_gradient_kernel(chunks: Any, ranges: Any, q: Any, kv: Any, *refs: Any, config: KernelConfig) -> None:  # noqa: ANN401
    """Adds the gradients of a key block and its values to the prior ones."""
    *mask_inputs, dout, stats, prior, dkv, dk, dv = refs
    step, nth = _grid_step(ranges, config)

    @pl.when(nth == 0)
    def _() -> None:
        dk[...], dv[...] = (jnp.zeros(x.shape, x.dtype) for x in (dk, dv))

    def attend(is_masked: bool) -> None:
        rows = config.num_rows * config.q_per_kv
        q_rows, dout_rows = (_zero_past_end(x[0, 0], step.inner_block, rows) for x in (q, dout))
        lse, delta = (stats[0, 0, i : i + 1] for i in (0, 1))
        if rows % config.blocks.query:
            column = step.inner_block * config.blocks.query + jax.lax.broadcasted_iota(jnp.int32, lse.shape, 1)
            lse, delta = jnp.where(column < rows, lse, jnp.inf), jnp.where(column < rows, delta, 0.0)
        k, v = kv[0, 0, 0], kv[1, 0, 0]
        scores = dot(k, q_rows, 1, 1) * config.scale
        if is_masked:
            scores = jnp.where(_mask(config, step, mask_inputs, is_transposed=True), scores, -jnp.inf)
        probs = jnp.exp(scores - lse)
        dscores = probs * (dot(v, dout_rows, 1, 1) / config.output_divisor - delta)
        dv[...] += dot(probs.astype(dout_rows.dtype), dout_rows, 1, 0)
        dk[...] += dot(dscores.astype(q_rows.dtype), q_rows, 1, 0)

    _run_in_range(attend, step, config, masked_first=True)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        dkv[0, 0, 0] = prior[0, 0, 0] + dk[...] * config.scale
        dkv[1, 0, 0] = prior[1, 0, 0] + dv[...] / config.output_divisor


class _GridStep(NamedTuple):
    """The blocks of a grid step, and the range of inner blocks of its outer block."""

    outer_block: Array  # query block; key block for the gradient of keys and values
    inner_block: Array  # the other of the two; past the range, the step does nothing
    first: Array  # first block of the range
    whole: Array  # boundary between blocks that need a mask and blocks that do not, see `blocks`
    end: Array  # last block of the range + 1
    row_count: Array  # key rows of the task


def _grid_step(ranges: Any, config: KernelConfig) -> tuple[_GridStep, Array]:  # noqa: ANN401
    """Returns the current grid step, and its number among those of its outer block."""
    task, outer_block, nth = (pl.program_id(i) for i in range(3))
    head = quotient(task, config.tasks_per_head)
    first, whole, end, row_count = (ranges[head, i, outer_block] for i in range(4))
    return _GridStep(outer_block, first + nth, first, whole, end, row_count), nth


def _run_in_range(attend: Callable[[bool], None], step: _GridStep, config: KernelConfig, *, masked_first: bool) -> None:
    """Runs `attend` if the inner block is in the range, with a mask if it needs one."""
    is_in_range, is_before = step.inner_block < step.end, step.inner_block < step.whole
    if not config.needs_mask:
        pl.when(is_in_range)(lambda: attend(False))
        return
    pl.when(is_in_range & (is_before if masked_first else ~is_before))(lambda: attend(True))
    if not config.mask_rules:
        pl.when(is_in_range & (~is_before if masked_first else is_before))(lambda: attend(False))


def _mask(config: KernelConfig, step: _GridStep, mask_inputs: Sequence[Any], *, is_transposed: bool) -> Array:
    """Returns the mask of a grid step, (M, S), or (S, M) if transposed."""
    shape = (config.blocks.key, config.blocks.query) if is_transposed else (config.blocks.query, config.blocks.key)
    query_block, key_block = step.outer_block, step.inner_block
    if is_transposed:
        query_block, key_block = key_block, query_block
    query_axis, key_axis = (1, 0) if is_transposed else (0, 1)
    row = query_block * config.blocks.query + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis)
    column = key_block * config.blocks.key + jax.lax.broadcasted_iota(jnp.int32, shape, key_axis)
    of_query, of_key = (
        ([x[0, 0, i : i + 1] for i in range(len(config.mask_rules))] for x in mask_inputs) if mask_inputs else ([], [])
    )
    if is_transposed:
        of_key = [_to_column(x) for x in of_key]
    else:
        of_query = [_to_column(x) for x in of_query]
    return config.attends(quotient(row, config.q_per_kv), column, step.row_count, of_query, of_key)


def _zero_past_end(rows: Array, block: Array, num_rows: int) -> Array:
    """Returns the rows of a block, with 0 for rows past the end of the array, whose contents are undefined."""
    size = rows.shape[0]
    if num_rows % size == 0:
        return rows
    row = block * size + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where(row < num_rows, rows, jnp.zeros((), rows.dtype))


def _to_column(row: Array) -> Array:
    """Transposes (1, M) to (M, 1), through a tile of whole lanes, as the hardware transposes only those."""
    return jnp.broadcast_to(row, (_LANES, row.shape[1])).T[:, :1]


def _to_row(column: Array) -> Array:
    """Transposes (M, 1) to (1, M)."""
    return jnp.broadcast_to(column, (column.shape[0], _LANES)).T[:1]
