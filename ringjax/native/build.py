"""Compiles the kernels for this machine, once, with the C++ compiler at hand, and makes them known to XLA.

Nothing happens at import. The library is kept in a folder of the user's cache, under a name that says what it was made
from: the sources, the headers of jaxlib, the compiler, and what the compiler knows of this processor.
"""

from __future__ import annotations

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

import jax

SWITCH = "RINGJAX_NATIVE"  # "0" leaves CPUs to plain XLA
TARGETS = ("ringjax_forward", "ringjax_backward", "ringjax_delta")
_SOURCES = ("attention.cc", "backward.h", "forward.h", "rows.h", "vectors.h")
_COMPILERS = ("c++", "g++", "clang++")
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
    names = os.environ.get("CXX"), *_COMPILERS
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        return f"there is no C++ compiler (CXX, {', '.join(_COMPILERS)})"
    try:
        library = ctypes.CDLL(str(_library(compiler)))
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except subprocess.CalledProcessError as error:
        return f"compiling them failed: {next(iter(error.stderr.strip().splitlines()), error)}"
    except Exception as error:  # whatever it is, plain XLA can compute
        return f"compiling them failed: {error}"
    return ""


def _library(compiler: str) -> pathlib.Path:
    """The compiled library, made if it is not there yet."""
    here, include = pathlib.Path(__file__).parent, jax.ffi.include_dir()
    flags, macros = _flags(compiler)
    headers = pathlib.Path(include, "xla", "ffi", "api").glob("*.h")
    made_from = [path.read_bytes() for path in (*(here / name for name in _SOURCES), *sorted(headers))]
    digest = hashlib.sha256(b"\0".join([repr(flags).encode(), macros.encode(), *made_from])).hexdigest()
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ringjax")
    library = folder / f"ringjax-{digest[:24]}.so"
    if _is_own(folder) and os.path.exists(library):
        return library
    library = _writable(folder) / library.name
    # written beside it and then renamed: processes that come at the same time each make the same whole file
    with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so", delete=False) as made:
        unfinished = pathlib.Path(made.name)
    try:
        _run([compiler, *flags, f"-I{include}", "-shared", str(here / _SOURCES[0]), "-o", str(unfinished)])
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)
    return library


def _flags(compiler: str) -> tuple[list[str], str]:
    """Flags for the processor at hand, and the compiler's macros, which tell its version and the vectors."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = ["-std=c++17", "-O3", "-march=native" if is_x86 else "-mcpu=native", "-ffp-contract=fast", "-fPIC", "-w"]
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    if is_x86 and "__clang__" not in macros:
        flags.append("--param=avoid-fma-max-bits=0")  # else GCC rounds some sums twice a step and others once
    return flags, macros


def _is_own(folder: pathlib.Path) -> bool:
    """Whether nobody else can put a library there."""
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _writable(folder: pathlib.Path) -> pathlib.Path:
    """This folder, made for the user alone, or where that cannot be one among temporary files."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(folder) and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return pathlib.Path(tempfile.mkdtemp(prefix="ringjax-"))


def _run(command: list[str]) -> str:
    run = functools.partial(subprocess.run, text=True, errors="replace", timeout=_PATIENCE, stdin=subprocess.DEVNULL)
    return run(command, check=True, capture_output=True).stdout
