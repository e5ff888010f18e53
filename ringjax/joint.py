"""All branches together on what one device holds: one custom VJP for all of them.

Legend: ``B`` batch, ``c`` rows that the device holds (all ``T`` without a ring), ``K`` key/value heads, ``G`` query heads
per key/value head, ``H`` head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ringjax import softmax
from ringjax.block import hops, xla
from ringjax.indices import PartTable
from ringjax.journey import Journey, Shard
from ringjax.layout import layout_named
from ringjax.pattern import DilationPattern
from ringjax.plan import BranchPlan, Plan, Request, StrategyName, checked_plan
from ringjax.ring import AxisName
from ringjax.select import segmented, to_bits
from ringjax.shard import ShardRows
from ringjax.softmax import Partial

Table = TypeVar("Table", PartTable, ShardRows)


@dataclasses.dataclass(frozen=True)
class RingPlace:
    """The ring that a call runs on, as seen from inside `jax.shard_map`."""

    axis_name: AxisName
    axis_size: int
    layout: str
    strategy: StrategyName
    memory_budget: int | None
    head_axis: AxisName | None
    head_shards: int


@dataclasses.dataclass(frozen=True)
class Config:
    """The static side of a call; `ring` is None on one device."""

    pattern: DilationPattern
    is_causal: bool
    scale: float
    ring: RingPlace | None = None
    seq_len: int | None = None  # of the whole sequence, where it is shorter than what is stored

    def plan(self, query: Array, has_ids: bool) -> Plan:
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
        return xla.BlockOptions(batch, length, kv_heads, group, self.is_causal, self.scale, self.divisor)

    @property
    def divisor(self) -> int:
        """Grouped heads share the output out among the branches."""
        return len(self.pattern.segment_lengths) if self.pattern.heads == "grouped" else 1

    def work(self, shard: Shard) -> Work:
        """What is to be done on a shard."""
        branches = self.plan(shard.query, shard.ids is not None).branches
        tables = [self._for_heads(table, shard.query) for branch in branches for table in branch.tables]
        return Work(tables, [self._journey(b, shard.query) for b in branches if b.shard is not None])

    def _journey(self, branch: BranchPlan, query: Array) -> Journey:
        assert self.ring is not None and branch.shard is not None
        return Journey(
            branch,
            self._for_heads(branch.shard, query),
            layout_named(self.ring.layout),
            self.ring.axis_name,
            self.ring.axis_size,
            query.shape[3],
            self.is_causal,
            self.scale,
            self.divisor,
        )

    def _for_heads(self, table: Table, query: Array) -> Table:
        """The table of the heads that this device has."""
        if self.ring is None or self.ring.head_axis is None:
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
def attention(config: Config, query: Array, key: Array, value: Array, ids: Array | None) -> Array:
    """The attention (B, c, K, G, H) of query (B, c, K, G, H) over key and value (B, c, K, H), ids (B, c) or None."""
    return _forward(config, Shard(query, key, value, ids))[0]


def _forward(config: Config, shard: Shard) -> tuple[Array, Array, tuple[Array, ...]]:
    """Output (B, c, K, G, H), joint lse (B, c, K, G) and, for detached mixing, each branch's own rows.

    Keys are sent off first, and the branches that need no others are computed while they travel.
    """
    query, work = shard.query, config.work(shard)
    keeps_rows = config.pattern.mixing == "detached"
    journeys = work.journeys
    keys = [journey.keys(shard) for journey in journeys]
    begun = [journey.circle.begin(cargo) for journey, cargo in zip(journeys, keys, strict=True)]
    merged = softmax.empty_like(jnp.zeros_like(query, dtype=softmax.accumulator(query.dtype)))
    merged, rows = _forward_local(config, work, shard, merged)
    for journey, cargo, first in zip(journeys, keys, begun, strict=True):
        with jax.named_scope(_name("ring", journey.rows)):
            part = journey.forward(journey.queries(shard), cargo, first)
            merged = journey.merge(merged, part)
            rows += [part.out] if keeps_rows else []
    out = (merged.out / config.divisor).astype(query.dtype)
    kept = tuple(checkpoint_name(x.astype(query.dtype), "ringjax_out") for x in rows)
    return checkpoint_name(out, "ringjax_out"), checkpoint_name(merged.lse, "ringjax_lse"), kept


def _forward_local(config: Config, work: Work, shard: Shard, merged: Partial) -> tuple[Partial, list[Array]]:
    shapes = [x.shape for x in merged]
    query = shard.query
    rows: list[Array] = []
    for table in work.tables:
        with jax.named_scope(_name("branch", table)):
            merged, own = xla.forward(
                _segmented(shard, table),
                Partial(*(segmented(x, table) for x in merged)),
                table,
                config.options(query),
                is_first=work.is_first(table),
                keep_rows=config.pattern.mixing == "detached",
            )
            merged = Partial(*(x.reshape(shape) for x, shape in zip(merged, shapes, strict=True)))
            rows += [] if own is None else [own]
    return merged, rows


def _attention_fwd(
    config: Config, query: Array, key: Array, value: Array, ids: Array | None
) -> tuple[Array, Residuals]:
    shard = Shard(query, key, value, ids)
    out, lse, rows = _forward(config, shard)
    return out, (shard, out, lse, rows)


def _attention_bwd(config: Config, residuals: Residuals, dout: Array) -> tuple[Array, Array, Array, None]:
    """The branches on the ring come first, so that their last message travels while the local ones are computed."""
    shard, out, lse, rows = residuals
    query, work = shard.query, config.work(shard)
    journeys = work.journeys
    own_rows = rows[len(rows) - len(journeys) :] if rows else [None] * len(journeys)
    queries, keys, begun = [], [], []
    for journey, own in zip(journeys, own_rows, strict=True):
        queries.append(_journey_queries(journey, shard, out, lse, dout, own))
        keys.append(journey.keys(shard))
        begun.append(journey.circle.begin(journey.cargo(queries[-1], keys[-1])))
    grads = xla.Grads(*(jnp.zeros_like(x, dtype=lse.dtype) for x in shard[:3]))
    found = []
    for journey, *cargo in zip(journeys, queries, keys, begun, strict=True):
        with jax.named_scope(_name("ring_grad", journey.rows)):
            found.append(journey.backward(*cargo))
    grads = _backward_local(config, work, shard, out, lse, dout, grads, rows[: len(rows) - len(journeys)])
    for journey, sums in zip(journeys, found, strict=True):
        grads = xla.Grads(*journey.add(grads, sums))
    dq, dk, dv = (g.astype(query.dtype) for g in grads)
    return dq, dk, dv, None


def _journey_queries(
    journey: Journey, shard: Shard, out: Array, lse: Array, dout: Array, own: Array | None
) -> hops.Queries:
    """The selected queries with their cotangent; delta from the joint output, or from the branch's own rows."""
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1)
    queries = journey.before_backward(shard, dout, lse, delta)
    if own is None:
        return queries
    assert queries.dout is not None
    return queries._replace(delta=jnp.sum(queries.dout.astype(lse.dtype) * own.astype(lse.dtype), axis=-1))


