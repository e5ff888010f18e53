"""Framework-independent part of the NNX and Linen self-attention layers: everything but the parameters."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ringjax._src.api import dilated_attention
from ringjax._src.comm.axes import axes, explicit_axes
from ringjax._src.comm.mesh import Ring, stored_positions
from ringjax._src.comm.order_checks import report_misplaced_positions
from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.decode import DecodeCache, decode_step, prefill
from ringjax._src.decode.cache import clipped_counts
from ringjax._src.flax.adapter import batched
from ringjax._src.flax.rotary import rotary, xpos
from ringjax._src.kernels.dispatch import Implementation, check_implementation
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import (
    MOST_POSITIONS,
    check_array,
    check_bool,
    check_callable,
    check_choice,
    check_counts,
    check_dtype,
    check_heads,
    check_ids,
    check_instance,
    check_int,
    check_optional,
    check_pattern,
    check_positive,
    check_rate,
    check_row_positions,
    check_seq_len,
    check_size,
)

PositionKind = Literal["rotary", "xpos"]
Initializer = Callable[..., Any]
Projected = tuple[Array, Array, Array]  # queries, keys and values


@dataclasses.dataclass(frozen=True)
class SelfAttention:
    """Configuration of a self-attention layer and its computation between the projections."""

    pattern: DilationPattern
    in_features: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool
    positions: PositionKind | None
    ring: Ring | None
    implementation: Implementation | None
    dropout_rate: float

    @property
    def head_axis(self) -> AxisName | None:
        """Mesh axis over which the heads axis of the kernels is sharded."""
        return None if self.ring is None else self.ring.head_axis

    @property
    def mesh(self) -> Mesh | None:
        """Mesh on which parameters are created, if a concrete one was given."""
        return self.ring.mesh if self.ring is not None and isinstance(self.ring.mesh, Mesh) else None

    def out_sharding(self, ndim: int, over_ring: bool = True) -> NamedSharding | None:
        """Returns the output sharding if it must be explicit: for the sum over heads on an explicit mesh."""
        if self.ring is None or self.head_axis is None:
            return None
        mesh = self.ring.resolve()
        if explicit_axes(mesh).isdisjoint(axes(self.head_axis)):
            return None
        ring_axis = self.ring.axis_name if over_ring else None
        spec = PartitionSpec(self.ring.batch_axis, *(None,) * (ndim - 3), ring_axis, None)
        return NamedSharding(mesh, spec)

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        seq_len: int | None = None,
        sink_logits: Array | None = None,
        dropout_rng: Array | None = None,
    ) -> Array:
        """Encodes positions and computes attention of projected arrays (batch..., T, heads, H).

        Dropout is active if `dropout_rng` is given.
        """
        shape = query.shape
        query, key, value = batched({"query": query, "key": key, "value": value})
        if segment_ids is not None:
            segment_ids = segment_ids.reshape(-1, shape[-3])
        if self.ring is not None and positions is not None:
            report_misplaced_positions(self.ring, positions.reshape(-1, shape[-3]), segment_ids)
        query, key = self.encode_positions(query, key, positions, shape)
        rate = 0.0 if dropout_rng is None else self.dropout_rate
        options: dict[str, Any] = {"sink_logits": sink_logits, "dropout_rate": rate, "dropout_rng": dropout_rng}
        out: Array = self._attend(query, key, value, segment_ids=segment_ids, seq_len=seq_len, **options)
        return out if out.shape == shape else out.reshape(shape)

    def scores(self, qkv: Projected, **options: Any) -> tuple[Array, Array, Array]:  # noqa: ANN401
        """Returns what determines the attention weights: encoded queries and keys, and the log-sum-exp of the scores.

        The arrays are (B, T, heads, H); `options` are those of `dilated_attention`.
        """
        query, key, value = qkv
        query, key = self.encode_positions(query, key, None, query.shape)
        return query, key, self._attend(query, key, value, return_lse=True, **options)[1]

    @property
    def _attend(self) -> Callable[..., Any]:
        options: dict[str, Any] = {"ring": self.ring, "implementation": self.implementation}
        return functools.partial(dilated_attention, pattern=self.pattern, is_causal=self.is_causal, **options)

    def prefill(
        self, qkv: Projected, cache: DecodeCache, lengths: ArrayLike | None, sink_logits: Array | None
    ) -> tuple[Array, DecodeCache]:
        """Computes the attention of a prompt (B, T, heads, H) and returns it with the cache."""
        query, key, value = qkv
        self.check_prompt(query.shape[1], cache.max_len, lengths)
        query, key = self.encode_positions(query, key, None, query.shape, cache.max_len)
        ring = self.ring and dataclasses.replace(self.ring, seq_len=None)  # a prompt has its own `lengths`
        out = self._attend(query, key, value, sink_logits=sink_logits, ring=ring)
        return out, prefill(cache, key, value, lengths, ring=self.ring)

    def extend(
        self, qkv: Projected, cache: DecodeCache, counts: ArrayLike | None, sink_logits: Array | None
    ) -> tuple[Array, DecodeCache]:
        """Computes the attention of the next tokens (B, n, heads, H) and returns it with the updated cache."""
        query, key, value = qkv
        if self.positions is not None:
            nth = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
            positions = cache.lengths[:, None] + nth
            if counts is not None:  # padding has no position
                positions = jnp.where(nth < clipped_counts("counts", counts, *query.shape[:2])[:, None], positions, 0)
            query, key = self.encode_positions(query, key, positions, query.shape, cache.max_len)
        return decode_step(cache, query, key, value, counts=counts, sink_logits=sink_logits, ring=self.ring)

    def check_prompt(self, length: int, max_len: int, lengths: ArrayLike | None) -> None:
        """Checks that a cache can hold a prompt of this length; on a ring, part of the prompt may be padding."""
        if length > max_len and (self.ring is None or lengths is None):
            raise ValueError(
                f"`max_len` of a cache must be at least the length of the prompt, got {max_len} and {length}."
            )

    def check_call(self, x: Array, positions: Array | None, segment_ids: Array | None, seq_len: int | None) -> None:
        """Checks the arguments of a layer call."""
        self.check_features(x)
        leading = tuple(x.shape[:-1])
        check_optional(check_ids, "segment_ids", segment_ids, leading, "(batch..., length)")
        check_seq_len(seq_len, leading[-1])
        if self.ring is not None:
            self.ring.check_placed("x", x)
        if positions is None:
            return
        if self.positions is None:
            raise ValueError(
                '`positions` must be None for a layer without "rotary" or "xpos", got '
                f"{type(positions).__name__} of shape {getattr(positions, 'shape', None)}."
            )
        if getattr(positions, "ndim", 1) > 1:
            check_ids("positions", positions, leading, "(batch..., length)")
        else:
            check_row_positions(positions, math.prod(leading[:-1]), leading[-1])

    def check_decoding(self, x: Array, cache: DecodeCache, name: str, numbers: ArrayLike | None) -> None:
        """Checks the arguments of `prefill` or `extend`; `numbers` are its `lengths` or `counts`."""
        self.check_features(x, decodes=True)
        if not self.is_causal:
            raise ValueError("`is_causal` must be True for decoding, got False.")
        if check_instance("cache", cache, DecodeCache).pattern != self.pattern:
            raise ValueError(f"`cache` must have the layer's pattern {self.pattern}, got {cache.pattern}.")
        check_optional(check_counts, name, numbers, *x.shape[:2])

    def check_features(self, x: Array, *, decodes: bool = False) -> None:
        """Checks the input of a layer; decoding requires exactly one batch axis."""
        check_array("x", x, "floating point")
        if len(x.shape) < 2 or x.shape[-1] != self.in_features or (decodes and len(x.shape) != 3):
            batch = "batch" if decodes else "batch..."
            raise ValueError(
                f"`x` must have the axes ({batch}, length, {self.in_features} features), got shape {x.shape}."
            )

    def encode_positions(
        self, query: Array, key: Array, positions: Array | None, shape: tuple[int, ...], max_len: int | None = None
    ) -> tuple[Array, Array]:
        """Applies the positional encoding to queries and keys; `max_len` is the number of positions for xPos."""
        if self.positions is None:
            return query, key
        length = shape[-3]
        if positions is None:
            positions = stored_positions(self.ring, length)
        elif positions.ndim > 1:
            positions = positions.reshape(-1, length)
        with jax.named_scope(self.positions):
            if self.positions == "rotary":
                return rotary(query, positions), rotary(key, positions)
            return xpos(query, key, positions, length=max_len or length)


def self_attention(
    pattern: DilationPattern,
    in_features: int,
    num_heads: int,
    *,
    num_kv_heads: int | None,
    head_dim: int | None,
    is_causal: bool,
    positions: PositionKind | None,
    ring: Ring | None,
    implementation: Implementation | None,
    dropout_rate: float,
) -> SelfAttention:
    """Checks the arguments of a layer and fills in defaults."""
    check_pattern(pattern)
    check_bool("is_causal", is_causal)
    check_optional(check_instance, "ring", ring, Ring)
    check_implementation(implementation, None)
    in_features = check_int("in_features", in_features, most=MOST_POSITIONS)
    num_heads, num_kv_heads = check_heads(num_heads, num_kv_heads)
    if head_dim is None and in_features % num_heads:
        raise ValueError(
            f"`in_features` must be a multiple of `num_heads` if `head_dim` is not given, got {in_features} and "
            f"{num_heads}."
        )
    head_dim = check_head_dim(head_dim, in_features // num_heads, positions)
    check_size("`in_features`, `num_heads` and `head_dim`", (in_features, num_heads, head_dim))
    if positions == "xpos" and not is_causal:
        raise ValueError(
            '`is_causal` must be True for `positions="xpos"`, as its scores grow for later keys, got False.'
        )
    rate = check_rate(dropout_rate)
    return SelfAttention(
        pattern, in_features, num_heads, num_kv_heads, head_dim, is_causal, positions, ring, implementation, rate
    )


def check_head_dim(head_dim: int | None, default: int, positions: PositionKind | None) -> int:
    """Checks and returns the head dimension, and checks the positional encoding for queries and keys of that size."""
    dim = default if head_dim is None else check_int("head_dim", head_dim, most=MOST_POSITIONS)
    check_optional(check_choice, "positions", positions, get_args(PositionKind), "None or one of")
    if positions is not None and dim % 2:
        raise ValueError(f"`head_dim` must be even for `positions={positions!r}`, got {dim}.")
    return dim


def check_sinks(sinks: bool, pattern: DilationPattern) -> None:
    """Checks whether a layer can have attention sinks."""
    if check_bool("sinks", sinks) and pattern.mixing == "detached":
        raise ValueError(f'`sinks` must be False with `mixing="detached"`, got {sinks}.')


def check_layer(
    core: SelfAttention, out_features: int | None, norm_epsilon: float, flags: dict[str, bool], options: dict[str, Any]
) -> int:
    """Checks the layer arguments that `self_attention` does not, and returns the number of output features.

    `flags` are other arguments that must be bools; `options` are those of the projections.
    """
    width = core.in_features if out_features is None else out_features
    width = check_int("out_features", width, most=MOST_POSITIONS)
    check_size("`num_heads`, `head_dim` and `out_features`", (core.num_heads, core.head_dim, width))
    check_positive("norm_epsilon", norm_epsilon)
    for name, flag in {**flags, "use_bias": options["use_bias"]}.items():
        check_bool(name, flag)
    check_sinks(flags["sinks"], core.pattern)
    check_optional(check_dtype, "dtype", options["dtype"])
    check_dtype("param_dtype", options["param_dtype"])
    for name in ("kernel_init", "bias_init"):
        check_callable(name, options[name])
    return width


def flat_initializer(init: Initializer, contracted: int) -> Initializer:
    """Returns an initializer that flattens kernels to matrices, with the first `contracted` axes as rows."""

    def initial(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:  # noqa: ANN401
        flat = (math.prod(shape[:contracted]), math.prod(shape[contracted:]))
        return init(key, flat, dtype).reshape(shape)

    return initial
