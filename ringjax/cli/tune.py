"""`ringjax tune`: measures layouts, strategies and block sizes on the available devices and saves the fastest."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ringjax._src.comm.mesh import Ring
from ringjax._src.comm.ring_comm import STRATEGIES, StrategyName
from ringjax._src.kernels.dispatch import Implementation, Target
from ringjax._src.kernels.interface import BlockSizes
from ringjax._src.planning.table import bytes_text
from ringjax._src.validation import check_int
from ringjax.cli.arguments import LAYOUTS, OPTIONS, PlanOptions, add_job_arguments, add_options, job_of, parse_seconds
from ringjax.cli.doctor import use_devices
from ringjax.cli.files import check_output, write_output
from ringjax.cli.output import emit, seconds_text, table_text
from ringjax.cli.running import attention_on, median_seconds, on_devices, random_arrays, ring_mesh, with_gradient

EXAMPLES = """examples:
  ringjax tune --seq-len 64K --pattern 2K/1,16K/4,T/16 --causal -o tuning.json
  ringjax tune --cpu-devices 4 --seq-len 8K --pattern 1K/1,T/8 --heads 4 --head-dim 64 --dtype f32 --causal
then, in Python:
  tuning = ringjax.cli.tune.load("tuning.json")
  ringjax.dilated_attention(q, k, v, pattern, ring=tuning.ring(mesh), block_sizes=tuning.block_sizes)
