"""What a caller may pass, and the sentences that say so."""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringjax.pattern import DilationPattern, whole_number
from ringjax.softmax import accumulator


class AttentionShape(NamedTuple):
    """The sizes of one attention call."""

    batch: int
    stored_length: int  # of the arrays
    length: int  # of the sequence: positions from here on are padding
    kv_heads: int
    group: int  # query heads per key/value head
    dim: int
    scale: float


def check_inputs(
    query: Array,
    key: Array,
    value: Array,
    pattern: DilationPattern,
    is_causal: bool,
    segment_ids: Array | None,
    seq_len: int | None,
    scale: float | None,
    shards: int = 1,
) -> AttentionShape:
    """Checks the arguments of an attention call and returns its sizes.

    `shards` is the number of devices that each hold such arrays, one after the other in the sequence.
    """
    if not isinstance(pattern, DilationPattern):
        raise ValueError(f"`pattern` must be a DilationPattern, got {type(pattern).__name__}.")
    if not isinstance(is_causal, bool):
        raise ValueError(f"`is_causal` must be a bool, got {is_causal!r}.")
    arrays = {"query": query, "key": key, "value": value}
    for name, x in arrays.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ValueError(f"`{name}` must be an array, got {type(x).__name__}.")
        if len(x.shape) != 4:
            raise ValueError(f"`{name}` must have rank 4 (batch, length, heads, dim), got shape {x.shape}.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"`{name}` must be floating point, got {x.dtype}.")
        if x.dtype != query.dtype:
            raise ValueError(f"`{name}` must have the dtype of `query`, got {x.dtype} and {query.dtype}.")
        if 0 in x.shape:
            raise ValueError(f"`{name}` must not be empty, got shape {x.shape}.")
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    if key.shape != value.shape:
        raise ValueError(f"`value` must have the shape of `key`, got {value.shape} and {key.shape}.")
    for axis, name in ((0, "batch"), (1, "length"), (3, "dim")):
        if key.shape[axis] != query.shape[axis]:
            raise ValueError(
                f"`key` must have the {name} of `query` (self-attention), got {key.shape} and {query.shape}."
            )
    if heads % kv_heads:
        raise ValueError(f"`query` heads must be a multiple of `key` heads, got {heads} and {kv_heads}.")
    if segment_ids is not None:
        if not hasattr(segment_ids, "dtype") or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            given = getattr(segment_ids, "dtype", type(segment_ids).__name__)
            raise ValueError(f"`segment_ids` must be an integer array, got {given}.")
        if segment_ids.shape != (batch, length):
            raise ValueError(
                f"`segment_ids` must have shape (batch, length) = {(batch, length)}, got {segment_ids.shape}."
            )
        _check_that_ids_fit(segment_ids)
    length *= shards
    true_length = length if seq_len is None else whole_number("seq_len", seq_len)
    if true_length > length:
        raise ValueError(f"`seq_len` must be between 1 and the stored length {length}, got {seq_len}.")
    if scale is None:
        scale = 1 / math.sqrt(dim)
    largest = float(jnp.finfo(accumulator(query.dtype)).max)
    if not _is_number(scale) or not abs(scale) <= largest:  # NaN is not either
        raise ValueError(
            f"`scale` must be a finite number of at most {largest:.1e}, known before the program runs, got {scale!r}."
        )
    return AttentionShape(batch, length, true_length, kv_heads, heads // kv_heads, dim, float(scale))


def _check_that_ids_fit(ids: object) -> None:
    """JAX cuts off the upper half of 64-bit numbers unless told otherwise: documents would become one, or padding."""
    if isinstance(ids, np.ndarray):
        narrow = jax.dtypes.canonicalize_dtype(ids.dtype)
        limits = np.iinfo(narrow)
        if ids.min() < limits.min or ids.max() > limits.max:
            raise ValueError(
                f"`segment_ids` must fit {narrow} unless `jax_enable_x64` is set, got {ids.dtype} from {ids.min()} to "
                f"{ids.max()}."
            )


def check_rate(rate: float, name: str = "dropout_rate") -> None:
    """Checks a rate of dropout."""
    if not _is_number(rate) or not 0 <= rate < 1:
        raise ValueError(f"`{name}` must be a number from 0 to below 1, known before the program runs, got {rate!r}.")


def check_dropout(rate: float, rng: Array | None) -> None:
    """Checks the arguments of dropout."""
    check_rate(rate)
    if not _is_key(rng) and (rate > 0 or rng is not None):
        raise ValueError(
            f"`dropout_rng` must be a key of `jax.random` with `dropout_rate` above 0, else one or None, got {rng!r}."
        )


def _is_key(rng: object) -> bool:
    """Whether this is a key of `jax.random`, of the new kind or of the old one."""
    dtype, ndim = getattr(rng, "dtype", None), getattr(rng, "ndim", None)
    if dtype is None:
        return False
    return (jnp.issubdtype(dtype, jax.dtypes.prng_key) and ndim == 0) or (dtype == jnp.uint32 and ndim == 1)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
