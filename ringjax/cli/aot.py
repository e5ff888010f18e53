"""`ringjax aot`: compiles ahead of time for a TPU or GPU topology and compares the program with the plan."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from ringjax._src.aot.collectives import executed
from ringjax._src.aot.compile import ENVIRONMENT, compile_for
from ringjax._src.aot.schedule import schedule
from ringjax._src.aot.targets import CpuTarget, CudaTarget, Target, TpuTarget, target_named
from ringjax._src.planning.table import bytes_text
from ringjax.cli.arguments import MOST_CPU_DEVICES, MOST_DEVICES, PlanOptions, add_job_arguments, job_of
from ringjax.cli.errors import in_options
from ringjax.cli.output import emit, seconds_text, table_text

EXAMPLES = """examples:
  ringjax aot --target cuda:h100:1x1x8 --seq-len 1M --pattern 2K/1,32K/8,T/64 --causal
  ringjax aot --target tpu:v5e:4x4 --seq-len 1M --pattern 2K/1,32K/8,T/64 --causal --pass forward
  ringjax aot --target tpu:v5p:16x16x16 --seq-len 1G --pattern 2K/1,128K/16,8M/128,T/1024 --causal
targets: tpu:v5e|v5p|v6e:GRID, cuda:a100|h100|b200:1xMACHINESxGPUS, cpu:DEVICES
no device is required, only its compiler:
  pip install '.[aot-tpu]' or '.[aot-cuda]' in a clone of ringjax, each in a separate environment
"""
_PACKAGES = {"cpu": ("jaxlib",), "tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """A compiled attention program compared with its plan; measured fields are None if compilation failed."""

    target: str
    part: str  # "forward", or "gradient" for the forward and backward pass
    devices: int  # number of devices, all in one ring
    limit_bytes: int  # memory of one device
    planned_bytes: int  # memory per device predicted by the plan
    planned_collectives: int  # number of collectives per device predicted by the plan
    planned_operand_bytes: int  # bytes of their operands
    error: str = ""  # why compilation failed, or an empty string
    seconds: float | None = None  # compile time
    argument_bytes: int | None = None  # size of the arguments per device
    output_bytes: int | None = None  # size of the outputs per device
    temporary_bytes: int | None = None  # size of the temporaries per device; on TPU as allocated by the compiler
    collectives: int | None = None  # number of collectives per device, counting every loop iteration
    operand_bytes: int | None = None  # bytes of their operands
    messages: int | None = None  # number of such instructions in the program
    messages_async: int | None = None  # number of those that are asynchronous
    messages_overlapped: int | None = None  # number of those that overlap with a kernel or a matrix multiplication
    kernels: tuple[str, ...] = ()  # names of the kernels

    @property
    def device_bytes(self) -> int | None:
        """Memory per device: arguments, outputs and temporaries."""
        sizes = (self.argument_bytes, self.output_bytes, self.temporary_bytes)
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def fits(self) -> bool:
        """Whether the program compiled and fits in the memory of a device."""
        return self.device_bytes is not None and self.device_bytes <= self.limit_bytes

    @property
    def overlapped(self) -> float | None:
        """Fraction of messages that overlap with computation; 1 if nothing is sent."""
        if self.messages is None or self.messages_overlapped is None:
            return None
        return self.messages_overlapped / self.messages if self.messages else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary."""
        derived = {name: getattr(self, name) for name in ("device_bytes", "fits", "overlapped")}
        return {**dataclasses.asdict(self), "kernels": list(self.kernels), **derived}

    def __str__(self) -> str:
        if self.error:
            return f"{self.target}, {self.part}: compilation failed: {self.error}"
        title = f"{self.target}, {self.part}: compiled in {seconds_text(self.seconds or 0)}"
        rows = [
            _row("memory", self.planned_bytes, self.device_bytes),
            _row("  arguments", None, self.argument_bytes),
            _row("  outputs", None, self.output_bytes),
            _row("  temporaries", None, self.temporary_bytes),
            _row("messages sent", self.planned_collectives, self.collectives, str),
            _row("bytes of their operands", self.planned_operand_bytes, self.operand_bytes),
        ]
        verdict = "fits" if self.fits else "DOES NOT FIT"
        lines = [
            table_text(title, ("per device", "plan", "compiled", "plan / compiled"), rows),
            f"The program {verdict} in the {bytes_text(self.limit_bytes)} of a device.",
            f"Of {self.messages} send instructions, {self.messages_async} are asynchronous and "
            f"{self.messages_overlapped} ({self.overlapped:.0%}) overlap with computation.",
            f"Kernels: {', '.join(self.kernels) or 'none'}.",
        ]
        return "\n".join(lines)


