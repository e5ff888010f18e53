"""Reports the HBM bytes of dilated local branches on TPU, and fails if rows that are read in place move too many.

For every case, one branch is compiled for one device, on top of the results of an earlier branch, which it updates:
reading rows in place, and packing them first. Bytes outside of kernels are those that the compiler accounts for, which
include arrays that it keeps in VMEM: in place, those are numbers per row. Those of the kernels in place are the sizes
of their DMAs, which must be in the compiler's dump, times how often each runs. Those of kernels for packed rows are
counted from their grids. The minimum is every selected row and every earlier result read once, and every result
written once.

    python benchmarks/tpu_bytes.py              # `make aot-tpu` also installs the compiler
    python benchmarks/tpu_bytes.py --target v6e
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import rich
from rich.console import Console
from rich.table import Table
from tpu_costs import TOPOLOGIES, Compiler
from tpu_schedule import DUMP_FLAGS, read_kernels

from ringjax._src.aot.compile import ENVIRONMENT

LENGTH, HEADS, HEAD_DIM = 65536, 8, 128
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Case:
    """A branch and the most that its kernels may move, relative to the minimum."""

    rate: int
    rows: int  # of a segment
    dtype: str
    offsets: str
    forward_limit: float
    gradient_limit: float


TO_PACKED_LIMIT = 0.25

# A 32-bit word holds two bfloat16 heads. If they select other rows, inputs are read twice.
CASES = [
    Case(4, 4096, "bfloat16", "mod", 1.5, 1.3),
    Case(16, 4096, "bfloat16", "mod", 1.5, 1.3),
    Case(4, 4096, "bfloat16", "none", 1.05, 1.05),
    Case(4, 2048, "float32", "mod", 1.05, 1.05),
    Case(16, 2048, "float32", "mod", 1.05, 1.05),
    Case(1, 2048, "bfloat16", "mod", 1.05, 1.05),
]


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes of one pass of a case."""

    case: Case
    is_bwd: bool
    kernel: int  # of the kernel in place
    outside: int  # of the program outside of the kernel
    packed_kernel: int
    packed_outside: int
    least: int

    @property
    def ratio(self) -> float:
        """Bytes of the kernel over the minimum."""
        return self.kernel / self.least

    @property
    def to_packed(self) -> float:
        """Bytes of the whole program over those with packed rows."""
        return (self.kernel + self.outside) / (self.packed_kernel + self.packed_outside)

    @property
    def limit(self) -> float:
        """The largest permitted ratio."""
        return self.case.gradient_limit if self.is_bwd else self.case.forward_limit


# ------------------------------------------------------------------------------------------- in a process per target


def measure(compiler: Compiler) -> Iterator[Moved]:
    """Yields the bytes of all cases."""
    for case in CASES:
        for is_bwd in (False, True):
            yield _measure(compiler, case, is_bwd=is_bwd)


