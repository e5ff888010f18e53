"""Attention maps of a slide encoder: how much each tile contributes to the CLS token or to other tiles.

Shapes: ``B`` slides, ``L`` tiles, ``T`` stored rows (the CLS token, the tiles, padding), ``F`` features, ``N`` heads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from ringjax._src.attention_rows import row_weights
from ringjax._src.comm.mesh import Ring
from ringjax.models.block import Block
from ringjax.models.slide_inputs import SlideInputs, segment_ids

if TYPE_CHECKING:
    from ringjax.models.slide import SlideEncoder


class AttentionMap(NamedTuple):
    """Attention weights of one or more queries of each slide, as computed by `SlideEncoder.attention_map`.

    All weights of a query in a layer and head sum to 1, or are 0 for padding.

    Attributes:
        tiles: The weight of each tile.
        cls_token: The weight of the CLS token.
        zero_keys: The weight of the zero keys of ``padding="zeros"``, which have no value.
    """

    tiles: Float[Array, "B queries layers N L"]
    cls_token: Float[Array, "B queries layers N"]
    zero_keys: Float[Array, "B queries layers N"]


@functools.partial(jax.jit, static_argnames="reports")
def layer_weights(
    graph: nnx.GraphDef[SlideEncoder],
    state: Any,  # noqa: ANN401
    inputs: SlideInputs,
    rows: Array,
    reports: bool,
) -> tuple[Array, Array]:
    """Computes the weights (D, B, R, N, T) of all keys and (D, B, R, N) of zero keys in all layers, for these rows."""
    del reports  # programs with and without debug reports differ
    model = nnx.merge(graph, state)
    x, position = model.rows(inputs)
    ids = segment_ids(position, inputs.lengths)
    options: dict[str, Any] = {"rows": rows, "segment_ids": in_sequence_order(model.ring, ids)}

    def step(block: Block, x: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        found = block.attention_inputs(x, segment_ids=ids, seq_len=None)
        query, key, lse = (in_sequence_order(model.ring, a) for a in found)
        weights = row_weights(query, key, lse, model.config.pattern, **options)
        return block(x, segment_ids=ids), weights

    return model.encoder.run(step, x)[1]


@functools.partial(jax.jit, static_argnames=("is_relative", "reports"))
def rollout(
    graph: nnx.GraphDef[SlideEncoder],
    state: Any,  # noqa: ANN401
    inputs: SlideInputs,
    is_cls: Array,
    is_relative: bool,
    reports: bool,
) -> Array:
    """Computes how much of the pooled output comes from each row, (B, T), by going back through the layers.

    If `is_relative`, divides by the result for equal scores.
    """
    del reports  # programs with and without debug reports differ
    model = nnx.merge(graph, state)
    x, position = model.rows(inputs)
    ids = segment_ids(position, inputs.lengths)
    _, states = model.encoder.run(lambda block, x, _: (block(x, segment_ids=ids), x), x)
    is_pooled = (ids == 0) & ((position == 0) == is_cls)
    first = is_pooled.astype(jnp.promote_types(x.dtype, jnp.float32))
    first = first / first.sum(axis=1, keepdims=True)
    block_graph, blocks = nnx.split(model.encoder.blocks)

    def back(shares: list[Array], layer: Any) -> tuple[list[Array], None]:  # noqa: ANN401
        block = nnx.merge(block_graph, layer[0])
        passed_on = [_passed_on(block, layer[1], ids, each, equal_scores=i > 0) for i, each in enumerate(shares)]
        return [(each + more) / 2 for each, more in zip(shares, passed_on, strict=True)], None

    shares, *equal = lax.scan(back, [first] * (1 + is_relative), (blocks, states), reverse=True)[0]
    if is_relative:
        shares = jnp.where(equal[0] > 0, shares / jnp.where(equal[0] > 0, equal[0], 1), 0)
    return in_sequence_order(model.ring, shares)


def _passed_on(block: Block, x: Array, ids: Array, shares: Array, *, equal_scores: bool) -> Array:
    """Distributes the share of each row (B, T) over the rows that it attends to, by the mean weight of all heads.

    Attention is linear in the values, and its transpose multiplies by the transposed weights.
    """
    attention = block.attention
    normalized = block.attention_norm(x)
    query, key = attention.query(normalized), attention.key(normalized)
    query = jnp.zeros_like(query) if equal_scores else query
    attend = functools.partial(attention.core, query, key, positions=None, segment_ids=ids, seq_len=None)
    _, transpose = jax.vjp(attend, jnp.zeros_like(key))
    per_head = (shares / query.shape[2]).astype(query.dtype)[..., None, None]
    is_first = (jnp.arange(query.shape[3]) == 0).astype(query.dtype)  # one of the dimensions of a value is enough
    (received,) = transpose(jnp.broadcast_to(per_head * is_first[None, None, None], query.shape))
    return received[..., 0].astype(shares.dtype).sum(axis=2)


def in_sequence_order(ring: Ring | None, x: Array) -> Array:
    """Returns an array (B, T, …) of stored rows in the order of the sequence."""
    return x if ring is None else ring.unshard(x)
