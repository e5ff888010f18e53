"""`ringjax plan`: predicts the messages, memory and time of an attention call."""

from __future__ import annotations

import argparse
import dataclasses
import math
import textwrap
from typing import Any, NamedTuple

import ringjax
from ringjax._src.planning.memory import Memory
from ringjax._src.planning.plan import Plan
from ringjax._src.planning.table import bytes_text, count_text, plan_table
from ringjax.cli.advice import Choice, Finding, best_choice, notes_of, sent_by, warnings_of
from ringjax.cli.arguments import DTYPES, MOST_TOKENS, OPTIONS, PlanOptions, add_job_arguments, add_options, job_of
from ringjax.cli.errors import in_options
from ringjax.cli.output import WIDTH, emit, seconds_text, table_text
from ringjax.cli.roofline import Estimate, estimate

EXAMPLES = """examples:
  ringjax plan --seq-len 1M --heads 16 --head-dim 128 --pattern longnet --ring 8 --causal --device h100
  ringjax plan --seq-len 1M --pattern 2K/1,32K/8,T/64 --ring 8 --causal --device v5p --sweep ring=1,2,4,8,16
  ringjax plan --seq-len 64K --pattern auto --ring 4 --memory 16GB --json
terms:
  chunk      contiguous part of the sequence on a device: one per device, or two with the zigzag layout
  residue    position within a segment modulo the rate; in each branch a head selects one residue
  where      how devices share segments: local, ring, all_to_all (they exchange heads), all_gather;
             "all_to_all_ring (4 x 2)": 4 devices exchange heads, and keys rotate between 2 such teams
  messages   hops and exchanges one after the other in the forward pass; "4 x 16": 16 pieces of 4 messages each
  rows       selected positions in a message, summed over the heads of a piece
  bwd moves  what is sent in the backward pass: keys and values, or queries, with their gradients, or all of them;
             "<>": in both directions
  balance    work of the busiest device divided by the mean
"""
_SWEPT = ["ring", "seq-len", "heads", "kv-heads", "head-dim", "batch"]  # options that --sweep accepts
_SWEPT += ["pattern", "layout", "strategy", "dtype", "device"]
_MOST_VALUES = 64  # of a sweep
_MOST_PIECES = 2**21  # runs of positions within a segment and a chunk, counted for every head offset


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A plan with estimates, warnings and the best alternative.

    Attributes:
        job: The attention.
        plan: The plan.
        memory: Estimated memory per device in bytes.
        estimate: Estimated time at the peak figures of the device, or None if no device is given.
        warnings: Warnings with fixes.
        best: The cheapest layout and strategy.
        longest: The longest sequence for which training fits in the memory of a device, or None without a limit.
    """

    job: PlanOptions
    plan: Plan
    memory: Memory
    estimate: Estimate | None
    warnings: list[Finding]
    best: Choice
    longest: int | None

    @property
    def fits(self) -> bool | None:
        """Whether training fits in the memory of a device; None without a limit."""
        limit = self.job.memory_limit
        return None if limit is None else self.memory.gradient <= limit

    @property
    def notes(self) -> list[Finding]:
        """Branches whose heads use only some residues, with fixes."""
        return notes_of(self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary."""
        return {
            "command": "plan",
            "ringjax": ringjax.__version__,
            "plan": self.plan.to_dict(),
            "platform": self.job.platform,
            "memory": {"forward_bytes": self.memory.forward, "training_bytes": self.memory.gradient},
            "memory_limit_bytes": self.job.memory_limit,
            "fits": self.fits,
            "longest_seq_len": self.longest,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
            "warnings": [w._asdict() for w in self.warnings],
            "notes": [n._asdict() for n in self.notes],
            "best": self.best._asdict(),
        }

    def __str__(self) -> str:
        lines = [plan_table(self.plan, has_caption=False), *_memory_lines(self)]
        if self.estimate is not None:
            lines += ["", _estimate_text(self.plan, self.estimate)]
        best = f"Best: --layout {self.best.layout} --strategy {self.best.strategy}"
        is_best = (self.best.layout, self.best.strategy) == (self.job.layout, self.job.strategy)
        lines += ["", best + (" (already selected)." if is_best else f" ({bytes_text(self.best.sent)} sent).")]
        findings = [("Warning", x) for x in self.warnings] + [("Note", x) for x in self.notes]
        for kind, finding in findings:
            about = textwrap.fill(f"{kind}: {finding.about}.", WIDTH, subsequent_indent="    ")
            lines += [about, f"    Fix: {finding.fix}."]
        return "\n".join(lines)


