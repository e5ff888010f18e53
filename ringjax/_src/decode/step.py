"""Decoding: new tokens attend to the cache and to each other, and their rows are written to the cache.

Shapes: ``B`` batch, ``n`` new tokens, ``N`` query heads, ``K`` key/value heads, ``G`` query heads per key/value head,
``S`` slots of a branch, ``H`` head dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from ringjax._src import online_softmax as softmax
from ringjax._src.comm.mesh import Ring
from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.decode.cache import (
    DecodeCache,
    cache_specs,
    check_shards,
    clipped_counts,
    held_positions,
    offset_table,
    reshard,
)
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.pattern import Branch
from ringjax._src.validation import AttentionShape, check_extra_keys, check_inputs, check_instance


class NewTokens(NamedTuple):
    """New tokens, in head-major order."""

    query: Array  # (B, K, n, G, H), scaled, in the accumulator's dtype
    key: Array  # (B, K, n, H)
    value: Array
    position: Array  # (B, n)
    is_real: Array  # (B, n): not padding

    def of(self, heads: slice) -> NewTokens:
        """Returns the tokens for some key/value heads."""
        return self._replace(query=self.query[:, heads], key=self.key[:, heads], value=self.value[:, heads])


def decode_step(
    cache: DecodeCache,
    query: Float[Array, "B n N H"],
    key: Float[Array, "B n K H"],
    value: Float[Array, "B n K H"],
    *,
    counts: Int[ArrayLike, " B"] | None = None,
    scale: float | None = None,
    sink_logits: Float[Array, " N"] | None = None,
    ring: Ring | None = None,
) -> tuple[Float[Array, "B n N H"], DecodeCache]:
    """Computes causal dilated attention of one or more new tokens and adds them to the cache.

    The result equals that of `dilated_attention(..., is_causal=True)` on the whole sequence at these positions.
    Sequences of the batch may have different lengths. Compile it once per number of new tokens, and donate the cache
    (`jax.jit(step, donate_argnums=0)`) or call it in a `lax.scan`, so that the cache is updated in place.

    Args:
        cache: A cache from `init_cache`, `prefill` or the previous step.
        query: Queries of the new tokens.
        key: Keys of the new tokens, where N is a multiple of K.
        value: Values of the new tokens.
        counts: Number of new tokens of each sequence, from 0 to n; n by default. Later rows are padding, which is not
            cached and outputs 0. Values out of range raise an error if they are known, and are clipped if they are
            traced.
        scale: Factor on the scores, ``1 / sqrt(H)`` by default.
        sink_logits: Logit of an attention sink per query head, or None, as in `dilated_attention`.
        ring: The ring for which the cache was created, or None. Each device attends to its slots; query, key and value
            are replicated over the ring.

    Returns:
        The attention output, in the dtype of `query`, and the updated cache.

    Raises:
        ValueError: If `key` and `value` differ in shape, `query`, `key` or `value` does not match the shape or dtype of
            `cache`, `counts` are out of range, `sink_logits` does not have one entry per query head or is used with
            ``mixing="detached"``, or the slots of `cache` do not divide evenly over `ring`.

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
    check_extra_keys(sink_logits, False, query.shape[2], cache.pattern)
    _check_like_cache(cache, key)
    batch, length = key.shape[:2]
    check_shards(cache, ring)
    real = clipped_counts("counts", counts, batch, length)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    offsets = jnp.asarray(offset_table(cache))
    max_selected = tuple(max(Counter(branch.offsets).values(), default=0) for branch in cache.branches)
    step = functools.partial(_step, shape=shape, max_selected=max_selected)
    given: list[Any] = [cache, query, key, value, real, offsets]
    if sink_logits is not None:
        given.append(jnp.asarray(sink_logits).astype(softmax.accumulator(query.dtype)))
    if ring is None or ring.resolve().size == 1:
        return step(*given, axis_name=None)
    specs = cache_specs(cache, ring)
    new = PartitionSpec(ring.batch_axis, None, ring.head_axis, None)
    heads = PartitionSpec(ring.head_axis)
    in_specs = (specs, new, new, new, specs.lengths, PartitionSpec(None, *heads), heads)[: len(given)]
    on_device = functools.partial(step, axis_name=ring.axis_name)
    sharded = jax.shard_map(on_device, mesh=ring.resolve(), in_specs=in_specs, out_specs=(new, specs))
    return sharded(*reshard(ring, tuple(given), in_specs))


