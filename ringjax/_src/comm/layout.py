"""The order of a sequence over a ring of devices: which chunk of it stands where.

Legend: ``p`` devices in the ring, ``c`` the length of a chunk.
Contiguous: ``p`` chunks, device ``i`` holds chunk ``i``.
Zigzag: ``2p`` chunks, device ``i`` holds chunks ``i`` and ``2p - 1 - i``, so that causal work is the same everywhere.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ringjax._src.validation import MOST_DEVICES, MOST_POSITIONS, check_choice, check_fits, check_int, shown

Int = TypeVar("Int", int, Array)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One order of the chunks of a sequence over the devices of a ring."""

    name: str
    chunks: int  # per device

    def multiple(self, ring_size: int) -> int:
        """What a stored length must be a multiple of: the number of chunks in the ring."""
        return self.chunks * ring_size

    def chunk_of(self, device: Int, nth: int, ring_size: int) -> Int:
        """Which chunk of the sequence the `nth` chunk of `device` is.

        Example:
            >>> ZIGZAG.chunk_of(1, 0, ring_size=4), ZIGZAG.chunk_of(1, 1, ring_size=4)
            (1, 6)
        """
        return device if nth == 0 else self.multiple(ring_size) - 1 - device

    def starts(self, device: Int, ring_size: int, chunk_length: int) -> list[Int]:
        """Position at which each chunk of `device` starts.

        Example:
            >>> ZIGZAG.starts(1, ring_size=4, chunk_length=10)
            [10, 60]
        """
        return [self.chunk_of(device, nth, ring_size) * chunk_length for nth in range(self.chunks)]

    def order(self, ring_size: int) -> tuple[int, ...]:
        """The chunks of the sequence in stored order.

        Example:
            >>> ZIGZAG.order(ring_size=3)
            (0, 5, 1, 4, 2, 3)
        """
        return tuple(self.chunk_of(i, nth, ring_size) for i in range(ring_size) for nth in range(self.chunks))


CONTIGUOUS = Layout("contiguous", chunks=1)
ZIGZAG = Layout("zigzag", chunks=2)


def layout_named(name: str) -> Layout:
    """The layout of this name.

    Example:
        >>> layout_named("zigzag")
        Layout(name='zigzag', chunks=2)
    """
    layouts = {layout.name: layout for layout in (CONTIGUOUS, ZIGZAG)}
    return layouts[check_choice("layout", name, tuple(layouts))]


def layout_for(layout: str, ring_size: int) -> str:
    """The name of the layout on a ring of this size: on one device they are all the same.

    Example:
        >>> layout_for("zigzag", 1)
        'contiguous'
    """
    return layout_named(layout).name if ring_size > 1 else CONTIGUOUS.name


def to_layout(
    x: ArrayLike, layout: str, ring_size: int, axis: int = 1, fill: float = 0, length: int | None = None
) -> Array:
    """Pads a sequence at its end and puts its chunks in the order in which a ring stores them.

    Args:
        x: Array of any dtype and rank, in the order of the sequence.
        layout: ``"contiguous"`` (pads only) or ``"zigzag"``.
        ring_size: Number of devices in the ring.
        axis: Axis of the sequence.
        fill: Value of the padding; -1 for segment ids.
        length: Length to pad to, the least that the layout needs by default; `plan` tells which lengths are fast.

    Returns:
        The stored array: device ``i`` of the ring holds the ``i``-th of `ring_size` equal parts of `axis`.

    Raises:
        ValueError: If an argument breaks one of these rules.

    Example:
        >>> import jax.numpy as jnp
        >>> to_layout(jnp.arange(7), "zigzag", ring_size=2, axis=0, fill=-1).tolist()
        [0, 1, 6, -1, 2, 3, 4, 5]
    """
    rule, ring_size = layout_named(layout), check_int("ring_size", ring_size, most=MOST_DEVICES)
    given_array, axis = _checked_axis(x, axis)
    given = given_array.shape[axis]
    least = given + -given % rule.multiple(ring_size)
    stored = least if length is None else check_int("length", length, most=MOST_POSITIONS)
    _check_stored_length("`length`", stored, rule, ring_size)
    missing = stored - given
    if missing < 0:
        raise ValueError(f"`length` must be at least that of the sequence, {given}, got {stored}.")
    _check_fill(fill, given_array.dtype)
    array = _whole_along(jnp.asarray(given_array), axis)
    if missing:
        widths = [(0, missing if a == axis else 0, 0) for a in range(array.ndim)]
        array = lax.pad(array, jnp.asarray(fill, array.dtype), widths)
    return _stored(array, rule, ring_size, axis)


def from_layout(x: ArrayLike, layout: str, ring_size: int, axis: int = 1, length: int | None = None) -> Array:
    """Puts a stored sequence back in order: the inverse of `to_layout`.

    An array that is sharded along `axis` over explicit mesh axes becomes whole on every device.

    Args:
        x: Array as `to_layout` returns it.
        layout: ``"contiguous"`` or ``"zigzag"``.
        ring_size: Number of devices in the ring.
        axis: Axis of the sequence.
        length: Length of the sequence without its padding; the stored length by default.

    Returns:
        The array in the order of the sequence, cropped to `length`.

    Raises:
        ValueError: If an argument breaks one of these rules, or the stored length is not a multiple of the chunks.

    Example:
        >>> import jax.numpy as jnp
        >>> stored = to_layout(jnp.arange(7), "zigzag", ring_size=2, axis=0)
        >>> from_layout(stored, "zigzag", ring_size=2, axis=0, length=7).tolist()
        [0, 1, 2, 3, 4, 5, 6]
    """
    rule, ring_size = layout_named(layout), check_int("ring_size", ring_size, most=MOST_DEVICES)
    given_array, axis = _checked_axis(x, axis)
    stored_length = given_array.shape[axis]
    _check_stored_length(f"`x` along axis {axis}", stored_length, rule, ring_size)
    length = stored_length if length is None else check_int("length", length, least=0)
    if length > stored_length:
        raise ValueError(f"`length` must be at most the stored length {stored_length}, got {length}.")
    array = _whole_along(jnp.asarray(given_array), axis)
    return lax.slice_in_dim(_in_sequence(array, rule, ring_size, axis), 0, length, axis=axis)


