"""Keeps compiled kernels in a folder that no other user of the machine can tamper with.

A folder is opened once, without following a link, and checked on its descriptor; whatever it holds is looked up
relative to that descriptor. A library is opened once, too: its owner, its mode and its digest are those of the
descriptor that the dynamic loader then reads, so nothing can be exchanged between the check and the load.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pathlib
import platform
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Generator, Iterator
from typing import Self

_DIGITS = 24  # of a digest in a name
_RESERVED = 16 << 20  # bytes that compiling takes at most: temporary files and the library
_LEFTOVER_SECONDS = 3600.0
_POLL_SECONDS = 0.1
_SILENT_SECONDS = 10.0  # the lock is touched every second
_WORK = "work-"
_OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# The loader takes a name that it has seen for the same library, so the number of a loaded descriptor is not given away.
_loaded: list[int] = []


def digest(*parts: bytes) -> str:
    """Returns the digest of `parts`, as it appears in names of libraries."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:_DIGITS]


def folders() -> Generator[pathlib.Path, None, None]:
    """Yields the folders to try: the user's cache, one among temporary files, a new one, removed afterwards."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # "~" without a home
    if cache.is_absolute():
        yield cache / "ringjax"
    yield pathlib.Path(tempfile.gettempdir(), f"ringjax-{os.geteuid()}")
    with tempfile.TemporaryDirectory(prefix="ringjax-", ignore_cleanup_errors=True) as folder_of_process:
        yield pathlib.Path(folder_of_process)


class Lock:
    """A file that one process locks, and touches while it works.

    A stopped process keeps its lock, so others do not wait for a process that has not touched the file for a while.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_held = False  # by this process; otherwise another process may do the same work

    def wait(self, seconds: float) -> None:
        """Takes the lock, unless it is held for so long, by a silent process, or files cannot be locked here."""
        import fcntl  # noqa: PLC0415 - importing ringjax works without it

        deadline, touched, since = time.monotonic() + seconds, None, time.monotonic()
        while not self.is_held:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_held = True
            except BlockingIOError:
                now, last = time.monotonic(), os.fstat(self._descriptor).st_mtime_ns
                if last != touched:
                    touched, since = last, now
                if now >= deadline or now - since > _SILENT_SECONDS:
                    return
                time.sleep(_POLL_SECONDS)
            except OSError:
                return

    def touch(self) -> None:
        """Signals waiting processes that this one is working."""
        if self.is_held:
            os.utime(self._descriptor)


