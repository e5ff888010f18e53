"""Kernels on TPU. A grid step computes one block of queries against one block of keys of a task.

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
from ringjax._src.kernels.blocks import KernelConfig, dot, quotient
from ringjax._src.online_softmax import PartialSoftmax, Running

_LANES = 128


def forward_kernel(chunks: Any, ranges: Any, q: Any, kv: Any, *refs: Any, config: KernelConfig) -> None:  # noqa: ANN401
    *mask_inputs, prior_out, prior_lse, out, lse, acc, maximum, denominator = refs
    table, nth = _ranges_here(ranges, config)

    @pl.when(nth == 0)
    def _() -> None:
        part = PartialSoftmax(prior_out[0, 0], _to_column(prior_lse[0, 0]))
        acc[...], maximum[...], denominator[...] = softmax.resume(part)

    def step(is_masked: bool) -> None:
        k, v = (
            _zero_past_end(kv[0, 0, 0], table.block, config.num_rows),
            _zero_past_end(kv[1, 0, 0], table.block, config.num_rows),
        )
        scores = dot(q[0, 0], k, 1, 1) * config.scale
        if is_masked:
            scores = jnp.where(_mask(config, table, mask_inputs, is_transposed=False), scores, -jnp.inf)
        state, weights = softmax.rescale(Running(acc[...], maximum[...], denominator[...]), scores)
        acc[...] = state.acc + dot(weights.astype(v.dtype), v, 1, 0)
        maximum[...], denominator[...] = state.max, state.denominator + weights.sum(axis=1, keepdims=True)

    _on_range(step, table, nth, config, masked_first=False)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        part = softmax.finish(Running(acc[...], maximum[...], denominator[...]))
        out[0, 0], lse[0, 0] = part.out, _to_row(part.lse)


def query_gradient_kernel(chunks: Any, ranges: Any, q: Any, kv: Any, *refs: Any, config: KernelConfig) -> None:  # noqa: ANN401
    *mask_inputs, dout, stats, prior, dq, acc, lse, delta = refs
    table, nth = _ranges_here(ranges, config)

    @pl.when(nth == 0)
    def _() -> None:
        acc[...] = jnp.zeros(acc.shape, acc.dtype)
        lse[...], delta[...] = (_to_column(stats[0, 0, i : i + 1]) for i in (0, 1))

    def step(is_masked: bool) -> None:
        k, v = (
            _zero_past_end(kv[0, 0, 0], table.block, config.num_rows),
            _zero_past_end(kv[1, 0, 0], table.block, config.num_rows),
        )
        scores = dot(q[0, 0], k, 1, 1) * config.scale
        if is_masked:
            scores = jnp.where(_mask(config, table, mask_inputs, is_transposed=False), scores, -jnp.inf)
        probs = jnp.exp(scores - lse[...])
        dscores = probs * (dot(dout[0, 0], v, 1, 1) / config.output_divisor - delta[...])
        acc[...] += dot(dscores.astype(k.dtype), k, 1, 0)

    _on_range(step, table, nth, config, masked_first=False)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        dq[0, 0] = prior[0, 0] + acc[...] * config.scale


def key_gradient_kernel(chunks: Any, ranges: Any, q: Any, kv: Any, *refs: Any, config: KernelConfig) -> None:  # noqa: ANN401
    *mask_inputs, dout, stats, prior, dkv, dk, dv = refs
    table, nth = _ranges_here(ranges, config)

    @pl.when(nth == 0)
    def _() -> None:
        dk[...], dv[...] = (jnp.zeros(x.shape, x.dtype) for x in (dk, dv))

    def step(is_masked: bool) -> None:
        rows = config.num_rows * config.q_per_kv
        q_rows, dout_rows = (_zero_past_end(x[0, 0], table.block, rows) for x in (q, dout))
        lse, delta = (stats[0, 0, i : i + 1] for i in (0, 1))
        if rows % config.blocks.query:
            column = table.block * config.blocks.query + jax.lax.broadcasted_iota(jnp.int32, lse.shape, 1)
            lse, delta = jnp.where(column < rows, lse, jnp.inf), jnp.where(column < rows, delta, 0.0)
        k, v = kv[0, 0, 0], kv[1, 0, 0]
        scores = dot(k, q_rows, 1, 1) * config.scale
        if is_masked:
            scores = jnp.where(_mask(config, table, mask_inputs, is_transposed=True), scores, -jnp.inf)
        probs = jnp.exp(scores - lse)
        dscores = probs * (dot(v, dout_rows, 1, 1) / config.output_divisor - delta)
        dv[...] += dot(probs.astype(dout_rows.dtype), dout_rows, 1, 0)
        dk[...] += dot(dscores.astype(q_rows.dtype), q_rows, 1, 0)

    _on_range(step, table, nth, config, masked_first=True)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        dkv[0, 0, 0] = prior[0, 0, 0] + dk[...] * config.scale
        dkv[1, 0, 0] = prior[1, 0, 0] + dv[...] / config.output_divisor


class _Here(NamedTuple):
    """Where a step of the grid stands: its blocks, and what its ranges say."""

    own: Array  # number of the outer block
    block: Array  # number of the inner block
    first: Array
    whole: Array
    end: Array
    present: Array  # key rows


def _ranges_here(ranges: Any, config: KernelConfig) -> tuple[_Here, Array]:  # noqa: ANN401
    task, own, nth = (pl.program_id(i) for i in range(3))
    head = quotient(task, config.tasks_per_head)
    first, whole, end, count = (ranges[head, i, own] for i in range(4))
    return _Here(own, first + nth, first, whole, end, count), nth


def _on_range(
    step: Callable[[bool], None], here: _Here, nth: Array, config: KernelConfig, *, masked_first: bool
) -> None:
    """Runs `step` if the inner block is met, with a mask if it needs one."""
    is_met, is_before = here.block < here.end, here.block < here.whole
    if not config.needs_mask:
        pl.when(is_met)(lambda: step(False))
        return
    pl.when(is_met & (is_before if masked_first else ~is_before))(lambda: step(True))
    if not config.mask_rules:
        pl.when(is_met & (~is_before if masked_first else is_before))(lambda: step(False))


def _mask(config: KernelConfig, here: _Here, mask_inputs: Sequence[Any], *, is_transposed: bool) -> Array:
    """Which pairs (M, S) of a step see each other; (S, M) if transposed."""
    shape = (config.blocks.key, config.blocks.query) if is_transposed else (config.blocks.query, config.blocks.key)
    query_block, key_block = (here.block, here.own) if is_transposed else (here.own, here.block)
    query_axis, key_axis = (1, 0) if is_transposed else (0, 1)
    row = query_block * config.blocks.query + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis)
    column = key_block * config.blocks.key + jax.lax.broadcasted_iota(jnp.int32, shape, key_axis)
    mine, theirs = (
        ([x[0, 0, i : i + 1] for i in range(len(config.mask_rules))] for x in mask_inputs) if mask_inputs else ([], [])
    )
    if is_transposed:
        theirs = [_to_column(x) for x in theirs]
    else:
        mine = [_to_column(x) for x in mine]
    return config.attends(quotient(row, config.q_per_kv), column, here.present, mine, theirs)


def _zero_past_end(rows: Array, block: Array, num_rows: int) -> Array:
    """Rows of a block with 0 past the end of the array, where memory may hold anything."""
    size = rows.shape[0]
    if num_rows % size == 0:
        return rows
    row = block * size + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where(row < num_rows, rows, jnp.zeros((), rows.dtype))


def _to_column(row: Array) -> Array:
    """(1, M) as (M, 1): through a square of lanes, which is what the hardware can transpose."""
    return jnp.broadcast_to(row, (_LANES, row.shape[1])).T[:, :1]


def _to_row(column: Array) -> Array:
    """(M, 1) as (1, M)."""
    return jnp.broadcast_to(column, (column.shape[0], _LANES)).T[:1]
