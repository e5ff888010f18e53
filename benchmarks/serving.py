"""What workers of all libraries have in common: the loop that answers, the arrays, and the memory that a run takes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable

import numpy as np
from workloads import Case


def confine() -> None:
    """Keeps this process to the cores and the memory of its command line, before its library starts threads."""
    bounds = json.loads(sys.argv[2])
    if bounds["cores"] is not None:
        os.sched_setaffinity(0, bounds["cores"])
    if bounds["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (bounds["memory"], bounds["memory"]))


def serve(actions: dict[str, Callable[..., dict | None]]) -> None:
    """Answers requests, one line of JSON each, until there are no more; what is printed goes to the error output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = actions[request.pop("do")](**request) or {}
        except Exception as problem:  # whatever a library raises, the harness records
            text = f"{type(problem).__name__}: {problem}"
            is_memory = isinstance(problem, MemoryError) or "RESOURCE_EXHAUSTED" in text or "allocate" in text.lower()
            if not is_memory:
                traceback.print_exc()
            answer = {"failure": "out of memory" if is_memory else text[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def host_arrays(case: Case) -> list[np.ndarray]:
    """Query, key, value and a cotangent, the same in every process.

    Values are positive where each head has one branch: a peer divides by their sums.
    """
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.standard_normal(case.shape, np.float32) for _ in range(4))
    return [q, k, abs(v) if case.grouped else v, g]


def for_comparing(x: np.ndarray) -> np.ndarray:
    """An output (B, T, N, H), or some of its rows where there are so many that two copies might not fit."""
    stride = max(1, x.size >> 26)
    return x if stride == 1 else x[:, ::stride].copy()


class PeakMemory:
    """The largest resident memory of this process while something runs, beyond what it was before.

    Asks the system every few milliseconds; freed memory is given back first, so that it is not counted as there.
    """

    def __enter__(self) -> PeakMemory:
        with contextlib.suppress(OSError, AttributeError):  # where there is no glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.before = self.largest = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.004):
            self.largest = max(self.largest, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self.largest = max(self.largest, resident_bytes())
        self._stop.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.largest - self.before


def resident_bytes() -> int:
    """Memory of this process that is in the machine's."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
