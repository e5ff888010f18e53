"""The loss of next tokens, where documents are packed and padded: targets in true order, sums in any layout.

Legend: ``B`` batch, ``T`` length, ``V`` vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ringjax._src import debug
from ringjax._src.validation import check_array, check_int, check_integers
from ringjax.models.vocabulary import is_outside


def next_token_targets(
    tokens: ArrayLike, segment_ids: ArrayLike | None = None, seq_len: int | None = None
) -> tuple[Array, Array]:
    """What each token has to tell: the next one of its document.

    For sequences in their true order, before `to_layout`. Both results are then laid out as the tokens are.

    Args:
        tokens: Integers (B, T).
        segment_ids: Documents, integers (B, T), as for `dilated_attention`: ids below 0 are padding.
        seq_len: True length, at most T: later tokens are padding.

    Returns:
        Targets (B, T) in the dtype of the tokens, and their weights (B, T) in float32: 1, or 0 (with target 0) at the
        last token of a document, at padding and at the end.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import jax.numpy as jnp
        >>> from ringjax.models import next_token_targets
        >>> targets, weights = next_token_targets(jnp.array([[5, 6, 7, 8]]), jnp.array([[0, 0, 0, 1]]))
        >>> targets.tolist(), weights.tolist()
        ([[6, 7, 0, 0]], [[1.0, 1.0, 0.0, 0.0]])
    """
    tokens = check_integers("tokens", tokens, "(batch, length)")
    ids = None if segment_ids is None else check_integers("segment_ids", segment_ids, "(batch, length)", tokens.shape)
    length = tokens.shape[1]
    seq_len = length if seq_len is None else check_int("seq_len", seq_len)
    if seq_len > length:
        raise ValueError(f"`seq_len` must be at most the length {length} of `tokens`, got {seq_len}.")
    tokens = jnp.asarray(tokens)
    has_next = jnp.broadcast_to(jnp.arange(length)[None] < seq_len - 1, tokens.shape)
    if ids is not None:
        ids = jnp.asarray(ids)
        has_next &= (ids == jnp.roll(ids, -1, axis=1)) & (ids >= 0)
    return jnp.where(has_next, jnp.roll(tokens, -1, axis=1), 0), has_next.astype(jnp.float32)


def token_loss(logits: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Cross entropy of tokens, summed, and the sum of their weights; ``loss = loss_sum / weight_sum``.

    Each token counts by itself, so all layouts give the same sums, and arrays that are sharded stay where they are.
    Tokens of weight 0 take no part, whatever their logits and targets (-100, say). A target outside the vocabulary with
    another weight makes the loss NaN, and the gradient of its logits too, eagerly and under `jit`.

    Args:
        logits: Logits (B, T, V).
        targets: Integers (B, T) from 0 to V - 1 where weights are not 0, see `next_token_targets`.
        weights: Weights (B, T), numbers or bools.

    Returns:
        Sum of weight times cross entropy, and sum of the weights, in float32.

    Raises:
        ValueError: If the shapes do not fit, or the targets are not integers.

    Example:
        >>> import jax.numpy as jnp
        >>> from ringjax.models import token_loss
        >>> targets, weights = jnp.array([[1, 2, 0]]), jnp.array([[1.0, 1.0, 0.0]])
        >>> loss_sum, weight_sum = token_loss(jnp.zeros((1, 3, 8)), targets, weights)
        >>> print((loss_sum / weight_sum).round(4), jnp.log(8).round(4))
        2.0794 2.0794
    """
    check_array("logits", logits, "floating point")
    check_array("targets", targets, "integer")
    check_array("weights", weights, "number")
    if len(logits.shape) != 3 or targets.shape != logits.shape[:2] or weights.shape != targets.shape:
        raise ValueError(
            "`targets` and `weights` must have the (batch, length) of `logits`, got "
            f"{targets.shape}, {weights.shape} and {logits.shape}."
        )
    logits, targets, weights = (jnp.asarray(x) for x in (logits, targets, weights))
    logits, weights = logits.astype(jnp.float32), weights.astype(jnp.float32)
    logits = jnp.where(weights[..., None] != 0, logits, 0)
    is_bad = is_outside(targets, logits.shape[2]) & (weights != 0)
    debug.report("targets", "outside the vocabulary, with a weight", lambda: is_bad)
    token = lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[2]), 2)
    is_target = token == targets.astype(jnp.int32)[..., None]
    chosen = jnp.where(is_target, logits, 0).sum(axis=-1)  # no gather: logits may be sharded
    each = jax.nn.logsumexp(logits, axis=-1) - chosen
    return (jnp.where(is_bad, jnp.nan, weights) * each).sum(), weights.sum()
