"""Lowers kernels for their platform only, in programs that are lowered for several platforms.

`jax.lax.platform_dependent` selects a branch when a program runs. If a program is exported for several platforms, every
branch is lowered for each of them, but a kernel can be lowered only for its own platform. For the others, this module
lowers it to zeros, which are never read.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

PLATFORMS = ("tpu", "cuda")  # of Pallas kernels

Given = TypeVar("Given")


def on_its_platform(platform: str, call: Callable[..., Sequence[Array]], *arrays: Array, sums: int) -> list[Array]:
    """Returns ``call(*arrays)``, traced and lowered for one platform only.

    Args:
        platform: ``"tpu"``, ``"cuda"`` or ``"cpu"``.
        call: Returns arrays with the shapes and dtypes of its last `sums` arguments. It must not close over arrays. If
            it has a method ``mapped(in_axes)``, that replaces `jax.vmap`.
        *arrays: Its arguments.
        sums: Number of its results.
    """
    if platform not in (*PLATFORMS, "cpu"):
        raise ValueError(
            f"`platform` must be one of {(*PLATFORMS, 'cpu')}, for which lowerings exist, got {platform!r}."
        )
    return _kernel.bind(*arrays, platform=platform, call=call, sums=sums)


def refused(given: Given, reason: str) -> Given:
    """Returns `given`, for a platform without an implementation: lowering it raises `NotImplementedError`."""
    leaves, tree = jax.tree.flatten(given)
    return jax.tree.unflatten(tree, _unsupported.bind(*leaves, reason=reason))


_kernel = core.Primitive("ringjax_kernel")
_kernel.multiple_results = True
_kernel.def_abstract_eval(lambda *avals, platform, call, sums: avals[-sums:])
_kernel.def_impl(lambda *arrays, platform, call, sums: jax.jit(call)(*arrays))


def _batch_kernel(
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


# cached, because JAX finds compiled programs by the identity of the function
@functools.lru_cache(maxsize=256)
def _mapped(call: Callable[..., Sequence[Array]], in_axes: tuple[int | None, ...]) -> Callable[..., Sequence[Array]]:
    return call.mapped(in_axes) if hasattr(call, "mapped") else jax.vmap(call, in_axes=in_axes)


def _no_derivative(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
    raise NotImplementedError(
        'The kernels support first derivatives only: use `implementation="xla"` for second derivatives.'
    )


def _lower(on: str | None) -> Callable[..., Any]:
    """Returns the lowering rule for one platform, or with None for all others."""

    def rule(ctx: Any, *arrays: Any, platform: str, call: Callable[..., Sequence[Array]], sums: int) -> Any:  # noqa: ANN401
        if platform != on:
            return mlir.lower_fun(lambda *xs: [jnp.zeros_like(x) for x in xs[-sums:]])(ctx, *arrays)
        _warn_if_gathered(ctx)
        if platform == "cpu":
            if ctx.module_context.lowering_parameters.for_export:
                raise NotImplementedError(
                    "The CPU kernels are compiled on the machine that runs them and cannot be exported: use "
                    '`implementation="xla"` or set RINGJAX_NATIVE=0, which uses plain XLA on CPU and kernels elsewhere.'
                )
            # without varying manual axes, which the call does not support and lowering no longer needs
            plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
            return mlir.lower_fun(call)(ctx.replace(avals_in=plain, avals_out=plain[-sums:]), *arrays)
        # TPU kernels have no 64-bit types. JAX warns that its Triton lowering is deprecated: callers cannot avoid that.
        with jax.enable_x64(False), _naming_the_device(ctx, platform), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
            try:
                return mlir.lower_fun(call)(ctx, *arrays)
            except NotImplementedError as error:
                if "automatically partitioned" not in str(error):
                    raise
                raise NotImplementedError(
                    "The TPU compiler cannot partition the kernels on an automatic mesh: use explicit axes, as "
                    "`jax.make_mesh` creates, or pass `ring=Ring(mesh, axis_name=None, batch_axis=...)`."
                ) from error

    return rule


def _warn_if_gathered(ctx: Any) -> None:  # noqa: ANN401
    """Warns if the compiler partitions the program around a kernel, which it then runs on whole arrays."""
    num_devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if num_devices > 1 and not ctx.module_context.lowering_parameters.for_export:
        warnings.warn(
            f"The attention is compiled for {num_devices} devices, but the sharding of its arrays was unknown when it "
            "was traced, so each device computes all of it: place the arrays with `jax.device_put` before `jit`, set "
            "the mesh with `jax.set_mesh`, or pass `ring=`.",
            stacklevel=2,
        )


def _naming_the_device(ctx: Any, platform: str) -> AbstractContextManager[None]:  # noqa: ANN401
    """Names the GPU that a program is lowered for, where `shard_map` does not.

    JAX's Triton lowering uses the device of the abstract mesh, or else a GPU of this process, which may have none.
    """
    given = ctx.module_context.axis_context
    mesh = getattr(given, "mesh", None)
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else getattr(given, "device_assignment", None)
    is_named = jax.sharding.get_abstract_mesh().abstract_device is not None
    if platform != "cuda" or is_named or not devices:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=devices[0].device_kind, num_cores=None, platform=devices[0].platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


batching.primitive_batchers[_kernel] = _batch_kernel
ad.primitive_jvps[_kernel] = _no_derivative
mlir.register_lowering(_kernel, _lower(None))
for _platform in (*PLATFORMS, "cpu"):
    mlir.register_lowering(_kernel, _lower(_platform), platform=_platform)

_unsupported = core.Primitive("ringjax_unsupported")
_unsupported.multiple_results = True
_unsupported.def_abstract_eval(lambda *avals, reason: avals)


def _raise(*_: Any, reason: str) -> NoReturn:  # noqa: ANN401
    raise NotImplementedError(reason)


def _batch_unsupported(arrays: Sequence[Array], axes: Sequence[int], *, reason: str) -> tuple[Any, Sequence[int]]:
    return _unsupported.bind(*arrays, reason=reason), axes


_unsupported.def_impl(_raise)
batching.primitive_batchers[_unsupported] = _batch_unsupported
mlir.register_lowering(_unsupported, lambda ctx, *_, reason: _raise(reason=reason))
