"""Sequence layouts: which device of a ring stores which chunks of a sequence.

On a ring of ``p`` devices:

- Contiguous: the sequence has ``p`` chunks, and device ``i`` holds chunk ``i``.
- Zigzag: the sequence has ``2p`` chunks, and device ``i`` holds chunks ``i`` and ``2p - 1 - i``, which balances causal
  work, as in zhuzilin/ring-flash-attention.
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
from jaxtyping import Int, Shaped

from ringjax._src.validation import (
    MOST_DEVICES,
    MOST_POSITIONS,
    check_choice,
    check_fits,
    check_int,
    check_is_array,
    shown,
)

Index = TypeVar("Index", int, Array)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Assignment of the chunks of a sequence to the devices of a ring."""

    name: str
    chunks: int  # per device

    def multiple(self, ring_size: int) -> int:
        """Returns the number of chunks on the ring, of which the stored length must be a multiple."""
        return self.chunks * ring_size

    def chunk_of(self, device: Index, nth: int, ring_size: int) -> Index:
        """Returns the index in the sequence of the `nth` chunk of `device`.

        Example:
            >>> ZIGZAG.chunk_of(1, 0, ring_size=4), ZIGZAG.chunk_of(1, 1, ring_size=4)
            (1, 6)
        """
        return device if nth == 0 else self.multiple(ring_size) - 1 - device

    def starts(self, device: Index, ring_size: int, chunk_length: int) -> list[Index]:
        """Returns the start position of each chunk of `device`."""
        return [self.chunk_of(device, nth, ring_size) * chunk_length for nth in range(self.chunks)]

    def order(self, ring_size: int) -> tuple[int, ...]:
        """Returns the chunk indices in stored order.

        Example:
            >>> ZIGZAG.order(ring_size=3)
            (0, 5, 1, 4, 2, 3)
        """
        return tuple(self.chunk_of(i, nth, ring_size) for i in range(ring_size) for nth in range(self.chunks))


CONTIGUOUS = Layout("contiguous", chunks=1)
ZIGZAG = Layout("zigzag", chunks=2)


def layout_named(name: str) -> Layout:
    """Returns the layout with this name."""
    layouts = {layout.name: layout for layout in (CONTIGUOUS, ZIGZAG)}
    return layouts[check_choice("layout", name, tuple(layouts))]


def layout_for(layout: str, ring_size: int) -> str:
    """Returns the name of the layout on a ring of this size; on one device, all layouts are contiguous."""
    return layout_named(layout).name if ring_size > 1 else CONTIGUOUS.name


def to_layout(
    x: Shaped[ArrayLike, "*shape"],
    layout: str,
    ring_size: int,
    axis: int = 1,
    fill: float = 0,
    length: int | None = None,
) -> Shaped[Array, "*stored_shape"]:
    """Pads a sequence at its end and reorders its chunks for storage on a ring.

    Args:
        x: Array of any dtype and rank, in sequence order.
        layout: ``"contiguous"`` (pads only) or ``"zigzag"``.
        ring_size: Number of devices in the ring.
        axis: Sequence axis.
        fill: Padding value; use -1 for segment ids.
        length: Length to pad to; by default the smallest that the layout allows. `plan` reports which lengths are
            fast.

    Returns:
        The stored array: device ``i`` of the ring holds the ``i``-th of `ring_size` equal parts of `axis`.

    Raises:
        ValueError: If `x` is not an array or has no such `axis`, `layout` is unknown, `ring_size` is below 1, the dtype
            of `x` cannot hold `fill`, or `length` is below the length of `x` or not a multiple of the number of chunks.

    Example:
        >>> import jax.numpy as jnp
        >>> to_layout(jnp.arange(7), "zigzag", ring_size=2, axis=0, fill=-1).tolist()
        [0, 1, 6, -1, 2, 3, 4, 5]
    """
    rule, ring_size = layout_named(layout), check_int("ring_size", ring_size, most=MOST_DEVICES)
    given_array, axis = checked_axis(x, axis)
    given = given_array.shape[axis]
    least = given + -given % rule.multiple(ring_size)
    stored = least if length is None else check_int("length", length, most=MOST_POSITIONS)
    _check_stored_length("`length`", stored, rule, ring_size)
    missing = stored - given
    if missing < 0:
        raise ValueError(f"`length` must be at least that of the sequence, {given}, got {stored}.")
    check_fill(fill, given_array.dtype)
    array = _whole_along(jnp.asarray(given_array), axis)
    if missing:
        widths = [(0, missing if a == axis else 0, 0) for a in range(array.ndim)]
        array = lax.pad(array, jnp.asarray(fill, array.dtype), widths)
    return _reorder(array, rule, ring_size, axis)


