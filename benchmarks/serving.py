"""Shared code of the workers: the request loop, the inputs, and peak memory measurement."""

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


def apply_limits() -> None:
    """Limits this process to the cores and memory given on its command line, before its library starts threads."""
    limits = json.loads(sys.argv[2])
    if limits["cores"] is not None:
        os.sched_setaffinity(0, limits["cores"])
    if limits["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limits["memory"], limits["memory"]))


def serve(actions: dict[str, Callable[..., dict | None]]) -> None:
    """Handles requests, one line of JSON each, until stdin is closed. Output printed by actions goes to stderr."""
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            response = actions[request.pop("action")](**request) or {}
        except Exception as error:  # the harness records whatever a library raises
            text = f"{type(error).__name__}: {error}"
            is_oom = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "allocate" in text.lower()
            if not is_oom:
                traceback.print_exc()
            response = {"failure": "out of memory" if is_oom else text[:300]}
        responses.write(json.dumps(response) + "\n")
        responses.flush()


def make_inputs(case: Case) -> list[np.ndarray]:
    """Returns query, key, value and a cotangent, identical in every process.

    With one branch per head the values are positive, because a baseline divides outputs by their sums.
    """
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.standard_normal(case.shape, np.float32) for _ in range(4))
    return [q, k, abs(v) if case.split_heads else v, g]


def subsample(x: np.ndarray) -> np.ndarray:
    """Returns an output (B, T, N, H), or every n-th row of it if a second copy might not fit in memory."""
    stride = max(1, x.size >> 26)
    return x if stride == 1 else x[:, ::stride].copy()


class PeakMemory:
    """Measures the growth of this process's resident memory inside a `with` block, by sampling.

    Freed memory is returned to the system first, so that reusing it counts as growth.
    """

    def __enter__(self) -> PeakMemory:
        with contextlib.suppress(OSError, AttributeError):  # no glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.before = self.peak = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.004):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self.peak = max(self.peak, resident_bytes())
        self._stop.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.peak - self.before


def resident_bytes() -> int:
    """Returns the resident set size of this process, or 0 where /proc is unavailable."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
