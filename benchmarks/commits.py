"""Compares checkouts of ringjax with an earlier one: time and compiled temporary memory, in interleaved runs.

    git worktree add /tmp/before COMMIT
    python benchmarks/commits.py /tmp/before .                # `--quick` for a few cells
    python benchmarks/commits.py /tmp/before .:ring .:auto    # force or choose how devices share segments

Every cell runs its workers in turn: the first checkout twice, which shows the noise, and each of the others. A cell in
which a ratio exceeds 1.08 is repeated with three times the rounds.
"""

from __future__ import annotations

import argparse
import itertools
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


class Checkout(NamedTuple):
    """A checkout to measure and the strategy of its rings."""

    folder: Path
    strategy: str

    @classmethod
    def parse(cls, text: str) -> Checkout:
        """Parses `FOLDER` or `FOLDER:STRATEGY`."""
        folder, _, strategy = text.partition(":")
        return cls(Path(folder).resolve(), strategy or "auto")

    @property
    def name(self) -> str:
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=self.folder, text=True).strip()
        return commit if self.strategy == "auto" else f"{commit}, {self.strategy}"


class Measured(NamedTuple):
    """Time and temporary memory of a checkout relative to the first one."""

    ratio: float
    lower_quartile: float
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


def start_worker(checkout: Checkout, cell: Cell) -> Worker:
    """Starts a worker of a checkout."""
    os.environ["PYTHONPATH"] = str(checkout.folder)
    os.environ["RINGJAX_NATIVE"] = "1" if cell.is_native else "0"
    return Worker(str(checkout.folder / "benchmarks" / "jax_worker.py"), devices=cell.devices)


def measure(workers: list[Worker], checkouts: list[Checkout], cell: Cell, rounds: int) -> list[Measured]:
    """Measures a cell in all workers, interleaved; returns the second run of the first checkout, then the others."""
    kind = "one device" if cell.devices == 1 else "ring"
    arguments = {"kind": kind, "case": cell.case.to_dict(), "grad": cell.grad, "size": cell.devices}
    infos = [
        worker.request("prepare", key="cell", strategy=checkout.strategy, **arguments)
        for worker, checkout in zip(workers, checkouts, strict=True)
    ]
    times: list[list[float]] = [[] for _ in workers]
    for nth in range(rounds):
        for i in [(nth + j) % len(workers) for j in range(len(workers))]:
            times[i].append(workers[i].request("run", key="cell")["seconds"])
    for worker in workers:
        worker.request("drop", key="cell")
    found = []
    for nth, own in enumerate(times[1:]):
        base = times[0] if nth == 0 else [*times[0], *times[1]]
        quartile = statistics.quantiles([b / a for a, b in zip(times[0], own, strict=True)], n=4)[0]
        memory = infos[nth + 1]["temp_bytes"] / max(1, infos[0]["temp_bytes"])
        found.append(Measured(statistics.median(own) / statistics.median(base), quartile, memory))
    return found


def report(names: list[str], results: dict[str, list[Measured]]) -> Table:
    """Builds the table: per cell the noise, then time, its lower quartile and memory of each checkout."""
    table = Table(title=f"relative to {names[0]}", box=rich.box.SIMPLE_HEAD)
    titles = [f"{name}: {what}" for name in names[1:] for what in ("time", "quartile", "memory")]
    for title in ("program", "again", *titles):
        table.add_column(title, justify="left" if title == "program" else "right")
    rows = [[again.ratio, *itertools.chain.from_iterable(others)] for again, *others in results.values()]
    for name, row in zip(results, rows, strict=True):
        table.add_row(name, *(f"{x:.3f}" for x in row))
    table.add_row("geometric mean", *(f"{geometric_mean(column):.3f}" for column in zip(*rows, strict=True)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Checkout.parse)
    parser.add_argument("after", type=Checkout.parse, nargs="+")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    checkouts = [options.before, options.before, *options.after]
    results: dict[str, list[Measured]] = {}
    groups: dict[tuple[int, bool], list[Cell]] = {}
    for cell in cells(options.quick):
        groups.setdefault((cell.devices, cell.is_native), []).append(cell)
    for group in groups.values():
        workers = [start_worker(checkout, group[0]) for checkout in checkouts]
        for cell in group:
            found = measure(workers, checkouts, cell, options.rounds)
            if max(x.ratio for x in found[1:]) > LIMIT:
                found = measure(workers, checkouts, cell, 3 * options.rounds)
            results[cell.name] = found
            ratios = ", ".join(f"{x.ratio:.3f} (memory {x.memory:.3f})" for x in found[1:])
            print(f"{cell.name}: again {found[0].ratio:.3f}; {ratios}", file=sys.stderr)
        for worker in workers:
            worker.process.terminate()
    Console(width=200).print(report([x.name for x in checkouts[1:]], results))


if __name__ == "__main__":
    main()
