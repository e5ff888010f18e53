"""Run-time warnings about NaN and out-of-range values, enabled by `RINGJAX_DEBUG=1`.

The variable is read when a program is traced. If it is unset, programs are unchanged.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

SWITCH = "RINGJAX_DEBUG"
_LOGGER = logging.getLogger("ringjax")


def is_enabled() -> bool:
    """Returns whether programs traced now report."""
    return os.environ.get(SWITCH, "0") not in ("", "0")


def report(argument: str, fault: str, is_bad: Callable[[], Array], *, always: bool = False) -> None:
    """Adds a run-time warning such as "3 values are NaN", with `fault` in place of NaN, if any value is bad.

    `is_bad` returns a boolean mask of the bad values. It is called only if reports are enabled, or `always`.
    """
    if always or is_enabled():
        jax.debug.callback(functools.partial(_warn, argument, fault), jnp.sum(is_bad(), dtype=jnp.int32))


def report_nan(**arrays: Array) -> None:
    """Adds a run-time warning for each of these arrays that contains NaN."""
    for name, x in arrays.items():
        report(name, "NaN", functools.partial(jnp.isnan, x))


def _warn(argument: str, fault: str, count: Array) -> None:
    if int(count):
        _LOGGER.warning("ringjax: `%s`: %d values are %s.", argument, int(count), fault)
