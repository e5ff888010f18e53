"""Dense reference implementation, O(T²) in time and memory, against which all other code is tested."""

from __future__ import annotations

import functools
import operator
from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from ringjax._src import dropout
from ringjax._src.online_softmax import accumulator
from ringjax._src.pattern import Branch, DilationPattern
from ringjax._src.validation import AttentionShape, check_dropout, check_extra_keys, check_inputs, shown


class SharedOptions(TypedDict, total=False):
    """Options that all attention functions share, for their overloads."""

    is_causal: bool
    segment_ids: Int[Array, "B T"] | None
    seq_len: int | None
    scale: float | None
    dropout_rate: float
    dropout_rng: Array | None
    sink_logits: Float[Array, " N"] | None


class _Options(SharedOptions, total=False):
    rows: Int[ArrayLike, " R"] | None


@overload
def reference_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    pattern: DilationPattern,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Float[Array, "B R N H"]: ...


@overload
def reference_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    pattern: DilationPattern,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Float[Array, "B R N H"], Float[Array, "B R N"]]: ...


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
    sink_logits: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    rows: Int[ArrayLike, " R"] | None = None,
) -> Float[Array, "B R N H"] | tuple[Float[Array, "B R N H"], Float[Array, "B R N"]]:
    """Computes dilated attention directly from its definition, for tests.

    Takes one softmax over the multiset of keys that a query attends to.

    Args:
        query, key, value, pattern, is_causal, segment_ids, seq_len, scale, dropout_rate, dropout_rng, sink_logits,
            return_lse: See `dilated_attention`.
        rows: Query positions to compute; all by default. Computing a few rows of a long sequence is cheap.

    Returns:
        The attention output of the queries at `rows`, and with `return_lse` their log-sum-exp.

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
    check_extra_keys(sink_logits, return_lse, query.shape[2], pattern)
    chosen = np.arange(shape.stored_length) if rows is None else _checked_rows(rows, shape.stored_length)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    s, p = jnp.arange(shape.stored_length), jnp.asarray(chosen)
    ids = jnp.zeros((1, shape.stored_length), int) if segment_ids is None else jnp.asarray(segment_ids)
    exists = (ids >= 0) & (s[None] < shape.length)  # not padding, (B, T)
    is_real = exists[:, p]
    allowed = (ids[:, p, None] == ids[:, None, :]) & is_real[:, :, None] & exists[:, None]  # same document, (B, R, T)
    allowed = allowed & (s[None, None, :] <= p[None, :, None]) if is_causal else allowed
    branches = pattern.branches(shape.kv_heads, shape.length)
    counts = [allowed[:, None] & _branch_mask(b, shape.kv_heads, p, s)[None] for b in branches]
    counts = [x.astype(int) for x in counts]  # (B, K, R, T) each
    zeros = [jnp.zeros((1, 1, 1), int) for _ in branches]  # zero keys, (B, K, R) each
    if pattern.padding == "zeros" and not is_causal:
        zeros = [jnp.where(is_real[:, None], _zero_keys(b, p, exists.sum(axis=1)), 0) for b in branches]
    per_branch = pattern.mixing == "detached" or dropout_rate > 0
    total = lambda given: given if per_branch else [functools.reduce(operator.add, given)]  # noqa: E731

    acc = accumulator(query.dtype)
    q, k, v = (x.astype(acc) for x in (query[:, p], key, value))
    q = q.reshape(*q.shape[:2], shape.kv_heads, shape.q_per_kv, shape.dim) * shape.scale
    scores = jnp.einsum("brkgh,bskh->bkgrs", q, k, precision="highest")
    sinks = jnp.full((shape.kv_heads * shape.q_per_kv,), -jnp.inf, acc)
    sinks = sinks if sink_logits is None else jnp.asarray(sink_logits).astype(acc)
    sinks = jnp.where(is_real[:, None, None], sinks.reshape(1, shape.kv_heads, shape.q_per_kv, 1), -jnp.inf)[..., None]
    probs, lse = _softmax(
        scores,
        [c[:, :, None] for c in total(counts)],
        [n[:, :, None, :, None] for n in total(zeros)],
        sinks,
        is_detached=pattern.mixing == "detached",
    )
    factors = (_factors(dropout_rate, dropout_rng, shape, i, p, acc) for i in range(len(probs)))
    dropped = sum(x * factor for x, factor in zip(probs, factors, strict=True))
    out = jnp.einsum("bkgrs,bskh->brkgh", dropped, v, precision="highest")
    out = out / len(branches) if pattern.heads == "split" else out
    out = out.reshape(*out.shape[:2], -1, shape.dim).astype(query.dtype)
    return (out, jnp.moveaxis(lse, 3, 1).reshape(out.shape[:3])) if return_lse else out


def _softmax(
    scores: Array, counts: list[Array], zeros: list[Array], sinks: Array, *, is_detached: bool
) -> tuple[list[Array], Array]:
    """Returns the probabilities of the keys in each branch (or in all) and the log-sum-exp.

    Args:
        scores: (B, K, G, R, T).
        counts: For each branch, how often each query attends to each key, (B, K, 1, R, T).
        zeros: For each branch, the number of keys of zeros that each query attends to, (B, K, 1, R, 1).
        sinks: The logit of an additional key whose value is zero, (B, K, G, R, 1).
        is_detached: Whether the weights of branches are constants for the gradient.
    """
    lowest = jnp.finfo(scores.dtype).min / 2
    visible = functools.reduce(operator.or_, (c > 0 for c in counts))
    has_zeros = functools.reduce(operator.or_, (n > 0 for n in zeros))
    masked, zero = jnp.where(visible, scores, lowest), jnp.where(has_zeros, 0, jnp.full_like(scores[..., :1], lowest))
    top = lax.stop_gradient(jnp.maximum(jnp.maximum(masked.max(-1, keepdims=True), zero), sinks))
    parts = [jnp.exp(masked - top) * c.astype(scores.dtype) for c in counts]
    totals = [
        x.sum(-1, keepdims=True) + jnp.exp(zero - top) * n.astype(scores.dtype)
        for x, n in zip(parts, zeros, strict=True)
    ]
    every = sum(totals[1:], totals[0]) + jnp.exp(sinks - top)
    shares = [lax.stop_gradient(t / _nonzero(every)) if is_detached else t / _nonzero(every) for t in totals]
    probs = [x / _nonzero(t) * share for x, t, share in zip(parts, totals, shares, strict=True)]
    return probs, jnp.where(every > 0, top + jnp.log(_nonzero(every)), -jnp.inf)


def _nonzero(total: Array) -> Array:
    """Replaces the denominator of a row without keys, 0, by 1, so that its output is 0."""
    return jnp.where(total > 0, total, 1)


def _zero_keys(branch: Branch, p: Array, lengths: Array) -> Array:
    """Counts the keys of zeros that each query attends to in a branch with ``padding="zeros"``: (B, K, R).

    A segment of w positions is padded to a multiple of the rate. Each head selects the same number of slots there;
    a slot after the end of the segment or of the sequence holds zeros.
    """
    lengths, p, r = lengths[:, None, None, None], p[None, None, :, None], branch.rate
    w = jnp.clip(lengths, 1, branch.segment_length)  # a shorter sequence is one segment
    offsets = jnp.array(branch.offsets, int)[None, :, None, None]
    slots = jnp.arange(-(-branch.segment_length // r))[None, None, None] * r + offsets  # positions in the segment
    exists = slots < -(-w // r) * r
    is_zero = (slots >= w) | (p // w * w + slots >= lengths)
    return (exists & is_zero & (p % w % r == offsets)).sum(axis=-1)


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
    offsets = jnp.array(branch.offset_table(kv_heads), int)[:, None]
    chosen_p, chosen_s = (((x % w) % r)[None] == offsets for x in (p, s))
    return chosen_p[:, :, None] & chosen_s[:, None, :] & (p[:, None] // w == s[None, :] // w)[None]
