"""The local block on GPU: Triton kernels that find the rows of a branch where they stand.

A block has ``M`` query rows and ``S`` key rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ringjax._src import online_softmax as softmax
from ringjax._src.kernels.kernel import dot, quotient
from ringjax._src.kernels.platform import on_its_platform
from ringjax._src.kernels.strided import How, Joint, Rows
from ringjax._src.online_softmax import PartialSoftmax, Running
from ringjax._src.vma import shaped_like


@functools.partial(jax.jit, static_argnames=("how",))
def forward(prior: PartialSoftmax, rows: Rows, spans: Array, how: How) -> PartialSoftmax:
    """Merges what the queries of all tasks find among their keys into `prior`, (rows, H) and (rows,), float32."""
    kernel = functools.partial(_forward_kernel, at=_At(how, rows))
    out, lse = _call(kernel, "forward", rows, spans, how.look.query_blocks, (), tuple(prior), how)
    return PartialSoftmax(out, lse)


def _forward_kernel(tasks: Any, spans: Any, *refs: Any, at: _At) -> None:  # noqa: ANN401
    here, inputs, (prior_out, prior_lse, out, lse) = at.begin(tasks, spans, refs, at.look.query_blocks)
    own = at.queries(here, inputs, here.block)

    @pl.when(here.first < here.end)
    def _() -> None:
        q = at.read(inputs.query, own)
        part = PartialSoftmax(
            at.read(prior_out, own), plgpu.load(prior_lse.at[own.where], mask=own.is_there, other=-jnp.inf)
        )

        def step(block: Array, state: Running, is_masked: bool) -> Running:
            keys = at.keys(here, inputs, block)
            scores = dot(q, at.read(inputs.key, keys), 1, 1) * at.look.scale
            if is_masked:
                scores = jnp.where(at.seen(own, keys, here), scores, -jnp.inf)
            state, weights = softmax.rescale(state, scores)
            v = at.read(inputs.value, keys, at.strides.value_shift)
            return Running(
                state.acc + dot(weights.astype(v.dtype), v, 1, 0), state.peak, state.total + weights.sum(axis=1)
            )

        state = at.over_span(step, softmax.resume(part), here, masked_first=False)
        found = softmax.finish(state)
        at.write(out, own, found.out)
        plgpu.store(lse.at[own.where], found.lse, mask=own.is_there)


def backward(
    dq: Array, dkv: tuple[Array, ...], rows: Rows, joint: Joint, spans: Array, how: How
) -> tuple[Array, tuple[Array, ...]]:
    """Adds the gradients to `dq` (rows, H) and `dkv`, one array or two like `rows.kv`: a kernel for each of the two."""
    dq = query_gradient(dq, rows, joint, spans, how)
    return dq, key_gradient(dkv, rows, joint, how.look.key_spans(spans), how)


@functools.partial(jax.jit, static_argnames=("how",))
def query_gradient(dq: Array, rows: Rows, joint: Joint, spans: Array, how: How) -> Array:
    """Adds the gradient of the queries to `dq` (rows, H), float32, from the joint lse and delta (rows,)."""
    kernel = functools.partial(_query_gradient_kernel, at=_At(how, rows))
    (dq,) = _call(kernel, "query_gradient", rows, spans, how.look.query_blocks, tuple(joint), (dq,), how)
    return dq


def _query_gradient_kernel(tasks: Any, spans: Any, *refs: Any, at: _At) -> None:  # noqa: ANN401
    here, inputs, (dout, lse, delta, prior, dq) = at.begin(tasks, spans, refs, at.look.query_blocks)
    own = at.queries(here, inputs, here.block)

    @pl.when(here.first < here.end)
    def _() -> None:
        q, dout_rows, lse_rows, delta_rows = at.read_queries(inputs, own, dout, lse, delta)

        def step(block: Array, acc: Array, is_masked: bool) -> Array:
            keys = at.keys(here, inputs, block)
            k = at.read(inputs.key, keys)
            scores = dot(q, k, 1, 1) * at.look.scale
            if is_masked:
                scores = jnp.where(at.seen(own, keys, here), scores, -jnp.inf)
            probs = jnp.exp(scores - lse_rows[:, None])
            dprobs = dot(dout_rows, at.read(inputs.value, keys, at.strides.value_shift), 1, 1) / at.look.divisor
            dscores = probs * (dprobs - delta_rows[:, None])
            return acc + dot(dscores.astype(k.dtype), k, 1, 0)

        acc = at.over_span(step, jnp.zeros(q.shape, jnp.float32), here, masked_first=False)
        at.write(dq, own, at.read(prior, own) + acc * at.look.scale)


@functools.partial(jax.jit, static_argnames=("how",))
def key_gradient(dkv: tuple[Array, ...], rows: Rows, joint: Joint, spans: Array, how: How) -> tuple[Array, ...]:
    """Adds the gradients of keys and values to `dkv`, one array or two like `rows.kv`, float32."""
    kernel = functools.partial(_key_gradient_kernel, at=_At(how, rows, is_over_queries=False))
    return tuple(_call(kernel, "key_gradient", rows, spans, how.look.key_blocks, tuple(joint), dkv, how))


def _key_gradient_kernel(tasks: Any, spans: Any, *refs: Any, at: _At) -> None:  # noqa: ANN401
    here, inputs, (dout, lse, delta, *sums) = at.begin(tasks, spans, refs, at.look.key_blocks)
    priors, outs = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    own = at.keys(here, inputs, here.block)
    shift = at.strides.value_shift

    @pl.when(here.first < here.end)
    def _() -> None:
        k, v = at.read(inputs.key, own), at.read(inputs.value, own, shift)

        def step(block: Array, state: tuple[Array, Array], is_masked: bool) -> tuple[Array, Array]:
            dk, dv = state
            queries = at.queries(here, inputs, block)
            q, dout_rows, lse_rows, delta_rows = at.read_queries(inputs, queries, dout, lse, delta)
            scores = dot(k, q, 1, 1) * at.look.scale
            if is_masked:
                scores = jnp.where(at.seen(queries, own, here, is_transposed=True), scores, -jnp.inf)
            probs = jnp.exp(scores - lse_rows[None, :])
            dv += dot(probs.astype(dout_rows.dtype), dout_rows, 1, 0)
            dscores = probs * (dot(v, dout_rows, 1, 1) / at.look.divisor - delta_rows[None, :])
            return dk + dot(dscores.astype(q.dtype), q, 1, 0), dv

        zero = jnp.zeros(k.shape, jnp.float32)
        dk, dv = at.over_span(step, (zero, zero), here, masked_first=True)
        at.write(outs[0], own, at.read(priors[0], own) + dk * at.look.scale)
        at.write(outs[-1], own, at.read(priors[-1], own, shift) + dv / at.look.divisor, shift)


class _Here(NamedTuple):
    """What one program works on: its task and block, and what the spans say of them."""

    query_start: Array
    key_start: Array
    column: Array
    block: Array
    first: Array
    whole: Array
    end: Array
    present: Array  # key rows


class _Inputs(NamedTuple):
    query: Any
    key: Any
    value: Any
    query_marks: Any
    key_marks: Any


class _Block(NamedTuple):
    """Rows of a block: where they stand, which of them are there, their numbers, and their marks."""

    where: Array
    is_there: Array
    number: Array
    marks: list[Array]


class _At:
    """How a kernel finds its rows."""

    def __init__(self, how: How, rows: Rows, *, is_over_queries: bool = True) -> None:
        self.is_over_queries = is_over_queries
        self.look, self.strides, self.dim = how.look, how.strides, rows.query.shape[1]
        self.arrays = len(rows.kv)
        self.has_marks = rows.query_marks is not None
        self.width = 1 << (self.dim - 1).bit_length()

    def begin(self, tasks: Any, spans: Any, refs: tuple[Any, ...], blocks: int) -> tuple[_Here, _Inputs, list[Any]]:  # noqa: ANN401
        """Place and inputs of this program, and the references that are left."""
        program = pl.program_id(0)
        task, nth = quotient(program, blocks), program - quotient(program, blocks) * blocks
        is_reversed = self.look.is_causal and self.is_over_queries  # the longest come first
        block = blocks - 1 - nth if is_reversed else nth
        head = quotient(task, self.look.head_tasks)
        starts = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        span = spans[head, 0, block], spans[head, 1, block], spans[head, 2, block], spans[head, 3, block]
        here = _Here(*starts, block, *span)
        query, *kv = refs[: 1 + self.arrays]
        rest = list(refs[1 + self.arrays :])
        marks = (rest.pop(0), rest.pop(0)) if self.has_marks else (None, None)
        return here, _Inputs(query, kv[0], kv[-1], *marks), rest

    def queries(self, here: _Here, inputs: _Inputs, block: Array) -> _Block:
        """The query rows of a block."""
        row = block * self.look.blocks.query + jnp.arange(self.look.blocks.query, dtype=jnp.int32)
        number = quotient(row, self.look.group)
        position = here.query_start + number * self.strides.step
        is_there, marks = self._marked(inputs.query_marks, position, number < here.present)
        index = (position * self.strides.heads + here.column) * self.look.group + row - number * self.look.group
        return _Block(index, is_there, number, marks)

    def keys(self, here: _Here, inputs: _Inputs, block: Array) -> _Block:
        """The key rows of a block."""
        number = block * self.look.blocks.key + jnp.arange(self.look.blocks.key, dtype=jnp.int32)
        position = here.key_start + number * self.strides.step
        is_there, marks = self._marked(inputs.key_marks, position, number < here.present)
        return _Block(position * self.strides.heads + here.column, is_there, number, marks)

    def _marked(self, marks: Any, position: Array, is_there: Array) -> tuple[Array, list[Array]]:  # noqa: ANN401
        """Rows with a first mark below 0 are not there: they are padding, which may hold anything."""
        if marks is None:
            return is_there, []
        lines = range(len(self.look.lines))
        found = [plgpu.load(marks.at[i, position], mask=is_there, other=-1) for i in lines]
        return is_there & (found[0] >= 0), found

    def seen(self, queries: _Block, keys: _Block, here: _Here, *, is_transposed: bool = False) -> Array:
        """Which pairs (M, S) see each other; (S, M) if transposed."""
        mine = (lambda x: x[None, :]) if is_transposed else (lambda x: x[:, None])
        theirs = (lambda x: x[:, None]) if is_transposed else (lambda x: x[None, :])
        marks = [mine(x) for x in queries.marks], [theirs(x) for x in keys.marks]
        return self.look.seen(mine(queries.number), theirs(keys.number), here.present, *marks)

    def read(self, ref: Any, rows: _Block, shift: int = 0) -> Array:  # noqa: ANN401
        """The rows of a block, 0 where they are not there."""
        where, mask = self._where(rows, shift)
        return plgpu.load(ref.at[where], mask=mask, other=0)

    def write(self, ref: Any, rows: _Block, x: Array, shift: int = 0) -> None:  # noqa: ANN401
        """Puts rows where they stand."""
        where, mask = self._where(rows, shift)
        plgpu.store(ref.at[where], x, mask=mask)

    def read_queries(self, inputs: _Inputs, rows: _Block, dout: Any, lse: Any, delta: Any) -> tuple[Array, ...]:  # noqa: ANN401
        """Queries, cotangent, lse and delta of a block."""
        numbers = (plgpu.load(x.at[rows.where], mask=rows.is_there, other=y) for x, y in ((lse, jnp.inf), (delta, 0.0)))
        return self.read(inputs.query, rows), self.read(dout, rows), *numbers

    def _where(self, rows: _Block, shift: int) -> tuple[tuple[Array, Array], Array]:
        column = jnp.arange(self.width, dtype=jnp.int32)[None, :]
        mask = rows.is_there[:, None]
        return ((rows.where + shift)[:, None], column), mask if self.width == self.dim else mask & (column < self.dim)

    def over_span(self, step: Callable[..., Any], state: Any, here: _Here, *, masked_first: bool) -> Any:  # noqa: ANN401
        """Runs `step` on the blocks of the span, with a mask where one is needed."""
        run = lambda low, high, state, is_masked: lax.fori_loop(  # noqa: E731
            low, high, lambda block, state: step(block, state, is_masked), state
        )
        if not self.look.needs_mask:
            return run(here.first, here.end, state, False)
        if self.look.lines:
            return run(here.first, here.end, state, True)
        state = run(here.first, here.whole, state, masked_first)
        return run(here.whole, here.end, state, not masked_first)


def _call(
    kernel: Callable[..., None],
    name: str,
    rows: Rows,
    spans: Array,
    blocks: int,
    given: tuple[Array, ...],
    sums: tuple[Array, ...],
    how: How,
) -> list[Array]:
    """Calls a kernel that adds to `sums` in place, with a program for each block of each task."""
    marks = () if rows.query_marks is None else (rows.query_marks, rows.key_marks)
    inputs = (rows.tasks, spans, rows.query, *rows.kv, *marks, *given)
    call = pl.pallas_call(
        kernel,
        out_shape=[shaped_like(x, *inputs) for x in sums],
        grid=(rows.tasks.shape[0] * blocks,),
        input_output_aliases={len(inputs) + i: i for i in range(len(sums))},
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
        name=f"ringjax_{name}",
        interpret=how.interpret,
    )
    return call(*inputs, *sums) if how.interpret else on_its_platform("cuda", call, *inputs, *sums, sums=len(sums))
