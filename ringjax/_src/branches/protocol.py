"""What the forward and backward pass know of a branch.

Forward, all branches start before any of them attends, so messages of one branch overlap with the computation of
others. (Rings and gathers that are sent in several pieces communicate later, when they finish.) Backward, a branch
that sends keys in one piece computes everything when it starts, and only its last message overlaps with other branches.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from jax import Array

from ringjax._src.kernels.interface import Grads, Residuals
from ringjax._src.online_softmax import PartialSoftmax

InFlight = Any  # what a branch has sent, or already computed
Kept = Any  # output rows that a branch keeps for its backward pass, or None


class Shard(NamedTuple):
    """What a device holds."""

    query: Array  # (B, c, K, G, H)
    key: Array  # (B, c, K, H)
    value: Array  # (B, c, K, H)
    ids: Array | None = None  # segment ids (B, c), or None
    seeds: Array | None = None  # dropout seed of each head, (B, K, G), or None
    sink: Array | None = None  # logit of the attention sink of each head, (B, K, G), in the accumulator dtype, or None
    lengths: Array | None = None  # rows of each sequence that are not padding, (B,), or None; for zero keys only


class DeviceBranch(Protocol):
    """A branch of the pattern, or several that share an exchange, as one device executes it.

    With ``mixing="detached"``, the forward pass keeps the branch's own output rows, and the backward pass uses them
    instead of the joint output.
    """

    @property
    def name(self) -> str:
        """Name of the branch in profiles."""

    def start(self, shard: Shard) -> InFlight:
        """Starts the communication of the forward pass."""

    def finish(self, shard: Shard, in_flight: InFlight, merged: PartialSoftmax) -> tuple[PartialSoftmax, Kept]:
        """Merges the branch into `merged`, (B, c, K, G, H) and (B, c, K, G)."""

    def start_bwd(self, shard: Shard, residuals: Residuals, kept: Kept) -> InFlight:
        """Starts the backward pass as far as it can overlap with other branches.

        That is nothing, the first message, or everything but the last message.
        """

    def finish_bwd(self, shard: Shard, residuals: Residuals, kept: Kept, in_flight: InFlight, grads: Grads) -> Grads:
        """Adds the gradients of the branch to `grads`, which are like query, key and value."""

    def count_tiles(self) -> Array | int:
        """Counts the score tiles that this device computes in the forward pass in plain XLA."""
