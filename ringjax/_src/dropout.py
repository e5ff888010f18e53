"""Attention dropout that is independent of layout, ring size and blocking.

Whether a weight is dropped depends only on the `jax.random` key, batch entry, head, query position, key position and
branch. A hash of the query row and a hash of the key row are combined into 32 bits per weight, and the weight is
dropped if these are below the rate. No random numbers are drawn in sequence, so every execution order drops the same
weights.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

_ODD = 0x9E3779B9  # 2**32 divided by the golden ratio: consecutive multiples are far apart


class RowHashes(NamedTuple):
    """Hashes (uint32) of the query rows, per query head, and of the key rows."""

    query: Array
    key: Array


def key_bits(rng: Array) -> Array:
    """Returns two uint32 words of random bits drawn from a `jax.random` key."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def seeds_of(
    key_bits: Array, batch: int, heads: int, first_entry: Array | int = 0, first_head: Array | int = 0
) -> Array:
    """Returns a uint32 seed for each batch entry and query head, of shape (batch, heads).

    Args:
        key_bits: Random bits from the function `key_bits`.
        batch: Number of batch entries on this device.
        heads: Number of query heads on this device.
        first_entry: Global index of the first batch entry on this device.
        first_head: Global index of the first query head on this device.

    Example:
        >>> import jax.numpy as jnp
        >>> whole = seeds_of(jnp.array([1, 2], jnp.uint32), 4, 8)
        >>> corner = seeds_of(jnp.array([1, 2], jnp.uint32), 2, 4, first_entry=2, first_head=4)
        >>> bool((whole[2:, 4:] == corner).all())
        True
    """
    entry, head = (
        jnp.arange(num, dtype=jnp.uint32) + jnp.asarray(first).astype(jnp.uint32)
        for num, first in ((batch, first_entry), (heads, first_head))
    )
    return _hash(_hash(key_bits[0] + entry * jnp.uint32(_ODD))[:, None] ^ _hash(key_bits[1] ^ head)[None])


def query_hashes(seeds: Array, positions: Array, branch: int) -> Array:
    """Hashes query rows from the seeds of their heads and their positions, which broadcast."""
    return _hash(_hash(seeds + jnp.uint32((branch + 1) * _ODD % 2**32)) ^ _hash(positions.astype(jnp.uint32)))


def key_hashes(positions: Array) -> Array:
    """Hashes key rows from their positions; the same for all batch entries, heads and branches."""
    return _hash(positions.astype(jnp.uint32) ^ jnp.uint32(_ODD))


def factors(query: Array, key: Array, rate: float, dtype: jnp.dtype) -> Array:
    """Returns the dropout factors, 0 or ``1 / (1 - rate)``, for all pairs of M query and S key hashes: (M, S)."""
    bits = _hash(query[:, None] + key[None, :])
    limit = jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(bits >= limit, jnp.asarray(1 / (1 - rate), dtype), jnp.zeros((), dtype))


def _hash(x: Array) -> Array:
    """Applies a bijective 32-bit hash that decorrelates neighboring inputs."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
