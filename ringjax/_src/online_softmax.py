"""PartialSoftmax softmaxes and the one way to put them together.

A `PartialSoftmax` is the attention of some queries over some keys. Branches, blocks and ring hops all yield partials
over disjoint multisets of keys, and `merge` gives the partial over both. An *empty* row, one that saw no key,
has ``out == 0`` and ``lse == -inf``; what that means for a merge and for the backward pass is said here only.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


class PartialSoftmax(NamedTuple):
    """Attention over some of the keys: `out` (..., H) normalised over them, `lse` (...) their log-sum-exp."""

    out: Array
    lse: Array


class Running(NamedTuple):
    """A softmax under way over key blocks: `acc` (M, H) and `total`, both scaled by ``exp(-peak)``.

    `peak` and `total` are (M,), or columns (M, 1) in kernels that have no arrays of one axis.
    """

    acc: Array
    peak: Array
    total: Array


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which sums over arrays of `dtype` are taken: at least float32."""
    return np.promote_types(dtype, np.float32)


def empty_like(queries: Array) -> PartialSoftmax:
    """The partial of these queries (..., H) over no keys."""
    return PartialSoftmax(jnp.zeros_like(queries), jnp.full_like(queries[..., 0], -jnp.inf))


def merge(a: PartialSoftmax, b: PartialSoftmax) -> PartialSoftmax:
    """The partial over the keys of `a` and of `b` together.

    The output steps from that of the heavier towards that of the lighter, by the lighter's share: exact where both
    are equal, as where branches see the same keys, and where the lighter weighs nothing, however large it is.
    """
    peak, low = jnp.maximum(a.lse, b.lse), jnp.minimum(a.lse, b.lse)
    lighter = jnp.exp(low - _finite(peak))  # the heavier weighs 1, unless both are empty
    a_is_heavier = (a.lse >= b.lse)[..., None]
    heavy, light = jnp.where(a_is_heavier, a.out, b.out), jnp.where(a_is_heavier, b.out, a.out)
    out = heavy + (light - heavy) * (lighter / (1 + lighter))[..., None]
    return PartialSoftmax(out, peak + jnp.log1p(lighter))


def start(queries: Array) -> Running:
    """The state of these queries (M, H) before the first key block."""
    return Running(jnp.zeros_like(queries), jnp.full_like(queries[:, 0], -jnp.inf), jnp.zeros_like(queries[:, 0]))


def finish(state: Running) -> PartialSoftmax:
    """The partial over all key blocks that `state` went through."""
    safe = jnp.where(state.total == 0, 1, state.total)  # NaN is not empty: it stays NaN
    return PartialSoftmax(state.acc / _column(safe), state.peak + jnp.log(safe))  # the peak of an empty row is -inf


def rescale(state: Running, scores: Array) -> tuple[Running, Array]:
    """Raises the peak of `state` to cover `scores` (M, S; -inf where masked), and gives ``exp(scores - peak)``."""
    peak = jnp.maximum(state.peak, scores.max(axis=1, keepdims=state.peak.ndim == 2))
    finite = _finite(peak)
    decay = jnp.exp(state.peak - finite)
    weights = jnp.exp(scores - _column(finite))
    return Running(state.acc * _column(decay), peak, state.total * decay), weights


def resume(part: PartialSoftmax) -> Running:
    """The state after the keys of `part`: going on from it is the same as merging with it."""
    total = jnp.where(part.lse == -jnp.inf, jnp.zeros_like(part.lse), jnp.ones_like(part.lse))
    return Running(part.out, part.lse, total)


def delta(dout: Array, out: Array, dtype: jnp.dtype) -> Array:
    """Sum of cotangent times output (..., H), for the backward pass, in this dtype."""
    return jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1)


def for_backward(lse: Array) -> Array:
    """The `lse` with which ``exp(scores - lse)`` is the softmax, and 0 for an empty row."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def _column(x: Array) -> Array:
    return x if x.ndim == 2 else x[:, None]


def _finite(peak: Array) -> Array:
    """A peak that can be subtracted from -inf: an empty row's becomes 0."""
    return jnp.where(peak == -jnp.inf, 0, peak)
