"""Reports the static cost of the TPU kernels beside jax's splash attention, and fails if a ratio exceeds its limit.

For every generation, both are compiled for the same shapes, without a TPU, and the compiler's schedules are compared:
cycles of one block step for long rows, and cycles per task for short rows, where splash may choose among block sizes.
Waiting for memory is not included.

    python benchmarks/tpu_costs.py                      # `make aot-tpu` also installs the compiler
    python benchmarks/tpu_costs.py --target v6e --json costs.json
    python benchmarks/tpu_costs.py --target v6e --long --broken broadcast   # a worse kernel: a check must fail
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import rich
from rich.console import Console
from rich.table import Table
from tpu_schedule import DUMP_FLAGS, KernelSchedule, read_kernels

from ringjax._src.aot.compile import ENVIRONMENT

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
HEAD_DIM = 128
TILE = 128 * 128  # pairs

# Limits of ringjax / splash, 2 to 5% above the ratios with jax 0.10.2 and libtpu 0.0.42.1; with jax 0.12.0 and libtpu
# 0.0.50.1, the forward ratios are 0.86 on v5e and v5p.
STEP_LIMITS = {
    "v5e": {"forward": 0.88, "gradient": 1.01},
    "v5p": {"forward": 0.88, "gradient": 1.01},
    "v6e": {"forward": 0.82, "gradient": 0.88},
}
# The same of cycles per useful tile with short rows, to splash with its best blocks.
CAUSAL_LIMIT = 1 / 1.1
FULL_LIMITS = {512: 1.0, 1024: 1.0, 2048: 1.02}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows per task, tasks, mask, and rows of square blocks."""

    rows: int
    tasks: int
    is_causal: bool
    block: int

    @property
    def blocks(self) -> int:
        """Number of query blocks, and of key blocks, of a task."""
        return self.rows // self.block

    @property
    def useful_tiles(self) -> float:
        """Attended pairs of a task in tiles of 128 x 128."""
        pairs = self.rows * (self.rows + 1) // 2 if self.is_causal else self.rows**2
        return pairs / TILE


