"""Code for one platform inside programs that are lowered for several.

`jax.lax.platform_dependent` chooses a branch when a program runs, but where a program is exported for several platforms
it lowers every branch for each of them, and a kernel has no lowering for another platform than its own. Here a kernel
is lowered for its own platform only; elsewhere zeros, which no one reads, stand in its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jax.interpreters import batching, mlir

PLATFORMS = ("tpu", "cuda")

Given = TypeVar("Given")


def on_its_platform(call: Callable[..., Sequence[Array]], *arrays: Array, sums: int) -> list[Array]:
    """What `call(*arrays)` gives, traced and lowered only for the platforms that have kernels.

    Args:
        call: Gives arrays of the types of its last `sums` arguments; it closes over no array.
        *arrays: Its arguments.
        sums: How many results it has.
    """
    return _kernel.bind(*arrays, call=call, sums=sums)


def refused(given: Given, reason: str) -> Given:
    """In the place of a computation on a platform that cannot do it: lowering it raises `NotImplementedError`."""
    leaves, tree = jax.tree.flatten(given)
    return jax.tree.unflatten(tree, _refuse.bind(*leaves, reason=reason))


_kernel = core.Primitive("ringjax_kernel")
_kernel.multiple_results = True
_kernel.def_abstract_eval(lambda *avals, call, sums: avals[-sums:])
_kernel.def_impl(lambda *arrays, call, sums: jax.jit(call)(*arrays))


def _run(*arrays: Array, call: Callable[..., Sequence[Array]], sums: int) -> Sequence[Array]:
    return call(*arrays)


def _stand_in(*arrays: Array, call: Callable[..., Sequence[Array]], sums: int) -> list[Array]:
    return [jnp.zeros_like(x) for x in arrays[-sums:]]


def _batched(
    arrays: Sequence[Array], axes: Sequence[int | None], *, call: Callable[..., Sequence[Array]], sums: int
) -> tuple[Any, list[int]]:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    given, last = moved[:-sums], moved[-sums:]
    last = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else x for x, axis in zip(last, axes[-sums:], strict=True)
    ]
    in_axes = [None if axis is None else 0 for axis in axes[:-sums]] + [0] * sums
    return on_its_platform(jax.vmap(call, in_axes=tuple(in_axes)), *given, *last, sums=sums), [0] * sums


batching.primitive_batchers[_kernel] = _batched
mlir.register_lowering(_kernel, mlir.lower_fun(_stand_in))
mlir.register_lowering(_kernel, mlir.lower_fun(_run), platform="tpu")


def _lower_quietly(ctx: Any, *arrays: Any, **how: Any) -> Any:  # noqa: ANN401
    """JAX warns that its Triton lowering is to go; there is nothing that a caller could do about that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return mlir.lower_fun(_run)(ctx, *arrays, **how)


mlir.register_lowering(_kernel, _lower_quietly, platform="cuda")

_refuse = core.Primitive("ringjax_refuse")
_refuse.multiple_results = True
_refuse.def_abstract_eval(lambda *avals, reason: avals)


def _raise(*_: Any, reason: str) -> NoReturn:  # noqa: ANN401
    raise NotImplementedError(reason)


def _refuse_batched(arrays: Sequence[Array], axes: Sequence[int], *, reason: str) -> tuple[Any, Sequence[int]]:
    return _refuse.bind(*arrays, reason=reason), axes


_refuse.def_impl(_raise)
batching.primitive_batchers[_refuse] = _refuse_batched
mlir.register_lowering(_refuse, lambda ctx, *_, reason: _raise(reason=reason))
