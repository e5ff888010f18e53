"""Compares the memory and communication predicted by the plan with those of compiled programs.

    python benchmarks/plan_accuracy.py cpu --json cpu.json        # in any environment
    python benchmarks/plan_accuracy.py cuda --json cuda.json      # with .[aot-cuda] installed
    python benchmarks/plan_accuracy.py tpu --json tpu.json        # with .[aot-tpu] installed
    python benchmarks/plan_accuracy.py table cpu.json cuda.json tpu.json   # prints the table of docs/command-line.md

Fails if the number of messages or their bytes differ, or if memory differs by more than 15%.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import NamedTuple

from ringjax._src.aot.targets import target_named
from ringjax._src.planning.table import bytes_text
from ringjax.cli.aot import expected, on_target, report_in_subprocess
from ringjax.cli.arguments import PlanOptions

LIMIT = 0.15


class Case(NamedTuple):
    """A workload on a target."""

    about: str
    target: str
    job: PlanOptions
    parts: tuple[str, ...] = ("forward", "gradient")


def job(seq_len: int, pattern: str, heads: int = 8, dim: int = 128, **options) -> PlanOptions:
    defaults = {"is_causal": True, "layout": "zigzag", "strategy": "ring"}
    return PlanOptions(seq_len, num_heads=heads, head_dim=dim, pattern_text=pattern, **{**defaults, **options})


K, M, G = 2**10, 2**20, 2**30
THREE = "2K/1,16K/4,T/16"
OPEN = {"is_causal": False, "layout": "contiguous"}
EXCHANGE = {"layout": "contiguous", "strategy": "all_to_all"}
TEAMS = {"strategy": "all_to_all_ring"}
CASES = {
    "cpu": [
        Case("three branches", "cpu:8", job(128 * K, THREE, dim=64, dtype="float32")),
        Case("three branches", "cpu:4", job(64 * K, THREE, dim=64, dtype="float32")),
        Case("three branches", "cpu:1", job(64 * K, THREE, dim=64, dtype="float32")),
        Case("not causal, contiguous", "cpu:8", job(128 * K, THREE, dim=64, dtype="float32", **OPEN)),
        Case("GQA", "cpu:8", job(128 * K, THREE, dim=64, dtype="float32", num_kv_heads=2)),
        Case("dense ring", "cpu:4", job(32 * K, "T/1", dim=64, dtype="float32")),
        Case("head dim 128", "cpu:8", job(128 * K, "4K/1,T/32", dim=128, dtype="float32")),
        Case("exchange", "cpu:8", job(128 * K, THREE, dim=64, dtype="float32", **EXCHANGE)),
        Case("exchange, GQA", "cpu:4", job(128 * K, THREE, dim=64, dtype="float32", num_kv_heads=2, **EXCHANGE)),
        Case("exchange, T/3", "cpu:4", job(96 * K, "3K/1,T/3", dim=64, dtype="float32", **EXCHANGE)),
        Case("exchange of whole arrays", "cpu:4", job(96 * K, "5K/1", dim=64, dtype="float32", **EXCHANGE)),
        Case("teams of 4", "cpu:8", job(128 * K, THREE, heads=4, dim=64, dtype="float32", **TEAMS)),
    ],
    "cuda": [
        Case("three branches", "cuda:h100:1x1x8", job(M, THREE)),
        Case("GQA", "cuda:h100:1x1x8", job(M, THREE, num_kv_heads=2)),
        Case("dense ring", "cuda:a100:1x1x8", job(256 * K, "T/1")),
        Case("one million tokens", "cuda:h100:1x1x8", job(M, "2K/1,32K/8,T/64", heads=16)),
        Case("float32", "cuda:h100:1x1x8", job(512 * K, THREE, dtype="float32")),
        Case("64 GPUs, not causal", "cuda:b200:1x8x8", job(4 * M, "2K/1,64K/8,T/64", **OPEN)),
        Case("exchange", "cuda:h100:1x1x8", job(M, THREE, **EXCHANGE)),
        Case("teams of 4", "cuda:h100:1x1x8", job(M, THREE, heads=4, **TEAMS)),
    ],
    "tpu": [
        Case("local branches", "tpu:v5p:2x2x2", job(2 * M, "2K/1,64K/8")),
        Case("three branches", "tpu:v5p:2x2x2", job(2 * M, THREE)),
        Case("not causal, contiguous", "tpu:v5p:2x2x2", job(2 * M, THREE, **OPEN)),
        Case("GQA", "tpu:v5p:2x2x2", job(2 * M, THREE, num_kv_heads=2)),
        Case("one million tokens", "tpu:v5e:4x4", job(M, "2K/1,32K/8,T/64", heads=16)),
        Case(
            "one billion tokens",
            "tpu:v5p:16x16x16",
            job(G, "2K/1,128K/16,8M/128,T/1024", heads=16),
            parts=("gradient",),
        ),
        Case("dense ring", "tpu:v5p:2x2x2", job(M, "T/1")),
        Case("LongNet preset", "tpu:v6e:4x4", job(4 * M, "longnet", heads=16)),
        Case("GQA, batch 2", "tpu:v5p:4x4x4", job(8 * M, "4K/1,T/32", heads=32, num_kv_heads=8, batch=2)),
        Case("three ring branches", "tpu:v5p:2x2x4", job(2 * M, "256K/4,1M/16,T/64", heads=16, num_kv_heads=8)),
        Case("two ring branches, GQA", "tpu:v5p:2x2x2", job(M, "256K/2,T/8", heads=16, num_kv_heads=4, **OPEN)),
        Case("two ring branches, causal", "tpu:v6e:4x4", job(2 * M, "512K/4,T/16", heads=32, num_kv_heads=8)),
        # held out: compiled after the memory model was fitted
        Case("five, geometric", "tpu:v5p:2x2x2", job(2 * M, "2K/1,8K/2,32K/4,128K/8,T/16")),
        Case("dense, GQA", "tpu:v6e:4x4", job(2 * M, "T/1", heads=16, num_kv_heads=4)),
        Case("two branches, batch 2", "tpu:v5e:4x4", job(M, "8K/2,T/16", heads=16, batch=2, **OPEN)),
        Case("local and all-gathered", "tpu:v5p:4x4x4", job(8 * M, "2K/1,T/64", heads=32, strategy="all_gather")),
        Case("local, two ring branches", "tpu:v6e:4x4", job(2 * M, "2K/1,512K/8,T/64", heads=16)),
        Case("three ring branches, not causal", "tpu:v5p:2x2x4", job(2 * M, "256K/2,1M/8,T/32", heads=16, **OPEN)),
    ],
}


def measure(platform: str, path: pathlib.Path) -> list[dict]:
    """Compiles the programs missing from the file and adds their results to it."""
    rows = read([path]) if path.exists() else []
    for case in CASES[platform]:
        for part in case.parts:
            known = {"about": case.about, "part": part, "job": dataclasses.asdict(case.job), "target_name": case.target}
            if any(known.items() <= row.items() for row in rows):
                continue
            rows.append({**report_in_subprocess(case.job, case.target, part).to_dict(), **known})
            path.write_text(json.dumps(rows, indent=1))
            print(describe(rows[-1]), flush=True)
    return rows


def read(paths: list[pathlib.Path]) -> list[dict]:
    """Reads results of compiled programs and adds the current predictions of the plan."""
    rows = [row for path in paths for row in json.loads(path.read_text())]
    for row in rows:
        target = target_named(row["target_name"])
        planned = expected(on_target(PlanOptions(**row["job"]), target), target, row["part"])
        row |= {
            name: getattr(planned, name) for name in ("planned_bytes", "planned_collectives", "planned_operand_bytes")
        }
    return rows


def describe(row: dict) -> str:
    name = f"{row['target']} {row['about']} {row['part']}"
    return f"{name}: {row['error'] or f'memory {memory_ratio(row):.3f}, messages {messages(row)}'}"


def memory_ratio(row: dict) -> float:
    """Returns the predicted memory divided by that of the compiled program."""
    return row["planned_bytes"] / row["device_bytes"]


def messages(row: dict) -> str:
    """Returns "exact" if the plan predicted the communication, else the differing counts."""
    planned = row["planned_collectives"], row["planned_operand_bytes"]
    compiled = row["collectives"], row["operand_bytes"]
    return "exact" if planned == compiled else f"{planned} planned, {compiled} compiled"


def failures(rows: list[dict]) -> list[str]:
    """Returns a message for every program that failed to compile or differs from the plan."""
    result = []
    for row in rows:
        name = f"{row['target']} {row['about']} {row['part']}"
        if row["error"]:
            result.append(f"{name}: {row['error']}")
            continue
        if abs(memory_ratio(row) - 1) > LIMIT:
            result.append(f"{name}: predicted memory is {memory_ratio(row):.3f} times that of the compiled program")
        if messages(row) != "exact":
            result.append(f"{name}: messages {messages(row)}")
    return result


def table(rows: list[dict]) -> str:
    """Returns the results as a Markdown table."""
    titles = "target, case, tokens, pattern, dtype, pass, planned memory, compiled, plan / compiled, messages"
    lines = [f"| {titles.replace(', ', ' | ')} |", "| --- " * 10 + "|"]
    for row in rows:
        job = row["job"]
        cells = [row["target"], row["about"], f"{job['seq_len']:,}", job["pattern_text"], job["dtype"], row["part"]]
        cells += [bytes_text(row["planned_bytes"]), bytes_text(row["device_bytes"]), f"{memory_ratio(row):.2f}"]
        sent = f"{row['collectives']:,}, {bytes_text(row['operand_bytes'])}: {messages(row)}"
        lines.append("| " + " | ".join([*cells, sent]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*CASES, "table"))
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="result files to print as a table")
    parser.add_argument(
        "--json", type=pathlib.Path, default="plan-accuracy.json", help="result file to add to (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.what == "table":
        rows = read(options.files)
        print(table(rows))
    else:
        rows = measure(options.what, options.json)
    failed = failures(rows)
    for message in failed:
        print("FAILED", message, file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