def from_layout(
    x: Shaped[ArrayLike, "*stored_shape"], layout: str, ring_size: int, axis: int = 1, length: int | None = None
) -> Shaped[Array, "*shape"]:
    """Restores the sequence order of a stored array: the inverse of `to_layout`.

    An array that is sharded along `axis` over explicit mesh axes is replicated along `axis`.

    Args:
        x: Array in stored order, as returned by `to_layout`.
        layout, ring_size, axis: As for `to_layout`.
        length: Length of the sequence without padding; the stored length by default.

    Returns:
        The array in sequence order, cropped to `length`.

    Raises:
        ValueError: If `x` is not an array or has no such `axis`, `layout` is unknown, `ring_size` is below 1, the
            stored length is not a multiple of the number of chunks, or `length` exceeds it.

    Example:
        >>> import jax.numpy as jnp
        >>> stored = to_layout(jnp.arange(7), "zigzag", ring_size=2, axis=0)
        >>> from_layout(stored, "zigzag", ring_size=2, axis=0, length=7).tolist()
        [0, 1, 2, 3, 4, 5, 6]
    """
    rule, ring_size = layout_named(layout), check_int("ring_size", ring_size, most=MOST_DEVICES)
    given_array, axis = checked_axis(x, axis)
    stored_length = given_array.shape[axis]
    _check_stored_length(f"`x` along axis {axis}", stored_length, rule, ring_size)
    length = stored_length if length is None else check_int("length", length, least=0)
    if length > stored_length:
        raise ValueError(f"`length` must be at most the stored length {stored_length}, got {length}.")
    array = _whole_along(jnp.asarray(given_array), axis)
    return lax.slice_in_dim(_reorder(array, rule, ring_size, axis, inverse=True), 0, length, axis=axis)


def stored_on_host(x: np.ndarray, layout: str, ring_size: int, axis: int, fill: float) -> np.ndarray:
    """Returns what `to_layout` returns, computed in host memory."""
    rule = layout_named(layout)
    check_fill(fill, x.dtype)
    missing = -x.shape[axis] % rule.multiple(ring_size)
    padded = np.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=fill)
    chunks = np.split(padded, rule.multiple(ring_size), axis)
    return padded if rule.chunks == 1 else np.concatenate([chunks[i] for i in rule.order(ring_size)], axis)


def positions(layout: str, stored_length: int, ring_size: int) -> Int[Array, " stored_length"]:
    """Returns the position in the sequence of each stored row.

    Args:
        layout, ring_size: As for `to_layout`.
        stored_length: Length of the stored sequence, including padding.

    Returns:
        The positions, as int32.

    Raises:
        ValueError: If `layout` is unknown, `ring_size` is below 1, or `stored_length` is not a multiple of the number
            of chunks.

    Example:
        >>> positions("zigzag", stored_length=8, ring_size=2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    rule, ring_size = layout_named(layout), check_int("ring_size", ring_size, most=MOST_DEVICES)
    stored_length = check_int("stored_length", stored_length, most=MOST_POSITIONS)
    _check_stored_length("`stored_length`", stored_length, rule, ring_size)
    return _reorder(jnp.arange(stored_length, dtype=jnp.int32), rule, ring_size, axis=0)


def _reorder(x: Array, layout: Layout, ring_size: int, axis: int, *, inverse: bool = False) -> Array:
    """Reorders the chunks of `axis`: each chunk of the first half is followed by its mirror in the second half.

    Uses slices and reversals because, unlike a gather, they are differentiable on explicit meshes and their gradients
    need no scatter.
    """
    if layout.chunks == 1 or ring_size == 1:
        return x
    sizes = (ring_size, layout.chunks) if inverse else (layout.chunks, ring_size)
    half_axis, stack_axis = (axis + 1, axis) if inverse else (axis, axis + 1)
    chunk = x.shape[axis] // layout.multiple(ring_size)
    split = x.reshape(*x.shape[:axis], *sizes, chunk, *x.shape[axis + 1 :])
    near, far = (lax.index_in_dim(split, half, half_axis, keepdims=False) for half in (0, 1))
    return jnp.stack([near, jnp.flip(far, axis)], stack_axis).reshape(x.shape)


def checked_axis(x: ArrayLike, axis: int) -> tuple[Array, int]:
    """Checks the array and its sequence axis; returns both, with a non-negative axis."""
    array = check_is_array("x", x)
    rank = len(array.shape)
    number = check_int("axis", axis, least=-rank)
    if number >= rank:
        raise ValueError(f"`axis` must be less than the rank {rank} of `x`, got {axis}.")
    check_fits("x", array)
    return array, number % rank


def check_fill(fill: object, dtype: np.dtype) -> None:
    """Checks that the dtype of the array can represent the padding value."""
    if isinstance(fill, jax.Array):
        return
    is_held = isinstance(fill, numbers.Complex if jnp.issubdtype(dtype, jnp.complexfloating) else numbers.Real)
    if is_held and jnp.issubdtype(dtype, jnp.integer):
        limits, is_whole = jnp.iinfo(dtype), isinstance(fill, numbers.Integral) or float(cast(float, fill)).is_integer()
        is_held = is_whole and limits.min <= cast(float, fill) <= limits.max
    if not is_held:
        raise ValueError(f"`fill` must be a number that {dtype} can hold, got {shown(fill)}.")


def _whole_along(x: Array, axis: int) -> Array:
    """Replicates `x` along `axis` if it is sharded over explicit axes, along which it cannot be reshaped."""
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
