"""Batches of packed documents: deterministic, resumable, and read only by the processes that need them.

The documents of an epoch are concatenated into a stream, which is cut into *rows* of `seq_len` bytes. The order of
documents and of rows is drawn from (seed, epoch). Row `n` of a run is therefore a function of `n` alone, and a
checkpoint only needs the number of rows consumed.

Arrays are created with `jax.make_array_from_callback`: a process reads only the positions and rows that its own devices
hold, in the order in which the ring stores them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

import ringjax as rj
from lm.documents import Document, Split, read_bytes, read_documents, unigram_entropy

__all__ = ["Batch", "Batches", "Document", "Split", "Stream", "read_documents", "unigram_entropy"]


class Stream:
    """Concatenates documents in a given order."""

    def __init__(self, documents: Sequence[Document], order: np.ndarray) -> None:
        self.documents = [documents[i] for i in order]
        self.ends = np.cumsum([document.size for document in self.documents])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns bytes `start` to `stop`, or fewer if the stream ends earlier."""
        stop, parts = min(stop, len(self)), [np.zeros(0, np.uint8)]
        while start < stop:
            index = self.number(start)
            document, end = self.documents[index], int(self.ends[index])
            first = document.stop - (end - start)
            parts.append(read_bytes(document, first, first + min(stop, end) - start))
            start = min(stop, end)
        return np.concatenate(parts)

    def number(self, position: np.ndarray | int) -> np.ndarray:
        """Returns the index of the document that each position belongs to."""
        return np.searchsorted(self.ends, position, side="right")


class Batch(NamedTuple):
    """Arrays of shape (micro-batches, sequences, stored positions): int32, and float32 for the weights."""

    tokens: Array
    targets: Array
    weights: Array
    segment_ids: Array


class Batches:
    """Reads rows of a set of documents as sharded arrays.

    Args:
        documents: Source of the rows.
        seq_len: Bytes per row.
        sharding: Sharding of arrays of shape (micro-batches, sequences, stored positions).
        layout: Layout and size of the ring.
        seed: Seed of the shuffles. None keeps the order of documents and rows and reads them once; rows after the last
            are padding.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        seq_len: int,
        sharding: jax.sharding.Sharding,
        layout: tuple[str, int] = ("contiguous", 1),
        seed: int | None = None,
    ) -> None:
        self.documents, self.seq_len, self.sharding, self.seed = documents, seq_len, sharding, seed
        self.positions = np.asarray(rj.positions(layout[0], seq_len, layout[1]))
        self.rows = math.ceil(sum(x.size for x in documents) / seq_len)  # per epoch
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

    def batch(self, first_row: int, micro_batches: int, sequences: int) -> Batch:
        """Returns the rows from `first_row` on as `micro_batches` micro-batches of `sequences` sequences."""
        shape = (micro_batches, sequences, self.seq_len)

        @functools.cache  # one read serves all four arrays and all devices that hold the same part
        def shard(micro: range, rows: range, columns: range) -> tuple[np.ndarray, ...]:
            read = [self.read(first_row + m * sequences + row, self.positions[columns]) for m in micro for row in rows]
            kinds = (np.stack(kind) for kind in zip(*read, strict=True))
            return tuple(x.reshape(len(micro), len(rows), len(columns)) for x in kinds)

        def part(which: int, index: tuple[slice, ...]) -> np.ndarray:
            return shard(*(range(size)[part] for size, part in zip(shape, index, strict=True)))[which]

        make = functools.partial(jax.make_array_from_callback, shape, self.sharding)
        return Batch(*(make(functools.partial(part, which)) for which in range(4)))

    def read(self, row: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns tokens, targets, weights and segment ids of a row at the given positions.

        The target is the next byte. At the end of a document or of the row, it is 0 and has weight 0. Positions after
        the end of the stream have segment id -1.
        """
        epoch, index = divmod(row, self.rows) if self.seed is not None else (0, row)
        stream, order = self._epoch(epoch)
        start = (int(order[index]) if index < self.rows else index) * self.seq_len
        at = start + positions.astype(np.int64)
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(at, cuts)]  # the chunks of a device
        read = [self._bytes(stream, start, stop + 1) for start, stop in runs]
        tokens, targets = np.concatenate([x[:-1] for x in read]), np.concatenate([x[1:] for x in read])
        document = stream.number(at)
        counts = (document == stream.number(at + 1)) & (positions + 1 < self.seq_len) & (at + 1 < len(stream))
        ids = np.where(at < len(stream), document - stream.number(start), -1)
        return tokens, np.where(counts, targets, 0), counts.astype(np.float32), ids.astype(np.int32)

    @staticmethod
    def _bytes(stream: Stream, start: int, stop: int) -> np.ndarray:
        found = stream.read(start, stop).astype(np.int32)
        return np.pad(found, (0, stop - start - len(found)))

    def _shuffled(self, epoch: int) -> tuple[Stream, np.ndarray]:
        if self.seed is None:
            return Stream(self.documents, np.arange(len(self.documents))), np.arange(self.rows)
        draw = np.random.default_rng((self.seed, epoch))
        return Stream(self.documents, draw.permutation(len(self.documents))), draw.permutation(self.rows)