def positions(layout: str, stored_length: int, ring_size: int) -> Array:
    """The position in the sequence of each stored row.

    Args:
        layout: ``"contiguous"`` or ``"zigzag"``.
        stored_length: Length of the stored sequence, with its padding.
        ring_size: Number of devices in the ring.

    Returns:
        int32 array of shape ``(stored_length,)``.

    Raises:
        ValueError: If an argument breaks one of these rules, or `stored_length` is not a multiple of the chunks.

    Example:
        >>> positions("zigzag", stored_length=8, ring_size=2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    rule, ring_size = layout_named(layout), check_int("ring_size", ring_size, most=MOST_DEVICES)
    stored_length = check_int("stored_length", stored_length, most=MOST_POSITIONS)
    _check_stored_length("`stored_length`", stored_length, rule, ring_size)
    return _stored(jnp.arange(stored_length, dtype=jnp.int32), rule, ring_size, axis=0)


def _stored(x: Array, layout: Layout, ring_size: int, axis: int) -> Array:
    """The chunks of `axis` in stored order: those of the first half, each followed by its mirror in the second.

    Slices and reversals, unlike a gather, have gradients on explicit meshes, and gradients that cost no scatter.
    """
    if layout.chunks == 1 or ring_size == 1:
        return x
    near, far = _halves(x, (layout.chunks, ring_size), axis, axis)
    return jnp.stack([near, jnp.flip(far, axis)], axis + 1).reshape(x.shape)


def _in_sequence(x: Array, layout: Layout, ring_size: int, axis: int) -> Array:
    """The inverse of `_stored`."""
    if layout.chunks == 1 or ring_size == 1:
        return x
    near, far = _halves(x, (ring_size, layout.chunks), axis, axis + 1)
    return jnp.stack([near, jnp.flip(far, axis)], axis).reshape(x.shape)


def _halves(x: Array, chunks: tuple[int, int], axis: int, along: int) -> tuple[Array, Array]:
    """Cuts `axis` into `chunks`, on two axes, and takes both entries of the axis `along`."""
    cut = x.reshape(*x.shape[:axis], *chunks, x.shape[axis] // (chunks[0] * chunks[1]), *x.shape[axis + 1 :])
    return lax.index_in_dim(cut, 0, along, keepdims=False), lax.index_in_dim(cut, 1, along, keepdims=False)


def _checked_axis(x: ArrayLike, axis: int) -> tuple[Array, int]:
    """Checks the array and the axis of its sequence; returns both, the axis counted from the front."""
    if not isinstance(x, np.ndarray | np.generic | jax.Array) and not hasattr(x, "__jax_array__"):
        raise ValueError(f"`x` must be an array, got {type(x).__name__}.")
    array = cast(Array, x)
    rank = len(array.shape)
    number = check_int("axis", axis, least=-rank)
    if number >= rank:
        raise ValueError(f"`axis` must be less than the rank {rank} of `x`, got {axis}.")
    check_fits("x", array)
    return array, number % rank


def _check_fill(fill: object, dtype: np.dtype) -> None:
    """Checks that the dtype of the array can hold the value of the padding."""
    if isinstance(fill, jax.Array):
        return
    is_held = isinstance(fill, numbers.Complex if jnp.issubdtype(dtype, jnp.complexfloating) else numbers.Real)
    if is_held and jnp.issubdtype(dtype, jnp.integer):
        limits, is_whole = jnp.iinfo(dtype), isinstance(fill, numbers.Integral) or float(cast(float, fill)).is_integer()
        is_held = is_whole and limits.min <= cast(float, fill) <= limits.max
    if not is_held:
        raise ValueError(f"`fill` must be a number that {dtype} can hold, got {shown(fill)}.")


def _whole_along(x: Array, axis: int) -> Array:
    """`x` with `axis` on every device, if it is sharded over explicit axes, whose chunks cannot be taken apart."""
    sharding = jax.typeof(x).sharding
    spec = [*sharding.spec, *(None,) * (x.ndim - len(sharding.spec))]
    if sharding.mesh.empty or spec[axis] is None:
        return x
    spec[axis] = None
    return jax.reshard(x, sharding.update(spec=PartitionSpec(*spec)))


def _check_stored_length(name: str, stored_length: int, layout: Layout, ring_size: int) -> None:
    multiple = layout.multiple(ring_size)
    if stored_length > MOST_POSITIONS:
        raise ValueError(f"{name} must be at most {MOST_POSITIONS} for a ring of {ring_size}, got {stored_length}.")
    if stored_length % multiple:
        raise ValueError(
            f"{name} must be a multiple of {multiple} ({layout.name}, ring of {ring_size}), got {stored_length}."
        )
