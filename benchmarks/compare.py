"""Compares ringjax with the alternatives on this machine: PyTorch and JAX, dilated and dense.

    python benchmarks/compare.py --torch-python .venv-torch/bin/python        # `make bench BENCH="--parts compare"`

Outputs and gradients are compared before timing wherever two implementations compute the same function. Ratios above 1
mean that ringjax is faster or uses less memory. GFLOP/s count useful work only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from harness import Bench, Candidate, Plot, Result, Table, geometric_mean, max_spread, pass_name, value_or_failure
from workloads import (
    IMPLEMENTATIONS,
    LENGTH_SWEEP,
    LONG,
    SHORT,
    SPLIT_HEADS_LONG,
    SPLIT_HEADS_SHORT,
    Case,
    both_masks,
    dense,
)

ONE, RING = Candidate("one device"), Candidate("ring", devices=2)
PLAIN_XLA = Candidate("one device", options={"implementation": "xla"})
LONGNET = Candidate("longnet", "torch", is_baseline=True)
TORCH_DENSE = Candidate("dense", "torch", is_baseline=True)
JAX_DENSE = Candidate("dense", is_baseline=True)
# Published times of the DarcStar-Solutions-Tech fork of dilated-attention-pytorch on a GTX 1080.
FORK_MS = {
    "RingDilatedAttentionV2Collective, optimized": 4.25,
    "ImprovedDilatedAttention": 8.38,
    "DilatedAttention": 34.53,
}


def unchecked(candidate: Candidate) -> Candidate:
    """Returns the baseline without comparing its outputs, because it computes a different function."""
    return Candidate(candidate.kind, candidate.library, is_baseline=True, is_same=False)


def denormalize(outputs: list[np.ndarray], expected: list[np.ndarray]) -> list[np.ndarray]:
    """Undoes the normalization of dilated-attention-pytorch.

    It divides each head by its sum over the sequence and by the number of branches. Its gradient is that of the
    normalized output, so only outputs are compared.
    """
    return [outputs[0] * expected[0].sum(1, keepdims=True) * 2]


SPLIT_HEADS = Candidate("split heads", "torch", is_baseline=True, denormalize=denormalize)


def speedup(results: dict[str, Result], baseline: str, ours: str = "ringjax") -> float | str | None:
    """Returns the baseline's time divided by ours."""
    if baseline not in results:
        return None
    return value_or_failure(results[baseline], results[baseline].median / results[ours].median)


def memory_reduction(results: dict[str, Result], baseline: str) -> float | None:
    """Returns the baseline's peak memory divided by ours."""
    ours, theirs = results["ringjax"].peak_bytes, results[baseline].peak_bytes if baseline in results else None
    return theirs / ours if ours and theirs else None


