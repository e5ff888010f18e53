"""Compiles rings ahead of time for TPU and GPU topologies, without the accelerators, and checks the programs.

For every case this reports whether the program compiles, its memory per device, whether the communication of the hop
loops and the exchanges of heads overlap with a kernel, and the resources of the kernels. Each program is compiled in
its own process. Failed checks are listed, and the command then exits with status 1.

    python benchmarks/aot.py tpu                     # `make aot-tpu` also installs the compiler
    python benchmarks/aot.py cuda                    # `make aot-cuda`
    python benchmarks/aot.py tpu --case million --json million.json
    python benchmarks/aot.py tpu --broken late-permute   # sends after the compute: the check must fail
    python benchmarks/aot.py cuda --case exchange --broken in-turn   # one piece after the other: the check must fail
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import rich
from compilers import compiler_versions
from gpu_costs import MOST_SPILLED
from ptxas import kernel_resources
from rich.console import Console
from rich.table import Table

import ringjax as rj
from ringjax._src.aot.compile import ENVIRONMENT, compile_for
from ringjax._src.aot.schedule import Schedule, schedule
from ringjax._src.aot.targets import CudaTarget, Target, target_named

GIB = 2**30
PASSES = ("forward", "query_gradient", "key_gradient")
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
# Least share of the bytes of an exchange that must be in flight beside a kernel, by platform and pass.
LEAST_HIDDEN = {("cuda", "forward"): 0.8, ("cuda", "gradient"): 0.5, ("tpu", "forward"): 0.4, ("tpu", "gradient"): 0.15}


CAUSAL = functools.partial(rj.plan, is_causal=True, dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention call, its targets by platform, and its passes."""

    about: str
    plan: functools.partial[rj.Plan]  # makes the plan for a ring size
    targets: dict[str, tuple[str, ...]]
    passes: tuple[str, ...] = ("forward", "gradient")


CASES = {
    "ring": Case(
        "131,072 tokens, 8 heads of 128, bfloat16, causal, zigzag; segments 2048, 16384, 131072, rates 1, 4, 16",
        functools.partial(
            CAUSAL,
            rj.DilationPattern((2048, 16384, 131072), (1, 4, 16)),
            seq_len=131072,
            num_heads=8,
            head_dim=128,
            layout="zigzag",
            strategy="ring",
        ),
        {"tpu": ("v5e:2x4", "v5p:2x2x2", "v6e:2x4"), "cuda": ("A100", "H100", "B200")},
    ),
    "exchange": Case(
        "131,072 tokens, 16 heads of 128, bfloat16, causal, contiguous; segments 2048, 32768, 131072, rates 1, 4, 16",
        functools.partial(
            CAUSAL,
            rj.DilationPattern((2048, 32768, 131072), (1, 4, 16)),
            seq_len=131072,
            num_heads=16,
            head_dim=128,
            strategy="all_to_all",
        ),
        {"tpu": ("v5e:4x4", "v5p:2x2x2", "v6e:2x4"), "cuda": ("A100", "H100", "B200")},
    ),
    "teams": Case(
        "131,072 tokens, 4 heads of 128, bfloat16, causal, zigzag; segments 2048, 131072, rates 1, 8; teams of 4",
        functools.partial(
            CAUSAL,
            rj.DilationPattern((2048, 131072), (1, 8)),
            seq_len=131072,
            num_heads=4,
            head_dim=128,
            layout="zigzag",
            strategy="all_to_all_ring",
        ),
        {"tpu": ("v5e:2x4", "v5p:2x2x2", "v6e:2x4"), "cuda": ("A100", "H100", "B200")},
    ),
    "million exchange": Case(
        "1,048,576 tokens, 16 heads of 128, bfloat16, causal, contiguous; segments 2048, 32768, 2^20, rates 1, 8, 64",
        functools.partial(
            CAUSAL,
            rj.DilationPattern((2048, 32768, 2**20), (1, 8, 64)),
            seq_len=2**20,
            num_heads=16,
            head_dim=128,
            strategy="all_to_all",
        ),
        {"tpu": ("v5p:2x2x2", "v5e:4x4"), "cuda": ("H100",)},
        passes=("gradient",),
    ),
    "million": Case(
        "1,048,576 tokens, 16 heads of 128, bfloat16, causal, zigzag; segments 2048, 32768, 1048576, rates 1, 8, 64",
        functools.partial(
            CAUSAL,
            rj.DilationPattern((2048, 32768, 2**20), (1, 8, 64)),
            seq_len=2**20,
            num_heads=16,
            head_dim=128,
            layout="zigzag",
            strategy="ring",
        ),
        {"tpu": ("v5p:2x2x2", "v5e:4x4"), "cuda": ("H100",)},
        passes=("gradient",),
    ),
    **{
        f"dim{dim}": Case(
            f"32,768 tokens, 4 heads of {dim}, bfloat16, causal, zigzag; segments 2048, 32768, rates 1, 4",
            functools.partial(
                CAUSAL,
                rj.DilationPattern((2048, 32768), (1, 4)),
                seq_len=32768,
                num_heads=4,
                head_dim=dim,
                layout="zigzag",
                strategy="ring",
            ),
            {"tpu": ("v5e:2x4",), "cuda": ("A100", "H100", "B200")},
            passes=("gradient",),
        )
        for dim in HEAD_DIMS
    },
}


