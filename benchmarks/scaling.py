"""Measures how time, memory, compile time and error scale with the sequence length, the devices and the branches.

python benchmarks/scaling.py            # `make bench BENCH="--parts scaling"`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness import Bench, Candidate, Plot, Table, exponent, pass_name
from workloads import Case, fixed_segments, growing_segments, ring_case

ONE = Candidate("one device")


def lengths(bench: Bench, make_case: Callable[[int], Case], grad: bool) -> Table:
    """Measures a pattern with constant work per token from 8K to 1M tokens (to 256K in a quick run)."""
    sizes = [8192, 32768, 262_144] if bench.quick else [2**i for i in range(13, 21)]
    rows = []
    for length in sizes:
        case = make_case(length)
        result = bench.measure(case, grad, {"ringjax": ONE}, memory=True)["ringjax"]
        row = {"tokens": length, "time (s)": result.median, "µs/token": result.median / length * 1e6}
        row["peak memory (MiB)"] = result.peak_bytes and result.peak_bytes / 2**20
        row["program memory (MiB)"] = result.info["device_bytes"] / 2**20
        row |= {"branches": len(case.branches), "compile (s)": result.info["compile_s"]}
        rows.append({**row, "GFLOP/s": case.flops(grad) / result.median / 1e9})
    fitted = [c for c in ("time (s)", "peak memory (MiB)", "program memory (MiB)") if rows[0][c]]
    rows.append({"tokens": "exponent", **{c: exponent(sizes, [r[c] for r in rows]) for c in fitted}})
    notes = (
        f"Causal, 4 heads of 64, float32; at the longest length, segments {list(case.segment_lengths)} with rates "
        f"{list(case.dilation_rates)}. *Exponent* is that of the best-fitting power law; 1 is linear. *Peak memory* is "
        "the peak resident memory of the process during a run, including inputs; *program memory* is the arguments, "
        "outputs and temporaries reported by the compiler."
    )
    if make_case is growing_segments:
        notes += (
            " The number of branches grows with the length, but the work per token stays about a third above that of "
            "the first branch."
        )
    name = f"scaling-{case.name.split()[0]}-{'both' if grad else 'forward'}"
    title = f"8K to {'256K' if bench.quick else '1M'} tokens: {case.name}, {pass_name(grad)}"
    return Table(name, title, notes, rows, Plot("tokens", ["time (s)"], "seconds"))


def fixed_both(bench: Bench) -> Table:
    return lengths(bench, fixed_segments, grad=True)


def fixed_forward(bench: Bench) -> Table:
    return lengths(bench, fixed_segments, grad=False)


def growing_both(bench: Bench) -> Table:
    return lengths(bench, growing_segments, grad=True)


def branches(bench: Bench) -> Table:
    """Measures one to five branches."""
    rows = []
    for count in (1, 3, 5) if bench.quick else range(1, 6):
        segment_lengths, rates = [1024 * 2**i for i in range(count)], [2**i for i in range(count)]
        case = Case(f"{count} branches", 16384, tuple(segment_lengths), tuple(rates))
        result = bench.measure(case, True, {"ringjax": ONE})["ringjax"]
        row = {"branches": count, "time (s)": result.median, "GFLOP/s": case.flops(True) / result.median / 1e9}
        row |= {"compile (s)": result.info["compile_s"], "program memory (MiB)": result.info["device_bytes"] / 2**20}
        rows.append(row)
    notes = "16,384 tokens, causal, 8 heads of 64, forward and backward; segments 1024, 2048, ... and rates 1, 2, ..."
    return Table("branches", "Number of branches", notes, rows)


def compile_time(bench: Bench) -> Table:
    """Measures tracing and compilation over the length and the devices."""
    rows = []
    sizes = (1, 8) if bench.quick else (1, 2, 4, 8, 16)
    for length in (65536, 1_048_576):
        for size in sizes:
            if not bench.is_cpu and size > bench.devices["count"]:
                continue
            case = bench.adapt(ring_case(length)).to_dict()
            bench.log(f"compiling {length:,} tokens for {size} devices")
            measured = bench.jax(size).call("probes:compile_times", case=case, size=size)
            row = {"tokens": length, "devices": size, "trace (s)": measured["trace_s"]}
            rows.append({**row, "compile (s)": measured["compile_s"], "HLO (kB)": measured["hlo_kB"]})
    notes = (
        "The gradient of three branches (segments 2048, 8192 and the whole sequence; rates 1, 4, 16), causal, traced "
        "with an empty pattern cache. *HLO* is the length of the compiled program's text."
    )
    return Table("compile-time", "Compile time by length and devices", notes, rows)


def precision(bench: Bench) -> Table:
    """Measures the error of bfloat16 over the length and the devices."""
    rows = []
    seeds = 2 if bench.quick else 5
    single = [(length, 1) for length in ((8192,) if bench.quick else (1024, 4096, 16384, 65536))]
    rings = [(8192, size) for size in ((8,) if bench.quick else (2, 4, 8))]
    for length, size in [*single, *rings]:
        if not bench.is_cpu and size > bench.devices["count"]:
            continue
        case = Case("bfloat16", length, (512, length), (1, 8), heads=2).to_dict()
        bench.log(f"bfloat16 error, {length:,} tokens, {size} devices")
        errors = bench.jax(size).call("probes:bfloat16_errors", case=case, size=size, seeds=seeds)
        row = {"tokens": length, "devices": size, "output error": errors["out"]}
        rows.append({**row, "gradient error": errors["gradients"]})
    notes = (
        "Relative error in Frobenius norm of bfloat16 against float32 on the same bfloat16-rounded inputs, the worst "
        f"of the three gradients, mean of {seeds} seeds. Causal, 2 heads of 64, segments 512 and the whole sequence, "
        "rates 1 and 8. For comparison, rounding a float32 result to bfloat16 has an error of 0.0017."
    )
    return Table("precision", "bfloat16 error by length and devices", notes, rows)


def cache(bench: Bench) -> Table:
    """Measures tracing with an empty and with a warm pattern cache."""
    rows = []
    for case in (ring_case(65536), growing_segments(1_048_576)):
        bench.log(f"pattern cache, {case.name}")
        repeats = 3 if bench.quick else 9
        measured = bench.jax().call("probes:cache_times", case=case.to_dict(), repeats=repeats)
        cold, warm = measured["cold_s"], measured["warm_s"]
        row = {"pattern": case.name, "tokens": case.length, "cold (ms)": cold * 1e3, "warm (ms)": warm * 1e3}
        rows.append({**row, "warm / cold": warm / cold, "cache size (kB)": measured["bytes"] / 1e3})
    rows.append({"pattern": "DarcStar fork (time per call)", "warm / cold": 0.94})
    notes = (
        "Time to trace an attention and its gradient with an empty (*cold*) and a filled (*warm*) pattern cache. "
        "Compiled programs do not access the cache, so it can only save tracing time. For comparison, the DarcStar "
        "fork of dilated-attention-pytorch published times per call of 0.94 to 1.0 with a warm cache and 1.02 to 1.04 "
        "with a cold one, relative to no cache."
    )
    return Table("cache", "Pattern cache, cold and warm", notes, rows)


def budget(bench: Bench) -> list[Table]:
    """Compares the memory of compiled programs with the budgets they were planned for."""
    size = 8
    if not bench.is_cpu and bench.devices["count"] < size:
        return []
    case = Case("short hops", 16384, (1024, 16384), (1, 64))
    bench.log("memory budgets")
    arguments = {"case": case.to_dict(), "size": size, "fractions": [2.0, 1.0, 0.97, 0.9, 0.5]}
    rows = []
    for measured in bench.jax(size).call("probes:memory_budgets", **arguments):
        compiled = measured["bytes"]
        row = {"budget (MiB)": measured["budget"] / 2**20, "branches": measured["where"]}
        row |= {"compiled (MiB)": compiled and compiled / 2**20}
        rows.append({**row, "compiled / budget": compiled and compiled / measured["budget"]})
    notes = (
        "Memory per device on a ring of 8: 16,384 tokens, segments 1024 and 16384 with rates 1 and 64, forward and "
        "backward. With a large budget the plan takes the fastest strategy; with a smaller one it rotates the few "
        "selected rows around the ring; if even that does not fit, it raises an error that states the memory needed. "
        "For comparison, the memory pool of the DarcStar fork of dilated-attention-pytorch used 2.9 to 6.1 times the "
        "memory for 0.9 to 1.1 times the time. ringjax needs no pool, because XLA assigns all buffers of a program "
        "at compile time."
    )
    return [Table("budget", "Memory budgets", notes, rows)]


def tables(bench: Bench) -> Iterator[Table]:
    """Measures all tables of this part."""
    growth = [fixed_both] if bench.quick else [fixed_both, fixed_forward, growing_both]
    for measure in (*growth, branches, compile_time, precision, cache):
        yield measure(bench)
    yield from budget(bench)


if __name__ == "__main__":
    from run import main

    main("scaling")
