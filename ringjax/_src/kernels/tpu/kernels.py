"""The TPU kernels. A grid step attends from one query block to one key block of a task.

Legend: ``P`` tasks of a grid step, ``M`` query rows and ``S`` key rows of a block, ``H`` head dim. A block is computed
in tiles: some of its query rows, and all of its key rows or, on the diagonal, those that the mask leaves. Numbers per
query row are stored as rows (1, M): a column in memory would be padded to 128 lanes. Exponentials have base 2, as in
hardware.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from ringjax._src.indexing import ceil_div, quotient
from ringjax._src.kernels.blocks import KernelConfig
from ringjax._src.kernels.tpu.tiling import LANES, Tiling

LOG2_E = math.log2(math.e)


def forward_kernel(
    chunks: Any,  # noqa: ANN401
    ranges: Any,  # noqa: ANN401
    q: Any,  # noqa: ANN401
    kv: Any,  # noqa: ANN401
    *refs: Any,  # noqa: ANN401
    config: KernelConfig,
    tiling: Tiling,
    has_prior: bool,
    first_axis: int = 0,
) -> None:
    """Merges the attention of a query block to its key blocks into the prior output and lse.

    The running maximum is the same in all lanes. Each lane sums up its own share of the denominator, which saves a
    reduction across lanes in every step.
    """
    *inputs, out, lse, acc, maximum, denominator = refs
    mask_inputs, priors = (inputs[:-2], inputs[-2:]) if has_prior else (inputs, ())
    step = _grid_step(ranges, config, tiling, inner_offset=None, first_axis=first_axis)

    def begin() -> None:
        if not priors:
            acc[...], denominator[...] = (jnp.zeros(x.shape, x.dtype) for x in (acc, denominator))
            maximum[...] = jnp.full(maximum.shape, -jnp.inf, maximum.dtype)
            return
        prior_out, prior_lse = priors
        for task in range(tiling.tasks):
            start = _to_lanes(prior_lse[task, 0]) * LOG2_E
            is_one = (start != -jnp.inf) & (jax.lax.broadcasted_iota(jnp.int32, start.shape, 1) == 0)
            acc[task], maximum[task], denominator[task] = prior_out[task, 0], start, is_one.astype(start.dtype)

    def keys_or_values(which: int, tile: Tile) -> Array:
        return _zero_past_end(kv[which, tile.task, 0, tile.keys], step.key_block, config.num_rows, config.blocks.key)

    def scores_of(tile: Tile) -> Array:
        scores = config.dot(q[tile.task, 0, tile.rows], keys_or_values(0, tile), 1, 1) * (config.scale * LOG2_E)
        if not tile.is_masked:
            return scores
        return jnp.where(_mask(config, step, mask_inputs, tile, is_transposed=False), scores, -jnp.inf)

    def attend(tile: Tile, scores: Array) -> None:
        task, rows, v = tile.task, tile.rows, keys_or_values(1, tile)
        old = maximum[task, rows]
        new = jnp.maximum(old, scores.max(axis=1, keepdims=True))
        finite = jnp.where(new == -jnp.inf, 0.0, new)  # of rows without keys
        weights = jnp.exp2(scores - _repeat_lanes(finite, scores.shape[1]))
        decay = jnp.exp2(old - finite)
        shares = (weights[:, i : i + LANES] for i in range(0, weights.shape[1], LANES))
        maximum[task, rows], denominator[task, rows] = new, sum(shares, denominator[task, rows] * decay)
        prior = acc[task, rows] * _repeat_lanes(decay, acc.shape[-1])
        acc[task, rows] = prior + config.dot(weights.astype(v.dtype), v, 1, 0)

    def attend_once(tile: Tile, scores: Array) -> None:
        top = scores.max(axis=1, keepdims=True)
        weights = jnp.exp2(scores - jnp.where(top == -jnp.inf, 0.0, top))
        total, v = weights.sum(axis=1, keepdims=True), keys_or_values(1, tile)
        total = jnp.where(total == 0, 1.0, total)
        out[tile.task, 0, tile.rows] = config.dot(weights.astype(v.dtype), v, 1, 0) * (1 / total)
        lse[tile.task, 0, :, tile.rows] = _to_row(top * (1 / LOG2_E) + jnp.log(total))

    if not has_prior and config.key_blocks == 1:
        _run(scores_of, attend_once, config, tiling, is_masked=config.needs_mask)
        return

    pl.when(step.nth == 0)(begin)
    _run_in_range(scores_of, attend, step, config, tiling)

    @pl.when(step.is_last_inner)
    def _() -> None:
        for task in range(tiling.tasks):
            total = denominator[task].sum(axis=1, keepdims=True)
            total = jnp.where(total == 0, 1.0, total)  # of rows without keys; NaN stays NaN
            out[task, 0] = acc[task] * (1 / total)
            lse[task, 0] = (maximum[task] * (1 / LOG2_E) + jnp.log(total)).T[:1]


def gradient_kernel(
    chunks: Any,  # noqa: ANN401
    ranges: Any,  # noqa: ANN401
    q: Any,  # noqa: ANN401
    kv: Any,  # noqa: ANN401
    *refs: Any,  # noqa: ANN401
    config: KernelConfig,
    tiling: Tiling,
    has_prior: bool,
    first_axis: int = 0,
) -> None:
    """Adds the gradients of queries, keys and values to the prior ones, with five products per tile.

    Key blocks are the outer loop. The gradients of all query blocks of the call are summed up in VMEM and are written
    while the last key block is processed. Scores are transposed, (S, M), so that lse and delta are rows.
    """
    *inputs, dq, dkv, dq_sum, dk_sum, dv_sum = refs
    inputs, priors = (inputs[:-2], inputs[-2:]) if has_prior else (inputs, ())
    *mask_inputs, dout, stats = inputs
    step = _grid_step(ranges, config, tiling, inner_offset=chunks[2], first_axis=first_axis)
    num_query_rows = config.num_rows * config.q_per_kv

    is_once = not has_prior and config.query_blocks == config.key_blocks == 1

    def keys_or_values(which: int, tile: Tile) -> Array:
        return _zero_past_end(kv[which, tile.task, 0, tile.keys], step.key_block, config.num_rows, config.blocks.key)

    def queries(ref: Any, tile: Tile) -> Array:  # noqa: ANN401
        rows, size = ref[tile.task, 0, tile.rows], config.blocks.query
        return _zero_past_end(rows, step.query_block, num_query_rows, size, tile.first_row)

    def scores_of(tile: Tile) -> Array:
        scores = config.dot(keys_or_values(0, tile), queries(q, tile), 1, 1) * (config.scale * LOG2_E)
        if not tile.is_masked:
            return scores
        return jnp.where(_mask(config, step, mask_inputs, tile, is_transposed=True), scores, -jnp.inf)

    def attend(tile: Tile, scores: Array) -> None:
        task, rows, keys = tile.task, tile.rows, tile.keys
        lse, delta = (stats[task, 0, i : i + 1, rows] for i in (0, 1))
        if num_query_rows % config.blocks.query:
            first = step.query_block * config.blocks.query + tile.first_row
            exists = first + jax.lax.broadcasted_iota(jnp.int32, lse.shape, 1) < num_query_rows
            lse, delta = jnp.where(exists, lse, jnp.inf), jnp.where(exists, delta, 0.0)
        (k, v), q_rows, dout_rows = (keys_or_values(i, tile) for i in (0, 1)), queries(q, tile), queries(dout, tile)
        probs = jnp.exp2(scores - lse)
        dscores = (probs * (config.dot(v, dout_rows, 1, 1) - delta)).astype(k.dtype)
        dv_rows, dk_rows = config.dot(probs.astype(dout_rows.dtype), dout_rows, 1, 0), config.dot(dscores, q_rows, 1, 0)
        dq_rows = config.dot(k, dscores, 0, 0).T if tiling.has_wide_units else config.dot(dscores, k, 0, 0)
        if not is_once:
            dv_sum[task, keys] += dv_rows
            dk_sum[task, keys] += dk_rows
            dq_sum[task, step.nth, rows] += dq_rows
            return
        dq[task, 0, rows] = dq_rows * config.scale
        seen = tile.seen_keys
        for i, found in enumerate((dk_rows * config.scale, dv_rows)):
            if seen:
                dkv[i, task, 0, :seen] += found[:seen]
            if seen < tile.num_keys:
                dkv[i, task, 0, seen : tile.num_keys] = found[seen:]

    if is_once:
        _run(scores_of, attend, config, tiling, is_masked=config.needs_mask)
        return

    @pl.when(step.nth == 0)
    def _() -> None:
        dk_sum[...], dv_sum[...] = (jnp.zeros(x.shape, x.dtype) for x in (dk_sum, dv_sum))

    @pl.when(step.outer_block == 0)
    def _() -> None:
        dq_sum[:, step.nth] = jnp.zeros((tiling.tasks, *dq_sum.shape[2:]), dq_sum.dtype)

    _run_in_range(scores_of, attend, step, config, tiling)

    @pl.when(step.is_last_inner)
    def _() -> None:
        for i, found in enumerate((dk_sum[...] * config.scale, dv_sum[...])):
            dkv[i, :, 0] = priors[1][i, :, 0] + found if priors else found

    @pl.when(step.is_last_outer & (step.query_block < config.query_blocks))
    def _() -> None:
        found = dq_sum[:, step.nth] * config.scale
        dq[:, 0] = priors[0][:, 0] + found if priors else found


class _GridStep(NamedTuple):
    """The blocks of a grid step."""

    nth: Array  # number of the step among those of its outer block
    outer_block: Array  # query block; key block for the gradient
    inner_block: Array  # the other of the two; outside of the range, the step does nothing
    is_query_outer: bool
    is_in_range: Array  # whether the inner block is in the range of any task
    whole: Array  # boundary between blocks that need a mask and blocks that do not, see `blocks`
    row_counts: list[Array]  # key rows of each task
    is_last_outer: Array  # whether the outer block is the last of its task
    is_last_inner: Array  # whether the step is the last of its outer block

    @property
    def query_block(self) -> Array:
        """The query block."""
        return self.outer_block if self.is_query_outer else self.inner_block

    @property
    def key_block(self) -> Array:
        """The key block."""
        return self.inner_block if self.is_query_outer else self.outer_block


class Tile(NamedTuple):
    """A part of a block that is computed at a time."""

    task: int  # of the tasks of the grid step
    first_row: int  # of the query rows of the block
    num_rows: int
    num_keys: int  # from the first key row of the block on
    seen_keys: int  # how many of them earlier tiles have
    is_masked: bool

    @property
    def rows(self) -> slice:
        """The query rows."""
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def keys(self) -> slice:
        """The key rows."""
        return slice(0, self.num_keys)


def _grid_step(
    ranges: Any,  # noqa: ANN401
    config: KernelConfig,
    tiling: Tiling,
    *,
    inner_offset: Array | None,
    first_axis: int,
) -> _GridStep:
    """Returns the current grid step, where tasks, outer blocks and inner blocks are the grid axes from `first_axis` on.

    Without `inner_offset`, the inner blocks are those of the range, from its first one on. With it, they are all blocks
    from that one on.
    """
    program, outer_block, nth = (pl.program_id(first_axis + i) for i in range(3))
    is_last = (outer_block == pl.num_programs(first_axis + 1) - 1, nth == pl.num_programs(first_axis + 2) - 1)
    heads = [quotient(program * tiling.tasks + i, config.tasks_per_head) for i in range(tiling.tasks)]
    starts, ends, row_counts = ([ranges[head, i, outer_block] for head in heads] for i in (0, 2, 3))
    whole = ranges[heads[0], 1, outer_block]
    inner_block = nth if tiling.tasks > 1 else starts[0] + nth  # tasks that share a step have one block each
    if inner_offset is not None:
        inner_block = inner_offset + nth
    in_range = [(start <= inner_block) & (inner_block < end) for start, end in zip(starts, ends, strict=True)]
    is_in_range = functools.reduce(operator.or_, in_range)
    return _GridStep(nth, outer_block, inner_block, inner_offset is None, is_in_range, whole, row_counts, *is_last)


def _run_in_range(
    scores_of: Callable[[Tile], Array],
    attend: Callable[[Tile, Array], None],
    step: _GridStep,
    config: KernelConfig,
    tiling: Tiling,
) -> None:
    """Runs `attend` for the tiles of the step if its inner block is in the range, with a mask if it needs one."""
    run = functools.partial(_run, scores_of, attend, config, tiling)
    is_masked = step.inner_block >= step.whole if step.is_query_outer else step.inner_block < step.whole
    if not config.needs_mask:
        pl.when(step.is_in_range)(lambda: run(is_masked=False))
    elif config.mask_rules or tiling.tasks > 1:
        pl.when(step.is_in_range)(lambda: run(is_masked=True))
    else:
        pl.when(step.is_in_range & is_masked)(lambda: run(is_masked=True))
        pl.when(step.is_in_range & ~is_masked)(lambda: run(is_masked=False))


def _run(
    scores_of: Callable[[Tile], Array],
    attend: Callable[[Tile, Array], None],
    config: KernelConfig,
    tiling: Tiling,
    *,
    is_masked: bool,
) -> None:
    """Runs `attend` for all tiles of a block.

    Scores are computed some tiles ahead of `attend`: the compiler follows this order when it fills the units.
    """
    ahead = 1 if is_masked else tiling.ahead
    waiting: list[tuple[Tile, Array]] = []
    for tile in tiles(config, tiling, is_masked=is_masked):
        waiting.append((tile, scores_of(tile)))
        if len(waiting) > ahead:
            attend(*waiting.pop(0))
    for tile, scores in waiting:
        attend(tile, scores)


def tiles(config: KernelConfig, tiling: Tiling, *, is_masked: bool) -> Iterator[Tile]:
    """Yields the tiles of a block; those on the diagonal of a causal mask end where the mask does.

    A masked block is on the diagonal if query and key blocks hold the same rows and only causality masks inside.
    """
    blocks, q_per_kv = config.blocks, config.q_per_kv
    is_diagonal = is_masked and config.is_causal and not config.mask_rules and blocks.query == blocks.key * q_per_kv
    size = min(tiling.query_rows, blocks.query)
    seen_keys = 0
    for first in range(0, blocks.query, size):
        num_keys = ceil_div(ceil_div(first + size, q_per_kv), LANES) * LANES if is_diagonal else blocks.key
        for task in range(tiling.tasks):
            yield Tile(task, first, size, num_keys, seen_keys, is_masked)
        seen_keys = num_keys


def _mask(
    config: KernelConfig, step: _GridStep, mask_inputs: Sequence[Any], tile: Tile, *, is_transposed: bool
) -> Array:
    """Returns the mask of a tile, (rows, keys), or (keys, rows) if transposed."""
    shape = (tile.num_keys, tile.num_rows) if is_transposed else (tile.num_rows, tile.num_keys)
    query_axis, key_axis = (1, 0) if is_transposed else (0, 1)
    first_row = step.query_block * config.blocks.query + tile.first_row
    row = first_row + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis)
    column = step.key_block * config.blocks.key + jax.lax.broadcasted_iota(jnp.int32, shape, key_axis)
    of_query: list[Array] = []
    of_key: list[Array] = []
    for i in range(len(config.mask_rules)):
        for inputs, part, found in zip(mask_inputs, (tile.rows, tile.keys), (of_query, of_key), strict=True):
            found.append(inputs[tile.task, 0, i : i + 1, part])
    if is_transposed:
        of_key = [_to_lanes(x)[:, :1] for x in of_key]
    else:
        of_query = [_to_lanes(x)[:, :1] for x in of_query]
    return config.attends(quotient(row, config.q_per_kv), column, step.row_counts[tile.task], of_query, of_key)


def _zero_past_end(rows: Array, block: Array, num_rows: int, block_rows: int, offset: int = 0) -> Array:
    """Returns rows of a block from `offset` on, with 0 for rows past the end of the array, which are undefined."""
    if num_rows % block_rows == 0:
        return rows
    row = block * block_rows + offset + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where(row < num_rows, rows, jnp.zeros((), rows.dtype))


def _to_lanes(row: Array) -> Array:
    """Transposes (1, M) to (M, LANES), the same in all lanes; the hardware transposes only tiles of whole lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _to_row(column: Array) -> Array:
    """Transposes (M, 1) to (1, M)."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def _repeat_lanes(x: Array, width: int) -> Array:
    """Repeats (M, LANES), the same in all lanes, to (M, width)."""
    return jnp.tile(x, (1, ceil_div(width, LANES)))[:, :width] if width != LANES else x
