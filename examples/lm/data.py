"""Bytes of files as batches of packed documents: deterministic, resumable, read only where they are needed.

The documents of an epoch stand one behind the other, as a stream, which is cut into *rows* of `seq_len` bytes; both
documents and rows come in an order drawn from (seed, epoch). So row `n` of a run is a function of `n` alone, and
the number of rows seen is all that a checkpoint has to remember.

Every array is made by `jax.make_array_from_callback`: a process reads those positions of those rows that its own
devices hold, in the order in which the ring stores them.
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
    """Documents one behind the other, in some order."""

    def __init__(self, documents: Sequence[Document], order: np.ndarray) -> None:
        self.documents = [documents[i] for i in order]
        self.ends = np.cumsum([document.size for document in self.documents])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """The bytes from `start` up to `stop`; less, where the stream ends before."""
        stop, parts = min(stop, len(self)), [np.zeros(0, np.uint8)]
        while start < stop:
            index = self.number(start)
            document, end = self.documents[index], int(self.ends[index])
            first = document.stop - (end - start)
            parts.append(read_bytes(document, first, first + min(stop, end) - start))
            start = min(stop, end)
        return np.concatenate(parts)

    def number(self, position: np.ndarray | int) -> np.ndarray:
        """Which document each position belongs to."""
        return np.searchsorted(self.ends, position, side="right")


class Batch(NamedTuple):
    """Arrays (micro-batches, sequences, stored positions): int32, weights float32."""

    tokens: Array
    targets: Array
    weights: Array
    segment_ids: Array


class Batches:
    """Rows of a set of documents as sharded arrays.

    Args:
        documents: What the rows are made of.
        seq_len: Bytes in a row.
        sharding: Of arrays (micro-batches, sequences, stored positions).
        layout: Order of a row over the ring, and the size of the ring.
        seed: Of the shuffles; None: documents and rows in their own order, once (rows after the last are padding).
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
        self.rows = math.ceil(sum(x.size for x in documents) / seq_len)  # of an epoch
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

    def batch(self, first_row: int, micro_batches: int, sequences: int) -> Batch:
        """Rows from `first_row` on, as so many micro-batches of so many sequences."""
        shape = (micro_batches, sequences, self.seq_len)

        @functools.cache  # devices that hold the same, and the four arrays, share one reading
        def shard(micro: range, rows: range, columns: range) -> tuple[np.ndarray, ...]:
            read = [self.read(first_row + m * sequences + row, self.positions[columns]) for m in micro for row in rows]
            kinds = (np.stack(kind) for kind in zip(*read, strict=True))
            return tuple(x.reshape(len(micro), len(rows), len(columns)) for x in kinds)

        def part(which: int, index: tuple[slice, ...]) -> np.ndarray:
            return shard(*(range(size)[part] for size, part in zip(shape, index, strict=True)))[which]

        make = functools.partial(jax.make_array_from_callback, shape, self.sharding)
        return Batch(*(make(functools.partial(part, which)) for which in range(4)))

    def read(self, row: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, targets, weights and segment ids of a row at these positions of it.

        The target is the next byte. It is 0 and does not count (weight 0) at the end of a document or of the row;
        positions after the end of the stream have segment id -1.
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
