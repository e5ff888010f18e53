"""The KV cache: for each branch, the selected rows of the current segment, and how a prompt fills it.

Shapes: ``B`` batch, ``T`` length, ``K`` key/value heads, ``S`` slots of a branch, ``H`` head dimension. With segment
length ``w``, rate ``r`` and offset ``o(h)``, head ``h`` selects position ``p`` iff ``(p mod w) mod r == o(h)``, and its
row is stored in slot ``(p mod w) // r``:

    w = 6, r = 2, o = 1    position  0 1 2 3 4 5 | 6 7 8 9 10 11
                           slot        0   1   2 |   0   1    2

A row of a finished segment stays in its slot until it is overwritten. It is masked in the meantime, because the
contents of a slot follow from positions alone, see `held_positions`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int

from ringjax._src import debug
from ringjax._src.comm.axes import explicit_axes
from ringjax._src.comm.layout import layout_named
from ringjax._src.comm.mesh import Ring, RingInfo
from ringjax._src.pattern import Branch, DilationPattern
from ringjax._src.validation import (
    MOST_HEADS,
    MOST_POSITIONS,
    check_array,
    check_counts,
    check_dtype,
    check_instance,
    check_int,
    check_pattern,
    check_size,
)


@dataclasses.dataclass(frozen=True)
class DecodeCache:
    """The keys and values that later tokens can attend to, created by `init_cache`; a pytree.

    Its size does not depend on the number of tokens: each branch has ``ceil(min(w, max_len) / r)`` slots per head (on a
    ring, rounded up to a multiple of the ring size), so that

        nbytes = 2 * itemsize * head_dim * batch * (sum over branches of heads * slots) + 4 * batch

    Attributes:
        keys: One array (batch, heads, slots, head_dim) per branch.
        values: Arrays of the same shapes for the values.
        lengths: Number of tokens cached so far for each sequence of the batch, int32.
        pattern: The dilation pattern; static.
        max_len: The `max_len` of `init_cache`; static.

    Example:
        >>> import ringjax as rj
        >>> pattern = rj.DilationPattern(segment_lengths=(16, 64), dilation_rates=(1, 4))
        >>> cache = rj.init_cache(pattern, batch=1, num_kv_heads=4, head_dim=8, max_len=1_000_000)
        >>> [k.shape for k in cache.keys], cache.nbytes
        ([(1, 4, 16, 8), (1, 4, 16, 8)], 8196)
    """

    keys: tuple[Float[Array, "B _ _ H"], ...]
    values: tuple[Float[Array, "B _ _ H"], ...]
    lengths: Int[Array, " B"]
    pattern: DilationPattern
    max_len: int

    @property
    def nbytes(self) -> int:
        """Total bytes of all arrays, over all devices."""
        return sum(x.size * x.dtype.itemsize for x in (*self.keys, *self.values, self.lengths))

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return sum(k.shape[1] for k in self.keys) if self.pattern.heads == "split" else self.keys[0].shape[1]

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches, with segment lengths clamped to `max_len`."""
        return self.pattern.branches(self.num_kv_heads, self.max_len)


jax.tree_util.register_dataclass(
    DecodeCache, data_fields=["keys", "values", "lengths"], meta_fields=["pattern", "max_len"]
)


