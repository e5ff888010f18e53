"""Calls the TPU kernels for packed rows, and defines their grids and blocks.

Dense operands are read in place if they can be (`in_place`), and packed first otherwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringjax._src.indexing import ceil_div, quotient
from ringjax._src.kernels.blocks import (
    Blocks,
    KernelConfig,
    fitting_blocks,
    given_blocks,
    kernel_config,
    packed_mask_inputs,
    pair_ranges,
)
from ringjax._src.kernels.interface import AttendConfig, Backend, Case, Grads, Limits, Operands, Residuals, case_of
from ringjax._src.kernels.packing import attend_bwd_packed, attend_packed
from ringjax._src.kernels.platform import on_its_platform
from ringjax._src.kernels.tpu import in_place
from ringjax._src.kernels.tpu.kernels import LOG2_E, forward_kernel, gradient_kernel
from ringjax._src.kernels.tpu.tiling import LANES, VMEM_BYTES, Tiling, tiling
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.vma import shaped_like

LIMITS = Limits(("bfloat16", "float32"), min_dim=16, min_rows=16, min_block=128)  # blocks of the lanes of a register

Which = Literal["query", "key"]


def attend(prior: PartialSoftmax, operands: Operands, config: AttendConfig) -> PartialSoftmax:
    """Merges the attention of the selected rows into `prior`, float32."""
    kernel = _kernel_config(operands, config, is_bwd=False)
    if operands.pairs is None:
        if in_place.why_packed(operands, kernel, is_bwd=False):
            return attend_packed(attend, prior, operands, config)
        return in_place.attend(prior, operands, kernel, has_prior=not config.is_prior_empty)
    tiles, has_prior = tiling(kernel, operands.batch), _has_prior(operands, config)
    for rows in _packed_rows(operands, kernel):
        prior, has_prior = forward(prior, rows, config=kernel, tiles=tiles, has_prior=has_prior), True
    return prior


def attend_bwd(grads: Grads, operands: Operands, residuals: Residuals, config: AttendConfig) -> Grads:
    """Adds the gradients of the selected rows to `grads`, float32."""
    kernel = _kernel_config(operands, config, is_bwd=True)
    if operands.pairs is None:
        if in_place.why_packed(operands, kernel, is_bwd=True):
            return attend_bwd_packed(attend_bwd, grads, operands, residuals, config)
        return in_place.attend_bwd(grads, operands, residuals, kernel, has_prior=not config.is_prior_empty)
    tiles, has_prior = tiling(kernel, operands.batch), _has_prior(operands, config)
    dq, (dkv,) = grads
    given = _output_grads(residuals, config.output_divisor)
    for rows in _packed_rows(operands, kernel):
        transposed = rows._replace(ranges=kernel.q_block_ranges(rows.ranges))
        dq, dkv = gradient(dq, dkv, transposed, given, config=kernel, tiles=tiles, has_prior=has_prior)
        has_prior = True
    return Grads(dq, (dkv,))


def _has_prior(operands: Operands, config: AttendConfig) -> bool:
    """Returns whether a kernel must read what it adds to; if not, it writes all chunks, and all of them have work."""
    assert operands.pairs is not None
    return not config.is_prior_empty or operands.query.shape[1] > 1 or operands.pairs.active is not None


def _kernel_config(operands: Operands, config: AttendConfig, *, is_bwd: bool) -> KernelConfig:
    case, sizes = case_of(operands), config.block_sizes
    if sizes is None:
        return kernel_config(operands, config, default_blocks(case, is_bwd=is_bwd))
    blocks = given_blocks(sizes, case.num_rows, case.q_per_kv, LIMITS.min_block, is_bwd=is_bwd)
    return kernel_config(operands, config, blocks)


def default_blocks(case: Case, *, is_bwd: bool) -> Blocks:
    """Returns the largest blocks that fit the vector memory; the same forward and backward."""
    is_narrow, is_wide = case.dtype == "bfloat16", case.head_dim > 128
    size = 256 if is_wide and not is_narrow else 512 if is_wide or not is_narrow else 1024
    return fitting_blocks((size, size), case.num_rows, case.q_per_kv, LIMITS.min_block)


class PackedRows(NamedTuple):
    """One pair of chunks of packed operands."""

    query: Array  # unscaled queries (N, C, n * G, H)
    kv: Array  # keys and values (2, N, C, n, H)
    chunks: Array  # query chunk and key chunk, (2,)
    ranges: Array  # KV block ranges, or Q block ranges for the gradient of keys
    mask_inputs: tuple[Array, Array] | None  # of queries (N, C, inputs, n * G) and of keys (N, C, inputs, n)


def _packed_rows(operands: Operands, config: KernelConfig) -> Iterator[PackedRows]:
    """Yields the rows of each pair of chunks."""
    pairs, inputs = operands.pairs, packed_mask_inputs(operands, config)
    assert pairs is not None
    if inputs is not None:
        inputs = jnp.repeat(inputs[0], config.q_per_kv, axis=3), inputs[1]
    for *chunks, ranges in zip(pairs.query, pairs.key, pair_ranges(operands, config), strict=True):
        yield PackedRows(operands.query, operands.kv[0], jnp.stack(chunks), ranges, inputs)


class OutputGrads(NamedTuple):
    """Gradient of the output (N, C, n * G, H), and numbers per query row, (N, C, 2, n * G).

    The numbers are lse in base 2, increased by the logarithm of the output divisor, and delta times that divisor: then
    the gradients need no division.
    """

    dout: Array
    stats: Array


def _output_grads(residuals: Residuals, divisor: int) -> OutputGrads:
    lse = residuals.lse * LOG2_E + math.log2(divisor)
    return OutputGrads(residuals.dout, jnp.stack([lse, residuals.delta * divisor], axis=2))


@functools.partial(jax.jit, static_argnames=("config", "tiles", "has_prior"))
def forward(
    prior: PartialSoftmax, rows: PackedRows, *, config: KernelConfig, tiles: Tiling, has_prior: bool = True
) -> PartialSoftmax:
    """Merges the attention of the queries into `prior`, (N, C, n * G, H) and (N, C, n * G), which may be empty."""
    out, lse = forward_call(prior, rows, config, tiles).run(has_prior=has_prior)
    return PartialSoftmax(out, lse[:, :, 0])


@functools.partial(jax.jit, static_argnames=("config", "tiles", "has_prior"))
def gradient(
    dq: Array,
    dkv: Array,
    rows: PackedRows,
    given: OutputGrads,
    *,
    config: KernelConfig,
    tiles: Tiling,
    has_prior: bool = True,
) -> tuple[Array, Array]:
    """Adds the gradients to `dq` (N, C, n * G, H) and `dkv` (2, N, C, n, H), which may be zero.

    A call has the gradients of all its query blocks in VMEM, so more rows than fit take several calls.
    """

    def run(index: Array | int, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        first_block = jnp.zeros_like(rows.chunks[:1]) + index * num_blocks
        of_call = rows._replace(chunks=jnp.concatenate([rows.chunks, first_block]))
        new_dq, new_dkv = gradient_call(*sums, of_call, given, config, tiles, num_blocks).run(has_prior=has_prior)
        return new_dq, new_dkv

    num_blocks = query_blocks_per_call(config, dq.shape[-1])
    has_prior = has_prior or num_blocks < config.query_blocks
    if num_blocks == config.query_blocks:
        return run(0, (dq, dkv))
    return jax.lax.fori_loop(0, ceil_div(config.query_blocks, num_blocks), run, (dq, dkv))


_RESIDENT_BYTES = 16 * 2**20  # of gradients of queries in VMEM


def query_blocks_per_call(config: KernelConfig, head_dim: int) -> int:
    """Returns how many query blocks a call of the gradient kernel processes."""
    block_bytes = 4 * config.blocks.query * ceil_div(head_dim, LANES) * LANES
    most = max(1, _RESIDENT_BYTES // block_bytes)
    return ceil_div(config.query_blocks, ceil_div(config.query_blocks, most))


def forward_call(prior: PartialSoftmax, rows: PackedRows, config: KernelConfig, tiles: Tiling) -> Call:
    """Returns the call of the forward kernel."""
    specs = Specs(config, tiles, rows.query.shape, "query", config.key_blocks)
    sums = [(prior.out, specs.query), (prior.lse[:, :, None], specs.numbers("query", 1))]
    num_rows = tiles.tasks, config.blocks.query
    scratch = [(*num_rows, specs.dim), *[(*num_rows, LANES)] * 2]
    return Call("forward", forward_kernel, specs, 2, rows, specs.inputs(rows), sums, scratch)


def gradient_call(
    dq: Array,
    dkv: Array,
    rows: PackedRows,
    given: OutputGrads,
    config: KernelConfig,
    tiles: Tiling,
    num_blocks: int,
) -> Call:
    """Returns the call of the kernel for all gradients.

    ``rows.chunks`` has a third entry: the first of the `num_blocks` query blocks of the call.
    """
    specs = Specs(config, tiles, rows.query.shape, "key", num_blocks)
    inputs = [*specs.inputs(rows), *specs.output_grads(given)]
    dq_rows, kv_rows = (num_blocks, config.blocks.query), (config.blocks.key,)
    scratch = [(tiles.tasks, *shape, specs.dim) for shape in (dq_rows, kv_rows, kv_rows)]
    sums = [(dq, specs.query_sums), (dkv, specs.kv)]
    return Call("gradient", gradient_kernel, specs, 5, rows, inputs, sums, scratch)


class Specs:
    """The grid and block specs of a pass whose outer blocks are of queries or of keys."""

    def __init__(
        self, config: KernelConfig, tiles: Tiling, shape: tuple[int, ...], outer: Which, inner_steps: int
    ) -> None:
        self.config, self.tiling, self.outer, self.tasks, self.dim = config, tiles, outer, shape[0], shape[-1]
        outer_steps = config.query_blocks if outer == "query" else config.key_blocks
        self.grid = (self.tasks // tiles.tasks, outer_steps, inner_steps)
        shape = (tiles.tasks, 1, config.blocks.query, self.dim)
        self.query = pl.BlockSpec(shape, lambda *step: self._rows("query", *step))
        self.query_sums = pl.BlockSpec(shape, self._query_sums)
        self.kv = pl.BlockSpec(
            (2, tiles.tasks, 1, config.blocks.key, self.dim), lambda *step: (0, *self._rows("key", *step))
        )

    def _rows(self, which: Which, task: Array, *step: Any) -> tuple[Any, ...]:  # noqa: ANN401
        return task, *self._chunk_and_block(which, task, *step), 0

    def _chunk_and_block(self, which: Which, task: Array, *step: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Returns the chunk and the block of queries or keys in a grid step."""
        outer_block, nth, chunks, ranges = step
        chunk = chunks[0 if which == "query" else 1]
        if which == self.outer:
            return chunk, outer_block
        if self.tiling.tasks > 1:
            return chunk, 0
        head = quotient(task, self.config.tasks_per_head)
        first, end = ranges[head, 0, outer_block], ranges[head, 2, outer_block]
        block = first + nth if self.outer == "query" else jnp.maximum(first, chunks[2] + nth)
        return chunk, jnp.clip(block, 0, jnp.maximum(end - 1, 0))

    def _query_sums(self, task: Array, *step: Any) -> tuple[Any, ...]:  # noqa: ANN401
        """Returns the query block that the gradient kernel reads and writes while it processes the last key block."""
        outer_block, nth, chunks, _ = step
        block = jnp.where(outer_block == self.config.key_blocks - 1, chunks[2] + nth, chunks[2])
        return task, chunks[0], jnp.minimum(block, self.config.query_blocks - 1), 0

    def numbers(self, which: Which, num: int) -> pl.BlockSpec:
        """Returns the spec of `num` numbers per row of the queries or keys, (N, C, num, rows)."""

        def index(task: Array, *step: Any) -> tuple[Any, ...]:  # noqa: ANN401
            chunk, block = self._chunk_and_block(which, task, *step)
            return task, chunk, 0, block

        return pl.BlockSpec((self.tiling.tasks, 1, num, getattr(self.config.blocks, which)), index)

    def inputs(self, rows: PackedRows) -> list[tuple[Array, pl.BlockSpec]]:
        """Returns queries, keys and values, and mask inputs, with their specs."""
        inputs = [(rows.query, self.query), (rows.kv, self.kv)]
        if rows.mask_inputs is None:
            return inputs
        num = len(self.config.mask_rules)
        return [*inputs, *zip(rows.mask_inputs, (self.numbers("query", num), self.numbers("key", num)), strict=True)]

    def output_grads(self, given: OutputGrads) -> list[tuple[Array, pl.BlockSpec]]:
        """Returns the gradient of the output, and lse and delta, with their specs."""
        return [(given.dout, self.query), (given.stats, self.numbers("query", 2))]

    def cost(self, multiplies: int, itemsize: int) -> pl.CostEstimate:
        """Estimates the cost of a pass with this many matrix multiplies per block, as if every task were active."""
        config = self.config
        pairs = self.tasks * config.num_rows**2 * config.q_per_kv // (2 if config.is_causal else 1)
        row_bytes = 2 * config.q_per_kv * (itemsize + 4) + 2 * config.query_blocks * itemsize
        moved = self.tasks * config.num_rows * self.dim * row_bytes
        return pl.CostEstimate(flops=2 * multiplies * pairs * self.dim, transcendentals=pairs, bytes_accessed=moved)


