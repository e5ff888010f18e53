"""Bytes of files as batches of packed documents: deterministic, resumable, read only where they are needed.

The documents of an epoch stand one behind the other, as a stream, which is cut into *rows* of `seq_len` bytes; both
documents and rows come in an order drawn from (seed, epoch). So row `n` of a run is a function of `n` alone, and
the number of rows seen is all that a checkpoint has to remember.

Every array is made by `jax.make_array_from_callback`: a process reads those positions of those rows that its own
devices hold, straight from memory-mapped files, in the order in which the ring stores them.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import math
import os
import sysconfig
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

import ringjax as rj
from lm.flags import UserError

_HELD_OUT = 20  # one document of so many is for validation
_ENTROPY_BYTES = 2**28  # what the unigram entropy is measured on, at most


@dataclasses.dataclass(frozen=True)
class Document:
    """A part of a file."""

    path: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Split(NamedTuple):
    """Documents to train on, and documents held out for validation."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def standard_library() -> list[str]:
    """The Python sources of this interpreter's standard library, without its tests and what was installed into it."""
    root = sysconfig.get_paths()["stdlib"]
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = glob.glob(os.path.join(root, "**", "*.py"), recursive=True)
    return [path for path in found if not left_out & set(os.path.relpath(path, root).split(os.sep))]


def find_files(paths: Sequence[str]) -> list[str]:
    """The files that paths name: files, folders (all files in them) and patterns such as ``texts/**/*.txt``, sorted.

    Raises:
        UserError: If a path names nothing.
    """
    found: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            hits = glob.glob(os.path.join(glob.escape(path), "**"), recursive=True)
        else:
            hits = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)
        if not hits:
            raise UserError(f"--data-path {path}: there is no such file, folder or pattern with matches")
        found += [file for file in hits if not os.path.isdir(file)]
    return sorted(set(found))


def read_documents(paths: Sequence[str]) -> Split:
    """One document per file; a stable choice of them, by name, is held out (of a single file, its last part).

    Raises:
        UserError: If a file cannot be read, or there is not a byte in all of them.
    """
    documents = []
    for path in find_files(paths) if paths else sorted(standard_library()):
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise UserError(f"--data-path: {path} cannot be read: {error.strerror}") from error
        if size:
            documents.append(Document(path, 0, size))
    if sum(document.size for document in documents) < 2:
        raise UserError(
            f"--data-path: nothing to read in {', '.join(paths) or 'the standard library'}: no bytes at all"
        )
    if len(documents) == 1:
        (whole,) = documents
        cut = min(math.ceil(whole.size * (1 - 1 / _HELD_OUT)), whole.size - 1)
        return Split((Document(whole.path, 0, cut),), (Document(whole.path, cut, whole.size),))
    root = os.path.commonpath([x.path for x in documents])
    by_name = sorted(documents, key=lambda x: zlib.crc32(os.path.relpath(x.path, root).encode()))
    held_out = set(by_name[: max(1, len(documents) // _HELD_OUT)])
    return Split(tuple(x for x in documents if x not in held_out), tuple(x for x in documents if x in held_out))


def unigram_entropy(documents: Sequence[Document]) -> float:
    """Nats per byte of a model that knows how often each byte occurs and nothing else."""
    share = min(1.0, _ENTROPY_BYTES / sum(x.size for x in documents))
    counts = np.zeros(256, np.int64)
    for document in documents:
        part = _mapped(document.path)[document.start : document.start + max(1, int(share * document.size))]
        counts += np.bincount(part, minlength=256)
    used = counts[counts > 0] / counts.sum()
    return float(-(used * np.log(used)).sum())


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
            parts.append(_mapped(document.path)[first : first + min(stop, end) - start])
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


@functools.lru_cache(maxsize=1024)
def _mapped(path: str) -> np.memmap:
    return np.memmap(path, np.uint8, mode="r")
