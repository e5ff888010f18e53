"""Embedding lookup that maps tokens outside the vocabulary to NaN, except for padding.

Shapes: ``B`` batch, ``T`` length, ``F`` features.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

from ringjax._src import debug
from ringjax._src.validation import known, shown


def is_outside(tokens: Array, vocab_size: int) -> Array:
    """Returns which tokens are below 0 or not below `vocab_size`, for any integer dtype."""
    wide = tokens.astype(jnp.int32) if tokens.dtype.itemsize <= 4 else tokens  # large uint32 values become negative
    return (wide < 0) | (wide >= vocab_size)


def check_vocabulary(name: str, tokens: Array, vocab_size: int, lengths: Array | np.ndarray) -> None:
    """Checks tokens (B, T) up to the lengths (B,), if the values of both are known."""
    found, ends = known(tokens), known(lengths)
    if found is None or ends is None:
        return
    real = [row[:end] for row, end in zip(found, ends, strict=True)]
    least, most = min(row.min() for row in real), max(row.max() for row in real)
    if least < 0 or most >= vocab_size:
        raise ValueError(f"`{name}` must be from 0 to {vocab_size - 1}, got {shown(int(least))} to {shown(int(most))}.")


def lookup(
    embed: nnx.Embed, name: str, tokens: Array, is_real: Array | None, out_sharding: NamedSharding | None
) -> Array:
    """Returns the embeddings (B, T, F) of tokens (B, T), and NaN for tokens outside the vocabulary.

    Where `is_real` is False, a token is padding: any value outside the vocabulary is replaced by token 0.
    """
    tokens = jnp.asarray(tokens)
    if is_real is not None:
        tokens = jnp.where(~is_real & is_outside(tokens, embed.num_embeddings), 0, tokens)
    debug.report(name, "outside the vocabulary", lambda: is_outside(tokens, embed.num_embeddings))
    (table,) = embed.promote_dtype((embed.embedding[...],), dtype=embed.dtype, inexact=False)
    if out_sharding is None:
        return _take(table, tokens)
    return jax.sharding.auto_axes(_take, out_sharding=out_sharding)(table, tokens)


def _take(table: Array, tokens: Array) -> Array:
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
