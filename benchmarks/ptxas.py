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
_VERSION = re.compile(r"\bV([\d.]+)")
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
        RuntimeError: If `ptxas` fails, with its own message.
    """
    launches = {}
    for path in dumped.glob("*.thunk_sequence.txt"):
        launches.update(parse_launches(path.read_text()))
    found = []
    for path in kernel_files(dumped, names):
        for measured in parse_ptxas(compile_ptx(path, architecture)):
            threads, shared = launches.get(measured.name, (None, 0))
            found.append(dataclasses.replace(measured, threads=threads, shared_bytes=measured.shared_bytes + shared))
    return found


def kernel_files(dumped: pathlib.Path, names: Collection[str] | None = None) -> list[pathlib.Path]:
    """Returns the PTX files of a dump directory with one of these kernels, or with any.

    Raises:
        FileNotFoundError: If there are none.
    """
    found = []
    for path in sorted(dumped.glob("*.ptx")):
        entries = re.findall(r"\.entry (\w+)", path.read_text())
        if any(names is None or name in names or _COPY.sub("", name) in names for name in entries):
            found.append(path)
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
    """Returns the path of `ptxas`.

    Raises:
        FileNotFoundError: If it is not installed.
    """
    return find_tool("ptxas")


def find_tool(name: str) -> str:
    """Returns the path of a tool of the CUDA toolkit, from a package of CUDA 13 or 12, or from the search path.

    CUDA 13 comes first: if it is installed, XLA writes PTX that the `ptxas` of CUDA 12 rejects.

    Raises:
        FileNotFoundError: If it is not installed.
    """
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations or [] if spec else []:
            path = pathlib.Path(folder, "bin", name)
            if path.exists():
                return str(path)
    path_of_shell = shutil.which(name)
    if path_of_shell is None:
        package = "nvidia-cuda-nvcc" if name == "ptxas" else f"nvidia-cuda-{name}"
        raise FileNotFoundError(f"`{name}` was not found: install the package {package}.")
    return path_of_shell


def run_tool(name: str, *arguments: str) -> tuple[str, str]:
    """Runs a tool of the CUDA toolkit and returns its standard output and standard error.

    Raises:
        FileNotFoundError: If it is not installed.
        RuntimeError: If it fails, with its own message.
    """
    done = subprocess.run([find_tool(name), *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message")[-2000:]
        raise RuntimeError(f"`{name} {' '.join(arguments)}` exited with code {done.returncode}: {said}")
    return done.stdout, done.stderr


def tool_version(name: str) -> str:
    """Returns the version of a tool of the CUDA toolkit."""
    found = _VERSION.search(run_tool(name, "--version")[0])
    return found[1] if found else "unknown"


def compile_ptx(path: pathlib.Path, architecture: str, cubin: str | pathlib.Path = "/dev/null") -> str:
    """Compiles a PTX file and returns what ``ptxas -v`` reports.

    Raises:
        FileNotFoundError: If `ptxas` is not installed.
        RuntimeError: If it fails, with its own message.
    """
    return run_tool("ptxas", "-v", f"-arch={architecture}", str(path), "-o", str(cubin))[1]
