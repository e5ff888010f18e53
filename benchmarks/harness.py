"""The benchmark harness: measures implementations in worker processes and collects results in tables."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from workers import CORES, Worker, WorkerError
from workloads import Case

TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}  # sums in a different order may differ by this much


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An attention implementation to measure.

    Attributes:
        kind: Name of the implementation in its worker.
        library: "jax" or "torch".
        devices: Number of devices.
        options: Options passed to the worker.
        is_baseline: Whether this is not ringjax; baselines run in processes of their own, with a memory limit.
        is_same: Whether it computes the same function as the first candidate, so that outputs are compared.
        denormalize: Maps (outputs, expected outputs) to comparable outputs, for baselines that rescale theirs.
    """

    kind: str
    library: str = "jax"
    devices: int = 1
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    is_baseline: bool = False
    is_same: bool = True
    denormalize: Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]] | None = None


@dataclasses.dataclass
class Result:
    """The measurements of one candidate.

    Attributes:
        times: Seconds of each run.
        peak_bytes: Peak memory of its process during a run, including inputs.
        info: Properties of the compiled program, as reported by the worker.
        failure: Why there are no measurements, or "".
    """

    times: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None
    info: dict = dataclasses.field(default_factory=dict)
    failure: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.times) if self.times else math.nan

    @property
    def spread(self) -> float:
        """Slowest minus fastest run, divided by the median; NaN for a single run."""
        return (max(self.times) - min(self.times)) / self.median if len(self.times) > 1 else math.nan


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot of a table: `columns` over column `x`."""

    x: str
    columns: Sequence[str]
    y_label: str
    log_scale: bool = True


@dataclasses.dataclass
class Table:
    """A table of measurements.

    Attributes:
        name: Identifier, used in file names.
        title: Heading above the table.
        notes: What was measured and how to read it.
        rows: Values by column; None where nothing was measured.
        plot: How to plot the table, or None.
        run: Date, mode, versions and commit of the run.
    """

    name: str
    title: str
    notes: str
    rows: list[dict[str, Any]]
    plot: Plot | None = None
    run: str = ""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))


class Bench:
    """Settings and worker processes shared by all parts of the benchmark.

    Args:
        quick: Whether to run fewer repeats and cases.
        torch_python: Python interpreter of an environment with torch; None skips PyTorch.
        peer_folder: Folder that contains ringattention; None skips it.
        memory_limit: Memory limit of a baseline, in bytes.
        on_cpu: Whether to use CPU devices even if there are others.
        shrink: Divisor of all lengths, for testing the harness itself.
    """

    def __init__(
        self,
        quick: bool = True,
        torch_python: str | None = None,
        peer_folder: str | None = None,
        memory_limit: int = 12 * 2**30,
        on_cpu: bool = False,
        shrink: int = 1,
    ):
        self.quick, self.torch_python, self.peer_folder = quick, torch_python, peer_folder
        self.memory_limit, self.shrink = memory_limit, shrink
        self.repeats, self.time_limit = (3, 12.0) if quick else (5, 45.0)  # the limit is for all repeats of a candidate
        self._workers: dict[tuple, Worker] = {}
        self._start = time.perf_counter()
        first = Worker("jax_worker.py", devices=1 if on_cpu else None)
        self.devices = first.request("info")
        self.is_cpu = self.devices["platform"] == "cpu"
        if self.is_cpu:
            first.close()
        else:
            self._workers["devices",] = first  # only one process can use a TPU

    def log(self, text: str) -> None:
        """Prints progress with the elapsed time."""
        minutes, seconds = divmod(int(time.perf_counter() - self._start), 60)
        print(f"[{minutes:2d}:{seconds:02d}] {text}", file=sys.stderr, flush=True)

    def jax(self, devices: int = 1, cores: list[int] | None = None, is_baseline: bool = False) -> Worker:
        """Returns a JAX worker with that many simulated CPU devices, or the one that uses the accelerators."""
        if not self.is_cpu:
            return self._workers["devices",]
        key = ("jax", devices, tuple(cores or ()), is_baseline)
        limit = self.memory_limit if is_baseline else None
        return self._worker(key, lambda: Worker("jax_worker.py", devices=devices, cores=cores, memory_limit=limit))

    def torch(self, cores: list[int] | None = None) -> Worker:
        """Returns a PyTorch worker."""
        python, limit = self.torch_python, self.memory_limit
        assert python
        key = ("torch", tuple(cores or ()))
        return self._worker(key, lambda: Worker("torch_worker.py", python, cores=cores, memory_limit=limit))

    def _worker(self, key: tuple, make: Callable[[], Worker]) -> Worker:
        if key not in self._workers or not self._workers[key].is_alive:
            self._workers[key] = make()
        return self._workers[key]

    def can_run(self, candidate: Candidate) -> bool:
        """Returns whether the candidate's library and devices are available."""
        if candidate.library == "torch":
            return self.is_cpu and self.torch_python is not None
        if candidate.kind == "ringattention":
            return self.is_cpu and self.peer_folder is not None
        return self.is_cpu or candidate.devices <= self.devices["count"]

    def adapt(self, case: Case) -> Case:
        """Returns the case as measured here: scaled down by `shrink`, and in bfloat16 on accelerators."""
        case = case.scaled_down(self.shrink)
        return case if self.is_cpu else dataclasses.replace(case, dtype="bfloat16")

    def measure(
        self, case: Case, grad: bool, candidates: Mapping[str, Candidate], memory: bool = False
    ) -> dict[str, Result]:
        """Measures candidates on one case: checks their outputs against the first, then times interleaved repeats.

        Args:
            case: The workload.
            grad: Whether to include the backward pass.
            candidates: Candidates by name; those that cannot run here are skipped.
            memory: Whether to measure peak memory.
        """
        case = self.adapt(case)
        candidates = {name: c for name, c in candidates.items() if self.can_run(c)}
        results = {name: Result() for name in candidates}
        self.log(f"{case.name}, {case.length:,} tokens, {case.mask}, {'fwd+bwd' if grad else 'fwd'}")
        with tempfile.TemporaryDirectory() as folder:
            for index, (name, candidate) in enumerate(candidates.items()):
                path = Path(folder) / f"{index}.npz" if candidate.is_same and len(candidates) > 1 else None
                self._prepare(results[name], candidate, name, case, grad, path)
                if results[name].failure:
                    self._drop(candidate, name)  # free its memory for the others
            self._check_outputs(case, candidates, results, Path(folder))
        for result in results.values():
            if result.info.get("first_s", 0.0) > self.time_limit:
                result.times.append(result.info["first_s"])  # long enough for warm-up not to matter
        for repeat in range(self.repeats):
            for name in rotate(list(candidates), repeat):
                first = results[name].info.get("first_s", 0.0)
                if not results[name].failure and first * (repeat + 1) <= self.time_limit:
                    time.sleep(0.05)  # lets idle threads of one library sleep before the next is timed
                    self._time(results[name], candidates[name], name)
        for name, candidate in candidates.items():
            if memory and self.is_cpu and not results[name].failure:
                results[name].peak_bytes = self._worker_for(candidate).request("memory", key=name)["bytes"]
            self._drop(candidate, name)
        return results

    def _drop(self, candidate: Candidate, name: str) -> None:
        if self._worker_for(candidate).is_alive:
            self._worker_for(candidate).request("drop", key=name)

    def _worker_for(self, candidate: Candidate) -> Worker:
        if candidate.library == "torch":
            return self.torch(candidate.options.get("cores"))
        return self.jax(candidate.devices, candidate.options.get("cores"), candidate.is_baseline)

    def _prepare(
        self, result: Result, candidate: Candidate, name: str, case: Case, grad: bool, path: Path | None
    ) -> None:
        """Compiles and runs a candidate once, saving its outputs to `path`."""
        options = {"size": candidate.devices, "path": path and str(path), **candidate.options}
        result.info = self._request(
            result, candidate, "prepare", key=name, kind=candidate.kind, case=case.to_dict(), grad=grad, **options
        )

    def _time(self, result: Result, candidate: Candidate, name: str) -> None:
        response = self._request(result, candidate, "run", key=name)
        if not result.failure:
            result.times.append(response["seconds"])

    def _request(self, result: Result, candidate: Candidate, action: str, **arguments: object) -> dict:
        """Sends a request to the candidate's worker; a failure is recorded in `result`."""
        try:
            return self._worker_for(candidate).request(action, **arguments)
        except WorkerError as error:
            result.failure = str(error)
            self.log(f"  {result.failure}")
            return {}

    def _check_outputs(
        self, case: Case, candidates: Mapping[str, Candidate], results: dict[str, Result], folder: Path
    ) -> None:
        """Compares the saved outputs of all candidates with those of the first."""
        expected: list[np.ndarray] = []
        for index, (name, candidate) in enumerate(candidates.items()):
            path = folder / f"{index}.npz"
            if results[name].failure or not path.exists():
                continue
            with np.load(path) as saved:
                outputs = [saved[key] for key in saved]
            if candidate.denormalize:
                outputs = candidate.denormalize(outputs, expected)
            expected = expected or outputs
            error = max_error(outputs, expected[: len(outputs)])
            results[name].info["error"] = error
            if not error < TOLERANCE[case.dtype]:
                raise SystemExit(f"{name} differs by {error:.1e} in {case}: not the same computation")

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


