"""Dilated self-attention as a layer of Flax nnx."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from ringjax._src.comm.mesh import Ring
from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.decode import DecodeCache
from ringjax._src.flax.self_attention import Initializer, PositionKind, SelfAttention, check_layer, self_attention
from ringjax._src.kernels.backend import Implementation
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import check_bool, check_instance, check_key

_KERNEL_INIT, _BIAS_INIT = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


class DilatedSelfAttention(nnx.Module):
    """Dilated self-attention with its projections, on one device or on a ring.

    The same parameters give the same output on any ring, and in `ringjax.linen.DilatedSelfAttention`, where they have
    the same names and shapes. Where the ring has a `head_axis`, the kernels carry it as partitioning metadata.

    Args:
        num_heads: Query heads.
        in_features: Features of the input.
        pattern: The branches.
        num_kv_heads: Key/value heads, a divisor of `num_heads`; as many by default.
        head_dim: Dimensions per head, ``in_features // num_heads`` by default.
        out_features: Features of the output, `in_features` by default.
        is_causal: Whether a position sees only itself and those before.
        positions: ``"rotary"``, ``"xpos"`` (causal, at most 65,536 positions) or None.
        sub_norm: Whether the concatenated heads are normalized (layer norm) before the output projection.
        norm_epsilon: Added to the variance in that norm.
        dropout_rate: Share of the attention weights that is dropped in training, see `dilated_attention`.
        deterministic: Whether nothing is dropped; `model.eval()` and `model.train()` set it too.
        use_bias: Whether the projections have a bias.
        dtype: Of the computation, by default that of input and parameters together; see `ringjax.compute_dtype`.
        param_dtype: Of the parameters.
        kernel_init: Initializer of the kernels, seen as matrices.
        bias_init: Initializer of the biases.
        ring: The devices that share the sequence, or None. Inputs are then in the ring's layout.
        implementation: As for `dilated_attention`.
        rngs: Where the parameters come from.

    Raises:
        ValueError: If an argument is not as described.

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
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = _KERNEL_INIT,
        bias_init: Initializer = _BIAS_INIT,
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
        flags = {"sub_norm": sub_norm, "deterministic": deterministic, "use_bias": use_bias}
        types = {"dtype": dtype, "param_dtype": param_dtype}
        initializers = {"kernel_init": kernel_init, "bias_init": bias_init}
        out_features = check_layer(core, out_features, norm_epsilon, flags, **types, **initializers)
        check_instance("rngs", rngs, nnx.Rngs)
        self.core: SelfAttention = core
        self.deterministic = deterministic
        head_shape = (core.num_heads, core.head_dim)
        projection = functools.partial(
            nnx.LinearGeneral,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
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
        self.sub_norm: nnx.LayerNorm | None = nnx.data(norm(core.num_heads * core.head_dim) if sub_norm else None)

    def __call__(
        self,
        x: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        seq_len: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Array | None = None,
    ) -> Array:
        """The layer's output (batch..., length, out_features).

        Args:
            x: Floating-point inputs (batch..., length, in_features), in the layout of the ring if there is one.
            positions: Position of each row, integers (length,) or (batch..., length); by default that in the sequence,
                which the ring's layout tells. From 0 to ``length - 1`` for xPos.
            segment_ids, seq_len: As for `dilated_attention`.
            deterministic: Whether nothing is dropped, in this call.
            rngs: Where the key for dropout comes from (its stream `dropout`), or the key; needed where some is dropped.

        Raises:
            ValueError: If an argument is not as described.
        """
        self.core.check_call(x, positions, segment_ids, seq_len)
        dropout_rng = self._dropout_rng(self.deterministic if deterministic is None else deterministic, rngs)
        attended = self.core(
            self.query(x),
            self.key(x),
            self.value(x),
            positions=positions,
            segment_ids=segment_ids,
            seq_len=seq_len,
            dropout_rng=dropout_rng,
        )
        return self._projected(attended)

    def prefill(self, x: Array, cache: DecodeCache, lengths: ArrayLike | None = None) -> tuple[Array, DecodeCache]:
        """The output (batch, length, out_features) of a whole prompt, and the cache that has seen it and nothing else.

        Args:
            x: Inputs (batch, length, in_features) of a causal layer, in the layout of the ring if there is one.
            cache: A cache of the layer's pattern, heads, dtype and ring, as `ringjax.init_cache` makes it, with a
                `max_len` that xPos does not exceed.
            lengths: As for `ringjax.prefill`.
        """
        self.core.check_decoding(x, cache, {"lengths": lengths})
        attended, cache = self.core.prefill(self.query(x), self.key(x), self.value(x), cache, lengths)
        return self._projected(attended), cache

    def extend(self, x: Array, cache: DecodeCache, counts: ArrayLike | None = None) -> tuple[Array, DecodeCache]:
        """The output (batch, n, out_features) of the next n tokens after those of the cache, and the cache after them.

        Args:
            x: Inputs (batch, n, in_features) of a causal layer, whole on each device of the ring if there is one.
            cache: The cache, from `prefill` or the tokens before.
            counts: As for `ringjax.decode_step`.
        """
        self.core.check_decoding(x, cache, {"counts": counts})
        attended, cache = self.core.extend(self.query(x), self.key(x), self.value(x), cache, counts)
        return self._projected(attended, over_ring=False), cache

    def _projected(self, attended: Array, over_ring: bool = True) -> Array:
        """The output, of the attention (batch..., length, heads, dim)."""
        if self.sub_norm is not None:
            flat = attended.reshape(*attended.shape[:-2], -1)
            attended = self.sub_norm(flat).reshape(attended.shape)
        return self.out(attended, out_sharding=self.core.out_sharding(attended.ndim - 1, over_ring))

    def _dropout_rng(self, deterministic: bool, rngs: nnx.Rngs | nnx.RngStream | Array | None) -> Array | None:
        if check_bool("deterministic", deterministic) or self.core.dropout_rate == 0:
            return None
        if rngs is None:
            raise ValueError(
                "`rngs` must be given where weights are dropped (none is with `deterministic=True`), got None."
            )
        if isinstance(rngs, nnx.Rngs):
            return rngs.dropout()
        if isinstance(rngs, nnx.RngStream):
            return rngs()
        check_key("rngs", rngs, "`nnx.Rngs`, a stream of them or a key of `jax.random`")
        return rngs

    def over(self, *names: AxisName | None) -> dict[str, object]:
        """Metadata of a parameter whose axes are sharded over these mesh axes."""
        if self.core.head_axis is None:
            return {}
        return {"out_sharding": names, "mesh": self.core.mesh}
