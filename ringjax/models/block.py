"""The transformer blocks of LongNet, and the stack of blocks.

Shapes: ``B`` batch, ``T`` length, ``F`` features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

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
from ringjax._src.pattern import DilationPattern
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


class ResidualDropout(NamedTuple):
    """Dropout and drop path of the outputs of the layers of a block."""

    key: Array
    rate: float
    path_rate: Array  # scalar

    def __call__(self, x: Array, nth: int) -> Array:
        """Drops elements, and whole sequences, of the output (B, T, F) of the `nth` layer of the block."""
        element_key, path_key = jax.random.split(jax.random.fold_in(self.key, nth))
        x = drop_elements(x, element_key, self.rate)
        kept = 1 - self.path_rate
        is_kept = jax.random.bernoulli(path_key, kept, (x.shape[0], 1, 1))
        return x * (is_kept.astype(kept.dtype) / kept).astype(x.dtype)


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
        self.rows_at_once = config.rows_at_once
        for kernel in (self.attention.out.kernel, self.contract.kernel):
            kernel[...] *= (2 * config.num_layers) ** -0.5

    def __call__(self, x: Array, dropout: ResidualDropout | None = None, **where: Any) -> Array:  # noqa: ANN401
        """Applies the block to the residual stream (B, T, F); `where` is passed to the attention."""
        attention = self.attention
        attention.core.check_call(x, *(where.get(name) for name in ("positions", "segment_ids", "seq_len")))
        qkv = map_rows(lambda x: attention._project(self.attention_norm(x)), x, self.rows_at_once)
        attended = attention._attend(*qkv, **where)
        if dropout is None:
            x = add_rows(x, attention._projected, attended, self.rows_at_once)
        else:
            x = x + dropout(map_rows(attention._projected, attended, self.rows_at_once), 0)
        return self._feed_forward(x, dropout)

    def attention_inputs(self, x: Array, **where: Any) -> tuple[Array, Array, Array]:  # noqa: ANN401
        """Returns the queries, the keys and the log-sum-exp of the scores of the block's attention."""
        return self.attention._scores(self.attention_norm(x), **where)

    def prefill(self, x: Array, cache: DecodeCache, lengths: ArrayLike | None) -> tuple[Array, DecodeCache]:
        """Applies the block to a prompt and fills the cache of its attention."""
        attended, cache = self.attention.prefill(self.attention_norm(x), cache, lengths)
        return self._feed_forward(x + attended), cache

    def extend(self, x: Array, cache: DecodeCache, counts: ArrayLike | None) -> tuple[Array, DecodeCache]:
        """Applies the block to the next tokens (B, n, F) and updates the cache."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache, counts)
        return self._feed_forward(x + attended, over_ring=False), cache

    def _feed_forward(self, x: Array, dropout: ResidualDropout | None = None, *, over_ring: bool = True) -> Array:
        out_sharding = self.attention.core.out_sharding(x.ndim, over_ring)

        def apply(x: Array) -> Array:
            hidden = nnx.gelu(self.expand(self.feed_forward_norm(x)), approximate=False)
            if self.hidden_norm is not None:
                hidden = self.hidden_norm(hidden)
            return self.contract(hidden, out_sharding=out_sharding)

        if dropout is None:
            return add_rows(x, apply, None, self.rows_at_once)
        return x + dropout(map_rows(apply, x, self.rows_at_once), 1)


class BlockStack(nnx.Module):
    """The blocks and the final norm, shared by decoder and encoder."""

    def __init__(self, config: LongNetConfig, *, is_causal: bool, ring: Ring | None, rngs: nnx.Rngs) -> None:
        if config.rows_at_once is not None and ring is not None:
            raise ValueError(f"`rows_at_once` must be None on a ring, got {config.rows_at_once}.")
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
        self.norm: nnx.LayerNorm | None = nnx.data(None)
        if config.final_norm:
            self.norm = layer_norm(config, config.features, rngs=rngs)
        self.accept_misplaced = True

    def check_rows(
        self,
        name: str,
        inputs: Array,
        segment_ids: Array | None,
        seq_len: int | None,
        positions: Array | None,
        dropout_rng: Array | None,
    ) -> None:
        """Checks where the inputs (B, T, …) are, and the arguments of a call that describe their rows."""
        shape = inputs.shape[:2]
        if self.ring is not None:
            self.ring.check_placed(name, inputs)
        check_optional(check_ids, "segment_ids", segment_ids, shape)
        check_seq_len(seq_len, shape[1])
        self.check_placement(self.sequence_length(shape[1], seq_len) or shape[1])
        if positions is not None:
            check_row_positions(positions, shape[0], shape[1])
        check_optional(check_key, "dropout_rng", dropout_rng)

    def check_placement(self, length: int) -> None:
        """Checks that torchscale, whose weights the model may have, would not misplace rows of this length."""
        found = () if self.accept_misplaced else misplaced_branches(self.config.pattern, length)
        if found:
            raise ValueError(
                "`accept_misplaced` of `from_torchscale` must be True for a sequence with several segments that the "
                "rate does not divide, whose rows torchscale misplaces, got "
                f"branches {', '.join(found)} and length {length}."
            )

    def is_real(self, segment_ids: Array | None, seq_len: int | None, length: int) -> Array | None:
        """Returns which rows, (B, T) or (1, T), are not padding; None without padding."""
        real = None if segment_ids is None else jnp.asarray(segment_ids) >= 0
        true_length = self.sequence_length(length, seq_len)
        if true_length is None:
            return real
        inside = stored_positions(self.ring, length)[None] < true_length
        return inside if real is None else real & inside

    def sequence_length(self, stored_length: int, seq_len: int | None) -> int | None:
        """Returns the length without padding that the call or the ring gives, if any."""
        return seq_len if self.ring is None else self.ring.sequence_length(stored_length, seq_len)

    def features(self, x: Array, dropout_rng: Array | None, **where: Any) -> Array:  # noqa: ANN401
        """Returns the normalized output of the last block; with a key, dropout is applied."""
        return self.normalized(self.states(x, dropout_rng, lambda _: None, **where)[0])

    def normalized(self, x: Array) -> Array:
        """Applies the final norm, if there is one."""
        return x if self.norm is None else on_mesh(self.norm, self.ring, x)(x)

    def states(
        self,
        x: Array,
        dropout_rng: Array | None,
        report: Callable[[Array], Any],
        **where: Any,  # noqa: ANN401
    ) -> tuple[Array, Any, Any]:
        """Applies the blocks to embeddings (B, T, F).

        Returns:
            The output of the last block, `report` of the embeddings, and `report` of the output of each block, stacked.
        """
        config, each = self.config, None
        if dropout_rng is not None and not self.blocks.attention.deterministic:
            each = (
                jax.random.split(dropout_rng, config.num_layers),
                jnp.linspace(0, config.drop_path_rate, config.num_layers),
            )
            x = drop_elements(x, jax.random.fold_in(dropout_rng, config.num_layers), config.dropout_rate)

        def step(block: Block, x: Array, each: tuple[Array, Array] | None) -> tuple[Array, Any]:
            if each is None:
                x = block(x, **where)
            else:
                key, path_rate = each
                weights_key = key if config.attention_dropout_rate else None
                x = block(x, self._residual_dropout(key, path_rate), dropout_rng=weights_key, **where)
            return x, report(x)

        first = report(x)
        x, reports = self.run(step, x, each)
        return x, first, reports

    def _residual_dropout(self, key: Array, path_rate: Array) -> ResidualDropout | None:
        config = self.config
        if config.dropout_rate == 0 and config.drop_path_rate == 0:
            return None
        return ResidualDropout(key, config.dropout_rate, path_rate)

    def run(
        self,
        step: Callable[[Block, Array, Any], tuple[Array, Any]],
        x: Array,
        each: Any = None,  # noqa: ANN401
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


def misplaced_branches(pattern: DilationPattern, length: int) -> tuple[str, ...]:
    """Returns the branches, as ``"w/r"``, whose rows torchscale misplaces in a sequence of this length.

    Torchscale pads each segment to a multiple of the rate and then reads the padded segments as if they followed each
    other directly, so that the rows of every segment but the first are shifted.
    """
    branches = zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
    return tuple(f"{w}/{r}" for w, r in branches if w < length and w % r)


def map_rows(function: Callable[[Array], Tree], x: Array, most_rows: int | None) -> Tree:
    """Applies a function of rows to (B, T, …), to equal parts of at most `most_rows` rows at a time."""
    batch, length = x.shape[:2]
    parts = num_parts(length, most_rows)
    if parts == 1:
        return function(x)
    out = lax.map(function, x.reshape(batch, parts, length // parts, *x.shape[2:]).swapaxes(0, 1))
    return jax.tree.map(lambda y: y.swapaxes(0, 1).reshape(batch, length, *y.shape[3:]), out)


def add_rows(x: Array, function: Callable[[Array], Array], rows: Array | None, most_rows: int | None) -> Array:
    """Returns x (B, T, F) plus a function of `rows` (B, T, …), by default of x, computed in parts and in place."""
    length = x.shape[1]
    parts = num_parts(length, most_rows)
    if parts == 1:
        return x + function(x if rows is None else rows)
    size = length // parts

    def step(i: Array, x: Array) -> Array:
        old = lax.dynamic_slice_in_dim(x, i * size, size, axis=1)
        new = old + function(old if rows is None else lax.dynamic_slice_in_dim(rows, i * size, size, axis=1))
        return lax.dynamic_update_slice_in_dim(x, new, i * size, axis=1)

    return lax.fori_loop(0, parts, step, x)


def num_parts(length: int, most_rows: int | None) -> int:
    """Returns the number of equal parts of at most `most_rows` rows; 1 if the length has no suitable divisor."""
    least = 1 if most_rows is None else -(-length // most_rows)
    return next((n for n in range(least, 2 * least) if length % n == 0), 1)


def drop_elements(x: Array, key: Array, rate: float) -> Array:
    """Sets a fraction of the elements to 0 and divides the others by ``1 - rate``."""
    if rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), jnp.zeros_like(x))


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


def tree_index(tree: Tree, index: int | Array) -> Tree:
    """Returns one entry of each array along its first axis."""
    return jax.tree.map(lambda x: x[index], tree)