def dilated(bench: Bench) -> Table:
    """Compares with the same dilated attention in PyTorch and with dense attention."""
    cells = [(case, grad) for case in (*both_masks(SHORT), *both_masks(LONG)) for grad in (False, True)]
    if bench.quick:
        cells = [(SHORT.with_mask(False), False), (SHORT, False), (SHORT, True), (LONG, False)]
    rows = []
    for case, grad in cells:
        candidates = {"ringjax": ONE, "ring of 2": RING, "plain XLA": PLAIN_XLA, "PyTorch": LONGNET}
        if case == SHORT and (not grad or not bench.quick):
            candidates["dense JAX"] = unchecked(JAX_DENSE)
            candidates["dense PyTorch"] = unchecked(TORCH_DENSE)
        results = bench.measure(case, grad, candidates, memory=True)
        rate = case.flops(grad) / results["ringjax"].median / 1e9
        rows.append(
            {
                "tokens": case.length,
                "mask": case.mask,
                "pass": pass_name(grad),
                "ringjax (s)": results["ringjax"].median,
                "speedup vs PyTorch": speedup(results, "PyTorch"),
                "speedup vs PyTorch, ring of 2": speedup(results, "PyTorch", "ring of 2"),
                "speedup vs PyTorch, plain XLA": speedup(results, "PyTorch", "plain XLA"),
                "memory reduction vs PyTorch": memory_reduction(results, "PyTorch"),
                "speedup vs dense JAX": speedup(results, "dense JAX"),
                "speedup vs dense PyTorch": speedup(results, "dense PyTorch"),
                "GFLOP/s": rate,
                "fraction of matmul rate": rate / bench.jax().call("probes:matmul_rate"),
                "spread": max_spread(results),
            }
        )
    columns = [f"speedup vs PyTorch{ours}" for ours in ("", ", ring of 2", ", plain XLA")]
    columns.append("memory reduction vs PyTorch")
    means = {c: geometric_mean(r[c] for r in rows if isinstance(r[c], float)) for c in columns}
    rows.append({"tokens": "geometric mean", **means})
    notes = (
        "Baseline: [LongNet](https://arxiv.org/abs/2307.02486) implemented on PyTorch's CPU flash attention operator "
        "(`benchmarks/torch_worker.py`), with the same outputs and gradients. 8 heads of 64, float32; segments 2048, "
        "4096, 8192 with rates 1, 2, 4 at 8,192 tokens, and 2048, 8192, 32768 with rates 1, 4, 8 at 32,768. ringjax "
        "uses its C++ CPU kernels. *Plain XLA* is the fallback without a C++ compiler. It is sometimes slower than the "
        "baseline because XLA's CPU backend starts and joins its threads for every matrix multiply and writes the "
        "scores to memory in between, whereas the flash operator and the C++ kernels keep them in a core's cache."
    )
    return Table("compare", "Dilated attention compared with PyTorch and dense attention", notes, rows)


def split_heads(bench: Bench) -> Table:
    """Compares one branch per head with dilated-attention-pytorch."""
    rows = []
    for case in (SPLIT_HEADS_SHORT, *([] if bench.quick else [SPLIT_HEADS_LONG])):
        for grad in (True,) if bench.quick else (False, True):
            candidates = {"ringjax": ONE, "ring of 2": RING, "baseline": SPLIT_HEADS}
            results = bench.measure(case, grad, candidates, memory=True)
            rows.append(comparison(case, grad, results, ["baseline"]))
    notes = (
        "Baseline: dilated-attention-pytorch 0.2.0, with its xformers operator replaced by PyTorch's own attention. "
        "The heads are split over the branches, one branch per head. The baseline divides each head by its sum over "
        "the whole sequence, including future positions. This is undone before outputs are compared, but included in "
        "its time."
    )
    return Table("split-heads", "One branch per head, compared with dilated-attention-pytorch", notes, rows)


def comparison(case: Case, grad: bool, results: dict[str, Result], baselines: list[str]) -> dict:
    """Returns a row that compares ringjax and a ring of 2 with each baseline."""
    row = {"tokens": case.length, "mask": case.mask, "pass": pass_name(grad), "ringjax (s)": results["ringjax"].median}
    for name in baselines:
        row |= {
            f"speedup vs {name}": speedup(results, name),
            f"speedup vs {name}, ring of 2": speedup(results, name, "ring of 2"),
            f"memory reduction vs {name}": memory_reduction(results, name),
        }
    return row


def dense_attention(bench: Bench) -> Table:
    """Compares dense attention, the special case of one segment with rate 1."""
    rows = []
    for length in (4096, *([] if bench.quick else [16384])):
        for grad in (False,) if bench.quick else (False, True):
            candidates = {"ringjax": ONE, "ring of 2": RING, "JAX": JAX_DENSE, "PyTorch": TORCH_DENSE}
            results = bench.measure(dense(length), grad, candidates, memory=True)
            rows.append(comparison(dense(length), grad, results, ["JAX", "PyTorch"]))
    notes = (
        "Dense attention as a special case (one segment, rate 1), compared with `jax.nn.dot_product_attention` and "
        "PyTorch's `scaled_dot_product_attention`, with the same outputs and gradients."
    )
    return Table("dense", "Dense attention", notes, rows)


