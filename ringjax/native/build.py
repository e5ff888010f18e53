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

import jax

SWITCH = "RINGJAX_NATIVE"  # "0" leaves CPUs to plain XLA
TARGETS = ("ringjax_forward", "ringjax_backward", "ringjax_delta")
_SOURCES = ("attention.cc", "backward.h", "forward.h", "rows.h", "vectors.h")
_COMPILERS = ("c++", "g++", "clang++")
_PATIENCE = 300  # seconds; compiling takes about 10


def why_not() -> str:
    """Why there are no kernels for this CPU, or "" where there are: compiled and loaded by the first call."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    return _loaded()


@functools.cache
def _loaded() -> str:
    compiler = next(
        (path for name in (os.environ.get("CXX"), *_COMPILERS) if name and (path := shutil.which(name))), None
    )
    if compiler is None:
        return f"there is no C++ compiler (CXX, {', '.join(_COMPILERS)})"
    try:
        library = ctypes.CDLL(str(_library(compiler)))
    except subprocess.CalledProcessError as error:
        return f"compiling them failed: {next(iter(error.stderr.strip().splitlines()), error)}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"compiling them failed: {error}"
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return ""


def _library(compiler: str) -> pathlib.Path:
    """The compiled library, made if it is not there yet."""
    here = pathlib.Path(__file__).parent
    command = [compiler, *_flags(), f"-I{jax.ffi.include_dir()}"]
    processor = _run(
        [*command, "-dM", "-E", "-x", "c++", os.devnull]
    )  # the compiler's macros: its version, the vectors
    headers = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api").glob("*.h")
    made_from = [path.read_bytes() for path in (*(here / name for name in _SOURCES), *sorted(headers))]
    digest = hashlib.sha256(b"\0".join([repr(command[1:-1]).encode(), processor.encode(), *made_from])).hexdigest()
    library = _folder() / f"ringjax-{digest[:24]}.so"
    if not library.exists():
        # written beside it and then renamed: processes that come at the same time each make the same whole file
        with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so", delete=False) as made:
            unfinished = pathlib.Path(made.name)
        try:
            _run([*command, "-shared", str(here / _SOURCES[0]), "-o", str(unfinished)])
            unfinished.replace(library)
        finally:
            unfinished.unlink(missing_ok=True)
    return library


def _flags() -> list[str]:
    """Optimised for the processor at hand; on x86 the compiler's whole vectors are used where it has them."""
    machine = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    return ["-std=c++17", "-O3", machine, "-ffp-contract=fast", "-fPIC", "-w"]


def _folder() -> pathlib.Path:
    """Where libraries are kept: a folder of the user alone, or one that is gone with the machine's temporary files."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(home, "ringjax")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) or any(folder.iterdir()):
            return folder
    except OSError:
        pass
    return pathlib.Path(tempfile.mkdtemp(prefix="ringjax-"))


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL
    )
    return done.stdout
