"""How the rows of one segment are cut into blocks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class XlaBlockSizes:
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
QUERY_ROWS, _KEY_ROWS, _STEP_ROWS = 2048, 512, 256


def ring_query_rows(shard_bytes: int, ring_size: int) -> int:
    """Most rows of a query block where several devices share the cores, for a query of so many bytes on each.

    Blocks of 1024 are about as fast there as larger ones, and up to a tenth faster than 512. Small shards of many
    devices take 512, so that scores and weights of all their blocks stay well below the sequence.
    """
    return 1024 if ring_size <= 4 or shard_bytes >= 4 * 2 * 1024 * _KEY_ROWS * 4 else 512


def xla_block_sizes(rows: int, group: int, query_rows: int = QUERY_ROWS) -> XlaBlockSizes:
    """Sizes for segments of `rows` selected rows and `group` query heads per key/value head, with little padding.

    A query block has at most about `query_rows` rows, over all heads of the group.

    Example:
        >>> xla_block_sizes(2048, 1)
        XlaBlockSizes(query=2048, key=512, diagonal=256)
        >>> xla_block_sizes(300, 1)
        XlaBlockSizes(query=304, key=304, diagonal=152)
    """
    largest_step = min(_STEP_ROWS, max(64, query_rows // group))
    steps = -(-rows // largest_step)
    blocks = -(-steps * largest_step * group // max(query_rows, largest_step * group))
    steps = -(-steps // blocks)  # per query block
    step = -(-rows // (blocks * steps))
    step = step if steps == blocks == 1 else -(-step // 8) * 8
    keys = max(d for d in range(1, steps + 1) if steps % d == 0 and (d == 1 or d * step <= _KEY_ROWS))
    return XlaBlockSizes(steps * step, keys * step, step)
