"""Rows that stand anywhere in an array: what the kernels on GPU and on CPU take.

Arrays come as rows (rows, H) in any order: row ``m`` of a task is ``start + m * step``, counted in positions, and a
position has ``heads`` columns. So the same kernels read dilated rows out of the dense sequence, with no copy of them,
and rows that have travelled.
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from ringjax._src.kernels.kernel import Look


class Strides(NamedTuple):
    """How the rows of a task stand.

    Attributes:
        step: Positions from one row to the next.
        heads: Key/value heads of a position.
        value_shift: Rows from a key to its value in one array of both; 0 for arrays of their own.
    """

    step: int
    heads: int
    value_shift: int


class How(NamedTuple):
    """The static side of a call: rules, strides, and whether to interpret the kernel, on any platform."""

    look: Look
    strides: Strides
    interpret: bool


class Joint(NamedTuple):
    """What came out, for a backward pass: the cotangent (rows, H), the joint lse and delta (rows,)."""

    dout: Array
    lse: Array
    delta: Array


class Rows(NamedTuple):
    """Queries (rows, H), keys and values (one array or two), and marks of positions (L, positions) or None.

    Attributes:
        query: The queries, not scaled.
        kv: Keys, and values, or one array of both.
        tasks: Position of the first query and of the first key of a task, and its head: (tasks, 3).
        query_marks: What `Look.lines` compares, of queries.
        key_marks: The same of keys.
    """

    query: Array
    kv: tuple[Array, ...]
    tasks: Array
    query_marks: Array | None
    key_marks: Array | None
