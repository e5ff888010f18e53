"""The next tokens: their attention over the cache and over each other, and their rows put into the cache.

Legend: ``B`` batch, ``n`` new tokens, ``N`` query heads, ``K`` key/value heads, ``G`` query heads of each, ``S`` slots
of a branch, ``H`` head dim, ``w`` segment length, ``r`` rate.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ringjax._src import online_softmax as softmax
from ringjax._src.comm.mesh import Ring
from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.decode.cache import (
    DecodeCache,
    cache_specs,
    check_ring,
    clipped_counts,
    held_positions,
    offset_table,
    placed,
)
from ringjax._src.decode.prompt import check_slots
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.pattern import Branch
from ringjax._src.validation import AttentionShape, check_inputs, check_instance


class Chunk(NamedTuple):
    """New tokens, heads before rows."""

    query: Array  # (B, K, n, G, H), scaled, in the accumulator's dtype
    key: Array  # (B, K, n, H)
    value: Array
    position: Array  # (B, n)
    is_real: Array  # (B, n): not padding

    def of(self, heads: slice) -> Chunk:
        """The chunk of some key/value heads."""
        return self._replace(query=self.query[:, heads], key=self.key[:, heads], value=self.value[:, heads])


def decode_step(
    cache: DecodeCache,
    query: Array,
    key: Array,
    value: Array,
    *,
    counts: ArrayLike | None = None,
    scale: float | None = None,
    ring: Ring | None = None,
) -> tuple[Array, DecodeCache]:
    """Causal dilated attention of the next tokens, one or several, after all tokens that the cache has seen.

    The result is what `dilated_attention(..., is_causal=True)` of the whole sequence gives at these positions. Each
    entry of the batch goes on from its own length. Compile it once for each number of new tokens, and donate the cache
    (`jax.jit(step, donate_argnums=0)`), or call it in a `lax.scan`: its rows are then overwritten where they stand.

    Args:
        cache: The cache, from `init_cache`, `prefill` or the step before.
        query: Queries (B, n, N, H) of the new tokens.
        key: Keys (B, n, K, H), N a multiple of K.
        value: Values, the shape of `key`.
        counts: How many of the n tokens each entry really has, integers (B,) from 0 to n; the others, at the end, are
            padding, which is not kept and gives 0. n by default. Numbers out of this range are an error where they are
            known, and clipped where they are traced.
        scale: Factor on the scores, ``1 / sqrt(H)`` by default.
        ring: The ring over which the cache was made, or None. Each device attends over its own slots; query, key and
            value are whole on each device of the ring.

    Returns:
        The attention (B, n, N, H) in the dtype of `query`, and the cache after these tokens.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import jax, ringjax as rj
        >>> pattern = rj.DilationPattern((16, 64), (1, 4))
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 100, 4, 8))
        >>> cache = rj.prefill(rj.init_cache(pattern, 1, 4, 8, max_len=200), k[:, :99], v[:, :99])
        >>> out, cache = rj.decode_step(cache, q[:, 99:], k[:, 99:], v[:, 99:])
        >>> whole = rj.dilated_attention(q, k, v, pattern, is_causal=True)
        >>> bool(jax.numpy.allclose(out, whole[:, 99:], atol=1e-5)), int(cache.lengths[0])
        (True, 100)
    """
    check_instance("cache", cache, DecodeCache)
    shape = check_inputs(query, key, value, cache.pattern, True, None, None, scale)
    _check_like_cache(cache, key)
    if ring is not None:
        check_instance("ring", ring, Ring)
    batch, length = key.shape[:2]
    real = jnp.full(batch, length, jnp.int32) if counts is None else clipped_counts("counts", counts, batch, length)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    offsets = jnp.asarray(offset_table(cache))
    alike_heads = tuple(max(Counter(branch.offsets).values(), default=0) for branch in cache.branches)
    step = functools.partial(_step, shape=shape, alike_heads=alike_heads)
    shards = 1 if ring is None else check_ring(ring, cache.pattern, shape.batch, shape.kv_heads)
    if ring is None or ring.resolve().size == 1:
        return step(cache, query, key, value, real, offsets, axis_name=None)
    check_slots(cache, shards)
    specs = cache_specs(cache, ring)
    new = PartitionSpec(ring.batch_axis, None, ring.head_axis, None)
    in_specs = (specs, new, new, new, specs.lengths, PartitionSpec(None, ring.head_axis))
    on_device = functools.partial(step, axis_name=ring.axis_name)
    sharded = jax.shard_map(on_device, mesh=ring.resolve(), in_specs=in_specs, out_specs=(new, specs))
    return sharded(*placed(ring, (cache, query, key, value, real, offsets), in_specs))


def _check_like_cache(cache: DecodeCache, key: Array) -> None:
    like = cache.keys[0]
    given, wanted = (key.shape[0], *key.shape[2:]), (like.shape[0], cache.num_kv_heads, like.shape[3])
    if given != wanted:
        raise ValueError(f"`key` must have the (batch, heads, dim) of `cache`, got {given} and {wanted}.")
    if key.dtype != like.dtype:
        raise ValueError(f"`key` must have the dtype of `cache`, got {key.dtype} and {like.dtype}.")


def _step(
    cache: DecodeCache,
    query: Array,
    key: Array,
    value: Array,
    counts: Array,
    offsets: Array,
    *,
    shape: AttentionShape,
    alike_heads: tuple[int, ...],
    axis_name: AxisName | None,
) -> tuple[Array, DecodeCache]:
    """What each device does; `axis_name` is None where one device has all slots."""
    chunk = _chunk(cache, query, key, value, counts, shape)
    parts, keys, values = [], [], []
    for i, branch in enumerate(cache.branches):
        heads = slice(branch.first_head, branch.first_head + cache.keys[i].shape[1])
        mine = chunk.of(heads)
        slots = cache.keys[i].shape[2]
        first_slot = 0 if axis_name is None else lax.axis_index(axis_name) * slots
        is_selected = _is_selected(branch, offsets[i, heads], chunk.position)
        with jax.named_scope(f"decode_{branch.segment_length}_{branch.rate}"):
            begin = chunk.position // branch.segment_length * branch.segment_length
            inside = held_positions(branch, offsets[i, heads], first_slot, slots)
            is_held = begin[:, None, :, None] + inside[None, :, None, :] < cache.lengths[:, None, None, None]
            seen = (is_selected[..., None] & is_held).astype(mine.query.dtype)
            alike = min(alike_heads[i], len(offsets[i, heads]))
            part = _attend_selected(mine.query, cache.keys[i], cache.values[i], seen, is_selected, alike)
            slot = _slots(branch, mine, is_selected, counts, first_slot, slots)
            slot = _after(part, slot)
            keys.append(_put(cache.keys[i], mine.key, slot))
            values.append(_put(cache.values[i], mine.value, slot))
            parts.append(part)
    cached = _joined(cache, parts)
    cached = cached if axis_name is None else _over_ring(cached, axis_name)
    own = _attend(chunk.query, chunk.key, chunk.value, _times_seen(cache.branches, offsets, chunk))
    out = softmax.merge(cached, own).out
    out = out / len(cache.branches) if cache.pattern.heads == "split" else out
    out = jnp.where(chunk.is_real[:, None, :, None, None], out, 0)
    out = out.transpose(0, 2, 1, 3, 4).reshape(query.shape).astype(query.dtype)
    lengths = cache.lengths + counts
    return out, dataclasses.replace(cache, keys=tuple(keys), values=tuple(values), lengths=lengths)


def _chunk(cache: DecodeCache, query: Array, key: Array, value: Array, counts: Array, shape: AttentionShape) -> Chunk:
    batch, new, heads, dim = query.shape
    wide = query.astype(softmax.accumulator(query.dtype)) * shape.scale
    grouped = wide.reshape(batch, new, heads // shape.q_per_kv, shape.q_per_kv, dim).transpose(0, 2, 1, 3, 4)
    nth = jnp.arange(new, dtype=jnp.int32)[None, :]
    is_real = nth < counts[:, None]
    # whatever the padding holds, 0 times it must be 0
    key, value = (jnp.where(is_real[:, :, None, None], x, 0).transpose(0, 2, 1, 3) for x in (key, value))
    return Chunk(grouped, key, value, cache.lengths[:, None] + nth, is_real)


def _is_selected(branch: Branch, offsets: Array, position: Array) -> Array:
    """Whether each head selects each position (B, n): (B, K, n)."""
    residue = position % branch.segment_length % branch.rate
    return residue[:, None, :] == offsets[None, :, None]


def _times_seen(branches: tuple[Branch, ...], offsets: Array, chunk: Chunk) -> Array:
    """In how many branches each new token sees each of the new tokens: (B, K, n, n)."""
    p = chunk.position
    is_before = (p[:, :, None] >= p[:, None, :]) & chunk.is_real[:, None, :]
    times = jnp.zeros((*chunk.key.shape[:3], p.shape[1]), chunk.query.dtype)
    for branch, each in zip(branches, offsets, strict=True):
        chosen, segment = _is_selected(branch, each, p), p // branch.segment_length
        is_near = is_before & (segment[:, :, None] == segment[:, None, :])
        times += (chosen[:, :, :, None] & chosen[:, :, None, :] & is_near[:, None]).astype(times.dtype)
    return times


def _attend(query: Array, key: Array, value: Array, times: Array) -> PartialSoftmax:
    """The partial of query (B, K, n, G, H) over key and value (B, K, S, H), seen `times` (B, K, n, S)."""
    return jax.vmap(jax.vmap(_attend_rows))(query, key, value, times)


def _attend_selected(
    query: Array, key: Array, value: Array, times: Array, is_selected: Array, alike: int
) -> PartialSoftmax:
    """As `_attend`; of one token only the heads that select it are read, at most `alike` of them."""
    if query.shape[2] > 1 or 4 * alike > query.shape[1]:  # picking them costs a copy
        return _attend(query, key, value, times)
    picked = jnp.argsort(~is_selected[:, :, 0], axis=1)[:, :alike]  # (B, alike)
    pick = jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))
    part = _attend(*(pick(x, picked) for x in (query, key, value, times)))
    put = jax.vmap(lambda x, new, i: x.at[i].set(new, mode="promise_in_bounds", unique_indices=True))
    return PartialSoftmax(*(put(x, new, picked) for x, new in zip(softmax.empty_like(query), part, strict=True)))


def _attend_rows(query: Array, key: Array, value: Array, times: Array) -> PartialSoftmax:
    group = query.shape[1]
    q, times = query.reshape(-1, query.shape[2]), jnp.repeat(times, group, axis=0)
    k, v = key.astype(q.dtype), value.astype(q.dtype)
    scores = jnp.where(times > 0, (k @ q.T).T, -jnp.inf)  # turning the scores is cheaper than turning the keys
    state, weights = softmax.rescale(softmax.start(q), scores)
    weights = weights * times
    part = softmax.finish(softmax.Running(weights @ v, state.peak, weights.sum(axis=1)))
    return PartialSoftmax(part.out.reshape(query.shape), part.lse.reshape(query.shape[:2]))


def _joined(cache: DecodeCache, parts: list[PartialSoftmax]) -> PartialSoftmax:
    """The branches together: side by side where each head runs one, else merged."""
    if cache.pattern.heads == "split":
        outs, lses = zip(*parts, strict=True)
        return PartialSoftmax(jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1))
    return functools.reduce(softmax.merge, parts)


def _over_ring(part: PartialSoftmax, axis_name: AxisName) -> PartialSoftmax:
    """The partial over the keys of all devices of a ring, by sums: what `softmax.merge` does for two."""
    peak = lax.pmax(part.lse, axis_name)
    weight = jnp.exp(part.lse - jnp.where(peak == -jnp.inf, 0, peak))
    out, total = lax.psum((part.out * weight[..., None], weight), axis_name)
    safe = jnp.where(total == 0, 1, total)  # NaN stays NaN
    return PartialSoftmax(out / safe[..., None], peak + jnp.log(safe))


def _slots(
    branch: Branch, chunk: Chunk, is_selected: Array, counts: Array, first_slot: Array | int, slots: int
) -> Array:
    """The slot of each new row of each head, or one that does not exist where the row is not kept: (B, K, n).

    Only rows of the segment in which the chunk ends are kept, so no two rows want one slot.
    """
    w = branch.segment_length
    last = chunk.position[:, 0] + counts - 1
    is_kept = chunk.is_real & (chunk.position // w == (last // w)[:, None])
    slot = chunk.position % w // branch.rate - first_slot
    is_here = is_kept & (slot >= 0) & (slot < slots)
    return jnp.where(is_selected & is_here[:, None, :], slot[:, None, :], slots)


def _after(part: PartialSoftmax, slot: Array) -> Array:
    """The slots, known only when `part` is: rows that are read before they are written need not be copied.

    An `optimization_barrier` is gone by the time XLA (jax 0.10) decides what to copy; a comparison that it does not
    see through stays.
    """
    never = ((part.out > 0) & (part.out < 0)).any(axis=(2, 3, 4))  # (B, K)
    return jnp.where(never[:, :, None], jnp.iinfo(slot.dtype).max, slot)


def _put(rows: Array, new: Array, slot: Array) -> Array:
    """The rows (B, K, S, H) with the new ones (B, K, n, H) in their slots."""
    return jax.vmap(jax.vmap(lambda x, y, i: x.at[i].set(y, mode="drop")))(rows, new, slot)
