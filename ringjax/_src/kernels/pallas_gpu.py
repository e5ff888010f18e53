"""The implementation on GPU: Pallas (Triton) kernels that read the rows of a task in place.

A block has ``M`` query rows and ``S`` key rows. Inside the kernels, scores, maxima and lse are in base 2: GPUs have an
instruction for powers of two only.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

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
from ringjax._src.online_softmax import PartialSoftmax, SoftmaxState
from ringjax._src.vma import shaped_like

plgpu: Any
try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # deprecated since jax 0.11, to be removed
    plgpu = None

LIMITS = Limits(("bfloat16", "float16", "float32"), min_dim=16, min_rows=16, min_block=16)  # a tile of tensor cores
_SM_80 = 8.0  # Ampere
_LOG2_E = math.log2(math.e)
_STAGES = 2  # blocks in shared memory; a third one changes no instruction and leaves room for fewer programs


def attend(prior: PartialSoftmax, operands: Operands, config: AttendConfig) -> PartialSoftmax:
    """Merges the attention of the selected rows into `prior`, float32."""
    kernel = _kernel_config(operands, config, is_bwd=False)
    out, lse = flat(prior.out), prior.lse.reshape(-1)
    for rows, ranges in zip(strided_rows(operands, kernel), pair_ranges(operands, kernel), strict=True):
        out, lse = _call(_forward_kernel, rows, ranges, kernel.query_blocks, (), (out, lse), kernel)
    return PartialSoftmax(out.reshape(prior.out.shape), lse.reshape(prior.lse.shape))


def attend_bwd(grads: Grads, operands: Operands, residuals: Residuals, config: AttendConfig) -> Grads:
    """Adds the gradients of the selected rows to `grads`, float32: one kernel for dq and one for dk and dv."""
    kernel = _kernel_config(operands, config, is_bwd=True)
    lse, delta = residuals.lse.reshape(-1) * _LOG2_E, residuals.delta.reshape(-1) * config.output_divisor
    given = flat(residuals.dout), lse, delta
    dq, dkv = flat(grads.query), tuple(flat(x) for x in grads.kv)
    for rows, ranges in zip(strided_rows(operands, kernel), pair_ranges(operands, kernel), strict=True):
        (dq,) = _call(_query_gradient_kernel, rows, ranges, kernel.query_blocks, given, (dq,), kernel)
        transposed = kernel.q_block_ranges(ranges)
        dkv = tuple(_call(_key_gradient_kernel, rows, transposed, kernel.key_blocks, given, dkv, kernel))
    dkv = tuple(x.reshape(y.shape) for x, y in zip(dkv, grads.kv, strict=True))
    return Grads(dq.reshape(grads.query.shape), dkv)


def _kernel_config(operands: Operands, config: AttendConfig, *, is_bwd: bool) -> KernelConfig:
    case, sizes = case_of(operands), config.block_sizes
    if sizes is None:
        blocks = default_blocks(case, is_bwd=is_bwd, has_mask_inputs=has_mask_inputs(operands))
    else:
        blocks = given_blocks(sizes, case.num_rows, case.q_per_kv, LIMITS.min_block, is_bwd=is_bwd)
    return kernel_config(operands, config, blocks)


def default_blocks(case: Case, *, is_bwd: bool, has_mask_inputs: bool = False) -> Blocks:
    """Returns blocks whose loops compile without spilling registers up to 128 dims.

    Checked with the compilers for sm_80, sm_90 and sm_100, see `make aot-cuda`.
    """
    if case.dtype == "float32":  # no tensor cores: the sums are in registers
        sizes = 16, 32
    elif case.head_dim > 128:
        sizes = 32, 32
    elif is_bwd:
        sizes = 64, 64
    else:
        sizes = 128, 64 if has_mask_inputs else 128
    return fitting_blocks(sizes, case.num_rows, case.q_per_kv, LIMITS.min_block)


def num_warps(config: KernelConfig, query: Array, *, is_bwd: bool) -> int:
    """Returns the warps of a program.

    A matrix instruction of Hopper takes 64 rows and four warps: eight warps on 64 rows compute everything twice.
    """
    is_small = query.dtype != jnp.float32 and query.shape[-1] <= 128 and max(config.blocks) <= 64
    return 4 if is_bwd and is_small else 8


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
    if plgpu is None:
        return f"the gpu kernels need the Triton backend of Pallas, which jax {jax.__version__} does not have"
    oldest = oldest_gpu()
    return f"the gpu kernels need compute capability {_SM_80}, not {oldest}" if oldest < _SM_80 else ""


def _forward_kernel(*refs: Any, config: KernelConfig) -> None:  # noqa: ANN401
    program = _Program(config, refs)
    prior_out, prior_lse, out, lse = program.rest
    queries = program.queries(program.block)

    @pl.when(program.first < program.end)
    def _() -> None:
        q = program.read(program.query, queries)
        part = PartialSoftmax(
            program.read(prior_out, queries),
            _load(prior_lse.at[queries.indices], queries.exists, other=-jnp.inf) * _LOG2_E,
        )

        def step(block: Array, state: SoftmaxState, is_masked: bool) -> SoftmaxState:
            keys = program.keys(block)
            scores, factor = _scores(q, program.read(program.key, keys), config)
            if is_masked:
                scores = jnp.where(program.attends(queries, keys), scores, -jnp.inf)
            state, weights = _rescale(state, scores, factor, config)
            v = program.read(program.value, keys, config.value_shift)
            return SoftmaxState(
                state.acc + dot(weights.astype(v.dtype), v, 1, 0), state.max, state.denominator + weights.sum(axis=1)
            )

        state = program.for_range(step, softmax.resume(part))
        part = softmax.finish(state._replace(max=state.max / _LOG2_E))
        rows = program.own_rows()
        program.write(out, rows, part.out)
        plgpu.store(lse.at[rows.indices], part.lse, mask=rows.exists)


def _scores(a: Array, b: Array, config: KernelConfig) -> tuple[Array, float]:
    """Returns the products of rows and a factor above 0 that makes them scores in base 2; -inf stays -inf."""
    products = dot(a, b, 1, 1)
    return (products, config.scale * _LOG2_E) if config.scale > 0 else (products * config.scale, _LOG2_E)


def _exp2(scores: Array, factor: float, shift: Array, config: KernelConfig) -> Array:
    """Computes ``exp2(scores * factor - shift)`` in two instructions, with subnormal results flushed to 0."""
    if config.interpret:
        return jnp.exp2(scores * factor - shift)
    (result,) = plgpu.elementwise_inline_asm(
        "{ .reg .f32 x; fma.rn.f32 x, $1, $2, $3; ex2.approx.ftz.f32 $0, x; }",
        args=[scores, *(jnp.broadcast_to(x, scores.shape) for x in (jnp.float32(factor), -shift))],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(scores.shape, jnp.float32)],
    )
    return result


def _rescale(state: SoftmaxState, scores: Array, factor: float, config: KernelConfig) -> tuple[SoftmaxState, Array]:
    """Does what `softmax.rescale` does, in base 2."""
    maximum = jnp.maximum(state.max, scores.max(axis=1) * factor)
    finite = jnp.where(maximum == -jnp.inf, 0, maximum)
    decay = _exp2(state.max, 1.0, finite, config)
    weights = _exp2(scores, factor, finite[:, None], config)
    return SoftmaxState(state.acc * decay[:, None], maximum, state.denominator * decay), weights


def _query_gradient_kernel(*refs: Any, config: KernelConfig) -> None:  # noqa: ANN401
    program = _Program(config, refs)
    dout, lse, delta, prior, dq = program.rest
    queries = program.queries(program.block)

    @pl.when(program.first < program.end)
    def _() -> None:
        q, dout_rows, lse_rows, delta_rows = program.read_queries(queries, dout, lse, delta)

        def step(block: Array, acc: Array, is_masked: bool) -> Array:
            keys = program.keys(block)
            k = program.read(program.key, keys)
            scores, factor = _scores(q, k, config)
            if is_masked:
                scores = jnp.where(program.attends(queries, keys), scores, -jnp.inf)
            probs = _exp2(scores, factor, lse_rows[:, None], config)
            dprobs = dot(dout_rows, program.read(program.value, keys, config.value_shift), 1, 1)
            dscores = probs * (dprobs - delta_rows[:, None])
            return acc + dot(dscores.astype(k.dtype), k, 1, 0)

        acc = program.for_range(step, jnp.zeros(q.shape, jnp.float32))
        rows = program.own_rows()
        program.write(dq, rows, program.read(prior, rows) + acc * (config.scale / config.output_divisor))


def _key_gradient_kernel(*refs: Any, config: KernelConfig) -> None:  # noqa: ANN401
    program = _Program(config, refs, is_over_queries=False)
    dout, lse, delta, *sums = program.rest
    priors, outs = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    keys, shift = program.keys(program.block), config.value_shift

    @pl.when(program.first < program.end)
    def _() -> None:
        k, v = program.read(program.key, keys), program.read(program.value, keys, shift)

        def step(block: Array, state: tuple[Array, Array], is_masked: bool) -> tuple[Array, Array]:
            dk, dv = state
            queries = program.queries(block)
            q, dout_rows, lse_rows, delta_rows = program.read_queries(queries, dout, lse, delta)
            scores, factor = _scores(k, q, config)
            if is_masked:
                scores = jnp.where(program.attends(queries, keys, is_transposed=True), scores, -jnp.inf)
            probs = _exp2(scores, factor, lse_rows[None, :], config)
            dv += dot(probs.astype(dout_rows.dtype), dout_rows, 1, 0)
            dscores = probs * (dot(v, dout_rows, 1, 1) - delta_rows[None, :])
            return dk + dot(dscores.astype(q.dtype), q, 1, 0), dv

        zero = jnp.zeros(k.shape, jnp.float32)
        dk, dv = program.for_range(step, (zero, zero))
        rows = program.own_rows()
        dk, dv = dk * (config.scale / config.output_divisor), dv * (1 / config.output_divisor)
        program.write(outs[0], rows, program.read(priors[0], rows) + dk)
        program.write(outs[-1], rows, program.read(priors[-1], rows, shift) + dv, shift)


class _Block(NamedTuple):
    """Rows of a block: their indices in the array, whether they exist, their rows ``m``, and their mask inputs."""

    indices: Array
    exists: Array | None  # None if all do
    row: Array
    mask_inputs: list[Array]


class _Program:
    """One program: its block of a task, the range of blocks that it iterates over, and references to its arrays."""

    def __init__(self, config: KernelConfig, refs: tuple[Any, ...], *, is_over_queries: bool = True) -> None:
        self.config, self.is_over_queries = config, is_over_queries
        self._tasks, ranges, self.query, self.key, *rest = refs
        self.value = self.key if config.value_shift else rest.pop(0)
        self.query_inputs: Any = rest.pop(0) if config.mask_rules else None
        self.key_inputs: Any = rest.pop(0) if config.mask_rules else None
        self.rest = rest  # the references that differ between kernels
        self.dim = self.query.shape[1]
        self.width = 1 << (self.dim - 1).bit_length()
        num_blocks = config.query_blocks if is_over_queries else config.key_blocks
        self._task = quotient(pl.program_id(0), num_blocks)
        nth = pl.program_id(0) - self._task * num_blocks
        is_reversed = config.is_causal and is_over_queries  # the blocks with the longest ranges come first
        self.block = num_blocks - 1 - nth if is_reversed else nth  # of queries or of keys
        self._load_task()
        head = quotient(self._task, config.tasks_per_head)
        self.first, self.whole, self.end, self.row_count = (ranges[head, i, self.block] for i in range(4))

    def _load_task(self) -> None:
        """Loads the positions of the first query and key, and the head."""
        self.query_start, self.key_start, self.head = (self._tasks[self._task, i] for i in range(3))

    def own_rows(self) -> _Block:
        """Returns the rows of the program after its loops.

        Their addresses are recomputed, because those from before the loops would be kept in registers, and spill.
        """
        self._load_task()
        return self.queries(self.block) if self.is_over_queries else self.keys(self.block)

    def queries(self, block: Array) -> _Block:
        """Returns the query rows of a block."""
        config = self.config
        number = block * config.blocks.query + jnp.arange(config.blocks.query, dtype=jnp.int32)  # m * G + g
        row = quotient(number, config.q_per_kv)
        position = self.query_start + row * config.stride
        exists, mask_inputs = self._load_mask_inputs(self.query_inputs, position, row < self.row_count)
        index = (position * config.kv_heads + self.head) * config.q_per_kv + number - row * config.q_per_kv
        return _Block(index, exists, row, mask_inputs)

    def keys(self, block: Array) -> _Block:
        """Returns the key rows of a block."""
        row = block * self.config.blocks.key + jnp.arange(self.config.blocks.key, dtype=jnp.int32)
        position = self.key_start + row * self.config.stride
        exists, mask_inputs = self._load_mask_inputs(self.key_inputs, position, row < self.row_count)
        return _Block(position * self.config.kv_heads + self.head, exists, row, mask_inputs)

    def _load_mask_inputs(self, ref: Any, position: Array, exists: Array) -> tuple[Array | None, list[Array]]:  # noqa: ANN401
        """Returns which rows exist, and their mask inputs; rows with a negative first input are padding, never read."""
        in_range = None if self.config.is_exact else exists
        if ref is None:
            return in_range, []
        rules = range(len(self.config.mask_rules))
        mask_inputs = [_load(ref.at[i, position], in_range, other=-1) for i in rules]
        return mask_inputs[0] >= 0, mask_inputs

    def attends(self, queries: _Block, keys: _Block, *, is_transposed: bool = False) -> Array:
        """Returns the mask of a pair of blocks, (M, S), or (S, M) if transposed."""
        of_query = (lambda x: x[None, :]) if is_transposed else (lambda x: x[:, None])
        of_key = (lambda x: x[:, None]) if is_transposed else (lambda x: x[None, :])
        mask_inputs = [of_query(x) for x in queries.mask_inputs], [of_key(x) for x in keys.mask_inputs]
        return self.config.attends(of_query(queries.row), of_key(keys.row), self.row_count, *mask_inputs)

    def read(self, ref: Any, rows: _Block, shift: int = 0) -> Array:  # noqa: ANN401
        """Reads the rows of a block, with 0 for rows that do not exist."""
        index, mask = self._index(rows, shift)
        return _load(ref.at[index], mask, other=0)

    def write(self, ref: Any, rows: _Block, x: Array, shift: int = 0) -> None:  # noqa: ANN401
        """Writes the rows of a block."""
        index, mask = self._index(rows, shift)
        plgpu.store(ref.at[index], x, mask=mask)

    def read_queries(self, rows: _Block, dout: Any, lse: Any, delta: Any) -> tuple[Array, ...]:  # noqa: ANN401
        """Reads query, dout, lse and delta of a block."""
        numbers = (_load(x.at[rows.indices], rows.exists, other=y) for x, y in ((lse, jnp.inf), (delta, 0.0)))
        return self.read(self.query, rows), self.read(dout, rows), *numbers

    def _index(self, rows: _Block, shift: int) -> tuple[tuple[Array, Array], Array | None]:
        column = jnp.arange(self.width, dtype=jnp.int32)[None, :]
        masks = [] if rows.exists is None else [rows.exists[:, None]]
        if self.width != self.dim:
            masks.append(column < self.dim)
        mask = functools.reduce(operator.and_, masks) if masks else None
        return ((rows.indices + shift)[:, None], column), mask

    def for_range(self, step: Callable[..., Any], state: Any) -> Any:  # noqa: ANN401
        """Runs `step` on the blocks of the range, with a mask for blocks that need one."""

        def run(low: Array, high: Array, state: Any, is_masked: bool) -> Any:  # noqa: ANN401
            return lax.fori_loop(low, high, lambda block, state: step(block, state, is_masked), state)

        if not self.config.needs_mask:
            return run(self.first, self.end, state, False)
        if self.config.mask_rules:
            return run(self.first, self.end, state, True)
        state = run(self.first, self.whole, state, not self.is_over_queries)
        return run(self.whole, self.end, state, self.is_over_queries)


def _load(ref: Any, mask: Array | None, other: float) -> Array:  # noqa: ANN401
    """Loads elements, all or those of the mask, with `other` in place of the rest."""
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=other)


@functools.partial(jax.jit, static_argnames=("kernel", "blocks", "config"))
def _call(
    kernel: Callable[..., None],
    rows: StridedRows,
    ranges: Array,
    blocks: int,
    given: tuple[Array, ...],
    sums: tuple[Array, ...],
    config: KernelConfig,
) -> list[Array]:
    """Calls a kernel that adds to `sums`, rows in float32, in place, with one program per block of a task.

    `given` are further inputs: the rows of dout, lse in base 2, and delta times the output divisor.
    """
    mask_inputs = () if rows.query_inputs is None else (rows.query_inputs, rows.key_inputs)
    inputs = (rows.tasks, ranges, rows.query, *rows.kv, *mask_inputs, *given)
    warps = num_warps(config, rows.query, is_bwd=kernel is not _forward_kernel)
    call = pl.pallas_call(
        functools.partial(kernel, config=config),
        out_shape=[shaped_like(x, *inputs) for x in sums],
        grid=(rows.tasks.shape[0] * blocks,),
        input_output_aliases={len(inputs) + i: i for i in range(len(sums))},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=_STAGES),
        name=f"ringjax{kernel.__name__.removesuffix('_kernel')}",
        interpret=config.interpret,
    )
    return call(*inputs, *sums) if config.interpret else on_its_platform("cuda", call, *inputs, *sums, sums=len(sums))


BACKEND = Backend("gpu", "pallas", "cuda", attend, attend_bwd, LIMITS, _unavailable)
