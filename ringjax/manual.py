"""Arrays inside a `jax.shard_map`: over which mesh axes they vary."""

from __future__ import annotations

import jax
from jax import Array, lax


def varying_axes(x: Array) -> frozenset[str]:
    """The mesh axes over which `x` differs from device to device, as far as its type says."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def alike(*arrays: Array | None) -> tuple[Array | None, ...]:
    """The arrays, each made to vary over all axes over which any of them does; loops keep types apart that differ."""
    axes = frozenset().union(*(varying_axes(x) for x in arrays if x is not None))
    return tuple(None if x is None else _varying(x, axes) for x in arrays)


def _varying(x: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
