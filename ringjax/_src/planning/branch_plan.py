"""Plans of single branches: the ways to share a segment between devices, and the choice between them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple, NoReturn

import numpy as np

from ringjax._src.comm.devices import device_named
from ringjax._src.comm.head_exchange import HeadParts, head_parts
from ringjax._src.comm.layout import layout_named
from ringjax._src.kernels.dispatch import BACKENDS, TARGETS
from ringjax._src.kernels.interface import Case
from ringjax._src.pattern import Branch
from ringjax._src.planning import costs, geometry
from ringjax._src.planning.costs import Group, Message, Moves
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.rows.selection import RowSelection

BACKWARD = 2.5  # flops of the backward pass per flop of the forward pass
Exchange = Literal["", "rows", "dense"]
_LATENCY_BYTES = 256 * 1024  # a hop of fewer bytes takes about as long as an empty one
_LONG_MESSAGE = 2**19  # bytes; cutting longer messages costs no time


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchPlan:
    """Execution plan of one branch.

    Attributes:
        segment_length: Segment length, clamped to the stored sequence.
        rate: Dilation rate.
        where: ``"local"`` if no device needs keys of other devices; ``"ring"`` if keys (or queries) rotate;
            ``"all_gather"`` if keys are gathered once; ``"all_to_all"`` if devices exchange heads;
            ``"all_to_all_ring"`` if teams of devices exchange heads and keys rotate between teams.
        ring_devices: Number of devices that share a segment.
        exchange_devices: Number of neighboring devices that exchange heads, or 1.
        exchange: What is exchanged: ``"rows"`` that the branch selects; ``"dense"`` arrays, once for all such branches,
            whose messages are those of the first; or an empty string.
        is_aligned: Whether all chunks select the same rows in this branch, which is the fast path.
        advice: How to make the branch aligned, or an empty string.
        num_rows: Number of rows selected on a device, summed over its heads, per batch entry.
        pieces: Number of pieces in which the heads are sent, one after the other. Large messages are split to save
            memory.
        moves: What rotates in the backward pass.
        directions: In how many directions it rotates on a ring; 1 without hops.
        forward: Messages of the forward pass.
        backward: Messages of the backward pass.
        spec: The attention call that was planned.
        branch: Segment length, rate and heads of the branch.
        selections: The rows that a device selects: whole segments and shorter last segment of a local branch (or of the
            heads of a device, after a dense exchange); or the chunks of a device and, if rows are exchanged, those of a
            team.

    Example:
        >>> import ringjax as rj
        >>> pattern = rj.DilationPattern((64,), (4,))
        >>> branch = rj.plan(pattern, seq_len=64, num_heads=4, head_dim=8, ring_size=2, is_causal=True).branches[0]
        >>> branch.where, branch.ring_devices, branch.num_rows, branch.balance
        ('all_to_all', 2, 32, 1.0)
    """

    segment_length: int
    rate: int
    where: str
    ring_devices: int = 1
    exchange_devices: int = 1
    exchange: Exchange = ""
    is_aligned: bool = True
    advice: str = ""
    num_rows: int
    pieces: int = 1
    moves: Moves = "keys"
    directions: int = 1
    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()
    spec: AttentionSpec = dataclasses.field(repr=False)
    branch: Branch = dataclasses.field(repr=False)
    selections: tuple[RowSelection, ...] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def flops(self) -> tuple[float, ...]:
        """FLOPs of each device in the forward pass."""
        spec, layout = self.spec, layout_named(self.spec.layout)
        pairs = costs.pairs_per_device(self.branch, layout, spec.ring_size, spec.stored_length, spec.is_causal)
        if self.exchange:
            pairs = self._exchanged(pairs)
        scale = 4.0 * spec.batch * spec.head_dim * spec.q_per_kv / spec.head_shards
        return tuple((scale * pairs.sum(axis=1)).tolist())

    def _exchanged(self, pairs: np.ndarray) -> np.ndarray:
        """Returns the pairs of each device after an exchange, (devices, 1), given those by device and head."""
        if self.exchange == "rows":
            pairs = pairs[:, self.selections[0].heads - self.branch.first_head]
        kv, query = self.group.parts
        shards = self.spec.head_shards * self.pieces
        heads = pairs.shape[1] // (shards * kv)
        by_part = pairs.reshape(-1, self.exchange_devices, shards, kv, heads).sum(axis=(1, 2, 4))
        return np.repeat(by_part / query, query, axis=1).reshape(-1, 1)

    @property
    def group(self) -> Group:
        """The devices that share a segment."""
        if not self.exchange:
            return Group(self.ring_devices)
        rows = self.selections[0]
        heads = (self.spec.kv_heads if self.exchange == "dense" else len(rows.heads)) // self.spec.head_shards
        parts = head_parts(self.exchange_devices, heads // self.pieces, self.spec.q_per_kv)
        assert parts is not None
        return Group(self.ring_devices, self.exchange_devices, parts)

    @property
    def attended(self) -> tuple[RowSelection, ...]:
        """The selections whose rows attend to each other."""
        return self.selections[1:] if self.exchange == "rows" else self.selections

    @property
    def hops(self) -> int:
        """Number of rounds in which keys rotate in the forward pass, in both directions at once."""
        return self.ring_devices // self.exchange_devices // 2 if self.where in ("ring", "all_to_all_ring") else 0

    @property
    def balance(self) -> float:
        """FLOPs of the busiest device divided by the mean."""
        return float(max(self.flops) / np.mean(self.flops)) if any(self.flops) else 1.0

    @property
    def kernels(self) -> dict[str, str]:
        """For each target, ``"pallas"`` or the reason why plain XLA computes (part of) the branch.

        Assumes GPUs of compute capability 8.0 or later, default block sizes and segment ids that fit int32.
        """
        spec, q_per_kv = self.spec, self.spec.q_per_kv // self.group.parts.query
        cases = [Case(spec.dtype, spec.head_dim, rows.num_rows, q_per_kv) for rows in self.attended]
        usual = "pallas" if cases else "there is nothing to compute"
        found: dict[str, str] = {}
        for target in TARGETS:
            limits = BACKENDS[target].limits
            assert limits is not None
            found[target] = next(filter(None, (limits.unsupported(target, case) for case in cases)), usual)
        return found

    def sent(self, messages: tuple[Message, ...]) -> int:
        """Returns the number of bytes that each device sends for these messages."""
        return sum(m.sent for m in messages)

    @property
    def seconds(self) -> float:
        """Estimated time of forward and backward pass on the device of the spec, by which strategies are compared."""
        work = self.work_seconds
        passes = (self.forward, work), (self.backward, BACKWARD * work)
        return sum(
            costs.pass_seconds(self.spec, messages, self.exchange_devices, seconds) for messages, seconds in passes
        )

    @functools.cached_property
    def work_seconds(self) -> float:
        """Estimated time of computation in the forward pass."""
        device = device_named(self.spec.device)
        flops = sum(self.flops) if device.shares_cores else max(self.flops)
        rows = max((x.num_rows for x in self.attended), default=1)
        return flops / device.flops(self.spec.dtype) * (1 + device.half_rows / rows)


def plan_branches(spec: AttentionSpec) -> tuple[BranchPlan, ...]:
    """Returns the plans of all branches of a call."""
    branches = tuple(_branch_plan(spec, *numbered) for numbered in enumerate(geometry.branches_of(spec)))
    return _with_dense_exchange(spec, branches)


def _branch_plan(spec: AttentionSpec, number: int, branch: Branch) -> BranchPlan:
    """Plans a branch in the fastest way that its strategy and heads allow, or with less memory if the spec says so."""
    if geometry.is_local(spec, branch) or not any(branch.rows(branch.segment_length)):
        selections = geometry.local_selections(spec, number, branch)
        num_rows = sum(int(x.counts.sum()) * x.chunks for x in selections) // spec.head_shards
        return BranchPlan(
            segment_length=branch.segment_length,
            rate=branch.rate,
            where="local",
            num_rows=num_rows,
            spec=spec,
            branch=branch,
            selections=selections,
        )
    shared = _SharedRows(spec, number, branch, *geometry.shared_selection(spec, number, branch))
    ways = shared.ways()
    return ways[0] if len(ways) == 1 else min(ways, key=lambda way: way.seconds)


class _SharedRows(NamedTuple):
    """The rows of a branch whose segments several devices share, and the ways to share them."""

    spec: AttentionSpec
    number: int
    branch: Branch
    selection: RowSelection
    devices: int

    @property
    def heads(self) -> int:
        """Key/value heads of a device that run the branch."""
        return len(self.selection.heads) // self.spec.head_shards

    @property
    def num_rows(self) -> int:
        """Selected rows of a device, over its heads."""
        return self.heads * self.selection.chunks * self.selection.num_rows

    def ways(self) -> list[BranchPlan]:
        """Returns the plans that the strategy allows.

        Raises:
            ValueError: If the strategy is forced and the heads do not allow it.
        """
        strategy = self.spec.strategy
        if strategy not in ("auto", "all_to_all", "all_to_all_ring"):
            return [self.way(strategy)]
        devices = self._exchange_group
        found = [
            self.way("all_to_all" if size == devices else "all_to_all_ring", Group(devices, size, parts))
            for size, parts in self._exchanges()
        ]
        if strategy == "auto":
            return [self.way("ring"), *([self.way("all_gather")] if self._may_gather() else []), *found]
        whole, teams = ([x for x in found if (x.where == name)] for name in ("all_to_all", "all_to_all_ring"))
        possible = whole if strategy == "all_to_all" else teams or whole  # a team may hold whole segments
        if not possible:
            self._refuse()
        return possible

    def way(self, where: str, group: Group | None = None) -> BranchPlan:
        """Plans the branch in one way."""
        spec = self.spec
        selections: tuple[RowSelection, ...] = (self.selection,)
        group = Group(self.devices) if group is None else group
        if group.exchange > 1:
            team = geometry.team_spec(spec, self.branch, group.exchange)._replace(
                q_per_kv=spec.q_per_kv // group.parts.query
            )
            selections += geometry.shared_selection(team, self.number, self.branch, spec.query_block_rows)[:1]
        unmet = geometry.unmet_segment_rules(spec, self.branch) + geometry.unmet_rate_rule(spec, self.branch)
        pieces = self._pieces(group)
        rows = spec.batch * self.num_rows // pieces
        sharing, moves = costs.SHARING[where], costs.cheapest_moves(spec, rows, group, where)

        def backward(directions: int) -> tuple[Message, ...]:
            given = group._replace(directions=directions)
            return _repeated(sharing.backward(spec, rows, given, moves), pieces)

        one_way = BranchPlan(
            segment_length=self.branch.segment_length,
            rate=self.branch.rate,
            where=where,
            ring_devices=group.devices,
            exchange_devices=group.exchange,
            exchange="rows" if group.exchange > 1 else "",
            is_aligned=self.selection.is_aligned,
            advice="; ".join(unmet),
            num_rows=self.num_rows,
            pieces=pieces,
            moves=moves,
            forward=_repeated(sharing.forward(spec, rows, group), pieces),
            backward=backward(1),
            spec=spec,
            branch=self.branch,
            selections=selections,
        )
        if not sharing.is_two_way:
            return one_way
        work = lambda: BACKWARD * one_way.work_seconds / pieces  # noqa: E731
        directions = costs.backward_directions(spec, one_way.backward, group, work)
        return one_way if directions == 1 else dataclasses.replace(one_way, directions=2, backward=backward(2))

    @property
    def _exchange_group(self) -> int:
        """Number of devices whose rows an exchange brings together: all, if the chunks select different rows."""
        return self.devices if self.selection.is_aligned else self.spec.ring_size

    def _exchanges(self) -> list[tuple[int, HeadParts]]:
        """Returns the sizes of teams that can exchange heads, the largest first.

        All devices that share a segment, or, with a ring of teams, the most for which the heads allow it. On a ring
        over several mesh axes, teams lie on the inner one.
        """
        devices = self._exchange_group
        sizes = [size for size in range(devices, 1, -1) if devices % size == 0]
        if not self.selection.is_aligned:
            sizes = sizes[:1]
        if self.spec.inner_devices is not None:
            sizes = [size for size in sizes if size == devices or self.spec.inner_devices % size == 0]
        parts = [(size, head_parts(size, self.heads, self.spec.q_per_kv)) for size in sizes]
        possible = [(size, part) for size, part in parts if part is not None]
        whole = [x for x in possible if x[0] == devices]
        return whole + [x for x in possible if x[0] < devices][:1]

    def _refuse(self) -> NoReturn:
        spec, name = self.spec, f"{self.branch.segment_length}/{self.branch.rate}"
        teams = "all" if spec.strategy == "all_to_all" or not self.selection.is_aligned else "teams"
        others = "'all_to_all_ring', 'ring' or 'auto'" if self._exchanges() else "'ring' or 'auto'"
        query_heads = f"{spec.q_per_kv} query head{'s' if spec.q_per_kv > 1 else ''}"
        raise ValueError(
            f"`strategy={spec.strategy!r}` must share the heads of branch {name} evenly among {teams} of the "
            f"{self._exchange_group} devices that share a segment, got {self.heads} key/value heads with "
            f"{query_heads} each on a device: use {others}, or a ring whose size divides the number of "
            "heads."
        )

    def _may_gather(self) -> bool:
        """Returns whether messages are so short that a gather may be the fastest way, and memory is not short."""
        size = costs.row_bytes(self.spec, self.spec.batch * self.num_rows)
        return self.devices > 2 and size.keys <= _LATENCY_BYTES and not self.spec.saves_memory

    def _pieces(self, group: Group) -> int:
        """Returns the number of equal pieces in which the heads are sent: as many as keep messages long.

        The heads of a piece must be shared by the same number of devices as all heads.
        """
        size = costs.row_bytes(self.spec, self.spec.batch * self.num_rows).keys
        fits = [
            n
            for n in range(1, self.heads + 1)
            if self.heads % n == 0 and (self.heads // n) % group.parts.kv == 0 and size // n >= _LONG_MESSAGE
        ]
        return max(fits, default=1)


def _repeated(messages: tuple[Message, ...], pieces: int) -> tuple[Message, ...]:
    return tuple(m._replace(number=m.number * pieces) for m in messages)


def _with_dense_exchange(spec: AttentionSpec, branches: tuple[BranchPlan, ...]) -> tuple[BranchPlan, ...]:
    """Replaces the exchanges of rows of unaligned branches by one exchange of whole arrays, if that sends less."""
    unaligned = [b for b in branches if b.exchange and not b.is_aligned]
    parts = head_parts(spec.ring_size, spec.local_kv_heads, spec.q_per_kv)
    if not unaligned or parts is None or spec.pattern.heads == "split":
        return branches
    forward, backward = costs.dense_exchange(spec, parts)
    if sum(m.sent for m in forward + backward) > sum(b.sent(b.forward + b.backward) for b in unaligned):
        return branches
    one = geometry.exchanged_spec(spec, parts)
    replaced = []
    for number, branch in enumerate(branches):
        if branch not in unaligned:
            replaced.append(branch)
            continue
        selections = geometry.local_selections(one, number, branch.branch)
        replaced.append(
            dataclasses.replace(
                branch, exchange="dense", pieces=1, forward=forward, backward=backward, selections=selections
            )
        )
        forward = backward = ()
    return tuple(replaced)
