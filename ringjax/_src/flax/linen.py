"""Dilated self-attention as a Flax Linen layer."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from ringjax._src.comm.mesh import Ring
from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.flax.placement import param_on_mesh
from ringjax._src.flax.self_attention import Initializer, PositionKind, check_layer, flat_initializer, self_attention
from ringjax._src.kernels.dispatch import Implementation
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import check_array, check_bool, check_key, check_optional


class DilatedSelfAttention(nn.Module):
    """Dilated self-attention layer with projections, on one device or on a ring.

    The same parameters give the same output on every ring. `ringjax.nnx.DilatedSelfAttention` has parameters of the
    same names and shapes. If the ring has a `head_axis`, the kernels carry it as partitioning metadata.

    Args:
        num_heads, pattern, num_kv_heads, head_dim, out_features, is_causal, positions, sub_norm, norm_epsilon,
            sinks, dropout_rate, use_bias, dtype, param_dtype, kernel_init, bias_init, ring, implementation: See
            `ringjax.nnx.DilatedSelfAttention`; the number of input features is that of the inputs.
        deterministic: Whether to disable dropout.

    Raises:
        ValueError: When the layer is called, under the same conditions as `ringjax.nnx.DilatedSelfAttention`.

    Example:
        >>> import jax, jax.numpy as jnp, ringjax as rj
        >>> from ringjax.linen import DilatedSelfAttention
        >>> pattern = rj.DilationPattern((16, 64), (1, 4))
        >>> layer = DilatedSelfAttention(4, pattern, is_causal=True, positions="rotary")
        >>> x = jnp.ones((2, 64, 32))
        >>> parameters = layer.init(jax.random.key(0), x)
        >>> layer.apply(parameters, x).shape
        (2, 64, 32)
    """

    num_heads: int
    pattern: DilationPattern
    num_kv_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    is_causal: bool = False
    positions: PositionKind | None = None
    sub_norm: bool = False
    norm_epsilon: float = 1e-6
    sinks: bool = False
    dropout_rate: float = 0.0
    deterministic: bool = False
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    ring: Ring | None = None
    implementation: Implementation | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T in_features"],
        *,
        positions: Int[Array, " T"] | Int[Array, "*batch T"] | None = None,
        segment_ids: Int[Array, "*batch T"] | None = None,
        seq_len: int | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
    ) -> Float[Array, "*batch T out_features"]:
        """Computes the output of the layer.

        Args:
            x, positions, segment_ids, seq_len, deterministic: See `ringjax.nnx.DilatedSelfAttention`.
            dropout_rng: A `jax.random` key for dropout; by default from the stream ``"dropout"``.

        Raises:
            ValueError: If `x` does not have `in_features` features, `positions` or `segment_ids` do not have the shape
                of its leading axes, `positions` are given to a layer without positional encoding, or `seq_len`
                exceeds T.
        """
        check_array("x", x, "floating point")
        if not x.shape:
            raise ValueError(f"`x` must have the axes (batch..., length, features), got shape {x.shape}.")
        names = ("num_kv_heads", "head_dim", "is_causal", "positions", "ring", "implementation", "dropout_rate")
        core = self_attention(self.pattern, x.shape[-1], self.num_heads, **self._fields(*names))
        core.check_call(x, positions, segment_ids, seq_len)
        is_deterministic = self.deterministic if deterministic is None else check_bool("deterministic", deterministic)
        check_optional(check_key, "dropout_rng", dropout_rng)
        flags = self._fields("sub_norm", "sinks", "deterministic")
        options = self._fields("use_bias", "dtype", "param_dtype", "kernel_init", "bias_init")
        out_features = check_layer(core, self.out_features, self.norm_epsilon, flags, options)
        projection: Any = functools.partial(_Projection, ring=self.ring, mesh=core.mesh, **options)
        query, key, value = (
            projection((core.in_features, heads, core.head_dim), 1, over=(None, core.head_axis, None), name=name)(x)
            for name, heads in {"query": core.num_heads, "key": core.num_kv_heads, "value": core.num_kv_heads}.items()
        )
        if is_deterministic or core.dropout_rate == 0:
            dropout_rng = None
        elif dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        sink_logits = None
        if self.sinks:
            zeros = sharded_initializer(nn.initializers.zeros_init(), (core.head_axis,), core.mesh)
            sink_logits = self.param("sink_logits", zeros, (core.num_heads,), self.param_dtype)
        attended = core(
            query,
            key,
            value,
            positions=positions,
            segment_ids=segment_ids,
            seq_len=seq_len,
            sink_logits=sink_logits,
            dropout_rng=dropout_rng,
        )
        if self.sub_norm:
            norm = nn.LayerNorm(
                epsilon=self.norm_epsilon,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                use_fast_variance=False,
                name="sub_norm",
            )
            attended = norm(attended.reshape(*attended.shape[:-2], -1)).reshape(attended.shape)
        shape = (core.num_heads, core.head_dim, out_features)
        out = projection(shape, 2, over=(core.head_axis, None, None), name="out")
        return out(attended, core.out_sharding(x.ndim))

    def _fields(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


class _Projection(nn.Module):
    """Projection with a kernel of `shape`, sharded over the mesh axes `over`; contracts its first `contracted` axes."""

    shape: tuple[int, ...]
    contracted: int
    over: tuple[AxisName | None, ...]
    use_bias: bool
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    kernel_init: Initializer
    bias_init: Initializer
    ring: Ring | None
    mesh: Mesh | None

    @nn.compact
    def __call__(self, x: Array, out_sharding: NamedSharding | None = None) -> Array:
        kernel_init = flat_initializer(self.kernel_init, self.contracted)
        kernel_init = sharded_initializer(kernel_init, self.over, self.mesh)
        kernel = self.param("kernel", kernel_init, self.shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias_init = sharded_initializer(self.bias_init, self.over[self.contracted :], self.mesh)
            bias = self.param("bias", bias_init, self.shape[self.contracted :], self.param_dtype)
        kernel = param_on_mesh(kernel, PartitionSpec(*self.over), self.ring, x)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        first = x.ndim - self.contracted
        summed = (tuple(range(first, x.ndim)), tuple(range(self.contracted)))
        out = lax.dot_general(x, kernel, (summed, ((), ())), out_sharding=out_sharding)
        return out if bias is None else out + bias.reshape((1,) * first + bias.shape)


def sharded_initializer(init: Initializer, over: tuple[AxisName | None, ...], mesh: Mesh | None) -> Initializer:
    """Returns an initializer that adds the mesh axes over which the axes of a parameter are sharded, if any."""
    if all(axis is None for axis in over):
        return init
    return nn.with_partitioning(init, cast(tuple[str | None, ...], over), mesh=mesh)
