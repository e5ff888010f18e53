"""LongNet: pre-norm blocks of dilated attention and feed-forward layers.

Legend: ``B`` batch, ``T`` length, ``F`` features, ``V`` vocabulary, ``L`` layers.

    x = embed(tokens)
    L times:  x = x + attention(norm(x))
              x = x + feed_forward(norm(x))
    logits = norm(x) @ embedding.T

Initial weights: kernels are normal with variance ``1 / fan_in``, those that write to the residual stream (the last of
attention and feed-forward layers) divided by ``sqrt(2 L)``; embeddings are normal with variance ``1 / F``; norms start
at scale 1, biases at 0. The parameters of the blocks are stacked along a leading axis of size ``L``, whether they run
in a loop or not, and do not depend on the ring.

On a ring with a `head_axis`, the heads of the attention and the hidden axis of the feed-forward layers are sharded over
it (as metadata of the parameters); everything else is whole on each device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ringjax.devices import Ring
from ringjax.models.config import LongNetConfig
from ringjax.nnx import DilatedSelfAttention
from ringjax.precision import compute_dtype

KEEP_ATTENTION = jax.checkpoint_policies.save_only_these_names("ringjax_out", "ringjax_lse")


class Block(nnx.Module):
    """Attention and a feed-forward layer, each on a normed stream and added to it."""

    def __init__(self, config: LongNetConfig, *, is_causal: bool, ring: Ring | None, rngs: nnx.Rngs) -> None:
        norm = functools.partial(_norm, config, rngs=rngs)
        linear: Any = functools.partial(
            nnx.Linear, use_bias=config.use_bias, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        hidden = config.hidden_features or 4 * config.features
        self.attention_norm = norm(config.features)
        self.attention = DilatedSelfAttention(
            config.num_heads,
            config.features,
            config.pattern,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            is_causal=is_causal,
            positions=config.positions,
            sub_norm=config.sub_norm,
            norm_epsilon=config.norm_epsilon,
            use_bias=config.use_bias,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            ring=ring,
            rngs=rngs,
        )
        over, axis = self.attention.over, self.attention.core.head_axis
        self.feed_forward_norm = norm(config.features)
        self.expand = linear(config.features, hidden, kernel_metadata=over(None, axis), bias_metadata=over(axis))
        self.hidden_norm: nnx.LayerNorm | None = nnx.data(norm(hidden) if config.sub_norm else None)
        self.contract = linear(hidden, config.features, kernel_metadata=over(axis, None))
        for kernel in (self.attention.out.kernel, self.contract.kernel):
            kernel[...] *= (2 * config.num_layers) ** -0.5

    def __call__(self, x: Array, **where: Any) -> Array:  # noqa: ANN401
        """The stream (B, T, F) after this block; `where` is what the attention is told of positions and padding."""
        return self._fed(x + self.attention(self.attention_norm(x), **where))

    def _fed(self, x: Array) -> Array:
        hidden = nnx.gelu(self.expand(self.feed_forward_norm(x)), approximate=False)
        if self.hidden_norm is not None:
            hidden = self.hidden_norm(hidden)
        return x + self.contract(hidden, out_sharding=self.attention.core.out_sharding(x.ndim))


class _LongNet(nnx.Module):
    """What decoder and encoder share: all blocks, and the norm after them."""

    def __init__(self, config: LongNetConfig, *, is_causal: bool, ring: Ring | None, rngs: nnx.Rngs) -> None:
        if config.dtype is None:
            config = dataclasses.replace(config, dtype=compute_dtype())

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, is_causal=is_causal, ring=ring, rngs=rngs)

        self.config = config
        self.ring = ring
        self.blocks = blocks(rngs)
        self.norm = _norm(config, config.features, rngs=rngs)

    def _features(self, x: Array, **where: Any) -> Array:  # noqa: ANN401
        """The stream after all blocks, normed."""
        return self._run(lambda block, x, _: (block(x, **where), None), x, None)[0]

    def _run(self, step: Callable[[Block, Array, Any], tuple[Array, Any]], x: Array, each: Any) -> tuple[Array, Any]:  # noqa: ANN401
        """Takes the stream through `step` of each block and of what `each` block has, stacked like the parameters."""
        graph, state = nnx.split(self.blocks)

        def body(x: Array, layer: tuple[Any, Any]) -> tuple[Array, Any]:
            return step(nnx.merge(graph, layer[0]), x, layer[1])

        in_loop = self.config.scan_layers
        if self.config.remat:
            body = jax.checkpoint(body, policy=KEEP_ATTENTION, prevent_cse=not in_loop)
        x, each = lax.scan(body, x, (state, each), unroll=1 if in_loop else self.config.num_layers)
        return self.norm(x), each


class LongNetDecoder(_LongNet):
    """A causal language model with dilated attention.

    The same parameters give the same logits on any ring.

    Args:
        config: The sizes, with a `vocab_size`.
        ring: The devices that share the sequence, or None.
        rngs: Where the parameters come from.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import jax.numpy as jnp, ringjax as rj
        >>> from flax import nnx
        >>> from ringjax.models import LongNetConfig, LongNetDecoder
        >>> config = LongNetConfig.tiny(vocab_size=16, pattern=rj.DilationPattern((16, 64), (1, 4)))
        >>> model = LongNetDecoder(config, rngs=nnx.Rngs(0))
        >>> model(jnp.ones((2, 64), int)).shape
        (2, 64, 16)
    """

    def __init__(self, config: LongNetConfig, *, ring: Ring | None = None, rngs: nnx.Rngs) -> None:
        if config.vocab_size is None:
            raise ValueError("`vocab_size` must be given for a decoder, got None.")
        super().__init__(config, is_causal=True, ring=ring, rngs=rngs)
        self.embed = _embedding(self.config, config.vocab_size, rngs)
        self.head: nnx.Linear | None = nnx.data(None)
        if not config.tie_embeddings:
            param_dtype = config.param_dtype
            self.head = nnx.Linear(
                config.features, config.vocab_size, use_bias=False, param_dtype=param_dtype, rngs=rngs
            )

    def __call__(
        self,
        tokens: Array,
        *,
        segment_ids: Array | None = None,
        seq_len: int | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Logits (B, T, V) of what follows each token, in float32.

        Args:
            tokens: Integers (B, T), in the layout of the ring if there is one.
            segment_ids, seq_len: Documents and padding, as for `dilated_attention`.
            positions: Position of each token, integers (T,) or (B, T); by default that in the sequence.
        """
        x = self.embed(tokens, out_sharding=_stream_sharding(self.ring))
        return self._logits(self._features(x, segment_ids=segment_ids, seq_len=seq_len, positions=positions))

    def _logits(self, x: Array) -> Array:
        kernel = self.embed.embedding[...].T if self.head is None else self.head.kernel[...]
        return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


def _norm(config: LongNetConfig, features: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        features,
        epsilon=config.norm_epsilon,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        use_fast_variance=False,
        rngs=rngs,
    )


def _embedding(config: LongNetConfig, vocab_size: int, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(
        vocab_size,
        config.features,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        embedding_init=nnx.initializers.normal(config.features**-0.5),
        rngs=rngs,
    )


def _stream_sharding(ring: Ring | None) -> NamedSharding | None:
    """How the stream is sharded, where it must be said: on an explicit mesh."""
    if ring is None or AxisType.Explicit not in ring.resolve().axis_types:
        return None
    return NamedSharding(ring.resolve(), PartitionSpec(ring.batch_axis, ring.axis_name, None))
