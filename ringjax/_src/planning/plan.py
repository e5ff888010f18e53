"""Execution plans for dilated attention on a ring: where each branch runs and its cost.

Attention calls execute these plans: when a program is traced, each branch reads from its plan where it runs, its
devices, its row selections and its messages.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from ringjax._src.comm.layout import layout_for, layout_named
from ringjax._src.comm.ring_comm import STRATEGIES, StrategyName
from ringjax._src.kernels.dispatch import BACKENDS, TARGETS
from ringjax._src.kernels.interface import Case
from ringjax._src.pattern import Branch, DilationPattern
from ringjax._src.planning import costs, geometry
from ringjax._src.planning.costs import Message, Moves
from ringjax._src.planning.memory import PLATFORMS, Memory, Platform, predicted_memory
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.rows.selection import RowSelection
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
_PLANNED = AttentionSpec._fields[: AttentionSpec._fields.index("axis_name")]  # shown by `to_dict`


@dataclasses.dataclass(frozen=True)
class BranchPlan:
    """Execution plan of one branch.

    Attributes:
        segment_length: Segment length, clamped to the stored sequence.
        rate: Dilation rate.
        where: ``"local"`` if no device needs keys of other devices; ``"ring"`` if keys (or queries) rotate;
            ``"all_gather"`` if keys are gathered once.
        ring_devices: Number of devices that share a segment, which form one ring.
        is_aligned: Whether all chunks select the same rows in this branch, which is the fast path.
        advice: How to make the branch aligned, or an empty string.
        num_rows: Number of rows selected on a device, summed over its heads, per batch entry.
        pieces: Number of parts in which the heads are sent one after the other. Large messages are split to save
            memory.
        moves: What rotates in the backward pass.
        forward: Messages of the forward pass.
        backward: Messages of the backward pass.
        spec: The attention call that was planned.
        branch: Segment length, rate and heads of the branch.
        selections: The rows that a device selects: whole segments and shorter last segment of a local branch, or the
            chunks of a device.

    Example:
        >>> import ringjax as rj
        >>> pattern = rj.DilationPattern((64,), (4,))
        >>> branch = rj.plan(pattern, seq_len=64, num_heads=4, head_dim=8, ring_size=2, is_causal=True).branches[0]
        >>> branch.ring_devices, branch.num_rows, branch.hops, branch.balance
        (2, 32, 1, 1.4705882352941178)
    """

    segment_length: int
    rate: int
    where: str
    ring_devices: int
    is_aligned: bool
    advice: str
    num_rows: int
    pieces: int
    moves: Moves
    forward: tuple[Message, ...]
    backward: tuple[Message, ...]
    spec: AttentionSpec = dataclasses.field(repr=False)
    branch: Branch = dataclasses.field(repr=False)
    selections: tuple[RowSelection, ...] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def flops(self) -> tuple[float, ...]:
        """FLOPs of each device in the forward pass."""
        r = self.spec
        layout = layout_named(r.layout)
        pairs = costs.pairs_per_device(self.branch, layout, r.ring_size, r.stored_length, r.is_causal)
        return tuple((4.0 * r.batch * r.head_dim * r.q_per_kv / r.head_shards * pairs).tolist())

    @property
    def hops(self) -> int:
        """Number of hops of each piece of the keys in the forward pass."""
        return self.ring_devices - 1 if self.where == "ring" else 0

    @property
    def balance(self) -> float:
        """FLOPs of the busiest device divided by the mean."""
        return float(max(self.flops) / np.mean(self.flops)) if any(self.flops) else 1.0

    @property
    def kernels(self) -> dict[str, str]:
        """For each target, ``"pallas"`` or the reason why plain XLA computes (part of) the branch.

        Assumes GPUs of compute capability 8.0 or later, default block sizes and segment ids that fit int32.
        """
        r = self.spec
        cases = [Case(r.dtype, r.head_dim, rows.num_rows, r.q_per_kv) for rows in self.selections]
        usual = "pallas" if cases else "there is nothing to compute"
        found: dict[str, str] = {}
        for target in TARGETS:
            limits = BACKENDS[target].limits
            assert limits is not None
            found[target] = next(filter(None, (limits.unsupported(target, case) for case in cases)), usual)
        return found

    def sent(self, messages: tuple[Message, ...]) -> int:
        """Returns the number of bytes that each device sends for these messages."""
        return sum(m.sent(self.ring_devices) for m in messages)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Execution plan and estimated cost of a pattern on a ring. Printing it shows a table.

    Attributes:
        spec: The attention call that was planned.
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

    spec: AttentionSpec
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
        return predicted_memory(self.spec, self.branches, check_choice("platform", platform, PLATFORMS))

    @property
    def aligned_length(self) -> int | None:
        """Smallest stored length at which every branch takes the fast path, or None if it is over twice as long."""
        return geometry.aligned_length(self.spec)

    @property
    def nbytes(self) -> int:
        """Size of the row selections in bytes."""
        return sum(rows.nbytes for branch in self.branches for rows in branch.selections)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON-serializable data."""
        skipped = {"spec", "branch", "selections"}
        branches = []
        for branch in self.branches:
            fields = {f.name: getattr(branch, f.name) for f in dataclasses.fields(branch) if f.name not in skipped}
            for name in ("forward", "backward"):
                fields[f"{name}_bytes"] = branch.sent(fields[name])
                fields[name] = [m._asdict() for m in fields[name]]
            made = {name: getattr(branch, name) for name in ("hops", "balance", "kernels")}
            branches.append({**fields, "flops": list(branch.flops), **made})
        call = {name: getattr(self.spec, name) for name in _PLANNED} | {"pattern": repr(self.spec.pattern)}
        return {
            **call,
            "branches": branches,
            "balance": self.balance,
            "forward_memory": self.forward_memory,
            "gradient_memory": self.gradient_memory,
        }

    def __str__(self) -> str:
        from ringjax._src.planning.table import plan_table  # noqa: PLC0415 - rich is slow to import

        return plan_table(self)


