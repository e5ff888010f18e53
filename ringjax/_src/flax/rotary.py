"""Rotary positions and xPos, from the position of each row in the sequence, wherever the row is stored.

Legend: ``B`` batch, ``T`` length, ``N`` heads, ``H`` head dim. Dimensions ``i`` and ``i + H / 2`` are a pair, which
turns by ``position * base ** (-2 i / H)``.

Angles are counted in 2^-32 of a turn, in integers that wrap: the angle between two rows depends on nothing but their
distance, at position ten million as at ten. In float32 the product would be off by 0.03 rad at position one million.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringjax._src import debug
from ringjax._src.online_softmax import accumulator
from ringjax._src.validation import check_array, check_int, check_positive, check_row_positions, known

XPOS_LENGTH = 65_536  # beyond it scales of up to (1.4 / 0.4) ** (length / 2 / 512) leave float32


def rotary(x: Array, positions: Array, *, base: float = 10_000.0) -> Array:
    """Rotates queries or keys by their positions.

    Args:
        x: Queries or keys (B, T, N, H), H even.
        positions: Position in the sequence of each row, integers (T,) or (B, T); see `ringjax.positions`.
        base: Base of the wavelengths, at least 1.

    Returns:
        The rotated array in the dtype of `x`, computed in at least float32.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import jax.numpy as jnp
        >>> from ringjax._src.flax.rotary import rotary
        >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
        >>> print(rotary(x, jnp.array([1])).round(3))  # cos(1), sin(1)
        [[[[0.54  0.841]]]]
    """
    _check("x", x, positions)
    check_positive("base", base, least=1)
    return _rotate(x, *_cos_sin(positions, x.shape[-1], base)).astype(x.dtype)


def xpos(
    query: Array,
    key: Array,
    positions: Array,
    *,
    length: int,
    base: float = 10_000.0,
    scale_base: float = 512.0,
) -> tuple[Array, Array]:
    """Rotates queries and keys by their positions and scales them so that scores fade with the distance (xPos).

    A query at ``p`` and a key at ``s`` meet with the factor ``zeta_i ** ((p - s) / scale_base)`` in the pair ``i``,
    where ``zeta_i = (2 i / H + 0.4) / 1.4``. Keys after the query would grow instead: for causal attention only.

    Args:
        query: Queries (B, T, N, H), H even.
        key: Keys (B, T, K, H).
        positions: Position in the sequence of each row, integers (T,) or (B, T), from 0 to ``length - 1``: an error
            where they are known, else scales go on beyond, and may leave float32.
        length: Number of positions, at most 65,536: the scales of more do not fit into float32. Queries and keys that
            meet must be given the same.
        base: Base of the wavelengths, at least 1.
        scale_base: Distance over which the scores of pair ``i`` fade by ``zeta_i``; above 0.

    Returns:
        Query and key in their dtypes, computed in at least float32.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ringjax._src.flax.rotary import xpos
        >>> query, key = jax.random.normal(jax.random.key(0), (2, 1, 64, 4, 8))
        >>> query, key = xpos(query, key, jnp.arange(64), length=64)
        >>> query.shape
        (1, 64, 4, 8)
    """
    if check_int("length", length) > XPOS_LENGTH:
        raise ValueError(
            f"`length` must be at most {XPOS_LENGTH} for xPos, as its scales leave float32 beyond, got {length}."
        )
    for name, x in (("query", query), ("key", key)):
        _check(name, x, positions)
        if jnp.finfo(x.dtype).maxexp < jnp.finfo(jnp.float32).maxexp:
            raise ValueError(f"`{name}` must have the range of float32 for xPos, got {x.dtype}.")
    check_positive("base", base, least=1)
    check_positive("scale_base", scale_base)
    at = known(positions)
    if at is not None and (at.min() < 0 or at.max() >= length):
        raise ValueError(
            f"`positions` must be from 0 to {length - 1} for xPos, got {at.min()} to {at.max()}: say the `length`."
        )
    debug.report("positions", f"outside 0 to {length - 1}", lambda: (positions < 0) | (positions >= length))
    dim = query.shape[-1]
    cos, sin = _cos_sin(positions, dim, base)
    log_zeta = np.log((np.arange(0, dim, 2) / dim + 0.4) / 1.4).astype(np.float32)
    powers = (positions.astype(jnp.float32) - length / 2) / scale_base
    scale = jnp.exp(powers.reshape(_row_shape(positions)) * log_zeta.reshape(1, 1, 1, -1))
    query = _rotate(query, cos * scale, sin * scale).astype(query.dtype)
    key = _rotate(key, cos / scale, sin / scale).astype(key.dtype)
    return query, key


def _check(name: str, x: Array, positions: Array) -> None:
    check_array(name, x, "floating point")
    if len(x.shape) != 4 or x.shape[-1] % 2:
        raise ValueError(
            f"`{name}`: rotary positions take arrays (batch, length, heads, even dim), got shape {x.shape}."
        )
    check_row_positions(positions, *x.shape[:2])


def _row_shape(positions: Array) -> tuple[int, int, int, int]:
    return (positions.size // positions.shape[-1], positions.shape[-1], 1, 1)


def _cos_sin(positions: Array, dim: int, base: float) -> tuple[Array, Array]:
    """Cosine and sine of the angle of each pair of each row, (1 or B, T, 1, H / 2)."""
    turns = base ** (-np.arange(0, dim, 2) / dim) / (2 * np.pi)  # per position, less than one
    steps = np.round(turns * 2.0**32).astype(np.uint32).reshape(1, 1, 1, -1)
    angles = jnp.asarray(positions).astype(jnp.uint32).reshape(_row_shape(positions)) * steps
    angles = lax.bitcast_convert_type(angles, jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2.0**32)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    wide = accumulator(x.dtype)
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    cos, sin = cos.astype(wide), sin.astype(wide)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