class Call(NamedTuple):
    """A kernel and its arrays; it adds to the sums in place."""

    name: str  # of the pass
    kernel: Callable[..., None]
    specs: Specs
    multiplies: int  # matrix multiplies per pair of blocks
    rows: PackedRows  # chunks and ranges are known before the kernel starts
    inputs: list[tuple[Array, pl.BlockSpec]]  # arrays and their specs
    sums: list[tuple[Array, pl.BlockSpec]]  # arrays that are both inputs and outputs, and their specs
    scratch: Sequence[tuple[int, ...]]  # shapes of arrays that last from step to step

    def run(self, *, has_prior: bool) -> list[Array]:
        """Runs the kernel and returns the sums. If they are still empty or zero, the kernel does not read them."""
        config, scalars = self.specs.config, (self.rows.chunks, self.rows.ranges)
        every, first = [*self.inputs, *self.sums], len(scalars) + len(self.inputs)
        read = every if has_prior else self.inputs
        outer: Literal["parallel", "arbitrary"] = "parallel" if self.specs.outer == "query" else "arbitrary"
        kernel = pl.pallas_call(
            functools.partial(self.kernel, config=config, tiling=self.specs.tiling, has_prior=has_prior),
            out_shape=[shaped_like(array, *scalars) for array, _ in self.sums],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=self.specs.grid,
                in_specs=[spec for _, spec in read],
                out_specs=[spec for _, spec in self.sums],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in self.scratch],
            ),
            input_output_aliases={first + i: i for i in range(len(self.sums))} if has_prior else {},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", outer, "arbitrary"), vmem_limit_bytes=VMEM_BYTES
            ),
            cost_estimate=self.specs.cost(self.multiplies, self.rows.query.dtype.itemsize),
            name=f"ringjax_{self.name}",
            interpret=config.interpret,
        )
        call = lambda *arrays: kernel(*arrays[: len(scalars) + len(read)])  # noqa: E731
        arrays = *scalars, *(array for array, _ in every)
        return call(*arrays) if config.interpret else on_its_platform("tpu", call, *arrays, sums=len(self.sums))


BACKEND = Backend("tpu", "pallas", "tpu", attend, attend_bwd, LIMITS)