def _backward_local(
    config: Config,
    work: Work,
    shard: Shard,
    out: Array,
    lse: Array,
    dout: Array,
    grads: xla.Grads,
    rows: tuple[Array, ...],
) -> xla.Grads:
    out, dout, rows = to_bits(out), to_bits(dout), tuple(to_bits(x) for x in rows)
    shapes = [x.shape for x in grads]
    query = shard.query
    for number, table in enumerate(work.tables):
        with jax.named_scope(_name("branch_grad", table)):
            grads = xla.backward(
                _segmented(shard, table),
                rows[number] if rows else segmented(out, table),
                segmented(lse, table),
                segmented(dout, table),
                xla.Grads(*(segmented(x, table) for x in grads)),
                table,
                config.options(query),
                is_first=work.is_first(table),
                own_rows=bool(rows),
            )
            grads = xla.Grads(*(x.reshape(shape) for x, shape in zip(grads, shapes, strict=True)))
    return grads


attention.defvjp(_attention_fwd, _attention_bwd)


def _segmented(shard: Shard, table: PartTable) -> xla.Inputs:
    q, k, v = (segmented(to_bits(x), table) for x in shard[:3])
    return xla.Inputs(q, k, v, None if shard.ids is None else segmented(shard.ids, table))


def _name(what: str, table: PartTable | ShardRows) -> str:
    return f"{what}{table.branch}_w{table.segment_length}_r{table.rate}"
