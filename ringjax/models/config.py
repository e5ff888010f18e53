"""The configuration of LongNet models."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from ringjax._src.flax.self_attention import PositionKind, check_head_dim, check_sinks
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import (
    MOST_HEADS,
    MOST_POSITIONS,
    check_bool,
    check_dtype,
    check_heads,
    check_int,
    check_optional,
    check_pattern,
    check_positive,
    check_rate,
    check_size,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongNetConfig:
    """The configuration of a LongNet model, frozen and hashable.

    The presets `tiny`, `small`, `base` and `large` provide sizes, which keyword arguments override.

    Args:
        num_layers: Number of blocks.
        features: Width of the residual stream.
        num_heads: Number of query heads.
        vocab_size: Vocabulary size; None for an encoder of vectors.
        input_features: Width of the input vectors that an encoder projects, or None.
        pattern: The dilation pattern, `DilationPattern.longnet()` by default.
        num_kv_heads: Number of key/value heads, a divisor of `num_heads`; equal to it by default.
        head_dim: Head dimension, ``features // num_heads`` by default.
        hidden_features: Width of the feed-forward layers, ``4 * features`` by default.
        positions: ``"rotary"``, ``"xpos"`` (decoders only, at most 65,536 positions) or None.
        sub_norm: Whether to normalize again before the output projection of attention and feed-forward layers.
        final_norm: Whether to normalize the output of the last block.
        sinks: Whether attention heads have learned sinks, see `ringjax.nnx.DilatedSelfAttention`.
        use_bias: Whether projections have a bias.
        tie_embeddings: Whether the output projection shares the weights of the token embedding.
        norm_epsilon: Epsilon added to the variance in all norms.
        attention_dropout_rate: Fraction of attention weights dropped in calls with a `dropout_rng`.
        dropout_rate: Fraction of the embeddings and of the outputs of attention and feed-forward layers dropped in
            calls with a `dropout_rng`.
        drop_path_rate: Probability, in calls with a `dropout_rng`, that a sequence skips the attention or feed-forward
            layer of the last block. It increases linearly from 0 in the first block.
        rows_at_once: Most rows of a sequence that projections and feed-forward layers compute at once, which bounds the
            memory of a forward pass, or None for all. Must be None on a ring.
        remat: Whether to rematerialize blocks in the backward pass, except for their attention.
        scan_layers: Whether to scan over the blocks, which compiles one block, or to unroll them.
        dtype: Dtype of the computation, `ringjax.compute_dtype()` by default.
        param_dtype: Dtype of the parameters.

    Raises:
        ValueError: If a size is not a positive integer, `num_kv_heads` does not divide `num_heads`, `features` is not a
            multiple of `num_heads` without a `head_dim`, `positions` or a dtype is unknown, a rate is not in [0, 1),
            `sinks` are used with ``mixing="detached"``, or a parameter would be too large to allocate.

    Example:
        >>> import ringjax as rj
        >>> from ringjax.models import LongNetConfig
        >>> config = LongNetConfig.tiny(vocab_size=256, pattern=rj.DilationPattern((16, 64), (1, 4)))
        >>> config.num_layers, config.features, config.num_heads
        (2, 64, 4)
    """

    num_layers: int
    features: int
    num_heads: int
    vocab_size: int | None = None
    input_features: int | None = None
    pattern: DilationPattern = dataclasses.field(default_factory=DilationPattern.longnet)
    num_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_features: int | None = None
    positions: PositionKind | None = "rotary"
    sub_norm: bool = True
    final_norm: bool = True
    sinks: bool = False
    use_bias: bool = False
    tie_embeddings: bool = True
    norm_epsilon: float = 1e-6
    attention_dropout_rate: float = 0.0
    dropout_rate: float = 0.0
    drop_path_rate: float = 0.0
    rows_at_once: int | None = None
    remat: bool = True
    scan_layers: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        check_int("num_layers", self.num_layers, most=MOST_HEADS)
        check_int("features", self.features, most=MOST_POSITIONS)
        check_heads(self.num_heads, self.num_kv_heads)
        for name in ("vocab_size", "input_features", "hidden_features", "rows_at_once"):
            check_optional(check_int, name, getattr(self, name), 1, MOST_POSITIONS)
        check_sinks(self.sinks, self.pattern)
        for name in ("sub_norm", "final_norm", "use_bias", "tie_embeddings", "remat", "scan_layers"):
            check_bool(name, getattr(self, name))
        if self.head_dim is None and self.features % self.num_heads:
            raise ValueError(
                "`features` must be a multiple of `num_heads` unless `head_dim` is given, got "
                f"{self.features} and {self.num_heads}."
            )
        dim = check_head_dim(self.head_dim, self.features // self.num_heads, self.positions)
        for name in ("attention_dropout_rate", "dropout_rate", "drop_path_rate"):
            check_rate(getattr(self, name), name)
        check_positive("norm_epsilon", self.norm_epsilon)
        check_optional(check_dtype, "dtype", self.dtype)
        check_dtype("param_dtype", self.param_dtype)
        hidden = self.hidden_features or 4 * self.features
        num_inputs = max(self.vocab_size or 1, self.input_features or 1)
        names = "`num_layers`, `features`, `num_heads` and `head_dim`"
        check_size(names, (self.num_layers, self.features, self.num_heads, dim))
        check_size("`num_layers`, `features` and `hidden_features`", (self.num_layers, self.features, hidden))
        check_size("`features`, `vocab_size` and `input_features`", (num_inputs, self.features))

    @classmethod
    def tiny(cls, **changes: Any) -> LongNetConfig:  # noqa: ANN401
        """Returns 2 blocks with 64 features and 4 heads, for tests."""
        return cls(**{"num_layers": 2, "features": 64, "num_heads": 4, **changes})

    @classmethod
    def small(cls, **changes: Any) -> LongNetConfig:  # noqa: ANN401
        """Returns 6 blocks with 512 features and 8 heads: 19 million parameters without the embedding."""
        return cls(**{"num_layers": 6, "features": 512, "num_heads": 8, **changes})

    @classmethod
    def base(cls, **changes: Any) -> LongNetConfig:  # noqa: ANN401
        """Returns 12 blocks with 768 features and 12 heads: 85 million parameters without the embedding."""
        return cls(**{"num_layers": 12, "features": 768, "num_heads": 12, **changes})

    @classmethod
    def large(cls, **changes: Any) -> LongNetConfig:  # noqa: ANN401
        """Returns 24 blocks with 1024 features and 16 heads: 302 million parameters without the embedding."""
        return cls(**{"num_layers": 24, "features": 1024, "num_heads": 16, **changes})

    @classmethod
    def gigapath(cls, **changes: Any) -> LongNetConfig:  # noqa: ANN401
        """Returns the slide encoder of Prov-GigaPath: 12 blocks with 768 features and 16 heads, for `SlideEncoder`.

        The pattern is the original's for slides of up to 262,144 pixels and tiles of 256, with torchscale's offsets,
        mixing and zero keys.

        Example:
            >>> LongNetConfig.gigapath().pattern.segment_lengths
            (1024, 5792, 32768, 185363, 1048576)
        """
        fields = {
            "num_layers": 12,
            "features": 768,
            "num_heads": 16,
            "input_features": 1536,
            "pattern": torchscale_pattern(DilationPattern.for_length(1024**2)),
            "positions": None,
            "use_bias": True,
            "norm_epsilon": 1e-5,
            "dropout_rate": 0.25,
            "drop_path_rate": 0.1,
        }
        return cls(**{**fields, **changes})


def torchscale_pattern(pattern: DilationPattern) -> DilationPattern:
    """Returns a pattern with the offsets, the mixing and the zero keys of torchscale."""
    return dataclasses.replace(pattern, offsets="block", mixing="detached", padding="zeros")
