"""Reports the static cost of the GPU kernels, as compiled for A100, H100 and B200, and fails if one exceeds its limit.

For every kernel: registers, spills, shared memory, and the instructions of the hot loop per tile of 64 x 64 scores,
summed over the warps that compute it. On H100, jax's own attention kernels in Mosaic GPU are compiled beside them, for
the same shapes. No GPU is needed: `ptxas` and `nvdisasm` are. Each program is compiled in its own process.

    python benchmarks/gpu_costs.py                       # `make aot-cuda` also installs the compilers
    python benchmarks/gpu_costs.py --target H100 --json costs.json
    python benchmarks/gpu_costs.py --broken exp          # uses the exact exponential: the check must fail
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import rich
from compilers import compiler_versions
from jax.sharding import NamedSharding, PartitionSpec
from ptxas import compile_ptx, find_tool, kernel_files, kernel_resources, parse_ptxas, run_tool
from rich.console import Console
from rich.table import Table
from sass import hot_loop

import ringjax as rj
from ringjax._src.aot.compile import ENVIRONMENT, compile_for, ring_mesh
from ringjax._src.aot.targets import CUDA_TARGETS
from ringjax._src.kernels import pallas_gpu
from ringjax._src.kernels.interface import Case

LENGTH, HEADS, HEAD_DIM = 8192, 8, 128  # per device
TILE = 64 * 64
KERNELS = ("forward", "query_gradient", "key_gradient")
PEER = "attention_mgpu"  # module of jax with kernels for Hopper, float16 only
PEER_TARGET = "H100"

# Instructions per tile, about 8% above what jax 0.10.2 and 0.12.0 give.
MOST_INSTRUCTIONS = {
    "A100": {"forward": 1900, "query_gradient": 2250, "key_gradient": 2950},
    "H100": {"forward": 1200, "query_gradient": 1400, "key_gradient": 1700},
    "B200": {"forward": 1100, "query_gradient": 1550, "key_gradient": 2000},
}
MOST_OF_PEER = {
    "forward": 1.25,
    "query_gradient": 1.45,
    "key_gradient": 1.45,
}  # times the instructions of jax's kernels
MOST_SPILLED = {"A100": 64, "H100": 0, "B200": 0}  # bytes, stores and loads, outside of the loops; inside: none


@dataclasses.dataclass(frozen=True)
class Cost:
    """Static cost of one kernel.

    Attributes:
        target: The GPU.
        kernel: Name of the pass, one of `KERNELS`.
        registers: Registers per thread.
        spilled_bytes: Register spills per thread, stores and loads.
        loop_spills: Instructions in the hot loop that spill registers.
        shared_bytes: Shared memory per block, or None if not reported.
        warps: Warps that compute the tiles of a loop iteration.
        instructions: Instructions of the hot loop per tile, summed over the warps.
    """

    target: str
    kernel: str
    registers: int
    spilled_bytes: int
    loop_spills: int
    shared_bytes: int | None
    warps: int
    instructions: int

    def failures(self, peer: Cost | None) -> list[str]:
        """Returns the failed checks of a ringjax kernel as messages."""
        failures = []
        if self.instructions > (most := MOST_INSTRUCTIONS[self.target][self.kernel]):
            failures.append(f"issues {self.instructions} instructions per tile, more than {most}")
        if peer and self.instructions > MOST_OF_PEER[self.kernel] * peer.instructions:
            times = self.instructions / peer.instructions
            failures.append(f"issues {times:.2f} times the instructions of {PEER}, limit {MOST_OF_PEER[self.kernel]}")
        if self.loop_spills:
            failures.append(f"spills registers in its loop, in {self.loop_spills} instructions")
        if self.spilled_bytes > MOST_SPILLED[self.target]:
            failures.append(f"spills {self.spilled_bytes} bytes, more than {MOST_SPILLED[self.target]}")
        return failures


def measure(target_name: str) -> list[Cost]:
    """Compiles the kernels of ringjax for a target."""
    target = dataclasses.replace(CUDA_TARGETS[target_name], devices=2)  # one needs no mesh, which names the GPU
    plan = rj.plan(
        rj.DilationPattern((LENGTH,), (1,)),
        seq_len=2 * LENGTH,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        ring_size=target.devices,
        is_causal=True,
        dtype="bfloat16",
    )
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        compile_for(target, plan.spec._replace(implementation="pallas"), True, folder)
        for kernel in KERNELS:
            name = f"ringjax_{kernel}"
            (used,) = kernel_resources(pathlib.Path(folder), target.architecture, [name])
            (path,) = kernel_files(pathlib.Path(folder), [name])
            blocks = pallas_gpu.default_blocks(
                Case("bfloat16", HEAD_DIM, LENGTH, 1), is_bwd=kernel != "forward", has_mask_inputs=False
            )
            assert used.threads is not None
            cost = _cost(path, target.architecture, tiles=blocks.query * blocks.key / TILE, warps=used.threads // 32)
            costs.append(dataclasses.replace(cost, target=target_name, kernel=kernel, shared_bytes=used.shared_bytes))
    return costs


def measure_peer() -> list[Cost]:
    """Compiles jax's attention kernels for Hopper, without a mask: their plain loop is the same with one."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu  # noqa: PLC0415

    target = dataclasses.replace(CUDA_TARGETS[PEER_TARGET], devices=1)
    mesh = ring_mesh(target)
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=128,
        max_concurrent_steps=2,
        compute_wgs_bwd=2,
        block_q_dq=64,
        block_kv_dq=64,
        block_q_dkv=64,
        block_kv_dkv=64,
    )
    x = jax.ShapeDtypeStruct((1, LENGTH, HEADS, HEAD_DIM), jnp.float16, sharding=NamedSharding(mesh, PartitionSpec()))

    def gradient(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda *xs: attention_mgpu.attention(*xs, config), q, k, v)[1](dout)

    with jax.default_device(mesh.devices.flat[0]):
        jax.jit(gradient).lower(x, x, x, x).compile()
    folder = pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    loop_length = lambda path: _cost(path, target.architecture, tiles=1, warps=4).instructions  # noqa: E731
    gradients = sorted(folder.glob("anonymous*.ptx"), key=loop_length)  # of keys and values comes last: more products
    costs = []
    for kernel, path, tiles in zip(KERNELS, [*folder.glob("entry*.ptx"), *gradients], (2, 1, 1), strict=True):
        cost = _cost(path, target.architecture, tiles=tiles, warps=4)  # each group of warps computes its own tiles
        costs.append(dataclasses.replace(cost, target=PEER_TARGET, kernel=kernel))
    return costs


