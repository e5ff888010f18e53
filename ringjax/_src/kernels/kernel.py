"""What the kernels of both backends share: block sizes, which blocks meet, and who sees whom inside a block.

A kernel works on *tasks* (a head in a batch entry or segment). The query rows of a task stand as ``m * G + g``: row
``m`` of the branch, query head ``g`` of the ``G`` that share a key/value head, so keys and values are never expanded.
Which blocks meet is a run-time table, the *spans*, as a device of a ring learns its place at run time:

    query spans (heads, 4, query blocks): key blocks [first, whole) need no mask, [whole, end) do; count of key rows
    key spans (heads, 4, key blocks): query blocks [first, whole) need a mask, [whole, end) do not; count of key rows

(The blocks come last because scalar memory on TPU is padded to 128 words along the last axis.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ringjax._src.validation import check_int

Line = Literal["same", "before"]


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Rows per block of the Pallas kernels on TPU and GPU, for `dilated_attention(..., block_sizes=...)`.

    Query rows are counted over all query heads that share a key/value head. A size is reduced if half of it holds all
    rows of a segment. Blocks that exceed the kernel's memory are rejected by the compiler.

    Args:
        query: Query rows per block in the forward pass.
        key: Key rows per block in the forward pass.
        grad_query: Query rows per block in the backward pass; `query` by default.
        grad_key: Key rows per block in the backward pass; `key` by default.

    Raises:
        ValueError: If a size is not a power of two of at least 16.

    Example:
        >>> import ringjax as rj
        >>> rj.BlockSizes(query=128, key=64)
        BlockSizes(query=128, key=64, grad_query=128, grad_key=64)
    """

    query: int
    key: int
    grad_query: int = 0  # 0: same as in the forward pass
    grad_key: int = 0

    def __post_init__(self) -> None:
        for name, forward in (("grad_query", self.query), ("grad_key", self.key)):
            if check_int(name, getattr(self, name), least=0) == 0:
                object.__setattr__(self, name, forward)
        for field in dataclasses.fields(self):
            size = check_int(field.name, getattr(self, field.name))
            if size < 16 or size & (size - 1):
                raise ValueError(f"`{field.name}` must be a power of two of at least 16, got {size}.")


class Blocks(NamedTuple):
    """Rows of a query block (times the group) and of a key block, in one pass."""

    query: int
    key: int


