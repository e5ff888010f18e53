"""What the Pallas and C++ kernels share: block sizes, block ranges, masks, and how the rows of a task are found.

A kernel works on *tasks*: one head in one chunk of one batch entry. The query rows of a task are numbered
``m * G + g``: row ``m`` of the selection, query head ``g`` of the ``G`` that share a key/value head, so keys and values
are never expanded. Which blocks are computed is a run-time table, because a device learns its ring index at run time:

    KV block ranges (heads, 4, query blocks): key blocks [first, whole) need no mask, [whole, end) do; key rows
    Q block ranges (heads, 4, key blocks): query blocks [first, whole) need a mask, [whole, end) do not; key rows

(The blocks come last because scalar memory on TPU is padded to 128 words along the last axis.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src.indexing import ceil_div, quotient
from ringjax._src.kernels.interface import AttendConfig, BlockSizes, Operands

MaskRule = Literal["same", "before"]


class Blocks(NamedTuple):
    """Rows of a query block (over all query heads of a key/value head) and of a key block, in one pass."""

    query: int
    key: int


def given_blocks(sizes: BlockSizes, num_rows: int, q_per_kv: int, least: int, *, is_bwd: bool) -> Blocks:
    """Returns the blocks that a caller asked for, reduced to what the rows need."""
    query, key = (sizes.grad_query, sizes.grad_key) if is_bwd else (sizes.query, sizes.key)
    power_above = lambda rows: 1 << max(0, rows - 1).bit_length()  # noqa: E731
    return Blocks(max(least, min(query, power_above(num_rows * q_per_kv))), max(least, min(key, power_above(num_rows))))


def fitting_blocks(blocks: tuple[int, int], num_rows: int, q_per_kv: int, least: int) -> Blocks:
    """Halves block sizes until little of the blocks is empty."""

    def fit(size: int, rows: int) -> int:
        while size > least and ceil_div(rows, size) * size > 1.125 * ceil_div(rows, least) * least:
            size //= 2
        return max(size, least)

    return Blocks(fit(blocks[0], num_rows * q_per_kv), fit(blocks[1], num_rows))


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Static configuration of a kernel."""

    blocks: Blocks
    num_rows: int  # key rows of a task; it has `q_per_kv` times as many query rows
    q_per_kv: int  # query heads per key/value head
    tasks_per_head: int  # tasks of each head, which are consecutive
    is_causal: bool  # whether a query attends only to keys up to its own row
    is_ragged: bool  # whether some head has fewer key rows than the key blocks hold
    mask_rules: tuple[MaskRule, ...]  # "same": mask inputs of query and key must be equal; "before": key's not greater
    scale: float  # factor applied to the scores
    output_divisor: int = 1  # what the output is divided by, for the backward pass
    stride: int = 1  # positions from one row of a task to the next
    kv_heads: int = 1  # key/value heads of a position
    value_shift: int = 0  # rows from a key to its value, if they share an array; else 0
    interpret: bool = False  # whether to interpret the kernel, on any platform

    @property
    def query_blocks(self) -> int:
        """Number of query blocks."""
        return ceil_div(self.num_rows * self.q_per_kv, self.blocks.query)

    @property
    def key_blocks(self) -> int:
        """Number of key blocks."""
        return ceil_div(self.num_rows, self.blocks.key)

    @property
    def is_exact(self) -> bool:
        """Whether all rows of all blocks exist."""
        return not self.is_ragged and self.num_rows * self.q_per_kv % self.blocks.query == 0

    @property
    def needs_mask(self) -> bool:
        """Whether any block has a masked pair."""
        return self.is_causal or self.is_ragged or bool(self.mask_rules)

    def dot(self, a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
        """Multiplies matrices with float32 accumulation; XLA:CPU does not multiply 16-bit ones everywhere."""
        if self.interpret:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return dot(a, b, a_axis, b_axis)

    def attends(
        self, row: Array, column: Array, count: Array, query_inputs: Sequence[Array], key_inputs: Sequence[Array]
    ) -> Array:
        """Returns the mask for query rows ``m``, key rows and their mask inputs, which broadcast."""
        masks = [column < count] if self.is_ragged else []
        if self.is_causal:
            masks.append(column <= row)
        for rule, of_query, of_key in zip(self.mask_rules, query_inputs, key_inputs, strict=True):
            masks.append(of_query == of_key if rule == "same" else of_key <= of_query)
        return functools.reduce(operator.and_, masks)

    def query_block_rows(self) -> tuple[Array, Array]:
        """Returns first row ``m`` and last row + 1 of each query block; computed, as a constant would grow with T."""
        first = jnp.arange(self.query_blocks, dtype=jnp.int32) * self.blocks.query
        last = jnp.minimum(first + self.blocks.query, self.num_rows * self.q_per_kv) - 1
        return quotient(first, self.q_per_kv), quotient(last, self.q_per_kv) + 1

    def kv_block_ranges(self, counts: Array, active: Array | None = None, key_ranges: Array | None = None) -> Array:
        """Returns the key blocks that each query block attends to.

        Args:
            counts: Key rows of each head, (heads,).
            active: Whether there is any work, or None for yes.
            key_ranges: First and last + 1 of the key rows that a query block may attend to, (heads, query blocks, 2),
                if positions determine them; else None.
        """
        first, end = (x[None, :] for x in self.query_block_rows())
        counts = counts[:, None]
        if key_ranges is not None:
            low, high = key_ranges[..., 0], key_ranges[..., 1]
        else:
            low, high = jnp.zeros_like(first), jnp.minimum(counts, end if self.is_causal else self.num_rows)
            high = jnp.where(first < counts, high, 0)
        if active is not None:
            high = jnp.where(active, high, 0)
        whole = jnp.minimum(counts, first + 1) if self.is_causal else counts
        size = self.blocks.key
        low, whole, high = quotient(low, size), quotient(whole, size), ceil_div(high, size)
        return _table(low, low if self.mask_rules else jnp.clip(whole, low, high), jnp.maximum(low, high), counts)

    def q_block_ranges(self, kv_block_ranges: Array) -> Array:
        """Returns the query blocks that attend to each key block."""
        low, whole, high, counts = (kv_block_ranges[:, i, :, None] for i in range(4))  # (heads, query blocks, 1)
        block = jnp.arange(self.key_blocks, dtype=jnp.int32)[None, None, :]
        attends, is_masked = (low <= block) & (block < high), (whole <= block) & (block < high)
        query = jnp.arange(self.query_blocks, dtype=jnp.int32)[None, :, None]
        first = jnp.where(attends, query, self.query_blocks).min(axis=1)
        end = jnp.where(attends, query + 1, 0).max(axis=1)
        last_masked = jnp.where(is_masked, query + 1, 0).max(axis=1)
        return _table(first, jnp.clip(last_masked, first, end), jnp.maximum(first, end), counts[:, 0])


def kernel_config(operands: Operands, config: AttendConfig, blocks: Blocks) -> KernelConfig:
    """Returns the configuration of the kernels for these operands."""
    rows, positions = operands.rows, None if operands.pairs is None else operands.pairs.positions
    is_causal = operands.is_causal(config)
    rules: list[MaskRule] = [] if operands.query_ids is None else ["same"]
    if positions is not None:
        rules += ["same", "before"] if is_causal else ["same"]
    return KernelConfig(
        blocks=blocks,
        num_rows=rows.num_rows,
        q_per_kv=operands.q_per_kv,
        tasks_per_head=operands.tasks_per_head,
        is_causal=is_causal and positions is None,
        is_ragged=rows.is_ragged or bool(rows.num_rows % blocks.key),
        mask_rules=tuple(rules),
        scale=config.scale,
        output_divisor=config.output_divisor,
        stride=rows.rate if operands.pairs is None else 1,
        kv_heads=operands.kv_heads,
        value_shift=0 if operands.pairs is None else math.prod(operands.query.shape[:2]) * rows.num_rows,
        interpret=config.is_interpreted,
    )


def has_mask_inputs(operands: Operands) -> bool:
    """Returns whether segment ids or positions are compared."""
    return operands.query_ids is not None or (operands.pairs is not None and operands.pairs.positions is not None)


def pair_ranges(operands: Operands, config: KernelConfig) -> list[Array]:
    """Returns the KV block ranges of each pair of chunks, or of dense operands."""
    counts, pairs = jnp.asarray(operands.rows.counts), operands.pairs
    if pairs is None:
        return [config.kv_block_ranges(counts)]
    num = len(pairs.query)
    active = [None] * num if pairs.active is None else list(pairs.active)
    key_ranges = [None] * num if pairs.key_ranges is None else list(pairs.key_ranges(*config.query_block_rows()))
    return [config.kv_block_ranges(counts, *pair) for pair in zip(active, key_ranges, strict=True)]


def packed_mask_inputs(operands: Operands, config: KernelConfig) -> tuple[Array, Array] | None:
    """Returns the mask inputs of packed rows, of queries and of keys: (N, C, inputs, n), or None without mask rules.

    They are the segment ids, if any; then the segments and, if causal, the positions, if given.
    """
    if not config.mask_rules:
        return None
    query: list[Array] = []
    key: list[Array] = []
    if operands.query_ids is not None and operands.key_ids is not None:
        for ids, inputs, padding in ((operands.query_ids, query, -1), (operands.key_ids, key, -2)):
            inputs.append(jnp.where(ids < 0, padding, ids).astype(jnp.int32))  # padding differs
    assert operands.pairs is not None
    if operands.pairs.positions is not None:
        for positions, inputs in zip(operands.pairs.positions, (query, key), strict=True):
            every = jnp.repeat(positions.swapaxes(0, 1), config.tasks_per_head, axis=0)  # (N, C, n, 2)
            inputs += [every[..., i] for i in range(2 if "before" in config.mask_rules else 1)]
    return jnp.stack(query, axis=2), jnp.stack(key, axis=2)


class StridedRows(NamedTuple):
    """Operands as rows (rows, H), found by start and stride, for the kernels on GPU and CPU.

    Row ``m`` of a task is at position ``start + m * stride``. So the same kernels read dilated rows of a dense array,
    without copying them, and packed rows.
    """

    query: Array  # unscaled queries (rows, H)
    kv: tuple[Array, ...]  # keys and values, as two arrays or as one
    tasks: Array  # position of the first query, of the first key, and head of each task, (tasks, 3)
    query_inputs: Array | None  # mask inputs (inputs, positions) of queries, or None
    key_inputs: Array | None  # mask inputs of keys, or None


def strided_rows(operands: Operands, config: KernelConfig) -> list[StridedRows]:
    """Returns each pair of chunks, or dense operands, as strided rows."""
    rows, pairs = operands.rows, operands.pairs
    query, kv = flat(operands.query), tuple(flat(x) for x in operands.kv)
    if pairs is None:
        length = operands.query.shape[1]
        heads, offsets = (jnp.asarray(x)[:, None, None] for x in (rows.heads, rows.offsets))
        entry = jnp.arange(operands.batch, dtype=jnp.int32)[None, :, None] * length
        chunk = jnp.arange(rows.chunks, dtype=jnp.int32)[None, None, :] * rows.chunk_length + rows.first
        start, head = jnp.broadcast_arrays(entry + chunk + offsets, heads)
        tasks = jnp.stack([start.ravel(), start.ravel(), head.ravel()], axis=1)
        ids = None if operands.query_ids is None else operands.query_ids.reshape(1, -1).astype(jnp.int32)
        return [StridedRows(query, kv, tasks, ids, ids)]
    inputs = packed_mask_inputs(operands, config) or (None, None)
    of_query, of_key = (None if x is None else x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1) for x in inputs)
    num_tasks, num_chunks = operands.query.shape[:2]
    task = jnp.arange(num_tasks, dtype=jnp.int32)
    every = []
    for which in range(len(pairs.query)):
        starts = [(task * num_chunks + chunk[which]) * config.num_rows for chunk in (pairs.query, pairs.key)]
        tasks = jnp.stack([*starts, jnp.zeros_like(task)], axis=1)
        every.append(StridedRows(query, kv, tasks, of_query, of_key))
    return every


def flat(x: Array) -> Array:
    """Reshapes to rows (rows, H)."""
    return x.reshape(-1, x.shape[-1])


def dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Multiplies matrices with float32 accumulation."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _table(*columns: Array) -> Array:
    shape = jnp.broadcast_shapes(*(x.shape for x in columns))
    return jnp.stack([jnp.broadcast_to(x, shape) for x in columns], axis=1).astype(jnp.int32)
