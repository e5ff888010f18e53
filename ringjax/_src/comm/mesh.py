"""The devices that share a sequence: a mesh and its axes, as a value."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax._src.comm.layout import layout_for, layout_named
from ringjax._src.comm.ring_comm import STRATEGIES, AxisName, StrategyName
from ringjax._src.validation import check_choice, check_instance, check_int, check_positions, shown


@dataclasses.dataclass(frozen=True)
class RingPlace:
    """The ring that a call runs on, as seen from inside `jax.shard_map`."""

    axis_name: AxisName
    axis_size: int
    layout: str
    strategy: StrategyName
    memory_budget: int | None
    head_axis: AxisName | None
    head_shards: int

    def positions(self, length: int) -> Array:
        """Original position of each of the rows that this device holds."""
        layout, me = layout_named(self.layout), lax.axis_index(self.axis_name)
        chunk = jnp.arange(length // layout.chunks, dtype=jnp.int32)
        return jnp.concatenate([start + chunk for start in layout.starts(me, self.axis_size, len(chunk))])


@dataclasses.dataclass(frozen=True)
class Ring:
    """Devices that share a sequence, for `dilated_attention(..., ring=ring)`.

    Args:
        mesh: The mesh, or None for the ambient one (`jax.set_mesh`).
        axis_name: The axis over which the sequence is sharded, or several, taken together.
        layout: Order of the sequence over the devices: ``"contiguous"``, or ``"zigzag"``, which shares causal work
            evenly; arrays are put in order by `to_layout`.
        batch_axis: The axis over which the batch is sharded, or several, or None.
        head_axis: The axis over which the heads are sharded, or several, or None.
        strategy: How the branches that need other devices' keys get them: ``"ring"``, hop by hop; ``"all_gather"``, at
            once; ``"auto"``, whichever suits the branch, see `plan`.
        memory_budget: Bytes that each device has for an attention and its gradient, or None.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import jax, ringjax as rj
        >>> ring = rj.Ring(jax.make_mesh((1,), ("ring",)), layout="zigzag")
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 8))
        >>> pattern = rj.DilationPattern((16, 64), (1, 4))
        >>> rj.dilated_attention(q, k, v, pattern, is_causal=True, ring=ring).shape
        (1, 64, 4, 8)
    """

    mesh: Mesh | AbstractMesh | None = None
    _: dataclasses.KW_ONLY
    axis_name: AxisName = "ring"
    layout: str = "contiguous"
    batch_axis: AxisName | None = None
    head_axis: AxisName | None = None
    strategy: StrategyName = "auto"
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("axis_name", "batch_axis", "head_axis"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        names = {"axis_name": self.axis_name, "batch_axis": self.batch_axis, "head_axis": self.head_axis}
        check_ring_options(names, self.layout, self.strategy, self.memory_budget)
        if self.mesh is not None:
            check_instance("mesh", self.mesh, (Mesh, AbstractMesh))
            self._check_axes(self.mesh)

    def resolve(self) -> Mesh | AbstractMesh:
        """The mesh, ambient if none was given."""
        if self.mesh is not None:
            return self.mesh
        ambient = jax.sharding.get_abstract_mesh()
        if ambient.empty:
            raise ValueError("`mesh` must be given where no mesh is set by `jax.set_mesh`, got None.")
        self._check_axes(ambient)
        return ambient

    def size(self, name: str) -> int:
        """Devices along `axis_name`, `batch_axis` or `head_axis`."""
        check_choice("name", name, ("axis_name", "batch_axis", "head_axis"))
        shape = self.resolve().shape
        return math.prod(shape[axis] for axis in axes(getattr(self, name)))

    def spec(self) -> PartitionSpec:
        """How query, key, value and output are sharded."""
        return PartitionSpec(self.batch_axis, self.axis_name, self.head_axis, None)

    def place(self) -> RingPlace:
        """The ring as seen from inside `jax.shard_map`."""
        return RingPlace(
            self.axis_name,
            self.size("axis_name"),
            layout_for(self.layout, self.size("axis_name")),
            self.strategy,
            self.memory_budget,
            self.head_axis,
            self.size("head_axis"),
        )

    def check(self, query: Array, key: Array, value: Array, ids: Array | None) -> None:
        """Checks that whole arrays fit on the ring."""
        ring_size = self.size("axis_name")
        multiple = layout_named(layout_for(self.layout, ring_size)).multiple(ring_size)
        length = query.shape[1]
        if length % multiple:
            raise ValueError(
                f"`query` length must be a multiple of {multiple} for layout {self.layout!r} on a ring of {ring_size}, "
                f"got {length}: pad with `to_layout` and say `seq_len={length}`."
            )
        self.check_divides(batch=key.shape[0], kv_heads=key.shape[2])
        check_positions(key.shape[0] // self.size("batch_axis"), length // ring_size)
        for name, x in (("query", query), ("key", key), ("value", value)):
            self._check_devices(name, x)
            self._check_explicit(name, x)
            _check_like_query(name, x, query)
        if ids is not None:
            self._check_devices("segment_ids", ids)
            self._check_explicit("segment_ids", ids)

    def check_divides(self, *, batch: int, kv_heads: int) -> None:
        """Checks that batch and heads divide over their mesh axes."""
        for name, what, count in (("batch_axis", "batch", batch), ("head_axis", "key/value heads", kv_heads)):
            if count % self.size(name):
                raise ValueError(
                    f"{what} must divide evenly over the {self.size(name)} devices of `{name}` "
                    f"{getattr(self, name)!r}, got {count}."
                )

    def _check_devices(self, name: str, x: Array) -> None:
        """Checks that an array which was put on devices is on those of the ring."""
        mesh = self.resolve()
        if not isinstance(mesh, Mesh) or mesh.size == 1 or not isinstance(x, jax.Array):
            return
        if isinstance(x, jax.core.Tracer) or not x.committed or x.sharding.device_set == set(mesh.devices.flat):
            return
        found = sorted(map(str, x.sharding.device_set))
        raise ValueError(
            f"`{name}` must be on the {mesh.size} devices of the ring's mesh, got an array of shape {x.shape} on "
            f"{shown(found)}."
        )

    def _check_explicit(self, name: str, x: Array) -> None:
        mesh, spec = self.resolve(), PartitionSpec(*self.spec()[: x.ndim])
        given = jax.typeof(x).sharding
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = {axis for axis, kind in types if kind == AxisType.Explicit and mesh.size > 1}
        if explicit and (given.mesh.empty or not _same_spec(given.spec, spec, x.ndim, explicit)):
            found = "no sharding" if given.mesh.empty else given.spec
            raise ValueError(
                f"`{name}` must be sharded as {spec} over an explicit mesh, got {found}: use "
                "`jax.device_put` or `jax.reshard`."
            )

    def _check_axes(self, mesh: Mesh | AbstractMesh) -> None:
        for name in ("axis_name", "batch_axis", "head_axis"):
            for axis in axes(getattr(self, name)):
                if axis not in mesh.axis_names:
                    raise ValueError(f"`{name}` must name axes of the mesh {mesh.axis_names}, got {axis!r}.")


def check_ring_options(
    names: dict[str, AxisName | None], layout: str, strategy: StrategyName, memory_budget: int | None
) -> None:
    """Checks what a ring is made of; `names` holds ``"axis_name"`` and the axes beside it."""
    layout_named(layout)
    check_choice("strategy", strategy, STRATEGIES)
    if memory_budget is not None:
        check_int("memory_budget", memory_budget)
    for name, value in names.items():
        is_absent = value is None and name != "axis_name"
        is_axis = isinstance(value, str) or (
            isinstance(value, tuple) and value and all(isinstance(x, str) for x in value)
        )
        if not is_absent and not is_axis:
            raise ValueError(f"`{name}` must be a mesh axis or a tuple of them, got {shown(value)}.")
    used = [axis for value in names.values() for axis in axes(value)]
    if len(set(used)) != len(used):
        *others, last = (f"`{name}`" for name in names)
        raise ValueError(f"{', '.join(others)} and {last} must not share a mesh axis, got {used}.")


def axes(name: AxisName | None) -> tuple[str, ...]:
    """The axes of a name."""
    return () if name is None else (name,) if isinstance(name, str) else tuple(name)


def _check_like_query(name: str, x: Array, query: Array) -> None:
    if any(isinstance(a, jax.core.Tracer) or not isinstance(a, jax.Array) for a in (x, query)):
        return
    ours, first = x.sharding, query.sharding
    if not isinstance(ours, NamedSharding) or not isinstance(first, NamedSharding):
        return
    if not ours.is_equivalent_to(first, x.ndim):
        raise ValueError(f"`{name}` must be sharded like `query`, got {ours.spec} and {first.spec}.")


def _same_spec(given: PartitionSpec, wanted: PartitionSpec, ndim: int, explicit: set[str]) -> bool:
    """Whether two specs agree on the explicit axes, the only ones that types speak of."""
    kept = lambda spec, i: [a for a in axes(spec[i]) if a in explicit] if i < len(spec) else []  # noqa: E731
    return all(kept(given, i) == kept(wanted, i) for i in range(ndim))
