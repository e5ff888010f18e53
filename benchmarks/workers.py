"""Starts worker processes and sends them requests over pipes. A worker runs one library on given devices and cores."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


class WorkerError(Exception):
    """Raised when a worker fails to handle a request; the message is a short reason."""


class Worker:
    """A handle to a worker process.

    Args:
        script: `jax_worker.py` or `torch_worker.py`.
        python: Python interpreter of the worker's environment.
        devices: Number of simulated CPU devices; None uses the available accelerators.
        cores: CPU cores the worker may use; None allows all.
        memory_limit: Limit on the worker's data memory in bytes, above which allocations fail; None for no limit.
    """

    def __init__(
        self,
        script: str,
        python: str = sys.executable,
        devices: int | None = 1,
        cores: list[int] | None = None,
        memory_limit: int | None = None,
    ):
        limits = json.dumps({"cores": cores, "memory": memory_limit})
        command = [python, str(HERE / script), "devices" if devices is None else str(devices), limits]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if memory_limit else None,
            text=True,
        )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def request(self, action: str, **arguments: object) -> dict:
        """Sends one request and returns the response.

        Raises:
            WorkerError: If the action fails or the worker process exits.
        """
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps({"action": action, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(self._exit_reason())
        response = json.loads(line)
        if "failure" in response:
            raise WorkerError(response["failure"])
        return response

    def call(self, function: str, **arguments: object) -> Any:
        """Calls `module:function` of this folder in the worker and returns its result."""
        return self.request("call", function=function, **arguments)["result"]

    def _exit_reason(self) -> str:
        code = self.process.wait()
        stderr = self.process.stderr.read() if self.process.stderr else ""
        if is_out_of_memory(stderr) or code == -9:
            return "out of memory"
        return f"exited with code {code}: {stderr[-300:]}"

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def is_out_of_memory(text: str) -> bool:
    """Returns whether error output reports a failed allocation."""
    patterns = ("out of memory", "bad_alloc", "can't allocate", "resource_exhausted")
    return any(pattern in text.lower() for pattern in patterns)
