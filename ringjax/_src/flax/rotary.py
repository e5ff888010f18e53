"""Rotary and xPos positional encodings, for rows in any storage order.

Dimensions ``i`` and ``i + H / 2`` form a pair, which is rotated by ``position * base ** (-2 i / H)``.

Angles are wrapping integers in units of 2^-32 turns, so the angle between two rows depends only on their distance, at
position ten million as at position ten. In float32, the product would be off by 0.03 rad at position one million.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from ringjax._src import debug
from ringjax._src.online_softmax import accumulator
from ringjax._src.validation import check_array, check_int, check_positive, check_row_positions, known

XPOS_LENGTH = 65_536  # scales reach (1.4 / 0.4) ** (length / 2 / 512), which overflows float32 for longer sequences


def rotary(
    x: Float[Array, "B T N H"], positions: Int[Array, " T"] | Int[Array, "B T"], *, base: float = 10_000.0
) -> Float[Array, "B T N H"]:
    """Applies rotary positional encoding to queries or keys.

    Args:
        x: Queries or keys, with an even head dimension H.
        positions: Position in the sequence of each row; see `ringjax.positions`.
        base: Base of the wavelengths, at least 1.

    Returns:
        The rotated array in the dtype of `x`, computed in at least float32.

    Raises:
        ValueError: If `x` is not a floating-point array of rank 4 with an even H, `positions` has neither of the shapes
            above or is not of an integer dtype, or `base` is below 1.

    Example:
        >>> import jax.numpy as jnp, ringjax as rj
        >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
        >>> print(rj.rotary(x, jnp.array([1])).round(3))  # cos(1), sin(1)
        [[[[0.54  0.841]]]]
    """
    _check("x", x, positions)
    check_positive("base", base, least=1)
    return _rotate(x, *_cos_sin(positions, x.shape[-1], base, accumulator(x.dtype))).astype(x.dtype)


def xpos(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    positions: Int[Array, " T"] | Int[Array, "B T"],
    *,
    length: int,
    base: float = 10_000.0,
    scale_base: float = 512.0,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Applies xPos positional encoding to queries and keys: rotation, and scales that make scores decay with distance.

    The contribution of pair ``i`` to the score of a query at position ``p`` and a key at position ``s`` is scaled by
    ``zeta_i ** ((p - s) / scale_base)``, where ``zeta_i = (2 i / H + 0.4) / 1.4``. Scores of later keys would grow, so
    xPos is for causal attention only. See [the xPos paper](https://arxiv.org/abs/2212.10554).

    Args:
        query: Queries, with an even head dimension H.
        key: Keys.
        positions: Position in the sequence of each row, from 0 to ``length - 1``. Concrete positions are checked; for
            traced positions out of range, scales may overflow float32.
        length: Number of positions, at most 65,536, beyond which the scales overflow float32. Queries and keys of the
            same attention must use the same `length`.
        base: Base of the wavelengths, at least 1.
        scale_base: Distance over which the scores of pair ``i`` decay by the factor ``zeta_i``; above 0.

    Returns:
        Query and key in their dtypes, computed in at least float32.

    Raises:
        ValueError: If `length` exceeds 65,536, `positions` are out of range or have neither of the shapes above,
            `query` or `key` is not of rank 4 with an even H, is float16 (which lacks the range), or `base` or
            `scale_base` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp, ringjax as rj
        >>> query, key = jax.random.normal(jax.random.key(0), (2, 1, 64, 4, 8))
        >>> query, key = rj.xpos(query, key, jnp.arange(64), length=64)
        >>> query.shape
        (1, 64, 4, 8)
    """
    if check_int("length", length) > XPOS_LENGTH:
        raise ValueError(
            f"`length` must be at most {XPOS_LENGTH} for xPos, as its scales overflow float32 beyond, got {length}."
        )
    for name, x in (("query", query), ("key", key)):
        _check(name, x, positions)
        if jnp.finfo(x.dtype).maxexp < jnp.finfo(jnp.float32).maxexp:
            raise ValueError(f"`{name}` must have the range of float32 for xPos, got {x.dtype}.")
    check_positive("base", base, least=1)
    check_positive("scale_base", scale_base)
    concrete = known(positions)
    if concrete is not None and (concrete.min() < 0 or concrete.max() >= length):
        raise ValueError(
            f"`positions` must be from 0 to {length - 1} for xPos, got {concrete.min()} to {concrete.max()}: increase "
            "`length`."
        )
    debug.report("positions", f"outside 0 to {length - 1}", lambda: (positions < 0) | (positions >= length))
    dim = query.shape[-1]
    dtype = accumulator(query.dtype)
    cos, sin = _cos_sin(positions, dim, base, dtype)
    log_zeta = np.log((np.arange(0, dim, 2) / dim + 0.4) / 1.4).astype(dtype)
    powers = (positions.astype(dtype) - length / 2) / scale_base
    scale = jnp.exp(powers.reshape(_row_shape(positions)) * log_zeta.reshape(1, 1, 1, -1))
    query = _rotate(query, cos * scale, sin * scale).astype(query.dtype)
    key = _rotate(key, cos / scale, sin / scale).astype(key.dtype)
    return query, key


def _check(name: str, x: Array, positions: Array) -> None:
    check_array(name, x, "floating point")
    if len(x.shape) != 4 or x.shape[-1] % 2:
        raise ValueError(
            f"`{name}` must have the axes (batch, length, heads, even dim) for rotary positions, got shape {x.shape}."
        )
    check_row_positions(positions, *x.shape[:2])


def _row_shape(positions: Array) -> tuple[int, int, int, int]:
    return (positions.size // positions.shape[-1], positions.shape[-1], 1, 1)


def _cos_sin(positions: Array, dim: int, base: float, dtype: np.dtype) -> tuple[Array, Array]:
    """Returns cosine and sine of the angle of each pair of each row, of shape (1 or B, T, 1, H / 2).

    Float32 cannot hold the angles of far positions, so they are counted in fractions of a turn, unless `dtype` is
    float64.
    """
    if dtype == np.float64:
        frequencies = (base ** (-np.arange(0, dim, 2) / dim)).reshape(1, 1, 1, -1)
        exact = jnp.asarray(positions).astype(dtype).reshape(_row_shape(positions)) * frequencies
        return jnp.cos(exact), jnp.sin(exact)
    turns = base ** (-np.arange(0, dim, 2) / dim) / (2 * np.pi)  # per position, less than one
    steps = np.round(turns * 2.0**32).astype(np.uint32).reshape(1, 1, 1, -1)
    angles = jnp.asarray(positions).astype(jnp.uint32).reshape(_row_shape(positions)) * steps
    angles = lax.bitcast_convert_type(angles, jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2.0**32)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates, and scales, each pair of dimensions in at least float32."""
    dtype = accumulator(x.dtype)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    cos, sin = cos.astype(dtype), sin.astype(dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