def plan_report(job: PlanOptions) -> PlanReport:
    """Plans an attention and estimates its memory and time, with warnings.

    Args:
        job: The attention, its ring and, optionally, a device or a memory limit.

    Raises:
        ValueError: If the sizes are inconsistent, or the attention is too large to plan.

    Example:
        >>> job = PlanOptions(2**20, pattern_text="2K/1,T/64", ring_size=8, is_causal=True, device="h100")
        >>> report = plan_report(job)
        >>> report.fits, report.best.layout, report.warnings
        (True, 'contiguous', [])
    """
    plan = _countable_plan(job)
    guess = None if job.hardware is None else estimate(plan)
    return PlanReport(
        job,
        plan,
        plan.memory(job.platform),
        guess,
        warnings_of(job, plan, guess),
        best_choice(job),
        None if job.memory_limit is None else longest_that_fits(job),
    )


def _countable_plan(job: PlanOptions) -> Plan:
    """Returns the plan of a job; raises `ValueError` if its work cannot be counted within seconds."""
    plan = job.plan()
    chunks = plan.spec.stored_length // plan.spec.chunk_length
    for branch in plan.branches:
        segments = plan.spec.stored_length // branch.segment_length
        pieces = (segments + chunks) * len(set(branch.branch.offsets))
        if pieces > _MOST_PIECES:
            raise ValueError(
                f"--pattern must have longer segments or smaller rates at --seq-len {plan.spec.seq_len}: branch "
                f"{branch.segment_length}/{branch.rate} has {pieces:,} pieces to count, limit {_MOST_PIECES:,}"
            )
    return plan