def make_plan(spec: AttentionSpec) -> Plan:
    """Returns the plan for a validated spec, from the pattern cache."""
    with _lock:  # so that threads share entries
        return _make_plan(spec)


@functools.lru_cache(maxsize=256)
def _make_plan(spec: AttentionSpec) -> Plan:
    branches = tuple(_branch_plan(spec, *numbered) for numbered in enumerate(geometry.branches_of(spec)))
    plan = _cached[spec] = Plan(spec, branches, *predicted_memory(spec, branches, "cpu"))
    return plan


_lock = threading.Lock()
_cached: weakref.WeakValueDictionary[AttentionSpec, Plan] = weakref.WeakValueDictionary()  # to count bytes


class CacheInfo(NamedTuple):
    """Statistics of the pattern cache, see `pattern_cache_info`.

    Attributes:
        hits: Lookups that found an entry.
        misses: Lookups that built an entry.
        entries: Number of entries.
        bytes: Total size of the arrays of all entries.
    """

    hits: int
    misses: int
    entries: int
    bytes: int


def pattern_cache_info() -> CacheInfo:
    """Returns hits, misses, number of entries and size in bytes of the pattern cache.

    Example:
        >>> import ringjax as rj
        >>> rj.pattern_cache_clear()
        >>> rj.pattern_cache_info()
        CacheInfo(hits=0, misses=0, entries=0, bytes=0)
    """
    hits, misses, _, entries = _make_plan.cache_info()
    return CacheInfo(hits, misses, entries, sum(plan.nbytes for plan in _cached.values()))


def pattern_cache_clear() -> None:
    """Clears the pattern cache and resets its statistics.

    Example:
        >>> import ringjax as rj
        >>> rj.pattern_cache_clear()
        >>> rj.pattern_cache_info().entries
        0
    """
    _make_plan.cache_clear()
    _cached.clear()


