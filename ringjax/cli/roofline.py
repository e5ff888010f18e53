"""Roofline estimates: lower bounds on time from the peak flops, memory bandwidth and link bandwidth of a device."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ringjax._src.comm.devices import DeviceModel, device_named
from ringjax._src.online_softmax import accumulator
from ringjax._src.planning.branch_plan import BACKWARD, BranchPlan
from ringjax._src.planning.costs import Message, message_bandwidth
from ringjax._src.planning.plan import Plan


class PassTime(NamedTuple):
    """Seconds of one pass of one branch on the busiest device."""

    compute: float  # time of the matrix multiplications
    memory: float  # time to move rows to and from device memory, once per chunk pair
    link: float  # time of the messages
    total: float  # time of the pass, with messages overlapped where possible

    @property
    def exposed(self) -> float:
        """Communication time that is not hidden by computation."""
        return self.total - max(self.compute, self.memory)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated time of one attention at the peak figures of a device, a lower bound for real programs.

    Example:
        >>> from ringjax.cli.arguments import PlanOptions
        >>> options = {"ring_size": 8, "layout": "zigzag", "strategy": "ring", "device": "h100"}
        >>> estimate(PlanOptions(2**20, pattern_text="2K/1,T/8", **options).plan()).hidden
        1.0
    """

    device: DeviceModel
    forward: tuple[PassTime, ...]  # time of the forward pass, per branch
    backward: tuple[PassTime, ...]  # time of the backward pass, per branch
    tokens: int  # number of tokens in the batch

    @property
    def forward_seconds(self) -> float:
        """Time of the forward pass."""
        return sum(x.total for x in self.forward)

    @property
    def training_seconds(self) -> float:
        """Time of the forward and backward pass."""
        return self.forward_seconds + sum(x.total for x in self.backward)

    @property
    def exposed_seconds(self) -> float:
        """Communication time of both passes that is not hidden by computation."""
        return sum(x.exposed for x in (*self.forward, *self.backward))

    @property
    def hidden(self) -> float:
        """Fraction of communication time hidden by computation; 1 if nothing is sent."""
        sent = sum(x.link for x in (*self.forward, *self.backward))
        return 1.0 - self.exposed_seconds / sent if sent else 1.0

    @property
    def bound(self) -> str:
        """The bottleneck: ``"compute"``, ``"memory"`` or ``"link"``."""
        both = (*self.forward, *self.backward)
        work = {"compute": 0.0, "memory": 0.0, "link": sum(x.exposed for x in both)}
        for x in both:
            work["compute" if x.compute >= x.memory else "memory"] += max(x.compute, x.memory)
        return max(work, key=lambda name: work[name])

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary."""
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


def estimate(plan: Plan) -> Estimate:
    """Estimates the time of a plan on its device."""
    device = device_named(plan.spec.device)
    forward = tuple(_pass_time(b, b.forward, device, is_backward=False) for b in plan.branches)
    backward = tuple(_pass_time(b, b.backward, device, is_backward=True) for b in plan.branches)
    return Estimate(device, forward, backward, plan.spec.seq_len * plan.spec.batch)


def _pass_time(
    branch: BranchPlan, messages: tuple[Message, ...], device: DeviceModel, *, is_backward: bool
) -> PassTime:
    """Estimates a pass; hops overlap with computation, and other messages do not."""
    group, bandwidth = branch.group, lambda m: message_bandwidth(branch.spec, m, branch.exchange_devices)
    compute = max(branch.flops) * (BACKWARD if is_backward else 1.0) / device.flops(branch.spec.dtype)
    memory = group.ring * _pair_bytes(branch, is_backward) / device.memory_bandwidth
    link = sum(m.sent / bandwidth(m) for m in messages)
    hopping = sum(m.sent / bandwidth(m) for m in messages if m.op == "collective-permute")
    work, waiting = max(compute, memory), link - hopping
    hops = (group.ring if is_backward else group.ring - 1) if hopping else 0
    if not hops:
        return PassTime(compute, memory, link, work + waiting)
    pair, hop = work / group.ring, hopping / hops
    return PassTime(compute, memory, link, hops * max(pair, hop) + (group.ring - hops) * pair + waiting)


def _pair_bytes(branch: BranchPlan, is_backward: bool) -> float:
    """Returns the bytes moved per chunk pair: queries, keys and values once, accumulators in and out."""
    r = branch.spec
    itemsize, accumulator_size = np.dtype(r.dtype).itemsize, accumulator(np.dtype(r.dtype)).itemsize
    size = r.batch * branch.num_rows * r.head_dim
    queries, keys = size * r.q_per_kv, 2 * size
    if is_backward:
        return 2 * (2 * queries + keys) * itemsize + 2 * accumulator_size * (queries + keys)
    return (queries + keys) * itemsize + 2 * accumulator_size * queries
