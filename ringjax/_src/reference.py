"""The dense oracle: the definition written down, O(T²) in time and memory. Everything else is compared with it."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ringjax._src import dropout
from ringjax._src.online_softmax import accumulator
from ringjax._src.pattern import Branch, DilationPattern
from ringjax._src.validation import AttentionShape, check_dropout, check_inputs, shown


def reference_attention(
    query: Array,
    key: Array,
    value: Array,
    pattern: DilationPattern,
    *,
    is_causal: bool = False,
    segment_ids: Array | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    rows: ArrayLike | None = None,
) -> Array:
    """Dilated attention by the definition, for tests: one softmax over the multiset of keys that a query sees.

    Args:
        query, key, value, pattern, is_causal, segment_ids, seq_len, scale, dropout_rate, dropout_rng: As for
            `dilated_attention`.
        rows: Query positions to compute, all by default: a few rows of a long sequence cost little.

    Returns:
        The attention of the queries at `rows`, (B, len(rows), N, H).

    Example:
        >>> import jax, ringjax as rj
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
        >>> rj.reference_attention(q, k, v, rj.DilationPattern((8, 16), (1, 2)), rows=[0, 15]).shape
        (1, 2, 2, 8)
    """
    shape = check_inputs(query, key, value, pattern, is_causal, segment_ids, seq_len, scale)
    check_dropout(dropout_rate, dropout_rng)
    chosen = np.arange(shape.stored_length) if rows is None else _checked_rows(rows, shape.stored_length)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    s, p = jnp.arange(shape.stored_length), jnp.asarray(chosen)
    ids = jnp.zeros((1, shape.stored_length), int) if segment_ids is None else jnp.asarray(segment_ids)
    allowed = (ids[:, p, None] == ids[:, None, :]) & (ids[:, p, None] >= 0)  # one document, (B, R, T)
    allowed = allowed & (p < shape.length)[None, :, None] & (s < shape.length)[None, None, :]
    allowed = allowed & (s[None, None, :] <= p[None, :, None]) if is_causal else allowed
    branches = pattern.branches(shape.kv_heads, shape.length)
    seen = [allowed[:, None] & _same_rows(b, shape.kv_heads, p, s)[None] for b in branches]  # (B, K, R, T) each
    is_apart = pattern.mixing == "detached" or dropout_rate > 0
    counts = seen if is_apart else [functools.reduce(operator.add, (x.astype(int) for x in seen))]

    acc = accumulator(query.dtype)
    q, k, v = (x.astype(acc) for x in (query[:, p], key, value))
    q = q.reshape(*q.shape[:2], shape.kv_heads, shape.group, shape.dim) * shape.scale
    scores = jnp.einsum("brkgh,bskh->bkgrs", q, k, precision="highest")
    masked = jnp.where(functools.reduce(operator.or_, seen)[:, :, None], scores, jnp.finfo(acc).min / 2)
    weights = jnp.exp(masked - lax.stop_gradient(masked.max(-1, keepdims=True)))
    parts = [weights * c[:, :, None].astype(acc) for c in counts]
    totals = [x.sum(-1, keepdims=True) for x in parts]
    mix = [lax.stop_gradient(t) if pattern.mixing == "detached" else t for t in totals]
    joint = sum(mix[1:], mix[0])
    one = [jnp.where(t > 0, t, 1) for t in totals]  # a row that sees nothing gives 0
    shares = [m / jnp.where(joint > 0, joint, 1) for m in mix]
    kept = [x * _factors(dropout_rate, dropout_rng, shape, i, p, acc) for i, x in enumerate(parts)]
    probs = sum(x / o * share for x, o, share in zip(kept, one, shares, strict=True))
    out = jnp.einsum("bkgrs,bskh->brkgh", probs, v, precision="highest")
    out = out / len(branches) if pattern.heads == "split" else out
    return out.reshape(*out.shape[:2], -1, shape.dim).astype(query.dtype)


def _factors(rate: float, rng: Array | None, shape: AttentionShape, branch: int, p: Array, acc: jnp.dtype) -> Array:
    """What the weights of a branch are multiplied by: 1 without dropout, else 0 or 1 / (1 - rate), (B, K, G, R, T)."""
    if rng is None or rate == 0:
        return jnp.ones((1,) * 5, acc)
    seeds = dropout.seeds_of(dropout.key_bits(rng), shape.batch, shape.kv_heads * shape.group)
    mine = dropout.query_hashes(seeds[..., None], p[None, None], branch).ravel()  # (B * N * R,)
    found = dropout.factors(mine, dropout.key_hashes(jnp.arange(shape.stored_length)), rate, acc)
    return found.reshape(shape.batch, shape.kv_heads, shape.group, len(p), -1)


def _checked_rows(rows: ArrayLike, length: int) -> np.ndarray:
    if isinstance(rows, jax.core.Tracer):
        raise ValueError(f"`rows` must be known before the program runs, got {rows}.")
    try:
        p = np.asarray(rows)
    except ValueError:  # lists of different lengths
        p = np.zeros(0)
    if p.ndim != 1 or p.size == 0 or not np.issubdtype(p.dtype, np.integer) or p.min() < 0 or p.max() >= length:
        raise ValueError(f"`rows` must be a list of positions from 0 to {length - 1}, got {shown(rows)}.")
    return p


def _same_rows(branch: Branch, kv_heads: int, p: Array, s: Array) -> Array:
    """Whether query position `p` and key position `s` are both selected, in one segment: (K, R, T)."""
    w, r = branch.segment_length, branch.rate
    offsets = jnp.full((kv_heads, 1), -1)
    stop = branch.first_head + branch.num_heads
    offsets = offsets.at[branch.first_head : stop, 0].set(jnp.array(branch.offsets, int))
    chosen_p, chosen_s = (((x % w) % r)[None] == offsets for x in (p, s))
    return chosen_p[:, :, None] & chosen_s[:, None, :] & (p[:, None] // w == s[None, :] // w)[None]
