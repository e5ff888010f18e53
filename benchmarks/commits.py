"""Compares two checkouts of ringjax: time and compiled temporary memory, in interleaved runs.

    git worktree add /tmp/before COMMIT
    python benchmarks/commits.py /tmp/before .            # `--quick` for a few cells

Every cell runs three workers in turn: the first checkout twice, which shows the noise, and the second one. A cell whose
ratio exceeds 1.08 is repeated with three times the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import rich.box
from harness import geometric_mean, pass_name
from rich.console import Console
from rich.table import Table
from workers import Worker
from workloads import LONG, SHORT, Case, both_masks, ring_case

LIMIT = 1.08


class Cell(NamedTuple):
    """A program to measure."""

    case: Case
    grad: bool
    devices: int
    is_native: bool

    @property
    def name(self) -> str:
        where = "one device" if self.devices == 1 else f"ring of {self.devices}"
        kernels = "native" if self.is_native else "XLA"
        return f"{where}, {kernels}, {self.case.length:,}, {self.case.mask}, {pass_name(self.grad)}"


class Measured(NamedTuple):
    """Times of the second checkout and of the second run of the first, both relative to the first, and temp memory."""

    ratio: float
    lower_quartile: float
    noise: float
    memory: float


def cells(quick: bool) -> list[Cell]:
    """Returns the cells, grouped by workers."""
    found = []
    for is_native in (True, False):
        for case in [SHORT] if quick else [*both_masks(SHORT), *both_masks(LONG)]:
            found += [Cell(case, grad, 1, is_native) for grad in (False, True)]
        for devices in (4,) if quick else (2, 4, 8):
            for case in [ring_case(16384)] if quick else both_masks(ring_case(32768)):
                found += [Cell(case, grad, devices, is_native) for grad in (False, True)]
    return found


def start_worker(checkout: Path, cell: Cell) -> Worker:
    """Starts a worker of a checkout."""
    os.environ["PYTHONPATH"] = str(checkout)
    os.environ["RINGJAX_NATIVE"] = "1" if cell.is_native else "0"
    return Worker(str(checkout / "benchmarks" / "jax_worker.py"), devices=cell.devices)


def measure(workers: list[Worker], cell: Cell, rounds: int) -> Measured:
    """Measures a cell in all workers, interleaved."""
    kind = "one device" if cell.devices == 1 else "ring"
    arguments = {"kind": kind, "case": cell.case.to_dict(), "grad": cell.grad, "size": cell.devices}
    infos = [worker.request("prepare", key="cell", **arguments) for worker in workers]
    times: list[list[float]] = [[] for _ in workers]
    for nth in range(rounds):
        for i in [(nth + j) % len(workers) for j in range(len(workers))]:
            times[i].append(workers[i].request("run", key="cell")["seconds"])
    for worker in workers:
        worker.request("drop", key="cell")
    first, again, second = times
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    medians = [statistics.median(x) for x in (first, again, second)]
    memory = infos[2]["temp_bytes"] / max(1, infos[0]["temp_bytes"])
    quartile = statistics.quantiles(ratios, n=4)[0]
    both = statistics.median([*first, *again])
    return Measured(medians[2] / both, quartile, medians[1] / medians[0], memory)


def commit(checkout: Path) -> str:
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    before, after = options.before.resolve(), options.after.resolve()
    results: dict[str, Measured] = {}
    groups: dict[tuple[int, bool], list[Cell]] = {}
    for cell in cells(options.quick):
        groups.setdefault((cell.devices, cell.is_native), []).append(cell)
    for group in groups.values():
        workers = [start_worker(checkout, group[0]) for checkout in (before, before, after)]
        for cell in group:
            found = measure(workers, cell, options.rounds)
            if found.ratio > LIMIT:
                found = measure(workers, cell, 3 * options.rounds)
            results[cell.name] = found
            print(
                f"{cell.name}: {found.ratio:.3f} (again {found.noise:.3f}, memory {found.memory:.3f})", file=sys.stderr
            )
        for worker in workers:
            worker.process.terminate()
    table = Table(title=f"{commit(after)} relative to {commit(before)}", box=rich.box.SIMPLE_HEAD)
    for title in ("program", "time", "lower quartile", "same checkout again", "temporary memory"):
        table.add_column(title, justify="left" if title == "program" else "right")
    for name, found in results.items():
        table.add_row(name, *(f"{x:.3f}" for x in found))
    means = [geometric_mean([getattr(x, field) for x in results.values()]) for field in Measured._fields]
    table.add_row("geometric mean", *(f"{x:.3f}" for x in means))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
