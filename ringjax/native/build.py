"""Compiles the kernels for this machine, once, with the C++ compiler at hand, and makes them known to XLA.

Nothing happens at import. The library is kept in a folder of the user's cache, under a name that says what it was made
from (the sources, the headers of jaxlib, the compiler, and what the compiler knows of this processor) and what it
holds, as loading a damaged library would end the process:

    ringjax-<digest of what it was made from>-<digest of its bytes>.so
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator

import jax

SWITCH = "RINGJAX_NATIVE"  # "0" leaves CPUs to plain XLA
NO_COMPILER = "there is no C++ compiler (CXX, c++, g++, clang++)"
TARGETS = ("ringjax_forward", "ringjax_backward", "ringjax_delta")
_SOURCES = ("attention.cc", "backward.h", "forward.h", "rows.h", "vectors.h")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-w"]
_DIGITS = 24  # of a digest in a name
_PATIENCE = 300  # seconds; compiling takes about 10
_lock = threading.Lock()  # two threads may not compile and register at once


def why_not() -> str:
    """Why there are no kernels for this CPU, or "" where there are: compiled and loaded by the first call."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    with _lock:
        return _loaded()


@functools.cache
def _loaded() -> str:
    """The reason why nothing was loaded, or ""; a compiler that cannot is told once, as users would not ask."""
    reason = NO_COMPILER
    for compiler in _compilers():
        try:
            library = ctypes.CDLL(str(_library(compiler)))
            for name in TARGETS:
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
            return ""
        except subprocess.CalledProcessError as error:
            reason = f"compiling them failed: {next(iter(error.stderr.strip().splitlines()), error)}"
        except Exception as error:  # whatever it is, plain XLA can compute
            reason = f"compiling or loading them failed: {error}"
    if reason != NO_COMPILER:
        warnings.warn(f"Plain XLA computes dilated attention on this CPU, slower: {reason}", stacklevel=2)
    return reason


def _compilers() -> list[str]:
    """The compilers of this machine, the one that the user names first; names of the same program count once."""
    found: dict[str, str] = {}
    for name in (os.environ.get("CXX"), *_COMPILERS):
        if name and (path := shutil.which(name)):
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _library(compiler: str) -> pathlib.Path:
    """The compiled library, made if it is not there yet."""
    here, include = pathlib.Path(__file__).parent, jax.ffi.include_dir()
    flags, macros = _flags(compiler)
    headers = pathlib.Path(include, "xla", "ffi", "api").glob("*.h")
    made_from = [path.read_bytes() for path in (*(here / name for name in _SOURCES), *sorted(headers))]
    name = f"ringjax-{_digest(repr(flags).encode(), macros.encode(), *made_from)}"
    for folder in _folders():
        if _is_safe(folder) and (found := _whole(folder, name)):
            return found
    folder = _writable()
    with _one_process_at_a_time(folder):
        if found := _whole(folder, name):
            return found
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = pathlib.Path(work, name)
            _run([compiler, *flags, f"-I{include}", "-shared", str(here / _SOURCES[0]), "-o", str(made)])
            library = folder / f"{name}-{_digest(made.read_bytes())}.so"
            made.replace(library)
        return library


def _whole(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    """A library of this name that holds what it should."""
    for library in folder.glob(f"{name}-*.so"):
        if library.name == f"{name}-{_digest(library.read_bytes())}.so":
            return library
    return None


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:_DIGITS]


def _flags(compiler: str) -> tuple[list[str], str]:
    """Flags for the processor at hand, as far as the compiler knows them, and its macros: version and vectors."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = [*_FLAGS]
    # without the second, GCC rounds some sums twice a step and others once; clang ignores it
    for wish in ("-march=native" if is_x86 else "-mcpu=native", "--param=avoid-fma-max-bits=0" if is_x86 else ""):
        with contextlib.suppress(subprocess.CalledProcessError):
            if wish:
                _macros(compiler, [*flags, wish])
                flags.append(wish)
    return flags, _macros(compiler, flags)


def _macros(compiler: str, flags: list[str]) -> str:
    return _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])


def _folders() -> list[pathlib.Path]:
    """Where libraries are kept: in the user's cache, or where that cannot be among temporary files."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # "~" without a home
    user = os.getuid() if hasattr(os, "getuid") else ""
    folders = cache / "ringjax", pathlib.Path(tempfile.gettempdir(), f"ringjax-{user}")
    return [folder for folder in folders if folder.is_absolute()]


def _writable() -> pathlib.Path:
    """The first folder in which this user, and no other, can put a library."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_safe(folder) and os.access(folder, os.W_OK):
                return folder
    return pathlib.Path(tempfile.mkdtemp(prefix="ringjax-"))


def _is_safe(folder: pathlib.Path) -> bool:
    """Whether nobody but this user and root can put a library there."""
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return not hasattr(os, "getuid") or (found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022)


@contextlib.contextmanager
def _one_process_at_a_time(folder: pathlib.Path) -> Iterator[None]:
    """Of several processes that begin together, one compiles and the others wait, where files can be locked."""
    try:
        import fcntl  # noqa: PLC0415 - not everywhere
    except ImportError:
        yield
        return
    with open(folder / "lock", "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> str:
    run = functools.partial(subprocess.run, text=True, errors="replace", timeout=_PATIENCE, stdin=subprocess.DEVNULL)
    return run(command, check=True, capture_output=True).stdout