def _check_like_cache(cache: DecodeCache, key: Array) -> None:
    like = cache.keys[0]
    given, wanted = (key.shape[0], *key.shape[2:]), (like.shape[0], cache.num_kv_heads, like.shape[3])
    if given != wanted:
        raise ValueError(f"`key` must have the shape (batch, heads, dim) of `cache`, got {given} and {wanted}.")
    if key.dtype != like.dtype:
        raise ValueError(f"`key` must have the dtype of `cache`, got {key.dtype} and {like.dtype}.")


def _step(
    cache: DecodeCache,
    query: Array,
    key: Array,
    value: Array,
    counts: Array,
    offsets: Array,
    sink: Array | None = None,
    *,
    shape: AttentionShape,
    max_selected: tuple[int, ...],
    axis_name: AxisName | None,
) -> tuple[Array, DecodeCache]:
    """Computes one step on one device; `axis_name` is None without a ring."""
    tokens = _new_tokens(cache, query, key, value, counts, shape)
    parts, keys, values = [], [], []
    for i, branch in enumerate(cache.branches):
        heads = slice(branch.first_head, branch.first_head + cache.keys[i].shape[1])
        of_heads, slots = tokens.of(heads), cache.keys[i].shape[2]
        first_slot = 0 if axis_name is None else lax.axis_index(axis_name) * slots
        is_selected = _is_selected(branch, offsets[i, heads], tokens.position)
        with jax.named_scope(f"decode_{branch.segment_length}_{branch.rate}"):
            begin = tokens.position // branch.segment_length * branch.segment_length
            inside = held_positions(branch, offsets[i, heads], first_slot, slots)
            is_held = begin[:, None, :, None] + inside[None, :, None, :] < cache.lengths[:, None, None, None]
            is_active = (is_selected[..., None] & is_held).astype(of_heads.query.dtype)
            most = min(max_selected[i], len(offsets[i, heads]))
            part = _attend_selected(of_heads.query, cache.keys[i], cache.values[i], is_active, is_selected, most)
            slot = _order_after(part, _slots(branch, of_heads, is_selected, counts, first_slot, slots))
            keys.append(_write(cache.keys[i], of_heads.key, slot))
            values.append(_write(cache.values[i], of_heads.value, slot))
            parts.append(part)
    cached = _combine_branches(cache, parts)
    cached = cached if axis_name is None else _merge_over_ring(cached, axis_name)
    new = _attend(tokens.query, tokens.key, tokens.value, _num_branches(cache.branches, offsets, tokens))
    merged = softmax.merge(cached, new)
    if sink is not None:
        lse = jnp.broadcast_to(sink.reshape(1, -1, 1, shape.q_per_kv), merged.lse.shape)
        merged = softmax.merge(merged, PartialSoftmax(jnp.zeros_like(merged.out), lse))
    out = merged.out
    out = out / len(cache.branches) if cache.pattern.heads == "split" else out
    out = jnp.where(tokens.is_real[:, None, :, None, None], out, 0)
    out = out.transpose(0, 2, 1, 3, 4).reshape(query.shape).astype(query.dtype)
    lengths = cache.lengths + counts
    return out, dataclasses.replace(cache, keys=tuple(keys), values=tuple(values), lengths=lengths)


def _new_tokens(
    cache: DecodeCache, query: Array, key: Array, value: Array, counts: Array, shape: AttentionShape
) -> NewTokens:
    batch, new, heads, dim = query.shape
    wide = query.astype(softmax.accumulator(query.dtype)) * shape.scale
    by_kv_head = wide.reshape(batch, new, heads // shape.q_per_kv, shape.q_per_kv, dim).transpose(0, 2, 1, 3, 4)
    nth = jnp.arange(new, dtype=jnp.int32)[None, :]
    is_real = nth < counts[:, None]
    # zero the padding, which may hold NaN or infinity
    key, value = (jnp.where(is_real[:, :, None, None], x, 0).transpose(0, 2, 1, 3) for x in (key, value))
    return NewTokens(by_kv_head, key, value, cache.lengths[:, None] + nth, is_real)


def _is_selected(branch: Branch, offsets: Array, position: Array) -> Array:
    """Returns whether each head selects each position (B, n), as (B, K, n)."""
    residue = position % branch.segment_length % branch.rate
    return residue[:, None, :] == offsets[None, :, None]


def _num_branches(branches: tuple[Branch, ...], offsets: Array, tokens: NewTokens) -> Array:
    """Counts the branches in which each new token attends to each new token, (B, K, n, n)."""
    p = tokens.position
    is_before = (p[:, :, None] >= p[:, None, :]) & tokens.is_real[:, None, :]
    counts = jnp.zeros((*tokens.key.shape[:3], p.shape[1]), tokens.query.dtype)
    for branch, branch_offsets in zip(branches, offsets, strict=True):
        chosen, segment = _is_selected(branch, branch_offsets, p), p // branch.segment_length
        is_visible = is_before & (segment[:, :, None] == segment[:, None, :])
        counts += (chosen[:, :, :, None] & chosen[:, :, None, :] & is_visible[:, None]).astype(counts.dtype)
    return counts


def _attend(query: Array, key: Array, value: Array, times: Array) -> PartialSoftmax:
    """Attends with query (B, K, n, G, H) to key and value (B, K, S, H), each pair counted `times` (B, K, n, S)."""
    return jax.vmap(jax.vmap(_attend_rows))(query, key, value, times)


def _attend_selected(
    query: Array, key: Array, value: Array, times: Array, is_selected: Array, most: int
) -> PartialSoftmax:
    """Like `_attend`, but for a single token it reads only the heads that select it, at most `most`."""
    if query.shape[2] > 1 or 4 * most > query.shape[1]:  # gathering the heads costs a copy
        return _attend(query, key, value, times)
    picked = jnp.argsort(~is_selected[:, :, 0], axis=1)[:, :most]  # (B, most)
    pick = jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))
    part = _attend(*(pick(x, picked) for x in (query, key, value, times)))
    put = jax.vmap(lambda x, new, i: x.at[i].set(new, mode="promise_in_bounds", unique_indices=True))
    return PartialSoftmax(*(put(x, new, picked) for x, new in zip(softmax.empty_like(query), part, strict=True)))


