"""The devices that share a sequence: a mesh and the roles of its axes."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax._src.comm.layout import layout_for, layout_named, positions
from ringjax._src.comm.ring_comm import STRATEGIES, AxisName, StrategyName
from ringjax._src.validation import check_choice, check_instance, check_int, check_optional, check_positions, shown


@dataclasses.dataclass(frozen=True)
class RingInfo:
    """The ring of an attention call, as needed inside `jax.shard_map`."""

    axis_name: AxisName
    axis_size: int
    layout: str
    strategy: StrategyName
    memory_budget: int | None
    head_axis: AxisName | None
    head_shards: int
    platform: str


@dataclasses.dataclass(frozen=True)
class Ring:
    """Devices that share a sequence, for `dilated_attention(..., ring=ring)`.

    See [Ring Attention](https://arxiv.org/abs/2310.01889).

    Args:
        mesh: The device mesh, or None for the ambient mesh set by `jax.set_mesh`.
        axis_name: The mesh axis, or tuple of axes, over which the sequence is sharded.
        layout: Order of the sequence over the devices: ``"contiguous"``, or ``"zigzag"``, which balances causal work.
            Use `to_layout` to reorder arrays.
        batch_axis: The mesh axis, or tuple of axes, over which the batch is sharded, or None.
        head_axis: The mesh axis, or tuple of axes, over which the heads are sharded, or None.
        strategy: How branches obtain the keys and values of other devices: ``"ring"`` rotates them hop by hop,
            ``"all_gather"`` gathers them at once, and ``"auto"`` chooses per branch (see `plan`).
        memory_budget: Bytes available on each device for attention and its gradient, or None for no limit.

    Raises:
        ValueError: If `mesh` is not a mesh; if an axis is not a name or tuple of names, is not in the mesh, or is used
            twice; if `layout` or `strategy` is not one of its choices; or if `memory_budget` is below 1.

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
        """Returns the mesh, or the ambient mesh if none was given.

        Raises:
            ValueError: If no mesh was given and none is set, or the ambient mesh lacks one of the axes.
        """
        if self.mesh is not None:
            return self.mesh
        ambient = jax.sharding.get_abstract_mesh()
        if ambient.empty:
            raise ValueError("`mesh` must be given if no mesh is set by `jax.set_mesh`, got None.")
        self._check_axes(ambient)
        return ambient

    def size(self, name: str) -> int:
        """Returns the number of devices along ``"axis_name"``, ``"batch_axis"`` or ``"head_axis"``."""
        check_choice("name", name, ("axis_name", "batch_axis", "head_axis"))
        shape = self.resolve().shape
        return math.prod(shape[axis] for axis in axes(getattr(self, name)))

    def spec(self) -> PartitionSpec:
        """Returns the partition spec of query, key, value and output."""
        return PartitionSpec(self.batch_axis, self.axis_name, self.head_axis, None)

    def info(self) -> RingInfo:
        """Returns the description of the ring that code inside `jax.shard_map` uses."""
        return RingInfo(
            self.axis_name,
            self.size("axis_name"),
            layout_for(self.layout, self.size("axis_name")),
            self.strategy,
            self.memory_budget,
            self.head_axis,
            self.size("head_axis"),
            self.platform(),
        )

    def platform(self) -> str:
        """Returns the platform of the devices, for which `memory_budget` holds: ``"cpu"``, ``"tpu"`` or ``"cuda"``."""
        mesh = self.resolve()
        return _platform(mesh.devices.flat[0].platform) if isinstance(mesh, Mesh) else abstract_platform(mesh)

    def check(self, query: Array, key: Array, value: Array, ids: Array | None) -> None:
        """Checks that global arrays can be sharded over the ring.

        Raises:
            ValueError: If the length is not a multiple of the number of chunks, batch or heads do not divide evenly,
                or an array is on other devices or has another sharding than the ring requires.
        """
        ring_size = self.size("axis_name")
        multiple = layout_named(layout_for(self.layout, ring_size)).multiple(ring_size)
        length = query.shape[1]
        if length % multiple:
            raise ValueError(
                f"`query` length must be a multiple of {multiple} for layout {self.layout!r} on a ring of {ring_size}, "
                f"got {length}: pad the inputs with `to_layout` and pass `seq_len={length}`."
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
        """Checks that batch and heads divide evenly over their mesh axes."""
        for name, what, count in (("batch_axis", "batch", batch), ("head_axis", "key/value heads", kv_heads)):
            if count % self.size(name):
                raise ValueError(
                    f"{what} must divide evenly over the {self.size(name)} devices of `{name}` "
                    f"{getattr(self, name)!r}, got {count}."
                )

    def _check_devices(self, name: str, x: Array) -> None:
        """Checks that a committed array is on the devices of the ring."""
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
        explicit = explicit_axes(mesh)
        if explicit and mesh.size > 1 and (given.mesh.empty or not _same_spec(given.spec, spec, x.ndim, explicit)):
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
    """Checks the options of a ring; `names` maps argument names, such as ``"axis_name"``, to mesh axes."""
    layout_named(layout)
    check_choice("strategy", strategy, tuple(STRATEGIES))
    check_optional(check_int, "memory_budget", memory_budget)
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


def abstract_platform(mesh: AbstractMesh) -> str:
    """Returns the platform of an abstract mesh, or the default platform if the mesh does not name one."""
    device = mesh.abstract_device
    return _platform(jax.default_backend() if device is None else device.platform)


def _platform(name: str) -> str:
    return "cuda" if name in ("gpu", "cuda", "rocm") else name if name == "tpu" else "cpu"


def axes(name: AxisName | None) -> tuple[str, ...]:
    """Returns the mesh axes of an axis argument as a tuple."""
    return () if name is None else (name,) if isinstance(name, str) else tuple(name)


def explicit_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """Returns the explicit axes of a mesh, those that are part of array types."""
    return {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}


def stored_positions(ring: Ring | None, length: int) -> Array:
    """Returns the position in the sequence of each stored row; `length` includes padding."""
    if ring is None:
        return jnp.arange(length, dtype=jnp.int32)
    size = ring.size("axis_name")
    return positions(layout_for(ring.layout, size), length, size)


def _check_like_query(name: str, x: Array, query: Array) -> None:
    if any(isinstance(a, jax.core.Tracer) or not isinstance(a, jax.Array) for a in (x, query)):
        return
    given, expected = x.sharding, query.sharding
    if not isinstance(given, NamedSharding) or not isinstance(expected, NamedSharding):
        return
    if not given.is_equivalent_to(expected, x.ndim):
        raise ValueError(f"`{name}` must be sharded like `query`, got {given.spec} and {expected.spec}.")


def _same_spec(given: PartitionSpec, expected: PartitionSpec, ndim: int, explicit: set[str]) -> bool:
    """Returns whether two specs agree on the explicit axes."""
    kept = lambda spec, i: [a for a in axes(spec[i]) if a in explicit] if i < len(spec) else []  # noqa: E731
    return all(kept(given, i) == kept(expected, i) for i in range(ndim))