LONG = Shape(rows=8192, tasks=8, is_causal=True, block=1024)
SHORT = [
    Shape(rows, 32768 // rows, is_causal, min(rows, 1024)) for rows in (512, 1024, 2048) for is_causal in (True, False)
]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cycles of one kernel.

    Attributes:
        owner: ``"ringjax"`` or ``"splash"``.
        kernel: ``"forward"``, ``"gradient"`` (of all inputs), ``"query_gradient"`` or ``"key_gradient"``.
        shape: The rows.
        query_block: Query rows of a block.
        key_block: Key rows of a block.
        compute_block: Key rows that splash computes at a time.
        tasks: Tasks of a grid step.
        plain: Cycles of a step without a mask.
        diagonal: Cycles of a step on the diagonal, or of a step without a mask if there is only one kind.
        edges: Cycles at begin and end of an outer block.
        overhead: Other cycles of a grid step.
        used: Share of used slots in a step without a mask, by kind of unit.
    """

    owner: str
    kernel: str
    shape: Shape
    query_block: int
    key_block: int
    compute_block: int
    tasks: int
    plain: int
    diagonal: int
    edges: int
    overhead: int
    used: dict[str, float]

    @property
    def per_task(self) -> float:
        """Cycles of a task: steps, begins and ends, and the overhead of all grid steps."""
        queries, keys = self.shape.rows // self.query_block, self.shape.rows // self.key_block
        diagonal, plain = 0, queries * keys
        if self.shape.is_causal:
            ends = [math.ceil((i + 1) * self.query_block / self.key_block) for i in range(queries)]
            diagonal = queries
            plain = sum(ends) - diagonal
        outer = keys if "gradient" in self.kernel else queries
        steps = diagonal * self.diagonal + plain * self.plain
        return (steps + outer * self.edges + queries * keys * self.overhead) / self.tasks

    @property
    def per_tile(self) -> float:
        """Cycles per useful tile."""
        return self.per_task / self.shape.useful_tiles


def _cost(
    schedule: KernelSchedule, owner: str, kernel: str, shape: Shape, blocks: tuple[int, int, int], tasks: int
) -> Cost:
    steps = schedule.steps
    plain = next(step for step in steps if step.cycles == max(x.cycles for x in steps))
    query, key, compute = blocks
    return Cost(
        owner,
        kernel,
        shape,
        query_block=query,
        key_block=key,
        compute_block=compute,
        tasks=tasks,
        plain=plain.cycles,
        diagonal=steps[-1].cycles,
        edges=sum(edge.cycles for edge in schedule.edges),
        overhead=schedule.overhead,
        used=schedule.utilization(plain),
    )


# ------------------------------------------------------------------------------------------- in a process per target


class Compiler:
    """Compiles programs for one device of a generation and reads the schedules that the compiler dumps."""

    def __init__(self, generation: str, folder: pathlib.Path) -> None:
        import jax  # noqa: PLC0415
        import numpy as np  # noqa: PLC0415
        from jax.experimental import topologies  # noqa: PLC0415

        devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation]).devices
        self.kind, self.folder = devices[0].device_kind, folder
        self.sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices[:1]), ("x",)), jax.P())

    def array(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Returns the type of an array on the device."""
        import jax  # noqa: PLC0415

        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    def schedules(self, program: Callable[..., Any], *arrays: Any, name: str) -> list[KernelSchedule]:
        """Compiles a program and returns the schedules of its kernels whose name contains `name`."""
        import jax  # noqa: PLC0415

        for path in self.folder.iterdir():
            path.unlink() if path.is_file() else shutil.rmtree(path)
        jax.jit(program).lower(*arrays).compile()
        found = read_kernels(self.folder, name)
        if not found:
            raise RuntimeError(f"The compiler dumped no schedule of {name} to {self.folder}.")
        return found


def ringjax_costs(compiler: Compiler, shape: Shape, *, has_prior: bool) -> Iterator[Cost]:
    """Yields the costs of the kernels of ringjax."""
    from ringjax._src.kernels.blocks import Blocks, KernelConfig  # noqa: PLC0415
    from ringjax._src.kernels.tpu import calls as tpu  # noqa: PLC0415
    from ringjax._src.kernels.tpu.tiling import tiling  # noqa: PLC0415
    from ringjax._src.online_softmax import PartialSoftmax  # noqa: PLC0415

    config = KernelConfig(
        Blocks(shape.block, shape.block),
        shape.rows,
        q_per_kv=1,
        tasks_per_head=shape.tasks,
        is_causal=shape.is_causal,
        is_ragged=False,
        mask_rules=(),
        scale=HEAD_DIM**-0.5,
    )
    tiles = tiling(config, shape.tasks, device_kind=compiler.kind)
    options = {"config": config, "tiles": tiles, "has_prior": has_prior}
    rows = (shape.tasks, 1, shape.rows)
    array = compiler.array
    query, kv = array((*rows, HEAD_DIM), "bfloat16"), array((2, *rows, HEAD_DIM), "bfloat16")
    sums, kv_sums = (array(x.shape, "float32") for x in (query, kv))
    table = array((2,), "int32"), array((1, 4, shape.blocks), "int32")
    forward = lambda out, lse, q, kv, *table: tpu.forward(  # noqa: E731
        PartialSoftmax(out, lse), tpu.PackedRows(q, kv, *table, None), **options
    )
    gradient = lambda dq, dkv, q, kv, dout, stats, *table: tpu.gradient(  # noqa: E731
        dq, dkv, tpu.PackedRows(q, kv, *table, None), tpu.OutputGrads(dout, stats), **options
    )
    stats = array((*rows[:2], 2, rows[2]), "float32")
    programs = {
        "forward": (forward, (sums, array(rows, "float32"), query, kv, *table)),
        "gradient": (gradient, (sums, kv_sums, query, kv, query, stats, *table)),
    }
    for name, (program, arrays) in programs.items():
        (schedule,) = compiler.schedules(program, *arrays, name=f"ringjax_{name}")
        yield _cost(schedule, "ringjax", name, shape, (shape.block, shape.block, shape.block), tiles.tasks)


def splash_costs(compiler: Compiler, shape: Shape, blocks: tuple[int, int, int], *, is_fused: bool) -> Iterator[Cost]:
    """Yields the costs of the kernels of splash attention: query rows, key rows, and key rows computed at a time."""
    import jax  # noqa: PLC0415
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks  # noqa: PLC0415

    query, key, compute = blocks
    sizes = splash.BlockSizes(
        block_q=query,
        block_kv=key,
        block_kv_compute=compute,
        block_q_dkv=query,
        block_kv_dkv=key,
        block_kv_dkv_compute=compute,
        block_q_dq=None if is_fused else query,
        block_kv_dq=None if is_fused else key,
        use_fused_bwd_kernel=is_fused,
    )
    mask = (masks.CausalMask if shape.is_causal else masks.FullMask)((shape.rows, shape.rows))
    with jax.ensure_compile_time_eval():
        attention = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * shape.tasks), head_shards=1, q_seq_shards=1, block_sizes=sizes
        )
    array = compiler.array((shape.tasks, shape.rows, HEAD_DIM), "bfloat16")
    gradient = lambda *xs: jax.vjp(attention, *xs[:3])[1](xs[3])  # noqa: E731
    names = {"_fwd_": "forward", "_dkv_": "gradient" if is_fused else "key_gradient", "_dq_": "query_gradient"}
    for schedule in compiler.schedules(gradient, *[array] * 4, name="splash_mha"):
        kernel = next(kernel for part, kernel in names.items() if part in schedule.name)
        yield _cost(schedule, "splash", kernel, shape, blocks, tasks=1)


