"""Attention weights of a few queries, recomputed from queries, keys and the log-sum-exp of a call."""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from ringjax._src.online_softmax import accumulator, for_backward
from ringjax._src.pattern import Branch, DilationPattern
from ringjax._src.validation import check_array, check_inputs, check_integers, known, shown


def attention_rows(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    lse: Float[Array, "B T N"],
    pattern: DilationPattern,
    *,
    rows: Int[ArrayLike, " R"],
    is_causal: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
) -> Float[Array, "B R N T"]:
    """Computes the attention weights of chosen queries over all keys.

    The weights are exact: those by which `dilated_attention` multiplies the values, added up over the branches in which
    a query attends to a key. Time and memory are proportional to R times T.

    A query without sink or zero keys has weights that sum to 1. Sinks (`sink_logits`) and the zero keys of
    ``padding="zeros"`` take the rest of the weight. All weights are 0 for a (position, head) pair that no branch
    selects, and for padding. With ``heads="split"`` the weights sum to 1 as well; `dilated_attention` divides the
    weighted sum of the values by the number of branches.

    Args:
        query, key: Queries and keys, as passed to `dilated_attention`. Arrays of a ring are put in sequence order first
            (see `from_layout`).
        lse: The log-sum-exp of the scores, which `dilated_attention` returns with ``return_lse=True``.
        pattern, is_causal, segment_ids, seq_len, scale: See `dilated_attention`; the same as in that call.
        rows: Positions of the queries. Under `jit` they may be traced; positions out of range then have weights of 0.

    Returns:
        The weight of each key for each chosen query and query head, in at least float32.

    Raises:
        ValueError: If `rows` is not a non-empty list of positions below T, `lse` is not an array of shape (B, T, N), or
            under the same conditions as `dilated_attention`.

    Example:
        >>> import jax, ringjax as rj
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 8))
        >>> pattern = rj.DilationPattern((16, 64), (1, 4))
        >>> out, lse = rj.dilated_attention(q, k, v, pattern, return_lse=True)
        >>> weights = rj.attention_rows(q, k, lse, pattern, rows=[0, 63])
        >>> weights.shape
        (1, 2, 4, 64)
        >>> bool(abs(weights.sum(-1) - 1).max() < 1e-5)
        True
    """
    return row_weights(
        query,
        key,
        lse,
        pattern,
        rows=rows,
        is_causal=is_causal,
        segment_ids=segment_ids,
        seq_len=seq_len,
        scale=scale,
    )[0]


def row_weights(
    query: Array,
    key: Array,
    lse: Array,
    pattern: DilationPattern,
    *,
    rows: ArrayLike,
    is_causal: bool = False,
    segment_ids: Array | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Computes the weights (B, R, N, T) of all keys, as `attention_rows`, and those (B, R, N) of all zero keys."""
    shape = check_inputs(query, key, key, pattern, is_causal, segment_ids, seq_len, scale)
    _check_lse(lse, query.shape[:3])
    p = jnp.asarray(check_rows("rows", rows, shape.stored_length))
    acc = accumulator(query.dtype)
    chosen = jnp.take(query, p, axis=1, mode="clip").astype(acc) * shape.scale
    chosen = chosen.reshape(*chosen.shape[:2], shape.kv_heads, shape.q_per_kv, shape.dim)
    scores = jnp.einsum("brkgh,bskh->brkgs", chosen, jnp.asarray(key).astype(acc), precision="highest")
    totals = for_backward(jnp.take(lse, p, axis=1, mode="clip").astype(acc)).reshape(scores.shape[:-1])

    s = jnp.arange(shape.stored_length, dtype=p.dtype)
    ids = jnp.where(s < shape.length, 0 if segment_ids is None else jnp.asarray(segment_ids), -1)
    ids = jnp.broadcast_to(ids, (shape.batch, shape.stored_length))
    own = jnp.where((p >= 0) & (p < shape.length), jnp.take(ids, p, axis=1, mode="clip"), -1)[:, :, None]
    is_visible = (own == ids[:, None]) & (own >= 0)  # (B, R, T)
    if is_causal:
        is_visible = is_visible & (s[None, None] <= p[None, :, None])
    branches = pattern.branches(shape.kv_heads, shape.length)
    counts = functools.reduce(operator.add, (_selected(b, shape.kv_heads, p, s) for b in branches))
    counts = jnp.where(is_visible[:, :, None], counts[None], 0)  # (B, R, K, T)
    scores = jnp.where(counts[:, :, :, None] > 0, scores, -jnp.inf)  # padding may contain NaN
    weights = counts[:, :, :, None].astype(acc) * jnp.exp(scores - totals[..., None])

    zeros = jnp.zeros_like(counts[..., 0])
    if pattern.padding == "zeros" and not is_causal:
        lengths = (ids >= 0).sum(axis=1, dtype=jnp.int32)
        slots = functools.reduce(operator.add, (_slots(b, shape.kv_heads, p, lengths) for b in branches))
        zeros = jnp.where(own >= 0, slots - counts.sum(axis=-1, dtype=jnp.int32), 0)
    zero_weights = zeros[..., None].astype(acc) * jnp.exp(-totals)
    return weights.reshape(*weights.shape[:2], -1, shape.stored_length), zero_weights.reshape(*weights.shape[:2], -1)


def _selected(branch: Branch, kv_heads: int, p: Array, s: Array) -> Array:
    """Returns 1 where a branch selects query `p` and key `s` in the same segment, otherwise 0: (R, K, T)."""
    w, r, offsets = branch.segment_length, branch.rate, jnp.asarray(branch.offset_table(kv_heads))[None, :, None]
    at, key = p[:, None, None], s[None, None]
    is_selected = (at % w % r == offsets) & (key % w % r == offsets) & (at // w == key // w)
    return is_selected.astype(jnp.int32)


def _slots(branch: Branch, kv_heads: int, p: Array, lengths: Array) -> Array:
    """Counts the keys of a padded segment of sequences of these lengths, 0 where `p` is not selected: (B, R, K)."""
    is_selected = p[:, None] % branch.segment_length % branch.rate == jnp.asarray(branch.offset_table(kv_heads))[None]
    num_keys = -(-jnp.minimum(branch.segment_length, lengths) // branch.rate)
    return jnp.where(is_selected[None], num_keys[:, None, None], 0)


def _check_lse(lse: object, shape: tuple[int, ...]) -> None:
    check_array("lse", lse, "floating point", ("batch", "length", "heads"))
    if (given := getattr(lse, "shape", None)) != shape:
        raise ValueError(f"`lse` must have shape (batch, length, heads) = {shape}, got {given}.")


def check_rows(name: str, rows: object, length: int) -> np.ndarray | Array:
    """Checks a list of positions below `length`, as far as they are known, and returns them as int32."""
    given = check_integers(name, rows, f"(number of {name})")
    found = known(given)
    if found is not None and (found.min() < 0 or found.max() >= length):
        raise ValueError(f"`{name}` must be positions from 0 to {length - 1}, got {shown(found.tolist())}.")
    return given.astype(np.int32)
