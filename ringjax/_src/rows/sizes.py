"""Block sizes of plain XLA."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class XlaBlockSizes:
    """Rows per block, counted in key rows: a query block has `query` rows for each query head of a key/value head.

    Each size divides the previous one. A query block attends to the keys before it in blocks of `key` rows and, if
    causal, to the keys on its diagonal in steps of `diagonal` rows, which skip masked query rows.
    """

    query: int  # rows of a query block
    key: int  # rows of a key block
    diagonal: int  # rows of a step along the causal diagonal

    def __post_init__(self) -> None:
        if self.query < 1 or self.key < 1 or self.diagonal < 1 or self.query % self.key or self.key % self.diagonal:
            raise ValueError(f"`query`, `key` and `diagonal` must each be a multiple of the next, got {self}.")

    def padded(self, rows: int) -> int:
        """Rounds a number of rows up to whole query blocks."""
        return -(-rows // self.query) * self.query


# Measured on two x86 cores (head dim 64): below 1024 query rows the matrix multiplies of XLA:CPU stay on one core, key
# blocks of 512 beat 256 by a tenth and 1024 by a little, and steps of 256 balance masked work and narrow multiplies.
QUERY_ROWS, _KEY_ROWS, _STEP_ROWS = 2048, 512, 256


def ring_query_rows(shard_bytes: int, ring_size: int) -> int:
    """Returns the most rows of a query block on a ring whose devices share the cores and hold queries of this size.

    Blocks of 1024 rows are about as fast as larger ones, and up to a tenth faster than 512. Small shards of many
    devices use 512, so that the scores of their blocks take much less memory than the sequence.
    """
    scores_bytes = 2 * 1024 * _KEY_ROWS * 4  # scores and weights of a block, float32
    return 1024 if ring_size <= 4 or shard_bytes >= 4 * scores_bytes else 512


def xla_block_sizes(rows: int, q_per_kv: int, query_rows: int = QUERY_ROWS) -> XlaBlockSizes:
    """Returns block sizes with little padding for `rows` selected rows and `q_per_kv` query heads per key/value head.

    A query block has at most about `query_rows` rows, over all query heads of a key/value head.

    Example:
        >>> xla_block_sizes(2048, 1)
        XlaBlockSizes(query=2048, key=512, diagonal=256)
        >>> xla_block_sizes(300, 1)
        XlaBlockSizes(query=304, key=304, diagonal=152)
    """
    largest_step = min(_STEP_ROWS, max(64, query_rows // q_per_kv))
    steps = -(-rows // largest_step)
    blocks = -(-steps * largest_step * q_per_kv // max(query_rows, largest_step * q_per_kv))
    steps = -(-steps // blocks)  # per query block
    step = -(-rows // (blocks * steps))
    step = step if steps == blocks == 1 else -(-step // 8) * 8
    keys = max(d for d in range(1, steps + 1) if steps % d == 0 and (d == 1 or d * step <= _KEY_ROWS))
    return XlaBlockSizes(steps * step, keys * step, step)
