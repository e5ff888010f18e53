"""Runs several JAX processes on the CPU of this machine, connected by `jax.distributed`.

`run_processes` starts a script several times; the script calls `initialize_from_environment` before any other use of
JAX. Requires `os.waitid`: Linux, or macOS with Python 3.13.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, NamedTuple

import jax

from ringjax._src.validation import check_int

GRACE_SECONDS = 10.0  # for the other processes after one has failed
_TAIL_LINES = 20
_COORDINATOR = "RINGJAX_COORDINATOR"
_NUM_PROCESSES = "RINGJAX_NUM_PROCESSES"
_PROCESS_ID = "RINGJAX_PROCESS_ID"
_LOCAL_DEVICES = "RINGJAX_LOCAL_DEVICES"


class ProcessResult(NamedTuple):
    """The result of one process.

    Attributes:
        rank: Index of the process, from 0.
        returncode: Its exit code, or minus the signal that killed it.
        output: Its output on stdout and stderr.
    """

    rank: int
    returncode: int
    output: str


class ProcessError(RuntimeError):
    """Raised if a process failed, or was killed because another failed or the timeout expired.

    Attributes:
        results: The result of each process, by rank.
    """

    def __init__(self, reason: str, results: Sequence[ProcessResult]) -> None:
        self.results = list(results)
        super().__init__("\n".join([reason, *(_describe(result) for result in results if result.returncode)]))


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    log: IO[bytes]


def run_processes(
    command: Sequence[str],
    num_processes: int,
    *,
    devices_per_process: int = 1,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[ProcessResult]:
    """Runs a command in several processes that form one JAX program on CPU devices.

    Each process starts a new session; its whole process group is killed on return or on any exception.

    Args:
        command: Program and arguments, the same for every process. It must call `initialize_from_environment` first.
        num_processes: Number of processes.
        devices_per_process: Number of CPU devices per process.
        timeout: Seconds after which all processes are killed.
        env: Additional environment variables.

    Returns:
        The result of each process, by rank.

    Raises:
        ValueError: If a number is not a positive integer, `timeout` is not positive, or `command` is empty or a string.
        ProcessError: If a process did not return 0. After the first failure, the others have `GRACE_SECONDS` to exit.

    Example:
        >>> import sys
        >>> script = "import os; print('rank', os.environ['RINGJAX_PROCESS_ID'], end='')"
        >>> run_processes([sys.executable, "-c", script], 2)[1]
        ProcessResult(rank=1, returncode=0, output='rank 1')
    """
    num_processes = check_int("num_processes", num_processes)
    devices_per_process = check_int("devices_per_process", devices_per_process)
    if not timeout > 0:
        raise ValueError(f"`timeout` must be positive, got {timeout!r}.")
    if isinstance(command, str) or not command:
        raise ValueError(f"`command` must be a list of a program and its arguments, got {command!r}.")
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",  # keeps the output of killed processes
        "JAX_PLATFORMS": "cpu",
        **(env or {}),
        _COORDINATOR: f"127.0.0.1:{_free_port()}",
        _NUM_PROCESSES: str(num_processes),
        _LOCAL_DEVICES: str(devices_per_process),
    }
    children: list[_Child] = []
    with contextlib.ExitStack() as logs:
        try:
            for rank in range(num_processes):
                log = logs.enter_context(tempfile.TemporaryFile())
                process = subprocess.Popen(
                    command,
                    env={**shared, _PROCESS_ID: str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                children.append(_Child(process, log))
            reason = _wait([child.process for child in children], timeout)
        finally:
            _end(child.process for child in children)
        results = [
            ProcessResult(rank, child.process.returncode, _read(child.log)) for rank, child in enumerate(children)
        ]
    if any(result.returncode for result in results):
        raise ProcessError(reason, results)
    return results


def initialize_from_environment() -> None:
    """Connects the processes started by `run_processes`; call it before any other use of JAX.

    Raises:
        ValueError: If this process was not started by `run_processes`.

    Example:
        >>> initialize_from_environment()
        Traceback (most recent call last):
        ValueError: `RINGJAX_COORDINATOR` must be set in the environment by `run_processes`, got nothing.
    """
    names = (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID, _LOCAL_DEVICES)
    for name in names:
        if name not in os.environ:
            raise ValueError(f"`{name}` must be set in the environment by `run_processes`, got nothing.")
    coordinator, num_processes, process_id, local_devices = (os.environ[name] for name in names)
    jax.config.update("jax_num_cpu_devices", int(local_devices))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        int(num_processes),
        int(process_id),
        cluster_detection_method="deactivate",
        coordinator_bind_address=coordinator,
        initialization_timeout=60,
        heartbeat_timeout_seconds=30,
        shutdown_timeout_seconds=60,
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> str:
    """Waits until all processes have exited or the timeout expires; returns the reason of a failure."""
    reason = f"Not all processes exited within {timeout} seconds."
    deadline = time.monotonic() + timeout
    failed = False
    running = dict(enumerate(processes))
    while running and time.monotonic() < deadline:
        for rank, process in list(running.items()):
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            del running[rank]
            if ended.si_status and not failed:
                failed = True
                reason = f"Rank {rank} failed first."
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)
    return reason


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kills the process groups and reaps their leaders.

    A process id is not reused until the process is reaped, so it is safe to kill groups whose leader has exited.
    """
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _read(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")


def _describe(result: ProcessResult) -> str:
    lines = result.output.splitlines()[-_TAIL_LINES:]
    return "\n".join([f"Rank {result.rank} exited with code {result.returncode}:", *(f"    {x}" for x in lines)])
