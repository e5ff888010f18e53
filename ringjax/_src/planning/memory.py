"""What a device holds during an attention: arguments, results and all between, as the compilers lay it out.

Each platform has a model of its own, because its programs differ: plain XLA works in place, the kernels for GPUs too,
and those for TPUs on rows that are copied together. The models count whole arrays; what is small beside them is left
out. `benchmarks/plan_accuracy.py` compares them with compiled programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ringjax._src.online_softmax import accumulator
from ringjax._src.planning import costs

if TYPE_CHECKING:
    from ringjax._src.planning.plan import BranchPlan
    from ringjax._src.planning.spec import AttentionSpec

Platform = Literal["cpu", "tpu", "cuda"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "tpu", "cuda")
_SCRATCH, _RING_SCRATCH = 12 * 2**20, 3 * 2**20  # scores and weights of a block


class Memory(NamedTuple):
    """Estimated bytes per device: of a forward pass, and of forward and backward pass."""

    forward: int
    gradient: int


class _Arrays(NamedTuple):
    """Bytes of whole arrays on one device: of the queries, of the keys, of sums like them, and of one number a row."""

    q: int
    k: int
    q_sums: int
    k_sums: int
    lse: int
    is_wide: bool  # whether sums are arrays of their own, and not the results themselves


def predicted_memory(spec: AttentionSpec, branches: tuple[BranchPlan, ...], platform: Platform = "cpu") -> Memory:
    """Estimated bytes per device of a forward pass, and of forward and backward pass.

    Args:
        spec: What is planned.
        branches: Its branches.
        platform: Whose program; where its kernels do not apply, that of plain XLA.
    """
    a = _arrays(spec)
    target = "gpu" if platform == "cuda" else "tpu"
    is_xla = platform == "cpu" or spec.implementation == "xla" or spec.dropout_rate > 0
    has_kernels = not is_xla and all(b.kernels[target] == "pallas" for b in branches if b.num_rows)
    model = {"tpu": _on_tpu, "gpu": _on_gpu}[target] if has_kernels else _in_xla
    between = model(spec, branches, a)
    return Memory(2 * a.q + 2 * a.k + int(between.forward), 4 * a.q + 4 * a.k + int(between.gradient))


def _arrays(spec: AttentionSpec) -> _Arrays:
    kv_heads = spec.local_kv_heads
    sums = accumulator(np.dtype(spec.dtype)).name
    q, q_sums = (_dense_bytes(spec, d, kv_heads * spec.q_per_kv) for d in (spec.dtype, sums))
    k, k_sums = (_dense_bytes(spec, d, kv_heads) for d in (spec.dtype, sums))
    return _Arrays(q, k, q_sums, k_sums, q_sums // spec.head_dim, sums != spec.dtype)


def _in_xla(spec: AttentionSpec, branches: tuple[BranchPlan, ...], a: _Arrays) -> Memory:
    """Results are summed where they stand; rows that travel are copied out, a piece at a time."""
    forward = a.lse + a.is_wide * a.q_sums
    gradient = 2 * a.lse + a.is_wide * (a.q_sums + 2 * a.k_sums)
    for branch, size in _travelling(spec, branches):
        copies = branch.ring_devices + 1 if branch.where == "all_gather" else 3
        forward += copies * size.keys + size.queries + size.query_sums + size.ids
        rest = (size.keys, size.key_sums) if branch.moves == "keys" else (2 * size.queries, size.query_sums)
        gradient += copies * sum(rest) + size.keys + 2 * size.queries
    scratch = _SCRATCH if spec.ring_size == 1 else _RING_SCRATCH
    return Memory(forward + scratch, gradient + 2 * scratch)


def _on_gpu(spec: AttentionSpec, branches: tuple[BranchPlan, ...], a: _Arrays) -> Memory:
    """The kernels read rows and write sums where they stand.

    In a gradient the sums of the forward pass make room for those of the backward pass only where they are not of one
    shape: zeros of one shape are all made at once. What travels backward has room where the forward sums were.
    """
    travelling = _travelling(spec, branches)
    rows = [_copies(b) * x.keys + x.queries + x.query_sums + a.lse for b, x in travelling]
    forward = a.is_wide * a.q_sums + max(rows, default=0)
    both = 2 * a.q_sums + 2 * a.k_sums if spec.q_per_kv == 1 else max(2 * a.q_sums, a.q_sums + 2 * a.k_sums)
    gathered = [b.ring_devices * x.key_sums for b, x in travelling if b.where == "all_gather"]
    return Memory(forward, a.is_wide * both + a.lse + max(gathered, default=0))


def _copies(branch: BranchPlan) -> int:
    """Copies of the keys that a device has at once: what is met, and what arrives."""
    return branch.ring_devices + 1 if branch.where == "all_gather" else 2


def _on_tpu(spec: AttentionSpec, branches: tuple[BranchPlan, ...], a: _Arrays) -> Memory:
    """The largest of the moments in which much is held at once, read off the buffers of compiled programs.

    Rows are copied together for the kernels, and what rows are taken from or put into is laid out anew for each rate. A
    branch on the device itself is largest when its rows are put into the sums: both are there, with the rows of later
    branches and, in a gradient, what branches on a ring take rows from. A branch on a ring works on a few heads
    at a time. Temporaries may stand where results will; packing them loses about as much, and neither is counted.
    For arrays much larger than the vector memory; smaller ones may stay in there.
    """
    kv_heads = spec.local_kv_heads
    rows, sums = a.q + 2 * a.k, a.q_sums + 2 * a.k_sums
    numbers = a.k_sums if spec.q_per_kv > 1 else a.q_sums / kv_heads  # one a row, padded to the width of a head
    whole = spec.shard_length * kv_heads
    merging = a.q_sums / kv_heads if spec.q_per_kv > 1 else 0.0  # grouped queries, a head at a time
    local = [b.num_rows / whole for b in branches if b.num_rows and b.where == "local"]
    travelling = _travelling(spec, branches)
    laid_out = a.q + rows if travelling else 0  # query, key, value and output or cotangent, as a ring takes them
    forward, gradient = [float(a.q_sums + a.q)], [float(sums)]
    for i, part in enumerate(local):
        merged = a.q_sums + part * (a.q_sums + 3 * merging + (spec.q_per_kv > 1) * numbers)
        forward += [part * (rows + a.q_sums) + (i > 0) * a.q_sums, merged]
        added = sums + part * (1 + 1 / kv_heads) * sums + numbers
        gradient.append(added + sum(local[i + 1 :]) * rows + laid_out)
    others = max(len({b.rate for b, _ in travelling}) - 1, 0)
    copied = rows if others else a.k if local else 0  # bits before they are laid out: all where several rings need them
    kept = others * rows + (laid_out if others else 0)
    if len({b.rate for b in branches if b.num_rows}) > 1:  # sums are laid out anew
        forward.append(2 * a.q_sums + (rows + copied if others else 0))
    for branch, size in travelling:
        copies = _copies(branch)
        meeting = copies * size.keys + size.queries + size.query_sums
        forward.append(a.q_sums + rows + copied + max(meeting, 4 * branch.num_rows / whole * merging))
        keys_move = branch.where == "all_gather" or branch.moves == "keys"
        moving = (size.keys, size.key_sums) if keys_move else (2 * size.queries, size.query_sums)
        around = (copies + 1) * sum(moving) + size.keys + size.queries
        gradient.append(sums + numbers + laid_out / 2 + kept + around)  # the other half stands where results will
    return Memory(int(max(forward)), int(max(*gradient, *forward)))


def _travelling(spec: AttentionSpec, branches: tuple[BranchPlan, ...]) -> list[tuple[BranchPlan, costs.RowBytes]]:
    """The branches that need other devices, with the bytes of one piece of their rows."""
    return [(b, costs.row_bytes(spec, spec.batch * b.num_rows // b.pieces)) for b in branches if b.where != "local"]


def _dense_bytes(spec: AttentionSpec, dtype: str, heads: int) -> int:
    """Bytes of a whole array of so many heads on one device."""
    rows = spec.batch * spec.shard_length * heads
    return costs.row_bytes(spec._replace(dtype=dtype, q_per_kv=1), rows).queries