"""
_VERSION = 1
_SIZES: dict[Target, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "tpu": ((256, 512, 1024, 2048), (256, 512, 1024, 2048)),
    "gpu": ((32, 64, 128), (32, 64, 128)),
}


class Trial(NamedTuple):
    """One measurement: the options and their time, or the error that they caused."""

    layout: str
    strategy: str
    block_sizes: BlockSizes | None
    is_gradient: bool
    seconds: float | None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The fastest measured options, to be passed to `Ring` and `dilated_attention`.

    Example:
        >>> Tuning("TPU v5p", 1, "contiguous", "auto", BlockSizes(512, 1024)).block_sizes.key
        1024
    """

    device: str  # kind of the measured devices
    ring_size: int  # number of devices that shared the sequence
    layout: str  # the fastest layout
    strategy: StrategyName  # the fastest strategy
    block_sizes: BlockSizes | None  # the fastest block sizes; None for the defaults, or without kernels
    about: str = ""  # description of the attention call
    trials: tuple[Trial, ...] = ()  # all measurements

    def ring(self, mesh: Mesh, **options: Any) -> Ring:  # noqa: ANN401
        """Returns a ring with this layout and strategy; `options` are passed to `Ring`."""
        return Ring(mesh, layout=self.layout, strategy=self.strategy, **options)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary."""
        data = dataclasses.asdict(self)
        return {**data, "version": _VERSION, "trials": [trial._asdict() for trial in data["trials"]]}

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the tuning to a file that `load` reads."""
        write_output(pathlib.Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    def __str__(self) -> str:
        columns = ("layout", "strategy", "blocks (query x key)", "blocks backward", "pass", "time")
        rows = []
        for trial in self.trials:
            s = trial.block_sizes
            sizes = ("default", "default") if s is None else (f"{s.query} x {s.key}", f"{s.grad_query} x {s.grad_key}")
            time = trial.error[:40] if trial.seconds is None else seconds_text(trial.seconds)
            part = "training" if trial.is_gradient else "forward"
            rows.append((trial.layout, trial.strategy, *sizes, part, time))
        blocks = "default" if self.block_sizes is None else str(self.block_sizes)
        if not any(trial.block_sizes for trial in self.trials):
            blocks = "not measured (no Pallas kernels on this platform)"
        best = f"Fastest: layout {self.layout}, strategy {self.strategy}; block sizes: {blocks}."
        return table_text(f"{self.about} on {self.ring_size} x {self.device}", columns, rows, num_left=5) + "\n" + best


def load(path: str | pathlib.Path) -> Tuning:
    """Loads the result of `ringjax tune`.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file was not written by this version of `ringjax tune`.

    Example:
        >>> import tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "tuning.json")
        >>> Tuning("cpu", 2, "zigzag", "ring", None).save(path)
        >>> load(path)
        Tuning(device='cpu', ring_size=2, layout='zigzag', strategy='ring', block_sizes=None, about='', trials=())
    """
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if data.pop("version") != _VERSION:
            raise ValueError
        trials = tuple(Trial(**{**trial, "block_sizes": _sizes(trial["block_sizes"])}) for trial in data["trials"])
        tuning = Tuning(**{**data, "block_sizes": _sizes(data["block_sizes"]), "trials": trials})
        check_int("ring_size", tuning.ring_size)
        if _is_written_here(tuning):
            return tuning
        raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        wanted = "`path` must be a file written by this version of `ringjax tune`"
        raise ValueError(f"{wanted}, got {str(path)!r}.") from None


def _is_written_here(tuning: Tuning) -> bool:
    trials = tuning.trials
    choices: list[Tuning | Trial] = [tuning, *trials]
    return (
        all(x.layout in LAYOUTS and x.strategy in STRATEGIES for x in choices)
        and all(isinstance(text, str) for text in (tuning.device, tuning.about, *(t.error for t in trials)))
        and all(t.seconds is None or (isinstance(t.seconds, float) and t.seconds >= 0) for t in trials)
    )


def _sizes(data: dict[str, int] | None) -> BlockSizes | None:
    return None if data is None else BlockSizes(**data)


def tune(
    job: PlanOptions,
    seconds: float = 1.0,
    *,
    implementation: Implementation | None = None,
    sizes: Sequence[tuple[int, int]] | None = None,
) -> Tuning:
    """Measures an attention with different layouts, strategies and, where Pallas kernels run, block sizes.

    A trial takes about `seconds`. Only tests pass an `implementation` (interpreted kernels) and query and key block
    sizes to try.

    Raises:
        ValueError: If every trial failed.
    """
    bench = _Bench(job, seconds, implementation)
    trials = [bench.trial(layout, strategy, None) for layout, strategy in _candidates(job)]
    best = _fastest(trials)
    target = _target(implementation)
    chosen = None
    if target is not None and all(b.kernels[target] == "pallas" for b in job.plan().branches):
        tried = list(itertools.product(*_SIZES[target])) if sizes is None else list(sizes)
        measure = functools.partial(bench.trial, best.layout, best.strategy)
        forward = [measure(x, is_gradient=False) for x in (None, *(BlockSizes(q, k) for q, k in tried))]
        first = _fastest(forward).block_sizes
        base = (first.query, first.key) if first else None
        both = [measure(BlockSizes(*(base or (q, k)), q, k)) for q, k in tried]
        trials += forward + both
        chosen = _fastest([best, *both]).block_sizes
    device = jax.devices()[0].device_kind
    about = f"{job.seq_len:,} tokens, {job.num_heads} heads of {job.head_dim}, {job.dtype}, {job.pattern!r}"
    return Tuning(device, job.ring_size, best.layout, best.strategy, chosen, about, tuple(trials))  # type: ignore[arg-type]


def _candidates(job: PlanOptions) -> Iterator[tuple[str, str]]:
    """Yields the layouts and strategies that lead to different plans."""
    seen = set()
    for other in job.variants:
        key = other.layout, tuple(branch.where for branch in other.plan().branches)
        if key not in seen:
            seen.add(key)
            yield other.layout, other.strategy


def _target(implementation: Implementation | None) -> Target | None:
    """Returns the target of the Pallas kernels that run on this platform, if any."""
    where = implementation.removeprefix("interpret_") if implementation else jax.default_backend()
    return next((target for target in _SIZES if target == where), None)


def _fastest(trials: Sequence[Trial]) -> Trial:
    done = [trial for trial in trials if trial.seconds is not None]
    if not done:
        raise ValueError(f"all trials failed: {trials[0].error}")
    return min(done, key=lambda trial: trial.seconds or 0.0)


class _Bench:
    """Holds the arrays and devices of a job."""

    def __init__(self, job: PlanOptions, seconds: float, implementation: Implementation | None) -> None:
        self.job, self.seconds, self.implementation = job, seconds, implementation
        self.arrays = random_arrays(job.seq_len, job.num_heads, job.head_dim, job.num_kv_heads, job.batch)
        self.mesh = ring_mesh(jax.devices()[: job.ring_size])

    def trial(self, layout: str, strategy: str, sizes: BlockSizes | None, *, is_gradient: bool = True) -> Trial:
        ring = Ring(self.mesh, layout=layout, strategy=strategy)  # type: ignore[arg-type]
        options: dict[str, Any] = {"implementation": self.implementation, "block_sizes": sizes}
        arrays = [on_devices(x, jnp.dtype(self.job.dtype), ring) for x in self.arrays]
        if arrays[0].shape[1] > self.job.seq_len:
            options["seq_len"] = self.job.seq_len
        attention = attention_on(ring, self.job.pattern, self.job.is_causal, **options)
        program = with_gradient(attention) if is_gradient else jax.jit(attention)
        try:
            took = median_seconds(program, *(arrays if is_gradient else arrays[:3]), budget=self.seconds)
        except (RuntimeError, NotImplementedError, ValueError) as error:  # block sizes that do not fit
            return Trial(layout, strategy, sizes, is_gradient, None, " ".join(str(error).split())[:200])
        return Trial(layout, strategy, sizes, is_gradient, took)


def _check_memory(job: PlanOptions) -> None:
    """Raises `ValueError` if the arrays, or the program on CPU devices, do not fit in the memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    heads = 2 * job.num_heads + 2 * job.kv_heads
    needed = 4 * job.batch * job.seq_len * heads * job.head_dim
    if jax.default_backend() == "cpu":
        needed += job.ring_size * job.plan().memory("cpu").gradient
    if needed > memory:
        raise ValueError(
            f"--seq-len, --heads, --head-dim and --batch must fit in the {bytes_text(memory)} of this machine, got "
            f"{job.seq_len}, {job.num_heads}, {job.head_dim} and {job.batch}, which need {bytes_text(needed)}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `ringjax tune`."""
    add_job_arguments(parser, "ring", "segment-ids", "sinks", "layout", "strategy", "stored-length", seq_len="16K")
    ring = {**OPTIONS["ring"], "default": None, "help": "devices that share the sequence (all)"}
    parser.add_argument("--ring", **ring)
    add_options(parser, "cpu-devices")
    about = "measurement time per trial (%(default)s)"
    parser.add_argument("--seconds", type=parse_seconds, default=1.0, help=about)
    file = "ringjax-tuning.json"
    parser.add_argument("-o", "--output", type=pathlib.Path, default=file, help="file to write (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Runs `ringjax tune`."""
    check_output(options.output)  # before minutes of measurement
    use_devices(options.cpu_devices)
    ring = options.ring_size or jax.device_count()
    if ring > jax.device_count():
        raise ValueError(f"--ring must be at most {jax.device_count()}, the number of available devices, got {ring}")
    job = job_of(options, ring_size=ring)
    _check_memory(job)
    found = tune(job, options.seconds)
    found.save(options.output)
    data = {"command": "tune", "file": str(options.output), **found.to_dict()}
    emit(options, data, f"{found}\nSaved to {options.output}.")
    return 0