def _attend_rows(query: Array, key: Array, value: Array, times: Array) -> PartialSoftmax:
    q, times = query.reshape(-1, query.shape[2]), jnp.repeat(times, query.shape[1], axis=0)
    k, v = key.astype(q.dtype), value.astype(q.dtype)
    scores = jnp.where(times > 0, (k @ q.T).T, -jnp.inf)  # transposing the scores is cheaper than transposing the keys
    state, weights = softmax.rescale(softmax.start(q), scores)
    weights = weights * times
    part = softmax.finish(softmax.SoftmaxState(weights @ v, state.max, weights.sum(axis=1)))
    return PartialSoftmax(part.out.reshape(query.shape), part.lse.reshape(query.shape[:2]))


def _combine_branches(cache: DecodeCache, parts: list[PartialSoftmax]) -> PartialSoftmax:
    """Combines the branches: concatenates heads if each head runs one branch, otherwise merges."""
    if cache.pattern.heads == "split":
        outs, lses = zip(*parts, strict=True)
        return PartialSoftmax(jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1))
    return functools.reduce(softmax.merge, parts)


def _merge_over_ring(part: PartialSoftmax, axis_name: AxisName) -> PartialSoftmax:
    """Merges the partial results of all devices of a ring, like `softmax.merge` does for two."""
    max_lse = lax.pmax(part.lse, axis_name)
    weight = jnp.exp(part.lse - jnp.where(max_lse == -jnp.inf, 0, max_lse))
    out, denominator = lax.psum((part.out * weight[..., None], weight), axis_name)
    safe = jnp.where(denominator == 0, 1, denominator)  # keeps NaN
    return PartialSoftmax(out / safe[..., None], max_lse + jnp.log(safe))


def _slots(
    branch: Branch, tokens: NewTokens, is_selected: Array, counts: Array, first_slot: Array | int, slots: int
) -> Array:
    """Returns the slot of each new row of each head, (B, K, n), out of bounds if the row is not kept.

    Only rows of the segment in which the new tokens end are kept, so no two rows share a slot.
    """
    w = branch.segment_length
    last = tokens.position[:, 0] + counts - 1
    is_kept = tokens.is_real & (tokens.position // w == (last // w)[:, None])
    slot = tokens.position % w // branch.rate - first_slot
    is_here = is_kept & (slot >= 0) & (slot < slots)
    return jnp.where(is_selected & is_here[:, None, :], slot[:, None, :], slots)


def _order_after(part: PartialSoftmax, slot: Array) -> Array:
    """Makes the slots depend on `part`, so that XLA reads the cache before writing it and need not copy it.

    An `optimization_barrier` is removed before XLA (jax 0.10) decides what to copy; a comparison that it cannot
    simplify remains.
    """
    never = ((part.out > 0) & (part.out < 0)).any(axis=(2, 3, 4))  # (B, K)
    return jnp.where(never[:, :, None], jnp.iinfo(slot.dtype).max, slot)


def _write(cached: Array, new: Array, slot: Array) -> Array:
    """Writes new rows (B, K, n, H) to their slots of the cached rows (B, K, S, H)."""
    return jax.vmap(jax.vmap(lambda x, y, i: x.at[i].set(y, mode="drop")))(cached, new, slot)
