"""`ringjax doctor`: what there is, whether it computes rightly, and how fast: the first thing to run on a cluster."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

import ringjax
from ringjax._src.comm.mesh import Ring
from ringjax._src.kernels.backend import Case, Target
from ringjax._src.kernels.cpu import build
from ringjax._src.pattern import DilationPattern
from ringjax._src.planning.table import bytes_text
from ringjax.cli.arguments import MOST_CPU_DEVICES, count, duration
from ringjax.cli.output import emit
from ringjax.cli.running import (
    attention_on,
    error_against_oracle,
    hop_bandwidth,
    median_seconds,
    on_devices,
    random_arrays,
    ring_mesh,
    with_gradient,
)

EXAMPLES = """examples:
  ringjax doctor                       on the devices at hand
  ringjax doctor --cpu-devices 8       on eight CPU devices of this machine
  srun ringjax doctor --distributed    on all processes of a cluster; the first one prints
"""
CPU_DEVICES_HELP = "use so many CPU devices of this machine"
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")
_LIMIT = 2e-5  # of float32 errors, at the highest precision of matrix multiplies


class Check(NamedTuple):
    """Output and gradients against the dense oracle, in float32."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is small; NaN is not."""
        return self.error <= self.limit


class Measurement(NamedTuple):
    """What the devices did in a few seconds.

    Attributes:
        about: What was computed.
        tokens: Of the sequence.
        training_seconds: Of one forward and backward pass.
        training_tokens_per_second: Of all devices together.
        message_bytes: Of one hop from each device to the next, or 0 where there is one device.
        hop_bytes_per_second: Of each device, or None where there is one device.
    """

    about: str
    tokens: int
    training_seconds: float
    training_tokens_per_second: float
    message_bytes: int
    hop_bytes_per_second: float | None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `ringjax doctor` found.

    Attributes:
        versions: Of packages that matter, by name.
        variables: Of the environment, those that matter and are set.
        devices: What JAX tells of them.
        kernels: For some dtypes and head dims: what computes blocks on these devices.
        checks: Against the oracle.
        measurement: A few seconds of work, or None if it was left out.
        seconds: What all this took.
    """

    versions: dict[str, str]
    variables: dict[str, str]
    devices: dict[str, Any]
    kernels: dict[str, str]
    checks: list[Check]
    measurement: Measurement | None
    seconds: float

    @property
    def is_well(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, fit for JSON."""
        checks = [{**check._asdict(), "passed": check.passed} for check in self.checks]
        measured = None if self.measurement is None else self.measurement._asdict()
        own = {"command": "doctor", "is_well": self.is_well, "checks": checks, "measurement": measured}
        return {**own, **{x: getattr(self, x) for x in ("versions", "variables", "devices", "kernels", "seconds")}}

    def __str__(self) -> str:
        lines = ["versions   " + ", ".join(f"{name} {version}" for name, version in self.versions.items())]
        lines += [f"variable   {name}={value}" for name, value in self.variables.items()]
        d = self.devices
        lines.append(f"devices    {d['number']} x {d['kind']} ({d['platform']}), {d['processes']} process(es)")
        lines.append(f"links      {d['links']}")
        if d["memory_bytes"]:
            lines.append(f"memory     {bytes_text(d['memory_bytes'])} per device")
        lines += [f"blocks     {case}: {what}" for case, what in self.kernels.items()]
        for check in self.checks:
            verdict = "right" if check.passed else "WRONG"
            lines.append(f"check      {check.name}: {verdict} (error {check.error:.1e}, at most {check.limit:.0e})")
        m = self.measurement
        if m is not None:
            lines.append(f"speed      {m.about}: {m.training_seconds:.3g} s forward and backward,")
            lines.append(f"           {m.training_tokens_per_second:,.0f} tokens/s")
            if m.hop_bytes_per_second is not None:
                speed = m.hop_bytes_per_second / 1e9
                lines.append(f"hop        {speed:.2f} GB/s from each device, {bytes_text(m.message_bytes)} at a time")
        verdict = "All is well." if self.is_well else "Something is WRONG: please report it with this text."
        return "\n".join([*lines, f"{verdict} ({self.seconds:.0f} s)"])


def examine(seconds: float = 10.0) -> Diagnosis:
    """Looks at the devices at hand, checks the attention on them against the oracle and measures it.

    Args:
        seconds: About how long to measure; 0 leaves it out.

    Returns:
        What was found.
    """
    begin = time.perf_counter()
    versions = {"ringjax": ringjax.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    checks = [_check(1), *([_check(jax.device_count())] if jax.device_count() > 1 else [])]
    measured = _measure(seconds) if seconds > 0 else None
    took = time.perf_counter() - begin
    return Diagnosis(versions, variables, _devices(), _kernels(), checks, measured, took)


def _devices() -> dict[str, Any]:
    devices = jax.devices()
    first = devices[0]
    stats = first.memory_stats() if first.process_index == jax.process_index() else None
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "number": len(devices),
        "processes": jax.process_count(),
        "links": _links(devices),
        "memory_bytes": (stats or {}).get("bytes_limit"),
    }


