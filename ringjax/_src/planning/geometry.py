"""How the segments of a pattern lie over the chunks of a ring."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ringjax._src.comm.layout import layout_named
from ringjax._src.comm.ring_comm import StrategyName
from ringjax._src.online_softmax import accumulator
from ringjax._src.pattern import Branch, DilationPattern, selected_before
from ringjax._src.rows.indices import frozen
from ringjax._src.rows.shard import ShardRows
from ringjax._src.rows.sizes import QUERY_ROWS, ring_query_rows, walk_sizes


class Request(NamedTuple):
    """What a plan is made for; `group` is the number of query heads per key/value head."""

    pattern: DilationPattern
    seq_len: int
    stored_length: int
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    ring_size: int
    layout: str
    is_causal: bool
    dtype: str
    strategy: StrategyName
    memory_budget: int | None
    has_ids: bool
    head_shards: int

    @property
    def shard_length(self) -> int:
        """Positions per device."""
        return self.stored_length // self.ring_size

    @property
    def chunk_length(self) -> int:
        """Positions per chunk of the layout."""
        return self.stored_length // layout_named(self.layout).multiple(self.ring_size)

    @property
    def query_rows(self) -> int:
        """Most rows of a query block."""
        heads = self.kv_heads * self.group // self.head_shards
        size = self.batch * self.shard_length * heads * self.head_dim * accumulator(np.dtype(self.dtype)).itemsize
        return QUERY_ROWS if self.ring_size == 1 else ring_query_rows(size, self.ring_size)


def branches_of(request: Request) -> list[Branch]:
    """The branches, with a segment that holds the whole sequence extended over its padding."""
    longest = lambda b: b.segment_length == request.seq_len  # noqa: E731
    branches = request.pattern.branches(request.kv_heads, request.seq_len)
    return [b._replace(segment_length=request.stored_length) if longest(b) else b for b in branches]


def is_local(request: Request, branch: Branch) -> bool:
    """Whether segments lie within chunks, so that no device needs another's keys."""
    return request.ring_size == 1 or request.chunk_length % branch.segment_length == 0


def unmet_segment_rules(request: Request, branch: Branch) -> list[str]:
    """What keeps the segments of a branch from being shared by groups of devices."""
    chunk, p, w = request.chunk_length, request.ring_size, branch.segment_length
    spans = w // chunk
    rules = {
        f"segments of {w} must consist of whole chunks of {chunk}": w % chunk == 0,
        f"segments of {w} must divide the stored length {request.stored_length}": request.stored_length % w == 0,
        f"the {spans} chunks of a segment must divide the {p} devices": spans > p or spans == 0 or p % spans == 0,
    }
    return [rule for rule, holds in rules.items() if not holds]


def unmet_rate_rule(request: Request, branch: Branch) -> list[str]:
    """What keeps a head from selecting the same rows of every chunk."""
    chunk, rate = request.chunk_length, branch.rate
    return [f"chunks of {chunk} must be a multiple of the rate {rate}"] if chunk % rate else []


def aligned_length(request: Request) -> int | None:
    """The least stored length, at most twice what is stored, at which every branch takes the fast path, if any."""
    multiple = layout_named(request.layout).multiple(request.ring_size)
    inner = [b for b in branches_of(request) if b.segment_length <= request.chunk_length]
    step = math.lcm(*(b.segment_length for b in inner))
    first = -(-request.chunk_length // step)
    for chunk in range(first * step, min(2 * request.chunk_length, (first + 4096) * step), step):
        longer = request._replace(stored_length=chunk * multiple)
        branches = branches_of(longer)
        unmet = [rule(longer, b) for b in branches if not is_local(longer, b) for rule in _RULES]
        if not any(unmet):
            return longer.stored_length
    return None


_RULES = (unmet_segment_rules, unmet_rate_rule)


def shard_rows(request: Request, number: int, branch: Branch) -> tuple[ShardRows, int]:
    """The rows of a branch that leave the device, and the devices that share its segments."""
    layout, p, w, r = layout_named(request.layout), request.ring_size, branch.segment_length, branch.rate
    chunk, segment_rules = request.chunk_length, unmet_segment_rules(request, branch)
    is_aligned = not segment_rules and not unmet_rate_rule(request, branch)
    counts = branch.rows(w)
    heads = [i for i, count in enumerate(counts) if count or request.head_shards > 1]
    begins = np.arange(layout.multiple(p) + 1)[:, None] * chunk
    offset, count = np.array(branch.offsets)[None, :], np.array(counts)[None, :]
    ranks = selected_before(begins, w, r, offset, count)
    rows = int(np.diff(ranks, axis=0).max(initial=0))
    shard = ShardRows(
        branch=number,
        segment_length=w,
        rate=r,
        chunks=layout.chunks,
        chunk_length=chunk,
        rows=rows,
        is_aligned=is_aligned,
        heads=frozen(branch.first_head + i for i in heads),
        offsets=frozen(branch.offsets[i] for i in heads),
        counts=frozen(counts[i] for i in heads),
        sizes=walk_sizes(rows if is_aligned else min(rows, max(256, *counts)), request.group, request.query_rows),
    )
    return shard, p if segment_rules else min(w // chunk, p)
