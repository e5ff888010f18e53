"""All branches together on what one device holds: one custom VJP for all of them.

Legend: ``B`` batch, ``c`` rows that the device holds (all ``T`` without a ring), ``K`` key/value heads, ``G`` query
heads per key/value head, ``H`` head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ringjax._src import dropout
from ringjax._src import online_softmax as softmax
from ringjax._src.branches.ring import Cargo, Journey, Shard
from ringjax._src.comm.layout import layout_named
from ringjax._src.comm.mesh import RingPlace
from ringjax._src.dropout import RowHashes
from ringjax._src.kernels import hops, local, meet, xla
from ringjax._src.kernels.backend import Backend, Case, Kernels, case_of
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.pattern import DilationPattern
from ringjax._src.planning.geometry import Request
from ringjax._src.planning.plan import BranchPlan, Plan, checked_plan
from ringjax._src.rows.indices import PartTable
from ringjax._src.rows.select import segmented, to_bits
from ringjax._src.rows.shard import ShardRows

Table = TypeVar("Table", PartTable, ShardRows)


@dataclasses.dataclass(frozen=True)
class Config:
    """The static side of a call; `ring` is None on one device."""

    pattern: DilationPattern
    is_causal: bool
    scale: float
    backend: Backend
    ring: RingPlace | None = None
    seq_len: int | None = None  # of the whole sequence, where it is shorter than what is stored
    dropout_rate: float = 0.0

    def plan(self, query: Array | jax.ShapeDtypeStruct, has_ids: bool) -> Plan:
        """The plan for a query (B, c, K, G, H)."""
        ring = self.ring or RingPlace("", 1, "contiguous", "ring", None, None, 1)
        batch, length, kv_heads, group, dim = query.shape
        stored = length * ring.axis_size
        return checked_plan(
            Request(
                pattern=self.pattern,
                seq_len=stored if self.seq_len is None else self.seq_len,
                stored_length=stored,
                batch=batch,
                kv_heads=kv_heads * ring.head_shards,
                group=group,
                head_dim=dim,
                ring_size=ring.axis_size,
                layout=ring.layout,
                is_causal=self.is_causal,
                dtype=query.dtype.name,
                strategy=ring.strategy,
                memory_budget=ring.memory_budget,
                has_ids=has_ids,
                head_shards=ring.head_shards,
            )
        )

    def options(self, query: Array) -> xla.BlockOptions:
        """Sizes and options of the local branches."""
        batch, length, kv_heads, group, _ = query.shape
        return xla.BlockOptions(
            batch, length, kv_heads, group, self.is_causal, self.scale, self.divisor, self.dropout_rate
        )

    @property
    def divisor(self) -> int:
        """Grouped heads share the output out among the branches."""
        return len(self.pattern.segment_lengths) if self.pattern.heads == "split" else 1

    def delta(self, dout: Array, out: Array, dtype: jnp.dtype) -> Array:
        """The delta of arrays (..., H)."""
        case = Case(out.dtype.name, out.shape[-1], out.size // out.shape[-1], 1)
        return self.backend.run(
            case,
            (dout, out),
            lambda given: softmax.delta(given[0], given[1], dtype),
            lambda kernels, given: meet.delta(kernels, given[0], given[1], dtype),
        )

    def work(self, shard: Shard) -> Work:
        """What is to be done on a shard."""
        branches = self.plan(shard.query, shard.ids is not None).branches
        tables = [self._for_heads(table, shard.query) for branch in branches for table in branch.tables]
        return Work(tables, [self._journey(b, shard) for b in branches if b.shard is not None])

    def _journey(self, branch: BranchPlan, shard: Shard) -> Journey:
        assert self.ring is not None and branch.shard is not None
        query = shard.query
        return Journey(
            branch,
            self._for_heads(branch.shard, query),
            layout_named(self.ring.layout),
            self.ring.axis_name,
            self.ring.axis_size,
            query.shape[2],
            query.shape[3],
            self.is_causal,
            self.scale,
            self.divisor,
            self.backend,
            shard.seeds,
            self.dropout_rate,
        )

    def _for_heads(self, table: Table, query: Array) -> Table:
        """The table of the heads that this device has."""
        if self.ring is None or self.ring.head_axis is None or self.ring.head_shards == 1:
            return table
        num = query.shape[2]
        return table.for_heads(lax.axis_index(self.ring.head_axis) * num, num)


class Work(NamedTuple):
    """The parts of branches that need no other device, and the branches that do."""

    tables: list[PartTable]
    journeys: list[Journey]

    def is_first(self, table: PartTable) -> bool:
        """Whether nothing was computed before this part: it belongs to the first local branch."""
        return table.branch == self.tables[0].branch


Residuals = tuple[Shard, Array, Array, tuple[Array, ...]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(config: Config, query: Array, key: Array, value: Array, ids: Array | None, seeds: Array | None) -> Array:
    """The attention (B, c, K, G, H) of what the arguments of a `Shard` say."""
    return _forward(config, Shard(query, key, value, ids, seeds))[0]


# Calls outside of `jit` compile once, and layers that are alike are traced once. Inlined, as plain XLA holds more in
# memory of a call.
attention = jax.jit(_attention, static_argnums=(0,), inline=True)


def count_tiles(config: Config, query: Array, key: Array, value: Array, ids: Array | None) -> Array:
    """How many tiles of scores this device computes, counted while it does, in plain XLA."""
    shard = Shard(query, key, value, ids)
    local = sum(xla.tiles(table, config.options(query)) for table in config.work(shard).tables)
    tiles: Array | None = jnp.full_like(query, local, shape=(), dtype=jnp.int32)
    *_, tiles = _forward(config, shard, tiles)
    assert tiles is not None
    return tiles


def _forward(
    config: Config, shard: Shard, tiles: Array | None = None
) -> tuple[Array, Array, tuple[Array, ...], Array | None]:
    """Output (B, c, K, G, H), joint lse (B, c, K, G), for detached mixing each branch's own rows, and `tiles` counted.

    Keys that travel in one piece are sent off first, and the local branches are computed while they travel.
    """
    query, work = shard.query, config.work(shard)
    views = {journey: journey.view_shard(shard) for journey in work.journeys}
    keys = {journey: journey.keys(views[journey]) for journey in work.journeys if journey.branch.pieces == 1}
    begun = {journey: journey.circle.begin(cargo) for journey, cargo in keys.items()}
    merged = softmax.empty_like(jnp.zeros_like(query, dtype=softmax.accumulator(query.dtype)))
    shapes = [x.shape for x in merged]
    merged, rows = _forward_local(config, work, shard, merged)
    for journey in work.journeys:
        with jax.named_scope(_name("ring", journey.rows)):
            merged = PartialSoftmax(*journey.view(*merged))
            if journey in keys:
                part, tiles = journey.forward(journey.queries(views[journey]), keys[journey], begun[journey], tiles)
                merged, own = journey.merge(merged, part), part.out
            else:
                (merged, tiles), own = _forward_pieces(journey, views[journey], merged, tiles)
            merged = PartialSoftmax(*(x.reshape(shape) for x, shape in zip(merged, shapes, strict=True)))
        rows.append(own)
    out = (merged.out / config.divisor).astype(query.dtype)
    kept = rows if config.pattern.mixing == "detached" else []
    named = tuple(checkpoint_name(x.astype(query.dtype), "ringjax_out") for x in kept)
    return checkpoint_name(out, "ringjax_out"), checkpoint_name(merged.lse, "ringjax_lse"), named, tiles


def _forward_pieces(
    journey: Journey, views: Shard, merged: PartialSoftmax, tiles: Array | None
) -> tuple[tuple[PartialSoftmax, Array | None], Array]:
    """A branch whose heads travel one part after the other; its own rows have the parts in front."""

    def step(
        carry: tuple[PartialSoftmax, Array | None], index: Array
    ) -> tuple[tuple[PartialSoftmax, Array | None], Array]:
        merged, tiles = carry
        piece = journey.piece(index)
        keys = piece.keys(views)
        part, tiles = piece.forward(piece.queries(views), keys, piece.circle.begin(keys), tiles)
        return (piece.merge(merged, part), tiles), part.out

    return lax.scan(step, (merged, tiles), jnp.arange(journey.branch.pieces, dtype=jnp.int32))


def _forward_local(
    config: Config, work: Work, shard: Shard, merged: PartialSoftmax
) -> tuple[PartialSoftmax, list[Array]]:
    rows: list[Array] = []
    options, keep = config.options(shard.query), config.pattern.mixing == "detached"
    for table in work.tables:

        def by_xla(merged: PartialSoftmax, table: PartTable = table) -> tuple[PartialSoftmax, Array | None]:
            views = PartialSoftmax(*(segmented(x, table) for x in merged))
            is_first = work.is_first(table)
            new, own = xla.forward(
                _segmented(config, shard, table), views, table, options, is_first=is_first, keep_rows=keep
            )
            return PartialSoftmax(*(x.reshape(y.shape) for x, y in zip(new, merged, strict=True))), own

        def by_kernel(
            kernels: Kernels, merged: PartialSoftmax, table: PartTable = table
        ) -> tuple[PartialSoftmax, Array | None]:
            return local.forward(kernels, local.Dense(*shard[:4]), merged, table, options, keep_rows=keep)

        with jax.named_scope(_name("branch", table)):
            merged, own = config.backend.run(_case(shard, table), merged, by_xla, by_kernel)
            rows += [] if own is None else [own]
    return merged, rows


def _attention_fwd(
    config: Config, query: Array, key: Array, value: Array, ids: Array | None, seeds: Array | None
) -> tuple[Array, Residuals]:
    shard = Shard(query, key, value, ids, seeds)
    out, lse, rows, _ = _forward(config, shard)
    return out, (shard, out, lse, rows)


def _attention_bwd(config: Config, residuals: Residuals, dout: Array) -> tuple[Array, Array, Array, None, None]:
    """Branches that travel in one piece come first: their last message travels while the local ones are computed."""
    shard, out, lse, rows = residuals
    work = config.work(shard)
    local_rows, ring_rows = rows[: len(rows) - len(work.journeys)], rows[len(rows) - len(work.journeys) :]
    own = dict(zip(work.journeys, ring_rows, strict=True)) if rows else {}
    delta = config.delta(dout, out, lse.dtype)
    views = {j: _Views(j.view_shard(shard), *j.view(dout, lse, delta)) for j in work.journeys}
    whole = [journey for journey in work.journeys if journey.branch.pieces == 1]
    sent = {journey: _send(config, journey, views[journey], own.get(journey)) for journey in whole}
    found = {journey: journey.backward(*sent[journey]) for journey in whole}
    grads = xla.Grads(*(jnp.zeros_like(x, dtype=lse.dtype) for x in shard[:3]))
    shapes = [x.shape for x in grads]
    grads = _backward_local(config, work, shard, _Joint(out, lse, dout, delta), grads, local_rows)
    for journey in work.journeys:
        with jax.named_scope(_name("ring_grad", journey.rows)):
            grads = xla.Grads(*journey.view(*grads))
            if journey in found:
                grads = xla.Grads(*journey.add(grads, found[journey]))
            else:
                grads = _backward_pieces(config, journey, views[journey], grads, own.get(journey))
            grads = xla.Grads(*(x.reshape(shape) for x, shape in zip(grads, shapes, strict=True)))
    dq, dk, dv = (g.astype(shard.query.dtype) for g in grads)
    return dq, dk, dv, None, None


class _Joint(NamedTuple):
    """What came out of all branches, with its cotangent: out and dout (B, c, K, G, H), lse and delta (B, c, K, G)."""

    out: Array
    lse: Array
    dout: Array
    delta: Array


class _Views(NamedTuple):
    """What a journey takes rows from in the backward pass."""

    shard: Shard
    dout: Array
    lse: Array
    delta: Array


def _backward_pieces(config: Config, journey: Journey, views: _Views, grads: xla.Grads, own: Array | None) -> xla.Grads:
    def step(grads: xla.Grads, index: Array) -> tuple[xla.Grads, None]:
        piece = journey.piece(index)
        rows = None if own is None else lax.dynamic_index_in_dim(own, index, keepdims=False)
        return xla.Grads(*piece.add(grads, piece.backward(*_send(config, piece, views, rows)))), None

    return lax.scan(step, grads, jnp.arange(journey.branch.pieces, dtype=jnp.int32))[0]


def _send(
    config: Config, journey: Journey, views: _Views, own: Array | None
) -> tuple[hops.Queries, hops.KeyRows, Cargo]:
    """The selected queries with their cotangent, the keys, and what of them was sent off.

    Where the branch's `own` output rows are given, delta is theirs and not that of the joint output.
    """
    queries, keys = journey.before_backward(*views), journey.keys(views.shard)
    if own is not None:
        assert queries.dout is not None
        queries = queries._replace(delta=config.delta(queries.dout, own, views.lse.dtype))
    return queries, keys, journey.circle.begin(journey.cargo(queries, keys))


def _backward_local(
    config: Config,
    work: Work,
    shard: Shard,
    joint: _Joint,
    grads: xla.Grads,
    rows: tuple[Array, ...],
) -> xla.Grads:
    options = config.options(shard.query)
    for number, table in enumerate(work.tables):
        own = rows[number] if rows else None

        def by_xla(grads: xla.Grads, table: PartTable = table, own: Array | None = own) -> xla.Grads:
            out, lse, dout = (segmented(to_bits(x), table) for x in joint[:3])
            views = xla.Grads(*(segmented(x, table) for x in grads))
            out = out if own is None else to_bits(own)
            is_first = work.is_first(table)
            given = _segmented(config, shard, table), out, lse, dout, views, table, options
            sums = xla.backward(*given, is_first=is_first, own_rows=own is not None)
            return xla.Grads(*(x.reshape(y.shape) for x, y in zip(sums, grads, strict=True)))

        def by_kernel(
            kernels: Kernels, grads: xla.Grads, table: PartTable = table, own: Array | None = own
        ) -> xla.Grads:
            came_out = joint.lse, joint.dout, joint.delta
            return local.backward(kernels, local.Dense(*shard[:4]), own, *came_out, grads, table, options)

        with jax.named_scope(_name("branch_grad", table)):
            grads = config.backend.run(_case(shard, table), grads, by_xla, by_kernel)
    return grads


def _case(shard: Shard, table: PartTable) -> Case:
    return case_of(shard.query, table.rows, shard.query.shape[3], shard.ids)


_attention.defvjp(_attention_fwd, _attention_bwd)


def _segmented(config: Config, shard: Shard, table: PartTable) -> xla.Inputs:
    q, k, v = (segmented(to_bits(x), table) for x in (shard.query, shard.key, shard.value))
    ids = None if shard.ids is None else segmented(shard.ids, table)
    return xla.Inputs(q, k, v, ids, _segmented_stamps(config, shard, table))


def _segmented_stamps(config: Config, shard: Shard, table: PartTable) -> RowHashes | None:
    if shard.seeds is None:
        return None
    batch, length = shard.query.shape[:2]
    positions = jnp.arange(length, dtype=jnp.int32) if config.ring is None else config.ring.positions(length)
    queries = dropout.query_hashes(shard.seeds[:, None], positions[None, :, None, None], table.branch)
    keys = jnp.broadcast_to(dropout.key_hashes(positions), (batch, length))
    return RowHashes(segmented(queries, table), segmented(keys, table))


def _name(what: str, table: PartTable | ShardRows) -> str:
    return f"{what}{table.branch}_w{table.segment_length}_r{table.rate}"