def costs(compiler: Compiler, *, only_long: bool) -> Iterator[Cost]:
    """Yields all costs of a generation."""
    whole = (LONG.block, LONG.block, LONG.block)
    yield from ringjax_costs(compiler, LONG, has_prior=True)
    yield from splash_costs(compiler, LONG, whole, is_fused=True)
    if only_long:
        return
    yield from splash_costs(compiler, LONG, (LONG.block, LONG.block, 512), is_fused=True)
    yield from splash_costs(compiler, LONG, whole, is_fused=False)
    for shape in SHORT:
        yield from ringjax_costs(compiler, shape, has_prior=False)
        for compute in sorted({512, shape.block}):  # smaller blocks are slower
            yield from splash_costs(compiler, shape, (shape.block, shape.block, compute), is_fused=True)


def degrade() -> None:
    """Patches the kernels to broadcast numbers per row across lanes in every step, to verify that the checks fail."""
    import jax.numpy as jnp  # noqa: PLC0415

    from ringjax._src.kernels.tpu import kernels  # noqa: PLC0415

    kernels._repeat_lanes = lambda x, width: jnp.broadcast_to(x[:, :1], (x.shape[0], width))


# ---------------------------------------------------------------------------------------------------------- the report


@dataclasses.dataclass(frozen=True)
class Check:
    """A ratio of cycles and its limit."""

    about: str
    ours: float
    theirs: float
    limit: float

    @property
    def ratio(self) -> float:
        """Cycles of ringjax over those of splash."""
        return self.ours / self.theirs


def checks(generation: str, found: list[Cost]) -> list[Check]:
    """Returns the ratios of a generation with their limits."""
    made = []
    for kernel, limit in STEP_LIMITS[generation].items():
        (ours,) = (x for x in found if x.owner == "ringjax" and x.shape == LONG and x.kernel == kernel)
        theirs = [x for x in found if x.owner == "splash" and x.shape == LONG and x.kernel == kernel]
        same = next(x for x in theirs if x.compute_block == LONG.block)
        made.append(Check(f"{kernel}, step without mask", ours.plain, same.plain, limit))
        made.append(Check(f"{kernel}, step on the diagonal", ours.diagonal, same.plain, limit))
    for shape in dict.fromkeys(x.shape for x in found if x.shape != LONG):
        for kernel in ("forward", "gradient"):
            (ours,) = (x for x in found if x.owner == "ringjax" and x.shape == shape and x.kernel == kernel)
            theirs = [x for x in found if x.owner == "splash" and x.shape == shape and x.kernel == kernel]
            best = min(x.per_tile for x in theirs)
            mask, limit = ("causal", CAUSAL_LIMIT) if shape.is_causal else ("full", FULL_LIMITS[shape.rows])
            made.append(Check(f"{kernel}, {shape.rows} rows, {mask}, per useful tile", ours.per_tile, best, limit))
    return made


