"""The ring on CPU devices of this machine: against one device, against head sharding, against dense ring attention.

    python benchmarks/ring.py                      # all parts; `make bench-ring` does it
    python benchmarks/ring.py --part scaling --lengths 32768 --rings 2,4

Parts: `scaling` (rings of CPU devices that share the same cores, so 1.00 is no loss), `cores` (one device on one core
against a ring of two on two), `dense` (our own dense attention, one branch w = T, r = 1, beside the dilated one),
`peer` (dense attention beside ringattention 0.1.2, if its folder is given: `pip install --no-deps --target DIR
ringattention==0.1.2 einops`, then `--peer DIR`). Repeats are interleaved, medians shown. CPU devices hand data over
through shared memory and wait for each other: this shows counts, work and waiting, and no accelerator's speed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from timing import interleaved, largest_error, timed, with_gradient

import ringjax as rj

HEADS, DIM = 8, 64
CORES = sorted(os.sched_getaffinity(0))


def dilated(length: int) -> rj.DilationPattern:
    return rj.DilationPattern((2048, 8192, length), (1, 4, 16))


def host_arrays(length: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).standard_normal((4, 1, length, HEADS, DIM), np.float32))


class Contender:
    """A program with its arrays in place."""

    def __init__(self, attention, grad, arrays, mesh=None, spec=None, layout="contiguous", ring_size=1):
        self.layout, self.ring_size = layout, ring_size
        arrays = [rj.to_layout(x, layout, ring_size) for x in arrays]
        self.args = [jnp.asarray(x) if mesh is None else jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        self.program = with_gradient(attention, grad).lower(*self.args).compile()

    def __call__(self) -> float:
        return timed(self.program, *self.args)

    def in_order(self) -> list[np.ndarray]:
        """Outputs in the order of the sequence."""
        outputs = [np.asarray(x) for x in self.program(*self.args)]
        return [np.asarray(rj.from_layout(x, self.layout, self.ring_size)) for x in outputs]

    def bytes_per_device(self) -> int:
        m = self.program.memory_analysis()
        return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes


def on_one_device(pattern, arrays, causal: bool, grad: bool) -> Contender:
    attention = lambda q, k, v: rj.dilated_attention(q, k, v, pattern, is_causal=causal)  # noqa: E731
    return Contender(attention, grad, arrays)


def on_heads(pattern, arrays, causal: bool, grad: bool) -> Contender:
    """Two devices that share the heads, which need no communication."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("ring", "heads"))
    spec = PartitionSpec(None, "ring", "heads")
    ring = rj.Ring(mesh, head_axis="heads")
    attention = lambda q, k, v: rj.dilated_attention(q, k, v, pattern, is_causal=causal, ring=ring)  # noqa: E731
    return Contender(attention, grad, arrays, mesh, spec)


def on_ring(pattern, arrays, causal: bool, grad: bool, p: int) -> Contender:
    mesh, spec = Mesh(np.array(jax.devices()[:p]), ("ring",)), PartitionSpec(None, "ring")
    layout = "zigzag" if causal else "contiguous"
    ring = rj.Ring(mesh, layout=layout)
    attention = lambda q, k, v: rj.dilated_attention(q, k, v, pattern, is_causal=causal, ring=ring)  # noqa: E731
    return Contender(attention, grad, arrays, mesh, spec, layout, p)


def scaling(options) -> list[dict]:
    """Rings on the same cores as one device, each in a process of its own with as many devices as it uses."""
    print("\nRings of CPU devices on the same cores; ratio of time to the better of one device and two head-sharded")
    print("      T   mask    pass |  one s  heads s |" + "".join(f"  p={p}" for p in options.rings))
    workers = {"one": Worker(CORES, 1), "heads": Worker(CORES, 2, "heads")}
    workers |= {f"p={p}": Worker(CORES, p) for p in options.rings}
    results = []
    for length, causal, grad in itertools.product(options.lengths, options.masks, (False, True)):
        with tempfile.TemporaryDirectory() as folder:
            for name, worker in workers.items():
                worker.ask(length=length, grad=grad, causal=causal, save=f"{folder}/{name}.npz")
            check_equal(Path(folder), list(workers))
        seconds = interleaved({name: worker.run for name, worker in workers.items()}, options.repeats)
        best = min(seconds["one"], seconds["heads"])
        ratios = {p: round(seconds[f"p={p}"] / best, 3) for p in options.rings}
        name = f"{length:>7} {'causal' if causal else 'full':>6} {'fwd+bwd' if grad else 'fwd':>7}"
        cells = " ".join(f"{r:5.2f}" for r in ratios.values())
        print(name, f"| {seconds['one']:6.2f} {seconds['heads']:8.2f} | {cells}", flush=True)
        results.append({"case": name, **seconds, "ratios": ratios})
    for worker in workers.values():
        worker.close()
    return results


