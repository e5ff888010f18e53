"""Attention dropout: whether a weight is dropped depends on (key, batch entry, head, query, key, branch) alone.

Each weight has a number of 32 bits, hashed from a *stamp* of its query row and one of its key row, and is dropped where
that number is below the rate. Nothing is drawn in an order, so every layout, ring and blocking drops the same weights.

Legend: ``B`` batch, ``N`` query heads, ``M`` query rows, ``S`` key rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

_ODD = 0x9E3779B9  # 2**32 over the golden ratio: multiples of it are far apart


class RowHashes(NamedTuple):
    """A number for each query row (one for each head of a group) and for each key row, uint32."""

    query: Array
    key: Array


def key_bits(rng: Array) -> Array:
    """The two words, uint32, to which a key of `jax.random` comes down."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def seeds_of(words: Array, batch: int, heads: int, first_entry: Array | int = 0, first_head: Array | int = 0) -> Array:
    """A seed (B, N) for each head of each batch entry, uint32.

    Args:
        words: From `key_bits`.
        batch: Entries here.
        heads: Query heads here.
        first_entry: How many entries other devices have before those here.
        first_head: The same for heads.

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
    return _mixed(_mixed(words[0] + entry * jnp.uint32(_ODD))[:, None] ^ _mixed(words[1] ^ head)[None])


def query_hashes(seeds: Array, positions: Array, branch: int) -> Array:
    """The stamps of queries from the seeds of their heads and their positions, two arrays that go together."""
    return _mixed(_mixed(seeds + jnp.uint32((branch + 1) * _ODD % 2**32)) ^ _mixed(positions.astype(jnp.uint32)))


def key_hashes(positions: Array) -> Array:
    """The stamps of keys, which are the same for all heads, entries and branches."""
    return _mixed(positions.astype(jnp.uint32) ^ jnp.uint32(_ODD))


def factors(query: Array, key: Array, rate: float, dtype: jnp.dtype) -> Array:
    """What the weights (M, S) of rows with these stamps are multiplied by: 0 or ``1 / (1 - rate)``."""
    bits = _mixed(query[:, None] + key[None, :])
    limit = jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(bits >= limit, jnp.asarray(1 / (1 - rate), dtype), jnp.zeros((), dtype))


def _mixed(x: Array) -> Array:
    """A permutation of the numbers of 32 bits in which neighbors have nothing in common."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
