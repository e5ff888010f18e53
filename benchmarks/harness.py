"""One harness for all benchmarks: workers, races between contenders, tables, progress, results as JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from workers import CORES, Failure, Worker
from workloads import Case

EQUAL = {"float32": 2e-5, "bfloat16": 4e-2}  # how far sums in another order may lie apart


@dataclasses.dataclass(frozen=True)
class Contender:
    """Someone who computes an attention.

    Attributes:
        kind: What the worker calls it.
        library: "jax" or "torch".
        devices: That it uses.
        options: For the worker.
        is_peer: Not ours: it has a process of its own.
        is_same: It computes the same as ours, so that outputs are compared.
        undo: Takes its outputs back to the definition, if it adds something of its own.
    """

    kind: str
    library: str = "jax"
    devices: int = 1
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    is_peer: bool = False
    is_same: bool = True
    undo: Any = None


@dataclasses.dataclass
class Result:
    """What was measured of a contender.

    Attributes:
        times: Seconds of each run.
        bytes: Largest memory of its process during a run, inputs included.
        facts: What its worker told of its program.
        failure: Why there are no figures, if there are none.
    """

    times: list[float] = dataclasses.field(default_factory=list)
    bytes: int | None = None
    facts: dict = dataclasses.field(default_factory=dict)
    failure: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.times) if self.times else math.nan

    @property
    def spread(self) -> float:
        """Largest less smallest time, over the median; of a single run, not a number."""
        return (max(self.times) - min(self.times)) / self.median if len(self.times) > 1 else math.nan


@dataclasses.dataclass(frozen=True)
class Plot:
    """A picture of a table: columns `lines` over column `x`."""

    x: str
    lines: Sequence[str]
    y_title: str
    logarithmic: bool = True


@dataclasses.dataclass
class Table:
    """Figures, with what they are.

    Attributes:
        name: For files and links.
        title: Above the table.
        about: What was measured and how to read it.
        rows: Each a value by column; None where nothing was measured.
        plot: How to draw it, if it is drawn.
        run: When and with what it was measured.
    """

    name: str
    title: str
    about: str
    rows: list[dict[str, Any]]
    plot: Plot | None = None
    run: str = ""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))


class Bench:
    """What all parts are handed.

    Args:
        quick: Fewer repeats and cases.
        torch_python: Interpreter of an environment with torch; None: nothing of PyTorch is measured.
        peer_folder: Folder with ringattention; None: not measured.
        memory: Bytes that a peer may hold.
        on_cpu: Use CPU devices, though there may be others.
        shrink: Divides all lengths, to try the harness itself.
    """

    def __init__(
        self,
        quick: bool = True,
        torch_python: str | None = None,
        peer_folder: str | None = None,
        memory: int = 12 * 2**30,
        on_cpu: bool = False,
        shrink: int = 1,
    ):
        self.quick, self.torch_python, self.peer_folder = quick, torch_python, peer_folder
        self.memory, self.shrink = memory, shrink
        self.repeats, self.patience = (3, 12.0) if quick else (5, 45.0)  # repeats; seconds for all repeats of one
        self._workers: dict[tuple, Worker] = {}
        self._begin = time.perf_counter()
        first = Worker("jax_worker.py", devices=1 if on_cpu else None)
        self.devices = first.ask("info")
        self.is_cpu = self.devices["platform"] == "cpu"
        if self.is_cpu:
            first.close()
        else:
            self._workers["devices",] = first  # a TPU has one process

    def say(self, text: str) -> None:
        """Progress, with the time since the start."""
        minutes, seconds = divmod(int(time.perf_counter() - self._begin), 60)
        print(f"[{minutes:2d}:{seconds:02d}] {text}", file=sys.stderr, flush=True)

    def jax(self, devices: int = 1, cores: list[int] | None = None, is_peer: bool = False) -> Worker:
        """A worker with so many devices: CPU devices of its own, or those at hand."""
        if not self.is_cpu:
            return self._workers["devices",]
        key = ("jax", devices, tuple(cores or ()), is_peer)
        make = lambda: Worker("jax_worker.py", devices=devices, cores=cores, memory=self.memory if is_peer else None)  # noqa: E731
        return self._worker(key, make)

    def torch(self, cores: list[int] | None = None) -> Worker:
        assert self.torch_python
        make = lambda: Worker("torch_worker.py", self.torch_python or "", cores=cores, memory=self.memory)  # noqa: E731
        return self._worker(("torch", tuple(cores or ())), make)

    def _worker(self, key: tuple, make) -> Worker:
        if key not in self._workers or not self._workers[key].is_alive:
            self._workers[key] = make()
        return self._workers[key]

    def has(self, contender: Contender) -> bool:
        """Whether it can be measured here."""
        if contender.library == "torch":
            return self.is_cpu and self.torch_python is not None
        if contender.kind == "ringattention":
            return self.is_cpu and self.peer_folder is not None
        return self.is_cpu or contender.devices <= self.devices["number"]

    def fit(self, case: Case) -> Case:
        """The case as it is measured here: accelerators compute in bfloat16."""
        case = case.smaller(self.shrink)
        return case if self.is_cpu else dataclasses.replace(case, dtype="bfloat16")

    def race(
        self, case: Case, grad: bool, contenders: Mapping[str, Contender], memory: bool = False
    ) -> dict[str, Result]:
        """Runs contenders on one case: outputs compared with the first one's, then repeats interleaved.

        Args:
            case: What to compute.
            grad: With the backward pass.
            contenders: By name.
            memory: Measure the memory of each.
        """
        case = self.fit(case)
        contenders = {name: c for name, c in contenders.items() if self.has(c)}
        results = {name: Result() for name in contenders}
        self.say(f"{case.name}, {case.length:,} tokens, {case.mask}, {'fwd+bwd' if grad else 'fwd'}")
        with tempfile.TemporaryDirectory() as folder:
            for number, (name, contender) in enumerate(contenders.items()):
                path = Path(folder) / f"{number}.npz" if contender.is_same and len(contenders) > 1 else None
                self._try(
                    results[name], lambda c=contender, n=name, p=path: self._prepare(results[n], c, n, case, grad, p)
                )
                if results[name].failure:
                    self._drop(contender, name)  # what it holds would be missing to the others
            self._check_equal(case, contenders, results, Path(folder))
        for result in results.values():
            if result.facts.get("first_s", 0.0) > self.patience:
                result.times.append(result.facts["first_s"])  # long enough for its start not to matter
        for repeat in range(self.repeats):
            for name in rotated(list(contenders), repeat):
                contender, first = contenders[name], results[name].facts.get("first_s", 0.0)
                if not results[name].failure and first * (repeat + 1) <= self.patience:
                    time.sleep(0.05)  # let the idle threads of one library go to sleep before the next is timed
                    self._try(results[name], lambda c=contender, n=name: self._time(results[n], c, n))
        for name, contender in contenders.items():
            if memory and self.is_cpu and not results[name].failure:
                results[name].bytes = self._of(contender).ask("memory", key=name)["bytes"]
            self._drop(contender, name)
        return results

    def _drop(self, contender: Contender, name: str) -> None:
        if self._of(contender).is_alive:
            self._of(contender).ask("drop", key=name)

    def _of(self, contender: Contender) -> Worker:
        if contender.library == "torch":
            return self.torch(contender.options.get("cores"))
        return self.jax(contender.devices, contender.options.get("cores"), contender.is_peer)

    def _prepare(
        self, result: Result, contender: Contender, name: str, case: Case, grad: bool, path: Path | None
    ) -> None:
        options = {"size": contender.devices, "path": path and str(path), **contender.options}
        result.facts = self._of(contender).ask(
            "prepare", key=name, kind=contender.kind, case=case.to_dict(), grad=grad, **options
        )

    def _time(self, result: Result, contender: Contender, name: str) -> None:
        result.times.append(self._of(contender).ask("run", key=name)["seconds"])

    def _try(self, result: Result, action) -> None:
        try:
            action()
        except Failure as failure:
            result.failure = str(failure)
            self.say(f"  {result.failure}")

    def _check_equal(
        self, case: Case, contenders: Mapping[str, Contender], results: dict[str, Result], folder: Path
    ) -> None:
        """Outputs that were saved, each in a file of its contender's number, against the first."""
        expected: list[np.ndarray] = []
        for number, (name, contender) in enumerate(contenders.items()):
            path = folder / f"{number}.npz"
            if results[name].failure or not path.exists():
                continue
            with np.load(path) as saved:
                found = [saved[key] for key in saved]
            if contender.undo:
                found = contender.undo(found, expected)
            expected = expected or found
            error = largest_error(found, expected[: len(found)])
            results[name].facts["error"] = error
            if not error < EQUAL[case.dtype]:
                raise SystemExit(f"{name} differs by {error:.1e} in {case}: not the same computation")

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The same names, another one first: what a process tidies up after its turn must not always meet the same one."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def largest_error(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """``max|a - b| / max(1, max|b|)`` over all pairs."""
    return max(float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in zip(ours, theirs, strict=True))


def geometric_mean(ratios: Iterable[float]) -> float:
    """The mean of ratios; of none, not a number."""
    logarithms = [math.log(ratio) for ratio in ratios if ratio and not math.isnan(ratio)]
    return math.exp(statistics.fmean(logarithms)) if logarithms else math.nan


def largest_spread(results: Mapping[str, Result]) -> float:
    """Of those who ran more than once; not a number where nobody did."""
    return max((r.spread for r in results.values() if not math.isnan(r.spread)), default=math.nan)


def exponent(sizes: Sequence[float], figures: Sequence[float]) -> float:
    """Of the power law that fits best: the slope of logarithms, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(figures), 1)[0])


def passes(grad: bool) -> str:
    return "forward + backward" if grad else "forward"


def cell(result: Result | None, figure: float) -> float | str | None:
    """A figure, or why there is none."""
    if result is None:
        return None
    return result.failure or figure


def machine() -> dict[str, object]:
    """What the figures were measured on."""
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
