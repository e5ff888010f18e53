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
from ringjax._src.indexing import quotient
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
    pair_ranges,
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
    for rows, ranges in zip(strided_rows(operands, kernel), pair_ranges(operands, kernel), strict=True):
        out, lse = forward(PartialSoftmax(out, lse), rows, ranges, kernel)
    return PartialSoftmax(out.reshape(prior.out.shape), lse.reshape(prior.lse.shape))


def attend_bwd(grads: Grads, operands: Operands, residuals: Residuals, config: AttendConfig) -> Grads:
    """Adds the gradients of the selected rows to `grads`, float32: one kernel for dq and one for dk and dv."""
    kernel = _kernel_config(operands, config, is_bwd=True)
    given = flat(residuals.dout), residuals.lse.reshape(-1), residuals.delta.reshape(-1)
    dq, dkv = flat(grads.query), tuple(flat(x) for x in grads.kv)
    for rows, ranges in zip(strided_rows(operands, kernel), pair_ranges(operands, kernel), strict=True):
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
    if case.dtype == "float32":  # no tensor cores: the sums are in registers
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
    """Merges the attention of all tasks into `prior`, (rows, H) and (rows,), float32."""
    kernel = functools.partial(_forward_kernel, program=_Program(config, rows))
    out, lse = _call(kernel, "forward", rows, ranges, config.query_blocks, (), tuple(prior), config)
    return PartialSoftmax(out, lse)


def _forward_kernel(tasks: Any, ranges: Any, *refs: Any, program: _Program) -> None:  # noqa: ANN401
    config = program.config
    work, inputs, (prior_out, prior_lse, out, lse) = program.begin(tasks, ranges, refs, config.query_blocks)
    queries = program.queries(work, inputs, work.block)

    @pl.when(work.first < work.end)
    def _() -> None:
        q = program.read(inputs.query, queries)
        part = PartialSoftmax(
            program.read(prior_out, queries),
            plgpu.load(prior_lse.at[queries.indices], mask=queries.exists, other=-jnp.inf),
        )

        def step(block: Array, state: Running, is_masked: bool) -> Running:
            keys = program.keys(work, inputs, block)
            scores = dot(q, program.read(inputs.key, keys), 1, 1) * config.scale
            if is_masked:
                scores = jnp.where(program.attends(queries, keys, work), scores, -jnp.inf)
            state, weights = softmax.rescale(state, scores)
            v = program.read(inputs.value, keys, config.value_shift)
            return Running(
                state.acc + dot(weights.astype(v.dtype), v, 1, 0), state.max, state.denominator + weights.sum(axis=1)
            )

        state = program.for_range(step, softmax.resume(part), work, masked_first=False)
        part = softmax.finish(state)
        program.write(out, queries, part.out)
        plgpu.store(lse.at[queries.indices], part.lse, mask=queries.exists)


@functools.partial(jax.jit, static_argnames=("config",))
def query_gradient(
    dq: Array, rows: StridedRows, given: tuple[Array, ...], ranges: Array, config: KernelConfig
) -> Array:
    """Adds the gradient of the queries to `dq` (rows, H), float32, from dout, lse and delta."""
    kernel = functools.partial(_query_gradient_kernel, program=_Program(config, rows))
    (dq,) = _call(kernel, "query_gradient", rows, ranges, config.query_blocks, given, (dq,), config)
    return dq


def _query_gradient_kernel(tasks: Any, ranges: Any, *refs: Any, program: _Program) -> None:  # noqa: ANN401
    config = program.config
    work, inputs, (dout, lse, delta, prior, dq) = program.begin(tasks, ranges, refs, config.query_blocks)
    queries = program.queries(work, inputs, work.block)

    @pl.when(work.first < work.end)
    def _() -> None:
        q, dout_rows, lse_rows, delta_rows = program.read_queries(inputs, queries, dout, lse, delta)

        def step(block: Array, acc: Array, is_masked: bool) -> Array:
            keys = program.keys(work, inputs, block)
            k = program.read(inputs.key, keys)
            scores = dot(q, k, 1, 1) * config.scale
            if is_masked:
                scores = jnp.where(program.attends(queries, keys, work), scores, -jnp.inf)
            probs = jnp.exp(scores - lse_rows[:, None])
            dprobs = dot(dout_rows, program.read(inputs.value, keys, config.value_shift), 1, 1) / config.output_divisor
            dscores = probs * (dprobs - delta_rows[:, None])
            return acc + dot(dscores.astype(k.dtype), k, 1, 0)

        acc = program.for_range(step, jnp.zeros(q.shape, jnp.float32), work, masked_first=False)
        program.write(dq, queries, program.read(prior, queries) + acc * config.scale)


