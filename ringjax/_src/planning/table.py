"""Plans as human-readable tables."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ringjax._src.planning.branch_plan import BranchPlan
from ringjax._src.planning.plan import Plan

WIDTH = 120
_COLUMNS = ("branch", "where", "devices", "messages", "rows", "sent fwd", "sent bwd", "bwd moves", "flops", "balance")


def table_text(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    num_left: int = 1,
    *,
    left: Sequence[str] = (),
    caption: str | None = None,
    total: Sequence[str] | None = None,
) -> str:
    """Returns a table as text, at most 120 columns wide; the first `num_left` columns and `left` are left-justified."""
    options: dict[str, Any] = {"title_justify": "left", "title_style": "", "caption_justify": "left"}
    table = Table(title=title, caption=caption, caption_style="", **options)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < num_left or name in left else "right")
    for row in rows:
        table.add_row(*row)
    if total is not None:
        table.add_section()
        table.add_row(*total)
    out = io.StringIO()
    # cells may contain user input, which is not markup
    plain: dict[str, Any] = {"color_system": None, "force_jupyter": False, "markup": False, "emoji": False}
    Console(file=out, width=WIDTH, highlight=False, **plain).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def plan_table(plan: Plan, *, has_caption: bool = True) -> str:
    """Formats a plan as a table, with notes on memory and slow branches in the caption."""
    total = None
    if len(plan.branches) > 1:
        sent = [sum(b.sent(b.forward) for b in plan.branches), sum(b.sent(b.backward) for b in plan.branches)]
        work = count_text(max(plan.flops)), f"{plan.balance:.2f}"
        total = ("all", "", str(plan.spec.ring_size), "", "", *map(bytes_text, sent), "", *work)
    return table_text(
        _title(plan),
        _COLUMNS,
        map(_row, plan.branches),
        num_left=2,
        left=("bwd moves",),
        caption=_caption(plan) if has_caption else None,
        total=total,
    )


def _title(plan: Plan) -> str:
    spec = plan.spec
    heads = f"{spec.kv_heads * spec.q_per_kv} heads" + (f" ({spec.kv_heads} key/value)" if spec.q_per_kv > 1 else "")
    causal = "causal" if spec.is_causal else "not causal"
    padded = "" if spec.stored_length == spec.seq_len else f" (stored as {spec.stored_length:,})"
    return (
        f"{spec.seq_len:,} tokens{padded}, batch {spec.batch}, {heads} of {spec.head_dim}, {spec.dtype}, {causal}, "
        f"{spec.layout} over {spec.ring_size} device{'s' if spec.ring_size > 1 else ''}"
    )


def _caption(plan: Plan) -> str:
    lines = [
        f"Memory per device, estimated: {bytes_text(plan.forward_memory)} forward, "
        f"{bytes_text(plan.gradient_memory)} with gradient. FLOPs: forward, busiest device.",
    ]
    for branch in plan.branches:
        used = len(set(branch.branch.offsets))
        if branch.branch.num_heads and used < branch.rate:
            lines.append(f"{branch.segment_length}/{branch.rate}: the heads use {used} of {branch.rate} residues.")
        if branch.advice and not branch.exchange:
            name = f"{branch.segment_length}/{branch.rate}"
            lines.append(f"{name} is computed by position, which is slower; for the fast path, {branch.advice}.")
    reasons = {reason: target for b in plan.branches for target, reason in b.kernels.items() if reason != "pallas"}
    for reason, target in reasons.items():
        names = [f"{b.segment_length}/{b.rate}" for b in plan.branches if b.kernels[target] == reason]
        lines.append(f"On {target}, plain XLA computes {', '.join(names)}: {reason}.")
    if any(branch.advice and not branch.exchange for branch in plan.branches) and plan.aligned_length:
        length = plan.aligned_length
        lines.append(
            f"All branches take the fast path at a stored length of {length:,}: to_layout(..., length={length})."
        )
    ways = {branch.where for branch in plan.branches} - {"local"}
    if ways == {"all_to_all"}:
        lines.append('Best layout: "contiguous". Whole segments are exchanged, so tokens stay in order.')
    elif ways and plan.spec.is_causal:
        lines.append('Best layout: "zigzag". It balances the causal work of branches that rotate or gather keys.')
    return "\n".join(lines)


def _row(branch: BranchPlan) -> tuple[str, ...]:
    moves = {"local": "", "all_to_all": "all"}.get(branch.where, branch.moves) + " <>" * (branch.directions == 2)
    pieces = f" x {branch.pieces}" if branch.pieces > 1 else ""
    return (
        f"{branch.segment_length}/{branch.rate}",
        branch.where + _detail(branch),
        str(branch.ring_devices),
        f"{_number(branch)}{pieces}" if branch.where != "local" else "",
        "" if branch.where == "local" else f"{branch.num_rows // branch.pieces:,}",
        bytes_text(branch.sent(branch.forward)),
        bytes_text(branch.sent(branch.backward)),
        moves,
        count_text(max(branch.flops)),
        f"{branch.balance:.2f}",
    )


def _detail(branch: BranchPlan) -> str:
    """Returns what is special about how a branch runs."""
    if branch.exchange == "dense":
        return " (dense)"
    if branch.where == "all_to_all_ring":
        return f" ({branch.exchange_devices} x {branch.ring_devices // branch.exchange_devices})"
    return "" if branch.is_aligned or branch.exchange else " (by position)"


def _number(branch: BranchPlan) -> int:
    """Returns the number of messages of a piece that follow one another in the forward pass: hops and exchanges."""
    return branch.hops + (2 if branch.exchange else 0 if branch.hops else 1)


def bytes_text(number: float) -> str:
    """Formats a number of bytes with binary prefixes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def count_text(number: float) -> str:
    """Formats a large number with decimal prefixes."""
    for unit in ("", "K", "M", "G", "T"):
        if number < 1000:
            return f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}P"
