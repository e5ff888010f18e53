"""The devices that share a sequence: a mesh and the roles of its axes."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Int, Shaped

from ringjax._src.comm.axes import (
    abstract_device,
    axes,
    can_become,
    check_ring_options,
    explicit_axes,
    inner_size,
    reshard_explicit,
)
from ringjax._src.comm.devices import device_of_kind
from ringjax._src.comm.layout import (
    CONTIGUOUS,
    check_fill,
    checked_axis,
    from_layout,
    layout_for,
    layout_named,
    positions,
    stored_on_host,
    to_layout,
)
from ringjax._src.comm.placement_checks import check_devices, check_like_query
from ringjax._src.comm.ring_comm import AxisName, StrategyName
from ringjax._src.validation import (
    MOST_POSITIONS,
    check_bool,
    check_choice,
    check_instance,
    check_int,
    check_is_array,
    check_positions,
    shown,
)


@dataclasses.dataclass(frozen=True)
class RingInfo:
    """The ring of an attention call, as needed inside `jax.shard_map`."""

    axis_name: AxisName | None
    axis_size: int
    layout: str
    strategy: StrategyName
    memory_budget: int | None
    head_axis: AxisName | None
    head_shards: int
    device: str
    inner_devices: int | None


@dataclasses.dataclass(frozen=True)
class Ring:
    """Devices that share a sequence, for `dilated_attention(..., ring=ring)`.

    See [Ring Attention](https://arxiv.org/abs/2310.01889).

    Args:
        mesh: The device mesh, or None for the ambient mesh set by `jax.set_mesh`.
        axis_name: The mesh axis, or tuple of axes, over which the sequence is sharded, or None if devices share only
            batch and heads.
        layout: Order of the sequence over the devices: ``"contiguous"``, or ``"zigzag"``, which balances causal work on
            rings (`Ring.shard` reorders arrays). With all-to-all, causal work is balanced in both layouts.
        batch_axis: The mesh axis, or tuple of axes, over which the batch is sharded, or None.
        head_axis: The mesh axis, or tuple of axes, over which the heads are sharded, or None.
        strategy: How branches share segments between devices: ``"all_to_all"`` exchanges heads, so that each device
            attends to whole segments; ``"ring"`` rotates keys and values hop by hop; ``"all_to_all_ring"`` exchanges
            heads within teams (on the last axis, if the ring is over several) and rotates keys and values between
            teams; ``"all_gather"`` gathers keys and values at once; ``"auto"`` chooses the fastest for each branch
            (see `plan`).
        memory_budget: Bytes available on each device for attention and its gradient, or None for no limit.
        seq_len: Length of the sequences without padding, or None if the length of all arrays is a multiple of the
            number of chunks. `shard` pads sequences of this length, attention, layers and models ignore the padding,
            and `unshard` removes it.
        debug: Whether to check at run time that positions and segment ids are in the layout of the ring, and to log
            a warning if not. The environment variable ``RINGJAX_DEBUG=1`` does so for all rings.

    Raises:
        ValueError: If `mesh` is not a mesh; if an axis is not a name or tuple of names, is not in the mesh, or is used
            twice; if `layout` or `strategy` is not one of its choices; if `memory_budget` or `seq_len` is below 1;
            or if `debug` is not a bool.

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
    axis_name: AxisName | None = "ring"
    layout: str = "contiguous"
    batch_axis: AxisName | None = None
    head_axis: AxisName | None = None
    strategy: StrategyName = "auto"
    memory_budget: int | None = None
    seq_len: int | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("axis_name", "batch_axis", "head_axis"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        names = {"axis_name": self.axis_name, "batch_axis": self.batch_axis, "head_axis": self.head_axis}
        check_ring_options(names, self.layout, self.strategy, self.memory_budget, is_optional=True)
        check_bool("debug", self.debug)
        if self.seq_len is not None:
            check_int("seq_len", self.seq_len, most=MOST_POSITIONS)
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

    def stored_length(self, length: int) -> int:
        """Returns the length at which the ring stores a sequence: the next multiple of its number of chunks."""
        multiple = layout_named(self._layout()).multiple(self.size("axis_name"))
        return (length := check_int("length", length, most=MOST_POSITIONS)) + -length % multiple

    def sequence_length(self, stored_length: int, seq_len: int | None = None) -> int | None:
        """Returns the length, without padding, of sequences in arrays of this length, or None if it is not given.

        Args:
            stored_length: Length of the arrays.
            seq_len: The argument of a call, which overrides None but must not contradict the ring.

        Raises:
            ValueError: If the ring has a `seq_len`, and `stored_length` is not the length at which it stores such
                sequences, or the argument is another length.
        """
        if self.seq_len is None:
            return seq_len
        stored = self.stored_length(self.seq_len)
        if stored_length != stored:
            raise ValueError(
                f"length of arrays must be {stored}, at which a ring with `seq_len={self.seq_len}` stores sequences, "
                f"got {stored_length}: use `ring.shard`."
            )
        if seq_len not in (None, self.seq_len):
            raise ValueError(f"`seq_len` must be None or that of the ring, {self.seq_len}, got {shown(seq_len)}.")
        return self.seq_len

    def shard(
        self, x: Shaped[ArrayLike, "*shape"], *, axis: int = 1, fill: float = 0
    ) -> Shaped[Array, "*stored_shape"]:
        """Pads a sequence, reorders it for the layout and shards it over the devices.

        Axis 0 is sharded over `batch_axis` (if `axis` is 1), `axis` over `axis_name`, and axis 2 of an array of rank 4
        over `head_axis`. Arrays in host memory are sent to each device in parts. Also works under `jax.jit`.

        Args:
            x: Array in sequence order: tokens, features, or query, key and value.
            axis: Sequence axis, 0 or 1.
            fill: Padding value; use -1 for segment ids.

        Raises:
            ValueError: If `x` is not an array, `axis` is not 0 or 1 or not an axis of `x`, the length of `x` is not
                `Ring.seq_len`, or needs padding without it (segment ids, padded with negative integers, do not need
                it), or batch or heads do not divide evenly over their devices.

        Example:
            >>> import jax, jax.numpy as jnp, ringjax as rj
            >>> ring = rj.Ring(jax.make_mesh((1,), ("ring",)), layout="zigzag")
            >>> tokens = jnp.array([[3, 1, 2]])
            >>> ring.unshard(ring.shard(tokens)).tolist()
            [[3, 1, 2]]
        """
        array = check_is_array("x", x)
        if isinstance(axis, bool) or axis not in (0, 1) or len(array.shape) <= axis:
            raise ValueError(f"`axis` must be 0 or 1 and an axis of `x`, got {shown(axis)} for shape {array.shape}.")
        check_fill(fill, array.dtype)
        marks_padding = jnp.issubdtype(array.dtype, jnp.integer) and fill < 0
        self._check_length(array.shape[axis], marks_padding)
        layout, size = self._layout(), self.size("axis_name")
        sharding = NamedSharding(self.resolve(), self._spec_of(array.shape, axis))
        if isinstance(array, jax.core.Tracer):
            stored = to_layout(array, layout, size, axis, fill)
            if explicit_axes(sharding.mesh):
                return reshard_explicit(stored, self.resolve(), sharding.spec)
            return lax.with_sharding_constraint(stored, sharding)
        if isinstance(x, np.ndarray):
            host = stored_on_host(x, layout, size, axis, fill)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
        return jax.device_put(to_layout(array, layout, size, axis, fill), sharding)

    def unshard(
        self, x: Shaped[ArrayLike, "*stored_shape"], *, axis: int = 1, length: int | None = None
    ) -> Shaped[Array, "*shape"]:
        """Restores the sequence order of a stored array: the inverse of `shard`.

        Args:
            x: Array in the layout of the ring.
            axis: Sequence axis.
            length: Length of the sequence without padding; by default `Ring.seq_len`, or else the stored length.

        Raises:
            ValueError: If `x` is not an array with this `axis`, its length is not that of arrays from `shard`, or
                `length` exceeds it.

        Example:
            >>> import jax, jax.numpy as jnp, ringjax as rj
            >>> ring = rj.Ring(jax.make_mesh((1,), ("ring",)))
            >>> ring.unshard(jnp.arange(4), axis=0, length=3).tolist()
            [0, 1, 2]
        """
        if length is None and self.seq_len is not None:
            array, axis = checked_axis(x, axis)
            length = self.sequence_length(array.shape[axis])
        return from_layout(x, self._layout(), self.size("axis_name"), axis, length)

    def positions(self, length: int | None = None) -> Int[Array, " stored_length"]:
        """Returns the position in the sequence of each row that the ring stores for a sequence of this length.

        Positions from `length`, by default `Ring.seq_len`, on are those of padding.

        Raises:
            ValueError: If `length` is not a positive integer, or is None without `Ring.seq_len`.

        Example:
            >>> import jax, ringjax as rj
            >>> rj.Ring(jax.make_mesh((1,), ("ring",))).positions(4).tolist()
            [0, 1, 2, 3]
        """
        length = self.seq_len if length is None else length
        if length is None:
            raise ValueError("`length` must be given for a ring without `seq_len`, got None.")
        return stored_positions(self, self.stored_length(length))

    def info(self) -> RingInfo:
        """Returns the description of the ring that code inside `jax.shard_map` uses."""
        return RingInfo(
            self.axis_name,
            self.size("axis_name"),
            self._layout(),
            self.strategy,
            self.memory_budget,
            self.head_axis,
            self.size("head_axis"),
            self.device(),
            inner_size(self.axis_name, dict(self.resolve().shape)),
        )

    def device(self) -> str:
        """Returns the name of the devices, by which the plan chooses strategies, such as ``"v5p"`` or ``"cpu"``."""
        mesh = self.resolve()
        if not isinstance(mesh, Mesh):
            return abstract_device(mesh)
        first = mesh.devices.flat[0]
        return device_of_kind(first.platform, first.device_kind)

    def check(self, query: Array, key: Array, value: Array, ids: Array | None) -> None:
        """Checks that global arrays can be sharded over the ring.

        Raises:
            ValueError: If the length is not a multiple of the number of chunks, batch or heads do not divide evenly,
                an array is on other devices or has another sharding than the ring requires, or, in a layout that
                permutes the sequence, was never placed on a mesh by `shard`.
        """
        ring_size = self.size("axis_name")
        multiple = layout_named(self._layout()).multiple(ring_size)
        length = query.shape[1]
        if length % multiple:
            raise ValueError(
                f"`query` length must be a multiple of {multiple} for layout {self.layout!r} on a ring of {ring_size}, "
                f"got {length}: use `Ring(..., seq_len={length})` and its `shard`, which pads."
            )
        self.check_divides(batch=key.shape[0], kv_heads=key.shape[2])
        check_positions(key.shape[0] // self.size("batch_axis"), length // ring_size)
        for name, x in {"query": query, "key": key, "value": value, "segment_ids": ids}.items():
            if x is not None:
                check_devices(name, x, self.resolve())
                self._check_explicit(name, x)
                self.check_placed(name, x)
        for name, x in (("key", key), ("value", value)):
            check_like_query(name, x, query)

    def check_divides(self, *, batch: int, kv_heads: int) -> None:
        """Checks that batch and heads divide evenly over their mesh axes."""
        for name, what, count in (("batch_axis", "batch", batch), ("head_axis", "key/value heads", kv_heads)):
            if count % self.size(name):
                raise ValueError(
                    f"{what} must divide evenly over the {self.size(name)} devices of `{name}` "
                    f"{getattr(self, name)!r}, got {count}."
                )

    def check_placed(self, name: str, x: Array) -> None:
        """Checks that an array is on a mesh unless the layout is the order of the sequence.

        `shard` puts an array in the layout and on the mesh, so an array that is not on a mesh is in sequence order.
        (Not so segment ids that a traced function computes from `positions` on explicit meshes: these are not checked.)
        """
        if name == "segment_ids" and isinstance(x, jax.core.Tracer) and explicit_axes(self.resolve()):
            return
        if self._layout() != CONTIGUOUS.name and jax.typeof(x).sharding.mesh.empty:
            raise ValueError(
                f"`{name}` must be in the layout {self.layout!r} of the ring and on its devices, got an array that is "
                "not on a mesh: use `ring.shard`."
            )

    def _layout(self) -> str:
        return layout_for(self.layout, self.size("axis_name"))

    def _spec_of(self, shape: tuple[int, ...], axis: int) -> PartitionSpec:
        """Returns the partition spec of an array with this sequence axis."""
        names = [self.batch_axis, self.axis_name][1 - axis :]
        if len(shape) == 4 and axis == 1:
            names.append(self.head_axis)
        for name, what, i in (("batch_axis", "batch", 0), ("head_axis", "heads", 2)):
            if axis == 1 and i < len(names) and shape[i] % self.size(name):
                raise ValueError(
                    f"{what} of `x` must divide evenly over the {self.size(name)} devices of `{name}` "
                    f"{getattr(self, name)!r}, got {shape[i]}."
                )
        return PartitionSpec(*names)

    def _check_length(self, length: int, marks_padding: bool) -> None:
        """Checks the length of an array to shard; padding without a mark needs a ring that knows the length."""
        if self.seq_len not in (None, length):
            raise ValueError(f"length of `x` must be `seq_len` of the ring, {self.seq_len}, got {length}.")
        multiple = layout_named(self._layout()).multiple(self.size("axis_name"))
        if self.seq_len is None and length % multiple and not marks_padding:
            raise ValueError(
                f"length of `x` must be a multiple of {multiple} for layout {self.layout!r} on this ring, or `seq_len` "
                f"of the ring, got {length}: use `Ring(..., seq_len={length})`, also for the attention, so that it "
                "ignores the padding."
            )

    def _check_explicit(self, name: str, x: Array) -> None:
        mesh, spec = self.resolve(), PartitionSpec(*self.spec()[: x.ndim])
        given = jax.typeof(x).sharding
        explicit = explicit_axes(mesh)
        if explicit and mesh.size > 1 and not can_become(given.spec, spec, x.ndim, explicit):
            raise ValueError(
                f"`{name}` must be sharded as {spec} over an explicit mesh, or replicated, got {given.spec}: use "
                "`jax.device_put` or `jax.reshard`."
            )

    def _check_axes(self, mesh: Mesh | AbstractMesh) -> None:
        for name in ("axis_name", "batch_axis", "head_axis"):
            for axis in axes(getattr(self, name)):
                if axis not in mesh.axis_names:
                    hint = " (None if the sequence is not sharded)" if name == "axis_name" else ""
                    raise ValueError(f"`{name}` must name axes of the mesh {mesh.axis_names}{hint}, got {axis!r}.")


def stored_positions(ring: Ring | None, length: int) -> Array:
    """Returns the position in the sequence of each stored row; `length` includes padding."""
    if ring is None:
        return jnp.arange(length, dtype=jnp.int32)
    size, mesh = ring.size("axis_name"), ring.resolve()
    found = positions(layout := layout_for(ring.layout, size), length, size)
    if layout == CONTIGUOUS.name or explicit_axes(mesh) or not isinstance(found, jax.core.Tracer):
        return found
    # segment ids computed from these are on the mesh, too, see `Ring.check_placed`
    return lax.with_sharding_constraint(found, NamedSharding(mesh, PartitionSpec(ring.axis_name)))
