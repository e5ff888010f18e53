"""Locks the folder of a run, so that two runs cannot destroy each other's checkpoints."""

from __future__ import annotations

import errno
import os
import pathlib
import socket
import stat
from collections.abc import Callable

from lm.flags import UserError

try:
    import fcntl
except ImportError:  # not available on this platform
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class FolderLock:
    """Locks the file ``lock`` in a folder until it is released or the process ends, for whatever reason.

    The file is never removed: otherwise a second run could lock a new file of the same name.

    Args:
        folder: Existing folder of the run.
        report: Receives messages for the user.

    Raises:
        UserError: If another run holds the lock, or the file cannot be opened.
    """

    def __init__(self, folder: pathlib.Path, report: Callable[[str], None]) -> None:
        path = folder / "lock"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise UserError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            self._take(path, report)
        except BaseException:
            self.release()
            raise

    def _take(self, path: pathlib.Path, report: Callable[[str], None]) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise UserError(f"{path} must be a regular file")
        unlocked = f"{path.parent} cannot be locked%s: make sure that no other run uses this folder"
        if fcntl is None:
            report(unlocked % "")
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                report(unlocked % f" ({error.strerror})")
                return
            if not isinstance(error, BlockingIOError):
                raise UserError(f"{path} cannot be locked: {error.strerror}") from error
            holder = os.read(self._file, 200).decode(errors="replace").strip() or "another process"
            raise UserError(
                f"{path.parent} is used by another run ({holder}): wait for it to end, or pass another --out"
            ) from error
        try:
            os.truncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError:  # a full disk; the lock is held regardless
            return

    def release(self) -> None:
        """Releases the lock."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
