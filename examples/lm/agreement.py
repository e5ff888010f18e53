"""Makes all processes of a run fail together: if one stopped alone, the others would wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.flags import RunError, UserError


def highest(number: int) -> int:
    """Returns the maximum of `number` over all processes; every process must call it."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.array([number], np.int32))))


@contextlib.contextmanager
def all_or_none(what: str) -> Iterator[None]:
    """Runs a block that may raise `UserError` or `RunError`; if it does in one process, it does in all of them."""
    failure: UserError | RunError | None = None
    try:
        yield
    except (UserError, RunError) as error:
        failure = error
    code = highest(0 if failure is None else 2 if isinstance(failure, UserError) else 1)
    if failure is not None:
        raise failure
    if code:
        raise (UserError if code == 2 else RunError)(f"another process could not {what}; see its message")
