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
Jaxpr = Any  # `jax.extend.core.ClosedJaxpr`, which has no type stub


def on_its_platform(call: Callable[..., Sequence[Array]], *arrays: Array) -> list[Array]:
    """What `call(*arrays)` gives, lowered only for the platforms that have kernels; `call` closes over no array."""
    return _kernel.bind(*arrays, jaxpr=jax.make_jaxpr(call)(*arrays))


def refused(given: Given, reason: str) -> Given:
    """In the place of a computation on a platform that cannot do it: lowering it raises `NotImplementedError`."""
    leaves, tree = jax.tree.flatten(given)
    return jax.tree.unflatten(tree, _refuse.bind(*leaves, reason=reason))


_kernel = core.Primitive("ringjax_kernel")
_kernel.multiple_results = True
_kernel.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
_kernel.def_impl(lambda *arrays, jaxpr: jax.jit(core.jaxpr_as_fun(jaxpr))(*arrays))


def _run(*arrays: Array, jaxpr: Jaxpr) -> list[Array]:
    return core.jaxpr_as_fun(jaxpr)(*arrays)


def _stand_in(*_: Array, jaxpr: Jaxpr) -> list[Array]:
    return [jnp.zeros(aval.shape, aval.dtype) for aval in jaxpr.out_avals]


def _batched(arrays: Sequence[Array], axes: Sequence[int | None], *, jaxpr: Jaxpr) -> tuple[Any, list[int]]:
    call = jax.vmap(core.jaxpr_as_fun(jaxpr), in_axes=tuple(axes))
    return on_its_platform(call, *arrays), [0] * len(jaxpr.out_avals)


batching.primitive_batchers[_kernel] = _batched
mlir.register_lowering(_kernel, mlir.lower_fun(_stand_in))
mlir.register_lowering(_kernel, mlir.lower_fun(_run), platform="tpu")


def _lower_quietly(ctx: Any, *arrays: Any, jaxpr: Jaxpr) -> Any:  # noqa: ANN401
    """JAX warns that its Triton lowering is to go; there is nothing that a caller could do about that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return mlir.lower_fun(_run)(ctx, *arrays, jaxpr=jaxpr)


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
