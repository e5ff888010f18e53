"""One million tokens forward and backward on this machine, and time per token against 65,536 tokens.

    python benchmarks/million.py            # `make million`

The segments reach over the whole sequence, with (nearly) constant work per token: 1024 keys in the first branch, a
quarter of that in the next, and so on. Some rows are compared with the dense oracle.
"""

from __future__ import annotations

from harness import Bench, Table
from workers import Worker
from workloads import reaching

LENGTHS = (65_536, 1_048_576)


def tables(bench: Bench) -> list[Table]:
    """All that this part measures."""
    rows = []
    for causal in (True,) if bench.quick else (True, False):
        each = []
        for length in LENGTHS:
            case = bench.fit(reaching(length, causal))
            repeats = (1 if bench.quick else 2) * min(8, LENGTHS[-1] // length)
            bench.say(f"{length:,} tokens, {case.mask}")
            worker = Worker("jax_worker.py") if bench.is_cpu else bench.jax()  # the peak memory is its own
            found = worker.ask("call", function="probes:whole_run", case=case.to_dict(), repeats=repeats)["result"]
            if bench.is_cpu:
                worker.close()
            each.append(found["seconds"] / length)
            row = {"tokens": length, "mask": case.mask, "s": found["seconds"], "us per token": each[-1] * 1e6}
            row |= {"per token over 65,536 tokens": each[-1] / each[0], "peak GiB": found["peak"] / 2**30}
            row |= {"temporaries over q + k + v": found["temp"], "compile s": found["compile_s"]}
            rows.append({**row, "program kB": found["program_kB"], "error of rows": found["error"]})
    about = (
        "Forward and backward, 4 heads of 64, segments from 1024 to the whole sequence, each four times the one "
        "before, with rates 1, 4, 16, ... Rows of the output are compared with the dense oracle."
    )
    return [Table("million", "One million tokens", about, rows)]


if __name__ == "__main__":
    from run import main

    main("million")
