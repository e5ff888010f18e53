"""Finds the text files of `--data-path`, splits them into training and validation documents, and reads them.

Every regular file counts once, regardless of links to it, and every folder is visited once. Files are read through a
bounded number of open descriptors. A file that was truncated during the run stops the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import glob
import hashlib
import math
import os
import stat
import sysconfig
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lm.flags import RunError, UserError

_HELD_OUT = 20  # one in 20 documents is for validation
_ENTROPY_BYTES = 2**28  # at most this much is read to measure the unigram entropy
_DIGEST_BYTES = 2**28  # corpora up to this size are hashed completely; of larger ones, both ends of each document
_HEAD = 8192  # bytes at the start of a file that distinguish text from binary data, and bytes hashed at each end
_MAX_CONTROL = 0.05  # largest fraction of control characters in text
_OPEN_FILES = 128
_CHUNK = 2**20  # bytes per read when a whole document is read
_CONTROL = bytes(x for x in (*range(32), 127) if x not in b"\b\t\n\v\f\r\x1b")

Report = Callable[[str], None]


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
    """Documents for training and validation, with digests that identify them.

    Attributes:
        train: Training documents.
        held_out: Validation documents.
        contents: Digest of names (relative to the common folder), sizes and bytes; the same for copies on other hosts.
        modified: Digest of the modification times.
    """

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    contents: str
    modified: str

    def facts(self) -> dict[str, int | str]:
        """Returns what a checkpoint records about the data, so that a resumed run notices changes."""
        size = sum(x.size for x in self.train)
        return {
            "documents": len(self.train),
            "bytes": size,
            "contents": self.contents,
            "modified": self.modified,
        }


def read_documents(paths: Sequence[str], report: Report = print) -> Split:
    """Finds one document per text file and holds out some of them, chosen by name (of a single file, its end).

    Args:
        paths: Files, folders and glob patterns; if empty, the standard library.
        report: Receives messages about skipped files.

    Raises:
        UserError: If a file cannot be read, if a file given by name is not text, or if all files are empty.
    """
    _opened.cache_clear()  # a file may have been replaced since the last call
    found = _find_texts(paths, report) if paths else [_inspect(path) for path in sorted(standard_library())]
    files = [file for file in found if file.size]
    if sum(file.size for file in files) < 2:
        names = ", ".join(map(shown, paths)) or "the standard library"
        raise UserError(f"--data-path: {names}: no bytes to train on")
    documents = [Document(file.path, 0, file.size) for file in files]
    root = os.path.commonpath([x.path for x in documents]) if len(documents) > 1 else ""
    names = [os.fsencode(os.path.relpath(x.path, root)) if root else b"" for x in documents]
    contents = _digest_contents(documents, names)
    modified = _digest(str(file.modified).encode() for file in files)
    if len(documents) == 1:
        (whole,) = documents
        cut = min(math.ceil(whole.size * (1 - 1 / _HELD_OUT)), whole.size - 1)
        parts = (Document(whole.path, 0, cut),), (Document(whole.path, cut, whole.size),)
        return Split(*parts, contents, modified)
    by_name = sorted(range(len(documents)), key=lambda i: zlib.crc32(names[i]))
    held_out = {documents[i] for i in by_name[: max(1, len(documents) // _HELD_OUT)]}
    parts = tuple(x for x in documents if x not in held_out), tuple(x for x in documents if x in held_out)
    return Split(*parts, contents, modified)


def standard_library() -> list[str]:
    """Returns the Python files of the standard library, without tests and installed packages."""
    root = os.path.abspath(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = glob.glob(os.path.join(root, "**", "*.py"), recursive=True)
    return [path for path in found if not left_out & set(os.path.relpath(path, root).split(os.sep))]


def read_bytes(document: Document, start: int, stop: int) -> np.ndarray:
    """Reads bytes `start` to `stop` of the file of a document.

    Raises:
        RunError: If the file ends before `stop` or cannot be read.
    """
    parts, at = [], start
    try:
        file = _opened(document.path)
        while at < stop:
            part = os.pread(file.descriptor, stop - at, at)
            if not part:
                size = os.fstat(file.descriptor).st_size
                raise RunError(
                    f"--data-path: {shown(document.path)} was truncated during the run: "
                    f"{size} bytes remain, byte {stop} is needed"
                )
            parts.append(part)
            at += len(part)
    except OSError as error:
        raise RunError(f"--data-path: {shown(document.path)} cannot be read: {error.strerror}") from error
    return np.frombuffer(b"".join(parts), np.uint8)


def unigram_entropy(documents: Sequence[Document]) -> float:
    """Returns the entropy of the byte frequencies, in nats per byte."""
    share = min(1.0, _ENTROPY_BYTES / sum(x.size for x in documents))
    counts = np.zeros(256, np.int64)
    for document in documents:
        for part in _chunks(document, document.start, document.start + max(1, int(share * document.size))):
            counts += np.bincount(part, minlength=256)
    used = counts[counts > 0] / counts.sum()
    return float(-(used * np.log(used)).sum())


def shown(path: str) -> str:
    """Returns a path on one line; bytes that are not UTF-8 and control characters are escaped."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in path)