@functools.partial(jax.jit, static_argnames=("config",))
def key_gradient(
    dkv: tuple[Array, ...], rows: StridedRows, given: tuple[Array, ...], ranges: Array, config: KernelConfig
) -> tuple[Array, ...]:
    """Adds the gradients of keys and values to `dkv`, one array or two as in `rows.kv`, float32."""
    kernel = functools.partial(_key_gradient_kernel, program=_Program(config, rows, is_over_queries=False))
    return tuple(_call(kernel, "key_gradient", rows, ranges, config.key_blocks, given, dkv, config))


def _key_gradient_kernel(tasks: Any, ranges: Any, *refs: Any, program: _Program) -> None:  # noqa: ANN401
    config = program.config
    work, inputs, (dout, lse, delta, *sums) = program.begin(tasks, ranges, refs, config.key_blocks)
    priors, outs = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    keys = program.keys(work, inputs, work.block)
    shift = config.value_shift

    @pl.when(work.first < work.end)
    def _() -> None:
        k, v = program.read(inputs.key, keys), program.read(inputs.value, keys, shift)

        def step(block: Array, state: tuple[Array, Array], is_masked: bool) -> tuple[Array, Array]:
            dk, dv = state
            queries = program.queries(work, inputs, block)
            q, dout_rows, lse_rows, delta_rows = program.read_queries(inputs, queries, dout, lse, delta)
            scores = dot(k, q, 1, 1) * config.scale
            if is_masked:
                scores = jnp.where(program.attends(queries, keys, work, is_transposed=True), scores, -jnp.inf)
            probs = jnp.exp(scores - lse_rows[None, :])
            dv += dot(probs.astype(dout_rows.dtype), dout_rows, 1, 0)
            dscores = probs * (dot(v, dout_rows, 1, 1) / config.output_divisor - delta_rows[None, :])
            return dk + dot(dscores.astype(q.dtype), q, 1, 0), dv

        zero = jnp.zeros(k.shape, jnp.float32)
        dk, dv = program.for_range(step, (zero, zero), work, masked_first=True)
        program.write(outs[0], keys, program.read(priors[0], keys) + dk * config.scale)
        program.write(outs[-1], keys, program.read(priors[-1], keys, shift) + dv / config.output_divisor, shift)


class _Work(NamedTuple):
    """The work of one program: its task, its block, and the range of blocks that it iterates over.

    Attributes:
        query_start: Position of the first query row of the task.
        key_start: Position of the first key row of the task.
        head: Key/value head of the task.
        block: The block of the program, of queries or of keys.
        first: First block of the range.
        whole: Boundary between blocks that need a mask and blocks that do not, see `blocks`.
        end: Last block of the range + 1.
        row_count: Key rows of the task.
    """

    query_start: Array
    key_start: Array
    head: Array
    block: Array
    first: Array
    whole: Array
    end: Array
    row_count: Array


class _Inputs(NamedTuple):
    """References to the rows, and to the mask inputs or None."""

    query: Any
    key: Any
    value: Any
    query_inputs: Any
    key_inputs: Any


class _Block(NamedTuple):
    """Rows of a block: their indices in the array, whether they exist, their rows ``m``, and their mask inputs."""

    indices: Array
    exists: Array
    row: Array
    mask_inputs: list[Array]


