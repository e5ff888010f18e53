"""Rings of CPU devices: against one device, against sharded heads, against dense rings of ours and of others.

    python benchmarks/ring.py            # `make bench BENCH="--parts ring"`

CPU devices hand data over through shared memory and share the cores: this shows counts, work and waiting, and no
accelerator's speed. On accelerators the same command uses the devices at hand.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from harness import Bench, Contender, Result, Table, cell, largest_spread, passes
from workers import CORES
from workloads import Case, both_masks, dense, ring_case

REFERENCE_TIME = {2: 132.58 / 11.89, 4: 398.51 / 11.89}  # simulated on one GPU, over its ring of 1
REFERENCE_REAL = 1703.37 / 6.41  # two real GPUs over one, at 8,192 tokens
REFERENCE_MEMORY = 2 * 152.1 / 48.0


def ring_of(size: int) -> Contender:
    return Contender("ring", devices=size)


def sizes(bench: Bench) -> list[Table]:
    """Time and memory of rings over those of one device, on the same cores."""
    rings = [p for p in (2, 4, 8) if bench.is_cpu or p <= bench.devices["number"]]
    cases: list[Case] = [ring_case(16384)]
    if not bench.quick:
        cases = [x for length in (32768, 131072) for x in both_masks(ring_case(length))[::-1]]
    contenders = {"one": Contender("one device"), "heads": Contender("heads", devices=2)}
    contenders |= {f"{p}": ring_of(p) for p in rings}
    times, memories = [], []
    for case in cases:
        for grad in (True,) if bench.quick else (False, True):
            results = bench.race(case, grad, contenders)
            best = min(r.median for n, r in results.items() if n in ("one", "heads"))
            row = {
                "tokens": case.length,
                "mask": case.mask,
                "pass": passes(grad),
                "one device s": results["one"].median,
            }
            row |= {f"ring of {p}": results[f"{p}"].median / best for p in rings}
            times.append({**row, "spread": largest_spread(results)})
            row = {name: row[name] for name in ("tokens", "mask", "pass")}
            one = results["one"].facts["device_bytes"]
            row["one device MiB"] = one / 2**20
            memories.append(row | {f"ring of {p}": p * results[f"{p}"].facts["device_bytes"] / one for p in rings})
    times.append({"tokens": "reference system, simulated", **{f"ring of {p}": x for p, x in REFERENCE_TIME.items()}})
    times.append({"tokens": "reference system, two GPUs", "ring of 2": REFERENCE_REAL})
    memories.append({"tokens": "reference system, two GPUs", "ring of 2": REFERENCE_MEMORY})
    about = (
        "Segments 2048, 8192 and the whole, rates 1, 4, 16; 8 heads of 64; causal in zigzag layout. Time over the "
        "better of one device and two devices that share the heads, all on the same cores: 1 is no loss, and no ring "
        "of CPU devices can be below what the cores give. The reference system's published figures are its ring over "
        "its one device, on its own hardware."
    )
    memory = (
        "Arguments, outputs and temporaries of the compiled program of a device, times the devices, over those of one "
        "device: 1 means that each device holds its share and nothing more."
    )
    return [
        Table("rings", "Rings over one device: time", about, times),
        Table("ring-memory", "Rings over one device: memory of all devices together", memory, memories),
    ]


def cores(bench: Bench) -> Table:
    rows = []
    one = Contender("one device", options={"cores": [CORES[0]]})
    for grad in (True,) if bench.quick else (False, True):
        case = ring_case(16384 if bench.quick else 32768)
        results = bench.race(case, grad, {"one": one, "two": ring_of(2)})
        seconds = {name: r.median for name, r in results.items()}
        row = {"tokens": case.length, "pass": passes(grad), "one core s": seconds["one"], "two cores s": seconds["two"]}
        rows.append(row | {"times as fast": seconds["one"] / seconds["two"], "a matrix multiply": matmul_gain(bench)})
    about = (
        "One device on one core, and a ring of two devices on two cores; beside it, how much faster a large matrix "
        "multiply is on two cores than on one: what the machine itself gives."
    )
    return Table("cores", "Twice the cores", about, rows)


def matmul_gain(bench: Bench) -> float:
    """Rate of a matrix multiply on all cores over that on one: the median of interleaved runs."""
    workers = bench.jax(), bench.jax(cores=[CORES[0]])
    rates = [[w.ask("call", function="probes:matmul_rate")["result"] for w in workers] for _ in range(bench.repeats)]
    return statistics.median(both / one for both, one in rates)


def sent_bytes(bench: Bench, case: Case, size: int, grad: bool) -> int:
    answer = bench.jax().ask("call", function="probes:sent_bytes", case=case.to_dict(), size=size, grad=grad)
    return answer["result"]


def dense_rings(bench: Bench) -> Table:
    """Dilated against dense ring attention of ringjax itself."""
    rows, size = [], 4
    for length in (8192,) if bench.quick else (8192, 32768):
        for grad in (False,) if bench.quick else (False, True):
            pair = {"dilated": ring_case(length), "dense": dense(length)}
            results = {name: bench.race(case, grad, {"ring": ring_of(size)})["ring"] for name, case in pair.items()}
            sent = {name: sent_bytes(bench, case, size, grad) for name, case in pair.items()}
            row = {"tokens": length, "pass": passes(grad), "time": results["dense"].median / results["dilated"].median}
            rows.append(row | {"bytes sent": sent["dense"] / sent["dilated"]})
    about = "Ring of 4, causal: dense attention (one segment, rate 1) over dilated attention, both by ringjax."
    return Table("dense-ring", "What dilation saves on a ring", about, rows)


def ringattention(bench: Bench) -> list[Table]:
    """Dense attention beside ringattention 0.1.2, both on a ring of 4."""
    size, rows = 4, []
    peer = Contender("ringattention", devices=size, is_peer=True, options={"folder": bench.peer_folder})
    if not bench.has(peer):
        return []
    for length in (8192,) if bench.quick else (8192, 32768):
        for grad in (True,) if bench.quick else (False, True):
            case = dense(length)
            results = bench.race(case, grad, {"ringjax": ring_of(size), "peer": peer})
            shard = length // size * case.heads * case.dim * 4
            # it sends k and v p times forward and, with float32 sums, k, v, dk and dv p times backward
            theirs = size * 2 * shard + (size * 4 * shard if grad else 0)
            row = {"tokens": length, "pass": passes(grad), "ringjax s": results["ringjax"].median}
            row |= {"time": over(results, "median"), "memory": over(results, "bytes")}
            rows.append(row | {"bytes sent": theirs / sent_bytes(bench, case, size, grad)})
    about = (
        "ringattention 0.1.2 over ringjax, causal, ring of 4, blocks of 512 (its fastest here): above 1, ringjax does "
        "better. Memory is that of a device by its compiled program."
    )
    return [Table("ringattention", "Dense ring attention beside ringattention", about, rows)]


def over(results: dict[str, Result], what: str) -> float | str | None:
    peer = results["peer"]
    if what == "median":
        return cell(peer, peer.median / results["ringjax"].median)
    return None if peer.failure else peer.facts["device_bytes"] / results["ringjax"].facts["device_bytes"]


def tables(bench: Bench) -> Iterator[Table]:
    """All that this part measures."""
    yield from sizes(bench)
    if bench.is_cpu and len(CORES) > 1:
        yield cores(bench)
    yield dense_rings(bench)
    yield from ringattention(bench)


if __name__ == "__main__":
    from run import main

    main("ring")
