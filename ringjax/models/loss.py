"""Next-token targets and loss for packed and padded documents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Num

from ringjax._src import debug
from ringjax._src.comm.mesh import Ring
from ringjax._src.validation import check_array, check_instance, check_int, check_integers
from ringjax.models.vocabulary import is_outside


def next_token_targets(
    tokens: Int[ArrayLike, "B T"],
    segment_ids: Int[ArrayLike, "B T"] | None = None,
    seq_len: int | None = None,
    *,
    ring: Ring | None = None,
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """Returns next-token targets and loss weights, respecting document boundaries.

    Args:
        tokens: Token ids.
        segment_ids: Document ids as for `dilated_attention`; negative ids mark padding.
        seq_len: Length without padding, at most T; later tokens are padding. `ring.seq_len` by default.
        ring: The ring in whose layout tokens and ids are, as returned by `Ring.shard`; None for sequence order. Targets
            and weights are in the same order.

    Returns:
        The targets, in the dtype of the tokens, and their float32 weights: 1, or 0 (with target 0) for padding and for
        the last token of each document and of the sequence.

    Raises:
        ValueError: If `tokens` is not an integer array of two axes, `segment_ids` is not an integer array of the same
            shape, `seq_len` is not between 1 and T or not that of `ring`, or T is not a length that `ring` stores.

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
    if seq_len is not None and check_int("seq_len", seq_len) > length:
        raise ValueError(f"`seq_len` must be at most the length {length} of `tokens`, got {seq_len}.")
    tokens, ids = jnp.asarray(tokens), None if ids is None else jnp.asarray(ids)
    if ring is not None:
        seq_len = check_instance("ring", ring, Ring).sequence_length(length, seq_len)
        ordered_ids = None if ids is None else ring.unshard(ids)
        targets, weights = next_token_targets(ring.unshard(tokens), ordered_ids, seq_len)
        return ring.shard(targets), ring.shard(weights)
    seq_len = length if seq_len is None else seq_len
    has_next = jnp.broadcast_to(jnp.arange(length)[None] < seq_len - 1, tokens.shape)
    if ids is not None:
        has_next &= (ids == jnp.roll(ids, -1, axis=1)) & (ids >= 0)
    return jnp.where(has_next, jnp.roll(tokens, -1, axis=1), 0), has_next.astype(jnp.float32)


def token_loss(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Num[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the weighted sum of cross entropies and the sum of weights; ``loss = loss_sum / weight_sum``.

    Tokens contribute independently, so the sums do not depend on the layout, and sharded arrays are not moved. Tokens
    of weight 0 are ignored, whatever their logits and targets (such as -100). A target outside the vocabulary with a
    nonzero weight makes the loss and the gradient of its logits NaN, eagerly and under `jit`.

    Args:
        logits: Logits of floating-point dtype.
        targets: Target tokens from 0 to V - 1 where weights are not 0, see `next_token_targets`.
        weights: Weights of the tokens, numbers or bools.

    Returns:
        The sum of weight times cross entropy, and the sum of the weights, in float32.

    Raises:
        ValueError: If the shape of `targets` or `weights` is not (B, T), or `logits` is not floating point, `targets`
            not integer or `weights` not numeric.

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
            "`targets` and `weights` must have the shape (batch, length) of `logits`, got "
            f"{targets.shape}, {weights.shape} and {logits.shape}."
        )
    logits, targets, weights = (jnp.asarray(x) for x in (logits, targets, weights))
    logits, weights = logits.astype(jnp.float32), weights.astype(jnp.float32)
    logits = jnp.where(weights[..., None] != 0, logits, 0)
    is_bad = is_outside(targets, logits.shape[2]) & (weights != 0)
    debug.report("targets", "outside the vocabulary, with a weight", lambda: is_bad)
    token = lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[2]), 2)
    is_target = token == targets.astype(jnp.int32)[..., None]
    target_logits = jnp.where(is_target, logits, 0).sum(axis=-1)  # no gather: logits may be sharded
    losses = jax.nn.logsumexp(logits, axis=-1) - target_logits
    return (jnp.where(is_bad, jnp.nan, weights) * losses).sum(), weights.sum()
