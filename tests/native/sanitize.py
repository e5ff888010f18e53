"""Runs the CPU kernels under address, undefined-behavior and thread sanitizers, without Python, JAX and XLA.

    python tests/native/sanitize.py [--quick]

Compiles `harness.cc` with each sanitizer and runs it, and then runs it with planted faults, which must be reported.
Skips sanitizers whose runtime is missing, with a message. With `--quick`, checks two dtypes and a fixed list of shapes;
otherwise all dtypes, random shapes too, and narrower instruction sets of this processor.
"""

import argparse
import concurrent.futures
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
KERNELS = HERE.parents[1] / "ringjax" / "_src" / "kernels" / "cpu"
SECONDS = 3600  # limit per program; it takes one or two minutes on an idle machine
FLAGS = ["-std=c++17", "-O1", "-g1", "-ffp-contract=fast", "-fno-omit-frame-pointer", "-pthread", "-w"]
RUNTIMES = {"address,undefined": "address and undefined-behavior", "thread": "thread"}
# what a sanitizer reports for a planted fault
PLANTED = {
    "address,undefined": {"overread": "heap-buffer-overflow", "misaligned": "misaligned address"},
    "thread": {"race": "data race"},
}


class Build(NamedTuple):
    """A program to compile: its sanitizers, and the flag that selects the processor."""

    sanitizers: str
    processor: str

    @property
    def name(self) -> str:
        return f"{RUNTIMES[self.sanitizers]} sanitizers, {self.processor}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two dtypes and a fixed list of shapes")
    is_quick = parser.parse_args().quick
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "clang++", "c++"))), None)
    if compiler is None:
        print("SKIPPED: there is no C++ compiler (CXX, g++, clang++, c++), so no sanitizer has run")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        wrappers = {sanitizers: wrapper(compiler, sanitizers, pathlib.Path(folder)) for sanitizers in RUNTIMES}
        builds = [build for build in all_builds(is_quick) if wrappers[build.sanitizers] is not None]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            programs = list(pool.map(lambda build: compiled(compiler, build, pathlib.Path(folder), is_quick), builds))
        pairs = zip(builds, programs, strict=True)
        results = [check(build, program, wrappers[build.sanitizers]) for build, program in pairs]
    return 0 if all(results) else 1


def all_builds(is_quick: bool) -> list[Build]:
    """Returns the builds for this processor; unless quick, with narrower vectors too."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    native = "-march=native" if is_x86 else "-mcpu=native"
    builds = [Build(sanitizers, native) for sanitizers in RUNTIMES]
    if is_x86 and not is_quick:
        builds += [Build("address,undefined", "-march=x86-64")]
        if " avx2 " in pathlib.Path("/proc/cpuinfo").read_text():
            builds += [Build("address,undefined", "-march=haswell")]
    return builds


def wrapper(compiler: str, sanitizers: str, folder: pathlib.Path) -> list[str] | None:
    """Returns the command prefix to run programs of a sanitizer with, or None if its runtime does not work."""
    program = folder / "empty"
    made = run([compiler, f"-fsanitize={sanitizers}", "-x", "c++", "-", "-o", str(program)], "int main() {}\n")
    ran = made
    if made.returncode == 0:
        # the address space randomization of some operating systems conflicts with the thread sanitizer
        for prefix in ([], ["setarch", platform.machine(), "-R"]):
            if not prefix or shutil.which(prefix[0]):
                ran = run([*prefix, str(program)])
                if ran.returncode == 0:
                    return prefix
    reason = next(iter(ran.stdout.strip().splitlines()), "it fails without a message")
    print(f"SKIPPED: {compiler} has no working runtime of the {RUNTIMES[sanitizers]} sanitizers: {reason}", flush=True)
    return None


def compiled(compiler: str, build: Build, folder: pathlib.Path, is_quick: bool) -> pathlib.Path | None:
    program = folder / "-".join(build).replace(",", "-")
    flags = [*FLAGS, *(["-DQUICK"] if is_quick else []), f"-fsanitize={build.sanitizers}", "-fno-sanitize-recover=all"]
    sources = [
        f"-I{KERNELS}",
        str(HERE / "harness.cc"),
        "-o",
        str(program),
    ]
    made = run([compiler, *flags, build.processor, *sources])
    if made.returncode:
        print(f"{build.name}: compiling failed\n{made.stdout}", flush=True)
        return None
    return program


def check(build: Build, program: pathlib.Path | None, prefix: list[str]) -> bool:
    """Returns whether a program runs without a report, and whether every planted fault is reported."""
    if program is None:
        return False
    found = run([*prefix, str(program)])
    if found.returncode:
        print(f"FAILED: {build.name}: exit code {found.returncode}\n{found.stdout}", flush=True)
        return False
    for fault, report in PLANTED[build.sanitizers].items():
        planted = run([*prefix, str(program), "--plant", fault])
        if planted.returncode == 0 or report not in planted.stdout:
            print(f"FAILED: {build.name}: the planted fault {fault!r} was not reported\n{planted.stdout}", flush=True)
            return False
    faults = ", ".join(PLANTED[build.sanitizers])
    print(f"ok: {build.name}: {found.stdout.count('correct')} dtypes without a report; reported when planted: {faults}")
    return True


def run(command: list[str], text: str = "") -> subprocess.CompletedProcess:
    options = {
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    joined = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    try:
        return subprocess.run(command, input=text, env=os.environ | options, timeout=SECONDS, check=False, **joined)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, f"it took more than {SECONDS} seconds")


if __name__ == "__main__":
    sys.exit(main())
