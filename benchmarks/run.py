"""All benchmarks, or some parts, into one report: `report.md`, `results.json` and pictures.

    python benchmarks/run.py                                # the quick report
    python benchmarks/run.py --full                         # all of it: hours
    python benchmarks/run.py --parts ring,compare:grouped   # some parts or tables; an earlier report is added to
    python benchmarks/run.py --report                       # write the report again from results.json
    python benchmarks/run.py --publish                      # copy it into docs/, and its figures into the README

`make bench` and `make bench-full` do it with all peers: PyTorch in an environment of its own (`--torch-python`),
ringattention in a folder (`--peer`). On GPUs and TPUs the same command uses the devices at hand, in bfloat16; peers
that run on CPU are left out there.
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
from pathlib import Path

import report
import summary
from harness import Bench, Table, machine

PARTS = ("compare", "ring", "scaling", "decode", "devices", "million")
QUICK = PARTS[:-1]


def measure(bench: Bench, parts: list[str], save) -> None:
    """Runs parts one after the other, saving after each table."""
    for part in parts:
        bench.say(f"== {part}")
        name, _, function = part.partition(":")
        found = getattr(importlib.import_module(name), function or "tables")(bench)
        for table in [found] if isinstance(found, Table) else found:
            print("\n" + report.markdown(table), flush=True)
            save(table)


def is_known(part: str) -> bool:
    """Whether there is such a part, and such a function in it where one is named."""
    name, _, function = part.partition(":")
    return name in PARTS and hasattr(importlib.import_module(name), function or "tables")


def commit() -> list[str]:
    """The commit that is measured, where git tells, and whether anything was changed since."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return ["commit " + subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()]
    except (OSError, subprocess.CalledProcessError):
        return []


def publish(stored: Path) -> None:
    """A stored report into the documents, and its figures into the README."""
    root = Path(__file__).parent.parent
    kept = root / "docs" / "benchmarks.json"
    kept.write_text(stored.read_text())
    report.write_report(root / "docs" / "benchmarks.md", *report.read(kept), pictures="images/bench-")
    summary.write_readme(root / "README.md", *report.read(kept))


def main(part: str | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all cases and more repeats")
    parser.add_argument("--parts", default=part, help=f"of {', '.join(PARTS)}; the quick report leaves out the last")
    parser.add_argument(
        "--torch-python", help="interpreter of an environment with torch; without it, nothing of PyTorch"
    )
    parser.add_argument("--peer", help="folder with ringattention 0.1.2 and einops; without it, nothing of it")
    parser.add_argument("--memory", type=float, default=12, help="GiB that a peer may hold (%(default)s)")
    parser.add_argument("--cpu", action="store_true", help="CPU devices, though there are others")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, to try the harness itself")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of the report (%(default)s)")
    parser.add_argument("--report", action="store_true", help="only write the report again")
    parser.add_argument("--publish", action="store_true", help="only put the report of --out into docs/ and the README")
    options = parser.parse_args()
    parts = options.parts.split(",") if options.parts else list(PARTS if options.full else QUICK)
    if unknown := [p for p in parts if not is_known(p)]:
        parser.error(f"--parts must be of {', '.join(PARTS)}, got {unknown[0]!r}")
    options.out.mkdir(parents=True, exist_ok=True)
    stored = options.out / "results.json"
    if options.report:
        print(report.write_report(options.out / "report.md", *report.read(stored)))
        return
    if options.publish:
        publish(stored)
        return
    begin = time.perf_counter()
    bench = Bench(
        not options.full, options.torch_python, options.peer, int(options.memory * 2**30), options.cpu, options.shrink
    )
    versions = dict(bench.devices["versions"])
    if bench.is_cpu and options.torch_python:
        versions |= bench.torch().ask("info")["versions"]
    where = "CPU devices" if bench.is_cpu else f"{bench.devices['number']} x {bench.devices['kind']}"
    facts = {
        "when": datetime.date.today().isoformat(),
        "command": "make bench-full" if options.full else "make bench",
        "arguments": shlex.join(sys.argv[1:]),
        "devices": where,
        "versions": versions,
        "machine": machine(),
    }
    before, tables = report.read(stored) if stored.exists() and options.parts else ({}, [])
    last = None  # saved in this run
    facts["versions"] = {**before.get("versions", {}), **versions}
    how = "full" if options.full else "quick"
    run = ", ".join([facts["when"], how, *map(" ".join, versions.items()), *commit()])
    run += f"; all lengths divided by {options.shrink}: no measurement" if options.shrink > 1 else ""

    def save(table: Table) -> None:
        nonlocal tables, last
        tables, last = report.with_table(tables, dataclasses.replace(table, run=run), after=last), table.name
        facts["minutes"] = (time.perf_counter() - begin) / 60
        report.write(stored, facts, tables)
        report.write_report(options.out / "report.md", facts, tables)

    try:
        measure(bench, parts, save)
    finally:
        bench.close()
    bench.say(f"report: {options.out / 'report.md'}")


if __name__ == "__main__":
    main()
