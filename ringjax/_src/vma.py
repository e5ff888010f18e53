"""Varying manual axes (VMA) of arrays inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array, lax


def varying_axes(x: Array) -> frozenset[str]:
    """Returns the manual mesh axes over which `x` varies, according to its type."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def match_vma(arrays: Sequence[Array], ids: Array | None) -> tuple[tuple[Array, ...], Array | None]:
    """Casts all arrays to the union of their varying manual axes so that they can share a loop carry."""
    axes = frozenset[str]().union(*map(varying_axes, arrays if ids is None else (*arrays, ids)))
    return tuple(_varying(x, axes) for x in arrays), None if ids is None else _varying(ids, axes)


def _varying(x: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def shaped_like(x: Array, *others: Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of `x` with the union of the varying manual axes of all arrays."""
    axes = frozenset[str]().union(*map(varying_axes, (x, *others)))
    if not axes:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    kind = type(jax.typeof(x).manual_axis_type)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind(varying=axes))