class _Program:
    """Finds, reads and writes the rows of a program."""

    def __init__(self, config: KernelConfig, rows: StridedRows, *, is_over_queries: bool = True) -> None:
        self.is_over_queries = is_over_queries
        self.config, self.dim = config, rows.query.shape[1]
        self.num_kv_arrays = len(rows.kv)
        self.has_mask_inputs = rows.query_inputs is not None
        self.width = 1 << (self.dim - 1).bit_length()

    def begin(self, tasks: Any, ranges: Any, refs: tuple[Any, ...], blocks: int) -> tuple[_Work, _Inputs, list[Any]]:  # noqa: ANN401
        """Returns work and inputs of this program, and the remaining references."""
        program_id = pl.program_id(0)
        task, nth = quotient(program_id, blocks), program_id - quotient(program_id, blocks) * blocks
        is_reversed = self.config.is_causal and self.is_over_queries  # the blocks with the longest ranges come first
        block = blocks - 1 - nth if is_reversed else nth
        head = quotient(task, self.config.tasks_per_head)
        starts = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        block_range = ranges[head, 0, block], ranges[head, 1, block], ranges[head, 2, block], ranges[head, 3, block]
        work = _Work(*starts, block, *block_range)
        query, *kv = refs[: 1 + self.num_kv_arrays]
        rest = list(refs[1 + self.num_kv_arrays :])
        mask_inputs = (rest.pop(0), rest.pop(0)) if self.has_mask_inputs else (None, None)
        return work, _Inputs(query, kv[0], kv[-1], *mask_inputs), rest

    def queries(self, work: _Work, inputs: _Inputs, block: Array) -> _Block:
        """Returns the query rows of a block."""
        number = block * self.config.blocks.query + jnp.arange(self.config.blocks.query, dtype=jnp.int32)  # m * G + g
        row = quotient(number, self.config.q_per_kv)
        position = work.query_start + row * self.config.stride
        exists, mask_inputs = self._load_mask_inputs(inputs.query_inputs, position, row < work.row_count)
        index = (
            (position * self.config.kv_heads + work.head) * self.config.q_per_kv + number - row * self.config.q_per_kv
        )
        return _Block(index, exists, row, mask_inputs)

    def keys(self, work: _Work, inputs: _Inputs, block: Array) -> _Block:
        """Returns the key rows of a block."""
        row = block * self.config.blocks.key + jnp.arange(self.config.blocks.key, dtype=jnp.int32)
        position = work.key_start + row * self.config.stride
        exists, mask_inputs = self._load_mask_inputs(inputs.key_inputs, position, row < work.row_count)
        return _Block(position * self.config.kv_heads + work.head, exists, row, mask_inputs)

    def _load_mask_inputs(self, ref: Any, position: Array, exists: Array) -> tuple[Array, list[Array]]:  # noqa: ANN401
        """Returns which rows exist, and their mask inputs; rows with a negative first input are padding, never read."""
        if ref is None:
            return exists, []
        rules = range(len(self.config.mask_rules))
        mask_inputs = [plgpu.load(ref.at[i, position], mask=exists, other=-1) for i in rules]
        return exists & (mask_inputs[0] >= 0), mask_inputs

    def attends(self, queries: _Block, keys: _Block, work: _Work, *, is_transposed: bool = False) -> Array:
        """Returns the mask of a pair of blocks, (M, S), or (S, M) if transposed."""
        of_query = (lambda x: x[None, :]) if is_transposed else (lambda x: x[:, None])
        of_key = (lambda x: x[:, None]) if is_transposed else (lambda x: x[None, :])
        mask_inputs = [of_query(x) for x in queries.mask_inputs], [of_key(x) for x in keys.mask_inputs]
        return self.config.attends(of_query(queries.row), of_key(keys.row), work.row_count, *mask_inputs)

    def read(self, ref: Any, rows: _Block, shift: int = 0) -> Array:  # noqa: ANN401
        """Reads the rows of a block, with 0 for rows that do not exist."""
        index, mask = self._index(rows, shift)
        return plgpu.load(ref.at[index], mask=mask, other=0)

    def write(self, ref: Any, rows: _Block, x: Array, shift: int = 0) -> None:  # noqa: ANN401
        """Writes the rows of a block."""
        index, mask = self._index(rows, shift)
        plgpu.store(ref.at[index], x, mask=mask)

    def read_queries(self, inputs: _Inputs, rows: _Block, dout: Any, lse: Any, delta: Any) -> tuple[Array, ...]:  # noqa: ANN401
        """Reads query, dout, lse and delta of a block."""
        numbers = (plgpu.load(x.at[rows.indices], mask=rows.exists, other=y) for x, y in ((lse, jnp.inf), (delta, 0.0)))
        return self.read(inputs.query, rows), self.read(dout, rows), *numbers

    def _index(self, rows: _Block, shift: int) -> tuple[tuple[Array, Array], Array]:
        column = jnp.arange(self.width, dtype=jnp.int32)[None, :]
        mask = rows.exists[:, None]
        return ((rows.indices + shift)[:, None], column), mask if self.width == self.dim else mask & (column < self.dim)

    def for_range(self, step: Callable[..., Any], state: Any, work: _Work, *, masked_first: bool) -> Any:  # noqa: ANN401
        """Runs `step` on the blocks of the range, with a mask for blocks that need one."""
        run = lambda low, high, state, is_masked: lax.fori_loop(  # noqa: E731
            low, high, lambda block, state: step(block, state, is_masked), state
        )
        if not self.config.needs_mask:
            return run(work.first, work.end, state, False)
        if self.config.mask_rules:
            return run(work.first, work.end, state, True)
        state = run(work.first, work.whole, state, masked_first)
        return run(work.whole, work.end, state, not masked_first)


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
    """Calls a kernel that adds to `sums` in place, with one program per block of a task."""
    mask_inputs = () if rows.query_inputs is None else (rows.query_inputs, rows.key_inputs)
    inputs = (rows.tasks, ranges, rows.query, *rows.kv, *mask_inputs, *given)
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
