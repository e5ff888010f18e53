"""The rows of one part of a branch against each other, on one device, in plain XLA.

Legend: ``m`` rows, ``r`` rate, ``K`` key/value heads, ``G`` query heads per key/value head, ``H`` head dim; arrays come
in the form of `select.py`. A *task* is one head in `num` segments; its query rows stand as (m * G, H), so that a
group shares its keys in one matrix multiply. One task is gathered at a time:

    for each task:  for each query block:  for each key block that it sees:  step
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringjax._src import online_softmax as softmax
from ringjax._src.dropout import RowHashes
from ringjax._src.kernels.rows import attend, gradients
from ringjax._src.kernels.walk import Sight, State, Walk
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.rows.indices import PartTable
from ringjax._src.rows.select import Box, Columns, Windows, from_bits

_TASK_ROWS = 2048  # short segments are taken together up to about this many query rows


class Grads(NamedTuple):
    """Gradients of query, key and value."""

    query: Array
    key: Array
    value: Array


class Inputs(NamedTuple):
    """What a part of a branch attends over, in the form that `ringjax._src.rows.select` reads.

    Attributes:
        query: From (B, T, K, G, H).
        key: From (B, T, K, H).
        value: From (B, T, K, H).
        ids: From segment ids (B, T), or None.
        stamps: From stamps of queries (B, T, K, G) and of keys (B, T), or None.
    """

    query: Array
    key: Array
    value: Array
    ids: Array | None
    stamps: RowHashes | None = None


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
    dropout_rate: float = 0.0


def forward(
    inputs: Inputs, prior: PartialSoftmax, table: PartTable, options: BlockOptions, *, is_first: bool, keep_rows: bool
) -> tuple[PartialSoftmax, Array | None]:
    """Merges a part of a branch into `prior`.

    Args:
        inputs: What to attend over.
        prior: PartialSoftmax of earlier branches, from (B, T, K, G, H) and (B, T, K, G).
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
    rows = jnp.zeros_like(prior.out, shape=own_shape) if keep_rows else None
    walk = _walk(table, options)

    def task(carry: tuple[PartialSoftmax, Array | None], at: _Task) -> tuple[PartialSoftmax, Array | None]:
        merged, rows = carry
        q, k, v, ids = _gather(inputs, merged.lse.dtype, at, walk, options.scale)
        stamps = _read_stamps(inputs, at, walk)
        part = over_rows(functools.partial(_seeing, attend, at.selected, walk), ids, stamps, q, k, v)
        out, lse = (_cropped(x, walk, group) for x in _present(part, at, table, (0, -jnp.inf)))
        rows = None if rows is None else at.own.write(rows, out)
        if not is_first:
            split = (*lse.shape, -1)
            old = PartialSoftmax(at.box.read(merged.out).reshape(split), at.box.read(merged.lse))
            new = softmax.merge(old, PartialSoftmax(out.reshape(split), lse))
            out, lse = new.out.reshape(out.shape), new.lse
        return PartialSoftmax(at.box.write(merged.out, out), at.box.write(merged.lse, lse)), rows

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
    group, walk = options.group, _walk(table, options)

    def task(grads: Grads, at: _Task) -> Grads:
        q, k, v, ids = _gather(inputs, lse.dtype, at, walk, options.scale)
        dout_rows = _padded(_rows(at.box, dout, lse.dtype, _read_ids(inputs, at)), walk, group)
        out_rows = _padded(from_bits((at.own if own_rows else at.box).read(out)).astype(lse.dtype), walk, group)
        if table.rows == 1 and options.dropout_rate == 0:
            # gradients of scores hang on differences of values only: a query with one key has none, to the last bit
            v, out_rows = v - v[:, :1], out_rows - v[:, :1] / options.divisor
        delta = softmax.delta(dout_rows, out_rows, lse.dtype)  # of the undivided output, as the division cancels
        lse_rows = softmax.for_backward(_padded(at.box.read(lse), walk, group)[..., 0])
        joint = dout_rows / options.divisor, lse_rows, delta
        stamps = _read_stamps(inputs, at, walk)
        found = over_rows(functools.partial(_seeing, gradients, at.selected, walk), ids, stamps, q, k, v, *joint)
        dq, dk, dv = _present(found, at, table, (0, 0, 0))
        new = Grads(_cropped(dq * options.scale, walk, group), _cropped(dk, walk, 1), _cropped(dv, walk, 1))
        sums = new if is_first else Grads(*(at.box.read(old) + x for old, x in zip(grads, new, strict=True)))
        return Grads(*(at.box.write(old, x) for old, x in zip(grads, sums, strict=True)))

    return _over_tasks(task, prior, table, options)


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
    num = tasks_together(options.batch * table.segments if is_aligned else table.segments, _walk(table, options))

    def body(index: Array, state: State) -> State:
        index = jnp.asarray(index, jnp.int32)  # int64 under x64, an int without jit
        segment, i = (index // num_heads) * num, index % num_heads
        own, ids = Columns(segment, num, i, num_heads), Columns(segment, num, offsets[i], table.rate)
        box: Box = Columns(segment, num, offsets[i] * kv_heads + heads[i], table.rate * kv_heads)
        if not is_aligned:
            row, nth = segment // table.segments, segment % table.segments
            box = Windows(row, table.start + nth * table.segment_length, num, offsets[i], heads[i], kv_heads, table)
            ids = box._replace(head=jnp.zeros_like(i), heads=1)  # type: ignore[assignment]
        return task(state, _Task(box, own, ids, counts[i]))

    return lax.fori_loop(0, options.batch * table.segments // num * num_heads, body, state)


def tasks_together(tasks: int, walk: Walk) -> int:
    """How many of the tasks are taken at once: one, unless they are so short that a block holds several."""
    if walk.sizes.padded(walk.rows) != walk.sizes.diagonal:
        return 1
    most = max(1, _TASK_ROWS // (walk.sizes.query * walk.group))
    return max(n for n in range(1, most + 1) if tasks % n == 0)


def over_rows(one: Callable[..., tuple[Array, ...]], *args: Array | RowHashes | None) -> tuple[Array, ...]:
    """Maps `one` over the leading axis; a single entry goes without a batch axis, which would keep it on one core."""
    if jax.tree.leaves(args)[0].shape[0] > 1:
        return jax.vmap(one)(*args)
    return tuple(x[None] for x in one(*jax.tree.map(lambda x: x[0], args)))


def _seeing(
    block: Callable[..., tuple[Array, ...]],
    count: Array,
    walk: Walk,
    ids: Array | None,
    stamps: RowHashes | None,
    *rows: Array,
) -> tuple[Array, ...]:
    """`block` on rows that meet each other."""
    return block(*rows, sight=Sight(count, ids, ids, stamps=stamps), walk=walk)


def tiles(table: PartTable, options: BlockOptions) -> int:
    """How many tiles a part computes, see `Walk.tiles`."""
    return options.batch * table.segments * len(table.heads) * int(_walk(table, options).tiles())


def _walk(table: PartTable, options: BlockOptions) -> Walk:
    return Walk(table.sizes, table.rows, options.group, options.is_causal, table.is_ragged, options.dropout_rate)


def _present(arrays: tuple[Array, ...], at: _Task, table: PartTable, nothing: tuple[float, ...]) -> tuple[Array, ...]:
    """`nothing` in the place of what was computed for a head that selects no row."""
    if not table.has_empty_heads:
        return arrays
    return tuple(jnp.where(at.selected > 0, x, jnp.asarray(y, x.dtype)) for x, y in zip(arrays, nothing, strict=True))


def _gather(
    inputs: Inputs, acc: jnp.dtype, at: _Task, walk: Walk, scale: float
) -> tuple[Array, Array, Array, Array | None]:
    """A task's rows, padded to whole blocks: q scaled (num, M, H), k and v (num, S, H), ids (num, S) or None."""
    ids = _read_ids(inputs, at)
    q = _padded(_rows(at.box, inputs.query, acc, ids), walk, walk.group) * scale
    k, v = (_padded(_rows(at.box, x, acc, ids), walk, 1) for x in (inputs.key, inputs.value))
    return q, k, v, None if ids is None else _padded(ids, walk, 1)[..., 0]


def _read_ids(inputs: Inputs, at: _Task) -> Array | None:
    return None if inputs.ids is None else at.ids.read(inputs.ids)


def _read_stamps(inputs: Inputs, at: _Task, walk: Walk) -> RowHashes | None:
    """A task's stamps, of queries (num, M) and of keys (num, S), or None."""
    if inputs.stamps is None:
        return None
    mine, theirs = at.box.read(inputs.stamps.query), at.ids.read(inputs.stamps.key)
    return RowHashes(_padded(mine, walk, walk.group)[..., 0], _padded(theirs, walk, 1)[..., 0])


def _rows(box: Box, x: Array, acc: jnp.dtype, ids: Array | None) -> Array:
    """Rows (num, m, width) in the accumulator's dtype; 0 where the ids (num, m, 1) say padding, which may hold NaN."""
    rows = from_bits(box.read(x)).astype(acc)
    return rows if ids is None else jnp.where(ids >= 0, rows, 0)


def _padded(x: Array, walk: Walk, group: int) -> Array:
    """Rows (num, m, G * width) as (num, M, width), M whole blocks."""
    return walk.padded(x.reshape(x.shape[0], walk.rows * group, -1), group)


def _cropped(x: Array, walk: Walk, group: int) -> Array:
    """Rows (num, M, width) or (num, M) as (num, m, G * width)."""
    return x[:, : walk.rows * group].reshape(x.shape[0], walk.rows, -1)
