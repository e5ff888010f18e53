"""How well devices are used: share of their peak, bandwidth of a hop, share of the messages that work hides.

The same command on GPUs and TPUs, where it uses the devices at hand, and on CPU devices, where it shows that it works.

    python benchmarks/devices.py            # `make bench BENCH="--parts devices"`
"""

from __future__ import annotations

from harness import Bench, Table, passes
from workloads import Case


def measured_cases(bench: Bench) -> list[Case]:
    """On accelerators 16,384 tokens for each device, and in the long run 131,072; less on CPU devices."""
    number = bench.devices["number"] if not bench.is_cpu else 2
    each = ([4096] if bench.quick else [8192, 32768]) if bench.is_cpu else ([16384] if bench.quick else [16384, 131072])
    dim = 64 if bench.is_cpu else 128
    found = []
    for length in (tokens * number for tokens in each):
        found.append(Case("three branches", length, (2048, 4 * 2048, length), (1, 4, 16), dim=dim))
    if not (bench.quick and bench.is_cpu):
        found.append(Case("dense", 4096 * number, (4096 * number,), (1,), dim=dim))
    return [bench.fit(case) for case in found]


def tables(bench: Bench) -> list[Table]:
    """All that this part measures."""
    rows = []
    number = bench.devices["number"] if not bench.is_cpu else 2
    for case in measured_cases(bench):
        for size in sorted({1, number}):
            for grad in (False, True):
                bench.say(f"use of {size} device(s), {case.name}, {case.length:,} tokens, {passes(grad)}")
                arguments = {"case": case.to_dict(), "size": size, "grad": grad, "repeats": bench.repeats}
                found = bench.jax(size).ask("call", function="probes:utilisation", **arguments)["result"]
                row = {"attention": case.name, "tokens": case.length, "devices": size, "pass": passes(grad)}
                row |= {
                    "s": found["seconds"],
                    "share of peak": found["utilisation"],
                    "hop GB/s": found.get("hop_GB_per_s"),
                }
                row |= {"messages alone s": found.get("messages_s"), "messages cost s": found.get("exposed_s")}
                rows.append({**row, "messages hidden": found.get("hidden")})
                peak = found["peak"]
    what = (
        f"{bench.devices['number']} x {bench.devices['kind']}"
        if not bench.is_cpu
        else "CPU devices, which share cores and memory: no accelerator's figures"
    )
    about = (
        f"On {what}. Causal, zigzag, {case.dtype}, heads 8 of {case.dim}. Peak: that of {peak}"
        + (" on all cores" if bench.is_cpu else ", dense, by its maker")
        + ". Flops are useful ones. Messages alone: their bytes over the measured bandwidth of a hop; what they cost: "
        "the program less the same program without them, within the noise of two timings (so it may be below 0); "
        "how much is hidden is told only where the messages alone take longer than that noise."
    )
    return [Table("devices", "How well devices are used", about, rows)]


if __name__ == "__main__":
    from run import main

    main("devices")
