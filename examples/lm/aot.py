"""Devices that are not there, for compiling a training step for them: `--aot v5e:4x4`, `--aot H100`.

Needs the compiler of those devices (`make aot-tpu` and `make aot-cuda` install them), not the devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import jax

from lm.display import GIB, device_bytes, memory_line
from lm.flags import UserError, as_user_error
from ringjax.aot import ENVIRONMENT, Target, ring_mesh, target_named


def target_devices(name: str) -> tuple[Target, list[jax.Device]]:
    """A target and its devices, as far as a compiler is concerned."""
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    with as_user_error(ValueError):
        target = target_named(name)
    try:
        return target, list(ring_mesh(target).devices.flat)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        remedy = f"`make aot-{target.platform} AOT=--help` puts it into .venv-aot-{target.platform}-*"
        raise UserError(
            f"--aot {name}: the compiler for {target.platform} is not installed ({remedy}): {reason}"
        ) from error


def report(target: Target, compiled: jax.stages.Compiled, say: Callable[[str], None]) -> bool:
    """Says what the program needs of a device, and returns whether it has that."""
    needed, there = sum(device_bytes(compiled)), target.memory_bytes
    fits = needed <= there
    say(memory_line(compiled))
    say(f"{target.devices} x {target.name}: {'fits' if fits else 'DOES NOT FIT'} in {there / GIB:.1f} GiB of a device")
    return fits
