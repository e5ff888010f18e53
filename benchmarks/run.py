"""Runs the benchmarks and writes one report: `report.md`, `results.json` and plots.

    python benchmarks/run.py                                   # quick
    python benchmarks/run.py --full                            # everything; takes hours
    python benchmarks/run.py --parts ring,compare:split_heads  # some parts or tables, added to an existing report
    python benchmarks/run.py --report                          # write the report again from results.json
    python benchmarks/run.py --publish                         # update docs/benchmarks.md and the README

`make bench` and `make bench-full` run it with all baselines: PyTorch in its own environment (`--torch-python`) and
ringattention in a folder (`--peer`). On GPUs and TPUs the same command uses the available devices, in bfloat16, and
skips the baselines that run on CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import report
import summary
from harness import Bench, Table, machine_info

PARTS = ("compare", "ring", "scaling", "decode", "devices", "million")
QUICK_PARTS = PARTS[:-1]
ROOT = Path(__file__).parent.parent


def run_parts(bench: Bench, parts: list[str], save: Callable[[Table], None]) -> None:
    """Runs parts one after another and saves each table as soon as it is measured."""
    for part in parts:
        bench.log(f"== {part}")
        name, _, function = part.partition(":")
        measured = getattr(importlib.import_module(name), function or "tables")(bench)
        for table in [measured] if isinstance(measured, Table) else measured:
            print("\n" + report.section(table), flush=True)
            save(table)


def is_known(part: str) -> bool:
    """Returns whether a part, and the table function named after a colon, exist."""
    name, _, function = part.partition(":")
    return name in PARTS and hasattr(importlib.import_module(name), function or "tables")


def commit() -> list[str]:
    """Returns the current commit, marked if there are uncommitted changes; empty without git."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return ["commit " + subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()]
    except (OSError, subprocess.CalledProcessError):
        return []


def publish(results: Path) -> None:
    """Copies a report to docs/ and updates the performance section of the README."""
    stored = ROOT / "docs" / "benchmarks.json"
    stored.write_text(results.read_text(encoding="utf-8"), encoding="utf-8")
    metadata, tables = report.read(stored)
    page, page_summary = ROOT / "docs" / "benchmarks.md", summary.page_summary(tables)
    report.write_report(page, metadata, tables, images="images/bench-", summary=page_summary)
    summary.write_readme(ROOT / "README.md", metadata, tables)


def parse_options(part: str | None) -> tuple[argparse.Namespace, list[str]]:
    """Parses the command line and returns the options and the parts to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--full", action="store_true", help="run all cases, with more repeats")
    add("--parts", default=part, help=f"comma-separated, from {', '.join(PARTS)}; the default skips the last")
    add("--torch-python", help="Python interpreter with torch; without it, PyTorch is skipped")
    add("--peer", help="folder with ringattention 0.1.2 and einops; without it, ringattention is skipped")
    add("--memory", type=float, default=12, help="memory limit of a baseline, in GiB (default: %(default)s)")
    add("--cpu", action="store_true", help="use CPU devices even if there are others")
    add("--shrink", type=int, default=1, help="divide all lengths by this, for testing the harness itself")
    add("--out", type=Path, default=Path("build/bench"), help="output folder (default: %(default)s)")
    add("--report", action="store_true", help="only write the report again")
    add("--publish", action="store_true", help="only copy the report in --out to docs/ and the README")
    options = parser.parse_args()
    parts = options.parts.split(",") if options.parts else list(PARTS if options.full else QUICK_PARTS)
    if unknown := [p for p in parts if not is_known(p)]:
        parser.error(f"--parts must be from {', '.join(PARTS)}, got {unknown[0]!r}")
    return options, parts


def collect_metadata(bench: Bench, options: argparse.Namespace) -> dict:
    """Describes the run, the machine and the versions."""
    versions = dict(bench.devices["versions"])
    if bench.is_cpu and options.torch_python:
        versions |= bench.torch().request("info")["versions"]
    return {
        "date": datetime.date.today().isoformat(),
        "command": "make bench-full" if options.full else "make bench",
        "arguments": shlex.join(sys.argv[1:]),
        "devices": "CPU devices" if bench.is_cpu else f"{bench.devices['count']} x {bench.devices['kind']}",
        "versions": versions,
        "machine": machine_info(),
    }


def run_label(metadata: dict, options: argparse.Namespace) -> str:
    """Returns the line below each table: date, mode, versions and commit."""
    mode = "full" if options.full else "quick"
    label = ", ".join([metadata["date"], mode, *map(" ".join, metadata["versions"].items()), *commit()])
    return label + (f"; all lengths divided by {options.shrink}: no measurement" if options.shrink > 1 else "")


class Recorder:
    """Adds tables to the stored report as they are measured."""

    def __init__(self, bench: Bench, options: argparse.Namespace):
        self.start = time.perf_counter()
        self.folder, self.results = options.out, options.out / "results.json"
        self.metadata = collect_metadata(bench, options)
        self.run = run_label(self.metadata, options)
        keeps = self.results.exists() and options.parts
        previous, self.tables = report.read(self.results) if keeps else ({}, [])
        self.metadata["versions"] = {**previous.get("versions", {}), **self.metadata["versions"]}
        self.last: str | None = None  # name of the table saved last in this run

    def save(self, table: Table) -> None:
        """Saves a table and writes the report again."""
        self.tables = report.with_table(self.tables, dataclasses.replace(table, run=self.run), after=self.last)
        self.last = table.name
        self.metadata["minutes"] = (time.perf_counter() - self.start) / 60
        report.write(self.results, self.metadata, self.tables)
        report.write_report(self.folder / "report.md", self.metadata, self.tables)


def main(part: str | None = None) -> None:
    options, parts = parse_options(part)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.json"
    if options.report:
        print(report.write_report(options.out / "report.md", *report.read(results)))
        return
    if options.publish:
        publish(results)
        return
    bench = Bench(
        quick=not options.full,
        torch_python=options.torch_python,
        peer_folder=options.peer,
        memory_limit=int(options.memory * 2**30),
        on_cpu=options.cpu,
        shrink=options.shrink,
    )
    try:
        run_parts(bench, parts, Recorder(bench, options).save)
    finally:
        bench.close()
    bench.log(f"report: {options.out / 'report.md'}")


if __name__ == "__main__":
    main()
