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

from ringjax._src.comm.devices import Platform, device_named
from ringjax._src.comm.layout import layout_for, layout_named
from ringjax._src.comm.ring_comm import STRATEGIES, StrategyName
from ringjax._src.pattern import DilationPattern
from ringjax._src.planning import costs, geometry
from ringjax._src.planning.branch_plan import BranchPlan, plan_branches
from ringjax._src.planning.costs import Message
from ringjax._src.planning.memory import PLATFORMS, Memory, predicted_memory
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.validation import (
    MOST_DEVICES,
    check_bool,
    check_choice,
    check_dtype,
    check_heads,
    check_int,
    check_optional,
    check_pattern,
)

_PLANNED = AttentionSpec._fields[: AttentionSpec._fields.index("axis_name")]  # shown by `to_dict`


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
    def forward(self) -> tuple[Message, ...]:
        """Messages of the forward pass that no branch sends: lengths of padded sequences, with ``padding="zeros"``."""
        return costs.length_messages(self.spec)

    @property
    def backward(self) -> tuple[Message, ...]:
        """Messages of the backward pass that no branch sends: gradients of attention sinks."""
        return costs.sink_messages(self.spec)

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
        """Smallest stored length at which every branch takes the fast path; None if none below twice this one does."""
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
            "forward": [m._asdict() for m in self.forward],
            "backward": [m._asdict() for m in self.backward],
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
    branches = plan_branches(spec)
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
    """Returns hits, misses, number of entries and size in bytes of the pattern cache, which holds a plan per signature.

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
    has_sinks: bool = False,
    head_shards: int = 1,
    device: str = "tpu",
    inner_devices: int | None = None,
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
        strategy: How branches share segments between devices, see `Ring`.
        memory_budget: Bytes available on each device for attention and its gradient, or None for no limit.
        has_segment_ids: Whether segment ids are sent with the keys.
        has_sinks: Whether there are `sink_logits`, whose gradients devices add.
        head_shards: Number of devices that share the heads.
        device: The device whose speed decides between strategies and whose memory `memory_budget` limits: ``"v5e"``,
            ``"v5p"``, ``"v6e"``, ``"a100"``, ``"h100"``, ``"b200"`` or ``"cpu"`` (simulated devices); ``"tpu"`` and
            ``"cuda"`` mean ``"v5p"`` and ``"h100"``. A `Ring` takes it from the devices of its mesh.
        inner_devices: Number of devices on the inner mesh axis, for a ring over several axes, such as the devices of a
            machine; None for a ring over one axis.

    Returns:
        The plan.

    Raises:
        ValueError: If a size is below 1, `num_heads` is not a multiple of `num_kv_heads`, the key/value heads do not
            divide evenly over `head_shards`, `stored_length` is below `seq_len` or not a multiple of the number of
            chunks, `layout`, `strategy`, `dtype` or `device` is unknown, `inner_devices` does not divide `ring_size`,
            the heads do not allow `strategy`, or no strategy fits `memory_budget`.
        NotImplementedError: If a pattern with ``heads="split"`` is combined with `head_shards` above 1.

    Example:
        >>> import ringjax as rj
        >>> pattern = rj.DilationPattern((2048, 65536), (1, 16))
        >>> p = rj.plan(pattern, seq_len=65536, num_heads=8, head_dim=64, ring_size=4)
        >>> [b.where for b in p.branches]
        ['local', 'all_to_all']
    """
    check_pattern(pattern)
    for name, flag in {"is_causal": is_causal, "has_segment_ids": has_segment_ids, "has_sinks": has_sinks}.items():
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
    inner = check_optional(check_int, "inner_devices", inner_devices)
    if inner is not None and ring_size % inner:
        raise ValueError(f"`inner_devices` must divide `ring_size`, got {inner} and {ring_size}.")
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
        has_sinks=has_sinks,
        head_shards=head_shards,
        device=device_named(device).name,
        inner_devices=inner,
    )
    return checked_plan(spec)


def checked_plan(spec: AttentionSpec) -> Plan:
    """Returns the plan for a spec.

    Raises:
        ValueError: If the memory budget is too small for every strategy that the spec allows.
        NotImplementedError: If heads are sharded in a pattern with ``heads="split"``.
    """
    if spec.pattern.heads == "split" and spec.head_shards > 1:
        raise NotImplementedError(
            '`heads="split"` does not support heads sharded over a mesh axis: replicate them, or use `heads="all"`.'
        )
    made = make_plan(spec)
    budget = spec.memory_budget
    needed = lambda plan: plan.memory(spec.platform).gradient  # noqa: E731
    if budget is not None and needed(made) > budget:
        # gradients rotate in one direction and nothing is gathered; if that is not enough, no heads are exchanged
        tight = spec._replace(saves_memory=True)
        strategies = ("auto", "ring") if spec.strategy == "auto" else (spec.strategy,)
        allowed = {name: make_plan(tight._replace(strategy=name)) for name in strategies}
        for smaller in allowed.values():
            if needed(smaller) <= budget:
                return dataclasses.replace(smaller, spec=spec)
        least = min(allowed, key=lambda name: needed(allowed[name]))
        others = "" if "ring" in allowed else "strategy='auto', "
        raise ValueError(
            f"`memory_budget` must be at least {needed(allowed[least])} bytes per device for this attention and its "
            f"gradient on {spec.platform} on a ring of {spec.ring_size} with strategy={least!r}, got {budget}; "
            f"{others}a larger ring, a smaller batch or heads sharded over `head_axis` may need less."
        )
    return made