class _File(NamedTuple):
    """Properties of a file."""

    path: str
    size: int
    modified: int  # nanoseconds
    identity: tuple[int, int]
    is_text: bool


class _NotRegular(Exception):
    """Raised for a FIFO, a socket or a device; the message is its kind."""


def _find_texts(paths: Sequence[str], report: Report) -> list[_File]:
    """Returns each text file that matches the paths once, sorted by name."""
    named, found = set(), set()
    for path in paths:
        if os.path.isdir(path):
            found.update(_files(_absolute(path)))
        elif os.path.lexists(path):
            named.add(_absolute(path))
        else:
            hits = _matches(path)
            if not hits:
                raise UserError(
                    f"--data-path {shown(path)}: no such file or folder, and no file matches it as a pattern"
                )
            found.update(map(_absolute, hits))
    by_identity: dict[tuple[int, int], list[_File]] = {}
    special, binary = [], []
    for path in sorted(named | found):
        try:
            file = _inspect(path)
            is_text, kind = file.is_text, "binary: it starts with NUL bytes or many control characters"
        except _NotRegular as error:
            is_text, kind = False, str(error)
        if is_text:
            by_identity.setdefault(file.identity, []).append(file)
        elif path in named:
            raise UserError(f"--data-path: {shown(path)} is {kind}; only text files are supported")
        else:
            (binary if kind.startswith("binary") else special).append(path)
    _report_skipped(report, "not text", binary)
    _report_skipped(report, "not regular files", special)
    files = (min(same, key=lambda file: (_links(file.path), file.path)) for same in by_identity.values())
    return sorted(files, key=lambda file: file.path)


def _report_skipped(report: Report, why: str, paths: Sequence[str]) -> None:
    if paths:
        more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
        report(f"--data-path: skipped {', '.join(map(shown, paths[:3]))}{more}: {why}")


def _inspect(path: str) -> _File:
    """Returns the properties of a file without blocking, for example on a FIFO."""
    with _explained(path):
        _check_regular(os.stat(path))  # before opening it: opening a device may have side effects
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(descriptor)
            _check_regular(about)  # after opening it: the file may have been replaced
            head = os.pread(descriptor, _HEAD, 0)
        finally:
            os.close(descriptor)
    return _File(path, about.st_size, about.st_mtime_ns, (about.st_dev, about.st_ino), _is_text(head))


def _is_text(head: bytes) -> bool:
    """Returns whether a file with these first bytes is text, in any encoding without NUL bytes."""
    control = len(head) - len(head.translate(None, _CONTROL))
    return 0 not in head and control <= _MAX_CONTROL * len(head)


