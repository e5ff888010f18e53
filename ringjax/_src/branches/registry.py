"""Makes the branches of an attention call from its plan."""

from __future__ import annotations

from ringjax._src.branches.all_gather import AllGatherBranch
from ringjax._src.branches.all_to_all import AllToAllBranch, DenseAllToAllBranch, head_exchange
from ringjax._src.branches.extra_keys import first_head
from ringjax._src.branches.local import LocalBranch
from ringjax._src.branches.protocol import DeviceBranch, Shard
from ringjax._src.branches.ring import RingBranch
from ringjax._src.branches.shared import SharedBranch
from ringjax._src.comm.ring_comm import STRATEGIES, AxisName, StrategyName
from ringjax._src.planning import costs, geometry
from ringjax._src.planning.branch_plan import BranchPlan
from ringjax._src.planning.costs import SHARING, Sharing
from ringjax._src.planning.plan import checked_plan
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.rows.selection import RowSelection

SHARED_BRANCHES: dict[str, type[SharedBranch]] = {}


def add_strategy(name: StrategyName, branch: type[SharedBranch], sharing: Sharing) -> None:
    """Adds a way to share segments, for `Ring(strategy=name)`.

    Args:
        name: Its name.
        branch: How a device executes it.
        sharing: Which messages it sends, for the planner.

    Raises:
        ValueError: If there is a strategy with this name.
    """
    if name in STRATEGIES:
        raise ValueError(f"`name` must be new, got {name!r}.")
    STRATEGIES.append(name)
    SHARED_BRANCHES[name], SHARING[name] = branch, sharing


add_strategy("ring", RingBranch, costs.ROTATION)
add_strategy("all_gather", AllGatherBranch, costs.GATHERING)
add_strategy("all_to_all", AllToAllBranch, costs.EXCHANGE)
add_strategy("all_to_all_ring", AllToAllBranch, costs.EXCHANGE)


def make_branches(spec: AttentionSpec, shard: Shard) -> list[DeviceBranch]:
    """Returns the branches of a call, those that send nothing first: they are computed while others send."""
    plans = [plan for plan in checked_plan(spec).branches if plan.selections]
    local = [plan for plan in plans if plan.where == "local"]
    branches: list[DeviceBranch] = []
    starts_empty = not spec.has_zero_keys and shard.sink is None
    for plan in local:
        selections = tuple(_local_heads(spec, rows) for rows in plan.selections)
        branches.append(LocalBranch(spec, _name(plan), selections, not branches, starts_empty, first_head(spec)))
    dense = [plan for plan in plans if plan.exchange == "dense"]
    if dense:
        branches.append(_dense_branch(spec, dense))
    for plan in plans:
        if plan.where != "local" and plan.exchange != "dense":
            rows = _local_heads(spec, plan.selections[0])
            branches.append(SHARED_BRANCHES[plan.where](spec, _name(plan), plan, rows, shard.seeds))
    return branches


def ordered_axis(spec: AttentionSpec, branches: list[DeviceBranch], others: int = 0) -> AxisName | None:
    """Returns the mesh axis of the ring if several collectives must be ordered, else None.

    Each branch that communicates counts, and this many `others`.
    """
    shared = sum(not isinstance(branch, LocalBranch) for branch in branches)
    return spec.axis_name if shared and shared + others > 1 else None


def _dense_branch(spec: AttentionSpec, plans: list[BranchPlan]) -> DenseAllToAllBranch:
    """Returns the branches that share an exchange of whole arrays, for the heads that this device receives."""
    exchange = head_exchange(spec, spec.ring_size, spec.local_kv_heads)
    num = spec.local_kv_heads // exchange.parts.kv
    first = exchange.kv_part() * num + first_head(spec)
    one = geometry.exchanged_spec(spec, exchange.parts)
    branches: list[LocalBranch] = []
    for plan in plans:
        selections = plan.selections
        if one.head_shards > 1:
            selections = tuple(rows.local_heads(first, num) for rows in selections)
        branches.append(LocalBranch(one, _name(plan), selections, is_first=not branches, first_head=first))
    return DenseAllToAllBranch(spec, "_".join(branch.name for branch in branches), exchange, tuple(branches))


def _local_heads(spec: AttentionSpec, rows: RowSelection) -> RowSelection:
    """Restricts a selection to the heads of this device."""
    if spec.head_axis is None or spec.head_shards == 1:
        return rows
    return rows.local_heads(first_head(spec), spec.local_kv_heads)


def _name(plan: BranchPlan) -> str:
    rows = plan.selections[0]
    return f"{plan.where}{rows.branch}_w{plan.segment_length}_r{plan.rate}"
