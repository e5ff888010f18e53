"""Dense reference implementation, O(T²) in time and memory, against which all other code is tested."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from ringjax._src import dropout
from ringjax._src.online_softmax import accumulator
from ringjax._src.pattern import Branch, DilationPattern
from ringjax._src.validation import AttentionShape, check_dropout, check_inputs, shown


def reference_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    pattern: DilationPattern,
    *,
    is_causal: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    rows: Int[ArrayLike, " R"] | None = None,
) -> Float[Array, "B R N H"]:
    """Computes dilated attention directly from its definition, for tests.

    Takes one softmax over the multiset of keys that a query attends to.

    Args:
        query, key, value, pattern, is_causal, segment_ids, seq_len, scale, dropout_rate, dropout_rng: See
            `dilated_attention`.
        rows: Query positions to compute; all by default. Computing a few rows of a long sequence is cheap.

    Returns:
        The attention output of the queries at `rows`.

    Raises:
        ValueError: If `rows` is not a non-empty list of concrete positions below T, or under the same conditions as
            `dilated_attention`.

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
    allowed = (ids[:, p, None] == ids[:, None, :]) & (ids[:, p, None] >= 0)  # same document, (B, R, T)
    allowed = allowed & (p < shape.length)[None, :, None] & (s < shape.length)[None, None, :]
    allowed = allowed & (s[None, None, :] <= p[None, :, None]) if is_causal else allowed
    branches = pattern.branches(shape.kv_heads, shape.length)
    masks = [allowed[:, None] & _branch_mask(b, shape.kv_heads, p, s)[None] for b in branches]  # (B, K, R, T) each
    per_branch = pattern.mixing == "detached" or dropout_rate > 0
    counts = masks if per_branch else [functools.reduce(operator.add, (x.astype(int) for x in masks))]

    acc = accumulator(query.dtype)
    q, k, v = (x.astype(acc) for x in (query[:, p], key, value))
    q = q.reshape(*q.shape[:2], shape.kv_heads, shape.q_per_kv, shape.dim) * shape.scale
    scores = jnp.einsum("brkgh,bskh->bkgrs", q, k, precision="highest")
    masked = jnp.where(functools.reduce(operator.or_, masks)[:, :, None], scores, jnp.finfo(acc).min / 2)
    weights = jnp.exp(masked - lax.stop_gradient(masked.max(-1, keepdims=True)))
    parts = [weights * c[:, :, None].astype(acc) for c in counts]
    totals = [x.sum(-1, keepdims=True) for x in parts]
    mix = [lax.stop_gradient(t) if pattern.mixing == "detached" else t for t in totals]
    denominator = sum(mix[1:], mix[0])
    one = [jnp.where(t > 0, t, 1) for t in totals]  # the output of a row without keys is 0
    shares = [m / jnp.where(denominator > 0, denominator, 1) for m in mix]
    kept = [x * _factors(dropout_rate, dropout_rng, shape, i, p, acc) for i, x in enumerate(parts)]
    probs = sum(x / o * share for x, o, share in zip(kept, one, shares, strict=True))
    out = jnp.einsum("bkgrs,bskh->brkgh", probs, v, precision="highest")
    out = out / len(branches) if pattern.heads == "split" else out
    return out.reshape(*out.shape[:2], -1, shape.dim).astype(query.dtype)


def _factors(rate: float, rng: Array | None, shape: AttentionShape, branch: int, p: Array, acc: jnp.dtype) -> Array:
    """Returns the dropout factors of a branch's weights, 0 or 1 / (1 - rate), or 1 without dropout: (B, K, G, R, T)."""
    if rng is None or rate == 0:
        return jnp.ones((1,) * 5, acc)
    seeds = dropout.seeds_of(dropout.key_bits(rng), shape.batch, shape.kv_heads * shape.q_per_kv)
    query = dropout.query_hashes(seeds[..., None], p[None, None], branch).ravel()  # (B * N * R,)
    factors = dropout.factors(query, dropout.key_hashes(jnp.arange(shape.stored_length)), rate, acc)
    return factors.reshape(shape.batch, shape.kv_heads, shape.q_per_kv, len(p), -1)


def _checked_rows(rows: ArrayLike, length: int) -> np.ndarray:
    if isinstance(rows, jax.core.Tracer):
        raise ValueError(f"`rows` must be concrete, got the tracer {rows}.")
    try:
        p = np.asarray(rows)
    except ValueError:  # lists of different lengths
        p = np.zeros(0)
    if p.ndim != 1 or p.size == 0 or not np.issubdtype(p.dtype, np.integer) or p.min() < 0 or p.max() >= length:
        raise ValueError(f"`rows` must be a list of positions from 0 to {length - 1}, got {shown(rows)}.")
    return p


def _branch_mask(branch: Branch, kv_heads: int, p: Array, s: Array) -> Array:
    """Returns whether query position `p` and key position `s` are selected in the same segment: (K, R, T)."""
    w, r = branch.segment_length, branch.rate
    offsets = jnp.full((kv_heads, 1), -1)
    stop = branch.first_head + branch.num_heads
    offsets = offsets.at[branch.first_head : stop, 0].set(jnp.array(branch.offsets, int))
    chosen_p, chosen_s = (((x % w) % r)[None] == offsets for x in (p, s))
    return chosen_p[:, :, None] & chosen_s[:, None, :] & (p[:, None] // w == s[None, :] // w)[None]