@dataclasses.dataclass(frozen=True)
class Look:
    """The static side of a kernel: how many rows meet, and by which rules they see each other.

    Attributes:
        blocks: How they are cut.
        rows: Key rows of a task; it has `group` times as many query rows.
        group: Query heads per key/value head.
        head_tasks: Tasks of each head; the tasks of one head stand together.
        is_causal: Whether a query sees only keys up to its own row.
        is_ragged: Whether some head has fewer key rows than the key blocks hold.
        lines: Rules for the marks of query and key: to be the ``"same"``, or the key's to be not after
            (``"before"``) the query's.
        scale: Factor on the scores.
        divisor: Of the output, in a backward pass.
    """

    blocks: Blocks
    rows: int
    group: int
    head_tasks: int
    is_causal: bool
    is_ragged: bool
    lines: tuple[Line, ...]
    scale: float
    divisor: int = 1

    @property
    def query_blocks(self) -> int:
        """Number of query blocks."""
        return ceil_div(self.rows * self.group, self.blocks.query)

    @property
    def key_blocks(self) -> int:
        """Number of key blocks."""
        return ceil_div(self.rows, self.blocks.key)

    @property
    def needs_mask(self) -> bool:
        """Whether any block has a masked pair."""
        return self.is_causal or self.is_ragged or bool(self.lines)

    def seen(self, row: Any, column: Any, count: Any, query_marks: Sequence[Any], key_marks: Sequence[Any]) -> Array:  # noqa: ANN401
        """Which pairs of row ``m`` of a query and row of a key (arrays that broadcast) see each other."""
        rules = [column < count] if self.is_ragged else []
        if self.is_causal:
            rules.append(column <= row)
        for line, mine, theirs in zip(self.lines, query_marks, key_marks, strict=True):
            rules.append(mine == theirs if line == "same" else theirs <= mine)
        seen = rules[0]
        for rule in rules[1:]:
            seen &= rule
        return seen

    def cost(self, tasks: int, dim: int, multiplies: int, itemsize: int) -> pl.CostEstimate:
        """What a pass with so many matrix multiplies per block takes, as if every task were needed."""
        pairs = tasks * self.rows**2 * self.group // (2 if self.is_causal else 1)
        moved = tasks * self.rows * dim * (2 * self.group * (itemsize + 4) + 2 * self.query_blocks * itemsize)
        return pl.CostEstimate(flops=2 * multiplies * pairs * dim, transcendentals=pairs, bytes_accessed=moved)

    def query_block_rows(self) -> tuple[Array, Array]:
        """First row ``m`` and last row + 1 of each query block; computed, as a constant would grow with the length."""
        first = jnp.arange(self.query_blocks, dtype=jnp.int32) * self.blocks.query
        last = jnp.minimum(first + self.blocks.query, self.rows * self.group) - 1
        return first // self.group, last // self.group + 1

    def query_spans(self, counts: Array, is_needed: Array | None, ranges: Array | None) -> Array:
        """The key blocks that each query block meets.

        Args:
            counts: Key rows of each head, (heads,).
            is_needed: Whether anything is seen at all, or None for yes.
            ranges: First and last + 1 of the key rows that a query block may see (heads, query blocks, 2), where
                positions say so; else None, and order does.
        """
        first, end = (x[None, :] for x in self.query_block_rows())
        counts = counts[:, None]
        if ranges is not None:
            low, high = ranges[..., 0], ranges[..., 1]
        else:
            low, high = jnp.zeros_like(first), jnp.minimum(counts, end if self.is_causal else self.rows)
            high = jnp.where(first < counts, high, 0)
        if is_needed is not None:
            high = jnp.where(is_needed, high, 0)
        whole = jnp.minimum(counts, first + 1) if self.is_causal else counts
        size = self.blocks.key
        low, whole, high = low // size, whole // size, ceil_div(high, size)
        return _table(low, low if self.lines else jnp.clip(whole, low, high), jnp.maximum(low, high), counts)

    def key_spans(self, query_spans: Array) -> Array:
        """The query blocks that meet each key block, from what the query blocks meet."""
        low, whole, high, counts = (query_spans[:, i, :, None] for i in range(4))  # (heads, query blocks, 1)
        block = jnp.arange(self.key_blocks, dtype=jnp.int32)[None, None, :]
        meets, masked = (low <= block) & (block < high), (whole <= block) & (block < high)
        query = jnp.arange(self.query_blocks, dtype=jnp.int32)[None, :, None]
        first = jnp.where(meets, query, self.query_blocks).min(axis=1)
        end = jnp.where(meets, query + 1, 0).max(axis=1)
        last_masked = jnp.where(masked, query + 1, 0).max(axis=1)
        return _table(first, jnp.clip(last_masked, first, end), jnp.maximum(first, end), counts[:, 0])


def _table(*columns: Array) -> Array:
    shape = jnp.broadcast_shapes(*(x.shape for x in columns))
    return jnp.stack([jnp.broadcast_to(x, shape) for x in columns], axis=1).astype(jnp.int32)


def dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """A product in float32; the factors are taken as they are."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def quotient(a: Array, b: int) -> Array:
    """Whole quotient of numbers that are not negative; rounding down of others takes code that Mosaic may not have."""
    return a if b == 1 else lax.div(a, jnp.full_like(a, b))


def ceil_div(a: Any, b: int) -> Any:  # noqa: ANN401 - an array or an int
    """Quotient rounded up."""
    return -(-a // b)
