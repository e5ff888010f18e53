"""Code for one platform inside programs that are lowered for several.

`jax.lax.platform_dependent` chooses a branch when a program runs, but where a program is exported for several platforms
it lowers every branch for each of them, and a kernel has no lowering for another platform than its own. Here a kernel
is lowered for its own platform only; elsewhere zeros, which no one reads, stand in its place.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jax.interpreters import ad, batching, mlir

PLATFORMS = ("tpu", "cuda")  # of Pallas kernels

Given = TypeVar("Given")


def on_its_platform(platform: str, call: Callable[..., Sequence[Array]], *arrays: Array, sums: int) -> list[Array]:
    """What `call(*arrays)` gives, traced and lowered for one platform only.

    Args:
        platform: ``"tpu"``, ``"cuda"`` or ``"cpu"``.
        call: Gives arrays of the types of its last `sums` arguments; it closes over no array.
        *arrays: Its arguments.
        sums: How many results it has.
    """
    return _kernel.bind(*arrays, platform=platform, call=call, sums=sums)


def refused(given: Given, reason: str) -> Given:
    """In the place of a computation on a platform that cannot do it: lowering it raises `NotImplementedError`."""
    leaves, tree = jax.tree.flatten(given)
    return jax.tree.unflatten(tree, _refuse.bind(*leaves, reason=reason))


_kernel = core.Primitive("ringjax_kernel")
_kernel.multiple_results = True
_kernel.def_abstract_eval(lambda *avals, platform, call, sums: avals[-sums:])
_kernel.def_impl(lambda *arrays, platform, call, sums: jax.jit(call)(*arrays))


def _batched(
    arrays: Sequence[Array],
    axes: Sequence[int | None],
    *,
    platform: str,
    call: Callable[..., Sequence[Array]],
    sums: int,
) -> tuple[Any, list[int]]:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    given, last = moved[:-sums], moved[-sums:]
    last = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else x for x, axis in zip(last, axes[-sums:], strict=True)
    ]
    in_axes = [None if axis is None else 0 for axis in axes[:-sums]] + [0] * sums
    return on_its_platform(platform, _mapped(call, tuple(in_axes)), *given, *last, sums=sums), [0] * sums


# the same function for the same call, so that what JAX compiled for it is found again
@functools.lru_cache(maxsize=256)
def _mapped(call: Callable[..., Sequence[Array]], in_axes: tuple[int | None, ...]) -> Callable[..., Sequence[Array]]:
    return jax.vmap(call, in_axes=in_axes)


def _no_derivative(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
    raise NotImplementedError(
        'The kernels have a gradient and no further derivatives: use `implementation="xla"` for second derivatives.'
    )


def _lower(on: str | None) -> Callable[..., Any]:
    """The lowering rule for one platform, or for all others."""

    def rule(ctx: Any, *arrays: Any, platform: str, call: Callable[..., Sequence[Array]], sums: int) -> Any:  # noqa: ANN401
        if platform != on:
            return mlir.lower_fun(lambda *xs: [jnp.zeros_like(x) for x in xs[-sums:]])(ctx, *arrays)
        if platform == "cpu":
            if ctx.module_context.lowering_parameters.for_export:
                raise NotImplementedError(
                    'The kernels on CPU are compiled where they run and cannot be exported: use `implementation="xla"` '
                    "or set RINGJAX_NATIVE=0, to leave CPUs to plain XLA, with kernels on other platforms."
                )
            # over which axes arrays vary does not matter any more, and the call knows nothing of them
            plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
            return mlir.lower_fun(call)(ctx.replace(avals_in=plain, avals_out=plain[-sums:]), *arrays)
        # Kernels on TPU have no 64-bit numbers. JAX warns that its Triton lowering is to go: no caller can help it.
        with jax.enable_x64(False), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
            try:
                return mlir.lower_fun(call)(ctx, *arrays)
            except NotImplementedError as error:
                if "automatically partitioned" not in str(error):
                    raise
                raise NotImplementedError(
                    "Kernels on TPU cannot be partitioned by the compiler: tell how arrays are sharded, by "
                    "`ring=Ring(mesh, batch_axis=...)` (its ring axis may have one device), or use "
                    '`implementation="xla"`.'
                ) from error

    return rule


batching.primitive_batchers[_kernel] = _batched
ad.primitive_jvps[_kernel] = _no_derivative
mlir.register_lowering(_kernel, _lower(None))
for _platform in (*PLATFORMS, "cpu"):
    mlir.register_lowering(_kernel, _lower(_platform), platform=_platform)

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