def _branch_plan(spec: AttentionSpec, number: int, branch: Branch) -> BranchPlan:
    make = functools.partial(BranchPlan, branch.segment_length, branch.rate, spec=spec, branch=branch)
    if geometry.is_local(spec, branch) or not any(branch.rows(branch.segment_length)):
        selections = geometry.local_selections(spec, number, branch)
        num_rows = sum(int(x.counts.sum()) * x.chunks for x in selections) // spec.head_shards
        return make("local", 1, True, "", num_rows, 1, "keys", (), (), selections=selections)
    selection, devices = geometry.shared_selection(spec, number, branch)
    advice = "; ".join(geometry.unmet_segment_rules(spec, branch) + geometry.unmet_rate_rule(spec, branch))
    heads = len(selection.heads) // spec.head_shards
    num_rows = heads * selection.chunks * selection.num_rows
    where = _strategy(spec, spec.batch * num_rows, devices)
    pieces = _pieces(spec, spec.batch * num_rows, heads)
    piece_rows = spec.batch * num_rows // pieces
    moves = costs.cheapest_moves(spec, piece_rows, devices, where)
    forward = costs.SHARING[where].forward(spec, piece_rows, devices)
    backward = costs.SHARING[where].backward(spec, piece_rows, devices, moves)
    forward, backward = (tuple(m.times(pieces) for m in messages) for messages in (forward, backward))
    planned = where, devices, selection.is_aligned, advice, num_rows, pieces, moves, forward, backward
    return make(*planned, selections=(selection,))


def _strategy(spec: AttentionSpec, rows: int, ring_devices: int) -> str:
    if spec.strategy != "auto":
        return spec.strategy
    size = costs.row_bytes(spec, rows)
    is_latency_bound = ring_devices > 2 and size.keys <= _LATENCY_BYTES
    room = np.inf if spec.memory_budget is None else spec.memory_budget / 8
    return "all_gather" if is_latency_bound and ring_devices * (size.keys + size.key_sums) <= room else "ring"


def _pieces(spec: AttentionSpec, rows: int, heads: int) -> int:
    """Returns the number of equal parts in which the heads are sent: as many as keep messages long."""
    size = costs.row_bytes(spec, rows).keys
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
    platform: Platform = "cpu",
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
        platform: ``"cpu"``, ``"tpu"`` or ``"cuda"``: the platform on which `memory_budget` must suffice.

    Returns:
        The plan.

    Raises:
        ValueError: If a size is below 1, `num_heads` is not a multiple of `num_kv_heads`, the key/value heads do not
            divide evenly over `head_shards`, `stored_length` is below `seq_len` or not a multiple of the number of
            chunks, `layout`, `strategy`, `dtype` or `platform` is unknown, or no strategy fits `memory_budget`.
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
    check_choice("strategy", strategy, tuple(STRATEGIES))
    layout = layout_for(layout, ring_size)
    multiple = layout_named(layout).multiple(ring_size)
    least = -(-seq_len // multiple) * multiple
    stored = least if stored_length is None else check_int("stored_length", stored_length)
    if stored < seq_len or stored % multiple:
        raise ValueError(f"`stored_length` must be a multiple of {multiple} and at least {seq_len}, got {stored}.")
    spec = AttentionSpec(
        pattern=pattern,
        seq_len=seq_len,
        stored_length=stored,
        batch=batch,
        kv_heads=kv_heads,
        q_per_kv=num_heads // kv_heads,
        head_dim=head_dim,
        ring_size=ring_size,
        layout=layout,
        is_causal=is_causal,
        dtype=check_dtype("dtype", dtype).name,
        strategy=strategy,
        memory_budget=budget,
        has_ids=has_segment_ids or stored > seq_len,
        head_shards=head_shards,
        platform=check_choice("platform", platform, PLATFORMS),
    )
    return checked_plan(spec)


def checked_plan(spec: AttentionSpec) -> Plan:
    """Returns the plan for a spec.

    Raises:
        ValueError: If the memory budget is too small for every strategy that the spec allows.
        NotImplementedError: If heads are sharded in a pattern with ``heads="split"``.
    """
    if spec.pattern.heads == "split" and spec.head_shards > 1:
        raise NotImplementedError('`heads="split"` does not support heads sharded over a mesh axis.')
    made = make_plan(spec)
    budget = spec.memory_budget
    needed = lambda plan: plan.memory(spec.platform).gradient  # noqa: E731
    if budget is not None and needed(made) > budget:
        least = make_plan(spec._replace(strategy="ring"))
        if needed(least) <= budget and spec.strategy == "auto":
            return least
        raise ValueError(
            f"`memory_budget` must be at least {needed(least)} bytes per device for this attention and its gradient on "
            f"{spec.platform} on a ring of {spec.ring_size} with strategy='ring', got {budget}; a larger ring, a "
            "smaller batch or heads sharded over `head_axis` need less."
        )
    return made
