"""What a device holds during an attention: arguments, results and all between, as compilers lay it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ringjax import costs
from ringjax.softmax import accumulator

if TYPE_CHECKING:
    from ringjax.geometry import Request
    from ringjax.plan import BranchPlan

Platform = Literal["cpu", "tpu", "cuda"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "tpu", "cuda")
_SCRATCH, _RING_SCRATCH = 12 * 2**20, 3 * 2**20  # scores and weights of a block


class Memory(NamedTuple):
    """Estimated bytes per device: of a forward pass, and of forward and backward pass."""

    forward: int
    gradient: int


def predicted_memory(request: Request, branches: tuple[BranchPlan, ...], platform: Platform = "cpu") -> Memory:
    """Estimated bytes per device of a forward pass, and of forward and backward pass."""
    kv_heads = request.kv_heads // request.head_shards
    sums = accumulator(np.dtype(request.dtype)).name
    wide = 0 if sums == request.dtype else 1  # whether sums are arrays of their own
    q, q_sums = (_dense_bytes(request, d, kv_heads * request.group) for d in (request.dtype, sums))
    k, k_sums = (_dense_bytes(request, d, kv_heads) for d in (request.dtype, sums))
    lse = q_sums // request.head_dim
    forward, gradient = 2 * q + 2 * k + lse + wide * q_sums, 4 * q + 4 * k + 2 * lse + wide * (q_sums + 2 * k_sums)
    travelling = [(b, costs.row_bytes(request, request.batch * b.rows // b.pieces)) for b in branches if b.shard]
    for branch, size in travelling:
        copies = branch.group + 1 if branch.where == "gather" else 3
        forward += copies * size.keys + size.queries + size.query_sums + size.ids
        rest = (size.keys, size.key_sums) if branch.moves == "keys" else (2 * size.queries, size.query_sums)
        gradient += copies * sum(rest) + size.keys + 2 * size.queries
    scratch = _SCRATCH if request.ring_size == 1 else _RING_SCRATCH
    return Memory(forward + scratch, gradient + 2 * scratch)


def _dense_bytes(request: Request, dtype: str, heads: int) -> int:
    """Bytes of a whole array of so many heads on one device."""
    rows = request.batch * request.shard_length * heads
    return costs.row_bytes(request._replace(dtype=dtype, group=1), rows).queries
