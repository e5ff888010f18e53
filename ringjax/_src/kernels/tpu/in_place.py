"""TPU kernels that read the selected rows of dense arrays in place, instead of having XLA pack them first.

The kernels are those for packed rows, between copies to and from VMEM (`copies`). All rows of a task are in VMEM.

Legend: ``B`` batch, ``T`` positions, ``K`` key/value heads, ``G`` query heads per key/value head, ``H`` head dim, ``r``
rate, ``n`` rows of a task, ``N`` tasks.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringjax._src.kernels.blocks import KernelConfig, pair_ranges
from ringjax._src.kernels.interface import Grads, Operands, Residuals
from ringjax._src.kernels.platform import on_its_platform
from ringjax._src.kernels.tpu.copies import INPUT_SLOTS, SUM_SLOTS, CopiedArrays, Copier, CopyPlan, Input, Sums, begin
from ringjax._src.kernels.tpu.kernels import LOG2_E, forward_kernel, gradient_kernel
from ringjax._src.kernels.tpu.tiling import LANES, VMEM_BYTES, tiling
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.rows.selection import RowSelection
from ringjax._src.vma import shaped_like

_BUFFER_BYTES = VMEM_BYTES - 6 * 2**20  # the rest is for blocks and what the compiler stores

Ref = Any


def why_packed(operands: Operands, config: KernelConfig, *, is_bwd: bool) -> str:
    """Returns why the rows of dense operands must be packed first, or "" if the kernels read them in place."""
    rows, heads, dim = operands.rows, operands.kv_heads, operands.query.shape[-1]
    is_narrow, q_per_kv = operands.query.dtype.itemsize == 2, operands.q_per_kv
    positions = operands.query.shape[1], rows.first, rows.chunk_length
    has_all_heads = isinstance(rows.heads, np.ndarray) and np.array_equal(rows.heads, np.arange(heads))
    rules = {
        "segments must be whole and every head must select rows": rows.is_aligned and not rows.has_empty_heads,
        "the rate must divide the length and the segments": not any(x % rows.rate for x in positions),
        "segment ids need packed rows": operands.query_ids is None,
        f"the head dim must be {LANES}": dim == LANES,  # Mosaic has no strided loads of wider rows
        "the branch must have all heads": has_all_heads,
        "16-bit heads must form pairs": not is_narrow or (heads % 2 == 0 and (q_per_kv == 1 or q_per_kv % 2 == 0)),
        "rows must fill whole tiles": rows.num_rows % 16 == 0,
    }
    broken = next((rule for rule, holds in rules.items() if not holds), "")
    if not broken and _Call(operands, config, is_bwd=is_bwd).buffer_bytes > _BUFFER_BYTES:
        return "the rows of a task must fit the vector memory"
    return broken


def attend(prior: PartialSoftmax, operands: Operands, config: KernelConfig, *, has_prior: bool) -> PartialSoftmax:
    """Merges the attention of the selected rows into `prior`, float32, updating its rows in place."""
    rows, call = operands.rows, _Call(operands, config, is_bwd=False, has_prior=has_prior)
    lse = pack_numbers(prior.lse, rows)[:, :, None]
    arrays = operands.query, *operands.kv
    (out,), (lse,) = _run(call, operands, arrays, plain=[], sums=[prior.out], numbers=[lse])
    return PartialSoftmax(out, unpack_numbers(prior.lse, lse, rows))


def attend_bwd(
    grads: Grads, operands: Operands, residuals: Residuals, config: KernelConfig, *, has_prior: bool
) -> Grads:
    """Adds the gradients of the selected rows to `grads`, float32, updating their rows in place."""
    call = _Call(operands, config, is_bwd=True, has_prior=has_prior)
    lse = residuals.lse * LOG2_E + math.log2(config.output_divisor)
    stats = [pack_numbers(x, operands.rows) for x in (lse, residuals.delta * config.output_divisor)]
    arrays = operands.query, *operands.kv, residuals.dout
    sums = [grads.query, *grads.kv]
    plain = [jnp.stack(stats, axis=2)]
    (dq, *dkv), _ = _run(call, operands, arrays, plain=plain, sums=sums, numbers=[])
    return Grads(dq, tuple(dkv))


def pack_numbers(x: Array, rows: RowSelection) -> Array:
    """Packs numbers per position and head, (B, T, K, G), as (N, 1, n * G), where tasks are (B, chunks, K)."""
    split, is_selected = _split(x, rows)
    packed = jnp.where(is_selected, split, jnp.zeros((), x.dtype)).sum(axis=3)  # (B, chunks, n, K, G)
    return packed.swapaxes(2, 3).reshape(-1, 1, rows.num_rows * x.shape[-1])


def unpack_numbers(x: Array, packed: Array, rows: RowSelection) -> Array:
    """Inverts `pack_numbers`: returns `x` with the selected numbers replaced."""
    split, is_selected = _split(x, rows)
    batch, chunks, num_rows, _, heads, q_per_kv = split.shape
    new = packed.reshape(batch, chunks, heads, num_rows, 1, q_per_kv).transpose(0, 1, 3, 4, 2, 5)
    return rows.put_view(x, jnp.where(is_selected, new, split))


def _split(x: Array, rows: RowSelection) -> tuple[Array, Array]:
    """Returns (B, chunks, n, r, K, G), and which of r and K are selected, (r, K, 1)."""
    inside = x[:, rows.first : rows.first + rows.chunks * rows.chunk_length]
    split = inside.reshape(x.shape[0], rows.chunks, rows.num_rows, rows.rate, *x.shape[2:])
    residue = jnp.arange(rows.rate, dtype=jnp.int32)[:, None]
    return split, (residue == jnp.asarray(rows.offsets)[None])[..., None]


class _Call:
    """A kernel, its grid and its buffers; if `has_prior`, it reads the sums before it adds to them."""

    def __init__(self, operands: Operands, config: KernelConfig, *, is_bwd: bool, has_prior: bool = False) -> None:
        rows, dim, heads = operands.rows, operands.query.shape[-1], operands.kv_heads
        num_tasks = operands.batch * rows.chunks * heads
        self.is_bwd, self.has_prior, self.dtype = is_bwd, has_prior, operands.query.dtype
        self.config = dataclasses.replace(config, tasks_per_head=num_tasks)  # ranges are the same for all heads
        self.tiling = tiling(config, num_tasks)
        tasks = self.tiling.tasks
        is_narrow = operands.query.dtype.itemsize == 2
        is_shared = is_narrow and heads % 2 == 0 and (tasks == 1 or tasks % 2 == 0) and _are_pairs_alike(rows.offsets)
        halves = 2 if num_tasks % (2 * tasks * (2 if is_shared and tasks == 1 else 1)) == 0 else 1
        self.plan = CopyPlan(
            heads=heads,
            chunks=rows.chunks,
            first_row=rows.first // rows.rate,
            num_rows=rows.num_rows,
            dim=dim,
            tasks=tasks,
            is_shared=is_shared,
            programs=num_tasks // tasks // halves,
            halves=halves,
            is_interpreted=config.interpret,
        )
        query = CopiedArrays(1, operands.q_per_kv, config.blocks.query, is_query=True, is_narrow=is_narrow)
        kv = CopiedArrays(2, 1, config.blocks.key, is_query=False, is_narrow=is_narrow)
        self.inputs = (query, kv, query) if is_bwd else (query, kv)
        self.sums = tuple(x._replace(is_narrow=False) for x in ((query, kv) if is_bwd else (query,)))

    def buffers(self) -> list[tuple[tuple[int, ...], Any]]:
        """Returns shapes and dtypes of the buffers: of each input, words and rows or rows only; of each sum, rows."""
        plan, dtype = self.plan, self.dtype
        found: list[tuple[tuple[int, ...], Any]] = []
        for copied in self.inputs:
            rows = (1, plan.padded(copied), plan.dim)
            if copied.is_narrow:
                words = (plan.copies(copied), 1, plan.num_rows * copied.words, plan.dim)
                found.append(((INPUT_SLOTS, copied.arrays, *words), jnp.uint32))
                found.append(((copied.arrays, plan.tasks, *rows), dtype))
            else:
                found.append(((INPUT_SLOTS, copied.arrays, plan.tasks, *rows), dtype))
        for copied in self.sums:
            rows = (1, plan.padded(copied), plan.dim)
            found.append(((SUM_SLOTS, copied.arrays, plan.tasks, *rows), jnp.float32))
        return found

    def scratch(self) -> list[tuple[int, ...]]:
        """Returns the shapes of what the kernel keeps from step to step, float32."""
        blocks, dim, tasks = self.config.blocks, self.plan.dim, self.tiling.tasks
        if self.is_bwd:
            return [(tasks, self.config.query_blocks, blocks.query, dim), *[(tasks, blocks.key, dim)] * 2]
        return [(tasks, blocks.query, dim), *[(tasks, blocks.query, LANES)] * 2]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of VMEM, without the blocks of numbers."""
        arrays = [*self.buffers(), *((shape, jnp.float32) for shape in self.scratch())]
        return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in arrays)

    def for_batch(self, times: int) -> _Call:
        """Returns the call for a batch that is this many times as large."""
        call = copy.copy(self)
        call.plan = dataclasses.replace(self.plan, programs=self.plan.programs * times)
        call.config = dataclasses.replace(self.config, tasks_per_head=self.config.tasks_per_head * times)
        return call

    @property
    def num_plain(self) -> int:
        """Number of arrays of numbers per row that the kernel reads only: lse and delta are one."""
        return 1 if self.is_bwd else 0

    def __call__(self, *given: Array) -> list[Array]:
        """Runs the kernel.

        Args:
            *given: Offsets, chunks and ranges; dense views of the inputs, in the order of `inputs`; numbers per row
                (N, 1, num, n * G) that the kernel reads; dense views of the sums; and numbers that it updates.
        """
        in_hbm, num_scalars = pl.BlockSpec(memory_space=pltpu.HBM), 3
        num_dense, num_sums = (sum(x.arrays for x in every) for every in (self.inputs, self.sums))
        first = num_scalars + num_dense + self.num_plain
        plain, updated = given[first - self.num_plain : first], given[first:]
        specs = lambda arrays: [self._numbers(x.shape[2]) for x in arrays]  # noqa: E731
        read = updated if self.has_prior else updated[:num_sums]
        kernel = pl.pallas_call(
            functools.partial(_kernel, call=self),
            out_shape=[shaped_like(x, *given[:num_scalars]) for x in updated],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=num_scalars,
                grid=self._grid(),
                in_specs=[*[in_hbm] * num_dense, *specs(plain), *[in_hbm] * num_sums, *specs(read[num_sums:])],
                out_specs=[*[in_hbm] * num_sums, *specs(updated[num_sums:])],
                scratch_shapes=self._scratch_types(),
            ),
            input_output_aliases={first + i: i for i in range(len(read))},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
                vmem_limit_bytes=VMEM_BYTES,
                disable_bounds_checks=True,
            ),
            cost_estimate=self._cost(),
            name=f"ringjax_{'gradient' if self.is_bwd else 'forward'}_in_place",
            interpret=self.config.interpret,
        )
        return kernel(*given[:first], *read)

    def _grid(self) -> tuple[int, ...]:
        queries, keys = self.config.query_blocks, self.config.key_blocks
        return self.plan.halves, self.plan.programs, *((keys, queries) if self.is_bwd else (queries, keys))

    def _numbers(self, num: int) -> pl.BlockSpec:
        """Returns the spec of `num` numbers per query row, (N, 1, num, n * G)."""

        def index(half: Array, program: Array, outer: Array, inner: Array, *_: Any) -> tuple[Any, ...]:  # noqa: ANN401
            return half * self.plan.programs + program, 0, 0, inner if self.is_bwd else outer

        return pl.BlockSpec((self.plan.tasks, 1, num, self.config.blocks.query), index)

    def _scratch_types(self) -> list[Any]:
        buffers = [pltpu.VMEM(shape, dtype) for shape, dtype in self.buffers()]
        semaphores = [pltpu.SemaphoreType.DMA((INPUT_SLOTS,)) for _ in self.inputs]
        semaphores += [pltpu.SemaphoreType.DMA((SUM_SLOTS,)) for _ in self.sums for _ in ("read", "write")]
        return [*buffers, *semaphores, *(pltpu.VMEM(shape, jnp.float32) for shape in self.scratch())]

    def _cost(self) -> pl.CostEstimate:
        config, plan = self.config, self.plan
        num_tasks, num_rows = config.tasks_per_head, config.num_rows
        pairs = num_tasks * num_rows**2 * config.q_per_kv // (2 if config.is_causal else 1)
        itemsize = self.dtype.itemsize
        sizes = ((self.inputs, itemsize), (self.sums, 8))
        row_bytes = sum(x.arrays * x.width * size for every, size in sizes for x in every)
        multiplies = 5 if self.is_bwd else 2
        moved = num_tasks * num_rows * plan.dim * row_bytes
        return pl.CostEstimate(flops=2 * multiplies * pairs * plan.dim, transcendentals=pairs, bytes_accessed=moved)

    def mapped(self, axes: Sequence[int | None]) -> Callable[..., list[Array]]:
        """Returns the call for arrays with one more first axis, except where `axes` has None.

        Pallas does not support `jax.vmap` of arrays in HBM.
        """
        return functools.partial(self._run_mapped, tuple(axes))

    def _run_mapped(self, axes: tuple[int | None, ...], *given: Array) -> list[Array]:
        size = given[-1].shape[0]  # sums are always mapped
        scalars = [x if axis is None else x[0] for x, axis in zip(given[:3], axes, strict=False)]  # all are equal
        arrays = [
            jnp.broadcast_to(x, (size, *x.shape)) if axis is None else x
            for x, axis in zip(given[3:], axes[3:], strict=True)
        ]
        merged = [x.reshape(-1, *x.shape[2:]) for x in arrays]
        return [x.reshape(size, -1, *x.shape[1:]) for x in self.for_batch(size)(*scalars, *merged)]


