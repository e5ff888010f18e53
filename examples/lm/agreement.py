"""Errors that all processes of a run report together: one that stopped alone would leave the others waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.flags import RunError, UserError


def highest(number: int) -> int:
    """Returns the highest of the numbers that the processes pass; all of them call it."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.array([number], np.int32))))


@contextlib.contextmanager
def all_or_none(what: str) -> Iterator[None]:
    """Runs a block that may raise `UserError` or `RunError`; if it does on one process, the others raise it too."""
    failure: UserError | RunError | None = None
    try:
        yield
    except (UserError, RunError) as error:
        failure = error
    code = highest(0 if failure is None else 2 if isinstance(failure, UserError) else 1)
    if failure is not None:
        raise failure
    if code:
        raise (UserError if code == 2 else RunError)(f"another process could not {what}: see its message")
