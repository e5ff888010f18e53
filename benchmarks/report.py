"""Writes results as JSON, Markdown and plots."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Plot, Table


def read(path: Path) -> tuple[dict, list[Table]]:
    """Reads the metadata and the tables of a stored report."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    tables = [Table(**{**t, "plot": Plot(**t["plot"]) if t["plot"] else None}) for t in stored["tables"]]
    return stored["metadata"], tables


def write(path: Path, metadata: dict, tables: list[Table]) -> None:
    """Writes the metadata and the tables as JSON, with NaN as null."""

    def without_nan(row: dict) -> dict:
        return {c: None if isinstance(x, float) and math.isnan(x) else x for c, x in row.items()}

    stored = [{**dataclasses.asdict(t), "rows": [without_nan(row) for row in t.rows]} for t in tables]
    text = json.dumps({"metadata": metadata, "tables": stored}, indent=1, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def with_table(tables: list[Table], table: Table, after: str | None) -> list[Table]:
    """Replaces the table of the same name; a new one is inserted after the table named `after`, or at the end."""
    names = [t.name for t in tables]
    if table.name in names:
        return [table if t.name == table.name else t for t in tables]
    index = names.index(after) + 1 if after else len(names)
    return [*tables[:index], table, *tables[index:]]


def format_cell(value: Any, column: str = "") -> str:
    """Formats a cell. Ratios below 1 in favor of a baseline are marked with a dagger."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return value.replace("|", "/")
    if isinstance(value, int):
        return f"{value:,}"
    is_ratio = "speedup vs" in column or "reduction" in column
    mark = " †" if is_ratio and value < 0.995 else ""
    if abs(value) >= 1000:
        return f"{value:,.0f}{mark}"
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}{mark}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4
    return f"{value:.{digits}f}{mark}"


def table_lines(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "| " + " | ".join("---" for _ in columns) + " |"]
    return lines + ["| " + " | ".join(format_cell(row.get(c), c) for c in columns) + " |" for row in rows]


def section(table: Table) -> str:
    """Returns the Markdown section of a table."""
    lines = table_lines(table.columns, table.rows)
    text = f"## {table.title}\n\n{table.notes}\n\n" + "\n".join(lines) + "\n"
    if "†" in text:
        text += "\n† ringjax is slower or uses more memory than the baseline in this cell; see the notes above.\n"
    text += f"\n<small>{table.run}</small>\n" if table.run else ""
    return text


def draw(table: Table, path: Path) -> None:
    """Plots a table."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    plot = table.plot
    assert plot
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for column in plot.columns:
        points = [(r[plot.x], r[column]) for r in table.rows if isinstance(r.get(plot.x), int)]
        points = [(x, y) for x, y in points if isinstance(y, (int, float)) and not math.isnan(y)]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=column.removesuffix(" (s)"))
    if plot.log_scale:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({r[plot.x] for r in table.rows if isinstance(r.get(plot.x), int)})
        axes.set_xticks(ticks, [f"{t // 1024}K" if t < 2**20 else f"{t // 2**20}M" for t in ticks])
    axes.set(xlabel=plot.x, ylabel=plot.y_label, title=table.title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def introduction(metadata: dict) -> str:
    """Returns the text above the tables: machine, versions and how to read the figures."""
    versions = ", ".join(f"{name} {version}" for name, version in metadata["versions"].items())
    machine = metadata["machine"]
    return f"""# Benchmarks

Measured on {metadata["devices"]} with `make bench` and `make bench-full`. The line below each table gives the date, the
mode (quick or full) and the versions of its run. Machine and versions of the last run: {machine["processor"]},
{machine["cores"]} cores, {machine["memory_GiB"]} GiB; Python {machine["python"]}, {versions}.

Repeats of all implementations are interleaved, and the tables show medians. Outputs and gradients are compared before
timing wherever two implementations compute the same function. *Speedup* and *memory reduction* divide the baseline's
time or memory by that of ringjax, so values above 1 favor ringjax. *Spread* is the slowest minus the fastest run,
divided by the median. Figures of CPU devices come from a shared machine and do not predict accelerator performance.
"""


def render(metadata: dict, tables: list[Table], images: str = "", summary: str = "") -> str:
    """Returns the report as Markdown.

    Args:
        metadata: Date, machine and versions of the run.
        tables: All tables.
        images: Prefix of the paths of the plots.
        summary: Markdown inserted between the introduction and the tables.
    """
    parts = [introduction(metadata), *([summary] if summary else [])]
    for table in tables:
        parts.append(section(table))
        if table.plot:
            parts.append(f"![{table.title}]({images}{table.name}.png)\n")
    return "\n".join(parts)


def write_report(path: Path, metadata: dict, tables: list[Table], images: str = "", summary: str = "") -> Path:
    """Writes the report, and its plots to `images` relative to it."""
    for table in tables:
        if table.plot:
            draw(table, path.parent / f"{images}{table.name}.png")
    path.write_text(render(metadata, tables, images, summary), encoding="utf-8")
    return path
