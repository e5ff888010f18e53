"""The implementation in plain XLA, for every platform: gathers the rows of one task at a time.

A *task* is one head in one chunk; `num` short tasks of a head are computed together. The query rows of a task are
(m * G, H), so that the query heads of a key/value head share its keys in one matrix multiply:

    for each pair of chunks (packed operands):  for each task:  attend_rows
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringjax._src import online_softmax as softmax
from ringjax._src.dropout import RowHashes
from ringjax._src.indexing import quotient, remainder
from ringjax._src.kernels.interface import AttendConfig, Backend, Grads, Operands, Residuals, RowPositions
from ringjax._src.kernels.xla_blocks import BlockLoop, MaskInfo, State, attend_rows, attend_rows_bwd
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.rows.selection import RowSelection
from ringjax._src.rows.slices import ChunkSlice, ColumnSlice, WindowSlice, from_bits, to_bits

_TASK_ROWS = 2048  # short chunks are taken together up to about this many query rows

Slice = ChunkSlice | ColumnSlice | WindowSlice


def attend(prior: PartialSoftmax, operands: Operands, config: AttendConfig) -> PartialSoftmax:
    """Merges the attention of the selected rows into `prior`."""
    tasks = _Tasks(operands, config, prior.lse.dtype)

    def run(merged: PartialSoftmax, at: _Task) -> PartialSoftmax:
        rows = tasks.load(at)
        part = tasks.compute(attend_rows, at, rows, *rows.qkv)
        out, lse = (tasks.crop(x, tasks.loop.q_per_kv) for x in tasks.without_empty(part, at, (0, -jnp.inf)))
        if not config.is_prior_empty:
            split = (*lse.shape, -1)
            old = PartialSoftmax(at.query.read(merged.out).reshape(split), at.query.read(merged.lse))
            new = softmax.merge(old, PartialSoftmax(out.reshape(split), lse))
            out, lse = new.out.reshape(out.shape), new.lse
        return PartialSoftmax(at.query.write(merged.out, out), at.query.write(merged.lse, lse))

    merged = tasks.run(run, PartialSoftmax(*(tasks.view(x) for x in prior)))
    return PartialSoftmax(*(x.reshape(y.shape) for x, y in zip(merged, prior, strict=True)))


def attend_bwd(grads: Grads, operands: Operands, residuals: Residuals, config: AttendConfig) -> Grads:
    """Adds the gradients of the selected rows to `grads`."""
    tasks = _Tasks(operands, config, residuals.lse.dtype)
    q_per_kv = tasks.loop.q_per_kv
    dout, lse, delta = (tasks.view(to_bits(x)) for x in residuals[:3])
    has_one_key = operands.rows.num_rows == 1 and config.dropout_rate == 0
    out = tasks.view(to_bits(residuals.out)) if residuals.out is not None and has_one_key else None

    def run(sums: tuple[Array, ...], at: _Task) -> tuple[Array, ...]:
        rows = tasks.load(at)
        q, k, v = rows.qkv
        dout_rows, lse_rows, delta_rows = (
            tasks.pad(tasks.read(at.query, x, rows.ids), q_per_kv) for x in (dout, lse, delta)
        )
        if out is not None:
            # Gradients of scores depend on differences of values only: with one key, they are exactly 0.
            out_rows = tasks.pad(tasks.read(at.query, out, None), q_per_kv) - v[:, :1] / config.output_divisor
            v, delta_rows = v - v[:, :1], softmax.delta(dout_rows, out_rows, delta.dtype)[..., None]
        given = q, k, v, dout_rows / config.output_divisor, lse_rows[..., 0], delta_rows[..., 0]
        dq, dk, dv = tasks.without_empty(tasks.compute(attend_rows_bwd, at, rows, *given), at, (0, 0, 0))
        new = tasks.crop(dq * config.scale, q_per_kv), tasks.crop(dk, 1), tasks.crop(dv, 1)
        updated = list(sums)
        for i, where, x in zip((0, 1, len(sums) - 1), (at.query, at.key, at.value), new, strict=True):
            updated[i] = where.write(updated[i], x if config.is_prior_empty else where.read(updated[i]) + x)
        return tuple(updated)

    arrays = grads.query, *grads.kv
    found = tasks.run(run, tuple(tasks.view(x) for x in arrays))
    dq, *dkv = (x.reshape(y.shape) for x, y in zip(found, arrays, strict=True))
    return Grads(dq, tuple(dkv))


class _Task(NamedTuple):
    """Where the rows of a task, or of several, are, in arrays with heads and without (segment ids, hashes of keys)."""

    query: Slice
    key: Slice
    value: Slice
    query_ids: Slice
    key_ids: Slice
    num_rows: Array  # rows that the head selects
    positions: RowPositions | None = None
    key_ranges: Array | None = None


class _Rows(NamedTuple):
    """The rows of a task, padded to whole blocks: q scaled (num, M, H), k and v (num, S, H), and what masks them."""

    qkv: tuple[Array, Array, Array]
    mask: tuple[Array | None, Array | None, RowHashes | None]  # query ids (num, M), key ids (num, S), hashes
    ids: Array | None  # of the queries, not padded, (num, m, 1)


class _Tasks:
    """The tasks of a call: how its arrays are viewed, and the loop over them."""

    def __init__(self, operands: Operands, config: AttendConfig, acc: jnp.dtype) -> None:
        self.operands, self.rows, self.acc, self.scale = operands, operands.rows, acc, config.scale
        self.loop = block_loop(operands.rows, operands.q_per_kv, operands.is_causal(config), config.dropout_rate)
        arrays = operands.query, operands.kv[0], operands.kv[-1]
        self._qkv = [self.view(to_bits(x)) for x in arrays]
        hashes = (None, None) if operands.hashes is None else operands.hashes
        optional = operands.query_ids, operands.key_ids, *hashes
        self._query_ids, self._key_ids, self._query_hashes, self._key_hashes = (
            None if x is None else self.view(x) for x in optional
        )

    def view(self, x: Array) -> Array:
        """Reshapes an array to the axes that slices read: three if dense, (tasks, chunks, rows, ...) if packed."""
        if self.operands.pairs is None:
            return self.rows.dense_view(x)
        tasks = self.operands.batch * (2 if x.ndim == 5 else 1)  # keys and values are stacked
        return x.reshape(tasks, self.operands.query.shape[1], self.rows.num_rows, -1)

    def load(self, at: _Task) -> _Rows:
        """Reads the rows of a task. Padding, which may hold NaN, is replaced by 0."""
        ids = None if self._query_ids is None else at.query_ids.read(self._query_ids)
        key_ids = None if self._key_ids is None else at.key_ids.read(self._key_ids)
        q, k, v = self._qkv
        q_per_kv = self.loop.q_per_kv
        q = self.pad(self.read(at.query, q, ids), q_per_kv) * self.scale
        k, v = (self.pad(self.read(where, x, key_ids), 1) for where, x in ((at.key, k), (at.value, v)))
        hashes = None
        if self._query_hashes is not None and self._key_hashes is not None:
            of_query, of_key = at.query.read(self._query_hashes), at.key_ids.read(self._key_hashes)
            hashes = RowHashes(self.pad(of_query, q_per_kv)[..., 0], self.pad(of_key, 1)[..., 0])
        padded = (None if x is None else self.pad(x, 1)[..., 0] for x in (ids, key_ids))
        return _Rows((q, k, v), (*padded, hashes), ids)  # type: ignore[arg-type]

    def read(self, where: Slice, x: Array, ids: Array | None) -> Array:
        """Reads rows (num, m, width) in the accumulator dtype, 0 where the ids (num, m, 1) are negative."""
        rows = from_bits(where.read(x)).astype(self.acc)
        return rows if ids is None else jnp.where(ids >= 0, rows, 0)

    def pad(self, x: Array, q_per_kv: int) -> Array:
        """Pads rows (num, m, G * width) to whole blocks (num, M, width)."""
        return self.loop.pad(x.reshape(x.shape[0], self.rows.num_rows * q_per_kv, -1), q_per_kv)

    def crop(self, x: Array, q_per_kv: int) -> Array:
        """Inverts `pad`."""
        return x[:, : self.rows.num_rows * q_per_kv].reshape(x.shape[0], self.rows.num_rows, -1)

    def compute(
        self, block: Callable[..., tuple[Array, ...]], at: _Task, rows: _Rows, *arrays: Array
    ) -> tuple[Array, ...]:
        """Maps `block` over the chunks; a single one is not batched, as XLA:CPU would use one core for it."""

        def one(mask: tuple[Array | None, Array | None, RowHashes | None], *arrays: Array) -> tuple[Array, ...]:
            query_ids, key_ids, hashes = mask
            info = MaskInfo(at.num_rows, query_ids, key_ids, at.positions, at.key_ranges, hashes)
            return block(*arrays, mask=info, loop=self.loop)

        if len(arrays[0]) > 1:
            return jax.vmap(one)(rows.mask, *arrays)
        return tuple(x[None] for x in one(*jax.tree.map(lambda x: x[0], (rows.mask, *arrays))))

    def without_empty(self, arrays: tuple[Array, ...], at: _Task, fill: tuple[float, ...]) -> tuple[Array, ...]:
        """Replaces the results of a head that selects no row."""
        if not self.rows.has_empty_heads:
            return arrays
        return tuple(jnp.where(at.num_rows > 0, x, jnp.asarray(y, x.dtype)) for x, y in zip(arrays, fill, strict=True))

    def run(self, task: Callable[[State, _Task], State], state: State) -> State:
        """Runs `task` on all tasks, one after the other."""
        if self.operands.pairs is None:
            return self._run_dense(task, state)
        return self._run_packed(task, state)

    def _run_dense(self, task: Callable[[State, _Task], State], state: State) -> State:
        rows, (batch, length, kv_heads) = self.rows, self.operands.query.shape[:3]
        num_heads = len(rows.heads)
        num = self._together(rows.max_chunks_together(batch, length))

        def body(index: Array, state: State) -> State:
            index = jnp.asarray(index, jnp.int32)  # int64 under x64, an int without jit
            chunk, i = quotient(index, num_heads) * num, remainder(index, num_heads)
            at, ids = (
                rows.head_slice(i, chunk, num, length=length, num_heads=kv_heads, has_heads=has_heads)
                for has_heads in (True, False)
            )
            return task(state, _Task(at, at, at, ids, ids, jnp.asarray(rows.counts)[i]))

        return lax.fori_loop(0, batch * rows.chunks // num * num_heads, body, state)

    def _run_packed(self, task: Callable[[State, _Task], State], state: State) -> State:
        pairs, tasks, counts = self.operands.pairs, self.operands.batch, self.rows.counts
        assert pairs is not None
        is_uniform = isinstance(counts, np.ndarray) and len(set(counts.tolist())) == 1
        num = 1 if pairs.positions else self._together(tasks if is_uniform else self.operands.tasks_per_head)
        ranges = None if pairs.key_ranges is None else pairs.key_ranges(*self.loop.block_rows())

        def one(which: Array, index: Array, state: State) -> State:
            entry = jnp.asarray(index, jnp.int32) * num
            head = quotient(entry, self.operands.tasks_per_head)
            query, key = (ChunkSlice(entry, num, chunk[which]) for chunk in (pairs.query, pairs.key))
            value = key if len(self.operands.kv) > 1 else key._replace(task=entry + tasks)
            at = _Task(query, key, value, query, key, jnp.asarray(counts)[head])
            if pairs.positions is not None and ranges is not None:
                of_rows = (
                    x[chunk[which], head] for x, chunk in zip(pairs.positions, (pairs.query, pairs.key), strict=True)
                )
                padded = (self.loop.pad(x[None], 1, fill)[0] for x, fill in zip(of_rows, (-1, -2), strict=True))
                at = at._replace(positions=RowPositions(*padded), key_ranges=ranges[which, head])
            return task(state, at)

        def pair(which: Array, state: State) -> State:
            which = jnp.asarray(which, jnp.int32)
            over_tasks = lambda state: lax.fori_loop(0, tasks // num, functools.partial(one, which), state)  # noqa: E731
            if pairs.active is None:
                return over_tasks(state)
            return lax.cond(pairs.active[which], over_tasks, lambda state: state, state)

        if len(pairs.query) == 1:
            return pair(jnp.int32(0), state)
        return lax.fori_loop(0, len(pairs.query), pair, state)

    def _together(self, chunks: int) -> int:
        """Returns how many chunks are taken at once: one, unless they are so short that a block holds several."""
        if self.loop.sizes.padded(self.rows.num_rows) != self.loop.sizes.diagonal:
            return 1
        most = max(1, _TASK_ROWS // (self.loop.sizes.query * self.loop.q_per_kv))
        return max(n for n in range(1, most + 1) if chunks % n == 0)


def block_loop(rows: RowSelection, q_per_kv: int, is_causal: bool, dropout_rate: float = 0.0) -> BlockLoop:
    """Returns the order of the blocks for a selection."""
    return BlockLoop(rows.blocks, rows.num_rows, q_per_kv, is_causal, rows.is_ragged, dropout_rate)


BACKEND = Backend("xla", "xla", None, attend, attend_bwd)