def implementations(bench: Bench) -> Table:
    """Compares implementations on the workload published by the DarcStar fork of dilated-attention-pytorch."""
    candidates = {
        "ringjax": ONE,
        "ringjax, ring of 2": RING,
        "PyTorch LongNet": LONGNET,
        "dense PyTorch": unchecked(TORCH_DENSE),
        "dense JAX": unchecked(JAX_DENSE),
    }
    case = IMPLEMENTATIONS
    results = bench.measure(case, False, candidates, memory=True)
    rows = []
    for name, result in results.items():
        row = {"implementation": name, "time (ms)": value_or_failure(result, result.median * 1e3)}
        row["tokens/s"] = case.batch * case.length / result.median if result.times else None
        row["time / ringjax"] = speedup(results, name)
        rows.append({**row, "peak memory (MB)": result.peak_bytes and result.peak_bytes / 1e6})
    fastest = min(FORK_MS.values())
    for name, milliseconds in FORK_MS.items():
        rows.append({"implementation": f"DarcStar fork (GPU): {name}", "time / ring class": milliseconds / fastest})
    notes = (
        "Forward, batch 2, 4,096 tokens, 8 heads of 64, segments 1024, 2048, 4096 with rates 1, 2, 4. The last rows "
        "are published figures of the DarcStar-Solutions-Tech fork of fkodom/dilated-attention-pytorch on a GTX 1080, "
        "relative to its fastest class, `RingDilatedAttentionV2Collective`, which ringjax reimplements; only ratios "
        "are comparable. The fork also reports speedups of 4.93 and 44, but not between equal computations: the class "
        "they were measured with attends across the heads of each token instead of along the sequence, which is a "
        "small matrix multiply per token. PyTorch LongNet can be faster than ringjax on one device here because a "
        "single-device call after a pause, as between interleaved repeats, can take a third longer than back-to-back "
        "calls."
    )
    return Table("implementations", "Implementations", notes, rows)


def lengths(bench: Bench) -> Table:
    """Measures increasing lengths until a candidate fails or takes too long."""
    candidates = {
        "ringjax": ONE,
        "PyTorch LongNet": LONGNET,
        "dense PyTorch": unchecked(TORCH_DENSE),
        "dense JAX": unchecked(JAX_DENSE),
    }
    limit, longest = (2.0, 16384) if bench.quick else (30.0, 1_048_576)
    rows, length = [], 4096
    stopped: dict[str, str] = {}
    while length <= longest and "ringjax" not in stopped:
        case = Case(LENGTH_SWEEP.name, length, (2048, min(length, 8192)), (1, 4))
        remaining = {name: c for name, c in candidates.items() if name not in stopped}
        results = bench.measure(case, True, remaining, memory=True)
        row: dict = {"tokens": length}
        for name in candidates:
            result = results.get(name)
            row[f"{name} (s)"] = value_or_failure(result, result.median) if result else stopped.get(name)
            row[f"{name} (MiB)"] = result.peak_bytes / 2**20 if result and result.peak_bytes else None
            if result and (result.failure or (name != "ringjax" and result.median > limit)):
                stopped[name] = result.failure or f"skipped (over {limit:.0f} s)"
        rows.append(row)
        length *= 4
    notes = (
        "Forward and backward, causal, 8 heads of 64, float32; segments 2048 and 8192 with rates 1 and 4. Baselines "
        f"run in processes limited to {bench.memory_limit / 2**30:.0f} GiB; ringjax runs without a limit. A baseline "
        f"that takes more than {limit:.0f} s is skipped at longer lengths."
    )
    columns = [f"{name} (s)" for name in candidates]
    return Table("lengths", "Increasing sequence lengths", notes, rows, Plot("tokens", columns, "seconds"))


def tables(bench: Bench) -> Iterator[Table]:
    """Measures all tables of this part."""
    for measure in (dilated, split_heads, dense_attention, implementations, lengths):
        yield measure(bench)


if __name__ == "__main__":
    from run import main

    main("compare")