def check_equal(folder: Path, names: list[str]) -> None:
    with np.load(folder / f"{names[0]}.npz") as expected:
        for name in names[1:]:
            with np.load(folder / f"{name}.npz") as found:
                error = max(largest_error([found[key]], [expected[key]]) for key in expected)
            if not error < 2e-5:
                raise SystemExit(f"{name} differs from one device by {error:.1e}")


def cores(options) -> dict:
    """One device on one core against a ring of two on two cores, each in a process of its own."""
    workers = {"one": Worker([CORES[0]], 1), "two": Worker(CORES[:2], 2)}
    results = {}
    print("\nOne device on one core against a ring of two devices on two cores")
    for length in options.lengths[:1]:
        for grad in (False, True):
            for worker in workers.values():
                worker.ask(length=length, grad=grad, causal=True)
            seconds = interleaved({name: worker.run for name, worker in workers.items()}, options.repeats)
            name = f"{length} causal {'fwd+bwd' if grad else 'fwd'}"
            results[name] = seconds["one"] / seconds["two"]
            print(
                f"{name}: {seconds['one']:.2f} s and {seconds['two']:.2f} s, {results[name]:.2f} times as fast",
                flush=True,
            )
    for worker in workers.values():
        worker.close()
    return results


class Worker:
    """This script with some devices on some cores, driven over pipes."""

    def __init__(self, cores: list[int], devices: int, kind: str = "ring"):
        command = [sys.executable, __file__, "--worker", str(devices), "--kind", kind]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509
        )

    def ask(self, **request) -> float:
        """Prepares a case (`length`, `causal`, `grad`), or runs it again; seconds of a run."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended with {self.process.wait()}")
        return float(answer)

    def run(self) -> float:
        return self.ask()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def work(devices: int, kind: str) -> None:
    """What a worker does."""
    contender = None
    for line in sys.stdin:
        request = json.loads(line)
        if request:
            contender = None  # free its arrays
            case = host_arrays(request["length"]), request["causal"], request["grad"]
            if kind == "heads":
                contender = on_heads(dilated(request["length"]), *case)
            elif devices == 1:
                contender = on_one_device(dilated(request["length"]), *case)
            else:
                contender = on_ring(dilated(request["length"]), *case, devices)
        seconds = contender()
        if "save" in request:
            np.savez(request["save"], *contender.in_order())
        print(seconds, flush=True)


def sent_bytes(pattern, length: int, p: int, causal: bool, grad: bool) -> int:
    layout = "zigzag" if causal else "contiguous"
    plan = rj.plan(pattern, seq_len=length, num_heads=HEADS, head_dim=DIM, ring_size=p, is_causal=causal, layout=layout)
    return sum(b.sent(b.forward) + (b.sent(b.backward) if grad else 0) for b in plan.branches)


def dense(options) -> list[dict]:
    """Dilated against dense ring attention of ringjax itself."""
    p, results = 4, []
    print(f"\nDense (w = T, r = 1) over dilated attention, ring of {p}: times the time, times the bytes sent")
    for length in (8192, 32768):
        arrays = host_arrays(length)
        patterns = {"dilated": dilated(length), "dense": rj.DilationPattern((length,), (1,))}
        for grad in (False, True):
            contenders = {name: on_ring(pattern, arrays, True, grad, p) for name, pattern in patterns.items()}
            for contender in contenders.values():
                contender()
            seconds = interleaved(contenders, min(options.repeats, 3))
            sent = {name: sent_bytes(pattern, length, p, True, grad) for name, pattern in patterns.items()}
            name = f"{length:>6} causal {'fwd+bwd' if grad else 'fwd':>7}"
            ratios = seconds["dense"] / seconds["dilated"], sent["dense"] / sent["dilated"]
            print(name, f"time {ratios[0]:.1f}x  bytes {ratios[1]:.1f}x", flush=True)
            results.append({"case": name, "time": ratios[0], "bytes": ratios[1]})
    return results


def peer(options) -> list[dict]:
    """Dense attention beside ringattention 0.1.2, both on a ring of 4."""
    p, results = 4, []
    print(f"\nDense causal attention on a ring of {p}: ringattention 0.1.2 over ringjax (above 1: ringjax does better)")
    for length in (8192, 32768):
        arrays = host_arrays(length)
        for grad in (False, True):
            ours = on_ring(rj.DilationPattern((length,), (1,)), arrays, True, grad, p)
            theirs = peer_contender(options.peer, arrays, grad, p)
            error = largest_error(ours.in_order(), theirs.in_order())
            if not error < 2e-5:
                raise SystemExit(f"ringattention differs by {error:.1e}: not the same computation")
            seconds = interleaved({"ours": ours, "theirs": theirs}, min(options.repeats, 3))
            name = f"{length:>6} {'fwd+bwd' if grad else 'fwd':>7}"
            shard = length // p * HEADS * DIM * 4
            # it sends k and v p times forward and, with float32 sums, k, v, dk and dv p times backward
            their_bytes = p * 2 * shard + (p * 4 * shard if grad else 0)
            our_bytes = sent_bytes(rj.DilationPattern((length,), (1,)), length, p, True, grad)
            ratios = {
                "time": seconds["theirs"] / seconds["ours"],
                "bytes": their_bytes / our_bytes,
                "memory": theirs.bytes_per_device() / ours.bytes_per_device(),
            }
            print(
                name,
                *(f"{key} {ratio:.2f}x" for key, ratio in ratios.items()),
                f"(ours {seconds['ours']:.2f} s)",
                flush=True,
            )
            results.append({"case": name, **ratios})
    return results


def peer_contender(folder: str, arrays, grad: bool, p: int) -> Contender:
    sys.path.insert(0, folder)
    if not hasattr(jax.lib, "xla_bridge"):  # what it asks for is gone
        jax.lib.xla_bridge = SimpleNamespace(get_backend=lambda: SimpleNamespace(platform="cpu"))
    attention = importlib.import_module("ringattention.ringattention_jax").ring_attention
    mesh, spec = Mesh(np.array(jax.devices()[:p]), ("ring",)), PartitionSpec(None, "ring")
    blocks = {
        "causal_block_size": 1,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": 512,
        "key_chunk_size": 512,
        "dtype": jnp.float32,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": False,
    }
    local = lambda q, k, v: attention(q, k, v, None, None, None, "ring", True, blocks)  # noqa: E731
    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return Contender(sharded, grad, arrays, mesh, spec)


def main() -> None:
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "scaling", "cores", "dense", "peer"), default="all")
    parser.add_argument("--lengths", type=numbers, default=[32768, 131072])
    parser.add_argument("--rings", type=numbers, default=[2, 4, 8])
    parser.add_argument("--masks", choices=("causal", "full", "both"), default="causal")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", help="folder with ringattention 0.1.2; without it that part is left out")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="ring", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # a device that waits for others on busy cores is not stuck
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=600")
    jax.config.update("jax_num_cpu_devices", options.worker or 4)
    if options.worker:
        work(options.worker, options.kind)
        return
    options.masks = {"causal": [True], "full": [False], "both": [True, False]}[options.masks]
    print(f"jax {jax.__version__}, {len(CORES)} cores, (1, T, {HEADS}, {DIM}) float32, {options.repeats} repeats")
    parts = {"scaling": scaling, "cores": cores, "dense": dense, "peer": peer}
    chosen = [name for name in parts if options.part in ("all", name) and (name != "peer" or options.peer)]
    results = {name: parts[name](options) for name in chosen}
    if options.json:
        options.json.write_text(json.dumps({"jax": jax.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
