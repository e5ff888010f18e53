"""How segments align with the chunks of a ring, and the row selections that follow."""

from __future__ import annotations

import math

import numpy as np

from ringjax._src.comm.head_exchange import HeadParts
from ringjax._src.comm.layout import CONTIGUOUS, layout_named
from ringjax._src.pattern import Branch, selected_before
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.rows.selection import RowSelection, frozen
from ringjax._src.rows.sizes import xla_block_sizes


def branches_of(spec: AttentionSpec) -> list[Branch]:
    """Returns the branches; a segment that holds the whole sequence is extended over its padding."""
    longest = lambda b: b.segment_length == spec.seq_len  # noqa: E731
    branches = spec.pattern.branches(spec.kv_heads, spec.seq_len)
    return [b._replace(segment_length=spec.stored_length) if longest(b) else b for b in branches]


def is_local(spec: AttentionSpec, branch: Branch) -> bool:
    """Returns whether segments lie within chunks, so that no device needs keys of others."""
    return spec.ring_size == 1 or spec.chunk_length % branch.segment_length == 0


def unmet_segment_rules(spec: AttentionSpec, branch: Branch) -> list[str]:
    """Returns the unmet conditions for sharing the segments of a branch by neighboring devices."""
    chunk, p, w = spec.chunk_length, spec.ring_size, branch.segment_length
    num = w // chunk
    fit = f"divide chunks of {chunk}" if w < chunk else f"consist of whole chunks of {chunk}"
    rules = {
        f"segments of {w} must {fit}": w % chunk == 0,
        f"segments of {w} must divide the stored length {spec.stored_length}": spec.stored_length % w == 0,
        f"the {num} chunks of a segment must divide the {p} devices": num > p or num == 0 or p % num == 0,
    }
    return [rule for rule, holds in rules.items() if not holds]


def unmet_rate_rule(spec: AttentionSpec, branch: Branch) -> list[str]:
    """Returns the unmet condition for selecting the same rows of every chunk."""
    chunk, rate = spec.chunk_length, branch.rate
    return [f"chunks of {chunk} must be a multiple of the rate {rate}"] if chunk % rate else []


def aligned_length(spec: AttentionSpec) -> int | None:
    """Returns the smallest stored length at which every branch takes the fast path.

    Lengths below twice the given one are tried, up to a limit; None if none of them will do.
    """
    multiple = layout_named(spec.layout).multiple(spec.ring_size)
    inner = [b for b in branches_of(spec) if b.segment_length <= spec.chunk_length]
    step = math.lcm(*(b.segment_length for b in inner))
    first = -(-spec.chunk_length // step)
    for chunk in range(first * step, min(2 * spec.chunk_length, (first + _MOST_TRIED) * step), step):
        longer = spec._replace(stored_length=chunk * multiple)
        branches = branches_of(longer)
        unmet = [rule(longer, b) for b in branches if not is_local(longer, b) for rule in _RULES]
        if not any(unmet):
            return longer.stored_length
    return None


_RULES = (unmet_segment_rules, unmet_rate_rule)
_MOST_TRIED = 4096  # lengths, which takes a fraction of a second


def local_selections(spec: AttentionSpec, number: int, branch: Branch) -> tuple[RowSelection, ...]:
    """Returns the selections of a branch that sends nothing: its whole segments, and its shorter last one."""
    selections = []
    whole, rest = divmod(spec.shard_length, branch.segment_length)
    for first, segments, length in ((0, whole, branch.segment_length), (spec.shard_length - rest, 1, rest)):
        counts = branch.rows(length) if segments and length else []
        heads = [i for i, count in enumerate(counts) if count]
        if not heads:
            continue  # no such segment, or no head selects anything in it
        if spec.head_shards > 1:
            heads = list(range(len(counts)))
        rate = min(branch.rate, length)  # beyond that a head has its one row or none
        num_rows = -(-length // rate)
        blocks = xla_block_sizes(num_rows, spec.q_per_kv, spec.query_block_rows)
        selections.append(
            RowSelection(
                branch=number,
                segment_length=length,
                rate=rate,
                first=first,
                chunks=segments,
                chunk_length=length,
                num_rows=num_rows,
                is_aligned=num_rows * rate == length,
                heads=frozen(branch.first_head + i for i in heads),
                offsets=frozen(min(branch.offsets[i], rate - 1) for i in heads),
                counts=frozen(counts[i] for i in heads),
                blocks=blocks,
                is_ragged=any(counts[i] != blocks.padded(num_rows) for i in heads),
                has_empty_heads=any(counts[i] == 0 for i in heads),
            )
        )
    return tuple(selections)


def shared_selection(
    spec: AttentionSpec, number: int, branch: Branch, query_rows: int | None = None
) -> tuple[RowSelection, int]:
    """Returns the selection of a branch whose segments several devices share, and how many devices.

    Args:
        spec: The attention call.
        number: Index of the branch.
        branch: The branch.
        query_rows: Most rows of a query block in plain XLA, or None for those of the spec.
    """
    layout, p, w, r = layout_named(spec.layout), spec.ring_size, branch.segment_length, branch.rate
    chunk, segment_rules = spec.chunk_length, unmet_segment_rules(spec, branch)
    is_aligned = not segment_rules and not unmet_rate_rule(spec, branch)
    counts = branch.rows(w)
    heads = [i for i, count in enumerate(counts) if count or spec.head_shards > 1]
    begins = np.arange(layout.multiple(p) + 1)[:, None] * chunk
    offset, count = np.array(branch.offsets)[None, :], np.array(counts)[None, :]
    ranks = selected_before(begins, w, r, offset, count)
    num_rows = int(np.diff(ranks, axis=0).max(initial=0))
    block_rows = num_rows if is_aligned else min(num_rows, max(256, *counts))
    blocks = xla_block_sizes(block_rows, spec.q_per_kv, query_rows or spec.query_block_rows)
    selection = RowSelection(
        branch=number,
        segment_length=w,
        rate=r,
        first=0,
        chunks=layout.chunks,
        chunk_length=chunk,
        num_rows=num_rows,
        is_aligned=is_aligned,
        heads=frozen(branch.first_head + i for i in heads),
        offsets=frozen(branch.offsets[i] for i in heads),
        counts=frozen(counts[i] for i in heads),
        blocks=blocks,
        is_ragged=blocks.padded(num_rows) != num_rows,
        has_empty_heads=False,
    )
    return selection, p if segment_rules else min(w // chunk, p)


def team_spec(spec: AttentionSpec, branch: Branch, team_size: int) -> AttentionSpec:
    """Returns the attention call with teams of devices, which have exchanged heads, as devices.

    A team of all devices has the rows of a segment that they all share, or that is not aligned, in sequence order.
    """
    is_whole = spec.ring_size == team_size and (
        branch.segment_length == spec.stored_length or not shared_selection(spec, 0, branch)[0].is_aligned
    )
    layout = CONTIGUOUS.name if is_whole else spec.layout
    return spec._replace(ring_size=spec.ring_size // team_size, layout=layout)


def exchanged_spec(spec: AttentionSpec, parts: HeadParts) -> AttentionSpec:
    """Returns the attention call of a device that has whole sequences of its part of the heads, as without a ring."""
    return spec._replace(
        ring_size=1,
        layout=CONTIGUOUS.name,
        axis_name=None,
        head_axis=None,
        head_shards=spec.head_shards * parts.kv,
        q_per_kv=spec.q_per_kv // parts.query,
    )
