"""Types of the options that the attention functions share, for their overloads."""

from __future__ import annotations

from typing import TypedDict

from jax import Array
from jaxtyping import Float, Int


class AttentionOptions(TypedDict, total=False):
    """Options of every attention function; see `dilated_attention`."""

    is_causal: bool
    segment_ids: Int[Array, "B T"] | None
    seq_len: int | None
    scale: float | None
    dropout_rate: float
    dropout_rng: Array | None
    sink_logits: Float[Array, " N"] | None