def longest_that_fits(job: PlanOptions, most: int = MOST_TOKENS) -> int:
    """Returns the longest sequence whose training fits in memory, in steps of 1024 tokens per chunk, or 0.

    Example:
        >>> longest_that_fits(PlanOptions(2**20, pattern_text="2K/1,T/64", ring_size=8, device="h100")) > 2**22
        True
    """
    limit = job.memory_limit
    assert limit is not None
    step = 1024 * 2 * job.ring_size

    def fits(steps: int) -> bool:
        other = dataclasses.replace(job, seq_len=steps * step, stored_length=None)
        return other.plan().memory(job.platform).gradient <= limit

    last = most // step
    if not last or not fits(1):
        return 0
    low = 1
    while low < last and fits(min(2 * low, last)):
        low = min(2 * low, last)
    high = min(2 * low, last + 1)
    while high - low > max(1, low // 256):  # accurate to half a percent
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


class SweepRow(NamedTuple):
    """The plan for one value of a sweep, or the `error` of planning it."""

    value: str
    memory: Memory | None = None
    fits: bool | None = None
    sent: int | None = None
    balance: float | None = None
    forward_seconds: float | None = None
    training_seconds: float | None = None
    longest: int | None = None
    error: str = ""


def sweep(job: PlanOptions, name: str, values: list[str]) -> list[SweepRow]:
    """Plans a job for several values of one option.

    Args:
        job: The attention.
        name: An option, such as ``"ring"`` or ``"seq-len"``.
        values: Its values, as on the command line.

    Raises:
        ValueError: If the option is unknown, or a value is invalid.

    Example:
        >>> rows = sweep(PlanOptions(65536, pattern_text="2K/1,T/16", ring_size=4), "ring", ["1", "2", "4"])
        >>> [row.sent for row in rows][0], rows[1].memory.gradient > rows[2].memory.gradient
        (0, True)
    """
    if name not in _SWEPT:
        raise ValueError(f"--sweep must name one of {', '.join(_SWEPT)}, got {name!r}")
    if len(values) > _MOST_VALUES:
        raise ValueError(f"--sweep must have at most {_MOST_VALUES} values, got {len(values)}")
    jobs = [dataclasses.replace(job, **_change(name, value)) for value in values]
    return [_sweep_row(value, job) for value, job in zip(values, jobs, strict=True)]


def _change(name: str, value: str) -> dict[str, Any]:
    option = OPTIONS[name]
    if value not in option.get("choices", (value,)):
        raise ValueError(f"--sweep {name} values must be among {', '.join(option['choices'])}, got {value!r}")
    try:
        parsed = option.get("type", str)(value)
    except ValueError as error:
        raise ValueError(f"--sweep {name} {error}") from None
    return {option["dest"]: DTYPES[value] if name == "dtype" else parsed}


def _sweep_row(value: str, job: PlanOptions) -> SweepRow:
    try:
        plan = _countable_plan(job)
    except ValueError as error:
        return SweepRow(value, error=str(error))
    guess = None if job.hardware is None else estimate(plan)
    memory, limit = plan.memory(job.platform), job.memory_limit
    return SweepRow(
        value,
        memory,
        None if limit is None else memory.gradient <= limit,
        sent_by(plan),
        plan.balance,
        None if guess is None else guess.forward_seconds,
        None if guess is None else guess.training_seconds,
        None if limit is None else longest_that_fits(job),
    )


def _memory_lines(report: PlanReport) -> list[str]:
    forward, gradient = map(bytes_text, report.memory)
    about = f"Memory per device (estimate, {report.job.platform}, including arguments and results)"
    lines = [f"{about}: {forward} forward, {gradient} training."]
    if report.job.memory_limit is not None:
        fits = f"{'fits' if report.fits else 'DOES NOT FIT'} in {bytes_text(report.job.memory_limit)}"
        lines.append(f"Training {fits}; longest sequence that fits: {report.longest:,} tokens.")
    return lines


def _estimate_text(plan: Plan, guess: Estimate) -> str:
    title = f"Time per layer at the peak figures of {guess.device.name} (ESTIMATE, a lower bound)"
    columns = ("branch", "pass", "compute", "memory", "messages", "total", "messages hidden")
    rows = []
    for branch, *passes in zip(plan.branches, guess.forward, guess.backward, strict=True):
        for name, time in zip(("forward", "backward"), passes, strict=True):
            hidden = f"{1 - time.exposed / time.link:.0%}" if time.link else ""
            rows.append((f"{branch.segment_length}/{branch.rate}", name, *map(seconds_text, time), hidden))
    is_sent = any(time.link for time in (*guess.forward, *guess.backward))
    messages = f"{guess.hidden:.0%} of communication hidden" if is_sent else "no communication"
    total = (
        f"Total: {seconds_text(guess.forward_seconds)} forward, {seconds_text(guess.training_seconds)} training "
        f"({count_text(guess.tokens / guess.training_seconds)} tokens/s);\n{messages}; bound by {guess.bound}. "
        "Real kernels reach a fraction of the peak."
    )
    return table_text(title, columns, rows, num_left=2) + "\n" + total


def _sweep_text(job: PlanOptions, name: str, rows: list[SweepRow]) -> str:
    platform = "each device" if name == "device" else job.platform
    title = f"{name} from {rows[0].value} to {rows[-1].value} (memory and time are estimates, {platform})"
    has_limit, has_time = (any(getattr(r, x) is not None for r in rows) for x in ("fits", "training_seconds"))
    columns = [name, "forward memory", "training memory", *(["fits", "longest that fits"] if has_limit else [])]
    columns += ["sent", "balance", *(["forward", "training"] if has_time else [])]
    return table_text(title, columns, [_sweep_cells(row, has_limit, has_time) for row in rows], num_left=0)


def _sweep_cells(row: SweepRow, has_limit: bool, has_time: bool) -> list[str]:
    if row.memory is None or row.sent is None or row.balance is None:
        return [row.value, row.error]
    cells = [row.value, *map(bytes_text, row.memory)]
    cells += ["yes" if row.fits else "no", f"{row.longest:,}"] if has_limit else []
    cells += [bytes_text(row.sent), f"{row.balance:.2f}"]
    cells += [seconds_text(x or math.nan) for x in (row.forward_seconds, row.training_seconds)] if has_time else []
    return cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `ringjax plan`."""
    add_job_arguments(parser)
    add_options(parser, "inner-devices", "head-shards", "memory", "device")
    about = f"tabulate the plan over values of one of {', '.join(_SWEPT)}"
    parser.add_argument("--sweep", metavar="NAME=A,B,C", help=about)


def run(options: argparse.Namespace) -> int:
    """Runs `ringjax plan`."""
    job = job_of(options)
    if options.sweep is None:
        report = plan_report(job)
        emit(options, report.to_dict(), str(report))
        return 0
    name, _, values = options.sweep.partition("=")
    if not values:
        raise ValueError(f"--sweep must be a name and values such as ring=1,2,4,8, got {options.sweep!r}")
    rows = [row._replace(error=in_options(row.error)) for row in sweep(job, name, values.split(","))]
    if all(row.error for row in rows):
        raise ValueError(f"--sweep {options.sweep} has no value that can be planned: {rows[0].error}")
    data = [{**r._asdict(), "memory": None if r.memory is None else r.memory._asdict()} for r in rows]
    emit(options, {"command": "plan", "sweep": name, "rows": data}, _sweep_text(job, name, rows))
    return 0
