"""Estimates of the memory that attention takes on a device: arguments, results and temporaries.

Each platform has its own model, because the programs differ: plain XLA and the GPU kernels work in place. For TPU, rows
are assumed to be packed, although the kernels read some local branches in place, which takes less. The models count
whole arrays and ignore what is small. `benchmarks/plan_accuracy.py` compares them with compiled programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringjax._src.comm.devices import Platform
from ringjax._src.online_softmax import accumulator
from ringjax._src.planning import costs

if TYPE_CHECKING:
    from ringjax._src.planning.branch_plan import BranchPlan
    from ringjax._src.planning.spec import AttentionSpec

PLATFORMS: tuple[Platform, ...] = ("cpu", "tpu", "cuda")
_SCRATCH, _RING_SCRATCH = 12 * 2**20, 3 * 2**20  # scores and weights of a block


class Memory(NamedTuple):
    """Estimated bytes per device: of a forward pass, and of forward and backward pass."""

    forward: int
    gradient: int


class _Arrays(NamedTuple):
    """Bytes of whole arrays on one device: queries, keys, accumulators of both, and one number per query row."""

    q: int
    k: int
    q_sums: int
    k_sums: int
    lse: int
    is_wide: bool  # whether accumulators differ in dtype from the results


def predicted_memory(spec: AttentionSpec, branches: tuple[BranchPlan, ...], platform: Platform = "cpu") -> Memory:
    """Estimates bytes per device of the forward pass, and of forward and backward pass.

    Args:
        spec: The attention call.
        branches: Its branches.
        platform: The platform; where its kernels do not apply, plain XLA is assumed.
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
    """Results are accumulated in place; rows that are sent are packed, a piece at a time."""
    forward = a.lse + a.is_wide * a.q_sums
    gradient = 2 * a.lse + a.is_wide * (a.q_sums + 2 * a.k_sums)
    for branch, size in _shared_branches(spec, branches):
        if branch.exchange:
            there, back = _exchanged(branch, size)
            # as sent and received; of the next piece, too; and of unaligned rows in the order of the sequence
            copies = 3 if branch.pieces > 1 or not (branch.is_aligned or branch.exchange == "dense") else 2
            forward += copies * (there.rows + there.results) + there.results + there.hopping + size.ids
            gradient += copies * (back.rows + back.results) + back.hopping + size.ids
            continue
        copies = branch.ring_devices + 1 if branch.where == "all_gather" else 3
        forward += (copies + _is_two_way(branch)) * size.keys + size.queries + size.query_sums + size.ids
        rest = (size.keys, size.key_sums) if branch.moves == "keys" else (2 * size.queries, size.query_sums)
        gradient += (copies + _extra_copies(branch)) * sum(rest) + size.keys + 2 * size.queries
    scratch = _SCRATCH if spec.ring_size == 1 else _RING_SCRATCH
    return Memory(forward + scratch, gradient + 2 * scratch)


def _on_gpu(spec: AttentionSpec, branches: tuple[BranchPlan, ...], a: _Arrays) -> Memory:
    """The kernels read rows and accumulate results in place.

    In a gradient, the accumulators of the forward pass are freed before those of the backward pass are made, unless
    they have the same shape: XLA makes zeros of one shape at once. Rows that are sent backward reuse freed memory. The
    rows of an exchange in one piece have left when results are accumulated.
    """
    both = 2 * a.q_sums + 2 * a.k_sums if spec.q_per_kv == 1 else max(2 * a.q_sums, a.q_sums + 2 * a.k_sums)
    sums, sums_bwd = a.is_wide * a.q_sums, a.is_wide * both
    forward, gradient = [sums], [sums_bwd]
    for branch, size in _shared_branches(spec, branches):
        if branch.where == "all_gather":
            gradient.append(sums_bwd + branch.ring_devices * size.key_sums)
        if not branch.exchange:
            copies = _copies(branch) + _is_two_way(branch)
            forward.append(sums + copies * size.keys + size.queries + size.query_sums + a.lse)
            continue
        there, back = _exchanged(branch, size)
        if branch.pieces > 1:
            forward.append(sums + 2 * there.rows + 3 * there.results)
            gradient.append(sums_bwd + 2 * back.rows + back.results)
        else:
            forward += [sums + there.results + a.lse, 2 * there.rows + there.hopping + a.lse]
            gradient.append(2 * back.rows + back.results)
    return Memory(max(forward), max(gradient) + a.lse)


def _copies(branch: BranchPlan) -> int:
    """Returns how many copies of the keys a device holds: those attended to, and those that arrive."""
    return branch.ring_devices + 1 if branch.where == "all_gather" else 2


def _is_two_way(branch: BranchPlan) -> bool:
    """Returns whether keys arrive from both sides in the forward pass, which takes another copy."""
    return branch.where == "ring" and branch.ring_devices > 2


def _extra_copies(branch: BranchPlan) -> int:
    """Returns how many copies of rows a second direction adds in a backward pass: attended to and arriving."""
    return 2 * (branch.directions - 1)


