"""Execution plans for dilated attention on a ring: where each branch runs and its cost.

The ring implementation executes these plans: it reads where a branch runs, its devices, its tables and its messages
from here when a program is traced.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import numpy as np
from jax.typing import DTypeLike

from ringjax._src.comm.layout import layout_for, layout_named
from ringjax._src.comm.ring_comm import STRATEGIES, StrategyName
from ringjax._src.kernels.backend import TARGETS, Case
from ringjax._src.pattern import Branch, DilationPattern
from ringjax._src.planning import costs, geometry
from ringjax._src.planning.costs import Message, Moves
from ringjax._src.planning.geometry import Request
from ringjax._src.planning.memory import PLATFORMS, Memory, Platform, predicted_memory
from ringjax._src.rows.indices import PartTable, branch_tables, memoized
from ringjax._src.rows.shard import ShardRows
from ringjax._src.validation import (
    MOST_DEVICES,
    check_bool,
    check_choice,
    check_dtype,
    check_heads,
    check_int,
    check_pattern,
)

_LATENCY_BYTES = 256 * 1024  # a hop of fewer bytes takes about as long as an empty one
_LONG_MESSAGE = 2**19  # bytes; cutting longer messages costs no time


@dataclasses.dataclass(frozen=True)
class BranchPlan:
    """Execution plan of one branch.

    Attributes:
        segment_length: Segment length, clamped to the stored sequence.
        rate: Dilation rate.
        where: ``"local"`` if no device needs keys of other devices; ``"ring"`` if keys (or queries) rotate;
            ``"all_gather"`` if keys are gathered once.
        group: Number of devices that share a segment, which form one ring.
        is_aligned: Whether all chunks select the same rows in this branch, which is the fast path.
        advice: How to make the branch aligned, or an empty string.
        rows: Number of rows selected on a device, summed over its heads, per batch entry.
        pieces: Number of parts in which the heads are sent one after the other. Large messages are split to save
            memory.
        moves: What rotates in the backward pass.
        forward: Messages of the forward pass.
        backward: Messages of the backward pass.
        request: The configuration that was planned.
        selection: The branch and its heads.
        tables: Row tables of a local branch.
        shard: Row tables of a branch that needs keys of other devices.

    Example:
        >>> import ringjax as rj
        >>> pattern = rj.DilationPattern((64,), (4,))
        >>> branch = rj.plan(pattern, seq_len=64, num_heads=4, head_dim=8, ring_size=2, is_causal=True).branches[0]
        >>> branch.group, branch.rows, branch.hops, branch.balance
        (2, 32, 1, 1.4705882352941178)
    """

    segment_length: int
    rate: int
    where: Literal["local", "ring", "all_gather"]
    group: int
    is_aligned: bool
    advice: str
    rows: int
    pieces: int
    moves: Moves
    forward: tuple[Message, ...]
    backward: tuple[Message, ...]
    request: Request = dataclasses.field(repr=False)
    selection: Branch = dataclasses.field(repr=False)
    tables: tuple[PartTable, ...] = dataclasses.field(repr=False, compare=False)
    shard: ShardRows | None = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def flops(self) -> tuple[float, ...]:
        """FLOPs of each device in the forward pass."""
        r = self.request
        layout = layout_named(r.layout)
        pairs = costs.pairs_per_device(self.selection, layout, r.ring_size, r.stored_length, r.is_causal)
        return tuple((4.0 * r.batch * r.head_dim * r.group / r.head_shards * pairs).tolist())

    @property
    def hops(self) -> int:
        """Number of hops of each piece of the keys in the forward pass."""
        return self.group - 1 if self.where == "ring" else 0

    @property
    def balance(self) -> float:
        """FLOPs of the busiest device divided by the mean."""
        return float(max(self.flops) / np.mean(self.flops)) if any(self.flops) else 1.0

    @property
    def kernels(self) -> dict[str, str]:
        """For each target, ``"pallas"`` or the reason why plain XLA computes (part of) the branch.

        Assumes GPUs of compute capability 8.0 or later, default block sizes and segment ids that fit int32.
        """
        r = self.request
        rows = [table.rows for table in self.tables] if self.shard is None else [self.shard.rows]
        cases = [Case(r.dtype, r.head_dim, n, r.group) for n in rows]
        reasons = {target: [case.misfit(target) for case in cases] for target in TARGETS}
        usual = "pallas" if rows else "there is nothing to compute"
        return {target: next(filter(None, found), usual) for target, found in reasons.items()}

    def sent(self, messages: tuple[Message, ...]) -> int:
        """Returns the number of bytes that each device sends for these messages."""
        return sum(m.sent(self.group) for m in messages)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Execution plan and estimated cost of a pattern on a ring. Printing it shows a table.

    Attributes:
        request: The configuration that was planned.
        branches: One plan per branch.
        forward_memory: Estimated bytes per device of the forward pass in plain XLA: arguments, outputs and temporaries.
            See `memory` for the kernels.
        gradient_memory: Estimated bytes per device of forward and backward pass in plain XLA.

    Example:
        >>> import ringjax as rj
        >>> pattern = rj.DilationPattern((64,), (4,))
        >>> rj.plan(pattern, seq_len=64, num_heads=4, head_dim=8, ring_size=2).to_dict()["balance"]
        1.0
    """

    request: Request
    branches: tuple[BranchPlan, ...]
    forward_memory: int
    gradient_memory: int

    @property
    def flops(self) -> tuple[float, ...]:
        """FLOPs of each device in the forward pass; the backward pass takes 2.5 times as many."""
        return tuple(np.sum([b.flops for b in self.branches], axis=0).tolist())

    @property
    def balance(self) -> float:
        """FLOPs of the busiest device divided by the mean."""
        return float(max(self.flops) / np.mean(self.flops)) if any(self.flops) else 1.0

    def memory(self, platform: Platform = "cpu") -> Memory:
        """Estimates bytes per device on a platform: for the forward pass, and for forward and backward pass.

        Raises:
            ValueError: If `platform` is unknown.

        Example:
            >>> import ringjax as rj
            >>> p = rj.plan(rj.DilationPattern((2048,), (1,)), seq_len=65536, num_heads=8, head_dim=128, ring_size=8)
            >>> p.memory("cpu") == (p.forward_memory, p.gradient_memory)
            True
        """
        return predicted_memory(self.request, self.branches, check_choice("platform", platform, PLATFORMS))

    @property
    def aligned_length(self) -> int | None:
        """Smallest stored length at which every branch takes the fast path, or None if it is over twice as long."""
        return geometry.aligned_length(self.request)

    @property
    def nbytes(self) -> int:
        """Size of the row tables in bytes."""
        shards = [b.shard for b in self.branches if b.shard is not None]
        return sum(table.nbytes for b in self.branches for table in b.tables) + sum(x.nbytes for x in shards)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON-serializable data."""
        skipped = {"request", "selection", "tables", "shard"}
        branches = []
        for branch in self.branches:
            fields = {f.name: getattr(branch, f.name) for f in dataclasses.fields(branch) if f.name not in skipped}
            for name in ("forward", "backward"):
                fields[f"{name}_bytes"] = branch.sent(fields[name])
                fields[name] = [m._asdict() for m in fields[name]]
            made = {name: getattr(branch, name) for name in ("hops", "balance", "kernels")}
            branches.append({**fields, "flops": list(branch.flops), **made})
        request = {**self.request._asdict(), "pattern": repr(self.request.pattern)}
        return {
            **request,
            "branches": branches,
            "balance": self.balance,
            "forward_memory": self.forward_memory,
            "gradient_memory": self.gradient_memory,
        }

    def __str__(self) -> str:
        from ringjax._src.planning.table import plan_table  # noqa: PLC0415 - rich is slow to import

        return plan_table(self)


def make_plan(request: Request) -> Plan:
    """Returns the plan for a validated request, from the pattern cache."""
    return memoized(request, _make_plan)


def _make_plan(request: Request) -> Plan:
    branches = tuple(_branch_plan(request, *numbered) for numbered in enumerate(geometry.branches_of(request)))
    return Plan(request, branches, *predicted_memory(request, branches))


def _branch_plan(request: Request, number: int, branch: Branch) -> BranchPlan:
    make = functools.partial(BranchPlan, branch.segment_length, branch.rate, request=request, selection=branch)
    if not any(branch.rows(branch.segment_length)):  # no head selects anything
        return make("local", 1, True, "", 0, 1, "keys", (), (), tables=(), shard=None)
    if geometry.is_local(request, branch):
        every = request.head_shards > 1
        tables = branch_tables(
            branch,
            number,
            request.shard_length,
            request.group,
            with_empty_heads=every,
            query_rows=request.query_rows,
        )
        rows = sum(int(t.counts.sum()) * t.segments for t in tables) // request.head_shards
        return make("local", 1, True, "", rows, 1, "keys", (), (), tables=tables, shard=None)
    shard, group = geometry.shard_rows(request, number, branch)
    unmet = geometry.unmet_segment_rules(request, branch) + geometry.unmet_rate_rule(request, branch)
    advice = "; ".join(unmet)
    rows = len(shard.heads) // request.head_shards * shard.chunks * shard.rows
    where = _strategy(request, request.batch * rows, group)
    pieces = _pieces(request, request.batch * rows, len(shard.heads) // request.head_shards)
    piece_rows = request.batch * rows // pieces
    moves: Moves = "keys" if where == "all_gather" else costs.cheaper_moves(request, piece_rows, group)
    forward = costs.forward_messages(request, piece_rows, group, where)
    backward = costs.backward_messages(request, piece_rows, group, where, moves)
    forward, backward = (tuple(m.times(pieces) for m in messages) for messages in (forward, backward))
    return make(where, group, shard.is_aligned, advice, rows, pieces, moves, forward, backward, tables=(), shard=shard)


def _strategy(request: Request, rows: int, group: int) -> Literal["ring", "all_gather"]:
    if request.strategy != "auto":
        return request.strategy
    size = costs.row_bytes(request, rows)
    is_latency_bound = group > 2 and size.keys <= _LATENCY_BYTES
    room = np.inf if request.memory_budget is None else request.memory_budget / 8
    return "all_gather" if is_latency_bound and group * (size.keys + size.key_sums) <= room else "ring"


def _pieces(request: Request, rows: int, heads: int) -> int:
    """Returns the number of equal parts in which the heads are sent: as many as keep messages long."""
    size = costs.row_bytes(request, rows).keys
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or size // n >= _LONG_MESSAGE))


def plan(
    pattern: DilationPattern,
    *,
    seq_len: int,
    num_heads: int,
    head_dim: int,
    ring_size: int,
    stored_length: int | None = None,
    num_kv_heads: int | None = None,
    batch: int = 1,
    layout: str = "contiguous",
    is_causal: bool = False,
    dtype: DTypeLike = "float32",
    strategy: StrategyName = "auto",
    memory_budget: int | None = None,
    has_segment_ids: bool = False,
    head_shards: int = 1,
) -> Plan:
    """Plans dilated attention on a ring of devices and estimates its cost. Print the result to read it.

    Args:
        pattern: Segment lengths and dilation rates of the branches.
        seq_len: Length of the sequence without padding.
        num_heads: Number of query heads.
        head_dim: Dimensions per head.
        ring_size: Number of devices that share the sequence.
        stored_length: Length with padding; by default the smallest that the layout allows.
        num_kv_heads: Number of key/value heads; `num_heads` by default.
        batch: Number of sequences per device.
        layout: ``"contiguous"`` or ``"zigzag"``.
        is_causal: Whether a query attends only to keys at its own and earlier positions.
        dtype: Dtype of query, key and value.
        strategy: ``"auto"``, ``"ring"`` or ``"all_gather"`` for branches that need keys of other devices, see `Ring`.
        memory_budget: Bytes available on each device for attention and its gradient, or None for no limit.
        has_segment_ids: Whether segment ids are sent with the keys.
        head_shards: Number of devices that share the heads.

    Returns:
        The plan.

    Raises:
        ValueError: If a size is below 1, `num_heads` is not a multiple of `num_kv_heads`, the key/value heads do not
            divide evenly over `head_shards`, `stored_length` is below `seq_len` or not a multiple of the number of
            chunks, `layout`, `strategy` or `dtype` is unknown, or no strategy fits `memory_budget`.
        NotImplementedError: If a pattern with ``heads="split"`` is combined with `head_shards` above 1.

    Example:
        >>> import ringjax as rj
        >>> pattern = rj.DilationPattern((2048, 65536), (1, 16))
        >>> p = rj.plan(pattern, seq_len=65536, num_heads=8, head_dim=64, ring_size=4)
        >>> [(b.where, b.hops) for b in p.branches]
        [('local', 0), ('ring', 3)]
    """
    check_pattern(pattern)
    for name, flag in (("is_causal", is_causal), ("has_segment_ids", has_segment_ids)):
        check_bool(name, flag)
    budget = None if memory_budget is None else check_int("memory_budget", memory_budget)
    seq_len, head_dim, batch = map(check_int, ("seq_len", "head_dim", "batch"), (seq_len, head_dim, batch))
    ring_size = check_int("ring_size", ring_size, most=MOST_DEVICES)
    head_shards = check_int("head_shards", head_shards)
    num_heads, kv_heads = check_heads(num_heads, num_kv_heads)
    if kv_heads % head_shards:
        raise ValueError(
            f"key/value heads must divide evenly over the `head_shards` devices of `head_axis`, got {kv_heads} heads "
            f"over {head_shards} devices."
        )
    check_choice("strategy", strategy, STRATEGIES)
    layout = layout_for(layout, ring_size)
    multiple = layout_named(layout).multiple(ring_size)
    least = -(-seq_len // multiple) * multiple
    stored = least if stored_length is None else check_int("stored_length", stored_length)
    if stored < seq_len or stored % multiple:
        raise ValueError(f"`stored_length` must be a multiple of {multiple} and at least {seq_len}, got {stored}.")
    request = Request(
        pattern=pattern,
        seq_len=seq_len,
        stored_length=stored,
        batch=batch,
        kv_heads=kv_heads,
        group=num_heads // kv_heads,
        head_dim=head_dim,
        ring_size=ring_size,
        layout=layout,
        is_causal=is_causal,
        dtype=check_dtype("dtype", dtype).name,
        strategy=strategy,
        memory_budget=budget,
        has_ids=has_segment_ids or stored > seq_len,
        head_shards=head_shards,
    )
    return checked_plan(request)


def checked_plan(request: Request) -> Plan:
    """Returns the plan for a request.

    Raises:
        ValueError: If the memory budget is too small for every strategy that the request allows.
        NotImplementedError: If heads are sharded in a pattern with ``heads="split"``.
    """
    if request.pattern.heads == "split" and request.head_shards > 1:
        raise NotImplementedError('`heads="split"` does not support heads sharded over a mesh axis.')
    made = make_plan(request)
    budget = request.memory_budget
    if budget is not None and made.gradient_memory > budget:
        least = make_plan(request._replace(strategy="ring"))
        if least.gradient_memory <= budget and request.strategy == "auto":
            return least
        raise ValueError(
            f"`memory_budget` must be at least {least.gradient_memory} bytes per device for this attention and its "
            f"gradient on a ring of {request.ring_size} with strategy='ring', got {budget}; a larger ring, a smaller "
            "batch or heads sharded over `head_axis` need less."
        )
    return made
