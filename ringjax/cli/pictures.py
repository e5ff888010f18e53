"""The data behind the pictures: masks, coverage and ring schedules."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from ringjax._src.comm.layout import layout_named
from ringjax._src.pattern import Branch, selected_before
from ringjax._src.planning.branch_plan import BranchPlan
from ringjax._src.planning.costs import runs_of
from ringjax._src.planning.table import bytes_text
from ringjax.cli.arguments import PlanOptions

LONGEST = 1024  # positions in a mask


def mask_of(job: PlanOptions, heads: int) -> np.ndarray:
    """Returns the first branch (from 1) that contains each pair, 0 for none: (heads, query, key), for the first heads.

    Raises:
        ValueError: If the sequence is too long to draw.

    Example:
        >>> mask_of(PlanOptions(4, num_heads=2, pattern_text="2/1,4/2", is_causal=True), heads=1)[0]
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [2, 0, 1, 0],
               [0, 0, 1, 1]])
    """
    if job.seq_len > LONGEST:
        raise ValueError(
            f"--seq-len must be at most {LONGEST} to draw a mask, got {job.seq_len}: scale the pattern down, "
            "for example --seq-len 64 --pattern 8/1,32/2,T/4"
        )
    p = np.arange(job.seq_len)
    first = np.zeros((heads, job.seq_len, job.seq_len), int)
    for number, branch in reversed(list(enumerate(job.branches, 1))):
        same = p[:, None] // branch.segment_length == p[None, :] // branch.segment_length
        same &= (p[None, :] <= p[:, None]) | (not job.is_causal)
        selections = selected(branch, job.kv_heads, p)
        for head in range(heads):
            chosen = selections[head * job.kv_heads // job.num_heads]
            first[head][same & chosen[:, None] & chosen[None, :]] = number
    return first


def selected(branch: Branch, kv_heads: int, p: np.ndarray) -> np.ndarray:
    """Returns whether a branch selects each position for each key/value head, (heads, positions)."""
    return p % branch.segment_length % branch.rate == branch.offset_table(kv_heads)[:, None]


class Reach(NamedTuple):
    """Reach of one branch and the density of its keys."""

    name: str
    distance: int
    density: float


def coverage_of(job: PlanOptions, positions: int) -> tuple[np.ndarray, list[Reach]]:
    """Counts the branches that select each of the first positions, (heads, positions); also returns their reach."""
    p = np.arange(min(positions, job.seq_len))
    table = np.array([selected(b, job.kv_heads, p) for b in job.branches]).sum(axis=0)
    reach = [Reach(f"{b.segment_length:,} / {b.rate}", b.segment_length, 1 / b.rate) for b in job.branches]
    return table, reach


class Schedule(NamedTuple):
    """The schedule of one branch on the ring."""

    name: str  # segment length and rate
    where: str  # ``"local"``, ``"ring"``, ``"all_gather"``, ``"all_to_all"`` or ``"all_to_all_ring"``
    ring_devices: int  # number of devices that share a segment
    exchange_devices: int  # number of devices that exchange heads, or 1
    source: np.ndarray  # device (of a team, the first) whose keys a device attends to in each step, (devices, steps)
    labels: np.ndarray  # text in the cells of `source`: the origin, or after an exchange the heads of the device
    work: np.ndarray  # number of (query, key) pairs that a device computes with them, over its heads, (devices, steps)
    sent: int  # bytes that a device sends in the forward pass

    @property
    def about(self) -> str:
        """How the branch communicates."""
        if self.where == "local":
            return "no communication"
        if self.where == "all_to_all":
            return f"{self.exchange_devices} devices exchange heads: {bytes_text(self.sent)}"
        if self.where == "all_to_all_ring":
            return f"{self.exchange_devices} devices exchange heads, then a ring of teams: {bytes_text(self.sent)}"
        return f"keys in order of arrival: {bytes_text(self.sent)}"


def schedule_of(branch: BranchPlan) -> Schedule:
    """Returns the schedule of the forward pass of a branch.

    Example:
        >>> job = PlanOptions(64, num_heads=2, pattern_text="T/1", ring_size=2, is_causal=True, strategy="ring")
        >>> schedule_of(job.plan().branches[0]).work.tolist()
        [[1056.0, 0.0], [1056.0, 2048.0]]
    """
    team_size, num = branch.exchange_devices, branch.group.ring
    team = np.arange(branch.spec.ring_size)[:, None] // team_size
    hops = [0, *(hop for nth in range(1, num // 2 + 1) for hop in dict.fromkeys((nth, num - nth)))]  # from both sides
    source = team - team % num + (team - np.array(hops)[None]) % num
    pairs = pairs_between(branch)
    teams = pairs.reshape(len(pairs) // team_size, team_size, -1, team_size).sum(axis=(1, 3)) / team_size
    name = f"{branch.segment_length:,} / {branch.rate}"
    labels = source.astype(str) if team_size == 1 else np.repeat(_head_labels(branch)[:, None], len(hops), axis=1)
    return Schedule(
        name,
        branch.where,
        branch.ring_devices,
        team_size,
        source * team_size,
        labels,
        teams[team, source],
        branch.sent(branch.forward),
    )


def _head_labels(branch: BranchPlan) -> np.ndarray:
    """Returns the query heads that each device receives in an exchange, (devices,)."""
    spec, (kv, query), size = branch.spec, branch.group.parts, branch.exchange_devices
    kv_heads = branch.selections[0].heads if branch.exchange == "rows" else np.arange(spec.kv_heads)
    kv_heads = kv_heads[: len(kv_heads) // spec.head_shards]
    heads = kv_heads[:, None] * spec.q_per_kv + np.arange(spec.q_per_kv)
    parts = heads.reshape(branch.pieces, kv, -1, query, spec.q_per_kv // query)
    parts = np.sort(parts.transpose(1, 3, 0, 2, 4).reshape(size, -1))
    return np.array([_ranges(parts[i % size]) for i in range(spec.ring_size)])


def _ranges(numbers: np.ndarray) -> str:
    """Formats ascending numbers as ranges.

    Example:
        >>> _ranges(np.array([0, 1, 2, 6, 8, 9]))
        'h0-2,6,8-9'
    """
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return "h" + ",".join(f"{x[0]}-{x[-1]}" if len(x) > 1 else str(x[0]) for x in runs)


def pairs_between(branch: BranchPlan) -> np.ndarray:
    """Counts the attended pairs of a query on one device and a key on another, (devices, devices), over all heads."""
    spec, selection = branch.spec, branch.branch
    w, layout = selection.segment_length, layout_named(spec.layout)
    edges, device, segment = runs_of(selection, layout, spec.ring_size, spec.stored_length)
    pairs = np.zeros((spec.ring_size, spec.ring_size))
    starts = np.flatnonzero(np.diff(segment, prepend=-1, append=-1))
    for offset, count in zip(selection.offsets, selection.rows(w), strict=True):
        counts = np.diff(selected_before(edges, w, selection.rate, np.array(offset), np.array(count))).astype(float)
        for begin, end in itertools.pairwise(starts):
            num_rows, devices = counts[begin:end], device[begin:end]
            attended = np.outer(num_rows, num_rows)
            if spec.is_causal:
                attended = np.tril(attended, -1) + np.diag(num_rows * (num_rows + 1) / 2)
            np.add.at(pairs, (devices[:, None], devices[None, :]), attended)
    return pairs * spec.q_per_kv
