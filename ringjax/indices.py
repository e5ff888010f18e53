"""The memoized tables of a pattern: rows per segment and head, and how they are cut into blocks.

A table has one column per key/value head and never a row per position: what a compiled program holds of it does
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
class BranchTable:
    """One branch over a sequence.

    Attributes:
        segment_length: ``w``, at most the sequence length.
        rate: ``r``.
        rows: Most rows that a head selects in a segment, ``ceil(w / r)``.
        segments: Segments in the sequence, the last one maybe shorter.
        whole_segments: Segments of full length.
        first_head: First key/value head of the branch.
        offsets: Residue of each head, (heads,).
        counts: Rows that each head selects, (3, heads): in a whole segment, in the shorter last one, past the end.
        sizes: How the rows are cut into blocks.
    """

    segment_length: int
    rate: int
    rows: int
    segments: int
    whole_segments: int
    first_head: int
    offsets: np.ndarray
    counts: np.ndarray
    sizes: BlockSizes

    @property
    def num_heads(self) -> int:
        """Key/value heads that run the branch."""
        return len(self.offsets)

    @property
    def is_ragged(self) -> bool:
        """Whether some head selects fewer rows than the blocks hold."""
        kinds = 2 if self.segments > self.whole_segments else 1
        return bool((self.counts[:kinds] != self.sizes.padded(self.rows)).any())

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.offsets.nbytes + self.counts.nbytes


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
            self._entries: OrderedDict[_Key, tuple[BranchTable, ...]] = OrderedDict()
            self._hits = self._misses = 0

    def get(self, key: _Key) -> tuple[BranchTable, ...]:
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


def branch_tables(pattern: DilationPattern, length: int, kv_heads: int, group: int) -> tuple[BranchTable, ...]:
    """The tables of the branches that have heads, from the cache."""
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


def _build(pattern: DilationPattern, length: int, kv_heads: int, group: int) -> tuple[BranchTable, ...]:
    tables = []
    for branch in pattern.branches(kv_heads, length):
        if branch.num_heads == 0:
            continue  # more branches than heads to deal out
        whole, rest = divmod(length, branch.segment_length)
        rows = -(-branch.segment_length // branch.rate)
        counts = [branch.rows(branch.segment_length), branch.rows(rest), [0] * branch.num_heads]
        tables.append(
            BranchTable(
                segment_length=branch.segment_length,
                rate=branch.rate,
                rows=rows,
                segments=whole + (rest > 0),
                whole_segments=whole,
                first_head=branch.first_head,
                offsets=_frozen(branch.offsets),
                counts=_frozen(counts),
                sizes=cpu_block_sizes(rows, group),
            )
        )
    return tuple(tables)


def _frozen(values: object) -> np.ndarray:
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array