@dataclasses.dataclass
class Row:
    """Properties of one compiled program; None where the compiler does not report a value or it does not apply."""

    case: str
    target: str
    part: str
    compiled: bool = False
    error: str = ""
    seconds: float | None = None
    sent_bytes: int = 0  # by a device, in all collectives, as planned
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temporary_bytes: int | None = None
    permutes: int = 0
    permutes_async: int = 0
    hop_permutes: int = 0
    hop_permutes_hidden_by_kernel: int = 0
    hop_permutes_hidden_by_dots: int = 0
    other_permutes_hidden: int = 0
    ring: int = 1  # most devices or teams along which rows rotate, as planned
    directions: int = 1  # in which rows rotate in the backward pass, as planned
    both_ways: tuple[bool, bool] = (False, False)  # whether both directions are in flight at once, forward and backward
    exchanges: int = 0
    exchanges_async: int = 0
    exchange_bytes: int = 0  # of all that are sent, loop iterations included
    exchange_bytes_beside_kernel: int = 0
    exchange_bytes_beside_loop: int = 0  # or a kernel; other loops pack, merge or add rows
    exposed: list[str] = dataclasses.field(default_factory=list)
    copied_bytes: int = 0
    kernels: list[str] = dataclasses.field(default_factory=list)
    kernels_without_cost: list[str] = dataclasses.field(default_factory=list)
    kernel_bytes: int | None = None  # largest VMEM, or shared memory per block, of any kernel
    registers: int | None = None
    spilled_bytes: dict[str, int] = dataclasses.field(default_factory=dict)  # by kernel, where reported

    @property
    def device_bytes(self) -> int | None:
        """Memory per device: arguments, outputs and temporaries."""
        if self.argument_bytes is None or self.output_bytes is None or self.temporary_bytes is None:
            return None
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    def failures(self, needs_kernel: bool) -> list[str]:
        """Returns the failed checks as messages."""
        target = target_named(self.target)
        if not self.compiled:
            return [f"does not compile: {self.error}"]
        failures = []
        if needs_kernel and not self.kernels:
            failures.append("has no kernel")
        strategy = CASES[self.case].plan.keywords["strategy"]
        if (self.exchanges > 0) != (strategy != "ring") or (self.permutes > 0) != (strategy != "all_to_all"):
            failures.append(f"has {self.exchanges} exchanges and {self.permutes} permutes")
        if strategy == "ring" and self.hop_permutes == 0:
            failures.append("has no hop loop")
        failures += self._exchange_failures()
        by_kernel = needs_kernel or bool(self.kernels)
        compute = "a kernel" if by_kernel else "a matrix multiply"
        hidden = self.hop_permutes_hidden_by_kernel + (0 if by_kernel else self.hop_permutes_hidden_by_dots)
        if hidden < self.hop_permutes:
            exposed = self.hop_permutes - hidden
            failures.append(f"{exposed} of {self.hop_permutes} permutes in hop loops do not overlap with {compute}")
        passes = [("forward", self.ring > 2), ("backward", self.part == "gradient" and self.directions == 2)]
        for (name, is_two_way), found in zip(passes, self.both_ways, strict=True):
            if is_two_way and not found:
                failures.append(f"does not send in both directions at once in the {name} pass")
        if self.permutes_async < self.permutes:
            failures.append(f"{self.permutes - self.permutes_async} of {self.permutes} permutes are synchronous")
        if self.kernels and self.kernel_bytes is None:
            failures.append("does not report the resources of its kernels")
        if self.device_bytes is not None and self.device_bytes > target.memory_bytes:
            failures.append(f"needs {self.device_bytes / GIB:.1f} GiB of {target.memory_bytes / GIB:.1f} GiB")
        if self.kernel_bytes is not None and self.kernel_bytes > target.kernel_memory_bytes:
            failures.append(f"has a kernel that needs {self.kernel_bytes} bytes of {target.kernel_memory_bytes}")
        if self.kernels_without_cost:
            failures.append(f"has kernels without a cost estimate: {self.kernels_without_cost}")
        if self.kernels and CASES[self.case].plan.keywords["head_dim"] <= 128:
            for name, spilled in self.spilled_bytes.items():
                if spilled > MOST_SPILLED[self.target]:
                    failures.append(f"has a kernel {name} that spills {spilled} bytes")
        return failures

    def _exchange_failures(self) -> list[str]:
        """Returns the failed checks of exchanges; the share beside a kernel has a limit in one case only.

        The last exchange of teams may be synchronous: in one piece, nothing is left to compute.
        """
        failures = []
        if self.exchanges_async < self.exchanges and not self.permutes:
            failures.append(f"{self.exchanges - self.exchanges_async} of {self.exchanges} exchanges are synchronous")
        least = LEAST_HIDDEN[target_named(self.target).platform, self.part]
        share = self.exchange_bytes_beside_kernel / max(self.exchange_bytes, 1)
        if self.case == "exchange" and share < least:
            failures.append(f"{share:.0%} of the bytes of exchanges are beside a kernel, expected {least:.0%}")
        return failures


