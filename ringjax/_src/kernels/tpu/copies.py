"""Copies of the selected rows of dense arrays between HBM and VMEM, by the kernels in `in_place`.

A dense array (B, T, heads, H) is viewed as (B, T / r, r, heads, H), which changes nothing in memory because the last
two axes remain. The rows of a task are then a strided copy, ``[b, start : start + n, offset, head]``. One 32-bit head
is one row of a memory tile, so it is copied exactly. A 32-bit word holds two 16-bit heads: both are copied, and the
kernel selects one. If the two select the same rows, they share the copy.

While a program is computed, the inputs of the next one are copied, and the results of the previous one are written:

    program s     inputs (2 slots)      sums (3 slots)
    first step    start s + 1           wait until s - 2 is written; start s + 1
                  wait for s            wait for s
    last step                           start to write s

Legend: ``B`` batch, ``T`` positions, ``H`` head dim, ``r`` rate, ``n`` rows of a task.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringjax._src.indexing import ceil_div, quotient, remainder

INPUT_SLOTS, SUM_SLOTS = 2, 3
_UNPACKED_ROWS = 512  # at a time

Ref = Any


class CopiedArrays(NamedTuple):
    """Dense arrays whose rows are copied to one buffer: queries, or keys and values."""

    arrays: int
    width: int  # heads of a task
    block: int  # rows of a block
    is_query: bool
    is_narrow: bool = False  # whether heads have 16 bits

    @property
    def is_pair(self) -> bool:
        """Whether a copy holds the heads of two tasks."""
        return self.is_narrow and self.width == 1

    @property
    def words(self) -> int:
        """32-bit words of a position, per lane."""
        return ceil_div(self.width, 2) if self.is_narrow else self.width


@dataclasses.dataclass(frozen=True)
class CopyPlan:
    """Which rows every grid step processes."""

    heads: int
    chunks: int  # of a batch entry
    first_row: int  # of the first chunk
    num_rows: int  # of a task
    dim: int
    tasks: int  # of a program
    is_shared: bool  # whether the two heads of a pair select the same rows
    programs: int  # of each half
    halves: int  # the programs are divided in two for two cores
    is_interpreted: bool = False

    def rows(self, task: Array) -> tuple[Any, ...]:
        """Returns batch entry and rows of a task in a dense view."""
        chunk = quotient(task, self.heads)
        entry, nth = quotient(chunk, self.chunks), remainder(chunk, self.chunks)
        return entry, pl.ds(self.first_row + nth * self.num_rows, self.num_rows)

    def period(self, copied: CopiedArrays) -> int:
        """Returns for how many programs a copy is used."""
        return 2 if self.is_shared and copied.is_pair and self.tasks == 1 else 1

    def copies(self, copied: CopiedArrays) -> int:
        """Returns the copies of an array in a slot."""
        return self.tasks // 2 if self.is_shared and copied.is_pair and self.tasks > 1 else self.tasks

    def padded(self, copied: CopiedArrays) -> int:
        """Returns the rows of a task in whole blocks."""
        return ceil_div(self.num_rows * copied.width, copied.block) * copied.block

    def view(self, copied: CopiedArrays, buffer: Ref, block: Array, *slot: Array) -> Ref:
        """Returns the rows of a block of all tasks, as the kernels expect them."""
        first = pl.multiple_of(block * copied.block, copied.block) if self.padded(copied) > copied.block else 0
        arrays = 0 if copied.arrays == 1 else slice(None)
        return buffer.at[*slot, arrays, :, :, pl.ds(first, copied.block)]


class Copier:
    """Copies rows between dense arrays and a buffer (slots, arrays, copies, 1, rows, H)."""

    def __init__(self, plan: CopyPlan, copied: CopiedArrays, offsets: Ref, buffer: Ref) -> None:
        self.plan, self.copied, self.offsets, self.buffer = plan, copied, offsets, buffer
        self.period = plan.period(copied)
        self.first_program = pl.program_id(0) * plan.programs

    def each(
        self, arrays: Sequence[Ref], unit: Array, slot: Array, *, is_write: bool = False
    ) -> Iterator[tuple[Ref, Ref]]:
        """Yields the slices in HBM and in VMEM of all copies of a unit of programs, in the same shape."""
        plan, copied = self.plan, self.copied
        first_task = (self.first_program + unit * self.period) * plan.tasks
        num, num_rows = plan.copies(copied), plan.num_rows
        for copy in range(num):
            task = first_task + copy * (plan.tasks // num)
            head = remainder(task, plan.heads)
            which: Any = quotient(head, 2) if copied.is_pair else head
            if copied.words > 1:
                which = pl.ds(head * copied.words, copied.words)
            at = (*plan.rows(task), self.offsets[head], which)
            for i, array in enumerate(arrays):
                in_hbm = (array.bitcast(jnp.uint32) if copied.is_narrow else array).at[at]
                in_vmem = self.buffer.at[slot, i, copy, 0, pl.ds(0, num_rows * copied.words)]
                if copied.words == 1:
                    yield in_hbm, in_vmem
                elif plan.is_interpreted and not is_write:  # JAX 0.10 does not interpret targets that are reshaped
                    yield in_hbm.reshape(num_rows * copied.words, plan.dim), in_vmem
                else:
                    yield in_hbm, in_vmem.reshape(num_rows, copied.words, plan.dim)


class Input:
    """Copies rows to VMEM ahead of time."""

    def __init__(self, copier: Copier, arrays: Sequence[Ref], ready: Ref | None, semaphores: Ref) -> None:
        self.copier, self.arrays, self.ready, self.semaphores = copier, arrays, ready, semaphores

    def _each(self, unit: Array) -> Iterator[Any]:
        slot = remainder(unit, INPUT_SLOTS)
        for source, target in self.copier.each(self.arrays, unit, slot):
            yield pltpu.make_async_copy(source, target, self.semaphores.at[slot])

    def start(self, unit: Array) -> None:
        """Starts to copy the rows of a unit."""
        for copy in self._each(unit):
            copy.start()

    def wait(self, unit: Array) -> None:
        """Waits for the rows of a unit."""
        for copy in self._each(unit):
            copy.wait()

    def view(self, program: Array, block: Array) -> Ref:
        """Returns the rows of a block."""
        plan, copied = self.copier.plan, self.copier.copied
        if self.ready is not None:
            return plan.view(copied, self.ready, block)
        return plan.view(copied, self.copier.buffer, block, remainder(program, INPUT_SLOTS))

    def unpack(self, program: Array) -> None:
        """Converts words to 16-bit rows, if they are words."""
        if self.ready is None:
            return
        plan, copied = self.copier.plan, self.copier.copied
        num_rows = plan.num_rows * copied.width
        size = math.gcd(num_rows, _UNPACKED_ROWS)
        for i, task in itertools.product(range(copied.arrays), range(plan.tasks)):
            unpack = functools.partial(self._unpack, program, i, task, size)
            if num_rows == size:
                unpack(0, None)
            else:
                jax.lax.fori_loop(0, num_rows // size, unpack, None)

    def _unpack(self, program: Array, i: int, task: int, size: int, at: Array | int, _: None) -> None:
        """Unpacks `size` rows of one array and task."""
        plan, copied = self.copier.plan, self.copier.copied
        copy = task * plan.copies(copied) // plan.tasks
        slot = remainder(quotient(program, self.copier.period), INPUT_SLOTS)
        read = lambda *rows: self.copier.buffer.at[slot, i, copy, 0][pl.ds(*rows)]  # noqa: E731
        if copied.is_pair:
            is_odd_head = remainder((self.copier.first_program + program) * plan.tasks + task, 2)
            which = task % 2 if plan.tasks % 2 == 0 else is_odd_head
            even, odd = (read(at * size + first, size // 2, 2) for first in (0, 1))
            words = _select_halves(even, odd, which)
        else:
            words = read(at * (size // 2), size // 2)
        assert self.ready is not None
        self.ready[i, task, 0, pl.ds(at * size, size)] = pltpu.bitcast(words, self.ready.dtype)


def _select_halves(even: Array, odd: Array, which: Array | int) -> Array:
    """Returns words of the lower halves of `even` and, above them, of `odd`, or of the upper halves if `which` is 1."""
    lower, upper = jnp.uint32(0xFFFF), jnp.uint32(0xFFFF0000)
    if isinstance(which, int):
        return (even >> 16) | (odd & upper) if which else (even & lower) | (odd << 16)
    shift = jnp.broadcast_to(16 * which, even.shape).astype(even.dtype)
    return (jax.lax.shift_right_logical(even, shift) & lower) | (jax.lax.shift_left(odd, 16 - shift) & upper)


class Sums:
    """Copies rows of sums to VMEM ahead of time, and the updated rows back."""

    def __init__(
        self,
        copier: Copier,
        given: Sequence[Ref],
        updated: Sequence[Ref],
        semaphores: tuple[Ref, Ref],
    ) -> None:
        self.copier, self.given, self.updated = copier, given, updated
        self.read_semaphores, self.write_semaphores = semaphores

    def _reads(self, program: Array) -> Iterator[Any]:
        slot = remainder(program, SUM_SLOTS)
        for source, target in self.copier.each(self.given, program, slot):
            yield pltpu.make_async_copy(source, target, self.read_semaphores.at[slot])

    def _writes(self, program: Array) -> Iterator[Any]:
        slot = remainder(program, SUM_SLOTS)
        for target, source in self.copier.each(self.updated, program, slot, is_write=True):
            yield pltpu.make_async_copy(source, target, self.write_semaphores.at[slot])

    def start(self, program: Array) -> None:
        """Starts to copy the rows of a program."""
        for copy in self._reads(program):
            copy.start()

    def wait(self, program: Array) -> None:
        """Waits for the rows of a program."""
        for copy in self._reads(program):
            copy.wait()

    def wait_for_writes(self, program: Array) -> None:
        """Waits until the rows of a program are written."""
        for copy in self._writes(program):
            copy.wait()

    def end(self, program: Array) -> None:
        """Starts to write the rows of a program; after the last one, waits until all are written."""
        for copy in self._writes(program):
            copy.start()

        @pl.when(program == self.copier.plan.programs - 1)
        def _() -> None:
            pl.when(program >= 1)(lambda: self.wait_for_writes(program - 1))
            self.wait_for_writes(program)

    def view(self, program: Array, block: Array) -> Ref:
        """Returns the rows of a block."""
        slot = remainder(program, SUM_SLOTS)
        return self.copier.plan.view(self.copier.copied, self.copier.buffer, block, slot)


def begin(program: Array, plan: CopyPlan, inputs: Sequence[Input], sums: Sequence[Sums], *, has_prior: bool) -> None:
    """Starts to copy the rows of the next program, and waits for those of this one."""

    @pl.when(program >= 2)
    def _() -> None:
        for copies in sums:
            copies.wait_for_writes(program - 2)

    every: list[Input | Sums] = [*inputs, *(sums if has_prior else ())]
    for period in sorted({x.copier.period for x in every}):
        begin_unit = functools.partial(_begin_unit, program, plan, [x for x in every if x.copier.period == period])
        if period == 1:
            begin_unit()
        else:
            pl.when(remainder(program, period) == 0)(begin_unit)


def _begin_unit(program: Array, plan: CopyPlan, every: Sequence[Input | Sums]) -> None:
    period = every[0].copier.period
    unit, num = quotient(program, period), plan.programs // period

    def start(nth: Array, _: None) -> None:
        for copies in every:
            copies.start(nth)

    # the next unit and, in the first program, this one; a loop has the code once
    jax.lax.fori_loop(jnp.where(unit == 0, 0, unit + 1), jnp.minimum(unit + 2, num), start, None)
    for copies in every:
        copies.wait(unit)
