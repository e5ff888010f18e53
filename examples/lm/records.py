"""Files of a run that are written while it trains: a write that fails, or is cut off, costs no more than itself."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any

from lm.flags import RunError

Record = dict[str, Any]


class Metrics:
    """The records of a run as JSON lines in a file.

    What could not be written is kept and written together with the next record. A half-written line, of a full disk or
    of a lost machine, is cut off before anything is added.

    Args:
        path: Of the file.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._size, self._pending = 0, b""  # bytes of whole records in the file, and what is to be added to them

    def begin(self, step: int) -> tuple[list[Record], str]:
        """Keeps the records up to a step and cuts off those after it, which a resumed run writes again.

        Returns:
            The records that are kept, and a line for the user if some of the file could not be read as records.

        Raises:
            RunError: If the file cannot be read or changed.
        """
        try:
            if self.path.exists() and not self.path.is_file():  # a pipe would be waited for
                raise RunError(f"{self.path} must be a file")
            content = self.path.read_bytes() if self.path.exists() else b""
            records, self._size, is_torn = _read(content, step)
            if self._size < len(content):
                os.truncate(self.path, self._size)
        except OSError as error:
            raise RunError(f"{self.path} cannot be used: {error.strerror}") from error
        torn = f"{self.path}: line {len(records) + 1} is not a record; it is cut off, with all that follows"
        return records, torn if is_torn else ""

    def add(self, record: Record) -> None:
        """Appends a record; raises `OSError` if it has to wait for the next one to be written."""
        self._pending += json.dumps(record).encode() + b"\n"
        self.flush()

    def flush(self, *, to_disk: bool = False) -> None:
        """Writes what has waited; raises `OSError` if it still has to. With `to_disk`, a lost machine keeps it."""
        if not self._pending and not to_disk:
            return
        with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb") as file:
            self._size = min(self._size, os.fstat(file.fileno()).st_size)  # somebody may have shortened it
            file.truncate(self._size)  # what a failed write left
            file.seek(self._size)
            file.write(self._pending)
            file.flush()
            if to_disk:
                os.fsync(file.fileno())
        self._size, self._pending = self._size + len(self._pending), b""


def _read(content: bytes, step: int) -> tuple[list[Record], int, bool]:
    """Returns the records up to a step, their size in bytes, and whether a line that is no record ends them."""
    records: list[Record] = []
    size = 0
    for line in content.splitlines(keepends=True):
        record = None
        with contextlib.suppress(ValueError, RecursionError):  # also not UTF-8
            record = json.loads(line)
        if not line.endswith(b"\n") or not isinstance(record, dict) or not isinstance(record.get("step"), int):
            return records, size, True
        if record["step"] > step:
            break
        records.append(record)
        size += len(line)
    return records, size, False


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file that appears whole or not at all; a link in its place is replaced, not followed.

    Raises:
        OSError: If it cannot be written; an earlier file is then as it was.
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
