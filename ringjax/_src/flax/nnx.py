"""Dilated self-attention as a Flax NNX layer."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int

from ringjax._src.comm.mesh import Ring
from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.decode import DecodeCache
from ringjax._src.flax.placement import on_mesh
from ringjax._src.flax.self_attention import (
    Initializer,
    PositionKind,
    Projected,
    SelfAttention,
    check_layer,
    self_attention,
)
from ringjax._src.kernels.dispatch import Implementation
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import check_bool, check_instance, check_key


class DilatedSelfAttention(nnx.Module):
    """Dilated self-attention layer with projections, on one device or on a ring.

    The same parameters give the same output on every ring. `ringjax.linen.DilatedSelfAttention` has parameters of the
    same names and shapes. If the ring has a `head_axis`, the kernels carry it as partitioning metadata.

    Args:
        num_heads: Number of query heads.
        in_features: Number of input features.
        pattern: Segment lengths and dilation rates of the branches.
        num_kv_heads: Number of key/value heads, a divisor of `num_heads`; `num_heads` by default.
        head_dim: Dimensions per head; ``in_features // num_heads`` by default.
        out_features: Number of output features; `in_features` by default.
        is_causal: Whether a position attends only to itself and earlier positions.
        positions: Positional encoding: ``"rotary"``, ``"xpos"`` (causal, at most 65,536 positions) or None.
        sub_norm: Whether to apply layer norm to the concatenated heads before the output projection.
        norm_epsilon: Epsilon of that layer norm.
        sinks: Whether each query head has an attention sink with a learned logit, initially 0, see `dilated_attention`.
        dropout_rate: Probability of dropping an attention weight in training, see `dilated_attention`.
        deterministic: Whether to disable dropout; also set by `model.eval()` and `model.train()`.
        use_bias: Whether the projections have a bias.
        dtype: Dtype of the computation; by default promoted from inputs and parameters. See `ringjax.compute_dtype`.
        param_dtype: Dtype of the parameters.
        kernel_init: Initializer of the kernels, applied to them as matrices.
        bias_init: Initializer of the biases.
        ring: The devices that share the sequence, or None. With a ring, inputs are in the ring's layout.
        implementation: See `dilated_attention`.
        rngs: Random streams for the initial parameters.

    Raises:
        ValueError: If `num_heads` is not a multiple of `num_kv_heads`; if `in_features` is not a multiple of
            `num_heads` and `head_dim` is not given; if `head_dim` is odd with a positional encoding; if
            ``positions="xpos"`` is used without `is_causal`; if `sinks` are used with ``mixing="detached"``; or if an
            option has the wrong type or is out of range.

    Example:
        >>> import jax.numpy as jnp, ringjax as rj
        >>> from flax import nnx
        >>> from ringjax.nnx import DilatedSelfAttention
        >>> pattern = rj.DilationPattern((16, 64), (1, 4))
        >>> layer = DilatedSelfAttention(4, 32, pattern, is_causal=True, positions="rotary", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 64, 32))).shape
        (2, 64, 32)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        pattern: DilationPattern,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        is_causal: bool = False,
        positions: PositionKind | None = None,
        sub_norm: bool = False,
        norm_epsilon: float = 1e-6,
        sinks: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        bias_init: Initializer = nnx.initializers.zeros_init(),
        ring: Ring | None = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        core = self_attention(
            pattern,
            in_features,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            is_causal=is_causal,
            positions=positions,
            ring=ring,
            implementation=implementation,
            dropout_rate=dropout_rate,
        )
        flags = {"sub_norm": sub_norm, "sinks": sinks, "deterministic": deterministic}
        options: dict[str, Any] = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
        }
        out_features = check_layer(core, out_features, norm_epsilon, flags, options)
        check_instance("rngs", rngs, nnx.Rngs)
        self.core: SelfAttention = core
        self.deterministic = deterministic
        head_shape = (core.num_heads, core.head_dim)
        projection: Any = functools.partial(nnx.LinearGeneral, rngs=rngs, **options)
        into_heads = functools.partial(
            projection,
            core.in_features,
            kernel_metadata=self.over(None, core.head_axis, None),
            bias_metadata=self.over(core.head_axis, None),
        )
        self.query = into_heads(head_shape)
        self.key = into_heads((core.num_kv_heads, core.head_dim))
        self.value = into_heads((core.num_kv_heads, core.head_dim))
        over_heads = self.over(core.head_axis, None, None)
        self.out = projection(head_shape, out_features, axis=(-2, -1), kernel_metadata=over_heads)
        norm = functools.partial(
            nnx.LayerNorm,
            epsilon=norm_epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_fast_variance=False,
            rngs=rngs,
        )
        logits = nnx.Param(jnp.zeros(core.num_heads, param_dtype), **self.over(core.head_axis)) if sinks else None
        self.sink_logits: nnx.Param[Array] | None = nnx.data(logits)
        self.sub_norm: nnx.LayerNorm | None = nnx.data(norm(core.num_heads * core.head_dim) if sub_norm else None)

    def __call__(
        self,
        x: Float[Array, "*batch T in_features"],
        *,
        positions: Int[Array, " T"] | Int[Array, "*batch T"] | None = None,
        segment_ids: Int[Array, "*batch T"] | None = None,
        seq_len: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Array | None = None,
    ) -> Float[Array, "*batch T out_features"]:
        """Computes the output of the layer.

        Args:
            x: Inputs, in the layout of the ring if there is one.
            positions: Position of each row; by default its position in the sequence, given the ring's layout. Must be
                from 0 to ``T - 1`` for xPos.
            segment_ids, seq_len: See `dilated_attention`.
            deterministic: Whether to disable dropout in this call; overrides the attribute.
            rngs: Random streams with a stream `dropout`, one stream, or a `jax.random` key; required if dropout is
                active.

        Raises:
            ValueError: If `x` does not have `in_features` features, `positions` or `segment_ids` do not have the shape
                of its leading axes, `positions` are given to a layer without positional encoding, `seq_len` exceeds
                T, or `rngs` is missing while dropout is active.
        """
        self.core.check_call(x, positions, segment_ids, seq_len)
        options: dict[str, Any] = {"positions": positions, "segment_ids": segment_ids, "seq_len": seq_len}
        options["dropout_rng"] = self._dropout_rng(self.deterministic if deterministic is None else deterministic, rngs)
        layer = on_mesh(self, self.core.ring, x)
        return layer._projected(layer._attend(*layer._project(x), **options))

    def _project(self, x: Array) -> Projected:
        """Returns queries, keys and values."""
        return self.query(x), self.key(x), self.value(x)

    def _attend(self, query: Array, key: Array, value: Array, **options: Any) -> Array:  # noqa: ANN401
        """Computes attention (batch..., length, heads, dim); `options` are those of `SelfAttention`."""
        return self.core(query, key, value, sink_logits=self._sinks(), **options)

    def _scores(self, x: Array, **options: Any) -> tuple[Array, Array, Array]:  # noqa: ANN401
        """Returns the queries, the keys and the log-sum-exp of the scores, see `SelfAttention.scores`."""
        return self.core.scores(self._project(x), sink_logits=self._sinks(), **options)

    def prefill(
        self, x: Float[Array, "B T in_features"], cache: DecodeCache, lengths: Int[ArrayLike, " B"] | None = None
    ) -> tuple[Float[Array, "B T out_features"], DecodeCache]:
        """Computes the output for a prompt and returns it with a cache that contains exactly this prompt.

        Args:
            x: Inputs of a causal layer, in the layout of the ring if there is one.
            cache: A cache from `ringjax.init_cache` for the layer's pattern, heads, dtype and ring. With xPos, its
                `max_len` is at most 65,536.
            lengths: See `ringjax.prefill`.

        Raises:
            ValueError: If the layer is not causal, the cache has another pattern, the prompt is longer than the cache,
                or `x` or `lengths` has another shape.
        """
        self.core.check_decoding(x, cache, "lengths", lengths)
        layer = on_mesh(self, self.core.ring, x)
        attended, cache = self.core.prefill(layer._project(x), cache, lengths, layer._sinks())
        return layer._projected(attended), cache

    def extend(
        self, x: Float[Array, "B n in_features"], cache: DecodeCache, counts: Int[ArrayLike, " B"] | None = None
    ) -> tuple[Float[Array, "B n out_features"], DecodeCache]:
        """Computes the output for the next n tokens and returns it with the updated cache.

        Args:
            x: Inputs of a causal layer, replicated over the ring if there is one.
            cache: The cache from `prefill` or from the previous call.
            counts: See `ringjax.decode_step`.

        Raises:
            ValueError: If the layer is not causal, the cache has another pattern, or `x` or `counts` has another
                shape.
        """
        self.core.check_decoding(x, cache, "counts", counts)
        layer = on_mesh(self, self.core.ring, x)
        attended, cache = self.core.extend(layer._project(x), cache, counts, layer._sinks())
        return layer._projected(attended, over_ring=False), cache

    def _sinks(self) -> Array | None:
        return None if self.sink_logits is None else self.sink_logits[...]

    def _projected(self, attended: Array, over_ring: bool = True) -> Array:
        """Applies the optional layer norm and the output projection to the attention (batch..., length, heads, dim)."""
        if self.sub_norm is not None:
            flat = attended.reshape(*attended.shape[:-2], -1)
            attended = self.sub_norm(flat).reshape(attended.shape)
        return self.out(attended, out_sharding=self.core.out_sharding(attended.ndim - 1, over_ring))

    def _dropout_rng(self, deterministic: bool, rngs: nnx.Rngs | nnx.RngStream | Array | None) -> Array | None:
        if check_bool("deterministic", deterministic) or self.core.dropout_rate == 0:
            return None
        if rngs is None:
            raise ValueError(
                "`rngs` must be given if dropout is active (disable it with `deterministic=True`), got None."
            )
        if isinstance(rngs, nnx.Rngs):
            return rngs.dropout()
        if isinstance(rngs, nnx.RngStream):
            return rngs()
        check_key("rngs", rngs, "`nnx.Rngs`, an `nnx.RngStream` or a `jax.random` key")
        return rngs

    def over(self, *names: AxisName | None) -> dict[str, Any]:
        """Returns the metadata of a parameter whose axes are sharded over these mesh axes."""
        if self.core.head_axis is None:
            return {}
        return {"out_sharding": names, "mesh": self.core.mesh}
