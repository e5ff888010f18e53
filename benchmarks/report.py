"""Results as JSON, as Markdown and as pictures."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Plot, Table


def read(path: Path) -> tuple[dict, list[Table]]:
    """Facts of the run, and its tables."""
    stored = json.loads(path.read_text())
    tables = [Table(**{**t, "plot": Plot(**t["plot"]) if t["plot"] else None}) for t in stored["tables"]]
    return stored["facts"], tables


def write(path: Path, facts: dict, tables: list[Table]) -> None:
    """All that was measured, not a number being null."""
    numbers = lambda row: {c: None if isinstance(x, float) and math.isnan(x) else x for c, x in row.items()}  # noqa: E731
    stored = [{**dataclasses.asdict(t), "rows": [numbers(row) for row in t.rows]} for t in tables]
    path.write_text(json.dumps({"facts": facts, "tables": stored}, indent=1, allow_nan=False) + "\n")


def with_table(tables: list[Table], table: Table, after: str | None) -> list[Table]:
    """The tables with one replaced or, if it is new, added behind that of name `after`, or at the end."""
    names = [t.name for t in tables]
    if table.name in names:
        return [table if t.name == table.name else t for t in tables]
    at = names.index(after) + 1 if after else len(names)
    return [*tables[:at], table, *tables[at:]]


def text_of(value: Any, column: str) -> str:
    """A cell; a ratio against a peer below 1 is marked."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return value.replace("|", "/")
    if isinstance(value, int):
        return f"{value:,}"
    mark = " †" if "against" in column and "memory" not in column and value < 0.995 else ""
    mark = " †" if "memory against" in column and value < 0.995 else mark
    if abs(value) >= 1000:
        return f"{value:,.0f}{mark}"
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}{mark}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4
    return f"{value:.{digits}f}{mark}"


def row_lines(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "| " + " | ".join("---" for _ in columns) + " |"]
    return lines + ["| " + " | ".join(text_of(row.get(c), c) for c in columns) + " |" for row in rows]


def markdown(table: Table) -> str:
    lines = row_lines(table.columns, table.rows)
    text = f"## {table.title}\n\n{table.about}\n\n" + "\n".join(lines) + "\n"
    text += f"\n<small>{table.run}</small>\n" if table.run else ""
    if "†" in text:
        text += "\n† behind this peer in this cell; the text above says why.\n"
    return text


def draw(table: Table, path: Path) -> None:
    """The picture of a table."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    plot = table.plot
    assert plot
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for line in plot.lines:
        points = [(r[plot.x], r[line]) for r in table.rows if isinstance(r.get(plot.x), int)]
        points = [(x, y) for x, y in points if isinstance(y, (int, float)) and not math.isnan(y)]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=line.removesuffix(" s"))
    if plot.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({r[plot.x] for r in table.rows if isinstance(r.get(plot.x), int)})
        axes.set_xticks(ticks, [f"{t // 1024}K" if t < 2**20 else f"{t // 2**20}M" for t in ticks])
    axes.set(xlabel=plot.x, ylabel=plot.y_title, title=table.title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_report(path: Path, facts: dict, tables: list[Table], pictures: str = "") -> Path:
    """The report, and its pictures in a folder beside it."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    machine = facts["machine"]
    lines = [
        "# Benchmarks",
        "",
        f"Measured on {facts['devices']} by `make bench` and `make bench-full`, whole or in parts: below each table "
        "stands when, with what, and whether its run was quick or full. The last one: "
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_GiB']} GiB; "
        f"Python {machine['python']}, {versions}.",
        "",
        "Repeats are interleaved and medians shown; outputs and gradients are compared first wherever the definition "
        "is the same. “Against” a peer, above 1 means that ringjax is faster or holds less. Figures of CPU devices are "
        "those "
        "of a shared machine, and no accelerator's. Spread is the largest less the smallest time, over the median.",
        "",
    ]
    for table in tables:
        lines.append(markdown(table))
        if table.plot:
            draw(table, path.parent / f"{pictures}{table.name}.png")
            lines.append(f"![{table.title}]({pictures}{table.name}.png)\n")
    path.write_text("\n".join(lines))
    return path
