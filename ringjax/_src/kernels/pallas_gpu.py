"""The implementation on GPU: Pallas (Triton) kernels that read the rows of a task in place.

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
from ringjax._src.kernels.blocks import (
    Blocks,
    KernelConfig,
    StridedRows,
    dot,
    fitting_blocks,
    flat,
    given_blocks,
    has_mask_inputs,
    kernel_config,
    num_pairs,
    pair_ranges,
    quotient,
    strided_rows,
)
from ringjax._src.kernels.interface import AttendConfig, Backend, Case, Grads, Limits, Operands, Residuals, case_of
from ringjax._src.kernels.platform import on_its_platform
from ringjax._src.online_softmax import PartialSoftmax, Running
from ringjax._src.vma import shaped_like

LIMITS = Limits(("bfloat16", "float16", "float32"), min_dim=16, min_rows=16, min_block=16)  # a tile of tensor cores
_SM_80 = 8.0  # Ampere


def attend(prior: PartialSoftmax, operands: Operands, config: AttendConfig) -> PartialSoftmax:
    """Merges the attention of the selected rows into `prior`, float32."""
    kernel = _kernel_config(operands, config, is_bwd=False)
    out, lse = flat(prior.out), prior.lse.reshape(-1)
    for which in range(num_pairs(operands)):
        rows, ranges = strided_rows(operands, which, kernel), pair_ranges(operands, which, kernel)
        out, lse = forward(PartialSoftmax(out, lse), rows, ranges, kernel)
    return PartialSoftmax(out.reshape(prior.out.shape), lse.reshape(prior.lse.shape))


def attend_bwd(grads: Grads, operands: Operands, residuals: Residuals, config: AttendConfig) -> Grads:
    """Adds the gradients of the selected rows to `grads`, float32: one kernel for dq and one for dk and dv."""
    kernel = _kernel_config(operands, config, is_bwd=True)
    given = flat(residuals.dout), residuals.lse.reshape(-1), residuals.delta.reshape(-1)
    dq, dkv = flat(grads.query), tuple(flat(x) for x in grads.kv)
    for which in range(num_pairs(operands)):
        rows, ranges = strided_rows(operands, which, kernel), pair_ranges(operands, which, kernel)
        dq = query_gradient(dq, rows, given, ranges, kernel)
        dkv = key_gradient(dkv, rows, given, kernel.q_block_ranges(ranges), kernel)
    dkv = tuple(x.reshape(y.shape) for x, y in zip(dkv, grads.kv, strict=True))
    return Grads(dq.reshape(grads.query.shape), dkv)


def _kernel_config(operands: Operands, config: AttendConfig, *, is_bwd: bool) -> KernelConfig:
    case = case_of(operands)
    sizes, has_inputs = config.block_sizes, has_mask_inputs(operands)
    if sizes is not None:
        chosen = given_blocks(sizes, case.num_rows, case.q_per_kv, LIMITS.min_block, is_bwd=is_bwd)
    else:
        chosen = default_blocks(case, is_bwd=is_bwd, has_mask_inputs=has_inputs)
    return kernel_config(operands, config, chosen)


def default_blocks(case: Case, *, is_bwd: bool, has_mask_inputs: bool = False) -> Blocks:
    """Returns blocks that compile without spilling registers forward (up to 128 dims) and with few spills otherwise.

    Checked with the compilers for sm_80, sm_90 and sm_100.
    """
    if case.dtype == "float32":  # no tensor cores: sums take registers
        sizes = 16, 32
    elif case.head_dim > 128:
        sizes = 32, 32
    elif is_bwd:
        sizes = 64, 64
    else:
        is_plain = not has_mask_inputs and (case.head_dim <= 64 or case.head_dim == 128)  # 80 and 96 are masked to 128
        sizes = 128, 64 if is_plain else 32
    return fitting_blocks(sizes, case.num_rows, case.q_per_kv, LIMITS.min_block)


@functools.cache
def oldest_gpu() -> float:
    """Returns the lowest compute capability of the GPUs of this process, or infinity without GPUs.

    A program is lowered for a platform, whatever the generation of its devices, so the local devices decide.
    """
    try:
        found = [float(getattr(device, "compute_capability", "inf")) for device in jax.local_devices(backend="cuda")]
    except RuntimeError:
        found = []
    return min(found, default=float("inf"))


def _unavailable(is_requested: bool) -> str:
    oldest = oldest_gpu()
    return f"the gpu kernels need compute capability {_SM_80}, not {oldest}" if oldest < _SM_80 else ""


@functools.partial(jax.jit, static_argnames=("config",))
def forward(prior: PartialSoftmax, rows: StridedRows, ranges: Array, config: KernelConfig) -> PartialSoftmax:
    """Merges what the queries of all tasks find among their keys into `prior`, (rows, H) and (rows,), float32."""
    kernel = functools.partial(_forward_kernel, at=_Program(config, rows))
    out, lse = _call(kernel, "forward", rows, ranges, config.query_blocks, (), tuple(prior), config)
    return PartialSoftmax(out, lse)


def _forward_kernel(tasks: Any, ranges: Any, *refs: Any, at: _Program) -> None:  # noqa: ANN401
    here, inputs, (prior_out, prior_lse, out, lse) = at.begin(tasks, ranges, refs, at.config.query_blocks)
    own = at.queries(here, inputs, here.block)

    @pl.when(here.first < here.end)
    def _() -> None:
        q = at.read(inputs.query, own)
        part = PartialSoftmax(
            at.read(prior_out, own), plgpu.load(prior_lse.at[own.where], mask=own.exists, other=-jnp.inf)
        )

        def step(block: Array, state: Running, is_masked: bool) -> Running:
            keys = at.keys(here, inputs, block)
            scores = dot(q, at.read(inputs.key, keys), 1, 1) * at.config.scale
            if is_masked:
                scores = jnp.where(at.attends(own, keys, here), scores, -jnp.inf)
            state, weights = softmax.rescale(state, scores)
            v = at.read(inputs.value, keys, at.config.value_shift)
            return Running(
                state.acc + dot(weights.astype(v.dtype), v, 1, 0), state.max, state.denominator + weights.sum(axis=1)
            )

        state = at.over_span(step, softmax.resume(part), here, masked_first=False)
        found = softmax.finish(state)
        at.write(out, own, found.out)
        plgpu.store(lse.at[own.where], found.lse, mask=own.exists)


@functools.partial(jax.jit, static_argnames=("config",))
def query_gradient(
    dq: Array, rows: StridedRows, given: tuple[Array, ...], ranges: Array, config: KernelConfig
) -> Array:
    """Adds the gradient of the queries to `dq` (rows, H), float32, from the joint lse and delta (rows,)."""
    kernel = functools.partial(_query_gradient_kernel, at=_Program(config, rows))
    (dq,) = _call(kernel, "query_gradient", rows, ranges, config.query_blocks, given, (dq,), config)
    return dq


def _query_gradient_kernel(tasks: Any, ranges: Any, *refs: Any, at: _Program) -> None:  # noqa: ANN401
    here, inputs, (dout, lse, delta, prior, dq) = at.begin(tasks, ranges, refs, at.config.query_blocks)
    own = at.queries(here, inputs, here.block)

    @pl.when(here.first < here.end)
    def _() -> None:
        q, dout_rows, lse_rows, delta_rows = at.read_queries(inputs, own, dout, lse, delta)

        def step(block: Array, acc: Array, is_masked: bool) -> Array:
            keys = at.keys(here, inputs, block)
            k = at.read(inputs.key, keys)
            scores = dot(q, k, 1, 1) * at.config.scale
            if is_masked:
                scores = jnp.where(at.attends(own, keys, here), scores, -jnp.inf)
            probs = jnp.exp(scores - lse_rows[:, None])
            dprobs = dot(dout_rows, at.read(inputs.value, keys, at.config.value_shift), 1, 1) / at.config.output_divisor
            dscores = probs * (dprobs - delta_rows[:, None])
            return acc + dot(dscores.astype(k.dtype), k, 1, 0)

        acc = at.over_span(step, jnp.zeros(q.shape, jnp.float32), here, masked_first=False)
        at.write(dq, own, at.read(prior, own) + acc * at.config.scale)


@functools.partial(jax.jit, static_argnames=("config",))
def key_gradient(
    dkv: tuple[Array, ...], rows: StridedRows, given: tuple[Array, ...], ranges: Array, config: KernelConfig
) -> tuple[Array, ...]:
    """Adds the gradients of keys and values to `dkv`, one array or two like `rows.kv`, float32."""
    kernel = functools.partial(_key_gradient_kernel, at=_Program(config, rows, is_over_queries=False))
    return tuple(_call(kernel, "key_gradient", rows, ranges, config.key_blocks, given, dkv, config))


def _key_gradient_kernel(tasks: Any, ranges: Any, *refs: Any, at: _Program) -> None:  # noqa: ANN401
    here, inputs, (dout, lse, delta, *sums) = at.begin(tasks, ranges, refs, at.config.key_blocks)
    priors, outs = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    own = at.keys(here, inputs, here.block)
    shift = at.config.value_shift

    @pl.when(here.first < here.end)
    def _() -> None:
        k, v = at.read(inputs.key, own), at.read(inputs.value, own, shift)

        def step(block: Array, state: tuple[Array, Array], is_masked: bool) -> tuple[Array, Array]:
            dk, dv = state
            queries = at.queries(here, inputs, block)
            q, dout_rows, lse_rows, delta_rows = at.read_queries(inputs, queries, dout, lse, delta)
            scores = dot(k, q, 1, 1) * at.config.scale
            if is_masked:
                scores = jnp.where(at.attends(queries, own, here, is_transposed=True), scores, -jnp.inf)
            probs = jnp.exp(scores - lse_rows[None, :])
            dv += dot(probs.astype(dout_rows.dtype), dout_rows, 1, 0)
            dscores = probs * (dot(v, dout_rows, 1, 1) / at.config.output_divisor - delta_rows[None, :])
            return dk + dot(dscores.astype(q.dtype), q, 1, 0), dv

        zero = jnp.zeros(k.shape, jnp.float32)
        dk, dv = at.over_span(step, (zero, zero), here, masked_first=True)
        at.write(outs[0], own, at.read(priors[0], own) + dk * at.config.scale)
        at.write(outs[-1], own, at.read(priors[-1], own, shift) + dv / at.config.output_divisor, shift)


class _Here(NamedTuple):
    """What one program works on: its task and block, and what the ranges say of them."""

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
    query_inputs: Any
    key_inputs: Any


class _Block(NamedTuple):
    """Rows of a block: where they stand, which of them are there, their numbers, and their marks."""

    where: Array
    exists: Array
    number: Array
    marks: list[Array]


class _Program:
    """How a kernel finds its rows."""

    def __init__(self, config: KernelConfig, rows: StridedRows, *, is_over_queries: bool = True) -> None:
        self.is_over_queries = is_over_queries
        self.config, self.dim = config, rows.query.shape[1]
        self.arrays = len(rows.kv)
        self.has_inputs = rows.query_inputs is not None
        self.width = 1 << (self.dim - 1).bit_length()

    def begin(self, tasks: Any, ranges: Any, refs: tuple[Any, ...], blocks: int) -> tuple[_Here, _Inputs, list[Any]]:  # noqa: ANN401
        """Place and inputs of this program, and the references that are left."""
        program = pl.program_id(0)
        task, nth = quotient(program, blocks), program - quotient(program, blocks) * blocks
        is_reversed = self.config.is_causal and self.is_over_queries  # the longest come first
        block = blocks - 1 - nth if is_reversed else nth
        head = quotient(task, self.config.tasks_per_head)
        starts = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        span = ranges[head, 0, block], ranges[head, 1, block], ranges[head, 2, block], ranges[head, 3, block]
        here = _Here(*starts, block, *span)
        query, *kv = refs[: 1 + self.arrays]
        rest = list(refs[1 + self.arrays :])
        marks = (rest.pop(0), rest.pop(0)) if self.has_inputs else (None, None)
        return here, _Inputs(query, kv[0], kv[-1], *marks), rest

    def queries(self, here: _Here, inputs: _Inputs, block: Array) -> _Block:
        """The query rows of a block."""
        row = block * self.config.blocks.query + jnp.arange(self.config.blocks.query, dtype=jnp.int32)
        number = quotient(row, self.config.q_per_kv)
        position = here.query_start + number * self.config.stride
        exists, marks = self._marked(inputs.query_inputs, position, number < here.present)
        index = (
            (position * self.config.kv_heads + here.column) * self.config.q_per_kv + row - number * self.config.q_per_kv
        )
        return _Block(index, exists, number, marks)

    def keys(self, here: _Here, inputs: _Inputs, block: Array) -> _Block:
        """The key rows of a block."""
        number = block * self.config.blocks.key + jnp.arange(self.config.blocks.key, dtype=jnp.int32)
        position = here.key_start + number * self.config.stride
        exists, marks = self._marked(inputs.key_inputs, position, number < here.present)
        return _Block(position * self.config.kv_heads + here.column, exists, number, marks)

    def _marked(self, marks: Any, position: Array, exists: Array) -> tuple[Array, list[Array]]:  # noqa: ANN401
        """Rows with a first mark below 0 are not there: they are padding, which may hold anything."""
        if marks is None:
            return exists, []
        lines = range(len(self.config.mask_rules))
        found = [plgpu.load(marks.at[i, position], mask=exists, other=-1) for i in lines]
        return exists & (found[0] >= 0), found

    def attends(self, queries: _Block, keys: _Block, here: _Here, *, is_transposed: bool = False) -> Array:
        """Which pairs (M, S) see each other; (S, M) if transposed."""
        mine = (lambda x: x[None, :]) if is_transposed else (lambda x: x[:, None])
        theirs = (lambda x: x[:, None]) if is_transposed else (lambda x: x[None, :])
        marks = [mine(x) for x in queries.marks], [theirs(x) for x in keys.marks]
        return self.config.attends(mine(queries.number), theirs(keys.number), here.present, *marks)

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
        numbers = (plgpu.load(x.at[rows.where], mask=rows.exists, other=y) for x, y in ((lse, jnp.inf), (delta, 0.0)))
        return self.read(inputs.query, rows), self.read(dout, rows), *numbers

    def _where(self, rows: _Block, shift: int) -> tuple[tuple[Array, Array], Array]:
        column = jnp.arange(self.width, dtype=jnp.int32)[None, :]
        mask = rows.exists[:, None]
        return ((rows.where + shift)[:, None], column), mask if self.width == self.dim else mask & (column < self.dim)

    def over_span(self, step: Callable[..., Any], state: Any, here: _Here, *, masked_first: bool) -> Any:  # noqa: ANN401
        """Runs `step` on the blocks of the span, with a mask where one is needed."""
        run = lambda low, high, state, is_masked: lax.fori_loop(  # noqa: E731
            low, high, lambda block, state: step(block, state, is_masked), state
        )
        if not self.config.needs_mask:
            return run(here.first, here.end, state, False)
        if self.config.mask_rules:
            return run(here.first, here.end, state, True)
        state = run(here.first, here.whole, state, masked_first)
        return run(here.whole, here.end, state, not masked_first)


def _call(
    kernel: Callable[..., None],
    name: str,
    rows: StridedRows,
    ranges: Array,
    blocks: int,
    given: tuple[Array, ...],
    sums: tuple[Array, ...],
    config: KernelConfig,
) -> list[Array]:
    """Calls a kernel that adds to `sums` in place, with a program for each block of each task."""
    marks = () if rows.query_inputs is None else (rows.query_inputs, rows.key_inputs)
    inputs = (rows.tasks, ranges, rows.query, *rows.kv, *marks, *given)
    call = pl.pallas_call(
        kernel,
        out_shape=[shaped_like(x, *inputs) for x in sums],
        grid=(rows.tasks.shape[0] * blocks,),
        input_output_aliases={len(inputs) + i: i for i in range(len(sums))},
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
        name=f"ringjax_{name}",
        interpret=config.interpret,
    )
    return call(*inputs, *sums) if config.interpret else on_its_platform("cuda", call, *inputs, *sums, sums=len(sums))


BACKEND = Backend("gpu", "pallas", "cuda", attend, attend_bwd, LIMITS, _unavailable)
