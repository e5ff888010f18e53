"""Reports, with `RINGJAX_DEBUG=1`, of what only a running program can know: values out of range, and NaN.

The variable is read when a program is traced. Without it nothing is added to programs.
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
    """Returns whether programs that are traced now report."""
    return os.environ.get(SWITCH, "0") not in ("", "0")


def report(argument: str, fault: str, is_bad: Callable[[], Array]) -> None:
    """Adds a warning to the program: how many values of an argument have a fault, each time that some have.

    Args:
        argument: The name of the argument.
        fault: What is wrong with the values that are counted.
        is_bad: Returns which values are bad, a boolean array; not called unless reports are enabled.
    """
    if is_enabled():
        jax.debug.callback(functools.partial(_warn, argument, fault), jnp.sum(is_bad(), dtype=jnp.int32))


def report_nan(**arrays: Array) -> None:
    """Adds a warning to the program for each of these arrays that holds NaN."""
    for name, x in arrays.items():
        report(name, "NaN", functools.partial(jnp.isnan, x))


def _warn(argument: str, fault: str, count: Array) -> None:
    if int(count):
        _LOGGER.warning("ringjax: `%s`: %d values are %s.", argument, int(count), fault)