def _check_regular(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        raise _NotRegular(kinds.get(stat.S_IFMT(about.st_mode), "a device"))


def _absolute(path: str) -> str:
    """Returns the absolute path and keeps the names of links, unless it contains `..`."""
    return os.path.realpath(path) if os.pardir in path.split(os.sep) else os.path.abspath(path)


def _links(path: str) -> int:
    """Returns how many components of a path are symbolic links."""
    parts = path.split(os.sep)
    return sum(os.path.islink(os.sep.join(parts[:i])) for i in range(2, len(parts) + 1))


def _matches(pattern: str) -> list[str]:
    """Returns the matching paths that are not folders; unlike `glob`, ``**`` terminates if links form loops."""
    parts = [part for part in pattern.split(os.sep) if part]
    parts = [part for part, after in zip(parts, [*parts[1:], ""], strict=True) if not part == after == "**"]
    found = [os.sep if pattern.startswith(os.sep) else os.curdir]
    for part in [*parts, "*"] if parts[-1:] == ["**"] else parts:
        if part == "**":
            hits = (folder for top in found if os.path.isdir(top) for folder, _ in _walk(top))
        elif any(x in part for x in "*?["):
            folders = (folder for folder in found if os.path.isdir(folder))
            hits = (
                os.path.join(folder, entry.name)
                for folder in folders
                for entry in _entries(folder)
                if fnmatch.fnmatch(entry.name, part) and entry.name.startswith(".") <= part.startswith(".")
            )
        else:
            hits = (path for folder in found if os.path.lexists(path := os.path.join(folder, part)))
        found = list(dict.fromkeys(hits))
    return [path for path in found if not os.path.isdir(path)]


def _files(folder: str) -> Iterator[str]:
    """Yields the paths of everything but folders in and below a folder."""
    for path, names in _walk(folder):
        for name in names:
            yield os.path.join(path, name)


def _walk(top: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each folder once, under its real name if possible, with the names in it that are not folders.

    Links to folders are followed last. As in `glob`, names that start with a dot are skipped.

    Raises:
        UserError: If a folder cannot be read.
    """
    seen: set[tuple[int, int]] = set()
    own, linked = [top], []
    while own or linked:
        path = own.pop() if own else linked.pop(0)
        with _explained(path):
            about = os.stat(path)
            if (about.st_dev, about.st_ino) in seen:
                continue
            seen.add((about.st_dev, about.st_ino))
            inside = [x for x in _entries(path) if not x.name.startswith(".")]
            names = [x.name for x in inside if not x.is_dir()]
            own += [x.path for x in inside if x.is_dir(follow_symlinks=False)]
            linked = sorted(linked + [x.path for x in inside if x.is_symlink() and x.is_dir()])
        yield path, names


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder."""
    with _explained(folder), os.scandir(folder) as entries:
        return list(entries)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turns an `OSError` into a one-line `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--data-path: {shown(error.filename or path)} cannot be read: {error.strerror}") from error


def _digest_contents(documents: Sequence[Document], names: Sequence[bytes]) -> str:
    is_small = sum(x.size for x in documents) <= _DIGEST_BYTES

    def parts() -> Iterator[bytes]:
        for document, name in zip(documents, names, strict=True):
            yield name
            yield str(document.size).encode()
            if is_small or document.size <= 2 * _HEAD:
                yield from (chunk.tobytes() for chunk in _chunks(document, document.start, document.stop))
            else:
                yield read_bytes(document, document.start, document.start + _HEAD).tobytes()
                yield read_bytes(document, document.stop - _HEAD, document.stop).tobytes()

    return _digest(parts())


def _digest(parts: Iterator[bytes]) -> str:
    """Returns the digest of a list of byte strings, which depends on their boundaries too."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _chunks(document: Document, start: int, stop: int) -> Iterator[np.ndarray]:
    for at in range(start, stop, _CHUNK):
        yield read_bytes(document, at, min(stop, at + _CHUNK))


class _Opened:
    """An open file whose descriptor is closed with the object."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str) -> _Opened:
    return _Opened(path)
