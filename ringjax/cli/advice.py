"""Warnings about a plan, each with a suggested fix, and the choice of the best layout and strategy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from ringjax._src.planning.plan import Plan
from ringjax._src.planning.table import bytes_text
from ringjax.cli.arguments import PlanOptions
from ringjax.cli.roofline import Estimate


class Finding(NamedTuple):
    """A warning or note and its fix."""

    about: str
    fix: str


class Choice(NamedTuple):
    """A layout and a strategy with their costs."""

    layout: str
    strategy: str
    cost: float  # estimated seconds of both passes if a device is given, otherwise flops of the busiest device
    sent: int  # bytes sent per device, forward and backward
    gradient_memory: int  # bytes of memory per device, forward and backward


_MOST_EXPOSED = 0.1  # share of the time that communication may add before a warning


def warnings_of(job: PlanOptions, plan: Plan, guess: Estimate | None) -> list[Finding]:
    """Returns all warnings about a plan, each with a fix."""
    found = [*_coverage(job), *_alignment(plan), *_balance(job, plan), *_kernels(job, plan), *_memory(job, plan)]
    if guess is not None and guess.exposed_seconds > _MOST_EXPOSED * guess.training_seconds:
        about = f"about {1 - guess.hidden:.0%} of the communication time is not hidden by computation (estimate)"
        fix = "use a smaller --ring or fewer --kv-heads, or larger rates for segments that span devices"
        found.append(Finding(about, fix))
    return found


def notes_of(plan: Plan) -> list[Finding]:
    """Returns the branches whose heads use only some residues, which costs nothing if other branches cover the rest."""
    found = []
    for branch in plan.branches:
        used = len(set(branch.branch.offsets))
        if branch.branch.num_heads and used < branch.rate:
            about = f"{branch.segment_length}/{branch.rate}: the heads use {used} of {branch.rate} residues"
            found.append(Finding(about, f"use a rate of at most {used}, or more key/value heads"))
    return found


def _coverage(job: PlanOptions) -> Iterator[Finding]:
    share = job.coverage(2**20).share  # it does not change beyond this length
    if share < 1:
        about = f"{1 - share:.1%} of (position, head) pairs are selected by no branch and output 0"
        yield Finding(about, "add a branch of rate 1, such as 2K/1")
    longest = max(job.pattern.segment_lengths)
    if longest < job.seq_len // 2:
        rate = 2 ** max(0, round(math.log2(job.seq_len / 16384)))
        about = f"a query attends to at most {longest:,} of {job.seq_len:,} positions in one layer"
        yield Finding(about, f"add a branch with the whole sequence as its segment, such as --pattern ...,T/{rate}")


def _alignment(plan: Plan) -> Iterator[Finding]:
    for branch in plan.branches:
        if branch.advice and not branch.exchange:
            length = plan.aligned_length
            about = f"{branch.segment_length}/{branch.rate} uses the slower position-based path: {branch.advice}"
            aligned = f"--stored-length {length}: to_layout(..., length={length})"
            yield Finding(about, aligned if length else "use lengths that are powers of two")


def _balance(job: PlanOptions, plan: Plan) -> Iterator[Finding]:
    if plan.balance > 1.05:
        rotates = any(b.where not in ("local", "all_to_all") for b in plan.branches)
        is_uneven = job.is_causal and plan.spec.layout == "contiguous" and rotates
        fix = f"use a length that is a multiple of {2 * job.ring_size} times the largest rate"
        if not all(branch.is_aligned for branch in plan.branches):
            length = plan.aligned_length
            fix = f"align the branches: --stored-length {length}" if length else "use lengths that are powers of two"
        about = f"the busiest device does {plan.balance:.2f} times the mean work"
        yield Finding(about, "--layout zigzag" if is_uneven else fix)


def _kernels(job: PlanOptions, plan: Plan) -> Iterator[Finding]:
    target = {"cpu": None, "tpu": "tpu", "cuda": "gpu"}[job.platform]
    reasons = {b.kernels[target]: f"{b.segment_length}/{b.rate}" for b in plan.branches} if target else {}
    fixes = {
        "head dims": "use --head-dim 64 or 128",
        "selected rows": "use a smaller rate or ring",
        "take bfl": "use --dtype bf16",
    }
    for reason, name in reasons.items():
        if reason != "pallas":
            fix = next((fix for word, fix in fixes.items() if word in reason), "see docs/kernels.md")
            yield Finding(f"{name} runs in plain XLA instead of a kernel: {reason}", fix)


def _memory(job: PlanOptions, plan: Plan) -> Iterator[Finding]:
    limit, needed = job.memory_limit, plan.memory(job.platform).gradient
    if limit is None or needed <= limit:
        return
    ring = job.ring_size
    while needed > limit and ring < 65536 and job.seq_len >= 2 * ring:
        ring *= 2
        try:
            needed = dataclasses.replace(job, ring_size=ring, stored_length=None).plan().memory(job.platform).gradient
        except ValueError:
            break
    smaller = "use fewer tokens, or shard the heads over another axis (--head-shards)"
    about = f"training needs more than {bytes_text(limit)} of memory per device"
    yield Finding(about, f"--ring {ring}" if needed <= limit else smaller)


def sent_by(plan: Plan) -> int:
    """Returns the bytes that each device sends in the forward and backward pass."""
    of_branches = sum(b.sent(b.forward) + b.sent(b.backward) for b in plan.branches)
    return of_branches + sum(m.sent for m in plan.forward + plan.backward)


def best_choice(job: PlanOptions) -> Choice:
    """Returns the cheapest layout and strategy among those that fit in memory.

    Choices within 1% of the lowest cost are ranked by flops, then bytes sent, then memory.
    """
    limit = job.memory_limit or math.inf
    choices = []
    for other in job.variants:
        plan = other.plan()
        cost = max(plan.flops) if job.hardware is None else sum(branch.seconds for branch in plan.branches)
        choice = Choice(other.layout, other.strategy, cost, sent_by(plan), plan.memory(job.platform).gradient)
        choices.append((choice.gradient_memory > limit, round(max(plan.flops)), choice))
    too_much, _, least = min(choices, key=lambda c: (c[0], c[2].cost))
    similar = [c for c in choices if c[2].cost <= 1.01 * least.cost and c[0] <= too_much]
    return min(similar, key=lambda c: (c[1], c[2].sent, c[2].gradient_memory))[2]