def _row(
    name: str, planned: int | None, found: int | None, to_text: Callable[[int], str] = bytes_text
) -> tuple[str, ...]:
    share = "" if planned is None or not found else "exact" if planned == found else f"{planned / found:.3f}"
    return (name, *("" if number is None else to_text(number) for number in (planned, found)), share)


def report_program(job: PlanOptions, target: Target, part: str) -> ProgramReport:
    """Compiles an attention call for a target in this process and analyzes the program.

    The variables of `ringjax.aot.ENVIRONMENT` must be set before JAX is initialized.
    """
    planned = expected(job, target, part)
    with tempfile.TemporaryDirectory() as folder:
        dump_to = folder if isinstance(target, TpuTarget) else None
        try:
            spec, is_gradient = job.plan().spec, part == "gradient"
            program = compile_for(target, spec, is_gradient, dump_to, has_segment_ids=job.has_segment_ids)
        except Exception as error:
            return dataclasses.replace(planned, error=_first_words(str(error)))
        allocated = allocated_temporaries(pathlib.Path(folder))
    memory, text = program.compiled.memory_analysis(), program.compiled.as_text()
    assert memory is not None and text is not None
    counts, read = executed(text), schedule(text)
    return dataclasses.replace(
        planned,
        seconds=program.seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes if allocated is None else allocated,
        collectives=sum(counts.values()),
        operand_bytes=sum(sent.bytes * n for sent, n in counts.items()),
        messages=len(read.messages),
        messages_async=sum(x.is_async for x in read.messages),
        messages_overlapped=sum(x.is_async and x.between != "nothing" for x in read.messages),
        kernels=tuple(sorted({kernel.name for kernel in read.kernels})),
    )


def allocated_temporaries(dumped: pathlib.Path) -> int | None:
    """Reads the bytes of temporaries that the TPU compiler allocates from its dump directory; None if unknown.

    `memory_analysis` counts the fragmentation of the temporaries twice, so it reports more than the compiler itself
    does when a program does not fit.
    """
    found = [path.read_text() for path in dumped.glob("*after_optimizations-buffer-assignment.txt")]
    line = r"^allocation \d+: size (\d+)(?:, page \d+)?, preallocated-temp"  # newer compilers number the pages
    sizes = [re.findall(line, text, re.MULTILINE) for text in found]
    return max((sum(map(int, each)) for each in sizes if each), default=None)


def report_in_subprocess(job: PlanOptions, target_name: str, part: str) -> ProgramReport:
    """Runs `report_program` in a subprocess with the environment that the compilers need; it survives their crashes.

    Raises:
        ValueError: If `target_name` is not a known target.
        ModuleNotFoundError: If the compiler of the target is not installed.
    """
    target = target_named(target_name)
    if not any(map(importlib.util.find_spec, _PACKAGES[target.platform])):
        raise ModuleNotFoundError(
            f"--target {target_name} needs a compiler that is not installed: "
            f"pip install '.[aot-{target.platform}]' in a clone of ringjax"
        )
    job = on_target(job, target)
    planned = expected(job, target, part)
    asked = json.dumps({"job": dataclasses.asdict(job), "target": target_name, "part": part})
    command = [sys.executable, "-c", "from ringjax.cli.aot import work; work()"]
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "replace"}  # independent of the locale
    options |= {"input": asked, "capture_output": True, "env": os.environ | ENVIRONMENT}
    done = subprocess.run(command, check=False, **options)
    if done.returncode:
        return dataclasses.replace(planned, error=_first_words(done.stderr[-2000:]))
    found = json.loads(done.stdout.splitlines()[-1])
    return ProgramReport(**{**found, "kernels": tuple(found["kernels"])})