def _run(
    call: _Call,
    operands: Operands,
    arrays: Sequence[Array],
    *,
    plain: Sequence[Array],
    sums: Sequence[Array],
    numbers: Sequence[Array],
) -> tuple[list[Array], list[Array]]:
    """Runs a kernel on dense arrays and sums, and on numbers per row, and returns the updated sums and numbers."""
    rate = operands.rows.rate
    view = lambda x: x.reshape(x.shape[0], x.shape[1] // rate, rate, -1, x.shape[-1])  # noqa: E731
    ranges = pair_ranges(operands, call.config)[0][:1]
    if call.is_bwd:
        ranges = call.config.q_block_ranges(ranges)
    scalars = jnp.asarray(operands.rows.offsets), jnp.zeros((3,), jnp.int32), ranges
    given = *scalars, *map(view, arrays), *plain, *map(view, sums), *numbers
    num_results = len(sums) + len(numbers)
    found = call(*given) if call.config.interpret else on_its_platform("tpu", call, *given, sums=num_results)
    return [x.reshape(y.shape) for x, y in zip(found, sums, strict=False)], list(found[len(sums) :])


def _are_pairs_alike(offsets: Any) -> bool:  # noqa: ANN401
    """Returns whether neighboring heads are known to select the same rows."""
    return isinstance(offsets, np.ndarray) and np.array_equal(offsets[::2], offsets[1::2])


def _kernel(offsets: Ref, chunks: Ref, ranges: Ref, *refs: Ref, call: _Call) -> None:
    """Runs the kernel for packed rows on rows that were copied to VMEM."""
    rest = iter(refs)
    take = lambda num: [next(rest) for _ in range(num)]  # noqa: E731
    num_blocks = 0 if call.is_bwd else 1
    arrays = [take(copied.arrays) for copied in call.inputs]
    plain = take(call.num_plain)
    given = [take(copied.arrays) for copied in call.sums]
    given_blocks = take(num_blocks if call.has_prior else 0)
    updated = [take(copied.arrays) for copied in call.sums]
    updated_blocks = take(num_blocks)
    buffers = [take(2 if copied.is_narrow else 1) for copied in call.inputs]
    sum_buffers = take(len(call.sums))
    input_semaphores, sum_semaphores = take(len(call.inputs)), [take(2) for _ in call.sums]
    scratch = list(rest)

    copier = functools.partial(Copier, call.plan, offsets=offsets)
    inputs = [
        Input(copier(copied, buffer=buffer[0]), dense, buffer[1] if copied.is_narrow else None, semaphores)
        for copied, buffer, dense, semaphores in zip(call.inputs, buffers, arrays, input_semaphores, strict=True)
    ]
    sums = [
        Sums(copier(copied, buffer=buffer), old, new, (semaphores[0], semaphores[1]))
        for copied, buffer, old, new, semaphores in zip(
            call.sums, sum_buffers, given, updated, sum_semaphores, strict=True
        )
    ]
    program, outer, inner = (pl.program_id(i) for i in (1, 2, 3))
    query_block, key_block = (inner, outer) if call.is_bwd else (outer, inner)

    # One step needs no condition, and the compiler schedules all of it together; XLA:CPU refuses that for bfloat16.
    has_one_step = call.config.query_blocks == call.config.key_blocks == 1 and not call.config.interpret
    when = lambda condition, run: run() if has_one_step else pl.when(condition)(run)  # noqa: E731

    def start() -> None:
        begin(program, call.plan, inputs, sums, has_prior=call.has_prior)
        for copies in inputs:
            copies.unpack(program)

    when((outer == 0) & (inner == 0), start)

    input_views, sum_views = (
        [x.view(program, query_block if x.copier.copied.is_query else key_block) for x in every]
        for every in (inputs, sums)
    )
    body = gradient_kernel if call.is_bwd else forward_kernel
    body(
        chunks,
        ranges,
        *input_views,
        *plain,
        *((*sum_views, *given_blocks) if call.has_prior else ()),
        *sum_views,
        *updated_blocks,
        *scratch,
        config=call.config,
        tiling=call.tiling,
        has_prior=call.has_prior,
        first_axis=1,
    )

    def end() -> None:
        for copies in sums:
            copies.end(program)

    when((outer == pl.num_programs(2) - 1) & (inner == pl.num_programs(3) - 1), end)
