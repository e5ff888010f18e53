"""The memoized tables of a pattern: rows per segment and head, and how they are cut into blocks.

A table has one entry per key/value head and never one per position: what a compiled program holds of it does
not grow with the sequence. Entries are read-only numpy, so they can be shared by traces and threads.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from ringjax.block.sizes import BlockSizes, cpu_block_sizes
from ringjax.pattern import DilationPattern


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
    sizes: BlockSizes

    def is_aligned(self, length: int) -> bool:
        """Whether the part is a whole sequence of this length, cut evenly."""
        return self.segments * self.segment_length == length and self.rows * self.rate == self.segment_length

    @property
    def is_ragged(self) -> bool:
        """Whether some head selects fewer rows than the blocks hold."""
        return bool((self.counts != self.sizes.padded(self.rows)).any())

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.heads.nbytes + self.offsets.nbytes + self.counts.nbytes


class CacheInfo(NamedTuple):
    """State of the pattern cache, see `pattern_cache_info`."""

    hits: int
    misses: int
    entries: int
    bytes: int


_Key = tuple[DilationPattern, int, int, int]


class _TableCache:
    """Keeps the most recently used tables, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self._entries: OrderedDict[_Key, tuple[PartTable, ...]] = OrderedDict()
            self._hits = self._misses = 0

    def get(self, key: _Key) -> tuple[PartTable, ...]:
        with self._lock:  # building takes microseconds: no second thread builds the same table
            if key in self._entries:
                self._hits += 1
                self._entries.move_to_end(key)
            else:
                self._misses += 1
                self._entries[key] = _build(*key)
                if len(self._entries) > self._capacity:
                    self._entries.popitem(last=False)
            return self._entries[key]

    def info(self) -> CacheInfo:
        with self._lock:
            size = sum(table.nbytes for tables in self._entries.values() for table in tables)
            return CacheInfo(self._hits, self._misses, len(self._entries), size)


_cache = _TableCache(capacity=256)


def part_tables(pattern: DilationPattern, length: int, kv_heads: int, group: int) -> tuple[PartTable, ...]:
    """The tables of the parts of all branches, from the cache."""
    return _cache.get((pattern, length, kv_heads, group))


def pattern_cache_info() -> CacheInfo:
    """Hits, misses, entries and bytes of the pattern cache.

    Example:
        >>> import ringjax as rj
        >>> rj.pattern_cache_clear()
        >>> rj.pattern_cache_info()
        CacheInfo(hits=0, misses=0, entries=0, bytes=0)
    """
    return _cache.info()


def pattern_cache_clear() -> None:
    """Empties the pattern cache and sets its counts to 0.

    Example:
        >>> import ringjax as rj
        >>> rj.pattern_cache_clear()
        >>> rj.pattern_cache_info().entries
        0
    """
    _cache.clear()


def _build(pattern: DilationPattern, length: int, kv_heads: int, group: int) -> tuple[PartTable, ...]:
    tables = []
    for number, branch in enumerate(pattern.branches(kv_heads, length)):
        whole, rest = divmod(length, branch.segment_length)
        for start, segments, size in ((0, whole, branch.segment_length), (length - rest, 1, rest)):
            counts = branch.rows(size)
            heads = [i for i, count in enumerate(counts) if count]
            if not heads:
                continue  # no last segment, or no head selects anything in it
            rate = min(branch.rate, size)  # beyond that a head has its one row or none
            rows = -(-size // rate)
            tables.append(
                PartTable(
                    branch=number,
                    start=start,
                    segments=segments,
                    segment_length=size,
                    rate=rate,
                    rows=rows,
                    heads=_frozen([branch.first_head + i for i in heads]),
                    offsets=_frozen([branch.offsets[i] for i in heads]),
                    counts=_frozen([counts[i] for i in heads]),
                    sizes=cpu_block_sizes(rows, group),
                )
            )
    return tuple(tables)


def _frozen(values: list[int]) -> np.ndarray:
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array