def measure(row: Row, implementation: str | None, with_options: bool) -> Row:
    """Compiles one program and reads its properties."""
    target = target_named(row.target)
    if not with_options:
        target = dataclasses.replace(target, options=())
    kind = target.name.partition(":")[0].lower()
    plan = CASES[row.case].plan(ring_size=target.devices, device=kind)
    row.ring = max(branch.group.ring for branch in plan.branches if branch.hops or branch.where == "local")
    row.directions = max(branch.directions for branch in plan.branches)
    both = row.part == "gradient"
    row.sent_bytes = sum(b.sent(b.forward) + both * b.sent(b.backward) for b in plan.branches)
    spec = plan.spec._replace(implementation=implementation)
    with tempfile.TemporaryDirectory() as folder:
        dump_to = folder if isinstance(target, CudaTarget) else None
        try:
            compiled, row.seconds = compile_for(target, spec, row.part == "gradient", dump_to)
        except Exception as error:
            row.error = " ".join(str(error).split())[:2000]
            return row
        row.compiled = True
        memory = compiled.memory_analysis()
        row.argument_bytes, row.temporary_bytes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        row.output_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
        parsed = schedule(compiled.as_text())
        _fill_schedule(row, parsed)
        try:
            _fill_kernels(row, parsed, target, folder)
        except (FileNotFoundError, RuntimeError) as error:  # of the assembler, in its own words
            row.compiled, row.error = False, " ".join(str(error).split())[:2000]
    return row


def _fill_schedule(row: Row, parsed: Schedule) -> None:
    row.permutes, row.permutes_async = len(parsed.permutes), parsed.num_async
    row.hop_permutes = len(parsed.in_hop_loops)
    row.hop_permutes_hidden_by_kernel = len(parsed.hidden(("kernel",)))
    row.both_ways = tuple(parsed.sends_both_ways(is_backward=x) for x in (False, True))
    row.hop_permutes_hidden_by_dots = len(parsed.hidden(("dots",)))
    exposed = [x for x in parsed.permutes if not x.is_async or x.between == "nothing"]
    row.other_permutes_hidden = sum(not x.in_hop_loop for x in parsed.permutes) - sum(
        not x.in_hop_loop for x in exposed
    )
    row.exposed = [
        f"{x.name} in {x.computation}, {x.bytes} bytes, {'asynchronous' if x.is_async else 'synchronous'}"
        for x in exposed
    ]
    row.copied_bytes = parsed.copied_bytes
    row.exchanges, row.exchanges_async = len(parsed.exchanges), sum(x.is_async for x in parsed.exchanges)
    row.exchange_bytes = sum(x.bytes * x.number for x in parsed.exchanges)
    beside_kernel = [x for x in parsed.exchanges if x.is_async and x.between == "kernel"]
    beside_loop = [x for x in parsed.exchanges if x.is_async and (x.between == "kernel" or x.beside_loop)]
    row.exchange_bytes_beside_kernel = sum(x.bytes * x.number for x in beside_kernel)
    row.exchange_bytes_beside_loop = sum(x.bytes * x.number for x in beside_loop)