class _Exchanged(NamedTuple):
    """Bytes of rows that are exchanged, of their results, and of what rotates between teams, in a pass."""

    rows: int
    results: int
    hopping: int


def _exchanged(branch: BranchPlan, size: costs.RowBytes) -> tuple[_Exchanged, _Exchanged]:
    """Returns the bytes of a piece of an exchange, forward and backward."""
    copies, has_hops = branch.group.parts.query, branch.group.ring > 1
    keys, key_sums = copies * size.keys, copies * size.key_sums
    moving = keys + key_sums if branch.moves == "keys" else 2 * size.queries + size.query_sums
    return (
        _Exchanged(size.queries + keys, size.query_sums, has_hops * keys),
        _Exchanged(2 * size.queries + keys, size.query_sums + key_sums, has_hops * moving),
    )


def _on_tpu(spec: AttentionSpec, branches: tuple[BranchPlan, ...], a: _Arrays) -> Memory:
    """Takes the maximum over the moments at which most is live, derived from the buffers of compiled programs.

    Rows are packed for the kernels, and arrays that are packed or unpacked get a new layout for each rate. A local
    branch is largest when its rows are merged: accumulators and rows are live, with the rows of later branches and, in
    a gradient, the arrays that shared branches pack. A shared branch works on a few heads at a time. Temporaries may
    share memory with results; fragmentation loses about as much, and neither is counted. For arrays much larger than
    the vector memory, in which smaller ones may stay.
    """
    kv_heads = spec.local_kv_heads
    rows, sums = a.q + 2 * a.k, a.q_sums + 2 * a.k_sums
    numbers = a.k_sums if spec.q_per_kv > 1 else a.q_sums / kv_heads  # one per row, padded to the width of a head
    whole = spec.shard_length * kv_heads
    merging = a.q_sums / kv_heads if spec.q_per_kv > 1 else 0.0  # grouped queries, one head at a time
    local = [b.num_rows / whole for b in branches if b.num_rows and b.where == "local"]
    shared = _shared_branches(spec, branches)
    laid_out = a.q + rows if shared else 0  # query, key, value and output or its gradient, as packed
    forward, gradient = [float(a.q_sums + a.q)], [float(sums)]
    for i, part in enumerate(local):
        merged = a.q_sums + part * (a.q_sums + 3 * merging + (spec.q_per_kv > 1) * numbers)
        forward += [part * (rows + a.q_sums) + (i > 0) * a.q_sums, merged]
        added = sums + part * (1 + 1 / kv_heads) * sums + numbers
        gradient.append(added + sum(local[i + 1 :]) * rows + laid_out)
    others = max(len({b.rate for b, _ in shared}) - 1, 0)
    copied = rows if others else a.k if local else 0  # before the new layout: all arrays if several branches pack them
    kept = others * rows + (laid_out if others else 0)
    if len({b.rate for b in branches if b.num_rows}) > 1:  # accumulators get a new layout
        forward.append(2 * a.q_sums + (rows + copied if others else 0))
    for branch, size in shared:
        if branch.exchange:
            there, back = _exchanged(branch, size)
            copies = 3 if branch.pieces > 1 else 2
            forward.append(a.q_sums + rows + copied + copies * (there.rows + there.results) + there.hopping)
            around = copies * (back.rows + back.results) + back.hopping
            gradient.append(sums + numbers + laid_out / 2 + kept + around)
            continue
        copies = _copies(branch)
        attending = (copies + _is_two_way(branch)) * size.keys + size.queries + size.query_sums
        forward.append(a.q_sums + rows + copied + max(attending, 4 * branch.num_rows / whole * merging))
        keys_move = branch.where == "all_gather" or branch.moves == "keys"
        moving = (size.keys, size.key_sums) if keys_move else (2 * size.queries, size.query_sums)
        around = (copies + 1 + _extra_copies(branch)) * sum(moving) + size.keys + size.queries
        gradient.append(sums + numbers + laid_out / 2 + kept + around)  # the other half shares memory with results
    return Memory(int(max(forward)), int(max(*gradient, *forward)))


def _shared_branches(spec: AttentionSpec, branches: tuple[BranchPlan, ...]) -> list[tuple[BranchPlan, costs.RowBytes]]:
    """Returns the branches that need other devices, with the bytes of one piece of their rows.

    Of branches that share an exchange of whole arrays, only the first is returned.
    """
    shared = [b for b in branches if b.where != "local" and (b.exchange != "dense" or b.forward)]
    whole = spec.shard_length * spec.local_kv_heads
    rows = (spec.batch * (whole if b.exchange == "dense" else b.num_rows) // b.pieces for b in shared)
    return [(b, costs.row_bytes(spec, num)) for b, num in zip(shared, rows, strict=True)]


def _dense_bytes(spec: AttentionSpec, dtype: str, heads: int) -> int:
    """Returns the bytes of a whole array with this many heads on one device."""
    rows = spec.batch * spec.shard_length * heads
    return costs.row_bytes(spec._replace(dtype=dtype, q_per_kv=1), rows).queries
