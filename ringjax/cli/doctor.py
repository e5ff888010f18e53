"""`ringjax doctor`: reports versions and devices, checks results against the reference, and measures speed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import time
from typing import Any, NamedTuple

import jax
import numpy as np

import ringjax
from ringjax._src.comm.mesh import Ring
from ringjax._src.kernels.cpu import build
from ringjax._src.kernels.dispatch import BACKENDS
from ringjax._src.kernels.interface import Case
from ringjax._src.pattern import DilationPattern
from ringjax._src.planning.table import bytes_text
from ringjax.cli.arguments import add_options, parse_seconds
from ringjax.cli.output import emit
from ringjax.cli.running import (
    attention_on,
    error_against_reference,
    hop_bandwidth,
    median_seconds,
    on_devices,
    random_arrays,
    ring_mesh,
    with_gradient,
)

EXAMPLES = """examples:
  ringjax doctor                       on the available devices
  ringjax doctor --cpu-devices 8       on eight CPU devices of this machine
  srun ringjax doctor --distributed    on all processes of a cluster; process 0 prints
"""
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")
_LIMIT = 2e-5  # for float32 at the highest matmul precision


class Check(NamedTuple):
    """A comparison of output and gradients with the dense reference, in float32."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; False for NaN."""
        return self.error <= self.limit


class Measurement(NamedTuple):
    """A short performance measurement."""

    about: str  # description of the attention call
    tokens: int  # sequence length
    training_seconds: float  # time of one forward and backward pass
    training_tokens_per_second: float  # throughput of all devices together
    message_bytes: int  # size of the message of one hop, or 0 on a single device
    hop_bytes_per_second: float | None  # bandwidth of a hop per device, or None on a single device


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The report of `ringjax doctor`."""

    versions: dict[str, str]  # versions of the relevant packages, by name
    variables: dict[str, str]  # the relevant environment variables that are set
    devices: dict[str, Any]  # properties of the devices as reported by JAX
    kernels: dict[str, str]  # the implementation used on these devices, for some dtypes and head dimensions
    checks: list[Check]  # comparisons with the reference
    measurement: Measurement | None  # measured performance, or None if it was skipped
    seconds: float  # total time

    @property
    def is_well(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary."""
        checks = [{**check._asdict(), "passed": check.passed} for check in self.checks]
        measured = None if self.measurement is None else self.measurement._asdict()
        data = {"command": "doctor", "is_well": self.is_well, **vars(self)}
        return {**data, "checks": checks, "measurement": measured}

    def __str__(self) -> str:
        lines = ["versions   " + ", ".join(f"{name} {version}" for name, version in self.versions.items())]
        lines += [f"variable   {name}={value}" for name, value in self.variables.items()]
        d = self.devices
        lines.append(f"devices    {d['number']} x {d['kind']} ({d['platform']}), {d['processes']} process(es)")
        lines.append(f"links      {d['links']}")
        if d["memory_bytes"]:
            lines.append(f"memory     {bytes_text(d['memory_bytes'])} per device")
        lines += [f"kernels    {case}: {what}" for case, what in self.kernels.items()]
        for check in self.checks:
            verdict = "passed" if check.passed else "FAILED"
            lines.append(f"check      {check.name}: {verdict} (error {check.error:.1e}, limit {check.limit:.0e})")
        m = self.measurement
        if m is not None:
            lines.append(f"speed      {m.about}: {m.training_seconds:.3g} s forward and backward,")
            lines.append(f"           {m.training_tokens_per_second:,.0f} tokens/s")
            if m.hop_bytes_per_second is not None:
                speed = m.hop_bytes_per_second / 1e9
                lines.append(f"hop        {speed:.2f} GB/s per device, messages of {bytes_text(m.message_bytes)}")
        verdict = "All checks passed." if self.is_well else "Some checks FAILED: please report this output."
        return "\n".join([*lines, f"{verdict} ({self.seconds:.0f} s)"])


def examine(seconds: float = 10.0) -> Diagnosis:
    """Inspects the available devices, checks the attention against the reference and measures it.

    The measurement takes about `seconds`; 0 skips it.
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
    """Describes the links between devices, as far as JAX knows them."""
    if hasattr(devices[0], "coords"):
        grid = np.array([device.coords for device in devices]).max(axis=0) + 1
        return f"a grid of {'x'.join(map(str, grid))} chips"
    if devices[0].platform == "cpu":
        return "none: CPU devices share the memory and cores of the machine"
    slices = {getattr(device, "slice_index", device.process_index) for device in devices}
    return f"{len(slices)} machine(s) or slice(s); JAX does not report their links"


def _kernels() -> dict[str, str]:
    kind = jax.default_backend()
    if kind == "cpu":
        reason = build.why_not()
        return {"all": f"plain XLA: {reason}" if reason else "C++ kernels compiled for this machine"}
    if kind not in ("tpu", "gpu"):
        return {"all": f"plain XLA: no kernels for {kind}"}
    found, limits = {}, BACKENDS[kind].limits
    assert limits is not None
    for dtype in ("bfloat16", "float32"):
        for dim in (64, 128):
            reason = limits.unsupported(kind, Case(dtype, dim, 2048, 1))
            found[f"{dtype}, head dim {dim}"] = f"plain XLA: {reason}" if reason else "Pallas kernels"
    return found


def _check(size: int) -> Check:
    """Checks one local branch and one whose segment is the sequence, causal, with grouped-query attention."""
    chunk = 64 if size <= 32 else 16  # the reference is dense
    length = 2 * size * chunk
    devices = [jax.local_devices()[0]] if size == 1 else None
    ring = Ring(ring_mesh(devices), layout="zigzag")
    pattern = DilationPattern((chunk, length), (1, 4))
    error = error_against_reference(ring, pattern, random_arrays(length, 4, 32, kv_heads=2), is_causal=True)
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
    """Adds the options of `ringjax doctor`."""
    add_options(parser, "cpu-devices")
    parser.add_argument("--distributed", action="store_true", help="join the processes of a cluster first")
    about = "measurement time; 0 skips the measurement (%(default)s)"
    parser.add_argument("--seconds", type=parse_seconds, default=10.0, help=about)


def run(options: argparse.Namespace) -> int:
    """Runs `ringjax doctor`."""
    use_devices(options.cpu_devices, is_distributed=options.distributed)
    found = examine(options.seconds)
    if jax.process_index() == 0:
        emit(options, found.to_dict(), str(found))
    return 0 if found.is_well else 1


def use_devices(cpu_devices: int | None, *, is_distributed: bool = False) -> None:
    """Initializes JAX: simulates CPU devices if a number is given, and optionally joins the processes of a cluster.

    Raises:
        ValueError: If JAX is already initialized with another number of devices, does not detect a cluster, or cannot
            initialize its devices.
    """
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        try:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError:
            if jax.device_count() != cpu_devices:
                raise ValueError(f"--cpu-devices must be set before JAX is initialized, got {cpu_devices}") from None
    if is_distributed:
        try:
            jax.distributed.initialize(initialization_timeout=60)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--distributed must be used in a cluster job that JAX recognizes: {error}") from None
    try:
        jax.devices()
    except RuntimeError as error:
        raise ValueError(f"JAX cannot initialize its devices: {error}") from None