def table(generation: str, found: list[Cost]) -> Table:
    """Returns a table with one row per kernel."""
    shown = Table(title=generation, box=rich.box.SIMPLE_HEAD)
    for title in ("kernel", "rows", "mask", "blocks"):
        shown.add_column(title)
    for title in ("step", "on the diagonal", "begin and end", "grid step", "per useful tile", "MXU", "VALU", "spills"):
        shown.add_column(title, justify="right")
    for x in found:
        tasks = f", {x.tasks} tasks" if x.tasks > 1 else ""
        compute = f" ({x.compute_block})" if x.compute_block != x.key_block else ""
        shown.add_row(
            f"{x.owner} {x.kernel}",
            str(x.shape.rows),
            "causal" if x.shape.is_causal else "full",
            f"{x.query_block} x {x.key_block}{compute}{tasks}",
            str(x.plain),
            str(x.diagonal),
            str(x.edges),
            str(x.overhead),
            f"{x.per_tile:.0f}",
            *(f"{x.used[unit]:.0%}" for unit in ("MXU", "VALU", "VSTORE:SPILL")),
        )
    return shown


def measure(generation: str, options: argparse.Namespace, console: Console) -> list[Cost]:
    """Measures a generation in a new process, because the compiler reads its flags once, and prints progress."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        flags = {"LIBTPU_INIT_ARGS": DUMP_FLAGS.format(folder=folder)}
        command = [sys.executable, __file__, "--worker", folder, "--target", generation]
        command += ["--long"] if options.long else []
        command += ["--broken", options.broken] if options.broken else []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT | flags
        ) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                values = json.loads(line)
                cost = Cost(**{**values, "shape": Shape(**values["shape"])})
                console.print(
                    f"  {generation} {cost.owner} {cost.kernel}, {cost.shape.rows} rows: done", highlight=False
                )
                found.append(cost)
    if worker.returncode:
        raise RuntimeError(f"The compiler failed for {generation} with exit code {worker.returncode}.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TOPOLOGIES, action="append", help="only this generation (default: all)")
    parser.add_argument("--long", action="store_true", help="only long rows")
    parser.add_argument("--broken", choices=("broadcast",), help="compile a worse kernel, for which a check must fail")
    parser.add_argument("--json", type=pathlib.Path, help="write all costs to this file")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    generations = options.target or list(TOPOLOGIES)
    if options.worker:
        if options.broken:
            degrade()
        for cost in costs(Compiler(generations[0], options.worker), only_long=options.long):
            print(json.dumps(dataclasses.asdict(cost)), flush=True)
        return
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(", ".join(f"{x} {importlib.metadata.version(x)}" for x in ("jax", "libtpu")), highlight=False)
    found = {generation: measure(generation, options, console) for generation in generations}
    failed = False
    for generation, every in found.items():
        console.print(table(generation, every))
        for check in checks(generation, every):
            failed |= check.ratio > check.limit
            verdict = "FAILED" if check.ratio > check.limit else "ok"
            ratio = f"{check.ours:.0f} / {check.theirs:.0f} = {check.ratio:.2f}, at most {check.limit:.2f}"
            console.print(f"{verdict} {generation} {check.about}: {ratio}", highlight=False)
    if options.json:
        costs_by_target = {name: [dataclasses.asdict(x) for x in every] for name, every in found.items()}
        options.json.write_text(json.dumps(costs_by_target, indent=1))
    if failed:
        sys.exit(1)
    console.print("All checks passed.")


if __name__ == "__main__":
    main()
