r"""The order in which the blocks of some queries and some keys meet, and which of a block's scores count.

Blocks that causality masks altogether are never stepped on. Along the diagonal, step ``j`` (of `sizes.diagonal` keys)
leaves out the query rows before its keys, so only half of a square per step is wasted:

    rows of the block   step 0  1  2  3
    0                        \
    1                        #  \
    2                        #  #  \
    3                        #  #  #  \
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src import dropout
from ringjax._src.dropout import RowHashes
from ringjax._src.rows.sizes import WalkSizes

State = TypeVar("State")


class Places(NamedTuple):
    """Where rows stand in the sequence, for rows whose order alone does not say who sees whom.

    Attributes:
        query: Segment and position of each query row, (rows, 2); segment -1 for a row that is not there.
        key: The same of each key row; segment -2 for a row that is not there.
        ranges: First and last + 1 of the key rows that any row of a query block may see, (query blocks, 2).
    """

    query: Array
    key: Array
    ranges: Array


class Sight(NamedTuple):
    """What is known only at run time about who sees whom.

    Attributes:
        present: Rows that are there, of queries and of keys alike; later ones are padding.
        query_ids: Segment id of each query row, or None; a query sees keys of its own id, and nothing below 0.
        key_ids: The same of each key row.
        places: For rows whose order does not say who sees whom, or None.
        stamps: What decides which weights are dropped, of query rows (M,) and key rows (S,), or None.
    """

    present: Array | int
    query_ids: Array | None = None
    key_ids: Array | None = None
    places: Places | None = None
    stamps: RowHashes | None = None


class Keys(NamedTuple):
    """A block of keys in a step: `size` of them from `start`, met by the query rows from `first_row` on."""

    start: Array | int
    size: int
    first_row: int = 0
    is_diagonal: bool = False
    is_last: bool = False  # may hold rows past the end of the segment


@dataclasses.dataclass(frozen=True)
class Walk:
    """The order in which as many query rows as key rows meet, the same forward and backward.

    Attributes:
        sizes: How the rows are cut into blocks.
        rows: How many there are, at most.
        group: Query heads per key/value head; they stand side by side in a query row.
        is_causal: Whether a query sees only the keys up to its own row (or position, with `Places`).
        is_ragged: Whether some head has fewer rows than the blocks hold.
        dropout_rate: Share of the weights that is dropped, where there are stamps.
    """

    sizes: WalkSizes
    rows: int
    group: int
    is_causal: bool
    is_ragged: bool
    dropout_rate: float = 0.0

    @property
    def blocks(self) -> int:
        """Number of query blocks."""
        return self.sizes.padded(self.rows) // self.sizes.query

    def tiles(self, places: Places | None = None) -> Array | int:
        """How many squares of `sizes.diagonal` rows and keys all steps together compute."""
        side = self.sizes.query // self.sizes.diagonal
        if places is not None:
            blocks = _ceil_div(places.ranges[:, 1], self.sizes.key) - places.ranges[:, 0] // self.sizes.key
            return blocks.sum().astype(jnp.int32) * (side * self.sizes.key // self.sizes.diagonal)
        if self.is_causal:
            return self.blocks * side * (side + 1) // 2 + self.blocks * (self.blocks - 1) // 2 * side**2
        return (self.blocks * side) ** 2

    def over_queries(self, block: Callable[[State, Array | int], State], state: State, sight: Sight) -> State:
        """Runs `block` on each query block that has rows."""
        if self.blocks == 1:
            return block(state, 0)
        return lax.fori_loop(0, _ceil_div(sight.present, self.sizes.query), lambda i, s: block(s, i), state)

    def over_keys(self, step: Callable[[State, Keys], State], state: State, index: Array | int, sight: Sight) -> State:
        """Runs `step` on each key block that query block `index` sees."""
        query, key, diagonal = self.sizes.query, self.sizes.key, self.sizes.diagonal

        def run(first: Array | int, end: Array | int, state: State, is_last: bool = False) -> State:
            return lax.fori_loop(first, end, lambda j, s: step(s, Keys(j * key, key, is_last=is_last)), state)

        if sight.places is not None:
            first, end = sight.places.ranges[index]
            return run(first // key, _ceil_div(end, key), state)
        if self.is_causal:
            if self.blocks > 1:
                state = run(0, index * (query // key), state)
            for row in range(0, query, diagonal):
                state = step(state, Keys(index * query + row, diagonal, first_row=row, is_diagonal=True))
            return state
        if self.blocks == 1 and query == key:
            return step(state, Keys(0, key, is_last=self.is_ragged))
        whole = sight.present // key if self.is_ragged else self.blocks * (query // key)
        state = run(0, whole, state)
        return run(whole, _ceil_div(sight.present, key), state, is_last=True) if self.is_ragged else state

    def masked(self, scores: Array, sight: Sight, index: Array | int, keys: Keys) -> Array:
        """The scores (M, S) of a step, -inf where a row does not see a key.

        A causal diagonal masks its first square only, and needs no bound: keys past the end are seen by rows past the
        end only, which nobody reads.
        """
        if sight.places is not None:
            mine = self._query_rows(sight.places.query, index, keys)[:, None]
            theirs = self.key_block(sight.places.key, keys)[None, :]
            seen = mine[..., 0] == theirs[..., 0]
            if self.is_causal:
                seen &= theirs[..., 1] <= mine[..., 1]
            scores = jnp.where(seen, scores, -jnp.inf)
        elif keys.is_diagonal:
            square = scores[: keys.size * self.group]
            row, column = (lax.broadcasted_iota(jnp.int32, square.shape, axis) for axis in (0, 1))
            zero = jnp.minimum(sight.present, 0)  # XLA cannot know, so it compares in registers and hoists no mask
            scores = replaced(scores, jnp.where(column <= row // self.group + zero, square, -jnp.inf), 0)
        elif keys.is_last:
            column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores = jnp.where(column < sight.present - keys.start, scores, -jnp.inf)
        if sight.query_ids is not None and sight.key_ids is not None:
            mine = self._query_rows(sight.query_ids, index, keys)[:, None]
            same = mine == self.key_block(sight.key_ids, keys)[None, :]
            scores = jnp.where(same & (mine >= 0), scores, -jnp.inf)
        return scores

    def dropped(self, weights: Array, sight: Sight, index: Array | int, keys: Keys) -> Array:
        """The weights (M, S) of a step, or their gradient, without those that are dropped."""
        if sight.stamps is None:
            return weights
        mine = self.query_block(sight.stamps.query, index)[keys.first_row * self.group :]
        theirs = self.key_block(sight.stamps.key, keys)
        return weights * dropout.factors(mine, theirs, self.dropout_rate, weights.dtype)

    def padded(self, x: Array, group: int, fill: int = 0) -> Array:
        """Rows (num, rows * group, width) up to whole blocks."""
        extra = (self.sizes.padded(self.rows) - self.rows) * group
        return jnp.pad(x, [(0, 0), (0, extra), (0, 0)], constant_values=fill) if extra else x

    def query_block(self, x: Array, index: Array | int) -> Array:
        """The rows (of all heads of the group) of a query block."""
        size = self.sizes.query * self.group
        return lax.dynamic_slice_in_dim(x, index * size, size)

    def with_query_block(self, x: Array, block: Array, index: Array | int) -> Array:
        """`x` with the rows of a query block replaced."""
        return lax.dynamic_update_slice_in_dim(x, block, index * self.sizes.query * self.group, axis=0)

    def key_block(self, x: Array, keys: Keys) -> Array:
        """The rows of a key block."""
        return lax.dynamic_slice_in_dim(x, keys.start, keys.size)

    def add_keys(self, transposed: Array, block: Array, keys: Keys) -> Array:
        """`transposed` (H, S) with `block` added to the columns of a key block."""
        old = lax.dynamic_slice_in_dim(transposed, keys.start, keys.size, axis=1)
        return lax.dynamic_update_slice_in_dim(transposed, old + block, keys.start, axis=1)

    def _query_rows(self, x: Array, index: Array | int, keys: Keys) -> Array:
        """What each row of a step's scores has in `x`, which has one entry for a whole group."""
        rows = self.sizes.query - keys.first_row
        block = lax.dynamic_slice_in_dim(x, index * self.sizes.query + keys.first_row, rows)
        return jnp.repeat(block, self.group, axis=0)


def replaced(x: Array, rows: Array, first: int) -> Array:
    """`x` with its rows from `first` on replaced."""
    return rows if rows.shape == x.shape else lax.dynamic_update_slice_in_dim(x, rows, first, axis=0)


def _ceil_div(a: Any, b: int) -> Any:  # noqa: ANN401 - an array or an int
    return (a + b - 1) // b