def work() -> None:
    """Runs in the subprocess of `report_in_subprocess`: reads a request from stdin and prints the report."""
    asked = json.loads(sys.stdin.read())
    target = target_named(asked["target"])
    if isinstance(target, CpuTarget):
        jax.config.update("jax_num_cpu_devices", target.devices)
    found = report_program(PlanOptions(**asked["job"]), target, asked["part"])
    print(json.dumps(dataclasses.asdict(found)))


def on_target(job: PlanOptions, target: Target) -> PlanOptions:
    """Returns the job with a ring of all devices of a target."""
    kind = "cpu" if isinstance(target, CpuTarget) else target.name.partition(":")[0].lower()
    return dataclasses.replace(job, ring_size=target.devices, device=kind)


def expected(job: PlanOptions, target: Target, part: str) -> ProgramReport:
    """Returns what the plan predicts for a program."""
    plan = job.plan()
    memory = plan.memory(job.platform)
    forward = plan.forward + tuple(m for b in plan.branches for m in b.forward)
    backward = plan.backward + tuple(m for b in plan.branches for m in b.backward)
    every = forward if part == "forward" else forward + backward
    return ProgramReport(
        target=_full_name(target),
        part=part,
        devices=target.devices,
        limit_bytes=target.memory_bytes,
        planned_bytes=memory.forward if part == "forward" else memory.gradient,
        planned_collectives=sum(m.number for m in every),
        planned_operand_bytes=sum(m.bytes * m.number for m in every),
    )


def _full_name(target: Target) -> str:
    if isinstance(target, CpuTarget):
        return target.name
    if isinstance(target, CudaTarget):
        return f"cuda:{target.name.lower()}:{target.topology}"
    return f"tpu:{target.topology}"


def _first_words(text: str) -> str:
    return " ".join(text.split())[:600] or "the compiler crashed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `ringjax aot`."""
    about = "devices to compile for, such as tpu:v5p:8x8x8 or cuda:h100:1x8x8"
    parser.add_argument("--target", required=True, help=about)
    parts = ("forward", "gradient", "both")
    parser.add_argument("--pass", dest="part", choices=parts, default="gradient", help="(%(default)s)")
    add_job_arguments(parser, "ring")


def _check_target(name: str) -> None:
    """Raises `ValueError` if the target is unknown or has too many devices."""
    try:
        target = target_named(name)
    except ValueError as error:
        reason = in_options(str(error), topology="it", name="it")
        raise ValueError(f"--target {name!r} is unknown: {reason}") from None
    most = MOST_CPU_DEVICES if isinstance(target, CpuTarget) else MOST_DEVICES
    if target.devices > most:
        raise ValueError(f"--target must have at most {most:,} devices, got {name!r}")


def run(options: argparse.Namespace) -> int:
    """Runs `ringjax aot`."""
    parts = ("forward", "gradient") if options.part == "both" else (options.part,)
    job = job_of(options)
    _check_target(options.target)
    found = [report_in_subprocess(job, options.target, part) for part in parts]
    data = {"command": "aot", "pattern": repr(job.pattern), "programs": [x.to_dict() for x in found]}
    emit(options, data, "\n\n".join(map(str, found)))
    return 0 if all(x.fits for x in found) else 1
