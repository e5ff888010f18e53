"""Where compiled kernels are kept: no other user can put code there, and what hangs or fails is passed over."""

import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from cases import NEEDS_KERNELS

from ringjax._src.kernels.cpu import build, cache

pytestmark = NEEDS_KERNELS

NAME = "ringjax-0123"


def put(folder: pathlib.Path, content: bytes = b"good") -> pathlib.Path:
    """Writes a library whose name says what it holds."""
    library = folder / f"{NAME}-{cache.digest(content)}.so"
    library.write_bytes(content)
    library.chmod(0o700)
    return library


def found(path: pathlib.Path) -> bytes | None:
    with cache.Folder(path) as folder:
        descriptor = folder.find(NAME)
        if descriptor is None:
            return None
        with open(descriptor, "rb") as file:
            file.seek(0)
            return file.read()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "ringjax"
    path.mkdir(mode=0o700)
    return path


def give_away(path: pathlib.Path, monkeypatch) -> None:
    """Makes a file or folder that of another user: in truth as root, and else by a change of our own id."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)


# ---------------------------------------------------------------------------------------------------------- other users


def test_a_library_in_a_folder_of_our_own_is_found(folder):
    put(folder)
    assert found(folder) == b"good"


def test_a_folder_behind_a_link_is_refused(folder, tmp_path):
    put(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OSError):
        found(tmp_path / "link")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_is_refused(folder, mode):
    put(folder)
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=r"can be written by other users \(mode"):
        found(folder)


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    put(folder)
    give_away(folder, monkeypatch)
    with pytest.raises(PermissionError, match="belongs to another user"):
        found(folder)


def test_a_library_of_another_user_is_passed_over(folder, monkeypatch):
    library = put(folder)
    with cache.Folder(folder) as opened:
        give_away(library, monkeypatch)
        assert opened.find(NAME) is None


def test_libraries_that_are_links_pipes_damaged_or_writable_by_others_are_passed_over(folder, tmp_path):
    library = put(folder)
    library.chmod(0o720)
    assert found(folder) is None
    library.write_bytes(b"goo")
    library.chmod(0o700)
    assert found(folder) is None
    library.unlink()
    library.symlink_to(put(tmp_path))
    assert found(folder) is None
    library.unlink()
    os.mkfifo(library, 0o700)  # opening it must not wait for a writer
    assert found(folder) is None


def test_a_folder_that_is_exchanged_while_it_is_looked_up_is_never_trusted(folder, tmp_path):
    """Another user who owns the parent exchanges the folder: for one of his own, and for a link to it."""
    put(folder, b"good")
    bad, aside = tmp_path / "bad", tmp_path / "aside"
    bad.mkdir()
    bad.chmod(0o777)
    put(bad, b"evil")
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                folder.rename(aside)
                bad.rename(folder)
                folder.rename(bad)
                folder.symlink_to(bad)
                folder.unlink()
            with contextlib.suppress(OSError):
                aside.rename(folder)

    thread = threading.Thread(target=exchange)
    thread.start()
    answers = []
    try:
        deadline = time.monotonic() + 60
        while len(answers) < 300 or (b"good" not in answers and time.monotonic() < deadline):
            try:
                answers.append(found(folder))
            except OSError as error:
                answers.append(type(error).__name__)
    finally:
        stop.set()
        thread.join()
    assert b"evil" not in answers
    assert b"good" in answers


@pytest.fixture
def real(tmp_path) -> pathlib.Path:
    """A copy of the library that this process has loaded."""
    assert build.why_not() == ""
    copy = tmp_path / "real.so"
    shutil.copyfile(f"/proc/self/fd/{cache._loaded[0]}", copy)
    return copy


@pytest.mark.parametrize("has_proc", [True, False])
def test_what_was_checked_is_what_is_loaded(folder, real, has_proc, monkeypatch, tmp_path):
    library = put(folder, real.read_bytes())
    with cache.Folder(folder) as opened:
        descriptor = opened.find(NAME)
    library.unlink()
    library.write_bytes(b"not a library")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    if not has_proc:
        monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert isinstance(cache.load(descriptor), ctypes.CDLL)
    assert not list((tmp_path / "temporary").iterdir())


# ------------------------------------------------------------------------------------------------ a compiler of our own


class Compiler:
    """A compiler that keeps a list of its calls, and makes a copy of the real library unless told otherwise."""

    def __init__(self, folder: pathlib.Path, made: pathlib.Path) -> None:
        self.path, self._calls, self._made = folder / "compiler", folder / "calls", made
        self.does('for last; do :; done; cp "$MADE" "$last"')

    def does(self, compiling: str, probing: str = "echo '#define A 1'") -> None:
        lines = [
            "#!/bin/sh",
            f"MADE={self._made}",
            f'case "$*" in *" -E "*) {probing}; exit 0;; esac',
            f"echo called >> {self._calls}",
            compiling,
        ]
        self.path.write_text("\n".join(lines) + "\n")
        self.path.chmod(0o755)

    @property
    def calls(self) -> int:
        return self._calls.read_text().count("called") if self._calls.exists() else 0

    def library(self, seconds: float = 60) -> ctypes.CDLL:
        return build._library(str(self.path), time.monotonic() + seconds)


@pytest.fixture
def compiler(tmp_path, real, monkeypatch) -> Compiler:
    for name in ("cache", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(cache, "_RESERVED", 1 << 20)
    return Compiler(tmp_path, real)


def kept(tmp_path: pathlib.Path) -> list[str]:
    """The folders that hold libraries, under the temporary one of a test."""
    return sorted(str(x.parent.relative_to(tmp_path)) for x in tmp_path.glob("*/ringjax*/*.so"))


TEMPORARY = f"temporary/ringjax-{os.geteuid()}"


def test_a_library_is_compiled_once_and_announced_in_one_line(compiler, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="ringjax")
    for _ in range(2):
        compiler.library()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ringjax"]
    assert line.startswith(f"Compiling the CPU kernels with {compiler.path}")
    assert line.endswith(f"They are kept in {tmp_path / 'cache' / 'ringjax'}.")
    assert compiler.calls == 1 and kept(tmp_path) == ["cache/ringjax"]


def test_the_temporary_folder_is_not_read_where_the_cache_can_be_used(compiler, tmp_path):
    (tmp_path / "cache").rename(tmp_path / "away")
    (tmp_path / "cache").write_text("a file in the place of the folder")
    compiler.library()
    assert kept(tmp_path) == [TEMPORARY]
    (tmp_path / "cache").unlink()
    compiler.library()
    assert compiler.calls == 2 and kept(tmp_path) == ["cache/ringjax", TEMPORARY]


def test_a_library_can_be_written_by_its_user_only_whatever_the_umask(compiler, tmp_path):
    before = os.umask(0)
    try:
        compiler.library()
        compiler.library()
    finally:
        os.umask(before)
    (library,) = (tmp_path / "cache" / "ringjax").glob("*.so")
    assert library.stat().st_mode & 0o777 == 0o700 and compiler.calls == 1


def test_threads_and_processes_that_begin_together_compile_once(compiler, tmp_path):
    compiler.does('sleep 0.3; for last; do :; done; cp "$MADE" "$last"')
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # a lock belongs to an open file: threads are like processes
        libraries = list(pool.map(lambda _: compiler.library(), range(4)))
    assert len(libraries) == 4 and compiler.calls == 1


# ------------------------------------------------------------------------------------------ folders that cannot be used


def test_a_folder_that_others_can_write_is_followed_by_the_next(compiler, tmp_path):
    (tmp_path / "cache" / "ringjax").mkdir()
    (tmp_path / "cache" / "ringjax").chmod(0o777)
    compiler.library()
    assert kept(tmp_path) == [TEMPORARY]


def test_a_full_folder_is_followed_by_the_next(compiler, tmp_path, monkeypatch):
    reserve = cache.Folder._reserve

    def full(self, name):
        if self.path.is_relative_to(tmp_path / "cache"):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(self, name)

    monkeypatch.setattr(cache.Folder, "_reserve", full)
    compiler.library()
    assert compiler.calls == 1 and kept(tmp_path) == [TEMPORARY]
    assert [x.name for x in (tmp_path / "cache" / "ringjax").iterdir()] == ["lock"]


def test_a_folder_mounted_noexec_is_followed_by_the_next(compiler, tmp_path, monkeypatch):
    statvfs = os.fstatvfs

    class NoExec:
        f_flag = os.ST_NOEXEC

    def mounted(descriptor):
        inside = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(tmp_path / "cache")
        return NoExec if inside else statvfs(descriptor)

    monkeypatch.setattr(os, "fstatvfs", mounted)
    compiler.library()
    assert compiler.calls == 1 and kept(tmp_path) == [TEMPORARY]


def test_a_library_that_cannot_be_loaded_is_followed_by_a_folder_of_this_process_alone(compiler, tmp_path, monkeypatch):
    """Both folders forbid it, as some security modules do."""
    load, refused = cache.load, []

    def forbidden(descriptor):
        if len(refused) < 2:
            refused.append(os.close(descriptor))
            raise OSError("failed to map segment from shared object")
        return load(descriptor)

    monkeypatch.setattr(cache, "load", forbidden)
    assert isinstance(compiler.library(), ctypes.CDLL)
    assert [x.name for x in (tmp_path / "temporary").iterdir()] == [f"ringjax-{os.geteuid()}"]  # the last one is gone


def test_without_any_folder_the_reasons_are_named(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "folders", lambda: (tmp_path / x for x in ("cache/ringjax", "other")))
    for path in ("cache/ringjax", "other"):
        (tmp_path / path).mkdir()
        (tmp_path / path).chmod(0o777)
    with pytest.raises(OSError, match=r"cache/ringjax can be written by .* other can be written by|.*; .*"):
        compiler.library()


# ------------------------------------------------------------------------------------------------------ what is hanging


class Clock:
    """Time that passes by sleeping."""

    def __init__(self, sleeping) -> None:
        self.now, self._sleeping = 0.0, sleeping

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._sleeping(self.now)


def waited(folder, monkeypatch, holding) -> tuple[bool, float]:
    """Whether a lock that another holds is taken, and after how long; `holding(lock, now)` is what the other does."""
    with open(folder / "lock", "w") as other, cache.Folder(folder) as opened:
        fcntl.flock(other, fcntl.LOCK_EX)
        clock = Clock(lambda now: holding(other, now))
        monkeypatch.setattr(cache, "time", clock)
        with opened.locked(60) as lock:
            return lock.is_held, clock.now


def test_a_process_that_was_stopped_while_it_compiled_is_not_waited_for(folder, monkeypatch):
    is_held, seconds = waited(folder, monkeypatch, lambda lock, now: None)
    assert not is_held and 10 <= seconds < 11


def test_a_process_that_is_compiling_is_waited_for(folder, monkeypatch):
    def compiling(lock, now):
        os.utime(lock.fileno(), (now, now))
        if now > 30:
            fcntl.flock(lock, fcntl.LOCK_UN)

    is_held, seconds = waited(folder, monkeypatch, compiling)
    assert is_held and 30 <= seconds < 31


def test_a_process_that_compiles_for_ever_is_waited_for_until_the_limit(folder, monkeypatch):
    is_held, seconds = waited(folder, monkeypatch, lambda lock, now: os.utime(lock.fileno(), (now, now)))
    assert not is_held and 60 <= seconds < 61


def is_alive(process: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("probing", ["echo '#define A 1'", "sleep 1000"])
def test_a_compiler_that_hangs_is_killed_with_all_that_it_started(compiler, tmp_path, probing, monkeypatch):
    compiler.does(f"sleep 1000 & echo $! > {tmp_path}/child; wait", probing)
    monkeypatch.setattr(build, "_compilers", lambda: [str(compiler.path)])
    monkeypatch.setenv("RINGJAX_COMPILE_SECONDS", "1")
    reason = build._loaded.__wrapped__()
    assert reason == f"{compiler.path} did not finish in time (RINGJAX_COMPILE_SECONDS sets the limit, 60 by default)"
    if (tmp_path / "child").exists():
        child = int((tmp_path / "child").read_text())
        deadline = time.monotonic() + 20
        while is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_alive(child)
    assert not list(tmp_path.glob("*/ringjax*/work-*"))


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_the_limit_must_be_a_positive_number(seconds, monkeypatch):
    monkeypatch.setenv("RINGJAX_COMPILE_SECONDS", seconds)
    with pytest.raises(ValueError, match=f"`RINGJAX_COMPILE_SECONDS` must be a positive number .*, got '{seconds}'"):
        build._loaded.__wrapped__()


def test_what_killed_compilers_left_is_removed(folder, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = cache._this_machine()
    names = {
        f"work-{here}-{gone.pid}-a": 0,
        f"work-{here}-{os.getpid()}-b": 0,  # at work
        f"work-{here}-{os.getpid()}-c": 2,
        "work-elsewhere-1-d": 0,  # at work on another machine
        "work-elsewhere-1-e": 2,
        "tmpabcdef": 2,
    }
    for name, hours in names.items():
        (folder / name).mkdir()
        (folder / name / "cc.s").write_text("half")
        os.utime(folder / name, (time.time() - hours * 3600 - 1,) * 2)
    with cache.Folder(folder) as opened, opened.work() as work:
        assert work.parent == folder and not list(work.iterdir())
    assert sorted(x.name for x in folder.iterdir()) == [f"work-{here}-{os.getpid()}-b", "work-elsewhere-1-d"]
