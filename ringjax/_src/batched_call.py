"""Calls that decide themselves how `jax.vmap` maps them.

JAX maps a sharded computation by adding an unsharded axis to its arrays, which gathers a sharded batch. A
`batched_call` instead creates a new function for arrays with one more leading axis, given how that axis is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from ringjax._src.comm.axes import axes
from ringjax._src.comm.ring_comm import AxisName

ClosedJaxpr = Any  # the name under which JAX annotates it depends on the version

# Mesh axes of each leading axis; None for an axis of a mesh whose shardings the compiler chooses.
Leading = tuple[AxisName | None, ...]


class BatchedFunction(Hashable, Protocol):
    """A function of arrays that share any number of leading axes."""

    def with_leading(self, leading: Leading) -> Callable[..., Sequence[Array]]:
        """Returns the function for arrays with these leading axes; equal arguments give the same object."""

    def differentiable(self, leading: Leading) -> Callable[..., Sequence[Array]]:
        """Returns the same function in a form that `jax.jvp` accepts."""


def batched_call(function: BatchedFunction, leading: Leading, *arrays: Array) -> list[Array]:
    """Calls a function on arrays with these leading axes.

    The traced function is a parameter of the operation, as JAX searches it for meshes and for operations that need to
    know the devices.
    """
    jaxpr = jax.jit(function.with_leading(leading)).trace(*arrays).jaxpr
    return _call.bind(*arrays, jaxpr=jaxpr, function=function, leading=leading)


_call = core.Primitive("ringjax_call")
_call.multiple_results = True
_call.def_abstract_eval(lambda *_, jaxpr, function, leading: jaxpr.out_avals)
_call.def_impl(lambda *arrays, jaxpr, function, leading: jax.jit(core.jaxpr_as_fun(jaxpr))(*arrays))


def _batch(
    axis_data: Any,  # noqa: ANN401
    arrays: Sequence[Array],
    dims: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    function: BatchedFunction,
    leading: Leading,
) -> tuple[list[Array], list[int]]:
    """Moves the mapped axis to the front of all arrays."""
    mapped = [_to_front(x, dim) for x, dim in zip(arrays, dims, strict=True) if dim is not None]
    name = _merged(axis_data.spmd_name) or _merged(_explicit_axes(mapped[0]))
    moved = []
    for x, dim in zip(arrays, dims, strict=True):
        front = jnp.broadcast_to(x, (axis_data.size, *x.shape)) if dim is None else _to_front(x, dim)
        moved.append(_resharded(front, name))
    out = batched_call(function, (name, *leading), *moved)
    return out, [0] * len(out)


def _to_front(x: Array, dim: int) -> Array:
    return x if dim == 0 else jnp.moveaxis(x, dim, 0)


def _merged(names: AxisName | None) -> AxisName | None:
    found = axes(names)
    return found[0] if len(found) == 1 else found or None


def _explicit_axes(x: Array) -> AxisName | None:
    """Returns the explicit mesh axes over which the first axis of an array is sharded."""
    spec = jax.typeof(x).sharding.spec
    return spec[0] if spec else None


def _resharded(x: Array, name: AxisName | None) -> Array:
    """Shards the first axis over explicit mesh axes, if arrays that are mapped with `x` are."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes or _merged(_explicit_axes(x)) == name:
        return x
    if not set(axes(name)) <= set(sharding.mesh.explicit_axes):
        return x
    return jax.reshard(x, sharding.update(spec=jax.P(name, *sharding.spec[1:])))


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    function: BatchedFunction,
    leading: Leading,
) -> tuple[Sequence[Array], Sequence[Array]]:
    given = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(function.differentiable(leading), tuple(primals), tuple(given))


def _lower(
    ctx: mlir.LoweringRuleContext,
    *values: Any,  # noqa: ANN401
    jaxpr: ClosedJaxpr,
    function: BatchedFunction,
    leading: Leading,
) -> Any:  # noqa: ANN401
    # exported programs cannot hold operations whose sharding the compiler chooses
    is_exported = ctx.module_context.lowering_parameters.for_export
    call = function.differentiable(leading) if is_exported else core.jaxpr_as_fun(jaxpr)
    return mlir.lower_fun(call)(ctx, *values)


batching.fancy_primitive_batchers[_call] = _batch
ad.primitive_jvps[_call] = _jvp
mlir.register_lowering(_call, _lower)
