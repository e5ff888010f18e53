"""Verifies checkpoints: fingerprints of arrays, a checksum of the facts, and the classification of read errors.

A *fingerprint* is the sum of a hash of (bits, position) over the elements of an array, modulo 2**32. The sum does not
depend on the order, so it is the same on every mesh; the position makes swapped rows or elements detectable.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Tree = Any
Facts = dict[str, Any]

# Errors that orbax and tensorstore raise for content that was read and is wrong. All other errors stop the run.
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, EOFError)
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_DAMAGE_CODES = {"NOT_FOUND", "OUT_OF_RANGE", "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT"}
_OTHER_CODES = {"CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL"}
_OTHER_CODES |= {"RESOURCE_EXHAUSTED", "ABORTED", "UNIMPLEMENTED", "UNAVAILABLE"}
_SYSTEM_ERRORS = ("EACCES", "EPERM", "EIO", "ESTALE", "ENOMEM", "EMFILE", "ENFILE", "ENOTCONN", "ETIMEDOUT", "ENODEV")
_SYSTEM_TEXTS = tuple(os.strerror(getattr(errno, name)).lower() for name in _SYSTEM_ERRORS)


class Summary(NamedTuple):
    """Fingerprint of each array of a state, and whether all values are finite."""

    fingerprint: list[int]
    is_finite: bool


def summarize(tree: Tree) -> Summary:
    """Returns the fingerprints of all arrays and whether all values are finite, in one compiled pass."""
    hashes, is_finite = _summarize(tree)
    return Summary(np.asarray(hashes).tolist(), bool(is_finite))


def fingerprint(tree: Tree) -> list[int]:
    """Returns a hash of the bits, positions, dtype and shape of each array: the same on every mesh."""
    return summarize(tree).fingerprint


@jax.jit
def _summarize(tree: Tree) -> tuple[Array, Array]:
    leaves = jax.tree.leaves(tree)
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = [jnp.isfinite(x).all() for x in floats]
    return jnp.stack([_hash(x) for x in leaves]), jnp.all(jnp.stack(finite)) if finite else jnp.bool_(True)


def _hash(x: Array) -> Array:
    start = jnp.uint32(zlib.crc32(f"{x.dtype}{x.shape}".encode()))
    kind = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = (
        x if x.dtype == bool else lax.bitcast_convert_type(x, kind)
    )  # 8-byte elements become two words along a new axis
    bits = bits.astype(jnp.uint32)
    index, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        # modulo 2**32: in larger arrays, swapping elements exactly 2**32 apart is not detected
        index += lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return _mix(bits + _mix(index + start)).sum(dtype=jnp.uint32) + start


def _mix(x: Array) -> Array:
    """Mixes all bits (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def signature(tree: Tree) -> dict[str, str]:
    """Returns the dtype and shape of each array, keyed by its path."""
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in jax.tree.leaves_with_path(tree)}


def digest(facts: Facts) -> int:
    """Returns a checksum of the facts, excluding the stored checksum."""
    return zlib.crc32(json.dumps({k: v for k, v in facts.items() if k != "digest"}, sort_keys=True).encode())


class Diagnosis(NamedTuple):
    """Why a checkpoint could not be read, and whether its content is wrong or missing."""

    is_damage: bool
    reason: str


def diagnose(error: BaseException, folder: pathlib.Path) -> Diagnosis:
    """Classifies an error that was raised while reading the checkpoint in a folder.

    Only wrong or missing content is damage. Files that cannot be read (EACCES, EIO, ESTALE), too little memory and
    unknown errors are not.
    """
    *_, root = _causes(error)
    if not isinstance(root, (*_DAMAGE, *_MISSING)) or any(map(_is_system_error, _related(error))):
        return Diagnosis(False, reason(error))
    unreadable = _unreadable_file(folder)
    return Diagnosis(False, reason(unreadable)) if unreadable else Diagnosis(True, reason(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes, the root cause last."""
    while error is not None:
        yield error
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__


def _related(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, its causes and their contexts."""
    if error is not None:
        yield error
        members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        for other in (*members, error.__cause__ or error.__context__):
            yield from _related(other)


def _is_system_error(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, jax.errors.JaxRuntimeError)):
        return True
    if isinstance(error, OSError):
        return not isinstance(error, _MISSING)
    text = str(error)
    code = re.match(r"([A-Z_]+):", text)
    if code and code[1] in _DAMAGE_CODES | _OTHER_CODES:
        return code[1] in _OTHER_CODES
    return any(known in text.lower() for known in _SYSTEM_TEXTS)


def _unreadable_file(folder: pathlib.Path) -> OSError | None:
    """Returns the error if a file in this folder cannot be read; libraries may report such a file as missing."""

    def fail(error: OSError) -> None:
        raise error

    try:
        for parent, _, files in os.walk(folder, onerror=fail):
            for name in files:
                file = os.open(os.path.join(parent, name), os.O_RDONLY | os.O_NONBLOCK)
                try:
                    os.read(file, 1)
                finally:
                    os.close(file)
    except _MISSING:
        return None
    except OSError as error:
        return error
    return None


def reason(error: BaseException) -> str:
    """Returns the root cause in one line; for system errors, only the text of the system."""
    *_, root = _causes(error)
    text = str(root)
    for known in ("No space left on device", "File too large", "Disk quota exceeded", *_SYSTEM_TEXTS):
        if known.lower() in text.lower():
            return known.lower()
    return " ".join(text.split())[:200] or type(root).__name__
