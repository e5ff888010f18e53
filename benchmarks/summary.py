"""What the README says of speed and memory: figures of a stored report, so that every claim is a number in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness import Table
from report import row_lines, text_of

RINGS = [f"ring of {p}" for p in (2, 4, 8)]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def pick(table: Table, columns: Sequence[str]) -> str:
    """Some columns of a table; rows that have none of their figures are left out."""
    figures = columns[3:]
    return "\n".join(row_lines(columns, [row for row in table.rows if any(row.get(c) is not None for c in figures)]))


def between(values: Iterable[float | str | None]) -> str:
    """The range of some figures."""
    found = sorted(x for x in values if isinstance(x, (int, float)))
    low, high = (text_of(x, "") for x in (found[0], found[-1]))
    return low if low == high else f"{low} to {high}"


def column(table: Table, *names: str) -> list[float | str | None]:
    return [row.get(name) for row in table.rows if "reference" not in str(row.get("tokens")) for name in names]


def last(table: Table, name: str) -> str:
    return text_of(table.rows[-1].get(name), "")


def tables_of(tables: Sequence[Table]) -> str:
    """Beside PyTorch, and rings over one device."""
    by_name = {table.name: table for table in tables}
    compared = [f"{name} PyTorch" for name in ("against", "ring of 2 against", "plain XLA against", "memory against")]
    compared += ["dense JAX over ours", "dense PyTorch over ours", "GFLOP/s"]
    first = pick(by_name["compare"], ["tokens", "mask", "pass", "ringjax s", *compared])
    second = pick(by_name["rings"], ["tokens", "mask", "pass", *RINGS])
    return f"""{first}

PyTorch: a LongNet over its CPU flash operator. A ring of two CPU devices uses the same two cores. Plain XLA is what
runs without a C++ compiler. Rings of CPU devices, time over the better of one device and two head-sharded devices on
the same cores, so that 1 is no loss; the reference system is a PyTorch library of ring dilated attention, with its
published figures:

{second}"""


def sentences(tables: Sequence[Table]) -> list[str]:
    """The other figures, one sentence each."""
    by_name = {table.name: table for table in tables}
    peer, grouped = by_name["ringattention"], by_name["grouped"]
    scaling, million = by_name["scaling-constant-both"], by_name["million"].rows[1]
    near, _, dense = by_name["decode"].rows
    longer, held = "longer over shorter", "MiB at 1,048,576"
    rings = between(column(by_name["ring-memory"], *RINGS))
    return [
        f"Memory of all devices of a ring of 2, 4 or 8 over that of one device: {rings} (reference system on 2: 6.34).",
        "One device on one core against a ring of two on two cores: "
        f"{between(column(by_name['cores'], 'times as fast'))} times as fast.",
        f"From {scaling.rows[0]['tokens']:,} to {scaling.rows[-2]['tokens']:,} tokens at constant work per token, "
        "forward and backward, time grows with exponent "
        f"{last(scaling, 's')}, memory with {last(scaling, 'program MiB')}.",
        "One million tokens with segments up to the whole sequence, causal, 4 heads of 64, forward and backward "
        f"(`make million`): {text_of(million['s'], '')} s, {text_of(million['peak GiB'], '')} GiB.",
        f"dilated-attention-pytorch 0.2.0, one branch per head: {between(column(grouped, 'against the peer'))} times "
        f"our time and {between(column(grouped, 'memory against the peer'))} times our memory.",
        f"ringattention 0.1.2, dense on a ring of 4: {between(column(peer, 'time'))} times our time, "
        f"{between(column(peer, 'bytes sent'))} times the bytes sent, {between(column(peer, 'memory'))} times the "
        "memory.",
        f"Decoding a token at 1,048,576 tokens of context takes {text_of(near[longer], '')} times as long as at 32,768 "
        f"and {text_of(near[held], '')} MiB; with a dense cache {text_of(dense[longer], '')} times as long, from "
        f"{text_of(dense[held], '')} MiB.",
    ]


def summary(facts: dict, tables: Sequence[Table]) -> str:
    """The measured part of the README."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if name != "ringjax")
    is_full = all(", full, " in table.run for table in tables)
    command = "`make bench-full`" if is_full else "`make bench` and, where a table says full, `make bench-full`"
    about = f"""All figures are from one report, [docs/benchmarks.md](docs/benchmarks.md), made by {command}
on {facts["machine"]["cores"]} shared, noisy x86 cores without accelerator ({versions}).
Repeats are interleaved, outputs and gradients compared first. “Against”, above 1: ringjax is faster, or holds less
memory; † marks where it is behind, which the report explains."""
    rest = """Parts alone: `make bench BENCH='--parts ring'`. These are CPU devices: counts, work and waiting, not the
speed of an accelerator. On GPUs and TPUs the same command measures the devices at hand, with their share of peak, the
bandwidth of a hop and how much of the messages is hidden."""
    items = "\n".join(f"- {sentence}" for sentence in sentences(tables))
    return f"{about}\n\n{tables_of(tables)}\n\n{items}\n\n{rest}"


def replaced(readme: str, text: str) -> str:
    """The README with its measured part anew."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def write_readme(path: Path, facts: dict, tables: Sequence[Table]) -> None:
    path.write_text(replaced(path.read_text(), summary(facts, tables)))