def init_cache(
    pattern: DilationPattern,
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    max_len: int,
    dtype: DTypeLike = jnp.float32,
    *,
    ring: Ring | None = None,
) -> DecodeCache:
    """Creates an empty cache for `prefill` and `decode_step`.

    Segments longer than `max_len` are clamped to it, like `dilated_attention` clamps them to its sequence length, so
    both agree up to `max_len` tokens. Decoding may continue beyond: a clamped branch then starts a new segment every
    `max_len` tokens, and the other branches are unaffected.

    Args:
        pattern: The dilation pattern.
        batch: Batch size.
        num_kv_heads: Number of key/value heads.
        head_dim: Head dimension.
        max_len: Number of tokens up to which decoding matches `dilated_attention`.
        dtype: Dtype of keys and values.
        ring: The ring over which the slots are sharded, or None. Its `batch_axis` and `head_axis` shard batch and
            heads; its layout applies to the prompt, not to the cache.

    Returns:
        The cache.

    Raises:
        ValueError: If a size is not a positive integer, `dtype` is not floating point, `ring` does not divide the batch
            or the heads, or the cache would be too large to allocate.
        NotImplementedError: If the pattern has ``heads="split"`` and `ring` shards the heads.

    Example:
        >>> import jax.numpy as jnp, ringjax as rj
        >>> pattern = rj.DilationPattern.geometric(1024, 1_048_576, 4)
        >>> cache = rj.init_cache(pattern, 1, num_kv_heads=4, head_dim=64, max_len=1_048_576, dtype=jnp.bfloat16)
        >>> 2 * 2 * 4 * 64 * 1_048_576 // cache.nbytes  # times smaller than the keys and values of all tokens
        170
    """
    check_pattern(pattern)
    sizes = {"batch": batch, "head_dim": head_dim, "max_len": max_len}
    batch, head_dim, max_len = (check_int(name, size, most=MOST_POSITIONS) for name, size in sizes.items())
    heads, dtype = check_int("num_kv_heads", num_kv_heads, most=MOST_HEADS), check_dtype("dtype", dtype)
    shards = 1 if ring is None else check_ring(ring, pattern, batch, heads)
    branches = pattern.branches(heads, max_len)
    slots = [-(-b.segment_length // b.rate) for b in branches]
    slots = [s + -s % shards for s in slots]
    for branch, count in zip(branches, slots, strict=True):
        names = "`batch`, `num_kv_heads`, `head_dim` and `max_len`"
        check_size(names, (batch, branch.num_heads, count, head_dim), dtype.itemsize)

    def empty() -> DecodeCache:
        keys = [jnp.zeros((batch, b.num_heads, s, head_dim), dtype) for b, s in zip(branches, slots, strict=True)]
        return DecodeCache(tuple(keys), tuple(map(jnp.zeros_like, keys)), jnp.zeros(batch, jnp.int32), pattern, max_len)

    if ring is None:
        return empty()
    specs, is_spec = cache_specs(jax.eval_shape(empty), ring), lambda x: isinstance(x, PartitionSpec)
    shardings = jax.tree.map(lambda spec: NamedSharding(ring.resolve(), spec), specs, is_leaf=is_spec)
    return jax.jit(empty, out_shardings=shardings)()


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
        lengths: Length of each prompt without padding, from 0 to T; `ring.seq_len` or else T by default. Values out of
            range raise an error if they are known, and are clipped if they are traced.
        ring: The ring over which `key` and `value` are sharded, in its layout, and for which the cache was created; or
            None. Its devices exchange only the rows of the cache, one branch at a time.

    Returns:
        The cache with the rows of the prompt.

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
    if lengths is None and ring is not None and (seq_len := ring.sequence_length(length)):
        lengths = np.full(batch, seq_len, np.int32)
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
            f"got {length}: pad the inputs with `ring.shard` and pass `lengths`."
        )
    specs, heads = cache_specs(cache, ring), PartitionSpec(None, ring.head_axis)
    in_specs = (specs, ring.spec(), ring.spec(), specs.lengths, heads)
    fill = functools.partial(_fill, info=None if ring.axis_name is None else info)
    sharded = jax.shard_map(fill, mesh=ring.resolve(), in_specs=in_specs, out_specs=specs)
    return sharded(*reshard(ring, (cache, key, value, ends, offsets), in_specs))


def cache_specs(cache: DecodeCache, ring: Ring) -> DecodeCache:
    """Returns the partition specs of a cache on a ring, as a cache of specs."""
    kv = PartitionSpec(ring.batch_axis, ring.head_axis, ring.axis_name, None)
    specs: DecodeCache = jax.tree.map(lambda x: kv if x.ndim == 4 else PartitionSpec(ring.batch_axis), cache)
    return specs


def reshard(ring: Ring, arrays: Any, specs: Any) -> Any:  # noqa: ANN401
    """Reshards arrays on an explicit mesh, where `shard_map` requires the exact sharding of its specs."""
    mesh = ring.resolve()
    if not explicit_axes(mesh):
        return arrays
    return jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(mesh, spec)), arrays, specs)


def check_ring(ring: Ring, pattern: DilationPattern, batch: int, kv_heads: int) -> int:
    """Checks that batch and heads divide evenly over a ring and returns its size."""
    check_instance("ring", ring, Ring).check_divides(batch=batch, kv_heads=kv_heads)
    if pattern.heads == "split" and ring.size("head_axis") > 1:
        raise NotImplementedError('`heads="split"` does not support a `head_axis` that shards the heads.')
    return ring.size("axis_name")


def check_shards(cache: DecodeCache, ring: Ring | None) -> int:
    """Checks that a cache divides evenly over a ring and returns the size of the ring, 1 without a ring."""
    if ring is None:
        return 1
    shards = check_ring(ring, cache.pattern, cache.keys[0].shape[0], cache.num_kv_heads)
    for i, keys in enumerate(cache.keys):
        if keys.shape[2] % shards:
            raise ValueError(
                f"`cache` slots must divide evenly over the ring of {shards}, got {keys.shape[2]} in branch {i}: "
                "create it with `init_cache(..., ring=ring)`."
            )
    return shards


def clipped_counts(name: str, values: ArrayLike | None, batch: int, most: int, least: int = 0) -> Array:
    """Checks one count per sequence of the batch, `most` by default; traced values are clipped."""
    if values is None:
        return jnp.full(batch, most, jnp.int32)
    counts = jnp.asarray(check_counts(name, values, batch, most, least))
    debug.report(name, f"outside {least} to {most}, and clipped", lambda: (counts < least) | (counts > most))
    return jnp.clip(counts, least, most).astype(jnp.int32)


def offset_table(cache: DecodeCache) -> np.ndarray:
    """Returns the offset of each key/value head in each branch, (branches, K), -1 if the branch excludes the head."""
    return np.stack([branch.offset_table(cache.num_kv_heads) for branch in cache.branches])


def held_positions(branch: Branch, offsets: Array, first_slot: Array | int, slots: int) -> Array:
    """Returns the position within its segment of the row in each slot of each head, (K, S)."""
    slot = first_slot + jnp.arange(slots, dtype=jnp.int32)
    return slot[None, :] * branch.rate + offsets[:, None]


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
