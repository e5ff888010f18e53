"""Names, sizes, kinds and devices of mesh axes, and the options of rings over them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax._src.comm.devices import device_of_kind
from ringjax._src.comm.layout import layout_named
from ringjax._src.comm.ring_comm import STRATEGIES, AxisName, StrategyName
from ringjax._src.validation import check_choice, check_int, check_optional, shown


def abstract_device(mesh: AbstractMesh) -> str:
    """Returns the name of the devices of an abstract mesh, or of the default devices if the mesh does not name any."""
    if mesh.abstract_device is not None:
        return device_of_kind(mesh.abstract_device.platform, mesh.abstract_device.device_kind)
    first = jax.devices()[0]
    return device_of_kind(first.platform, first.device_kind)


def inner_size(name: AxisName | None, sizes: Mapping[str, int]) -> int | None:
    """Returns the number of devices on the last of several mesh axes, given the sizes of axes; None for one axis."""
    used = [axis for axis in axes(name) if sizes[axis] > 1]
    return sizes[used[-1]] if len(used) > 1 else None


def axes(name: AxisName | None) -> tuple[str, ...]:
    """Returns the mesh axes of an axis argument as a tuple."""
    return () if name is None else (name,) if isinstance(name, str) else tuple(name)


def explicit_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """Returns the explicit axes of a mesh, those that are part of array types."""
    return {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}


def reshard_explicit(x: Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Array:
    """Shards an array over the explicit axes of a spec; the compiler shards it over the automatic ones."""
    explicit = explicit_axes(mesh)
    kept = (tuple(axis for axis in axes(name) if axis in explicit) or None for name in spec)
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))


def can_become(given: PartitionSpec, expected: PartitionSpec, ndim: int, explicit: set[str]) -> bool:
    """Returns whether each axis is sharded over the expected explicit mesh axes, or over none."""
    kept = lambda spec, i: [a for a in axes(spec[i]) if a in explicit] if i < len(spec) else []  # noqa: E731
    return all(kept(given, i) in ([], kept(expected, i)) for i in range(ndim))


def check_ring_options(
    names: dict[str, AxisName | None],
    layout: str,
    strategy: StrategyName,
    memory_budget: int | None,
    *,
    is_optional: bool = False,
) -> None:
    """Checks the options of a ring.

    `names` maps argument names, such as ``"axis_name"``, to mesh axes; `is_optional` permits no ``"axis_name"``.
    """
    layout_named(layout)
    check_choice("strategy", strategy, tuple(STRATEGIES))
    check_optional(check_int, "memory_budget", memory_budget)
    for name, value in names.items():
        is_absent = value is None and (is_optional or name != "axis_name")
        is_axis = isinstance(value, str) or (
            isinstance(value, tuple) and value and all(isinstance(x, str) for x in value)
        )
        if not is_absent and not is_axis:
            raise ValueError(f"`{name}` must be a mesh axis or a tuple of them, got {shown(value)}.")
    used = [axis for value in names.values() for axis in axes(value)]
    if len(set(used)) != len(used):
        *others, last = (f"`{name}`" for name in names)
        raise ValueError(f"{', '.join(others)} and {last} must not share a mesh axis, got {used}.")
