"""The transformer blocks of LongNet, and the stack of blocks.

Shapes: ``B`` batch, ``T`` length, ``F`` features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ringjax._src.comm.mesh import Ring, stored_positions
from ringjax._src.decode import DecodeCache
from ringjax._src.flax.nnx import DilatedSelfAttention
from ringjax._src.flax.placement import explicit_mesh, on_mesh
from ringjax._src.flax.precision import compute_dtype
from ringjax._src.validation import (
    check_ids,
    check_instance,
    check_key,
    check_optional,
    check_row_positions,
    check_seq_len,
)
from ringjax.models.config import LongNetConfig

Tree = TypeVar("Tree")
KEEP_ATTENTION = jax.checkpoint_policies.save_only_these_names("ringjax_out", "ringjax_lse")


class Block(nnx.Module):
    """A pre-norm block: attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, config: LongNetConfig, *, is_causal: bool, ring: Ring | None, rngs: nnx.Rngs) -> None:
        norm = functools.partial(layer_norm, config, rngs=rngs)
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
            sinks=config.sinks,
            dropout_rate=config.attention_dropout_rate,
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
        """Applies the block to the residual stream (B, T, F); `where` is passed to the attention."""
        return self._feed_forward(x + self.attention(self.attention_norm(x), **where))

    def prefill(self, x: Array, cache: DecodeCache, lengths: ArrayLike | None) -> tuple[Array, DecodeCache]:
        """Applies the block to a prompt and fills the cache of its attention."""
        attended, cache = self.attention.prefill(self.attention_norm(x), cache, lengths)
        return self._feed_forward(x + attended), cache

    def extend(self, x: Array, cache: DecodeCache, counts: ArrayLike | None) -> tuple[Array, DecodeCache]:
        """Applies the block to the next tokens (B, n, F) and updates the cache."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache, counts)
        return self._feed_forward(x + attended, over_ring=False), cache

    def _feed_forward(self, x: Array, over_ring: bool = True) -> Array:
        hidden = nnx.gelu(self.expand(self.feed_forward_norm(x)), approximate=False)
        if self.hidden_norm is not None:
            hidden = self.hidden_norm(hidden)
        return x + self.contract(hidden, out_sharding=self.attention.core.out_sharding(x.ndim, over_ring))


class BlockStack(nnx.Module):
    """The blocks and the final norm, shared by decoder and encoder."""

    def __init__(self, config: LongNetConfig, *, is_causal: bool, ring: Ring | None, rngs: nnx.Rngs) -> None:
        if config.dtype is None:
            mesh = None if ring is None else ring.mesh
            device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
            config = dataclasses.replace(config, dtype=compute_dtype(device))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, is_causal=is_causal, ring=ring, rngs=rngs)

        self.config = config
        self.ring = ring
        self.blocks = blocks(rngs)
        self.norm = layer_norm(config, config.features, rngs=rngs)

    def check_rows(
        self,
        shape: tuple[int, ...],
        segment_ids: Array | None,
        seq_len: int | None,
        positions: Array | None,
        dropout_rng: Array | None,
    ) -> None:
        """Checks the arguments of a call that describe rows (B, T)."""
        check_optional(check_ids, "segment_ids", segment_ids, shape)
        check_seq_len(seq_len, shape[1])
        if positions is not None:
            check_row_positions(positions, shape[0], shape[1])
        check_optional(check_key, "dropout_rng", dropout_rng)

    def is_real(self, segment_ids: Array | None, seq_len: int | None, length: int) -> Array | None:
        """Returns which rows, (B, T) or (1, T), are not padding; None without padding."""
        real = None if segment_ids is None else jnp.asarray(segment_ids) >= 0
        if seq_len is None:
            return real
        inside = stored_positions(self.ring, length)[None] < seq_len
        return inside if real is None else real & inside

    def features(self, x: Array, dropout_rng: Array | None, **where: Any) -> Array:  # noqa: ANN401
        """Returns the normalized output of the last block; with a key, attention dropout is applied."""
        keys = None if dropout_rng is None else jax.random.split(dropout_rng, self.config.num_layers)

        def step(block: Block, x: Array, key: Array | None) -> tuple[Array, None]:
            return block(x, rngs=key, deterministic=True if key is None else None, **where), None

        return self.normalized(self.run(step, x, keys)[0])

    def normalized(self, x: Array) -> Array:
        """Applies the final norm."""
        return on_mesh(self.norm, self.ring, x)(x)

    def run(
        self, step: Callable[[Block, Array, Any], tuple[Array, Any]], x: Array, each: Array | None = None
    ) -> tuple[Array, Any]:
        """Scans `step` over the blocks and the entries of `each`, and stacks its other outputs."""
        graph, state = nnx.split(self.blocks)

        def body(x: Array, layer: Any) -> tuple[Array, Any]:  # noqa: ANN401
            return step(on_mesh(nnx.merge(graph, layer[0]), self.ring, x), x, layer[1])

        in_loop = self.config.scan_layers
        if self.config.remat:
            body = jax.checkpoint(body, policy=KEEP_ATTENTION, prevent_cse=not in_loop)
        return lax.scan(body, x, (state, each), unroll=1 if in_loop else self.config.num_layers)

    def sharding(self, inputs: Array, over_ring: bool = True) -> NamedSharding | None:
        """Returns the sharding of the residual stream of inputs (B, T) or (B, T, F) on an explicit mesh, or None."""
        mesh = explicit_mesh(self.ring, inputs)
        if mesh is None:
            return None
        if self.ring is None:
            return NamedSharding(mesh, PartitionSpec(*jax.typeof(inputs).sharding.spec[:2]))
        return NamedSharding(mesh, PartitionSpec(self.ring.batch_axis, self.ring.axis_name if over_ring else None))


def check_model(config: LongNetConfig, ring: Ring | None, rngs: nnx.Rngs) -> None:
    """Checks the arguments of a model."""
    check_instance("config", config, LongNetConfig)
    check_optional(check_instance, "ring", ring, Ring)
    check_instance("rngs", rngs, nnx.Rngs)


def layer_norm(config: LongNetConfig, features: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Returns a layer norm with the settings of `config`."""
    return nnx.LayerNorm(
        features,
        epsilon=config.norm_epsilon,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        use_fast_variance=False,
        rngs=rngs,
    )


def tree_index(tree: Tree, index: int) -> Tree:
    """Returns one entry of each array along its first axis."""
    return jax.tree.map(lambda x: x[index], tree)