def _links(devices: list[Any]) -> str:
    """What JAX tells of how devices are wired."""
    if hasattr(devices[0], "coords"):
        grid = np.array([device.coords for device in devices]).max(axis=0) + 1
        return f"a grid of {'x'.join(map(str, grid))} chips"
    if devices[0].platform == "cpu":
        return "none: CPU devices share the memory and the cores of a machine"
    slices = {getattr(device, "slice_index", device.process_index) for device in devices}
    return f"{len(slices)} machine(s) or slice(s); JAX does not tell how their devices are linked"


def _kernels() -> dict[str, str]:
    kind = jax.default_backend()
    if kind == "cpu":
        reason = build.why_not()
        return {"all": f"plain XLA: {reason}" if reason else "kernels in C++, compiled for this machine"}
    if kind not in ("tpu", "gpu"):
        return {"all": f"plain XLA: there are no kernels for {kind}"}
    target: Target = "tpu" if kind == "tpu" else "gpu"
    found = {}
    for dtype in ("bfloat16", "float32"):
        for dim in (64, 128):
            reason = Case(dtype, dim, 2048, 1).misfit(target)
            found[f"{dtype}, head dim {dim}"] = f"plain XLA: {reason}" if reason else "Pallas kernels"
    return found


def _check(size: int) -> Check:
    """One branch in every chunk and one over the whole sequence, causal, with grouped queries."""
    chunk = 64 if size <= 32 else 16  # the oracle is dense
    length = 2 * size * chunk
    devices = [jax.local_devices()[0]] if size == 1 else None
    ring = Ring(ring_mesh(devices), layout="zigzag")
    pattern = DilationPattern((chunk, length), (1, 4))
    error = error_against_oracle(ring, pattern, random_arrays(length, 4, 32, kv_heads=2), is_causal=True)
    where = "one device" if size == 1 else f"a ring of {size} devices, zigzag"
    return Check(f"{length} tokens on {where}, forward and gradient", error, _LIMIT)


def _measure(seconds: float) -> Measurement:
    size, is_cpu = jax.device_count(), jax.default_backend() == "cpu"
    length = 4096 * max(1, -(-size // 4)) if is_cpu else 16384 * size
    dtype = "float32" if is_cpu else "bfloat16"
    mesh = ring_mesh()
    ring = Ring(mesh, layout="zigzag")
    pattern = DilationPattern((min(1024, length // (2 * size)), length), (1, 8))
    arrays = [on_devices(x, jax.numpy.dtype(dtype), ring) for x in random_arrays(length, 8, 64)]
    program = with_gradient(attention_on(ring, pattern, is_causal=True))
    took = median_seconds(program, *arrays, budget=0.6 * seconds)
    message = 2**22 if is_cpu else 2**26
    hop = hop_bandwidth(mesh, message, budget=0.2 * seconds) if size > 1 else None
    about = f"{length:,} tokens, 8 heads of 64, {dtype}, causal, {pattern!r}"
    return Measurement(about, length, took, length / took, message if size > 1 else 0, hop)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ringjax doctor`."""
    parser.add_argument("--cpu-devices", type=count(MOST_CPU_DEVICES), metavar="N", help=CPU_DEVICES_HELP)
    parser.add_argument("--distributed", action="store_true", help="join the processes of a cluster first")
    parser.add_argument(
        "--seconds", type=duration, default=10.0, help="how long to measure; 0: not at all (%(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """`ringjax doctor`."""
    use_devices(options.cpu_devices, is_distributed=options.distributed)
    found = examine(options.seconds)
    if jax.process_index() == 0:
        emit(options, found.to_dict(), str(found))
    sys.stdout.flush()
    return 0 if found.is_well else 1


def use_devices(cpu_devices: int | None, *, is_distributed: bool = False) -> None:
    """Starts JAX.

    Args:
        cpu_devices: Number of CPU devices to start with, or None for the devices at hand.
        is_distributed: Whether to join the processes of a cluster.

    Raises:
        ValueError: If JAX has already started with another number of devices, finds no cluster, or cannot start.
    """
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        try:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError:
            if jax.device_count() != cpu_devices:
                raise ValueError(f"--cpu-devices must be given before JAX starts, got {cpu_devices}") from None
    if is_distributed:
        try:
            jax.distributed.initialize(initialization_timeout=60)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--distributed must be used in a cluster job that JAX recognizes: {error}") from None
    try:
        jax.devices()
    except RuntimeError as error:
        raise ValueError(f"JAX cannot start its devices: {error}") from None
