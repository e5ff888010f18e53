"""Compares the decoding cache with a dense one, at contexts of 32,768 and 1,048,576 tokens.

python benchmarks/decode.py            # `make bench BENCH="--parts decode"`
"""

from __future__ import annotations

from harness import Bench, Table


def tables(bench: Bench) -> list[Table]:
    """Measures all tables of this part."""
    bench.log("decoding")
    measured = bench.jax().call("decoding:measure", repeats=bench.repeats)
    at = {(row["cache"], row["context"]): row for row in measured}
    short, long = sorted({row["context"] for row in measured})
    rows = []
    for name in dict.fromkeys(row["cache"] for row in measured):
        a, b = at[name, short], at[name, long]
        row = {"cache": name, f"ms/token at {short:,}": a["seconds"] * 1e3, f"ms/token at {long:,}": b["seconds"] * 1e3}
        row |= {"time ratio": b["seconds"] / a["seconds"], f"MiB at {long:,}": b["bytes"] / 2**20}
        rows.append({**row, "memory ratio": b["bytes"] / a["bytes"]})
    notes = (
        "Decodes one token at a time in a `lax.scan` with a donated cache, 8 heads of 64. ringjax is measured with "
        "segments 2048, 8192, 32768 (rates 1, 4, 16) and with segments up to the whole context. In the dense cache, "
        "each token attends to all previous ones. The ratios divide the longer context by the shorter one."
    )
    return [Table("decode", "Decoding", notes, rows)]


if __name__ == "__main__":
    from run import main

    main("decode")
