"""Writes the performance section of the README and the summary of docs/benchmarks.md from a stored report.

Both need the PyTorch baselines, so they summarize a report of CPU devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness import Table
from report import format_cell, table_lines

RINGS = [f"ring of {p}" for p in (2, 4, 8)]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def value_range(values: Iterable[float | str | None]) -> str:
    """Formats the range of the numbers among `values`."""
    numbers = sorted(x for x in values if isinstance(x, (int, float)))
    low, high = format_cell(numbers[0]), format_cell(numbers[-1])
    return low if low == high else f"{low} to {high}"


def column(table: Table, *names: str) -> list[float | str | None]:
    """Returns measured values of some columns, without the published figures of others."""
    return [row.get(name) for row in table.rows if "DarcStar" not in str(row.get("tokens")) for name in names]


def last(table: Table, name: str) -> str:
    return format_cell(table.rows[-1].get(name))


def readme_table(compare: Table) -> list[str]:
    """Returns the small table of the README: one line per length and mask."""
    rows: dict[tuple, dict[str, object]] = {}
    for measured in compare.rows:
        if not isinstance(measured["tokens"], int):
            continue  # the geometric mean
        key = {"tokens": measured["tokens"], "mask": measured["mask"]}
        row = rows.setdefault(tuple(key.values()), key)
        row[f"speedup, {measured['pass']}"] = f"{format_cell(measured['speedup vs PyTorch'])}×"
        row[f"memory reduction, {measured['pass']}"] = f"{format_cell(measured['memory reduction vs PyTorch'])}×"
    columns = ["tokens", "mask", "speedup, forward"]
    columns += [f"{ratio}, forward + backward" for ratio in ("speedup", "memory reduction")]
    return table_lines(columns, list(rows.values()))


def readme_block(metadata: dict, tables: Sequence[Table]) -> str:
    """Returns the performance section of the README."""
    by_name = {table.name: table for table in tables}
    compare = by_name["compare"]  # its versions, as the last run may have measured other tables
    versions = ", ".join(part for part in compare.run.split(", ") if part.startswith(("jax ", "torch ")))
    machine, million = metadata["machine"], by_name["million"].rows[1]
    overhead = max(x for x in column(by_name["ring-time"], "ring of 8") if isinstance(x, float))
    lines = "\n".join(readme_table(compare))
    where = f"{machine['processor']}, {machine['cores']} shared cores; {versions}"
    return f"""Compared with [LongNet on PyTorch's CPU flash attention operator](benchmarks/torch_worker.py),
with the same outputs and gradients ({where}).
CPU only; nothing here was measured on an accelerator.

{lines}

A ring of 8 CPU devices on the same cores takes at most {format_cell(overhead)} times as long as one device.
{million["tokens"]:,} causal tokens with 4 heads of 64, forward and backward, take {format_cell(million["time (s)"])} \
s and {format_cell(million["peak RSS (GiB)"])} GiB.
All tables: [docs/benchmarks.md](docs/benchmarks.md)."""


def page_summary(tables: Sequence[Table]) -> str:
    """Returns the summary section of docs/benchmarks.md."""
    items = "\n".join(f"- {sentence}" for sentence in sentences(tables))
    return f"""## Summary

{items}

`make bench BENCH='--parts ring'` runs one part. On GPUs and TPUs the same command measures the available devices,
including the fraction of peak FLOP/s, the bandwidth of a hop and how much communication is hidden.
"""


def sentences(tables: Sequence[Table]) -> list[str]:
    """Returns the key figures, one sentence per topic."""
    by_name = {table.name: table for table in tables}
    compare, ringattention, split = (by_name[name] for name in ("compare", "ringattention", "split-heads"))
    time, memory = by_name["ring-time"], by_name["ring-memory"]
    scaling, million = by_name["scaling-fixed-both"], by_name["million"].rows[1]
    fixed, _, dense = by_name["decode"].rows
    cache = "MiB at 1,048,576"
    return [
        f"PyTorch LongNet, same outputs and gradients: ringjax is {last(compare, 'speedup vs PyTorch')} times as fast "
        f"and the baseline uses {last(compare, 'memory reduction vs PyTorch')} times as much memory (geometric means).",
        f"Rings of 2, 4 and 8 CPU devices take {value_range(column(time, *RINGS))} times as long as one device on the "
        "same cores (or as two head-sharded devices where those are faster), and all devices together use "
        f"{value_range(column(memory, *RINGS))} times the memory of one. For two GPUs, the DarcStar-Solutions-Tech "
        "fork of fkodom/dilated-attention-pytorch, whose `RingDilatedAttentionV2Collective` class ringjax "
        f"reimplements, published {last(time, 'ring of 2')} times the time and {last(memory, 'ring of 2')} times the "
        "memory.",
        "A ring of two devices on two cores is "
        f"{value_range(column(by_name['cores'], 'speedup'))} times as fast as one device on one core.",
        f"From {scaling.rows[0]['tokens']:,} to {scaling.rows[-2]['tokens']:,} tokens at constant work per token, "
        f"forward and backward, time grows with exponent {last(scaling, 'time (s)')} and memory with exponent "
        f"{last(scaling, 'program memory (MiB)')}.",
        f"{million['tokens']:,} tokens with segments up to the whole sequence, causal, 4 heads of 64, forward and "
        f"backward (`make million`): {format_cell(million['time (s)'])} s, {format_cell(million['peak RSS (GiB)'])} "
        "GiB.",
        "dilated-attention-pytorch 0.2.0, one branch per head: "
        f"{value_range(column(split, 'speedup vs baseline'))} times the time and "
        f"{value_range(column(split, 'memory reduction vs baseline'))} times the memory of ringjax.",
        f"ringattention 0.1.2, dense on a ring of 4: {value_range(column(ringattention, 'speedup vs ringattention'))} "
        f"times the time, {value_range(column(ringattention, 'traffic reduction'))} times the bytes sent and "
        f"{value_range(column(ringattention, 'memory reduction'))} times the memory of ringjax.",
        f"Decoding a token at a context of 1,048,576 takes {format_cell(fixed['time ratio'])} times as long as at "
        f"32,768, with a cache of {format_cell(fixed[cache])} MiB; with a dense cache it takes "
        f"{format_cell(dense['time ratio'])} times as long, with {format_cell(dense[cache])} MiB.",
    ]


def replace_block(readme: str, block: str) -> str:
    """Returns the README with the text between the markers replaced."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


def write_readme(path: Path, metadata: dict, tables: Sequence[Table]) -> None:
    """Updates the performance section of the README."""
    path.write_text(replace_block(path.read_text(encoding="utf-8"), readme_block(metadata, tables)), encoding="utf-8")