class Folder:
    """A folder that only this user and root can write to, held open; created for this user alone if it is missing.

    Raises:
        OSError: If it is a link, belongs to another user, can be written by others, or is mounted noexec.
    """

    def __init__(self, path: pathlib.Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._descriptor = os.open(path, _OPEN | os.O_DIRECTORY)
        try:
            _check_owner(self._descriptor, str(path))
            if os.fstatvfs(self._descriptor).f_flag & getattr(os, "ST_NOEXEC", 0):
                raise PermissionError(f"{path} is mounted noexec")
        except OSError:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def find(self, name: str) -> int | None:
        """Returns a descriptor of ``<name>-<digest of its bytes>.so``, or None if it is missing, damaged or unsafe."""
        for found in os.listdir(self._descriptor):
            if found.startswith(f"{name}-") and found.endswith(".so"):
                with contextlib.suppress(OSError):
                    library = self._open(found)
                    if found == f"{name}-{digest(_content(library))}.so":
                        return library
                    os.close(library)
        return None

    @contextlib.contextmanager
    def locked(self, seconds: float) -> Iterator[Lock]:
        """Waits at most `seconds` until no other process compiles here."""
        descriptor = os.open("lock", _OPEN | os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self._descriptor)
        try:
            lock = Lock(descriptor)
            lock.wait(seconds)
            yield lock
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def work(self) -> Iterator[pathlib.Path]:
        """Yields a new folder for the compiler's files and removes it afterwards; removes those of ended processes."""
        self._remove_leftovers()
        name = f"{_WORK}{_this_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        os.mkdir(name, 0o700, dir_fd=self._descriptor)
        try:
            self._reserve(f"{name}/reserved")
            yield self.path / name
        finally:
            shutil.rmtree(name, ignore_errors=True, dir_fd=self._descriptor)

    def keep(self, made: pathlib.Path, name: str) -> int:
        """Moves the library `made` out of the folder that `work` gave, and returns an open descriptor of it."""
        inside = f"{made.parent.name}/{made.name}"
        os.chmod(inside, 0o700, dir_fd=self._descriptor)  # whatever the umask
        library = self._open(inside)
        here = self._descriptor
        os.replace(inside, f"{name}-{digest(_content(library))}.so", src_dir_fd=here, dst_dir_fd=here)
        return library

    def _open(self, name: str) -> int:
        """Returns a descriptor of a regular file that only this user and root can write to."""
        descriptor = os.open(name, _OPEN | os.O_NONBLOCK, dir_fd=self._descriptor)
        try:
            if not stat.S_ISREG(_check_owner(descriptor, name).st_mode):
                raise PermissionError(f"{name} is not a regular file")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _reserve(self, name: str) -> None:
        """Raises OSError if a compiler would run out of space, for which each compiler has another message."""
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._descriptor)
        with open(descriptor, "wb", buffering=0) as file:
            for _ in range(_RESERVED >> 20):
                if file.write(bytes(1 << 20)) != 1 << 20:
                    raise OSError(f"{self.path} has less than {_RESERVED >> 20} MiB of free space")
        os.unlink(name, dir_fd=self._descriptor)

    def _remove_leftovers(self) -> None:
        """Removes working folders of processes that have ended, and others (also of other machines) after an hour."""
        for name in os.listdir(self._descriptor):
            if name.startswith((_WORK, "tmp")):  # "tmp": of earlier versions
                with contextlib.suppress(OSError):
                    found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
                    if _is_orphan(name) or time.time() - found.st_mtime > _LEFTOVER_SECONDS:
                        shutil.rmtree(name, ignore_errors=True, dir_fd=self._descriptor)


def load(library: int) -> ctypes.CDLL:
    """Loads the library of an open descriptor, even if its name has changed; raises OSError if that fails."""
    path = f"/proc/self/fd/{library}"
    try:
        if os.path.exists(path):
            loaded = ctypes.CDLL(path)
            _loaded.append(library)
            return loaded
        with tempfile.TemporaryDirectory(prefix="ringjax-") as folder:  # of this user alone
            copied = pathlib.Path(folder, "ringjax.so")
            copied.write_bytes(_content(library))
            return ctypes.CDLL(str(copied))
    finally:
        if library not in _loaded:
            os.close(library)


def _check_owner(descriptor: int, name: str) -> os.stat_result:
    """Raises PermissionError unless only this user and root can write to what is open."""
    found = os.fstat(descriptor)
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{name} belongs to another user ({found.st_uid})")
    if found.st_mode & 0o022:
        raise PermissionError(f"{name} can be written by other users (mode {stat.S_IMODE(found.st_mode):o})")
    return found


def _content(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def _this_machine() -> str:
    """Names the machine and its process ids: a home folder may be shared by machines and containers."""
    with contextlib.suppress(OSError):
        return digest(platform.node().encode(), os.readlink("/proc/self/ns/pid").encode())[:8]
    return digest(platform.node().encode())[:8]


def _is_orphan(name: str) -> bool:
    """Returns whether a working folder was created on this machine by a process that has ended."""
    machine, _, rest = name.removeprefix(_WORK).partition("-")
    process = rest.partition("-")[0]
    if not name.startswith(_WORK) or machine != _this_machine() or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it runs as another user
        pass
    return False
