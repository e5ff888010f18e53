"""Makes the branches of an attention call from its plan."""

from __future__ import annotations

from jax import lax

from ringjax._src.branches.all_gather import AllGatherBranch
from ringjax._src.branches.local import LocalBranch
from ringjax._src.branches.protocol import Branch, Shard
from ringjax._src.branches.ring import RingBranch
from ringjax._src.branches.shared import SharedBranch
from ringjax._src.planning.plan import BranchPlan, checked_plan
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.rows.selection import RowSelection

SHARED_BRANCHES: dict[str, type[SharedBranch]] = {"ring": RingBranch, "all_gather": AllGatherBranch}


def make_branches(spec: AttentionSpec, shard: Shard) -> list[Branch]:
    """Returns the branches of a call, those that send nothing first: they are computed while others send."""
    plans = [plan for plan in checked_plan(spec).branches if plan.selections]
    local = [plan for plan in plans if plan.where == "local"]
    branches: list[Branch] = []
    for plan in local:
        parts = tuple(_local_heads(spec, rows) for rows in plan.selections)
        branches.append(LocalBranch(spec, _name(plan), parts, is_first=not branches))
    for plan in plans:
        if plan.where != "local":
            rows = _local_heads(spec, plan.selections[0])
            branches.append(SHARED_BRANCHES[plan.where](spec, _name(plan), plan, rows, shard.seeds))
    return branches


def _local_heads(spec: AttentionSpec, rows: RowSelection) -> RowSelection:
    """Restricts a selection to the heads of this device."""
    if spec.head_axis is None or spec.head_shards == 1:
        return rows
    num = spec.local_kv_heads
    return rows.local_heads(lax.axis_index(spec.head_axis) * num, num)


def _name(plan: BranchPlan) -> str:
    rows = plan.selections[0]
    return f"{plan.where}{rows.branch}_w{plan.segment_length}_r{plan.rate}"
