"""Measures device utilization: fraction of peak FLOP/s, bandwidth of a hop, and how much communication is hidden.

The same command runs on GPUs, TPUs and simulated CPU devices. On CPU it only shows that the measurement works.

    python benchmarks/devices.py            # `make bench BENCH="--parts devices"`
"""

from __future__ import annotations

from harness import Bench, Table, pass_name
from workloads import Case


def cases(bench: Bench) -> list[Case]:
    """Returns the cases: on accelerators 16,384 tokens per device (and 131,072 in a full run), fewer on CPU."""
    count = device_count(bench)
    if bench.is_cpu:
        tokens_per_device = [4096] if bench.quick else [8192, 32768]
    else:
        tokens_per_device = [16384] if bench.quick else [16384, 131072]
    dim = 64 if bench.is_cpu else 128
    result = []
    for length in (tokens * count for tokens in tokens_per_device):
        result.append(Case("three branches", length, (2048, 4 * 2048, length), (1, 4, 16), dim=dim))
    if not (bench.quick and bench.is_cpu):
        result.append(Case("dense", 4096 * count, (4096 * count,), (1,), dim=dim))
    return [bench.adapt(case) for case in result]


def device_count(bench: Bench) -> int:
    return 2 if bench.is_cpu else bench.devices["count"]


def tables(bench: Bench) -> list[Table]:
    """Measures all tables of this part."""
    rows = []
    for case in cases(bench):
        for size in sorted({1, device_count(bench)}):
            for grad in (False, True):
                bench.log(f"utilization, {size} device(s), {case.name}, {case.length:,} tokens, {pass_name(grad)}")
                arguments = {"case": case.to_dict(), "size": size, "grad": grad, "repeats": bench.repeats}
                measured = bench.jax(size).call("probes:utilization", **arguments)
                row = {"attention": case.name, "tokens": case.length, "devices": size, "pass": pass_name(grad)}
                row |= {"time (s)": measured["seconds"], "fraction of peak": measured["utilization"]}
                row |= {"hop GB/s": measured.get("hop_GB_per_s"), "comm alone (s)": measured.get("comm_s")}
                rows.append(
                    {**row, "exposed comm (s)": measured.get("exposed_s"), "comm hidden": measured.get("hidden")}
                )
                peak = measured["peak"]
    where = (
        "Simulated CPU devices that share cores and memory; these figures do not predict accelerator performance"
        if bench.is_cpu
        else f"{bench.devices['count']} x {bench.devices['kind']}"
    )
    notes = (
        f"{where}. Causal, zigzag layout, {case.dtype}, 8 heads of {case.dim}. Peak is "
        + (f"the rate of {peak} on all cores" if bench.is_cpu else f"the vendor's dense figure for {peak}")
        + "; only useful FLOPs count. *Comm alone* is the bytes sent divided by the measured bandwidth of a hop. "
        "*Exposed comm* is the time of the program minus that of the same program without communication; it can be "
        "negative within measurement noise. *Comm hidden* is only reported where comm alone exceeds that noise."
    )
    return [Table("devices", "Device utilization", notes, rows)]


if __name__ == "__main__":
    from run import main

    main("devices")
