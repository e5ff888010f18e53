"""How time, memory, program and error grow with the length, the ring and the branches.

python benchmarks/scaling.py            # `make bench BENCH="--parts scaling"`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness import Bench, Contender, Plot, Table, exponent, passes
from workloads import Case, constant, reaching, ring_case

ONE = Contender("one device")


def lengths(bench: Bench, make: Callable[[int], Case], grad: bool) -> Table:
    """One pattern, whose work per token is constant, from 8K to 1M (to 256K in the quick report)."""
    sizes = [8192, 32768, 262_144] if bench.quick else [2**i for i in range(13, 21)]
    rows = []
    for length in sizes:
        case = make(length)
        result = bench.race(case, grad, {"ringjax": ONE}, memory=True)["ringjax"]
        row = {"tokens": length, "s": result.median, "us per token": result.median / length * 1e6}
        row |= {"MiB": result.bytes and result.bytes / 2**20, "program MiB": result.facts["device_bytes"] / 2**20}
        row |= {"branches": len(case.branches), "compile s": result.facts["compile_s"]}
        rows.append({**row, "GFLOP/s": case.flops(grad) / result.median / 1e9})
    powers = {c: exponent(sizes, [r[c] for r in rows]) for c in ("s", "MiB", "program MiB") if rows[0][c]}
    rows.append({"tokens": "exponent", **powers})
    about = (
        f"Causal, 4 heads of 64, float32; at the longest, segments {list(case.segment_lengths)} with rates "
        f"{list(case.dilation_rates)}. The exponent is that of the power law that fits best: 1 is linear. MiB is "
        "the largest resident memory of the process during a run, inputs included; program MiB the compiler's "
        "arguments, outputs and temporaries."
    )
    if make is reaching:
        about += " The work per token is that of the first branch and a third more at any length; branches are added."
    name = f"scaling-{case.name.split()[0]}-{'both' if grad else 'forward'}"
    title = f"8K to {'256K' if bench.quick else '1M'} tokens: {case.name}, {passes(grad)}"
    return Table(name, title, about, rows, Plot("tokens", ["s"], "seconds"))


def constant_both(bench: Bench) -> Table:
    return lengths(bench, constant, grad=True)


def constant_forward(bench: Bench) -> Table:
    return lengths(bench, constant, grad=False)


def reaching_both(bench: Bench) -> Table:
    return lengths(bench, reaching, grad=True)


def branches(bench: Bench) -> Table:
    rows = []
    for number in (1, 3, 5) if bench.quick else range(1, 6):
        lengths_, rates = [1024 * 2**i for i in range(number)], [2**i for i in range(number)]
        case = Case(f"{number} branches", 16384, tuple(lengths_), tuple(rates))
        result = bench.race(case, True, {"ringjax": ONE})["ringjax"]
        row = {"branches": number, "s": result.median, "GFLOP/s": case.flops(True) / result.median / 1e9}
        rows.append(
            {**row, "compile s": result.facts["compile_s"], "program MiB": result.facts["device_bytes"] / 2**20}
        )
    about = "16,384 tokens, causal, 8 heads of 64, forward and backward; segments 1024, 2048, ... and rates 1, 2, ..."
    return Table("branches", "Number of branches", about, rows)


def compiling(bench: Bench) -> Table:
    rows = []
    sizes = (1, 8) if bench.quick else (1, 2, 4, 8, 16)
    for length in (65536, 1_048_576):
        for size in sizes:
            if not bench.is_cpu and size > bench.devices["number"]:
                continue
            worker = bench.jax(size)
            case = bench.fit(ring_case(length)).to_dict()
            bench.say(f"compiling {length:,} tokens for {size} devices")
            facts = worker.ask("call", function="probes:compile_facts", case=case, size=size)["result"]
            rows.append({"tokens": length, "devices": size, **{k.replace("_", " "): v for k, v in facts.items()}})
    about = (
        "The gradient of three branches (2048, 8192 and the whole; rates 1, 4, 16), causal: traced with an empty "
        "pattern cache, then compiled."
    )
    return Table("compiling", "Compile time over length and devices", about, rows)


def precision(bench: Bench) -> Table:
    rows = []
    seeds = 2 if bench.quick else 5
    plain = [(length, 1) for length in ((8192,) if bench.quick else (1024, 4096, 16384, 65536))]
    rings = [(8192, size) for size in ((8,) if bench.quick else (2, 4, 8))]
    for length, size in [*plain, *rings]:
        if not bench.is_cpu and size > bench.devices["number"]:
            continue
        case = Case("bfloat16", length, (512, length), (1, 8), heads=2).to_dict()
        bench.say(f"bfloat16 against float32, {length:,} tokens, {size} devices")
        found = bench.jax(size).ask("call", function="probes:half_errors", case=case, size=size, seeds=seeds)["result"]
        rows.append(
            {
                "tokens": length,
                "devices": size,
                "error of the output": found["out"],
                "of the gradients": found["gradients"],
            }
        )
    about = (
        "Relative error of bfloat16 against float32 of the same rounded inputs: Frobenius norms, the worst of the "
        f"three gradients, mean of {seeds} seeds; causal, 2 heads of 64, segments 512 and the whole, rates 1 and 8. "
        "Rounding a result to bfloat16 alone gives 0.0017."
    )
    return Table("precision", "Error of bfloat16 over length and devices", about, rows)


def cache(bench: Bench) -> Table:
    rows = []
    for case in (ring_case(65536), reaching(1_048_576)):
        bench.say(f"pattern cache, {case.name}")
        repeats = 3 if bench.quick else 9
        found = bench.jax().ask("call", function="probes:cache_times", case=case.to_dict(), repeats=repeats)["result"]
        row = {
            "pattern": case.name,
            "tokens": case.length,
            "cold ms": found["cold_s"] * 1e3,
            "warm ms": found["warm_s"] * 1e3,
        }
        row |= {"warm over cold": found["warm_s"] / found["cold_s"], "kB held": found["bytes"] / 1e3}
        rows.append(row)
    rows.append({"pattern": "reference system (time of a call)", "warm over cold": 0.94})
    about = (
        "Tracing an attention and its gradient with the pattern cache empty and filled. A compiled program never asks "
        "the cache, so a warm cache saves only when tracing. The reference system published 0.94 to 1.0 for a warm "
        "cache and 1.02 to 1.04 for a cold one, over none, at every call."
    )
    return Table("cache", "Pattern cache, cold and warm", about, rows)


def budget(bench: Bench) -> list[Table]:
    size = 8
    if not bench.is_cpu and bench.devices["number"] < size:
        return []
    case = Case("short hops", 16384, (1024, 16384), (1, 64))
    bench.say("memory against a budget")
    arguments = {"case": case.to_dict(), "size": size, "shares": [2.0, 1.0, 0.97, 0.9, 0.5]}
    found = bench.jax(size).ask("call", function="probes:budgets", **arguments)["result"]
    rows = []
    for row in found:
        held = row["bytes"]
        cells = {"budget MiB": row["budget"] / 2**20, "branches": row["where"], "compiled MiB": held and held / 2**20}
        rows.append({**cells, "compiled over budget": held and held / row["budget"]})
    about = (
        "A ring of 8, 16,384 tokens, segments 1024 and 16384 with rates 1 and 64, forward and backward; bytes of a "
        "device. With room, few rows are gathered at once; with less, they hop; with too little, the plan refuses and "
        "says what would fit. The reference system's memory pool spent 2.9 to 6.1 times the memory for 0.9 to 1.1 of "
        "the time: here there is nothing to pool, since XLA plans all buffers of a program."
    )
    return [Table("budget", "Memory against a budget", about, rows)]


def tables(bench: Bench) -> Iterator[Table]:
    """All that this part measures."""
    growth = [constant_both] if bench.quick else [constant_both, constant_forward, reaching_both]
    for measure in (*growth, branches, compiling, precision, cache):
        yield measure(bench)
    yield from budget(bench)


if __name__ == "__main__":
    from run import main

    main("scaling")