def _fill_kernels(row: Row, parsed: Schedule, target: Target, folder: str) -> None:
    """Fills in the resources of the ringjax kernels or, on GPUs without any, of the kernels generated by XLA."""
    row.kernels = sorted({kernel.name for kernel in parsed.kernels})
    if not isinstance(target, CudaTarget):
        row.kernel_bytes = parsed.vmem_bytes
        row.kernels_without_cost = sorted({kernel.name for kernel in parsed.kernels if not kernel.flops})
        return
    kernels = kernel_resources(pathlib.Path(folder), target.architecture, row.kernels or None)
    row.kernel_bytes = max(kernel.shared_bytes for kernel in kernels)
    row.registers = max(kernel.registers for kernel in kernels)
    for kernel in kernels:
        name = kernel.plain_name if row.kernels else "XLA's"
        row.spilled_bytes[name] = max(row.spilled_bytes.get(name, 0), kernel.spilled_bytes)


def degrade(defect: str) -> None:
    """Patches ringjax to compile a worse program, to verify that the checks fail."""
    if defect == "no-cost":
        from jax.experimental import pallas  # noqa: PLC0415

        original = pallas.pallas_call
        pallas.pallas_call = lambda *args, **options: original(*args, **{**options, "cost_estimate": None})
        return
    if defect == "in-turn":
        from ringjax._src.branches.all_to_all import AllToAllBranch  # noqa: PLC0415

        AllToAllBranch.overlaps_pieces = False
        return
    from jax import lax  # noqa: PLC0415

    from ringjax._src.branches.ring import RingBranch  # noqa: PLC0415
    from ringjax._src.comm.ring_comm import scan_range  # noqa: PLC0415

    def attend_all(self, queries, keys, in_flight):
        """Rotates the keys only after attention to them has finished."""
        me, last_hop = self.comm.device(), self.plan.ring_devices - 1
        attend = lambda partial, keys, hop: self.attend_chunks(  # noqa: E731
            partial, queries, keys, query_device=me, key_device=self.comm.source(hop)
        )

        def step(carry, hop):
            keys, partial = carry
            keys, partial = lax.optimization_barrier((keys, attend(partial, keys, hop)))
            return self.comm.rotate(keys), partial

        partial = self.attend_chunks(
            self.empty_partial(queries), queries, keys, query_device=me, key_device=me, is_own=True
        )
        keys, partial = scan_range(step, (in_flight[0], partial), 1, last_hop)
        return attend(partial, keys, last_hop)

    RingBranch.attend_all = attend_all


def table(rows: list[Row], platform: str) -> Table:
    """Returns a table with one row per program."""
    resources = "VMEM" if platform == "tpu" else "shared, registers, spills (forward / dq / dk, dv)"
    shown = Table(box=rich.box.SIMPLE_HEAD)
    titles = ("case", "target", "pass", "compiled", "seconds", "GiB per device", "MiB sent", "async permutes")
    for title in titles:
        shown.add_column(title, justify="left" if title in ("case", "target", "pass") else "right")
    shown.add_column("hop loops: hidden by kernel / dots / all", justify="right")
    shown.add_column("elsewhere: hidden / all", justify="right")
    shown.add_column("exchanges: async / all; bytes beside a kernel / a kernel or loop", justify="right")
    shown.add_column("copied per hop", justify="right")
    shown.add_column(f"kernels: {resources}", justify="right")
    for row in rows:
        cells = [row.case, row.target, row.part, "yes" if row.compiled else "NO"]
        if row.compiled:
            assert row.device_bytes is not None
            limit = target_named(row.target).memory_bytes / GIB
            sizes = row.exchange_bytes_beside_kernel, row.exchange_bytes_beside_loop
            shares = " / ".join(f"{size / max(row.exchange_bytes, 1):.0%}" for size in sizes)
            hidden = f"{row.hop_permutes_hidden_by_kernel} / {row.hop_permutes_hidden_by_dots} / {row.hop_permutes}"
            cells += [
                f"{row.seconds:.1f}",
                f"{row.device_bytes / GIB:.2f} of {limit:.0f}",
                f"{row.sent_bytes / 2**20:.0f}",
                f"{row.permutes_async} / {row.permutes}",
                hidden,
                f"{row.other_permutes_hidden} / {row.permutes - row.hop_permutes}",
                f"{row.exchanges_async} / {row.exchanges}; {shares}",
                f"{row.copied_bytes / 2**20:.1f} MiB",
                _kernels_cell(row),
            ]
        shown.add_row(*cells)
    return shown


