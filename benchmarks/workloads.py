"""Defines the benchmarked workloads. Imports no JAX, so that workers of other libraries can use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention workload.

    Attributes:
        name: Name shown in the report.
        length: Sequence length in tokens.
        segment_lengths: Segment length of each branch.
        dilation_rates: Dilation rate of each branch.
        causal: Whether to apply a causal mask.
        batch: Batch size.
        heads: Number of query, key and value heads.
        dim: Head dimension.
        dtype: Data type of the inputs.
        split_heads: Whether the heads are split over the branches, one branch per head.
    """

    name: str
    length: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = True
    batch: int = 1
    heads: int = 8
    dim: int = 64
    dtype: str = "float32"
    split_heads: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape (B, T, N, H) of query, key and value."""
        return self.batch, self.length, self.heads, self.dim

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def branches(self) -> list[tuple[int, int]]:
        """Segment length and dilation rate of each branch."""
        return list(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def flops(self, grad: bool) -> float:
        """Counts useful FLOPs: 4 H per attended (query, key) pair, 14 H including the backward pass.

        Segment lengths must divide the sequence length, and dilation rates must divide the segment lengths.
        """
        pairs = 0.0
        for w, r in self.branches:
            num_rows = w // r
            pairs += self.length // w * (num_rows * (num_rows + 1) / 2 if self.causal else num_rows * num_rows)
        fraction = 1 / len(self.branches) if self.split_heads else 1
        return (14 if grad else 4) * self.batch * self.heads * fraction * self.dim * pairs

    def with_mask(self, causal: bool) -> Case:
        return dataclasses.replace(self, causal=causal)

    def scaled_down(self, factor: int) -> Case:
        """Returns the case with all lengths divided by `factor`; rates are capped at the segment length."""
        lengths = [w // factor for w in self.segment_lengths]
        rates = [min(r, w) for w, r in zip(lengths, self.dilation_rates, strict=True)]
        return dataclasses.replace(
            self, length=self.length // factor, segment_lengths=tuple(lengths), dilation_rates=tuple(rates)
        )

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict) -> Case:
        """Builds a case from JSON, which turns tuples into lists."""
        tuples = {name: tuple(fields[name]) for name in ("segment_lengths", "dilation_rates")}
        return cls(**{**fields, **tuples})


def dense(length: int, name: str = "dense", **fields: object) -> Case:
    """Returns dense attention: a single branch with rate 1 over the whole sequence."""
    return Case(name, length, (length,), (1,), **fields)


def ring_case(length: int, causal: bool = True) -> Case:
    """Returns the three-branch case used for ring benchmarks."""
    return Case(f"three branches, {length:,}", length, (2048, 8192, length), (1, 4, 16), causal)


def fixed_segments(length: int, causal: bool = True) -> Case:
    """Returns a case whose segments do not depend on the length, so that the work per token is constant."""
    return Case("fixed segments", length, (1024, 4096, 8192), (1, 4, 8), causal, heads=4)


def growing_segments(length: int, causal: bool = True) -> Case:
    """Returns a case with segments up to the whole sequence, each branch with a quarter of the previous one's work."""
    lengths, rates = [1024], [1]
    while lengths[-1] < length:
        lengths, rates = [*lengths, min(4 * lengths[-1], length)], [*rates, 4 * rates[-1]]
    return Case("growing segments", length, tuple(lengths), tuple(rates), causal, heads=4)


def both_masks(case: Case) -> Sequence[Case]:
    return case.with_mask(False), case.with_mask(True)


SHORT = Case("8K", 8192, (2048, 4096, 8192), (1, 2, 4))
LONG = Case("32K", 32768, (2048, 8192, 32768), (1, 4, 8))
IMPLEMENTATIONS = Case("batch 2, 4,096 tokens", 4096, (1024, 2048, 4096), (1, 2, 4), batch=2, causal=False)
SPLIT_HEADS_SHORT = Case("8K, one branch per head", 8192, (2048, 8192), (1, 4), split_heads=True)
SPLIT_HEADS_LONG = Case("32K, one branch per head", 32768, (2048, 32768), (1, 8), split_heads=True)
LENGTH_SWEEP = Case("lengths", 4096, (2048, 4096), (1, 4))

NAMED = {
    case.name: case
    for case in (
        *(SHORT, LONG, IMPLEMENTATIONS, SPLIT_HEADS_SHORT, SPLIT_HEADS_LONG, LENGTH_SWEEP, dense(8192)),
        *(ring_case(32768), fixed_segments(8192), growing_segments(65536)),
    )
}
