"""Compares rings of simulated CPU devices with one device, with head sharding and with dense ring attention.

    python benchmarks/ring.py            # `make bench BENCH="--parts ring"`

CPU devices communicate through shared memory and share the cores. This measures overhead and load balance, not the
speed of an accelerator. On accelerators the same command uses the available devices.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from harness import Bench, Candidate, Result, Table, max_spread, pass_name, value_or_failure
from workers import CORES
from workloads import Case, both_masks, dense, ring_case

# Published figures of the DarcStar-Solutions-Tech fork of dilated-attention-pytorch.
FORK_SIMULATED_TIME = {2: 132.58 / 11.89, 4: 398.51 / 11.89}  # ring simulated on one GPU / ring of 1
FORK_TWO_GPU_TIME = 1703.37 / 6.41  # two GPUs / one GPU, at 8,192 tokens
FORK_TWO_GPU_MEMORY = 2 * 152.1 / 48.0


def ring_of(size: int) -> Candidate:
    return Candidate("ring", devices=size)


def ring_sizes(bench: Bench) -> list[Table]:
    """Measures time and memory of rings relative to one device on the same cores."""
    sizes = [p for p in (2, 4, 8) if bench.is_cpu or p <= bench.devices["count"]]
    cases: list[Case] = [ring_case(16384)]
    if not bench.quick:
        cases = [x for length in (32768, 131072) for x in both_masks(ring_case(length))[::-1]]
    candidates = {"one": Candidate("one device"), "heads": Candidate("heads", devices=2)}
    candidates |= {f"{p}": ring_of(p) for p in sizes}
    times, memories = [], []
    for case in cases:
        for grad in (True,) if bench.quick else (False, True):
            results = bench.measure(case, grad, candidates)
            best = min(r.median for n, r in results.items() if n in ("one", "heads"))
            key = {"tokens": case.length, "mask": case.mask, "pass": pass_name(grad)}
            row = {**key, "one device (s)": results["one"].median}
            row |= {f"ring of {p}": results[f"{p}"].median / best for p in sizes}
            times.append({**row, "spread": max_spread(results)})
            one = results["one"].info["device_bytes"]
            row = {**key, "one device (MiB)": one / 2**20}
            memories.append(row | {f"ring of {p}": p * results[f"{p}"].info["device_bytes"] / one for p in sizes})
    simulated = {f"ring of {p}": x for p, x in FORK_SIMULATED_TIME.items()}
    times.append({"tokens": "DarcStar fork, simulated on one GPU", **simulated})
    times.append({"tokens": "DarcStar fork, two GPUs", "ring of 2": FORK_TWO_GPU_TIME})
    memories.append({"tokens": "DarcStar fork, two GPUs", "ring of 2": FORK_TWO_GPU_MEMORY})
    time_notes = (
        "Segments 2048, 8192 and the whole sequence with rates 1, 4, 16; 8 heads of 64; contiguous layout. The plan "
        "exchanges heads. Time relative to the faster of one device and two head-sharded devices on the same cores: 1 "
        "means no overhead. CPU devices share the cores, so a ring cannot scale beyond them. The last rows are "
        "published figures of the DarcStar-Solutions-Tech fork of fkodom/dilated-attention-pytorch, whose "
        "`RingDilatedAttentionV2Collective` class ringjax reimplements: its ring relative to its single device, on its "
        "own hardware."
    )
    memory_notes = (
        "Arguments, outputs and temporaries of the compiled program, summed over all devices, relative to one device: "
        "1 means that each device holds exactly its share. The last row is a published figure of the DarcStar fork of "
        "dilated-attention-pytorch."
    )
    return [
        Table("ring-time", "Ring overhead: time", time_notes, times),
        Table("ring-memory", "Ring overhead: total memory", memory_notes, memories),
    ]


WAYS = ("auto", "auto again", "all_to_all", "all_to_all_ring", "ring", "all_gather")


def strategy_row(bench: Bench, case: Case, size: int, grad: bool) -> dict:
    """Measures each way to share segments on `size` devices, together with programs that do not share any."""
    ways = [way for way in WAYS if way != "all_to_all_ring" or size > 2]  # two devices form one team
    candidates = {
        way: Candidate("ring", devices=size, options={"strategy": way.removesuffix(" again")}) for way in ways
    }
    candidates |= {"one": Candidate("one device"), "heads": Candidate("heads", devices=2)}
    results = bench.measure(case, grad, candidates)
    first, again = (results[way] for way in WAYS[:2])
    auto = statistics.median([*first.times, *again.times])
    best = min(results[name].median for name in ("one", "heads"))
    row = {"tokens": case.length, "devices": size, "pass": pass_name(grad), "auto (s)": auto}
    row |= {WAYS[1]: again.median / first.median} | {
        way: results[way].median / auto if way in results else None for way in WAYS[2:]
    }
    return {**row, "auto / no ring": auto / best, "spread": max_spread(results)}


def strategies(bench: Bench) -> Table:
    """Measures the time of each way to share segments relative to the automatic choice."""
    lengths, sizes, grads = ((16384,), (8,), (True,)) if bench.quick else ((32768, 131072), (2, 4, 8), (False, True))
    rows = [
        strategy_row(bench, ring_case(length), size, grad)
        for length, size, grad in itertools.product(lengths, sizes, grads)
    ]
    notes = (
        "Time of each strategy divided by that of `strategy='auto'`, measured alternately: values below 1 are faster "
        "than the automatic choice. That is measured twice, and *auto again*, the ratio of the two, shows the noise. "
        "Causal; 8 heads of 64; contiguous layout, zigzag for rings, also those of teams, and for all-gather. "
        "*auto / no ring*: relative to the faster of one device and two head-sharded devices."
    )
    return Table("strategies", "Ways to share segments", notes, rows)


def cores(bench: Bench) -> Table:
    """Measures the speedup of a ring of two on two cores over one device on one core."""
    rows = []
    one = Candidate("one device", options={"cores": [CORES[0]]})
    for grad in (True,) if bench.quick else (False, True):
        case = ring_case(16384 if bench.quick else 32768)
        results = bench.measure(case, grad, {"one": one, "two": ring_of(2)})
        seconds = {name: r.median for name, r in results.items()}
        row = {"tokens": case.length, "pass": pass_name(grad)}
        row |= {"one core (s)": seconds["one"], "two cores (s)": seconds["two"]}
        rows.append(row | {"speedup": seconds["one"] / seconds["two"], "matmul speedup": matmul_speedup(bench)})
    notes = (
        "One device on one core compared with a ring of two devices on two cores. *Matmul speedup* is the speedup of a "
        "large matrix multiply on two cores over one, which is what the machine allows."
    )
    return Table("cores", "Scaling from one core to two", notes, rows)


def matmul_speedup(bench: Bench) -> float:
    """Returns the speedup of a matrix multiply on all cores over one, the median of interleaved runs."""
    workers = bench.jax(), bench.jax(cores=[CORES[0]])
    rates = [[worker.call("probes:matmul_rate") for worker in workers] for _ in range(bench.repeats)]
    return statistics.median(both / one for both, one in rates)


def sent_bytes(bench: Bench, case: Case, size: int, grad: bool) -> int:
    return bench.jax().call("probes:sent_bytes", case=case.to_dict(), size=size, grad=grad)


def dense_rings(bench: Bench) -> Table:
    """Compares dilated with dense ring attention, both by ringjax."""
    rows, size = [], 4
    for length in (8192,) if bench.quick else (8192, 32768):
        for grad in (False,) if bench.quick else (False, True):
            pair = {"dilated": ring_case(length), "dense": dense(length)}
            times = {name: bench.measure(case, grad, {"ring": ring_of(size)})["ring"] for name, case in pair.items()}
            sent = {name: sent_bytes(bench, case, size, grad) for name, case in pair.items()}
            row = {"tokens": length, "pass": pass_name(grad)}
            row["time, dense / dilated"] = times["dense"].median / times["dilated"].median
            rows.append(row | {"bytes sent, dense / dilated": sent["dense"] / sent["dilated"]})
    notes = (
        "Dense attention (one segment, rate 1) relative to dilated attention on a ring of 4, causal, both by ringjax."
    )
    return Table("dense-ring", "Savings of dilation on a ring", notes, rows)


def ringattention(bench: Bench) -> list[Table]:
    """Compares dense attention with ringattention 0.1.2, both on a ring of 4."""
    size, rows = 4, []
    baseline = Candidate("ringattention", devices=size, is_baseline=True, options={"folder": bench.peer_folder})
    if not bench.can_run(baseline):
        return []
    for length in (8192,) if bench.quick else (8192, 32768):
        for grad in (True,) if bench.quick else (False, True):
            case = dense(length)
            results = bench.measure(case, grad, {"ringjax": ring_of(size), "baseline": baseline})
            shard = length // size * case.heads * case.dim * 4
            # ringattention sends k and v p times forward, and k, v and float32 dk and dv p times backward
            baseline_sent = size * 2 * shard + (size * 4 * shard if grad else 0)
            row = {"tokens": length, "pass": pass_name(grad), "ringjax (s)": results["ringjax"].median}
            row |= {"speedup vs ringattention": speedup(results), "memory reduction": memory_reduction(results)}
            rows.append(row | {"traffic reduction": baseline_sent / sent_bytes(bench, case, size, grad)})
    notes = (
        "Baseline: ringattention 0.1.2, the JAX implementation of [Ring Attention](https://arxiv.org/abs/2310.01889), "
        "with blocks of 512 (its fastest setting here). Causal, ring of 4. Its time, memory and bytes sent are divided "
        "by those of ringjax, so values above 1 favor ringjax. Memory is per device, from the compiled program."
    )
    return [Table("ringattention", "Dense ring attention compared with ringattention", notes, rows)]


def speedup(results: dict[str, Result]) -> float | str | None:
    baseline = results["baseline"]
    return value_or_failure(baseline, baseline.median / results["ringjax"].median)


def memory_reduction(results: dict[str, Result]) -> float | None:
    baseline = results["baseline"]
    return None if baseline.failure else baseline.info["device_bytes"] / results["ringjax"].info["device_bytes"]


def tables(bench: Bench) -> Iterator[Table]:
    """Measures all tables of this part."""
    yield from ring_sizes(bench)
    yield strategies(bench)
    if bench.is_cpu and len(CORES) > 1:
        yield cores(bench)
    yield dense_rings(bench)
    yield from ringattention(bench)


if __name__ == "__main__":
    from run import main

    main("ring")
