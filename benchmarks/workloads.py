"""The attentions that are measured, by name. Needs no JAX, so that workers of other libraries read it too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention.

    Attributes:
        name: What it is called in the reports.
        length: Tokens.
        segment_lengths: Of the branches.
        dilation_rates: Of the branches.
        causal: Whether a query sees no key after itself.
        batch: Sequences.
        heads: Query, key and value heads.
        dim: Of a head.
        dtype: Of the arrays.
        grouped: Whether each head has one branch instead of all.
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
    grouped: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of query, key and value."""
        return self.batch, self.length, self.heads, self.dim

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def branches(self) -> list[tuple[int, int]]:
        return list(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def flops(self, grad: bool) -> float:
        """Useful work: 4 H flops for a query and a key that it sees, 14 H with the backward pass.

        Segments must divide the length, and rates the segments.
        """
        pairs = 0.0
        for w, r in self.branches:
            rows = w // r
            pairs += self.length // w * (rows * (rows + 1) / 2 if self.causal else rows * rows)
        share = 1 / len(self.branches) if self.grouped else 1
        return (14 if grad else 4) * self.batch * self.heads * share * self.dim * pairs

    def with_mask(self, causal: bool) -> Case:
        return dataclasses.replace(self, causal=causal)

    def smaller(self, factor: int) -> Case:
        """The same picture with fewer tokens: all lengths divided, and rates where a segment would be too short."""
        lengths = [w // factor for w in self.segment_lengths]
        rates = [min(r, w) for w, r in zip(lengths, self.dilation_rates, strict=True)]
        return dataclasses.replace(
            self, length=self.length // factor, segment_lengths=tuple(lengths), dilation_rates=tuple(rates)
        )

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict) -> Case:
        """From JSON, where tuples are lists."""
        tuples = {name: tuple(fields[name]) for name in ("segment_lengths", "dilation_rates")}
        return cls(**{**fields, **tuples})


def dense(length: int, name: str = "dense", **fields: object) -> Case:
    """Ordinary attention, which is one branch with every key."""
    return Case(name, length, (length,), (1,), **fields)


def ring_case(length: int, causal: bool = True) -> Case:
    """What rings are measured on."""
    return Case(f"three branches, {length:,}", length, (2048, 8192, length), (1, 4, 16), causal)


def constant(length: int, causal: bool = True) -> Case:
    """Segments that do not grow with the length: the work per token is the same at all lengths."""
    return Case("constant segments", length, (1024, 4096, 8192), (1, 4, 8), causal, heads=4)


def reaching(length: int, causal: bool = True) -> Case:
    """Segments up to the whole sequence, each with a quarter of the work of the one before."""
    lengths, rates = [1024], [1]
    while lengths[-1] < length:
        lengths, rates = [*lengths, min(4 * lengths[-1], length)], [*rates, 4 * rates[-1]]
    return Case("reaching segments", length, tuple(lengths), tuple(rates), causal, heads=4)


def both_masks(case: Case) -> Sequence[Case]:
    return case.with_mask(False), case.with_mask(True)


SHORT = Case("8K", 8192, (2048, 4096, 8192), (1, 2, 4))
LONG = Case("32K", 32768, (2048, 8192, 32768), (1, 4, 8))
IMPLEMENTATIONS = Case("batch 2, 4,096 tokens", 4096, (1024, 2048, 4096), (1, 2, 4), batch=2, causal=False)
GROUPED_SHORT = Case("8K, one branch per head", 8192, (2048, 8192), (1, 4), grouped=True)
GROUPED_LONG = Case("32K, one branch per head", 32768, (2048, 32768), (1, 8), grouped=True)
LONGEST = Case("lengths", 4096, (2048, 4096), (1, 4))

NAMED = {
    case.name: case
    for case in (
        *(SHORT, LONG, IMPLEMENTATIONS, GROUPED_SHORT, GROUPED_LONG, LONGEST, dense(8192)),
        *(ring_case(32768), constant(8192), reaching(65536)),
    )
}