def _measure(compiler: Compiler, case: Case, *, is_bwd: bool) -> Moved:
    import jax  # noqa: PLC0415
    from kernel_costs import kernel_costs  # noqa: PLC0415

    from ringjax._src.kernels.tpu import calls, in_place  # noqa: PLC0415

    operands, config = _operands(compiler, case)
    dense = (operands.query, *operands.kv)
    wide, numbers = [compiler.array(x.shape, "float32") for x in dense], compiler.array((HEADS, LENGTH), "float32")
    sums = tuple(wide) if is_bwd else (wide[0], numbers)
    given = (operands.query, numbers, numbers) if is_bwd else ()
    outside = []
    for is_packed in (True, False):
        for path in compiler.folder.iterdir():
            path.unlink()
        program = functools.partial(_attend, operands, config, is_bwd=is_bwd, is_packed=is_packed)
        compiled = jax.jit(program, donate_argnums=0).lower(sums, given, *dense).compile()
        estimated = sum(map(int, re.findall(r'"bytes_accessed":"(\d+)"', compiled.as_text())))
        outside.append(int(compiled.cost_analysis()["bytes accessed"]) - estimated)
    call = in_place._Call(operands, calls._kernel_config(operands, config, is_bwd=is_bwd), is_bwd=is_bwd)
    copied = {x: call.plan.num_rows * x.words * HEAD_DIM * 4 for x in (*call.inputs, *call.sums)}  # bytes of a DMA
    (schedule,) = read_kernels(compiler.folder, "in_place")
    if missing := set(copied.values()) - {dma.bytes for dma in schedule.dmas}:
        raise RuntimeError(f"The compiler dumped no DMAs of {missing} bytes.")
    tasks = LENGTH // case.rate // case.rows * HEADS
    selected = tasks * case.rows
    sharing = 2 if call.plan.is_shared else 1
    reads = sum(tasks // (sharing if x.is_pair else 1) * x.arrays * copied[x] for x in call.inputs)
    updates = 2 * sum(tasks * x.arrays * copied[x] for x in call.sums)
    of_numbers = 2 * selected * 4
    itemsize = dense[0].dtype.itemsize
    least = selected * HEAD_DIM * ((4 if is_bwd else 3) * itemsize + (3 if is_bwd else 1) * 8) + of_numbers
    costs = kernel_costs("tpu", rows=case.rows, head_dim=HEAD_DIM, tasks=tasks, dtype=case.dtype, is_causal=True)
    unread = selected * HEAD_DIM * 4 * (3 if is_bwd else 1)  # the packed sums of a branch start empty
    packed = costs[is_bwd].moved_bytes - unread
    return Moved(case, is_bwd, reads + updates + of_numbers, outside[1], packed, outside[0], least)


def _operands(compiler: Compiler, case: Case) -> tuple[Any, Any]:
    """Returns the types of the operands of a branch, and its options."""
    from ringjax import DilationPattern  # noqa: PLC0415
    from ringjax._src.kernels.interface import AttendConfig, Operands  # noqa: PLC0415
    from ringjax._src.rows.selection import RowSelection, frozen  # noqa: PLC0415
    from ringjax._src.rows.sizes import xla_block_sizes  # noqa: PLC0415

    length = case.rate * case.rows
    pattern = DilationPattern((length,), (case.rate,), offsets=case.offsets)
    rows = RowSelection(
        branch=0,
        segment_length=length,
        rate=case.rate,
        first=0,
        chunks=LENGTH // length,
        chunk_length=length,
        num_rows=case.rows,
        is_aligned=True,
        heads=frozen(range(HEADS)),
        offsets=frozen(pattern.branches(HEADS)[0].offsets),
        counts=frozen([case.rows] * HEADS),
        blocks=xla_block_sizes(case.rows, 1),
        is_ragged=False,
        has_empty_heads=False,
    )
    query = compiler.array((1, LENGTH, HEADS, 1, HEAD_DIM), case.dtype)
    kv = compiler.array((1, LENGTH, HEADS, HEAD_DIM), case.dtype)
    return Operands(query, (kv, kv), rows), AttendConfig(is_causal=True, scale=HEAD_DIM**-0.5)


def _attend(
    operands: Any,
    config: Any,
    sums: tuple[Any, ...],
    given: tuple[Any, ...],
    *dense: Any,
    is_bwd: bool,
    is_packed: bool,
) -> Any:
    """Runs one pass of a branch on dense arrays."""
    from ringjax._src.kernels.interface import Grads, Residuals  # noqa: PLC0415
    from ringjax._src.kernels.packing import attend_bwd_packed, attend_packed  # noqa: PLC0415
    from ringjax._src.kernels.tpu import calls  # noqa: PLC0415
    from ringjax._src.online_softmax import PartialSoftmax  # noqa: PLC0415

    operands = operands._replace(query=dense[0], kv=dense[1:])
    by_position = lambda x: x.T.reshape(1, LENGTH, HEADS, 1)  # noqa: E731 - as arguments, numbers would be padded
    if is_bwd:
        given = (given[0], *map(by_position, given[1:]))
        attend = functools.partial(attend_bwd_packed, calls.attend_bwd) if is_packed else calls.attend_bwd
        return attend(Grads(sums[0], sums[1:]), operands, Residuals(*given), config)
    attend = functools.partial(attend_packed, calls.attend) if is_packed else calls.attend
    out, lse = attend(PartialSoftmax(sums[0], by_position(sums[1])), operands, config)
    return out, lse.reshape(LENGTH, HEADS).T


# ---------------------------------------------------------------------------------------------------------- the report


def table(generation: str, found: list[Moved]) -> Table:
    """Returns a table with one row per pass."""
    shown = Table(title=f"{generation}: MiB", box=rich.box.SIMPLE_HEAD)
    for title in ("rate", "rows", "dtype", "offsets", "pass"):
        shown.add_column(title)
    for title in ("minimum", "kernel", "outside", "ratio", "limit", "packed: kernel", "outside", "in place / packed"):
        shown.add_column(title, justify="right")
    for x in found:
        names = x.case.rate, x.case.rows, x.case.dtype, x.case.offsets, "gradient" if x.is_bwd else "forward"
        sizes = [f"{size / MIB:.0f}" for size in (x.least, x.kernel, x.outside, x.packed_kernel, x.packed_outside)]
        ratios = f"{x.ratio:.2f}", f"{x.limit:.2f}"
        shown.add_row(*map(str, names), *sizes[:3], *ratios, *sizes[3:], f"{x.to_packed:.2f}")
    return shown


def run(generation: str) -> list[Moved]:
    """Measures a generation in a new process, because the compiler reads its flags once."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"LIBTPU_INIT_ARGS": DUMP_FLAGS.format(folder=folder)}
        command = [sys.executable, __file__, "--worker", folder, "--target", generation]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | ENVIRONMENT | flags
        )
    values = map(json.loads, done.stdout.splitlines())
    return [Moved(**{**x, "case": Case(**x["case"])}) for x in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TOPOLOGIES, default="v5e")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        for moved in measure(Compiler(options.target, options.worker)):
            print(json.dumps(dataclasses.asdict(moved)), flush=True)
        return
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(", ".join(f"{x} {importlib.metadata.version(x)}" for x in ("jax", "libtpu")), highlight=False)
    found = run(options.target)
    console.print(table(options.target, found))
    if any(x.ratio > x.limit or x.to_packed > TO_PACKED_LIMIT for x in found):
        console.print("FAILED: a ratio exceeds its limit.")
        sys.exit(1)
    console.print("All checks passed.")


if __name__ == "__main__":
    main()