def _kernels_cell(row: Row) -> str:
    if row.kernel_bytes is None:
        return "not reported" if row.kernels else "no kernel"
    owner = f"{len(row.kernels)}: " if row.kernels else "XLA's: "
    if row.registers is None:
        return f"{owner}{row.kernel_bytes / 2**20:.1f} MiB"
    names = [f"ringjax_{name}" for name in PASSES] if row.kernels else ["XLA's"]
    spills = " / ".join(str(row.spilled_bytes.get(name, "-")) for name in names)
    return f"{owner}{row.kernel_bytes / 1024:.0f} KiB, {row.registers}, {spills} B"


def compile_in_subprocess(row: Row, options: argparse.Namespace) -> Row:
    """Calls `measure` in a new process, because compilers can crash."""
    request = {
        "row": dataclasses.asdict(row),
        "implementation": options.implementation,
        "broken": options.broken,
        "with_options": not options.without_options,
    }
    command = [sys.executable, __file__, options.platform, "--worker", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT, check=False)
    if done.returncode:
        row.error = f"the process exited with code {done.returncode}: {done.stderr[-2000:]}"
        return row
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=("tpu", "cuda"))
    parser.add_argument("--case", choices=CASES, action="append", help="compile only this case (default: all)")
    parser.add_argument(
        "--target", action="append", help="target, such as v5e:2x2 or H100 (default: those of the case)"
    )
    parser.add_argument(
        "--pass", dest="part", choices=("forward", "gradient"), help="compile only this pass (default: both)"
    )
    parser.add_argument(
        "--implementation", choices=("xla", "pallas"), help="implementation (default: chosen by ringjax)"
    )
    parser.add_argument("--without-options", action="store_true", help="compile without the XLA options of the targets")
    parser.add_argument(
        "--broken",
        choices=("no-cost", "late-permute", "in-turn"),
        help="compile a degraded program, for which a check must fail",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write all results to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.broken == "no-cost" and options.platform == "cuda":
        parser.error("--broken no-cost requires platform tpu: GPU kernels have no cost estimate")
    if options.worker:
        request = json.loads(options.worker)
        if request["broken"]:
            degrade(request["broken"])
        print(
            json.dumps(
                dataclasses.asdict(measure(Row(**request["row"]), request["implementation"], request["with_options"]))
            )
        )
        return

    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(compiler_versions(options.platform), highlight=False)
    rows = []
    for name in options.case or CASES:
        case = CASES[name]
        console.print(f"{name}: {case.about}")
        for target in options.target or case.targets[options.platform]:
            for part in case.passes:
                if options.part in (None, part):
                    console.print(f"  {target} {part}: compiling", highlight=False)
                    row = compile_in_subprocess(Row(name, target, part), options)
                    status = f"{row.seconds:.0f} s" if row.compiled else "failed"
                    console.print(f"  {target} {part}: {status}", highlight=False)
                    rows.append(row)
    console.print(table(rows, options.platform))
    for name in dict.fromkeys(row.target for row in rows):
        if target_named(name).options and not options.without_options:
            console.print(f"{name}: compiled with {dict(target_named(name).options)}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    failed = False
    for row in rows:
        for failure in row.failures(needs_kernel=options.implementation != "xla"):
            failed = True
            console.print(f"FAILED {row.case} {row.target} {row.part}: {failure}", style="red", highlight=False)
    if failed:
        sys.exit(1)
    console.print("All checks passed.")


if __name__ == "__main__":
    main()
