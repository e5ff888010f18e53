"""The memoized tables of a pattern: rows per segment and head, and how they are cut into blocks.

A table has one entry per key/value head and never one per position: what a compiled program holds of it does
not grow with the sequence. Entries are read-only numpy, so they can be shared by traces and threads.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringjax._src.pattern import Branch
from ringjax._src.rows.sizes import WalkSizes, walk_sizes


@dataclasses.dataclass(frozen=True, eq=False)
class PartTable:
    """The whole segments of one branch, or its shorter last segment: a run of segments of one length.

    Attributes:
        branch: Number of the branch in the pattern.
        start: Position of the first segment.
        segments: How many.
        segment_length: Their length, ``w`` or what is left of it.
        rate: ``r``, at most the segment length.
        rows: Most rows that a head selects in a segment, ``ceil(segment_length / r)``.
        heads: Key/value heads that select any row, (heads,).
        offsets: Residue of each, (heads,).
        counts: Rows that each selects in a segment, (heads,).
        sizes: How the rows are cut into blocks.
        is_ragged: Whether some head selects fewer rows than the blocks hold.
        has_empty_heads: Whether some of `heads` select no row; they have a count of 0.
    """

    branch: int
    start: int
    segments: int
    segment_length: int
    rate: int
    rows: int
    heads: np.ndarray
    offsets: np.ndarray
    counts: np.ndarray
    sizes: WalkSizes
    is_ragged: bool
    has_empty_heads: bool

    def is_aligned(self, length: int) -> bool:
        """Whether the part is a whole sequence of this length, cut evenly."""
        return self.segments * self.segment_length == length and self.rows * self.rate == self.segment_length

    def for_heads(self, first: Array, num: int) -> PartTable:
        """The table of `num` of the heads, from `first` on, which is known at run time only.

        For a table of all key/value heads; in the new one they are numbered from 0.
        """
        offsets, counts = (lax.dynamic_slice_in_dim(jnp.asarray(x), first, num) for x in (self.offsets, self.counts))
        return dataclasses.replace(self, heads=frozen(range(num)), offsets=offsets, counts=counts)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.heads.nbytes + self.offsets.nbytes + self.counts.nbytes


class CacheInfo(NamedTuple):
    """Statistics of the pattern cache, see `pattern_cache_info`.

    Attributes:
        hits: Lookups that found an entry.
        misses: Lookups that built an entry.
        entries: Number of entries.
        bytes: Total size of the arrays of all entries.
    """

    hits: int
    misses: int
    entries: int
    bytes: int


class _Tables(Protocol):
    """What the cache keeps: tables with a size."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""


_Made = TypeVar("_Made", bound=_Tables)


class _TableCache:
    """Keeps the most recently used tables, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self._entries: OrderedDict[Hashable, Any] = OrderedDict()
            self._hits = self._misses = 0

    def get(self, key: Hashable, build: Callable[[Any], _Made]) -> _Made:
        with self._lock:  # building takes a millisecond: no second thread builds the same table
            if key in self._entries:
                self._hits += 1
                self._entries.move_to_end(key)
            else:
                self._misses += 1
                self._entries[key] = build(key)
                if len(self._entries) > self._capacity:
                    self._entries.popitem(last=False)
            return self._entries[key]

    def info(self) -> CacheInfo:
        with self._lock:
            size = sum(entry.nbytes for entry in self._entries.values())
            return CacheInfo(self._hits, self._misses, len(self._entries), size)


_cache = _TableCache(capacity=256)


def memoized(key: Hashable, build: Callable[[Any], _Made]) -> _Made:
    """What `build(key)` made, from the cache if it was made before."""
    return _cache.get(key, build)


def pattern_cache_info() -> CacheInfo:
    """Returns hits, misses, number of entries and size in bytes of the pattern cache.

    Example:
        >>> import ringjax as rj
        >>> rj.pattern_cache_clear()
        >>> rj.pattern_cache_info()
        CacheInfo(hits=0, misses=0, entries=0, bytes=0)
    """
    return _cache.info()


def pattern_cache_clear() -> None:
    """Clears the pattern cache and resets its statistics.

    Example:
        >>> import ringjax as rj
        >>> rj.pattern_cache_clear()
        >>> rj.pattern_cache_info().entries
        0
    """
    _cache.clear()


def branch_tables(
    branch: Branch, number: int, length: int, group: int, *, with_empty_heads: bool, query_rows: int
) -> tuple[PartTable, ...]:
    """The tables of one branch over a sequence: its whole segments, and its shorter last one."""
    tables = []
    whole, rest = divmod(length, branch.segment_length)
    for start, segments, size in ((0, whole, branch.segment_length), (length - rest, 1, rest)):
        counts = branch.rows(size) if segments and size else []
        heads = [i for i, count in enumerate(counts) if count]
        if not heads:
            continue  # no such segment, or no head selects anything in it
        if with_empty_heads:
            heads = list(range(len(counts)))
        rate = min(branch.rate, size)  # beyond that a head has its one row or none
        rows = -(-size // rate)
        sizes = walk_sizes(rows, group, query_rows)
        tables.append(
            PartTable(
                branch=number,
                start=start,
                segments=segments,
                segment_length=size,
                rate=rate,
                rows=rows,
                heads=frozen(branch.first_head + i for i in heads),
                offsets=frozen(min(branch.offsets[i], rate - 1) for i in heads),
                counts=frozen(counts[i] for i in heads),
                sizes=sizes,
                is_ragged=any(counts[i] != sizes.padded(rows) for i in heads),
                has_empty_heads=any(counts[i] == 0 for i in heads),
            )
        )
    return tuple(tables)


def frozen(values: Iterable[int]) -> np.ndarray:
    """Integers that nobody can change."""
    array = np.array(list(values), np.int32)
    array.flags.writeable = False
    return array
