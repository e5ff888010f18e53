r"""The rows of a branch against each other in plain XLA: a scan-based online softmax, forward and backward.

Legend: ``m`` rows, ``r`` rate, ``K`` key/value heads, ``G`` query heads per key/value head, ``H`` head dim; arrays come
in the form of `ringjax.select`. A *task* is one head in `num` segments; its query rows stand as (m * G, H), so that a
group shares its keys in one matrix multiply. One task is gathered at a time:

    for each task:  for each query block:  for each key block that it sees:  step

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
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringjax import softmax
from ringjax.block.sizes import BlockSizes
from ringjax.indices import PartTable
from ringjax.select import Box, Columns, Windows, from_bits
from ringjax.softmax import Partial

State = TypeVar("State")
_TASK_ROWS = 2048  # short segments are taken together up to about this many query rows


class Grads(NamedTuple):
    """Gradients of query, key and value."""

    query: Array
    key: Array
    value: Array


class Inputs(NamedTuple):
    """What a part of a branch attends over, in the form that `ringjax.select` reads.

    Attributes:
        query: From (B, T, K, G, H).
        key: From (B, T, K, H).
        value: From (B, T, K, H).
        ids: From segment ids (B, T), or None.
    """

    query: Array
    key: Array
    value: Array
    ids: Array | None


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """What both passes need to know besides arrays and table."""

    batch: int
    length: int
    kv_heads: int
    group: int
    is_causal: bool
    scale: float
    divisor: int  # of the output


def forward(
    inputs: Inputs, prior: Partial, table: PartTable, options: BlockOptions, *, is_first: bool, keep_rows: bool
) -> tuple[Partial, Array | None]:
    """Merges a part of a branch into `prior`.

    Args:
        inputs: What to attend over.
        prior: Partial of earlier branches, from (B, T, K, G, H) and (B, T, K, G).
        table: The part.
        options: Heads, mask and scale.
        is_first: Whether `prior` is empty, so that it need not be read.
        keep_rows: Whether to return the part's own output rows too.

    Returns:
        The merged partial, and the part's own rows (B * segments, m, heads * G * H) or None.
    """
    group = options.group
    width = inputs.query.size // (options.batch * options.length * options.kv_heads)
    own_shape = (options.batch * table.segments, table.rows, len(table.heads) * width)
    rows = jnp.zeros(own_shape, prior.out.dtype) if keep_rows else None

    def task(carry: tuple[Partial, Array | None], at: _Task) -> tuple[Partial, Array | None]:
        merged, rows = carry
        attend = functools.partial(_attend, count=at.selected, walk=_Walk(table, options))
        part = _over_segments(attend, *_gather(inputs, merged.lse.dtype, at, table, options))
        out, lse = (_cropped(x, table, group) for x in part)  # (num, m, G * H), (num, m, G)
        rows = None if rows is None else at.own.write(rows, out)
        if not is_first:
            split = (*lse.shape, -1)
            old = Partial(at.box.read(merged.out).reshape(split), at.box.read(merged.lse))
            new = softmax.merge(old, Partial(out.reshape(split), lse))
            out, lse = new.out.reshape(out.shape), new.lse
        return Partial(at.box.write(merged.out, out), at.box.write(merged.lse, lse)), rows

    return _over_tasks(task, (prior, rows), table, options)


def backward(
    inputs: Inputs,
    out: Array,
    lse: Array,
    dout: Array,
    prior: Grads,
    table: PartTable,
    options: BlockOptions,
    *,
    is_first: bool,
    own_rows: bool,
) -> Grads:
    """Adds a part's gradients to `prior`, from the joint softmax.

    Args:
        inputs, table, options, is_first: As for `forward`.
        out: The joint output, like the query; with `own_rows` the part's own rows, as `forward` keeps them
            (the gradient is then that of constant mixing weights).
        lse: The joint log-sum-exp.
        dout: The cotangent, like the query.
        prior: Gradients of earlier branches.
        own_rows: What `out` is.

    Returns:
        `prior` plus this part's gradients.
    """
    group = options.group

    def task(grads: Grads, at: _Task) -> Grads:
        gradients = functools.partial(_gradients, count=at.selected, walk=_Walk(table, options))
        ids = None if inputs.ids is None else at.ids.read(inputs.ids)
        dout_rows = _padded(_rows(at.box, dout, lse.dtype, ids), table, group)
        out_rows = _padded(from_bits((at.own if own_rows else at.box).read(out)).astype(lse.dtype), table, group)
        delta = jnp.sum(dout_rows * out_rows, axis=-1)  # of the undivided output, as the division cancels
        lse_rows = softmax.for_backward(_padded(at.box.read(lse), table, group)[..., 0])
        joint = dout_rows / options.divisor, lse_rows, delta
        rows = _gather(inputs, lse.dtype, at, table, options)
        dq, dk, dv = _over_segments(gradients, *rows, *joint)
        new = Grads(_cropped(dq * options.scale, table, group), _cropped(dk, table, 1), _cropped(dv, table, 1))
        sums = new if is_first else Grads(*(at.box.read(old) + x for old, x in zip(grads, new, strict=True)))
        return Grads(*(at.box.write(old, x) for old, x in zip(grads, sums, strict=True)))

    return _over_tasks(task, prior, table, options)


def _attend(q: Array, k: Array, v: Array, ids: Array | None, *, count: Array, walk: _Walk) -> Partial:
    """One head in one segment: q (M, H) already scaled, k and v (S, H), both padded to whole blocks."""

    def block(whole: Partial, index: Array | int) -> Partial:
        q_block = walk.query_block(q, index)

        def step(state: softmax.Running, keys: _Keys) -> softmax.Running:
            first = keys.first_row * walk.group
            scores = walk.masked(_dot(q_block[first:], walk.key_block(k, keys), 1, 1), ids, count, index, keys)
            rest, weights = softmax.rescale(softmax.Running(*(x[first:] for x in state)), scores)
            weights = lax.optimization_barrier(weights)  # one pass of exp, read by the sum and by the multiply
            acc = rest.acc + _dot(weights, walk.key_block(v, keys), 1, 0)
            rest = softmax.Running(acc, rest.peak, rest.total + weights.sum(axis=1))
            return softmax.Running(*(_replaced(x, y, first) for x, y in zip(state, rest, strict=True)))

        state = walk.over_keys(step, softmax.start(q_block), index, count)
        part = softmax.finish(state)
        return Partial(*(walk.with_query_block(x, y, index) for x, y in zip(whole, part, strict=True)))

    return walk.over_queries(block, softmax.empty(q.shape, q.dtype), count)


def _gradients(
    q: Array,
    k: Array,
    v: Array,
    ids: Array | None,
    dout: Array,
    lse: Array,
    delta: Array,
    *,
    count: Array,
    walk: _Walk,
) -> tuple[Array, Array, Array]:
    """Gradients of one head in one segment, (M, H), (S, H) and (S, H).

    dk and dv are summed transposed: XLA:CPU multiplies (H, M) by (M, S) twice as fast as (S, M) by (M, H).
    """

    def block(grads: tuple[Array, Array, Array], index: Array | int) -> tuple[Array, Array, Array]:
        q_block, dout_block, lse_block, delta_block = (walk.query_block(x, index) for x in (q, dout, lse, delta))

        def step(state: tuple[Array, Array, Array], keys: _Keys) -> tuple[Array, Array, Array]:
            dq, dk, dv = state
            first = keys.first_row * walk.group
            q_rows, dout_rows = q_block[first:], dout_block[first:]
            k_block, v_block = walk.key_block(k, keys), walk.key_block(v, keys)
            scores = walk.masked(_dot(q_rows, k_block, 1, 1), ids, count, index, keys)
            probs = lax.optimization_barrier(jnp.exp(scores - lse_block[first:, None]))
            dscores = probs * (_dot(dout_rows, v_block, 1, 1) - delta_block[first:, None])
            dq = _replaced(dq, dq[first:] + _dot(dscores, k_block, 1, 0), first)
            dk = walk.add_keys(dk, _dot(q_rows, dscores, 0, 0), keys)
            dv = walk.add_keys(dv, _dot(dout_rows, probs, 0, 0), keys)
            return dq, dk, dv

        dq, dk, dv = grads
        dq_block, dk, dv = walk.over_keys(step, (jnp.zeros_like(q_block), dk, dv), index, count)
        return walk.with_query_block(dq, dq_block, index), dk, dv

    dq, dk, dv = walk.over_queries(block, (jnp.zeros_like(q), jnp.zeros_like(k.T), jnp.zeros_like(v.T)), count)
    return dq, dk.T, dv.T


class _Keys(NamedTuple):
    """A block of keys in a step: `size` of them from `start`, met by the query rows from `first_row` on."""

    start: Array | int
    size: int
    first_row: int = 0
    is_diagonal: bool = False
    is_last: bool = False  # may hold rows past the end of the segment


class _Walk:
    """The order in which one segment's blocks meet, the same forward and backward."""

    def __init__(self, table: PartTable, options: BlockOptions) -> None:
        self.sizes: BlockSizes = table.sizes
        self.blocks = table.sizes.padded(table.rows) // table.sizes.query
        self.group, self.is_causal, self.is_ragged = options.group, options.is_causal, table.is_ragged

    def over_queries(self, block: Callable[[State, Array | int], State], state: State, count: Array) -> State:
        """Runs `block` on each query block that has rows."""
        if self.blocks == 1:
            return block(state, 0)
        return lax.fori_loop(0, _ceil_div(count, self.sizes.query), lambda i, s: block(s, i), state)

    def over_keys(self, step: Callable[[State, _Keys], State], state: State, index: Array | int, count: Array) -> State:
        """Runs `step` on each key block that query block `index` sees."""
        query, key, diagonal = self.sizes.query, self.sizes.key, self.sizes.diagonal
        if self.is_causal:
            if self.blocks > 1:
                state = lax.fori_loop(0, index * (query // key), lambda j, s: step(s, _Keys(j * key, key)), state)
            for row in range(0, query, diagonal):
                state = step(state, _Keys(index * query + row, diagonal, first_row=row, is_diagonal=True))
            return state
        if self.blocks == 1 and query == key:
            return step(state, _Keys(0, key, is_last=self.is_ragged))
        whole = count // key if self.is_ragged else self.blocks * (query // key)
        state = lax.fori_loop(0, whole, lambda j, s: step(s, _Keys(j * key, key)), state)
        if self.is_ragged:
            last = lambda j, s: step(s, _Keys(j * key, key, is_last=True))  # noqa: E731
            state = lax.fori_loop(whole, _ceil_div(count, key), last, state)
        return state

    def masked(self, scores: Array, ids: Array | None, count: Array, index: Array | int, keys: _Keys) -> Array:
        """The scores (M, S) of a step, -inf where a row does not see a key.

        A causal diagonal masks its first square only, and needs no bound: keys past the end are seen by rows past the
        end only, which nobody reads.
        """
        if keys.is_diagonal:
            square = scores[: keys.size * self.group]
            row, column = (lax.broadcasted_iota(jnp.int32, square.shape, axis) for axis in (0, 1))
            zero = jnp.minimum(count, 0)  # XLA cannot know, so it compares in registers and does not hoist the mask
            scores = _replaced(scores, jnp.where(column <= row // self.group + zero, square, -jnp.inf), 0)
        elif keys.is_last:
            column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores = jnp.where(column < count - keys.start, scores, -jnp.inf)
        if ids is not None:
            rows = self.sizes.query - keys.first_row
            mine = lax.dynamic_slice_in_dim(ids, index * self.sizes.query + keys.first_row, rows)
            mine = jnp.repeat(mine, self.group)[:, None]
            same = mine == lax.dynamic_slice_in_dim(ids, keys.start, keys.size)[None, :]
            scores = jnp.where(same & (mine >= 0), scores, -jnp.inf)
        return scores

    def query_block(self, x: Array, index: Array | int) -> Array:
        size = self.sizes.query * self.group
        return lax.dynamic_slice_in_dim(x, index * size, size)

    def with_query_block(self, x: Array, block: Array, index: Array | int) -> Array:
        return lax.dynamic_update_slice_in_dim(x, block, index * self.sizes.query * self.group, axis=0)

    def key_block(self, x: Array, keys: _Keys) -> Array:
        return lax.dynamic_slice_in_dim(x, keys.start, keys.size)

    def add_keys(self, transposed: Array, block: Array, keys: _Keys) -> Array:
        old = lax.dynamic_slice_in_dim(transposed, keys.start, keys.size, axis=1)
        return lax.dynamic_update_slice_in_dim(transposed, old + block, keys.start, axis=1)


class _Task(NamedTuple):
    """One head in some segments."""

    box: Box  # in arrays of all heads
    own: Box  # in arrays of the part's own rows
    ids: Box  # in arrays without heads
    selected: Array  # rows that the head selects in a segment


def _over_tasks(task: Callable[[State, _Task], State], state: State, table: PartTable, options: BlockOptions) -> State:
    """Runs `task` on every head of the part in every segment of the batch."""
    heads, offsets, counts = (jnp.asarray(x) for x in (table.heads, table.offsets, table.counts))
    num_heads, kv_heads = len(table.heads), options.kv_heads
    is_aligned = table.is_aligned(options.length)
    num = _together(options.batch * table.segments if is_aligned else table.segments, table, options.group)

    def body(index: Array, state: State) -> State:
        index = index.astype(jnp.int32)  # int64 under x64
        segment, i = (index // num_heads) * num, index % num_heads
        own, ids = Columns(segment, num, i, num_heads), Columns(segment, num, offsets[i], table.rate)
        box: Box = Columns(segment, num, offsets[i] * kv_heads + heads[i], table.rate * kv_heads)
        if not is_aligned:
            row, nth = segment // table.segments, segment % table.segments
            box = Windows(row, table.start + nth * table.segment_length, num, offsets[i], heads[i], kv_heads, table)
            ids = box._replace(head=jnp.zeros_like(i), heads=1)  # type: ignore[assignment]
        return task(state, _Task(box, own, ids, counts[i]))

    return lax.fori_loop(0, options.batch * table.segments // num * num_heads, body, state)


def _together(segments: int, table: PartTable, group: int) -> int:
    """How many segments one task takes: one, unless they are so short that a block holds several."""
    if table.sizes.padded(table.rows) != table.sizes.diagonal:
        return 1
    most = max(1, _TASK_ROWS // (table.sizes.query * group))
    return max(n for n in range(1, most + 1) if segments % n == 0)


def _over_segments(one: Callable[..., tuple[Array, ...]], *args: Array | None) -> tuple[Array, ...]:
    """Maps `one` over the leading axis; a single segment goes without a batch axis, which would keep it on one core."""
    num = next(x.shape[0] for x in args if x is not None)
    if num > 1:
        return jax.vmap(one)(*args)
    return tuple(x[None] for x in one(*(None if x is None else x[0] for x in args)))


def _gather(
    inputs: Inputs, acc: jnp.dtype, at: _Task, table: PartTable, options: BlockOptions
) -> tuple[Array, Array, Array, Array | None]:
    """A task's rows, padded to whole blocks: q scaled (num, M, H), k and v (num, S, H), ids (num, S) or None."""
    ids = None if inputs.ids is None else at.ids.read(inputs.ids)
    q = _padded(_rows(at.box, inputs.query, acc, ids), table, options.group) * options.scale
    k, v = (_padded(_rows(at.box, x, acc, ids), table, 1) for x in (inputs.key, inputs.value))
    return q, k, v, None if ids is None else _padded(ids, table, 1)[..., 0]


def _rows(box: Box, x: Array, acc: jnp.dtype, ids: Array | None) -> Array:
    """Rows (num, m, width) in the accumulator's dtype; 0 where the ids (num, m, 1) say padding, which may hold NaN."""
    rows = from_bits(box.read(x)).astype(acc)
    return rows if ids is None else jnp.where(ids >= 0, rows, 0)


def _padded(x: Array, table: PartTable, group: int, fill: float = 0) -> Array:
    """Rows (num, m, G * width) as (num, M, width), M whole blocks."""
    x = x.reshape(x.shape[0], table.rows * group, -1)
    extra = (table.sizes.padded(table.rows) - table.rows) * group
    return jnp.pad(x, [(0, 0), (0, extra), (0, 0)], constant_values=fill) if extra else x


def _cropped(x: Array, table: PartTable, group: int) -> Array:
    """Rows (num, M, width) or (num, M) as (num, m, G * width)."""
    return x[:, : table.rows * group].reshape(x.shape[0], table.rows, -1)


def _replaced(x: Array, rows: Array, first: int) -> Array:
    return rows if rows.shape == x.shape else lax.dynamic_update_slice_in_dim(x, rows, first, axis=0)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())))


def _ceil_div(a: Array, b: int) -> Array:
    return (a + b - 1) // b
