"""Copies of the selected rows of dense arrays between HBM and VMEM, by the kernels in `in_place`.

A dense array (B, T, heads, H) is viewed as (B, T / r, r, heads, H), which changes nothing in memory because the last
two axes remain. The rows of a task are then a strided copy, ``[b, start : start + n, offset, head]``. One 32-bit head
is one row of a memory tile, so it is copied exactly. A 32-bit word holds two 16-bit heads: both are copied, and the
kernel selects one. If the two select the same rows, they share the copy.

While a program is computed, the inputs of the next one are copied, and the results of the previous one are written:

    program s     inputs (2 slots)      sums (3 slots)
    first step    wait for s            wait for s; wait until s - 2 is written
                  start s + 1           start s + 1
    last step                           start to write s

Legend: ``B`` batch, ``T`` positions, ``H`` head dim, ``r`` rate, ``n`` rows of a task.
"""

from __future__ import annotations

import dataclasses
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


class Group(NamedTuple):
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
        """32-bit words of a row, per lane."""
        return ceil_div(self.width, 2) if self.is_narrow else self.width


@dataclasses.dataclass(frozen=True)
class Plan:
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

    def rows(self, offsets: Ref, task: Array) -> tuple[Any, ...]:
        """Returns the index of the rows of a task in a dense view."""
        head, chunk = remainder(task, self.heads), quotient(task, self.heads)
        entry, nth = quotient(chunk, self.chunks), remainder(chunk, self.chunks)
        return entry, pl.ds(self.first_row + nth * self.num_rows, self.num_rows), offsets[head]

    def period(self, group: Group) -> int:
        """Returns for how many programs a copy is used."""
        return 2 if self.is_shared and group.is_pair and self.tasks == 1 else 1

    def copies(self, group: Group) -> int:
        """Returns the copies of an array in a slot."""
        return self.tasks // 2 if self.is_shared and group.is_pair and self.tasks > 1 else self.tasks

    def padded(self, group: Group) -> int:
        """Returns the rows of a task in whole blocks."""
        return ceil_div(self.num_rows * group.width, group.block) * group.block

    def view(self, group: Group, buffer: Ref, block: Array, *slot: Array) -> Ref:
        """Returns the rows of a block of all tasks, as the kernels expect them."""
        first = pl.multiple_of(block * group.block, group.block) if self.padded(group) > group.block else 0
        arrays = 0 if group.arrays == 1 else slice(None)
        return buffer.at[*slot, arrays, :, :, pl.ds(first, group.block)]


