"""Runs one million tokens forward and backward, and compares the time per token with that at 65,536 tokens.

    python benchmarks/million.py            # `make million`

The segments grow up to the whole sequence at nearly constant work per token: 1024 keys in the first branch, a quarter
of that in the next, and so on. Some rows are checked against the dense oracle.
"""

from __future__ import annotations

from harness import Bench, Table
from workers import Worker
from workloads import growing_segments

LENGTHS = (65_536, 1_048_576)


def tables(bench: Bench) -> list[Table]:
    """Measures all tables of this part."""
    rows = []
    for causal in (True,) if bench.quick else (True, False):
        per_token = []
        for length in LENGTHS:
            case = bench.adapt(growing_segments(length, causal))
            repeats = (1 if bench.quick else 2) * min(8, LENGTHS[-1] // length)
            bench.log(f"{length:,} tokens, {case.mask}")
            worker = Worker("jax_worker.py") if bench.is_cpu else bench.jax()  # a new process, to measure its peak RSS
            measured = worker.call("probes:full_run", case=case.to_dict(), repeats=repeats)
            if bench.is_cpu:
                worker.close()
            per_token.append(measured["seconds"] / length)
            row = {"tokens": length, "mask": case.mask, "time (s)": measured["seconds"]}
            row |= {"µs/token": per_token[-1] * 1e6, "µs/token vs 65,536": per_token[-1] / per_token[0]}
            row |= {"peak RSS (GiB)": measured["peak_bytes"] / 2**30}
            row |= {"temporaries / (q + k + v)": measured["temp_ratio"], "compile (s)": measured["compile_s"]}
            rows.append({**row, "HLO (kB)": measured["hlo_kB"], "max error": measured["error"]})
    notes = (
        "Forward and backward, 4 heads of 64. Segments grow from 1024 to the whole sequence by a factor of four, with "
        "rates 1, 4, 16, ... Some output rows are checked against the dense oracle (*max error*)."
    )
    return [Table("million", "One million tokens", notes, rows)]


if __name__ == "__main__":
    from run import main

    main("million")
