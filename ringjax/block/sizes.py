"""How the rows of one segment are cut into blocks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Rows per block, counted in key rows (a query block has `query` times the query heads of a group).

    Each size divides the one before it: a query block meets the keys before it in blocks of `key` rows, and
    the keys of its own diagonal, when causal, in steps of `diagonal` rows from which the masked rows are left out.

    Attributes:
        query: Rows of a query block.
        key: Rows of a key block.
        diagonal: Rows of a step along the causal diagonal.
    """

    query: int
    key: int
    diagonal: int

    def __post_init__(self) -> None:
        if self.query < 1 or self.key < 1 or self.diagonal < 1 or self.query % self.key or self.key % self.diagonal:
            raise ValueError(f"`query`, `key` and `diagonal` must each be a multiple of the next, got {self}.")

    def padded(self, rows: int) -> int:
        """`rows` rounded up to whole query blocks."""
        return -(-rows // self.query) * self.query


# Measured on two x86 cores (head dim 64): below 1024 query rows the matrix multiplies of XLA:CPU stay on one core, key
# blocks of 512 beat 256 by a tenth and 1024 by a little, and steps of 256 balance wasted against narrow multiplies.
# On a ring the cores belong to several devices, and smaller query blocks take less memory at the same speed.
_QUERY_ROWS, _RING_QUERY_ROWS, _KEY_ROWS, _STEP_ROWS = 2048, 512, 512, 256


def cpu_block_sizes(rows: int, group: int, *, on_ring: bool = False) -> BlockSizes:
    """Sizes for segments of `rows` selected rows and `group` query heads per key/value head, with little padding.

    Example:
        >>> cpu_block_sizes(2048, 1)
        BlockSizes(query=2048, key=512, diagonal=256)
        >>> cpu_block_sizes(300, 1)
        BlockSizes(query=304, key=304, diagonal=152)
    """
    most = _RING_QUERY_ROWS if on_ring else _QUERY_ROWS
    largest_step = min(_STEP_ROWS, max(64, most // group))
    steps = -(-rows // largest_step)
    blocks = -(-steps * largest_step * group // max(most, largest_step * group))
    steps = -(-steps // blocks)  # per query block
    step = -(-rows // (blocks * steps))
    step = step if steps == blocks == 1 else -(-step // 8) * 8
    keys = max(d for d in range(1, steps + 1) if steps % d == 0 and (d == 1 or d * step <= _KEY_ROWS))
    return BlockSizes(steps * step, keys * step, step)
