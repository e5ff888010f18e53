r"""Attention of the query rows of one head to key rows, block by block, in plain XLA, and its gradient.

Blocks that causality masks entirely are skipped. Along the diagonal, step ``j`` (of `sizes.diagonal` keys) leaves out
the query rows before its keys, so only half of a square per step is wasted:

    rows of the block   step 0  1  2  3
    0                        \
    1                        #  \
    2                        #  #  \
    3                        #  #  #  \

Legend: ``M`` query rows (times the query heads per key/value head), ``S`` key rows, ``H`` head dim; arrays are in the
accumulator dtype and padded to whole blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src import dropout, indexing
from ringjax._src import online_softmax as softmax
from ringjax._src.dropout import RowHashes
from ringjax._src.kernels.interface import RowPositions
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.rows.sizes import XlaBlockSizes

State = TypeVar("State")


class MaskInfo(NamedTuple):
    """What decides at run time which scores are masked and which weights are dropped."""

    num_rows: Array | int  # number of rows of queries and of keys; later rows are block padding
    query_ids: Array | None = None  # segment id of each query row, or None; negative ids are padding
    key_ids: Array | None = None  # segment id of each key row, or None
    positions: RowPositions | None = None  # segments and positions of rows of an unaligned branch, or None
    key_ranges: Array | None = None  # with positions, the key rows that each query block may attend to, (blocks, 2)
    hashes: RowHashes | None = None  # hashes of query rows (M,) and key rows (S,) for dropout, or None


class KeyBlock(NamedTuple):
    """A step: `size` keys from `start`, attended to by the query rows of a block from `first_row`."""

    start: Array | int
    size: int
    first_row: int = 0
    is_diagonal: bool = False
    is_last: bool = False  # may hold rows past the end of the segment


@dataclasses.dataclass(frozen=True)
class BlockLoop:
    """The order of the blocks, the same forward and backward, for as many query rows as key rows."""

    sizes: XlaBlockSizes
    num_rows: int  # most rows of a head
    q_per_kv: int  # query heads per key/value head; a query row holds all of them side by side
    is_causal: bool  # whether a query attends only to keys up to its own row (or position, with `RowPositions`)
    is_ragged: bool  # whether some head has fewer rows than the blocks hold
    dropout_rate: float = 0.0  # probability of dropping a weight, if there are hashes

    @property
    def num_blocks(self) -> int:
        """Number of query blocks."""
        return self.sizes.padded(self.num_rows) // self.sizes.query

    def block_rows(self) -> tuple[Array, Array]:
        """Returns first row and last row + 1 of each query block."""
        first = jnp.arange(0, self.sizes.padded(self.num_rows), self.sizes.query, dtype=jnp.int32)
        return first, first + self.sizes.query

    def count_tiles(self, key_ranges: Array | None = None) -> Array | int:
        """Counts the squares of `sizes.diagonal` rows and keys that are computed, summed over all `key_ranges`."""
        side = self.sizes.query // self.sizes.diagonal
        if key_ranges is not None:
            blocks = indexing.ceil_div(key_ranges[..., 1], self.sizes.key) - indexing.quotient(
                key_ranges[..., 0], self.sizes.key
            )
            return blocks.sum().astype(jnp.int32) * (side * self.sizes.key // self.sizes.diagonal)
        if self.is_causal:
            return self.num_blocks * side * (side + 1) // 2 + self.num_blocks * (self.num_blocks - 1) // 2 * side**2
        return (self.num_blocks * side) ** 2

    def over_queries(self, block: Callable[[State, Array | int], State], state: State, mask: MaskInfo) -> State:
        """Runs `block` on each query block that has rows."""
        if self.num_blocks == 1:
            return block(state, 0)
        return lax.fori_loop(0, indexing.ceil_div(mask.num_rows, self.sizes.query), lambda i, s: block(s, i), state)

    def over_keys(
        self, step: Callable[[State, KeyBlock], State], state: State, index: Array | int, mask: MaskInfo
    ) -> State:
        """Runs `step` on each key block that query block `index` attends to."""
        query, key, diagonal = self.sizes.query, self.sizes.key, self.sizes.diagonal

        def run(first: Array | int, end: Array | int, state: State, is_last: bool = False) -> State:
            return lax.fori_loop(first, end, lambda j, s: step(s, KeyBlock(j * key, key, is_last=is_last)), state)

        if mask.key_ranges is not None:
            first, end = mask.key_ranges[index]
            return run(indexing.quotient(first, key), indexing.ceil_div(end, key), state)
        if self.is_causal:
            if self.num_blocks > 1:
                state = run(0, index * (query // key), state)
            for row in range(0, query, diagonal):
                state = step(state, KeyBlock(index * query + row, diagonal, first_row=row, is_diagonal=True))
            return state
        if self.num_blocks == 1 and query == key:
            return step(state, KeyBlock(0, key, is_last=self.is_ragged))
        whole = indexing.quotient(mask.num_rows, key) if self.is_ragged else self.num_blocks * (query // key)
        state = run(0, whole, state)
        return run(whole, indexing.ceil_div(mask.num_rows, key), state, is_last=True) if self.is_ragged else state

    def mask_scores(self, scores: Array, mask: MaskInfo, index: Array | int, keys: KeyBlock) -> Array:
        """Sets the scores (M, S) of a step to -inf where a query does not attend to a key.

        A causal diagonal masks its first square only and needs no bound: only rows past the end, which are never read,
        attend to keys past the end.
        """
        if mask.positions is not None:
            of_queries = self._query_rows(mask.positions.query, index, keys)[:, None]
            of_keys = self.key_block(mask.positions.key, keys)[None, :]
            attends = of_queries[..., 0] == of_keys[..., 0]
            if self.is_causal:
                attends &= of_keys[..., 1] <= of_queries[..., 1]
            scores = jnp.where(attends, scores, -jnp.inf)
        elif keys.is_diagonal:
            square = scores[: keys.size * self.q_per_kv]
            row, column = (lax.broadcasted_iota(jnp.int32, square.shape, axis) for axis in (0, 1))
            zero = jnp.minimum(mask.num_rows, 0)  # unknown to XLA, so that it compares in registers and hoists no mask
            scores = _with_rows(
                scores, jnp.where(column <= indexing.quotient(row, self.q_per_kv) + zero, square, -jnp.inf), 0
            )
        elif keys.is_last:
            column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores = jnp.where(column < mask.num_rows - keys.start, scores, -jnp.inf)
        if mask.query_ids is not None and mask.key_ids is not None:
            query_ids = self._query_rows(mask.query_ids, index, keys)[:, None]
            is_same = query_ids == self.key_block(mask.key_ids, keys)[None, :]
            scores = jnp.where(is_same & (query_ids >= 0), scores, -jnp.inf)
        return scores

    def drop(self, weights: Array, mask: MaskInfo, index: Array | int, keys: KeyBlock) -> Array:
        """Applies dropout to the weights (M, S) of a step, or to their gradient."""
        if mask.hashes is None:
            return weights
        query = self.query_block(mask.hashes.query, index)[keys.first_row * self.q_per_kv :]
        key = self.key_block(mask.hashes.key, keys)
        return weights * dropout.factors(query, key, self.dropout_rate, weights.dtype)

    def pad(self, x: Array, q_per_kv: int, fill: int = 0) -> Array:
        """Pads rows (num, rows * q_per_kv, width) to whole blocks."""
        extra = (self.sizes.padded(self.num_rows) - self.num_rows) * q_per_kv
        return jnp.pad(x, [(0, 0), (0, extra), (0, 0)], constant_values=fill) if extra else x

    def query_block(self, x: Array, index: Array | int) -> Array:
        """Returns the rows of a query block, of all query heads."""
        size = self.sizes.query * self.q_per_kv
        return indexing.dynamic_slice_in_dim(x, index * size, size)

    def set_query_block(self, x: Array, block: Array, index: Array | int) -> Array:
        """Replaces the rows of a query block."""
        return indexing.dynamic_update_slice_in_dim(x, block, index * self.sizes.query * self.q_per_kv, axis=0)

    def key_block(self, x: Array, keys: KeyBlock) -> Array:
        """Returns the rows of a key block."""
        return indexing.dynamic_slice_in_dim(x, keys.start, keys.size)

    def add_key_block(self, transposed: Array, block: Array, keys: KeyBlock) -> Array:
        """Adds `block` to the columns of a key block in `transposed` (H, S)."""
        old = indexing.dynamic_slice_in_dim(transposed, keys.start, keys.size, axis=1)
        return indexing.dynamic_update_slice_in_dim(transposed, old + block, keys.start, axis=1)

    def _query_rows(self, x: Array, index: Array | int, keys: KeyBlock) -> Array:
        """Returns the entry of each row of a step's scores in `x`, which has one entry for all query heads."""
        rows = self.sizes.query - keys.first_row
        block = indexing.dynamic_slice_in_dim(x, index * self.sizes.query + keys.first_row, rows)
        return jnp.repeat(block, self.q_per_kv, axis=0)


