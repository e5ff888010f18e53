"""The decoding cache beside a dense one, at 32,768 and at 1,048,576 tokens of context.

python benchmarks/decode.py            # `make bench BENCH="--parts decode"`
"""

from __future__ import annotations

from harness import Bench, Table


def tables(bench: Bench) -> list[Table]:
    """All that this part measures."""
    bench.say("decoding")
    found = bench.jax().ask("call", function="decoding:figures", repeats=bench.repeats)["result"]
    at = {(row["cache"], row["context"]): row for row in found}
    short, long = sorted({row["context"] for row in found})
    rows = []
    for name in dict.fromkeys(row["cache"] for row in found):
        a, b = at[name, short], at[name, long]
        row = {"cache": name, f"ms per token at {short:,}": a["seconds"] * 1e3, f"at {long:,}": b["seconds"] * 1e3}
        row |= {"longer over shorter": b["seconds"] / a["seconds"], f"MiB at {long:,}": b["bytes"] / 2**20}
        rows.append({**row, "memory, longer over shorter": b["bytes"] / a["bytes"]})
    about = (
        "One token after another in a `lax.scan`, the cache donated, 8 heads of 64. Segments 2048, 8192, 32768 (rates "
        "1, 4, 16), and segments that reach over the whole context, beside a dense cache, whose every token attends "
        "over every other."
    )
    return [Table("decode", "Decoding", about, rows)]


if __name__ == "__main__":
    from run import main

    main("decode")
