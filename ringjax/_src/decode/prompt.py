"""Prefill: gathers the rows of the current segments of a prompt by position.

Shapes: ``B`` batch, ``T`` length, ``K`` key/value heads, ``S`` slots of a branch, ``H`` head dimension.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from ringjax._src.comm.layout import layout_named
from ringjax._src.comm.mesh import Ring, RingInfo
from ringjax._src.decode.cache import (
    DecodeCache,
    cache_specs,
    check_shards,
    clipped_counts,
    held_positions,
    offset_table,
    reshard,
)
from ringjax._src.validation import check_array, check_instance


def prefill(
    cache: DecodeCache,
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    lengths: Int[ArrayLike, " B"] | None = None,
    *,
    ring: Ring | None = None,
) -> DecodeCache:
    """Fills a cache with the keys and values of a prompt.

    The attention of the prompt itself is computed by `dilated_attention(..., is_causal=True)`. The previous contents of
    the cache are discarded.

    Args:
        cache: A cache from `init_cache`.
        key: Keys of the prompt, of any length.
        value: Values of the prompt.
        lengths: Length of each prompt without padding, from 0 to T; T by default. Values out of range raise an error if
            they are known, and are clipped if they are traced.
        ring: The ring over which `key` and `value` are sharded, in its layout, and for which the cache was created; or
            None. Its devices exchange only the rows of the cache, one branch at a time.

    Returns:
        The filled cache.

    Raises:
        ValueError: If `key` and `value` differ in shape, do not match the shape or dtype of `cache`, `lengths` are out
            of range, or the prompt or the slots of `cache` do not divide evenly over `ring`.

    Example:
        >>> import jax, ringjax as rj
        >>> pattern = rj.DilationPattern((16, 64), (1, 4))
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 100, 4, 8))
        >>> out = rj.dilated_attention(q, k, v, pattern, is_causal=True)
        >>> rj.prefill(rj.init_cache(pattern, 1, 4, 8, max_len=200), k, v).lengths
        Array([100], dtype=int32)
    """
    batch, length = _check_prompt(cache, key, value)
    shards = check_shards(cache, ring)
    ends = clipped_counts("lengths", lengths, batch, length)
    key, value = jnp.asarray(key), jnp.asarray(value)
    offsets = jnp.asarray(offset_table(cache))
    if ring is None or ring.resolve().size == 1:
        return _fill(cache, key, value, ends, offsets, info=None)
    info = ring.info()
    multiple = layout_named(info.layout).multiple(shards)
    if length % multiple:
        raise ValueError(
            f"`key` length must be a multiple of {multiple} for layout {ring.layout!r} on a ring of {shards}, "
            f"got {length}: pad the inputs with `to_layout` and pass `lengths`."
        )
    specs, heads = cache_specs(cache, ring), PartitionSpec(None, ring.head_axis)
    in_specs = (specs, ring.spec(), ring.spec(), specs.lengths, heads)
    fill = functools.partial(_fill, info=info)
    sharded = jax.shard_map(fill, mesh=ring.resolve(), in_specs=in_specs, out_specs=specs)
    return sharded(*reshard(ring, (cache, key, value, ends, offsets), in_specs))


def _check_prompt(cache: DecodeCache, key: Array, value: Array) -> tuple[int, int]:
    like = check_instance("cache", cache, DecodeCache).keys[0]
    batch, heads, dim = like.shape[0], cache.num_kv_heads, like.shape[3]
    for name, x in (("key", key), ("value", value)):
        check_array(name, x, "floating point")
        if len(x.shape) != 4 or (x.shape[0], *x.shape[2:]) != (batch, heads, dim):
            raise ValueError(f"`{name}` must have the shape ({batch}, length, {heads}, {dim}), got {x.shape}.")
        if x.dtype != like.dtype:
            raise ValueError(f"`{name}` must have the dtype of `cache`, got {x.dtype} and {like.dtype}.")
    if key.shape != value.shape:
        raise ValueError(f"`value` must have the shape of `key`, got {value.shape} and {key.shape}.")
    return batch, key.shape[1]


def _fill(
    cache: DecodeCache, key: Array, value: Array, lengths: Array, offsets: Array, *, info: RingInfo | None
) -> DecodeCache:
    """Fills the slots of one device; `info` is None without a ring."""
    shards = 1 if info is None else info.axis_size
    keys, values = [], []
    for i, (branch, held) in enumerate(zip(cache.branches, cache.keys, strict=True)):
        heads = slice(branch.first_head, branch.first_head + held.shape[1])
        begin = jnp.maximum(lengths - 1, 0) // branch.segment_length * branch.segment_length
        inside = held_positions(branch, offsets[i, heads], 0, held.shape[2] * shards)
        position = begin[:, None, None] + inside[None]  # (B, K, S)
        position = jnp.where(position < lengths[:, None, None], position, -1)
        with jax.named_scope(f"prefill_{branch.segment_length}_{branch.rate}"):
            keys.append(_rows_at(key[:, :, heads], position, info))
            values.append(_rows_at(value[:, :, heads], position, info))
    return dataclasses.replace(cache, keys=tuple(keys), values=tuple(values), lengths=lengths)


def _rows_at(x: Array, position: Array, info: RingInfo | None) -> Array:
    """Gathers rows of x (B, T, K, H) at positions (B, K, S), 0 at position -1; on a ring, for this device's slots."""
    index = position
    if info is not None:
        layout, me = layout_named(info.layout), lax.axis_index(info.axis_name)
        chunk = x.shape[1] // layout.chunks
        index = jnp.full_like(position, -1)
        for nth, start in enumerate(layout.starts(me, info.axis_size, chunk)):
            is_here = (position >= start) & (position < start + chunk)
            index = jnp.where(is_here, position - start + nth * chunk, index)
    take = jax.vmap(jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"), (1, 0)))
    rows = jnp.where(index[..., None] >= 0, take(x, index), 0)
    if info is None:
        return rows
    # each row comes from one device; the others contribute 0
    return lax.psum_scatter(rows, info.axis_name, scatter_dimension=2, tiled=True)
