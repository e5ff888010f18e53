"""Dilated attention as the `attention_fn` of standard Flax attention layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from ringjax._src.api import dilated_attention
from ringjax._src.comm.mesh import Ring
from ringjax._src.kernels.dispatch import Implementation, check_implementation
from ringjax._src.kernels.interface import BlockSizes
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import (
    check_array,
    check_bool,
    check_dtype,
    check_instance,
    check_int,
    check_optional,
    check_pattern,
    check_rate,
    check_scale,
    shown,
)


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """Hashable callable returned by `attention_fn`, which Flax calls with projected queries, keys and values."""

    pattern: DilationPattern
    _: dataclasses.KW_ONLY
    is_causal: bool = False
    seq_len: int | None = None
    scale: float | None = None
    ring: Ring | None = None
    implementation: Implementation | None = None
    block_sizes: BlockSizes | None = None

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        check_bool("is_causal", self.is_causal)
        check_optional(check_int, "seq_len", self.seq_len)
        if self.scale is not None:
            check_scale(self.scale)
        check_optional(check_instance, "ring", self.ring, Ring)
        check_implementation(self.implementation, self.block_sizes)

    # Linen passes only the keywords that this signature names, so it lists all of Flax's keywords.
    def __call__(
        self,
        query: Float[Array, "*batch T N H"],
        key: Float[Array, "*batch T K H"],
        value: Float[Array, "*batch T K H"],
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,  # noqa: ANN401
        module: object | None = None,
        promote_dtype: Callable[..., tuple[Array, Array, Array]] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., Array] | None = None,
        qk_attn_weights_einsum: Callable[..., Array] | None = None,
        attn_weights_value_einsum: Callable[..., Array] | None = None,
        input_positions: Array | None = None,
    ) -> Float[Array, "*batch T N H"]:
        """Computes dilated attention, or raises if a keyword requests something that it does not support.

        Raises:
            ValueError: If `is_causal` is True in a call of `attention_fn(..., is_causal=False)`, or under the same
                conditions as `dilated_attention`.
            NotImplementedError: If `bias`, `mask`, `module`, a custom einsum or `input_positions` is given, if
                `precision` is not the default, or if dropout is active with `broadcast_dropout=True`.
        """
        del force_fp32_for_softmax  # the softmax is always in at least float32
        fixed_products = "the matrix products of ringjax cannot be replaced"
        _refuse(
            bias=(bias, "it would need the dense scores, which are never computed"),
            mask=(mask, "use `is_causal`, `seq_len` or `segment_ids` of `dilated_attention`"),
            module=(module, "attention weights cannot be sown, as they are never stored"),
            einsum_dot_general=(einsum_dot_general, fixed_products),
            qk_attn_weights_einsum=(qk_attn_weights_einsum, fixed_products),
            attn_weights_value_einsum=(attn_weights_value_einsum, fixed_products),
            input_positions=(input_positions, "rotate queries and keys first, see `ringjax.rotary`"),
        )
        flags = {"deterministic": deterministic, "broadcast_dropout": broadcast_dropout, "is_causal": is_causal}
        for name, flag in flags.items():
            check_bool(name, flag)
        is_dropping = check_rate(dropout_rate) > 0 and not deterministic
        if is_dropping and broadcast_dropout:
            raise NotImplementedError(
                "`broadcast_dropout` must be False with active dropout (weights are dropped independently), got True."
            )
        if precision is not None and precision not in ("default", lax.Precision.DEFAULT):
            raise NotImplementedError(f"`precision` must be None or the default, got {shown(precision)}.")
        if is_causal and not self.is_causal:
            raise ValueError("`is_causal` must be False in calls of `attention_fn(..., is_causal=False)`, got True.")
        check_optional(check_dtype, "dtype", dtype)
        for name, x in {"query": query, "key": key, "value": value}.items():
            check_array(name, x, "floating point")
        if promote_dtype is not None:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        else:
            common = jnp.result_type(query, key, value) if dtype is None else dtype
            query, key, value = (jnp.asarray(x, common) for x in (query, key, value))
        shape = query.shape
        query, key, value = batched({"query": query, "key": key, "value": value})
        out = dilated_attention(
            query,
            key,
            value,
            self.pattern,
            is_causal=self.is_causal,
            seq_len=self.seq_len,
            scale=self.scale,
            dropout_rate=dropout_rate if is_dropping else 0.0,
            dropout_rng=dropout_rng if is_dropping else None,
            ring=self.ring,
            implementation=self.implementation,
            block_sizes=self.block_sizes,
        )
        return out.reshape(shape)


def attention_fn(
    pattern: DilationPattern,
    *,
    is_causal: bool = False,
    seq_len: int | None = None,
    scale: float | None = None,
    ring: Ring | None = None,
    implementation: Implementation | None = None,
    block_sizes: BlockSizes | None = None,
) -> AttentionFn:
    """Returns dilated attention for the argument `attention_fn` of standard Flax NNX and Linen attention layers.

    Keywords that Flax passes are either honored (`dtype`, `deterministic`, dropout with `broadcast_dropout=False`) or
    rejected, never ignored: a dense `mask`, a `bias`, sown weights and a non-default `precision` raise. The value of
    `is_causal` given here applies: a call with `is_causal=True` raises if it is False here.

    Args:
        pattern, is_causal, seq_len, scale, ring, implementation, block_sizes: See `dilated_attention`.

    Returns:
        A hashable callable that takes query, key and value (batch..., length, heads, dim) and Flax's keywords.

    Raises:
        ValueError: If `pattern` is not a `DilationPattern`, or an option has the wrong type or is out of range.

    Example:
        >>> import jax, ringjax as rj
        >>> from flax import nnx
        >>> attention = rj.attention_fn(rj.DilationPattern((16, 64), (1, 4)), is_causal=True)
        >>> layer = nnx.MultiHeadAttention(4, 32, attention_fn=attention, decode=False, rngs=nnx.Rngs(0))
        >>> layer(jax.numpy.ones((2, 64, 32))).shape
        (2, 64, 32)
    """
    return AttentionFn(
        pattern,
        is_causal=is_causal,
        seq_len=seq_len,
        scale=scale,
        ring=ring,
        implementation=implementation,
        block_sizes=block_sizes,
    )


def batched(arrays: dict[str, Array]) -> list[Array]:
    """Flattens the batch axes of arrays (batch..., length, heads, dim) into one."""
    for name, x in arrays.items():
        if x.ndim < 3:
            raise ValueError(f"`{name}` must have the axes (batch..., length, heads, dim), got shape {x.shape}.")
    return [x if x.ndim == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in arrays.values()]


def _refuse(**arguments: tuple[Any, str]) -> None:
    """Raises for the first of these (value, reason) arguments whose value is not None."""
    for name, (value, reason) in arguments.items():
        if value is not None:
            found = f"an array of shape {value.shape}" if hasattr(value, "shape") else type(value).__name__
            raise NotImplementedError(f"`{name}` must be None ({reason}), got {found}.")