class Copier:
    """Copies the rows of one group between dense arrays and a buffer (slots, arrays, copies, 1, rows, H)."""

    def __init__(self, plan: Plan, group: Group, offsets: Ref, buffer: Ref) -> None:
        self.plan, self.group, self.offsets, self.buffer = plan, group, offsets, buffer
        self.period = plan.period(group)
        self.first_program = pl.program_id(0) * plan.programs

    def each(
        self, arrays: Sequence[Ref], unit: Array, slot: Array, *, is_write: bool = False
    ) -> Iterator[tuple[Ref, Ref]]:
        """Yields the slices in HBM and in VMEM of all copies of a unit of programs, in the same shape."""
        plan, group = self.plan, self.group
        first_task = (self.first_program + unit * self.period) * plan.tasks
        num = plan.copies(group)
        for copy in range(num):
            task = first_task + copy * (plan.tasks // num)
            head = remainder(task, plan.heads)
            which: Any = quotient(head, 2) if group.is_pair else head
            if group.words > 1:
                which = pl.ds(head * group.words, group.words)
            for i, array in enumerate(arrays):
                words = array.bitcast(jnp.uint32) if group.is_narrow else array
                in_hbm = words.at[*plan.rows(self.offsets, task), which]
                in_vmem = self.buffer.at[slot, i, copy, 0, pl.ds(0, plan.num_rows * group.words)]
                if group.words == 1:
                    yield in_hbm, in_vmem
                elif plan.is_interpreted and not is_write:  # JAX 0.10 does not interpret targets that are reshaped
                    yield in_hbm.reshape(plan.num_rows * group.words, plan.dim), in_vmem
                else:
                    yield in_hbm, in_vmem.reshape(plan.num_rows, group.words, plan.dim)


class Input:
    """Copies rows to VMEM ahead of time."""

    def __init__(self, copier: Copier, arrays: Sequence[Ref], ready: Ref | None, semaphores: Ref) -> None:
        self.copier, self.arrays, self.ready, self.semaphores = copier, arrays, ready, semaphores

    def _each(self, unit: Array) -> Iterator[Any]:
        slot = remainder(unit, INPUT_SLOTS)
        for source, target in self.copier.each(self.arrays, unit, slot):
            yield pltpu.make_async_copy(source, target, self.semaphores.at[slot])

    def _start(self, unit: Array) -> None:
        for copy in self._each(unit):
            copy.start()

    def begin(self, program: Array) -> None:
        """Waits for the rows of a program and starts to copy those of the next one."""
        period = self.copier.period
        unit = quotient(program, period)

        @pl.when(remainder(program, period) == 0)
        def _() -> None:
            pl.when(program == 0)(lambda: self._start(unit))
            for copy in self._each(unit):
                copy.wait()
            pl.when(program + period < self.copier.plan.programs)(lambda: self._start(unit + 1))

        if self.ready is not None:
            self._unpack(program, remainder(unit, INPUT_SLOTS))

    def view(self, program: Array, block: Array) -> Ref:
        """Returns the rows of a block."""
        plan, group = self.copier.plan, self.copier.group
        if self.ready is not None:
            return plan.view(group, self.ready, block)
        return plan.view(group, self.copier.buffer, block, remainder(program, INPUT_SLOTS))

    def _unpack(self, program: Array, slot: Array) -> None:
        """Converts words to 16-bit rows."""
        plan, group = self.copier.plan, self.copier.group
        num_words = plan.num_rows * group.words
        size = math.gcd(num_words, _UNPACKED_ROWS)
        first_task = (self.copier.first_program + program) * plan.tasks

        def unpack(i: int, task: int, at: Array | int) -> None:
            copy = task * plan.copies(group) // plan.tasks
            words = self.copier.buffer[slot, i, copy, 0, pl.ds(at * size, size)]
            assert self.ready is not None
            if not group.is_pair:
                self.ready[i, task, 0, pl.ds(at * 2 * size, 2 * size)] = pltpu.bitcast(words, self.ready.dtype)
                return
            shift = 16 - 16 * remainder(first_task + task, 2)  # the even head is the lower half
            upper = jax.lax.shift_left(words, jnp.broadcast_to(shift, words.shape).astype(words.dtype))
            upper = jax.lax.bitcast_convert_type(upper & jnp.uint32(0xFFFF0000), jnp.float32)
            self.ready[i, task, 0, pl.ds(at * size, size)] = upper.astype(self.ready.dtype)

        for i in range(group.arrays):
            for task in range(plan.tasks):
                if num_words == size:
                    unpack(i, task, 0)
                else:
                    jax.lax.fori_loop(0, num_words // size, lambda at, _, i=i, t=task: unpack(i, t, at), None)


class Sums:
    """Copies rows of sums to VMEM ahead of time, and the updated rows back."""

    def __init__(
        self,
        copier: Copier,
        given: Sequence[Ref],
        updated: Sequence[Ref],
        semaphores: tuple[Ref, Ref],
        *,
        has_prior: bool,
    ) -> None:
        self.copier, self.given, self.updated, self.has_prior = copier, given, updated, has_prior
        self.read_semaphores, self.write_semaphores = semaphores

    def _reads(self, program: Array) -> Iterator[Any]:
        slot = remainder(program, SUM_SLOTS)
        for source, target in self.copier.each(self.given, program, slot):
            yield pltpu.make_async_copy(source, target, self.read_semaphores.at[slot])

    def _writes(self, program: Array) -> Iterator[Any]:
        slot = remainder(program, SUM_SLOTS)
        for target, source in self.copier.each(self.updated, program, slot, is_write=True):
            yield pltpu.make_async_copy(source, target, self.write_semaphores.at[slot])

    def _start_reads(self, program: Array) -> None:
        for copy in self._reads(program):
            copy.start()

    def _wait_for_writes(self, program: Array) -> None:
        for copy in self._writes(program):
            copy.wait()

    def begin(self, program: Array) -> None:
        """Waits for the rows of a program and starts to copy those of the next one."""
        if self.has_prior:
            pl.when(program == 0)(lambda: self._start_reads(program))
            for copy in self._reads(program):
                copy.wait()
        pl.when(program >= 2)(lambda: self._wait_for_writes(program - 2))
        if self.has_prior:
            pl.when(program + 1 < self.copier.plan.programs)(lambda: self._start_reads(program + 1))

    def end(self, program: Array) -> None:
        """Starts to write the rows of a program; after the last one, waits until all are written."""
        for copy in self._writes(program):
            copy.start()

        @pl.when(program == self.copier.plan.programs - 1)
        def _() -> None:
            pl.when(program >= 1)(lambda: self._wait_for_writes(program - 1))
            self._wait_for_writes(program)

    def view(self, program: Array, block: Array) -> Ref:
        """Returns the rows of a block."""
        slot = remainder(program, SUM_SLOTS)
        return self.copier.plan.view(self.copier.group, self.copier.buffer, block, slot)
