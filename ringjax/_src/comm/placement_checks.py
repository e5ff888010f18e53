"""Checks of where the arrays of an attention call are."""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ringjax._src.validation import shown


def check_devices(name: str, x: Array, mesh: Mesh | AbstractMesh) -> None:
    """Checks that a committed array is on the devices of a mesh.

    Raises:
        ValueError: If it is on other devices.
    """
    if not isinstance(mesh, Mesh) or mesh.size == 1 or not isinstance(x, jax.Array):
        return
    if isinstance(x, jax.core.Tracer) or not x.committed or x.sharding.device_set == set(mesh.devices.flat):
        return
    found = sorted(map(str, x.sharding.device_set))
    raise ValueError(
        f"`{name}` must be on the {mesh.size} devices of the ring's mesh, got an array of shape {x.shape} on "
        f"{shown(found)}."
    )


def check_like_query(name: str, x: Array, query: Array) -> None:
    """Checks that an array has the sharding of the query, if both are known.

    Raises:
        ValueError: If its sharding differs.
    """
    if any(isinstance(a, jax.core.Tracer) or not isinstance(a, jax.Array) for a in (x, query)):
        return
    given, expected = x.sharding, query.sharding
    if not isinstance(given, NamedSharding) or not isinstance(expected, NamedSharding):
        return
    if not given.is_equivalent_to(expected, x.ndim):
        raise ValueError(f"`{name}` must be sharded like `query`, got {given.spec} and {expected.spec}.")