def attend_rows(q: Array, k: Array, v: Array, *, mask: MaskInfo, loop: BlockLoop) -> PartialSoftmax:
    """Computes the partial softmax of scaled queries (M, H) over k and v (S, H)."""

    def block(whole: PartialSoftmax, index: Array | int) -> PartialSoftmax:
        q_block = loop.query_block(q, index)

        def step(state: softmax.SoftmaxState, keys: KeyBlock) -> softmax.SoftmaxState:
            first = keys.first_row * loop.q_per_kv
            scores = loop.mask_scores(_dot(q_block[first:], loop.key_block(k, keys), 1, 1), mask, index, keys)
            rest, weights = softmax.rescale(softmax.SoftmaxState(*(x[first:] for x in state)), scores)
            weights = lax.optimization_barrier(weights)  # one pass of exp, read by the sum and by the multiply
            acc = rest.acc + _dot(loop.drop(weights, mask, index, keys), loop.key_block(v, keys), 1, 0)
            rest = softmax.SoftmaxState(acc, rest.max, rest.denominator + weights.sum(axis=1))
            return softmax.SoftmaxState(*(_with_rows(x, y, first) for x, y in zip(state, rest, strict=True)))

        part = softmax.finish(loop.over_keys(step, softmax.start(q_block), index, mask))
        return PartialSoftmax(*(loop.set_query_block(x, y, index) for x, y in zip(whole, part, strict=True)))

    return loop.over_queries(block, softmax.empty_like(q), mask)


