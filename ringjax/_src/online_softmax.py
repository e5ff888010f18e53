"""Online softmax: partial results over subsets of the keys, and how to merge them.

A `PartialSoftmax` is the attention of some queries over some of the keys. Branches, blocks and ring hops all yield
partial results over disjoint multisets of keys, and `merge` combines two of them. An *empty* row, which attends to no
key, has ``out == 0`` and ``lse == -inf``. This module alone handles empty rows in merges and in the backward pass.

See [FlashAttention-2](https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


class PartialSoftmax(NamedTuple):
    """Attention over some of the keys: normalized output `out` (..., H) and log-sum-exp `lse` (...) of the scores."""

    out: Array
    lse: Array


class SoftmaxState(NamedTuple):
    """State of an online softmax over key blocks.

    The row maximum `max` (m), the denominator (l) and the unnormalized output `acc` (M, H); `acc` and `denominator` are
    scaled by ``exp(-max)``. `max` and `denominator` have shape (M,), or (M, 1) in kernels without 1D arrays.
    """

    acc: Array
    max: Array
    denominator: Array


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the accumulator dtype for arrays of `dtype`, at least float32."""
    return np.promote_types(dtype, np.float32)


def empty_like(queries: Array) -> PartialSoftmax:
    """Returns the partial softmax of these queries (..., H) over no keys."""
    return PartialSoftmax(jnp.zeros_like(queries), jnp.full_like(queries[..., 0], -jnp.inf))


def merge(a: PartialSoftmax, b: PartialSoftmax) -> PartialSoftmax:
    """Merges partial softmaxes over two sets of keys.

    Interpolates from the output with the larger weight towards the other one. This is exact if both outputs are equal,
    as when two branches attend to the same keys, and if the smaller weight vanishes, however large its output is.
    """
    maximum, low = jnp.maximum(a.lse, b.lse), jnp.minimum(a.lse, b.lse)
    lighter = jnp.exp(low - _finite(maximum))  # relative to a weight of 1 for the heavier one; both may be empty
    a_is_heavier = (a.lse >= b.lse)[..., None]
    heavy, light = jnp.where(a_is_heavier, a.out, b.out), jnp.where(a_is_heavier, b.out, a.out)
    out = heavy + (light - heavy) * (lighter / (1 + lighter))[..., None]
    return PartialSoftmax(out, maximum + jnp.log1p(lighter))


def start(queries: Array) -> SoftmaxState:
    """Returns the initial state of these queries (M, H)."""
    return SoftmaxState(jnp.zeros_like(queries), jnp.full_like(queries[:, 0], -jnp.inf), jnp.zeros_like(queries[:, 0]))


def finish(state: SoftmaxState) -> PartialSoftmax:
    """Normalizes the state after the last key block."""
    safe = jnp.where(state.denominator == 0, 1, state.denominator)  # NaN stays NaN
    return PartialSoftmax(state.acc / _column(safe), state.max + jnp.log(safe))  # -inf for empty rows


def rescale(state: SoftmaxState, scores: Array) -> tuple[SoftmaxState, Array]:
    """Updates the maximum of `state` with `scores` (M, S; -inf where masked) and returns ``exp(scores - max)`` too."""
    maximum = jnp.maximum(state.max, scores.max(axis=1, keepdims=state.max.ndim == 2))
    finite = _finite(maximum)
    decay = jnp.exp(state.max - finite)
    weights = jnp.exp(scores - _column(finite))
    return SoftmaxState(state.acc * _column(decay), maximum, state.denominator * decay), weights


def resume(part: PartialSoftmax) -> SoftmaxState:
    """Returns the state after the keys of `part`: continuing from it is equivalent to merging with `part`."""
    denominator = jnp.where(part.lse == -jnp.inf, jnp.zeros_like(part.lse), jnp.ones_like(part.lse))
    return SoftmaxState(part.out, part.lse, denominator)


def delta(dout: Array, out: Array, dtype: jnp.dtype) -> Array:
    """Computes ``sum(dout * out)`` over the last axis in this dtype, for the backward pass."""
    return jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1)


def for_backward(lse: Array) -> Array:
    """Returns `lse` such that ``exp(scores - lse)`` is the softmax, and 0 for empty rows."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def _column(x: Array) -> Array:
    return x if x.ndim == 2 else x[:, None]


def _finite(maximum: Array) -> Array:
    """Replaces the maximum of empty rows, -inf, by 0 so that it can be subtracted from -inf."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)
