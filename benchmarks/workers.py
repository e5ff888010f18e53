"""Processes that measure: each holds one library with some devices on some cores, and is asked over pipes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


class Failure(Exception):
    """A worker could not do what it was asked for; the text says why, shortly."""


class Worker:
    """A worker, seen from the harness.

    Args:
        script: `jax_worker.py` or `torch_worker.py`.
        python: The interpreter of its environment.
        devices: CPU devices that it makes; None: the devices at hand.
        cores: Which cores it may use.
        memory: Bytes of data that it may hold; beyond, its allocations fail.
    """

    def __init__(
        self,
        script: str,
        python: str = sys.executable,
        devices: int | None = 1,
        cores: list[int] | None = None,
        memory: int | None = None,
    ):
        bounds = json.dumps({"cores": cores, "memory": memory})
        command = [python, str(HERE / script), "devices" if devices is None else str(devices), bounds]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if memory else None,
            text=True,
        )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, do: str, **request: object) -> dict:
        """Has one request answered.

        Raises:
            Failure: It was not possible, or ended the process.
        """
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise Failure(self._last_words())
        found = json.loads(answer)
        if "failure" in found:
            raise Failure(found["failure"])
        return found

    def _last_words(self) -> str:
        code = self.process.wait()
        said = self.process.stderr.read() if self.process.stderr else ""
        return "out of memory" if is_memory(said) or code == -9 else f"ended with {code}: {said[-300:]}"

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


def is_memory(text: str) -> bool:
    """Whether an error speaks of memory that is not there."""
    return any(word in text.lower() for word in ("out of memory", "bad_alloc", "can't allocate", "resource_exhausted"))
