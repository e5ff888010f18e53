"""Writes the files of a run such that a failed or interrupted write loses nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any

from lm.flags import RunError

Record = dict[str, Any]


class Metrics:
    """Stores the records of a run as JSON lines.

    Records that could not be written are kept in memory and written with the next one. A partial line, left by a full
    disk or a power loss, is removed before anything is appended.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._size, self._pending = 0, b""  # bytes of complete records in the file, and bytes to append

    def begin(self, step: int) -> tuple[list[Record], str]:
        """Keeps the records up to a step and removes later ones, which a resumed run writes again.

        Returns:
            The remaining records, and a message for the user ("" if all lines were valid).

        Raises:
            RunError: If the file cannot be read or modified.
        """
        try:
            if self.path.exists() and not self.path.is_file():  # reading a FIFO would block
                raise RunError(f"{self.path} must be a file")
            content = self.path.read_bytes() if self.path.exists() else b""
            records, self._size, is_torn = _read(content, step)
            if self._size < len(content):
                os.truncate(self.path, self._size)
        except OSError as error:
            raise RunError(f"{self.path} cannot be used: {error.strerror}") from error
        torn = f"{self.path}: line {len(records) + 1} is not a valid record; it is removed with everything after it"
        return records, torn if is_torn else ""

    def add(self, record: Record) -> None:
        """Appends a record; on `OSError`, it is written with the next one."""
        self._pending += json.dumps(record).encode() + b"\n"
        self.flush()

    def flush(self, *, to_disk: bool = False) -> None:
        """Writes pending records, and with `to_disk` forces them to disk; on `OSError`, they remain pending."""
        if not self._pending and not to_disk:
            return
        with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb") as file:
            self._size = min(self._size, os.fstat(file.fileno()).st_size)  # the file may have been truncated
            file.truncate(self._size)  # remove what a failed write left
            file.seek(self._size)
            file.write(self._pending)
            file.flush()
            if to_disk:
                os.fsync(file.fileno())
        self._size, self._pending = self._size + len(self._pending), b""


def _read(content: bytes, step: int) -> tuple[list[Record], int, bool]:
    """Returns the records up to a step, their size in bytes, and whether an invalid line follows."""
    records: list[Record] = []
    size = 0
    for line in content.splitlines(keepends=True):
        record = None
        with contextlib.suppress(ValueError, RecursionError):  # includes invalid UTF-8
            record = json.loads(line)
        if not line.endswith(b"\n") or not isinstance(record, dict) or not isinstance(record.get("step"), int):
            return records, size, True
        if record["step"] > step:
            break
        records.append(record)
        size += len(line)
    return records, size, False


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file atomically; a symbolic link at `path` is replaced, not followed.

    Raises:
        OSError: If the file cannot be written; an earlier file is then unchanged.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        with open(partial, "xb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