def rotate(names: Sequence[str], by: int) -> list[str]:
    """Rotates the order, so that one candidate's cleanup does not always delay the same other candidate."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def max_error(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Returns the largest ``max|a - b| / max(1, max|b|)`` over all pairs."""
    return max(float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in zip(actual, expected, strict=True))


def geometric_mean(ratios: Iterable[float]) -> float:
    """Returns the geometric mean, ignoring NaN; NaN if nothing is left."""
    logarithms = [math.log(ratio) for ratio in ratios if ratio and not math.isnan(ratio)]
    return math.exp(statistics.fmean(logarithms)) if logarithms else math.nan


def max_spread(results: Mapping[str, Result]) -> float:
    """Returns the largest spread of the candidates that ran more than once; NaN if none did."""
    return max((r.spread for r in results.values() if not math.isnan(r.spread)), default=math.nan)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the exponent of the best-fitting power law: the least-squares slope of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def pass_name(grad: bool) -> str:
    return "forward + backward" if grad else "forward"


def value_or_failure(result: Result | None, value: float) -> float | str | None:
    """Returns a table cell: the value, or the failure of the candidate if there is no value."""
    if result is None:
        return None
    return result.failure or value


def machine_info() -> dict[str, object]:
    """Describes the machine."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, StopIteration, ValueError):
        memory = math.nan
    return {
        "processor": model,
        "cores": len(CORES),
        "memory_GiB": round(memory, 1),
        "python": platform.python_version(),
    }