def attend_rows_bwd(
    q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, *, mask: MaskInfo, loop: BlockLoop
) -> tuple[Array, Array, Array]:
    """Computes the gradients (M, H), (S, H) and (S, H) with respect to scaled queries, keys and values.

    dk and dv are summed transposed: XLA:CPU multiplies (H, M) by (M, S) twice as fast as (S, M) by (M, H).
    """

    def block(grads: tuple[Array, Array, Array], index: Array | int) -> tuple[Array, Array, Array]:
        q_block, dout_block, lse_block, delta_block = (loop.query_block(x, index) for x in (q, dout, lse, delta))

        def step(state: tuple[Array, Array, Array], keys: KeyBlock) -> tuple[Array, Array, Array]:
            dq, dk, dv = state
            first = keys.first_row * loop.q_per_kv
            q_rows, dout_rows = q_block[first:], dout_block[first:]
            k_block, v_block = loop.key_block(k, keys), loop.key_block(v, keys)
            scores = loop.mask_scores(_dot(q_rows, k_block, 1, 1), mask, index, keys)
            probs = lax.optimization_barrier(jnp.exp(scores - lse_block[first:, None]))
            dprobs = loop.drop(_dot(dout_rows, v_block, 1, 1), mask, index, keys)
            dscores = probs * (dprobs - delta_block[first:, None])
            dq = _with_rows(dq, dq[first:] + _dot(dscores, k_block, 1, 0), first)
            dk = loop.add_key_block(dk, _dot(q_rows, dscores, 0, 0), keys)
            dv = loop.add_key_block(dv, _dot(dout_rows, loop.drop(probs, mask, index, keys), 0, 0), keys)
            return dq, dk, dv

        dq, dk, dv = grads
        dq_block, dk, dv = loop.over_keys(step, (jnp.zeros_like(q_block), dk, dv), index, mask)
        return loop.set_query_block(dq, dq_block, index), dk, dv

    dq, dk, dv = loop.over_queries(block, (jnp.zeros_like(q), jnp.zeros_like(k.T), jnp.zeros_like(v.T)), mask)
    return dq, dk.T, dv.T


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())))


def _with_rows(x: Array, rows: Array, first: int) -> Array:
    """Replaces the rows of `x` from `first` on."""
    return rows if rows.shape == x.shape else indexing.dynamic_update_slice_in_dim(x, rows, first, axis=0)
