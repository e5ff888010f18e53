"""Beside what a user would pick instead, on this machine: PyTorch and JAX, dilated and dense.

    python benchmarks/compare.py --torch-python .venv-torch/bin/python        # `make bench BENCH="--parts compare"`

Outputs and gradients are compared first wherever the definition is the same. A ratio above 1 means that ringjax is
faster, or holds less. GFLOP/s count useful work only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from harness import Bench, Contender, Plot, Result, Table, cell, geometric_mean, largest_spread, passes
from workloads import GROUPED_LONG, GROUPED_SHORT, IMPLEMENTATIONS, LONG, LONGEST, SHORT, Case, both_masks, dense

ONE, RING = Contender("one device"), Contender("ring", devices=2)
PLAIN = Contender("one device", options={"implementation": "xla"})
LONGNET = Contender("longnet", "torch", is_peer=True)
TORCH_DENSE = Contender("dense", "torch", is_peer=True)
JAX_DENSE = Contender("dense", is_peer=True)


def not_same(contender: Contender) -> Contender:
    return Contender(contender.kind, contender.library, is_peer=True, is_same=False)


def without_normalisation(found: list[np.ndarray], expected: list[np.ndarray]) -> list[np.ndarray]:
    """dilated-attention-pytorch divides each head by its sum over the sequence, and by the number of branches.

    Its gradient is that of the divided output, so only outputs are compared.
    """
    return [found[0] * expected[0].sum(1, keepdims=True) * 2]


GROUPED_PEER = Contender("grouped", "torch", is_peer=True, undo=without_normalisation)


def ratio(results: dict[str, Result], name: str, ours: str = "ringjax") -> float | str | None:
    """Time of a contender over ours."""
    if name not in results:
        return None
    return cell(results[name], results[name].median / results[ours].median)


def memory_ratio(results: dict[str, Result], name: str) -> float | str | None:
    ours, theirs = results["ringjax"].bytes, results[name].bytes if name in results else None
    return theirs / ours if ours and theirs else None


def dilated(bench: Bench) -> Table:
    """The same dilated attention in PyTorch, and what dense attention costs instead."""
    cells = [(case, grad) for case in (*both_masks(SHORT), *both_masks(LONG)) for grad in (False, True)]
    if bench.quick:
        cells = [(SHORT.with_mask(False), False), (SHORT, False), (SHORT, True), (LONG, False)]
    rows = []
    for case, grad in cells:
        contenders = {"ringjax": ONE, "ring of 2": RING, "plain XLA": PLAIN, "PyTorch": LONGNET}
        if case == SHORT and (not grad or not bench.quick):
            contenders["dense JAX"] = not_same(JAX_DENSE)
            contenders["dense PyTorch"] = not_same(TORCH_DENSE)
        results = bench.race(case, grad, contenders, memory=True)
        rate = case.flops(grad) / results["ringjax"].median / 1e9
        rows.append(
            {
                "tokens": case.length,
                "mask": case.mask,
                "pass": passes(grad),
                "ringjax s": results["ringjax"].median,
                "against PyTorch": ratio(results, "PyTorch"),
                "ring of 2 against PyTorch": ratio(results, "PyTorch", "ring of 2"),
                "plain XLA against PyTorch": ratio(results, "PyTorch", "plain XLA"),
                "memory against PyTorch": memory_ratio(results, "PyTorch"),
                "dense JAX over ours": ratio(results, "dense JAX"),
                "dense PyTorch over ours": ratio(results, "dense PyTorch"),
                "GFLOP/s": rate,
                "share of a matrix multiply": rate / matmul_rate(bench),
                "spread": largest_spread(results),
            }
        )
    columns = [f"{name} PyTorch" for name in ("against", "ring of 2 against", "plain XLA against", "memory against")]
    means = {c: geometric_mean(r[c] for r in rows if isinstance(r[c], float)) for c in columns}
    rows.append({"tokens": "geometric mean", **means})
    about = (
        "Peer: a LongNet over PyTorch's CPU flash operator (`benchmarks/torch_worker.py`), the same outputs and "
        "gradients. 8 heads of 64, float32; segments 2048, 4096, 8192 with rates 1, 2, 4 at 8,192 tokens and 2048, "
        "8192, 32768 with 1, 4, 8 at 32,768. ringjax runs its kernels in C++, compiled on this machine. Plain XLA is "
        "what it runs without a compiler, and is behind because XLA's CPU backend starts and joins its threads for "
        "each matrix multiply and writes scores to memory between two of them, where the flash operator and our "
        "kernels keep them in the cache of one core."
    )
    return Table("compare", "Dilated attention beside PyTorch and dense attention", about, rows)


def matmul_rate(bench: Bench) -> float:
    return bench.jax().ask("call", function="probes:matmul_rate")["result"]


def grouped(bench: Bench) -> Table:
    rows = []
    for case in (GROUPED_SHORT, *([] if bench.quick else [GROUPED_LONG])):
        for grad in (True,) if bench.quick else (False, True):
            contenders = {"ringjax": ONE, "ring of 2": RING, "peer": GROUPED_PEER}
            rows.append(beside(case, grad, bench.race(case, grad, contenders, memory=True)))
    about = (
        "Peer: dilated-attention-pytorch 0.2.0, with PyTorch's own attention in the place of the xformers operator "
        'that it asks for. Each head has one branch (`heads="grouped"`). It divides a head by its sum over the whole '
        "sequence, future included; that is undone before outputs are compared, and is part of its time."
    )
    return Table("grouped", "One branch per head, beside dilated-attention-pytorch", about, rows)


def beside(case: Case, grad: bool, results: dict[str, Result]) -> dict:
    return {
        "tokens": case.length,
        "mask": case.mask,
        "pass": passes(grad),
        "ringjax s": results["ringjax"].median,
        "against the peer": ratio(results, "peer"),
        "ring of 2 against the peer": ratio(results, "peer", "ring of 2"),
        "memory against the peer": memory_ratio(results, "peer"),
    }


def ordinary(bench: Bench) -> Table:
    """Ordinary attention, our special case w = T, r = 1."""
    rows = []
    for length in (4096, *([] if bench.quick else [16384])):
        for grad in (False,) if bench.quick else (False, True):
            contenders = {"ringjax": ONE, "ring of 2": RING, "JAX": JAX_DENSE, "PyTorch": TORCH_DENSE}
            results = bench.race(dense(length), grad, contenders, memory=True)
            row = {"tokens": length, "mask": "causal", "pass": passes(grad), "ringjax s": results["ringjax"].median}
            for name in ("JAX", "PyTorch"):
                row |= {
                    f"against {name}": ratio(results, name),
                    f"ring of 2 against {name}": ratio(results, name, "ring of 2"),
                    f"memory against {name}": memory_ratio(results, name),
                }
            rows.append(row)
    about = (
        "Dense attention as a special case, one segment and rate 1, beside `jax.nn.dot_product_attention` and "
        "PyTorch's `scaled_dot_product_attention`: the same outputs and gradients."
    )
    return Table("dense", "Ordinary attention", about, rows)


def implementations(bench: Bench) -> Table:
    contenders = {
        "ringjax": ONE,
        "ringjax, ring of 2": RING,
        "PyTorch LongNet": LONGNET,
        "dense PyTorch": not_same(TORCH_DENSE),
        "dense JAX": not_same(JAX_DENSE),
    }
    case = IMPLEMENTATIONS
    results = bench.race(case, False, contenders, memory=True)
    rows = []
    for name, result in results.items():
        row = {"implementation": name, "ms": cell(result, result.median * 1e3)}
        row["tokens/s"] = case.batch * case.length / result.median if result.times else None
        row |= {"time over ringjax": ratio(results, name), "MB": result.bytes and result.bytes / 1e6}
        rows.append(row)
    for name, milliseconds in (
        ("ring class, optimised", 4.25),
        ("its 'improved' class", 8.38),
        ("its standard class", 34.53),
    ):
        over = "time over its ring class"
        rows.append({"implementation": f"reference system (GPU): {name}", over: milliseconds / 4.25})
    about = (
        "Forward, batch 2, 4,096 tokens, 8 heads of 64, segments 1024, 2048, 4096 with rates 1, 2, 4. The last rows "
        "are the published figures of the reference system, a PyTorch library measured on a GTX 1080, over its own "
        "fastest: only ratios compare. Its headlines of 4.93 and 44 times are not times of one computation: the class "
        "that they are taken through attends across the heads of a token instead of along the sequence, which is a "
        "small matrix multiply per token. Where PyTorch's LongNet is ahead of one device: after a pause, as between "
        "the turns of a race, a call of one device can take a third longer than in calls one after the other."
    )
    return Table("implementations", "Implementations, as the reference system's table", about, rows)


def lengths(bench: Bench) -> Table:
    """Longer and longer, until a contender fails."""
    contenders = {
        "ringjax": ONE,
        "PyTorch LongNet": LONGNET,
        "dense PyTorch": not_same(TORCH_DENSE),
        "dense JAX": not_same(JAX_DENSE),
    }
    limit, longest = (2.0, 16384) if bench.quick else (30.0, 1_048_576)
    rows, length = [], 4096
    ended: dict[str, str] = {}
    while length <= longest and "ringjax" not in ended:
        case = Case(LONGEST.name, length, (2048, min(length, 8192)), (1, 4))
        results = bench.race(case, True, {n: c for n, c in contenders.items() if n not in ended}, memory=True)
        row: dict = {"tokens": length}
        for name in contenders:
            result = results.get(name)
            row[f"{name} s"] = cell(result, result.median) if result else ended.get(name)
            row[f"{name} MiB"] = result.bytes / 2**20 if result and result.bytes else None
            if result and (result.failure or (name != "ringjax" and result.median > limit)):
                ended[name] = result.failure or f"stopped: above {limit:.0f} s"
        rows.append(row)
        length *= 4
    about = (
        "Forward and backward, causal, 8 heads of 64, float32; dilated: segments 2048 and 8192 with rates 1 and 4. "
        f"Peers run in processes with a limit of {bench.memory / 2**30:.0f} GiB; one that takes longer than "
        f"{limit:.0f} s is not taken further."
    )
    lines = [f"{name} s" for name in contenders]
    return Table("lengths", "Longer and longer", about, rows, Plot("tokens", lines, "seconds"))


def tables(bench: Bench) -> Iterator[Table]:
    """All that this part measures."""
    for measure in (dilated, grouped, ordinary, implementations, lengths):
        yield measure(bench)


if __name__ == "__main__":
    from run import main

    main("compare")
