"""Output files: checked before any work is done, replaced atomically."""

from __future__ import annotations

import os
import pathlib
import stat
import tempfile


def check_output(path: pathlib.Path, suffixes: tuple[str, ...] = ()) -> None:
    """Checks that the file of `--output` can be written and has one of the suffixes (if any), without writing it.

    Raises:
        ValueError: If the name has another suffix, or the path cannot be written: it is a directory or a pipe, its
            directory does not exist, or permissions forbid it.

    Example:
        >>> check_output(pathlib.Path("picture.gif"), (".png", ".svg"))
        Traceback (most recent call last):
        ...
        ValueError: --output must name a .png or .svg file, got 'picture.gif'
    """
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"--output must name a {' or '.join(suffixes)} file, got {str(path)!r}")
    try:
        _try_to_open(_target(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"--output must be a file that can be written, got {str(path)!r}: {reason}") from None


def write_output(path: pathlib.Path, data: bytes) -> None:
    """Writes a file atomically: if that fails, an existing file is left unchanged.

    Raises:
        OSError: If the file cannot be written.
    """
    target = _target(path)
    if target.exists() and not target.is_file():
        target.write_bytes(data)  # a device such as /dev/null
        return
    part = target.with_name(f".ringjax-{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _target(path: pathlib.Path) -> pathlib.Path:
    """Resolves symbolic links, which are kept when their target is replaced."""
    return pathlib.Path(os.path.realpath(path))


def _try_to_open(path: pathlib.Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise ValueError("it is a directory")
    if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        raise ValueError("it is neither a regular file nor a device")
    if mode is not None:
        with path.open("ab"):
            pass
    if mode is None or stat.S_ISREG(mode):
        with tempfile.TemporaryFile(dir=path.parent):  # the file is replaced, so its directory must be writable
            pass
