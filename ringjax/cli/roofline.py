"""How long an attention takes at best: flops, memory and links at their peak figures. Estimates, never measurements."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ringjax._src.online_softmax import accumulator
from ringjax._src.planning.costs import Message
from ringjax._src.planning.plan import BranchPlan, Plan
from ringjax.cli.hardware import Device

BACKWARD = 2.5  # matrix multiplies of the backward pass over those of the forward pass


class PassTime(NamedTuple):
    """Seconds of one pass of one branch, on the busiest device.

    Attributes:
        compute: Matrix multiplies.
        memory: Rows to and from device memory, each once per visit.
        link: Messages.
        total: Where messages travel while a device works, as far as they do.
    """

    compute: float
    memory: float
    link: float
    total: float

    @property
    def exposed(self) -> float:
        """Seconds of messages that no work hides."""
        return self.total - max(self.compute, self.memory)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one attention on one device, at the device's peak figures: no program is faster, real ones are slower.

    Attributes:
        device: Whose figures.
        forward: Of each branch.
        backward: Of each branch.
        tokens: Of the sequence, times the batch.

    Example:
        >>> from ringjax.cli.arguments import Job
        >>> from ringjax.cli.hardware import DEVICES
        >>> job = Job(2**20, pattern_text="2K/1,T/8", ring_size=8, layout="zigzag", is_causal=True)
        >>> estimate(job.plan(), DEVICES["h100"]).hidden
        1.0
    """

    device: Device
    forward: tuple[PassTime, ...]
    backward: tuple[PassTime, ...]
    tokens: int

    @property
    def forward_seconds(self) -> float:
        """Of the forward pass."""
        return sum(x.total for x in self.forward)

    @property
    def training_seconds(self) -> float:
        """Of forward and backward pass."""
        return self.forward_seconds + sum(x.total for x in self.backward)

    @property
    def hidden(self) -> float:
        """Share of the time of messages that passes while devices compute, 0 to 1; 1 where nothing is sent."""
        both = (*self.forward, *self.backward)
        sent = sum(x.link for x in both)
        return 1.0 - sum(x.exposed for x in both) / sent if sent else 1.0

    @property
    def bound(self) -> str:
        """What takes most of the time: compute, memory or link."""
        both = (*self.forward, *self.backward)
        work = {"compute": 0.0, "memory": 0.0, "link": sum(x.exposed for x in both)}
        for x in both:
            work["compute" if x.compute >= x.memory else "memory"] += max(x.compute, x.memory)
        return max(work, key=lambda name: work[name])

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "device": self.device.name,
            "is_estimate": True,
            "forward_seconds": self.forward_seconds,
            "training_seconds": self.training_seconds,
            "training_tokens_per_second": self.tokens / self.training_seconds if self.training_seconds else None,
            "messages_hidden": self.hidden,
            "bound": self.bound,
            "branches": [
                {"forward": f._asdict(), "backward": b._asdict()}
                for f, b in zip(self.forward, self.backward, strict=True)
            ],
        }


def estimate(plan: Plan, device: Device) -> Estimate:
    """Estimates the time of a plan on a device."""
    forward = tuple(_pass_time(b, b.forward, device, is_backward=False) for b in plan.branches)
    backward = tuple(_pass_time(b, b.backward, device, is_backward=True) for b in plan.branches)
    return Estimate(device, forward, backward, plan.request.seq_len * plan.request.batch)


def _pass_time(branch: BranchPlan, messages: tuple[Message, ...], device: Device, *, is_backward: bool) -> PassTime:
    request = branch.request
    flops = max(branch.flops) * (BACKWARD if is_backward else 1.0)
    visits = branch.group if branch.where != "local" else 1
    compute = flops / device.flops(request.dtype)
    memory = visits * _visit_bytes(branch, is_backward) / device.bandwidth
    link = branch.sent(messages) / device.hop_bandwidth(branch.group)
    work = max(compute, memory)
    if branch.where == "all_gather":
        return PassTime(compute, memory, link, work + link)  # nothing is computed before all keys are there
    hops = branch.group if is_backward else branch.group - 1
    if not hops:
        return PassTime(compute, memory, link, work)
    visit, hop = work / visits, link / hops
    return PassTime(compute, memory, link, hops * max(visit, hop) + (visits - hops) * visit)


def _visit_bytes(branch: BranchPlan, is_backward: bool) -> float:
    """Bytes that meeting the rows of one device moves: queries, keys and values once, sums in and out."""
    r = branch.request
    own, wide = np.dtype(r.dtype).itemsize, accumulator(np.dtype(r.dtype)).itemsize
    rows = r.batch * branch.rows * r.head_dim
    queries, keys = rows * r.group, 2 * rows
    if is_backward:
        return 2 * (2 * queries + keys) * own + 2 * wide * (queries + keys)
    return (queries + keys) * own + 2 * wide * queries