def _cost(path: pathlib.Path, architecture: str, *, tiles: float, warps: int) -> Cost:
    """Compiles a PTX file with one kernel and reads its cost."""
    cubin = path.with_suffix(".cubin")
    (used,) = parse_ptxas(compile_ptx(path, architecture, cubin))
    loop = hot_loop(run_tool("nvdisasm", "-c", str(cubin))[0])
    per_tile = round(loop.instructions * warps / tiles)
    return Cost("", "", used.registers, used.spilled_bytes, loop.spills, None, warps, per_tile)


def compile_in_subprocess(what: str, broken: str | None) -> list[Cost] | str:
    """Measures a target or `PEER` in a new process; returns the error message if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_TO": folder,
            "MOSAIC_GPU_CUDA_ROOT": str(pathlib.Path(find_tool("ptxas")).parents[1]),
        }
        command = [sys.executable, __file__, "--worker", what, *(["--broken", broken] if broken else [])]
        environment = os.environ | ENVIRONMENT | (dump if what == PEER else {})
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return (lines or done.stderr.splitlines() or [f"exited with code {done.returncode}"])[-1][:500]
    return [Cost(**cost) for cost in json.loads(done.stdout.splitlines()[-1])]


def degrade(defect: str) -> None:
    """Patches the kernels to be worse, to verify that the checks fail."""
    if defect == "exp":
        pallas_gpu._exp2 = lambda scores, factor, shift, config: jnp.exp((scores * factor - shift) * 0.6931471805599453)
    else:
        pallas_gpu.num_warps = lambda config, query, *, is_bwd: 8


def table(costs: list[Cost], peers: dict[str, Cost]) -> Table:
    """Returns a table with one row per kernel."""
    shown = Table(box=rich.box.SIMPLE_HEAD)
    for title in ("target", "kernel", "warps", "registers", "spilled bytes", "shared KiB"):
        shown.add_column(title, justify="left" if title in ("target", "kernel") else "right")
    for title in ("instructions per tile", "limit", PEER, "ratio", "limit"):
        shown.add_column(title, justify="right")
    for cost in costs:
        peer = peers.get(cost.kernel) if cost.target == PEER_TARGET else None
        ratio = [str(peer.instructions), f"{cost.instructions / peer.instructions:.2f}"] if peer else ["", ""]
        shown.add_row(
            cost.target,
            cost.kernel,
            str(cost.warps),
            str(cost.registers),
            str(cost.spilled_bytes),
            "" if cost.shared_bytes is None else f"{cost.shared_bytes / 1024:.0f}",
            str(cost.instructions),
            str(MOST_INSTRUCTIONS[cost.target][cost.kernel]),
            *ratio,
            f"{MOST_OF_PEER[cost.kernel]}" if peer else "",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=CUDA_TARGETS, action="append", help="GPU (default: all)")
    parser.add_argument("--broken", choices=("exp", "warps"), help="degrade the kernels, so that a check must fail")
    parser.add_argument("--json", type=pathlib.Path, help="write all results to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.broken and options.worker:
        degrade(options.broken)
    if options.worker:
        found = measure_peer() if options.worker == PEER else measure(options.worker)
        print(json.dumps([dataclasses.asdict(cost) for cost in found]))
        return

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(f"Static cost of the GPU kernels: {LENGTH} rows, {HEADS} heads of {HEAD_DIM}, bfloat16, causal")
    console.print(compiler_versions("cuda"))
    targets = options.target or list(CUDA_TARGETS)
    costs: list[Cost] = []
    peers: dict[str, Cost] = {}
    failures = []
    for what in [*targets, *([PEER] if PEER_TARGET in targets else [])]:
        console.print(f"  compiling for {what}" if what != PEER else f"  compiling jax's {PEER} for {PEER_TARGET}")
        found = compile_in_subprocess(what, options.broken)
        if what == PEER and isinstance(found, str):
            console.print(f"  {PEER} does not compile, so nothing is compared with it: {found}")
        elif isinstance(found, str):
            failures.append(f"{what}: does not compile: {found}")
        elif what == PEER:
            peers = {cost.kernel: cost for cost in found}
        else:
            costs += found
    console.print(table(costs, peers))
    for cost in costs:
        peer = peers.get(cost.kernel) if cost.target == PEER_TARGET else None
        failures += [f"{cost.target} {cost.kernel}: {failure}" for failure in cost.failures(peer)]
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(x) for x in (*costs, *peers.values())], indent=1))
    for failure in failures:
        console.print(f"FAILED {failure}", style="red")
    if failures:
        sys.exit(1)
    console.print("All checks passed.")


if __name__ == "__main__":
    main()
