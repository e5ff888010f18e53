"""Resource usage of the kernels of a CUDA program: registers, spills, threads and shared memory.

The input is the dump of the compiler (`compile_for(..., dump_to=...)`): the PTX of each kernel, which is compiled again
with ``ptxas -v``, and the list of kernel launches.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re
import shutil
import subprocess
from collections.abc import Collection

_COMPILING = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_LAUNCH = re.compile(r"\] (\S+) grid: \[[^\]]*\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+) bytes")
_COPY = re.compile(r"_\d+$")  # suffix of a kernel that is called with several shapes


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """Resource usage of one kernel.

    Attributes:
        name: Name of the kernel.
        registers: Registers per thread.
        spilled_bytes: Register spills per thread, stores and loads.
        threads: Threads per block, or None if no launch is listed.
        shared_bytes: Shared memory per block.
    """

    name: str
    registers: int
    spilled_bytes: int
    threads: int | None
    shared_bytes: int

    @property
    def plain_name(self) -> str:
        """The name without a numeric suffix."""
        return _COPY.sub("", self.name)


def kernel_resources(
    dumped: pathlib.Path, architecture: str, names: Collection[str] | None = None
) -> list[KernelResources]:
    """Measures the kernels in a dump directory.

    Args:
        dumped: The directory.
        architecture: The architecture to compile for, such as ``"sm_90a"``.
        names: Names of the kernels to measure, or None for all.

    Raises:
        FileNotFoundError: If `ptxas` is not installed, or the directory contains no such kernel.
        subprocess.CalledProcessError: If `ptxas` fails.
    """
    launches = {}
    for path in dumped.glob("*.thunk_sequence.txt"):
        launches.update(parse_launches(path.read_text()))
    found = []
    for path in sorted(dumped.glob("*.ptx")):
        entries = re.findall(r"\.entry (\w+)", path.read_text())
        if any(names is None or name in names or _COPY.sub("", name) in names for name in entries):
            for measured in parse_ptxas(_ptxas(path, architecture)):
                threads, shared = launches.get(measured.name, (None, 0))
                found.append(
                    dataclasses.replace(measured, threads=threads, shared_bytes=measured.shared_bytes + shared)
                )
    if not found:
        raise FileNotFoundError(f"No kernel {'' if names is None else sorted(names)} among the PTX files in {dumped}.")
    return found


def parse_ptxas(text: str) -> list[KernelResources]:
    """Parses the output of ``ptxas -v``; `shared_bytes` is the static shared memory only."""
    found = []
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", text):
        name, spills, registers = _COMPILING.search(part), _SPILLS.search(part), _REGISTERS.search(part)
        if name and registers:
            shared = _STATIC_SHARED.search(part)
            spilled = int(spills[2]) + int(spills[3]) if spills else 0
            found.append(KernelResources(name[1], int(registers[1]), spilled, None, int(shared[1]) if shared else 0))
    return found


def parse_launches(text: str) -> dict[str, tuple[int, int]]:
    """Parses a list of launches into threads and bytes of shared memory per block, by kernel."""
    found = {}
    for name, threads, shared in _LAUNCH.findall(text):
        x, y, z = (int(size) for size in threads.split(","))
        found[name] = x * y * z, int(shared)
    return found


def find_ptxas() -> str:
    """Returns the path of `ptxas`, from the package `nvidia-cuda-nvcc-cu12` or the search path.

    Raises:
        FileNotFoundError: If it is not installed.
    """
    try:
        package = importlib.util.find_spec("nvidia.cuda_nvcc")
    except ModuleNotFoundError:
        package = None
    for folder in package.submodule_search_locations or [] if package else []:
        path = pathlib.Path(folder, "bin", "ptxas")
        if path.exists():
            return str(path)
    path_of_shell = shutil.which("ptxas")
    if path_of_shell is None:
        raise FileNotFoundError("`ptxas` was not found: install the package nvidia-cuda-nvcc-cu12.")
    return path_of_shell


def _ptxas(path: pathlib.Path, architecture: str) -> str:
    command = [find_ptxas(), "-v", f"-arch={architecture}", str(path), "-o", "/dev/null"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr
