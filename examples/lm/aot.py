"""Compiles a training step ahead of time for a TPU or GPU topology: `--aot v5e:4x4`, `--aot H100`.

This needs the compiler of the target (`make aot-tpu` and `make aot-cuda` install it), but no device.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import jax

from lm.display import GIB, device_bytes, memory_line
from lm.flags import UserError, as_user_error
from ringjax.aot import ENVIRONMENT, Target, ring_mesh, target_named


def target_devices(name: str) -> tuple[Target, list[jax.Device]]:
    """Returns a target and its compile-only devices."""
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    with as_user_error(ValueError):
        target = target_named(name)
    try:
        return target, list(ring_mesh(target).devices.flat)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        remedy = f"`make aot-{target.platform} AOT=--help` installs it into .venv-aot-{target.platform}-*"
        raise UserError(
            f"--aot {name}: the compiler for {target.platform} is not installed ({remedy}): {reason}"
        ) from error


def report(target: Target, compiled: jax.stages.Compiled, say: Callable[[str], None]) -> bool:
    """Prints the memory that the program needs per device, and returns whether it fits."""
    needed, available = sum(device_bytes(compiled)), target.memory_bytes
    fits = needed <= available
    say(memory_line(compiled))
    verdict = "fits" if fits else "DOES NOT FIT"
    say(f"{target.devices} x {target.name}: {verdict} in the {available / GIB:.1f} GiB of a device")
    return fits
