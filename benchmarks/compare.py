"""Dilated attention of ringjax beside a PyTorch LongNet and dense JAX attention, on this machine's CPU.

`make bench` runs it. By hand, with an environment of its own for PyTorch (it is no dependency of ringjax):

    python -m venv .venv-torch && .venv-torch/bin/pip install torch==2.13.0 numpy
    python benchmarks/compare.py --torch-python .venv-torch/bin/python

All outputs and gradients are compared first. Repeats are interleaved (ours, PyTorch, dense, matrix multiply, ours, …)
and medians are shown; a ratio above 1 means that ringjax is faster. GFLOP/s count useful work only: pairs of a query
and a key that it sees, 4 H flops forward and 14 H forward and backward.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from timing import geometric_mean, largest_error, timed, with_gradient

import ringjax as rj


class Case(NamedTuple):
    length: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool
    grad: bool

    @property
    def pattern(self) -> rj.DilationPattern:
        return rj.DilationPattern(self.segment_lengths, self.dilation_rates)

    def flops(self, heads: int, dim: int) -> float:
        pairs = 0
        for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True):
            rows = w // r
            pairs += self.length // w * (rows * (rows + 1) // 2 if self.causal else rows * rows)
        return (14 if self.grad else 4) * heads * dim * pairs

    def __str__(self) -> str:
        return f"{self.length:>6} {'causal' if self.causal else 'full':>6} {'fwd+bwd' if self.grad else 'fwd':>7}"


CASES = [
    Case(length, lengths, rates, causal, grad)
    for length, lengths, rates in ((8192, (2048, 4096, 8192), (1, 2, 4)), (32768, (2048, 8192, 32768), (1, 4, 8)))
    for causal in (False, True)
    for grad in (False, True)
]
HEADS, DIM = 8, 64
TIMES = (("ringjax_s", 9), ("ring2_s", 8), ("torch_s", 8), ("dense_s", 8))
CORES = len(os.sched_getaffinity(0))
DENSE_LIMIT = 8192  # the scores of dense attention at 32,768 tokens take 34 GB


class TorchPeer:
    """The PyTorch worker in its own environment."""

    def __init__(self, python: str, threads: int):
        script = Path(__file__).with_name("torch_peer.py")
        self.process = subprocess.Popen(
            [python, str(script), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: object) -> dict[str, object]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the PyTorch worker ended with {self.process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=30)


def check_equal(ours, theirs, name: str) -> float:
    """The largest error of any output or gradient; 2e-5 is what float32 sums in another order may differ by."""
    error = largest_error(ours, theirs)
    if not error < 2e-5:
        raise SystemExit(f"{name} differs by {error:.1e}: not the same computation")
    return error


class RingOfTwo:
    """The same attention on two CPU devices, the sequence laid out for them beforehand as a training job would."""

    def __init__(self, case: Case, args):
        mesh = Mesh(np.array(jax.devices()[:2]), ("ring",))
        self.layout = "zigzag" if case.causal else "contiguous"
        ring = rj.Ring(mesh, layout=self.layout)
        sharding = NamedSharding(mesh, PartitionSpec(None, "ring"))
        self.args = [jax.device_put(rj.to_layout(x, self.layout, 2), sharding) for x in args]
        attention = lambda q, k, v: rj.dilated_attention(q, k, v, case.pattern, is_causal=case.causal, ring=ring)  # noqa: E731
        self.program = with_gradient(attention, case.grad)

    def outputs(self):
        return [rj.from_layout(np.asarray(x), self.layout, 2) for x in self.program(*self.args)]

    def __call__(self, *_) -> object:
        return self.program(*self.args)


def run(case: Case, peer: TorchPeer | None, repeats: int, folder: Path, with_dense: bool) -> dict[str, object]:
    rng = np.random.default_rng(0)
    host = {n: rng.standard_normal((1, case.length, HEADS, DIM), np.float32) for n in "qkvg"}
    args = [jnp.asarray(host[n]) for n in "qkvg"]
    contenders = {
        "ringjax": with_gradient(
            lambda q, k, v: rj.dilated_attention(q, k, v, case.pattern, is_causal=case.causal), case.grad
        ),
        "ring2": RingOfTwo(case, args),
    }
    if with_dense and case.length <= DENSE_LIMIT:
        dense = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=case.causal)  # noqa: E731
        contenders["dense"] = with_gradient(dense, case.grad)
    size = 2048
    matrix = jnp.asarray(rng.standard_normal((size, size), np.float32))
    matmul = jax.jit(lambda a: a @ a)
    branches = list(zip(case.segment_lengths, case.dilation_rates, strict=True))
    request = {"branches": branches, "causal": case.causal, "grad": case.grad}

    ours = contenders["ringjax"](*args)
    error = None
    if peer:
        np.savez(folder / "in.npz", **host)
        peer.ask(load=str(folder / "in.npz"))
        peer.ask(**request, save=str(folder / "out.npz"))
        names = ["out", "dq", "dk", "dv"][: len(ours)]
        with np.load(folder / "out.npz") as theirs:
            error = check_equal(ours, [theirs[n] for n in names], "PyTorch")
    check_equal(contenders["ring2"].outputs(), ours, "ring of 2")
    for f in contenders.values():
        timed(f, *args)
    timed(matmul, matrix)
    times: dict[str, list[float]] = {name: [] for name in (*contenders, "torch", "matmul")}
    for number in range(repeats):
        for name, f in contenders.items():
            if name != "dense" or number < 3:  # ten times slower: three repeats tell enough
                times[name].append(timed(f, *args))
        if peer:
            time.sleep(0.1)  # let the idle threads of one library go to sleep before the other is timed
            times["torch"].append(float(str(peer.ask(**request)["seconds"])))
            time.sleep(0.1)
        times["matmul"].append(min(timed(matmul, matrix) for _ in range(3)))
    medians = {name: statistics.median(t) for name, t in times.items() if t}
    rate = case.flops(HEADS, DIM) / medians["ringjax"] / 1e9
    peak = 2 * size**3 / medians["matmul"] / 1e9
    return {
        "case": str(case),
        **{f"{name}_s": round(t, 4) for name, t in medians.items()},
        **{
            f"vs_{name}": round(medians[name] / medians["ringjax"], 3) for name in ("torch", "dense") if name in medians
        },
        **({"ring2_vs_torch": round(medians["torch"] / medians["ring2"], 3)} if peer else {}),
        "gflops": round(rate, 1),
        "matmul_gflops": round(peak, 1),
        "share_of_matmul": round(rate / peak, 3),
        "max_error_vs_torch": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torch-python", help="interpreter of an environment with torch; without it, no PyTorch column"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-dense", action="store_true", help="leave out dense attention, most of the time")
    parser.add_argument("--only", default="", help='run the cases whose name holds this, say "32768 causal"')
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    peer = TorchPeer(options.torch_python, CORES) if options.torch_python else None
    print(f"jax {jax.__version__}, {CORES} cores, (1, T, {HEADS}, {DIM}) float32, {options.repeats} repeats")
    print(
        "     T   mask    pass | ringjax s  ring2 s  torch s  dense s | vs torch  vs dense | ring2 vs torch "
        "| GFLOP/s  of matmul"
    )
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for case in (c for c in CASES if options.only in str(c)):
            r = run(case, peer, options.repeats, Path(folder), not options.no_dense)
            results.append(r)
            cells = [f"{r.get(n, math.nan):>{w}}" for n, w in TIMES]
            ratios = [f"{r.get(n, math.nan):>{w}}" for n, w in (("vs_torch", 8), ("vs_dense", 9))]
            ring = f"{r.get('ring2_vs_torch', math.nan):>14}"
            print(
                case,
                "|",
                *cells,
                "|",
                *ratios,
                "|",
                ring,
                "|",
                f"{r['gflops']:>7} {r['share_of_matmul']:>10}",
                flush=True,
            )
    if peer:
        for name, key in (("one device", "vs_torch"), ("ring of two CPU devices", "ring2_vs_torch")):
            ratios = [float(str(r[key])) for r in results]
            mean, worst = geometric_mean(ratios), min(ratios)
            print(f"{name} against PyTorch: geometric mean {mean:.3f}, lowest {worst:.3f} (above 1: ringjax is faster)")
        error = max(float(str(r["max_error_vs_torch"])) for r in results)
        print(f"largest difference of any output or gradient: {error:.1e}")
        peer.close()
    if options.json:
        options.json.write_text(json.dumps({"jax": jax.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
