"""Chooses the implementation of `attend` and `attend_bwd`: branches call the kernels through this module only.

A new implementation is one file with a `Backend`, and one entry of `BACKENDS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src.kernels import pallas_gpu, xla
from ringjax._src.kernels.cpu import calls as cpu
from ringjax._src.kernels.interface import (
    AttendConfig,
    Backend,
    BlockSizes,
    Case,
    Grads,
    Operands,
    Residuals,
    case_of,
)
from ringjax._src.kernels.platform import refused
from ringjax._src.kernels.tpu import calls as tpu
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.validation import check_choice, check_instance, check_optional

BACKENDS: dict[str, Backend] = {x.name: x for x in (tpu.BACKEND, pallas_gpu.BACKEND, cpu.BACKEND, xla.BACKEND)}

Implementation = Literal["xla", "pallas", "native", "interpret_tpu", "interpret_gpu"]
Target = Literal["tpu", "gpu"]
TARGETS: tuple[Target, ...] = ("tpu", "gpu")  # of Pallas kernels
_INTERPRET = "interpret_"

Given = TypeVar("Given")


def attend(prior: PartialSoftmax, operands: Operands, config: AttendConfig) -> PartialSoftmax:
    """Merges the attention of the selected query rows to key rows into `prior`, see `interface`."""
    return _run(config, case_of(operands), prior, lambda backend, prior: backend.attend(prior, operands, config))


def attend_bwd(grads: Grads, operands: Operands, residuals: Residuals, config: AttendConfig) -> Grads:
    """Adds the gradients of the selected rows to `grads`, see `interface`."""

    def run(backend: Backend, grads: Grads) -> Grads:
        return backend.attend_bwd(grads, operands, residuals, config)

    return _run(config, case_of(operands), grads, run)


def delta(dout: Array, out: Array, dtype: jnp.dtype, config: AttendConfig) -> Array:
    """Computes ``sum(dout * out)`` over the last axis in this dtype, as `attend_bwd` needs it."""
    case = Case(out.dtype.name, out.shape[-1], out.size // out.shape[-1], 1)
    return _run(config, case, (dout, out), lambda backend, given: backend.delta(*given, dtype), is_update=False)


def check_implementation(implementation: str | None, block_sizes: BlockSizes | None) -> None:
    """Checks the arguments `implementation` and `block_sizes`."""
    names = dict.fromkeys(backend.implementation for backend in BACKENDS.values())
    choices = (*names, *(f"{_INTERPRET}{target}" for target in TARGETS))
    check_optional(check_choice, "implementation", implementation, choices, "None or one of")
    if block_sizes is not None:
        check_instance("block_sizes", block_sizes, BlockSizes)
        if implementation is not None and implementation != "pallas" and not implementation.startswith(_INTERPRET):
            raise ValueError(
                f"`block_sizes` must be None with `implementation={implementation!r}`, which has no Pallas kernels, "
                f"got {block_sizes}."
            )


def _run(
    config: AttendConfig, case: Case, given: Given, run: Callable[[Backend, Given], Any], *, is_update: bool = True
) -> Any:  # noqa: ANN401
    """Runs a backend. If several are possible, the platform that the program is lowered for decides.

    Args:
        config: Options of the call.
        case: What decides which backends are possible.
        given: What is updated, or else the arguments.
        run: Runs a backend on `given`.
        is_update: Whether the result has the types of `given`.
    """
    name = config.implementation
    if config.is_interpreted:
        assert name is not None
        candidates = [BACKENDS[name.removeprefix(_INTERPRET)]]
    else:
        is_candidate = lambda x: x.platform is not None if name is None else x.implementation == name  # noqa: E731
        candidates = [x for x in BACKENDS.values() if is_candidate(x)]
    reasons = {x: x.why_not(case, config) for x in candidates}
    possible = [x for x in candidates if not reasons[x]]
    if name is not None and not possible:
        raise NotImplementedError(
            f"`implementation={name!r}` does not support this case: {'; '.join(reasons.values())}. "
            '`implementation="xla"` does, and None chooses it automatically.'
        )
    if config.is_interpreted or any(x.platform is None for x in possible):
        return run(possible[0], given)
    xla_run = functools.partial(run, xla.BACKEND)
    if not possible:
        return xla_run(given)

    def refuse(given: Given) -> Any:  # noqa: ANN401
        unsupported = "".join(f" ({reason})" for reason in reasons.values() if reason)
        platforms = " and ".join(x.platform for x in candidates if x.platform)
        interpreted = ', or "interpret_tpu" or "interpret_gpu" to test the kernels there' if name == "pallas" else ""
        reason = (
            f'`implementation={name!r}` has kernels for {platforms} only{unsupported}; use None or "xla" '
            f"elsewhere{interpreted}."
        )
        stub = refused(given, reason)
        return stub if is_update else xla_run(stub)

    # the first backend of a platform wins
    branches = {x.platform: functools.partial(run, x) for x in reversed(possible) if x.platform}
    return lax.platform_dependent(given, **branches, default=xla_run if name is None else refuse)
