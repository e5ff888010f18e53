"""Arrays inside a `jax.shard_map`: over which mesh axes they vary."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array, lax


def varying_axes(x: Array) -> frozenset[str]:
    """The mesh axes over which `x` differs from device to device, as far as its type says."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def match_vma(arrays: Sequence[Array], ids: Array | None) -> tuple[tuple[Array, ...], Array | None]:
    """The arrays and ids, each made to vary over all axes over which one does; loops keep types apart that differ."""
    given = [*arrays] if ids is None else [*arrays, ids]
    axes = frozenset[str]().union(*map(varying_axes, given))
    return tuple(_varying(x, axes) for x in arrays), None if ids is None else _varying(ids, axes)


def _varying(x: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def shaped_like(x: Array, *others: Array) -> jax.ShapeDtypeStruct:
    """The shape and dtype of `x`, varying over all axes over which it or another array does."""
    axes = frozenset[str]().union(*map(varying_axes, (x, *others)))
    if not axes:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    kind = type(jax.typeof(x).manual_axis_type)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind(varying=axes))
