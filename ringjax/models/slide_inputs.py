"""Inputs of a slide encoder: checks, grid positions and lengths.

Shapes: ``B`` slides, ``L`` tiles, ``D`` features of a tile, ``T`` stored rows, of which the first is the CLS token.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import ArrayLike, DTypeLike

from ringjax._src.comm.layout import layout_named
from ringjax._src.comm.mesh import Ring
from ringjax._src.decode.cache import clipped_counts
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import check_array, check_counts, check_positive, known
from ringjax.models.block import misplaced_branches

GRID = 1000  # Prov-GigaPath's grid has 1000 rows and columns, and larger indices wrap into the next row
FIRST_BUCKET, LAST_POWER = 256, 2048


class SlideInputs(NamedTuple):
    """Checked inputs of a batch of slides, padded to T rows and in the layout of the ring."""

    tiles: Array  # (B, T, D); row 0 is empty
    grid: Array  # (B, T, 2), int32: row and column of each tile
    lengths: Array  # (B,), int32: numbers of tiles


def bucket_length(length: int) -> int:
    """Returns the smallest bucket of at least `length` rows.

    Buckets are powers of two from 256 to 2048, and then four sizes per factor of two, so that slides of different
    lengths share compiled programs while padding adds at most a quarter to a long slide.

    Example:
        >>> [bucket_length(n) for n in (2, 300, 2048, 2049, 10_001, 20_000)]
        [256, 512, 2048, 2560, 10240, 20480]
    """
    power = 1 << (length - 1).bit_length()  # the smallest power of two of at least `length`
    if power <= LAST_POWER:
        return max(power, FIRST_BUCKET)
    step = power // 8
    return -(-length // step) * step


def prepare(
    tiles: Array, coordinates: Array, lengths: ArrayLike | None, tile_size: float, width: int, ring: Ring | None
) -> SlideInputs:
    """Checks the inputs of a call and pads them to the length of a bucket."""
    check_array("tiles", tiles, "floating point", ("slides", "tiles", "features"))
    if tiles.shape[2] != width:
        raise ValueError(f"`tiles` must have {width} features in the last axis, got shape {tiles.shape}.")
    check_array("coordinates", coordinates, "number", ("slides", "tiles", "x and y"))
    batch, length = tiles.shape[:2]
    if coordinates.shape != (batch, length, 2):
        raise ValueError(
            f"`coordinates` must have shape (slides, tiles, 2) = {(batch, length, 2)}, got {coordinates.shape}."
        )
    check_positive("tile_size", tile_size)
    counts = np.full(batch, length, np.int32) if lengths is None else check_counts("lengths", lengths, batch, length, 1)
    ends = known(counts)
    _check_finite(tiles, ends)
    grid = _grid(coordinates, ends, tile_size)
    padded = [_padded(x, _stored_length(length + 1, ring), ring) for x in (tiles, grid)]
    return SlideInputs(padded[0], padded[1], clipped_counts("lengths", counts, batch, length, least=1))


def position_embedding(grid: Array, features: int, dtype: DTypeLike, out_sharding: NamedSharding | None) -> Array:
    """Returns the 2-D sine-cosine embedding of grid indices (..., 2): of the second one, then of the first one.

    One axis has at most 1000 values, whose embeddings are computed in float64. An index outside the grid gives NaN.
    """
    table = jnp.asarray(_axis_embedding(features), dtype)
    if out_sharding is None:
        return _look_up(table, grid)
    return jax.sharding.auto_axes(_look_up, out_sharding=out_sharding)(table, grid)


def _look_up(table: Array, grid: Array) -> Array:
    found = table.at[grid].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return jnp.concatenate([found[..., 1, :], found[..., 0, :]], axis=-1)


def segment_ids(position: Array, lengths: Array) -> Array:
    """Returns 0 for the CLS token and the tiles of each slide, -1 for padding: (B, T)."""
    return jnp.where(position <= lengths[:, None], 0, -1).astype(jnp.int32)


def warn_if_misplaced(pattern: DilationPattern, lengths: ArrayLike, longest: int) -> None:
    """Warns, once per pattern, if torchscale would misplace rows of the longest slide."""
    found = known(lengths)
    length = 1 + (longest if found is None else int(found.max()))
    for branch in misplaced_branches(pattern, length):
        _warn_once(branch)


@functools.cache
def _warn_once(branch: str) -> None:
    warnings.warn(
        f"The segments of branch {branch} are not a multiple of the rate, and torchscale misplaces the rows of all "
        "segments but the first. The slide encoder uses the rule of the LongNet paper, so embeddings of slides with "
        f"{branch.split('/', maxsplit=1)[0]} tiles or more differ from the original.",
        stacklevel=4,
    )


@functools.cache
def _axis_embedding(features: int) -> np.ndarray:
    """Returns the embedding (1000, features / 2) of the indices of one axis of the grid, in float64."""
    quarter = features // 4
    angles = np.arange(GRID)[:, None] * 10_000.0 ** (-np.arange(quarter) / quarter)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _stored_length(length: int, ring: Ring | None) -> int:
    bucket = bucket_length(length)
    chunks = 1 if ring is None else layout_named(ring.layout).multiple(ring.size("axis_name"))
    return -(-bucket // chunks) * chunks


def _check_finite(tiles: Array, ends: np.ndarray | None) -> None:
    """Checks that known tile features are finite; padding may have any value."""
    if ends is None or known_on_host(tiles) is None:
        return
    for i, (slide, end) in enumerate(zip(tiles, ends, strict=True)):
        # a sum needs no temporary array of the size of the slide, and is finite only if all features are
        if not math.isfinite(float(np.sum(np.asarray(slide[:end]), dtype=np.float64))):
            raise ValueError(f"`tiles` must be finite, got NaN or infinite features in slide {i}.")


def known_on_host(x: object) -> np.ndarray | None:
    """Returns the values of an array that is in host memory, as far as they are known, otherwise None."""
    is_on_host = isinstance(x, np.ndarray) or (
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.devices() <= set(jax.devices("cpu"))
    )
    return known(x) if is_on_host else None


def _grid(coordinates: Array, ends: np.ndarray | None, tile_size: float) -> np.ndarray | Array:
    """Returns the grid indices of the tiles, checked if they are known; those of padding are 0."""
    found = known(coordinates)
    if found is None or ends is None:
        return jnp.floor(jnp.asarray(coordinates).astype(jnp.float32) / tile_size).astype(jnp.int32)
    grid = np.zeros(found.shape, np.int32)
    for i, end in enumerate(ends):
        index = np.floor(found[i, :end].astype(np.float64) / tile_size)
        if not (index.min() >= 0 and index.max() < GRID):  # also if it is NaN
            raise ValueError(
                f"`coordinates` must be from 0 to below {GRID} times `tile_size` {tile_size}, where the grid of the "
                f"original ends, got {found[i, :end].min()} to {found[i, :end].max()} in slide {i}: "
                f"pass coordinates in pixels of the level of the tiles, or another `tile_size`."
            )
        grid[i, :end] = index
    return grid


def _padded(x: Array | np.ndarray, stored: int, ring: Ring | None) -> Array:
    """Adds an empty first row, pads the array (B, L, …) to `stored` rows, and puts it in the layout of the ring."""
    batch, length, width = x.shape
    if isinstance(x, np.ndarray):
        host = _aligned_zeros((batch, stored, width), jax.dtypes.canonicalize_dtype(x.dtype))
        host[:, 1 : length + 1] = x
        return jnp.asarray(host) if ring is None else ring.shard(host)
    padded = jnp.pad(x, ((0, 0), (1, stored - length - 1), (0, 0)))
    return padded if ring is None else ring.shard(padded)


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns zeros that start at a multiple of 64 bytes, which a CPU device uses without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
