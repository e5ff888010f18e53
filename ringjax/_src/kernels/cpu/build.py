"""Compiles the CPU kernels for this machine with its C++ compiler, once, and registers them with XLA.

Nothing happens at import. The library is stored in a folder of the user's cache (see `cache.py`). Its name identifies
its inputs (the sources, the headers of jaxlib, the compiler, and the processor features that the compiler reports) and
its contents, as loading a damaged library would end the process:

    ringjax-<digest of its inputs>-<digest of its bytes>.so
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable

import jax

from ringjax._src.kernels.cpu import cache

SWITCH = "RINGJAX_NATIVE"  # "0" selects plain XLA on CPUs
NO_COMPILER = "there is no C++ compiler (CXX, c++, g++, clang++)"
TARGETS = ("ringjax_forward", "ringjax_backward", "ringjax_delta")
_SOURCES = ("attention.cc", "backward.h", "forward.h", "passes.h", "pool.h", "rows.h", "vectors.h")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-w"]
SECONDS = "RINGJAX_COMPILE_SECONDS"  # time limit, after which plain XLA is used
_SECONDS = 60.0  # compiling takes about 10
_PROBE_SECONDS = 10.0  # to query the macros of a compiler
_lock = threading.Lock()  # two threads may not compile and register at once
_warned: set[str] = set()
_logger = logging.getLogger("ringjax")


def why_not() -> str:
    """Returns why there are no kernels for this CPU, or "" if there are: the first call compiles and loads them."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    with _lock:
        return _loaded()


def warn_once(reason: str) -> None:
    """Warns that plain XLA replaces the kernels, unless the user requested it."""
    if reason in _warned or os.environ.get(SWITCH) == "0":
        return
    _warned.add(reason)
    warnings.warn(
        f"CPU kernels are unavailable: {reason}. Plain XLA computes dilated attention instead, up to 2.7 times slower. "
        f"Set {SWITCH}=0 to use it without this warning.",
        stacklevel=2,
    )


@functools.cache
def _loaded() -> str:
    """Loads and registers the kernels; returns "", or the reason why that failed."""
    if os.name != "posix":
        return "they are compiled on Linux and macOS only"
    reason = NO_COMPILER
    deadline = time.monotonic() + _seconds()
    for compiler in _compilers():
        if time.monotonic() >= deadline:
            break
        try:
            library = _library(compiler, deadline)
            for name in TARGETS:
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
            return ""
        except subprocess.CalledProcessError as error:
            reason = f"compiling them failed: {next(iter(error.stderr.strip().splitlines()), error)}"
        except subprocess.TimeoutExpired:
            reason = f"{compiler} did not finish in time ({SECONDS} sets the limit, {_SECONDS:.0f} by default)"
        except Exception as error:  # plain XLA can compute in any case
            reason = f"compiling or loading them failed: {error}"
    return reason


def _seconds() -> float:
    given = os.environ.get(SECONDS, "")
    try:
        seconds = float(given or _SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"`{SECONDS}` must be a positive number of seconds, got {given!r}.")
    return seconds


def _compilers() -> list[str]:
    """Returns the compilers of this machine, the user's choice first, without duplicates of one program."""
    found: dict[str, str] = {}
    for name in (os.environ.get("CXX"), *_COMPILERS):
        if name and (path := shutil.which(name)):
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _library(compiler: str, deadline: float) -> ctypes.CDLL:
    """Loads the library from the first usable folder, and compiles it there if it is missing."""
    here = pathlib.Path(__file__).parent
    flags, macros = _flags(compiler, deadline)
    headers = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api").glob("*.h")
    inputs = [path.read_bytes() for path in (*(here / name for name in _SOURCES), *sorted(headers))]
    name = f"ringjax-{cache.digest(repr(flags).encode(), macros.encode(), *inputs)}"
    problems = []
    with contextlib.closing(cache.folders()) as folders:
        for path in folders:
            try:
                with cache.Folder(path) as folder:
                    found = folder.find(name)
                    return cache.load(_compiled(folder, name, [compiler, *flags], deadline) if found is None else found)
            except OSError as error:  # unsafe, full, read-only or noexec: the next one may do
                problems.append(str(error))
    raise OSError("; ".join(problems))


def _compiled(folder: cache.Folder, name: str, command: list[str], deadline: float) -> int:
    """Compiles into a folder unless another process has done so meanwhile, and returns the library's descriptor."""
    _logger.info(
        "Compiling the CPU kernels with %s, or waiting for a process that does, which takes about 10 seconds. "
        "They are kept in %s.",
        command[0],
        folder.path,
    )
    with folder.locked(deadline - time.monotonic()) as lock:
        if (found := folder.find(name)) is not None:
            return found
        with folder.work() as work:
            made, source = work / "library", pathlib.Path(__file__).parent / _SOURCES[0]
            arguments = [f"-I{jax.ffi.include_dir()}", "-shared", str(source), "-o", str(made)]
            _run([*command, *arguments], deadline - time.monotonic(), lock.touch, TMPDIR=str(work))
            return folder.keep(made, name)


def _flags(compiler: str, deadline: float) -> tuple[list[str], str]:
    """Returns flags for this processor, as far as the compiler knows them, and its macros: version and vectors."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = [*_FLAGS]
    # without the second, GCC rounds some sums twice a step and others once; clang ignores it
    for wish in ("-march=native" if is_x86 else "-mcpu=native", "--param=avoid-fma-max-bits=0" if is_x86 else ""):
        with contextlib.suppress(subprocess.CalledProcessError):
            if wish:
                _macros(compiler, [*flags, wish], deadline)
                flags.append(wish)
    return flags, _macros(compiler, flags, deadline)


def _macros(compiler: str, flags: list[str], deadline: float) -> str:
    seconds = min(_PROBE_SECONDS, deadline - time.monotonic())
    return _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull], seconds)


def _run(command: list[str], seconds: float, tick: Callable[[], None] | None = None, **environment: str) -> str:
    """Returns the output of a command; after `seconds`, it is killed with all of its child processes.

    `tick` is called about every second. Raises `CalledProcessError` or `TimeoutExpired` of `subprocess`.
    """
    deadline = time.monotonic() + seconds
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"LC_ALL": "C"} | environment,
        start_new_session=True,
    ) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, error = process.communicate(timeout=max(0.0, min(1.0, deadline - time.monotonic())))
                    break
                if time.monotonic() >= deadline:
                    raise subprocess.TimeoutExpired(command, seconds)
                if tick is not None:
                    tick()
        except BaseException:  # also an interrupt, which does not reach another session
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, error)
    return out
