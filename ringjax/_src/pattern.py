"""Dilation patterns: the positions that each branch selects, per head.

A branch with segment length ``w`` and dilation rate ``r`` selects position ``p`` for head ``h`` if and only if
``(p mod w) mod r == o(h)``, where ``o(h)`` is the offset of the head.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from typing import Literal, NamedTuple, TypedDict, TypeVar, Unpack, get_args

import numpy as np
from jax import Array

from ringjax._src.indexing import quotient, remainder
from ringjax._src.validation import MOST_HEADS, check_choice, check_int, check_ints

Offsets = Literal["mod", "block", "none"]
Heads = Literal["all", "split"]
Mixing = Literal["exact", "detached"]
Padding = Literal["masked", "zeros"]


class PatternOptions(TypedDict, total=False):
    """Options of a `DilationPattern`, see there."""

    offsets: Offsets
    heads: Heads
    mixing: Mixing
    padding: Padding


_CHOICES = {"offsets": Offsets, "heads": Heads, "mixing": Mixing, "padding": Padding}


class Coverage(NamedTuple):
    """Coverage of a pattern, as computed by `DilationPattern.coverage`.

    Attributes:
        share: Fraction of (position, head) pairs that at least one branch selects, from 0 to 1.
        reach: Longest distance between a query and a key that it attends to.
        notes: One sentence for each branch whose heads do not cover all residues.
    """

    share: float
    reach: int
    notes: tuple[str, ...]


class Branch(NamedTuple):
    """One branch of a pattern: its segment length, its rate and the heads that run it."""

    segment_length: int
    rate: int
    first_head: int
    num_heads: int
    offsets: tuple[int, ...]  # one per head of this branch

    def rows(self, length: int) -> list[int]:
        """Returns the number of positions that each head selects in a segment of `length` positions."""
        return [max(0, -(-(length - o) // self.rate)) for o in self.offsets]

    def offset_table(self, num_kv_heads: int) -> np.ndarray:
        """Returns the offset of each key/value head, (num_kv_heads,), -1 if it does not run this branch."""
        table = np.full(num_kv_heads, -1, np.int32)
        table[self.first_head : self.first_head + self.num_heads] = self.offsets
        return table


Ints = TypeVar("Ints", np.ndarray, Array)


def selected_before(position: Ints, segment_length: int, rate: int, offset: Ints, count: Ints) -> Ints:
    """Counts the selected positions before `position`, for a head with this offset and `count` rows per segment."""
    inside = quotient(remainder(position, segment_length) - offset + rate - 1, rate)
    return quotient(position, segment_length) * count + inside.clip(0, count)


@dataclasses.dataclass(frozen=True, repr=False)
class DilationPattern:
    """Branches of dilated attention, each with a segment length and a dilation rate.

    See the [LongNet paper](https://arxiv.org/abs/2307.02486).

    Args:
        segment_lengths: Segment length ``w`` of each branch, at least 1, in any order.
        dilation_rates: Dilation rate ``r`` of each branch, one per segment length.
        offsets: Residue selected by head ``h`` of ``K`` key/value heads: ``"mod"`` selects ``h mod r`` (the LongNet
            paper), ``"block"`` selects ``h // ceil(K / r)`` (torchscale checkpoints), ``"none"`` selects 0.
        heads: With ``"all"``, every head runs every branch, and the branches are mixed by their softmax denominators.
            With ``"split"``, each head runs one branch, and the output is divided by the number of branches.
        mixing: Gradient of the mixing weights: ``"exact"``, or ``"detached"`` to treat them as constants, as torchscale
            does.
        padding: With ``"masked"``, a segment that is shorter than its branch's segment length, or not a multiple of the
            rate, is exact: queries attend to its own keys only. With ``"zeros"``, it is padded with keys and values
            of zeros, to which queries attend, as in torchscale: such a key has score 0 and adds to the softmax
            denominator only. Causal attention does not attend to them, so both are the same there. If sequences of a
            batch have different lengths, padding (negative segment ids) must follow their last position.

    Raises:
        ValueError: If `segment_lengths` and `dilation_rates` are empty, differ in length or contain anything but
            integers of at least 1; if `offsets`, `heads`, `mixing` or `padding` is not one of its choices; or if
            ``heads="split"`` is combined with other `offsets` than ``"mod"``, with ``mixing="detached"`` or with
            ``padding="zeros"``.

    Example:
        >>> import ringjax as rj
        >>> rj.DilationPattern(segment_lengths=(2048, 8192), dilation_rates=(1, 4))
        DilationPattern(2048/1, 8192/4)
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    _: dataclasses.KW_ONLY
    offsets: Offsets = "mod"
    heads: Heads = "all"
    mixing: Mixing = "exact"
    padding: Padding = "masked"

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates"):
            object.__setattr__(self, name, check_ints(name, getattr(self, name)))
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise ValueError(
                "`segment_lengths` and `dilation_rates` must have the same length, got "
                f"{len(self.segment_lengths)} and {len(self.dilation_rates)}."
            )
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), get_args(choices))
        for name, required in {"offsets": "mod", "mixing": "exact", "padding": "masked"}.items():
            if self.heads == "split" and getattr(self, name) != required:
                raise ValueError(f'`{name}` must be "{required}" with `heads="split"`, got {getattr(self, name)!r}.')

    @classmethod
    def geometric(
        cls,
        first: int,
        last: int,
        ratio: int,
        **options: Unpack[PatternOptions],
    ) -> DilationPattern:
        """Returns a pattern with segments ``first, first * ratio, … last`` and rates ``1, ratio, ratio², …``.

        Every branch selects the same number of rows per segment, so the work per token is constant. `options` are
        `offsets`, `heads`, `mixing` and `padding` of the pattern.

        Raises:
            ValueError: If `last` is not `first` times a power of `ratio`, or `ratio` is below 2.

        Example:
            >>> DilationPattern.geometric(2048, 32768, 4)
            DilationPattern(2048/1, 8192/4, 32768/16)
        """
        first, last = check_int("first", first), check_int("last", last)
        ratio = check_int("ratio", ratio, least=2)
        lengths = [first]
        while lengths[-1] < last:
            lengths.append(lengths[-1] * ratio)
        if lengths[-1] != last:
            raise ValueError(
                f"`last` must be `first` times a power of `ratio`, got first={first}, last={last}, ratio={ratio}."
            )
        rates = tuple(ratio**i for i in range(len(lengths)))
        return cls(tuple(lengths), rates, **options)

    @classmethod
    def longnet(cls, **options: Unpack[PatternOptions]) -> DilationPattern:
        """Returns the pattern of the LongNet paper: segments of 2048 to 32768, rates 1, 2, 4, 6 and 12.

        `options` are `offsets`, `heads`, `mixing` and `padding` of the pattern.

        Example:
            >>> DilationPattern.longnet()
            DilationPattern(2048/1, 4096/2, 8192/4, 16384/6, 32768/12)
        """
        lengths, rates = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)
        return cls(lengths, rates, **options)

    @classmethod
    def for_length(
        cls,
        max_len: int,
        *,
        first: int = 1024,
        branches: int = 5,
        **options: Unpack[PatternOptions],
    ) -> DilationPattern:
        """Returns log-spaced segments from `first` to the largest power of two up to `max_len`, with rates 1, 2, 4, ….

        Prov-GigaPath derives the segments of its slide encoder this way. If no power of two up to `max_len` exceeds
        `first`, the pattern is a single dense branch of length `max_len`. `options` are `offsets`, `heads`, `mixing`
        and `padding` of the pattern.

        Raises:
            ValueError: If `max_len` or `first` is below 1, or `branches` is not between 2 and 53.

        Example:
            >>> DilationPattern.for_length(1_048_576)
            DilationPattern(1024/1, 5792/2, 32768/4, 185363/8, 1048576/16)
        """
        max_len, first = check_int("max_len", max_len), check_int("first", first)
        branches = check_int("branches", branches, least=2, most=53)  # the rate doubles with each branch
        last = 1 << (max_len.bit_length() - 1)
        if last <= first:
            return cls((max_len,), (1,), **options)
        steps = branches - 1
        between = (_root(first ** (steps - i) * last**i, steps) for i in range(1, steps))
        rates = tuple(2**i for i in range(branches))
        return cls((first, *between, last), rates, **options)

    def branches(self, num_kv_heads: int, seq_len: int | None = None) -> tuple[Branch, ...]:
        """Returns the branches for a number of key/value heads, with segments clamped to `seq_len`.

        Example:
            >>> DilationPattern((4, 8), (1, 2)).branches(num_kv_heads=3)[1].offsets
            (0, 1, 0)
        """
        num_kv_heads = check_int("num_kv_heads", num_kv_heads, most=MOST_HEADS)
        seq_len = None if seq_len is None else check_int("seq_len", seq_len)
        share, extra = divmod(num_kv_heads, len(self.segment_lengths))
        result = []
        for i, (w, r) in enumerate(zip(self.segment_lengths, self.dilation_rates, strict=True)):
            length = w if seq_len is None else min(w, seq_len)
            if self.heads == "split":
                first, count = i * share + min(i, extra), share + (i < extra)
                result.append(Branch(length, _effective_rate(r, length), first, count, (i % r,) * count))
            else:
                offsets = tuple(_offset(self.offsets, h, r, num_kv_heads) for h in range(num_kv_heads))
                result.append(Branch(length, _effective_rate(r, length), 0, num_kv_heads, offsets))
        return tuple(result)

    def coverage(self, num_heads: int, seq_len: int | None = None) -> Coverage:
        """Computes the fraction of (position, head) pairs that are selected and the longest attended distance.

        Args:
            num_heads: Number of key/value heads.
            seq_len: Length to count over; the longest segment by default.

        Warns:
            UserWarning: For each branch whose heads use fewer residues than its rate.

        Example:
            >>> DilationPattern((8, 16), (2, 4)).coverage(num_heads=4)
            Coverage(share=0.5, reach=12, notes=())
        """
        num_heads = check_int("num_heads", num_heads, most=MOST_HEADS)
        length = max(self.segment_lengths) if seq_len is None else check_int("seq_len", seq_len)
        branches = self.branches(num_heads, length)
        share = _covered_pairs(branches, num_heads, length) / (num_heads * length)
        reach = max(((rows - 1) * b.rate for b in branches for rows in b.rows(b.segment_length) if rows), default=0)
        notes = []
        for b in branches:
            used = len(set(b.offsets))
            if b.num_heads and used < b.rate:
                heads = "1 head uses" if b.num_heads == 1 else f"{b.num_heads} heads use"
                notes.append(f"Branch {b.segment_length}/{b.rate}: its {heads} {used} of {b.rate} residues.")
                warnings.warn(notes[-1], stacklevel=2)
        return Coverage(share, reach, tuple(notes))

    def __repr__(self) -> str:
        parts = [f"{w}/{r}" for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True)]
        for field in dataclasses.fields(self)[2:]:
            if getattr(self, field.name) != field.default:
                parts.append(f"{field.name}={getattr(self, field.name)!r}")
        return f"DilationPattern({', '.join(parts)})"


def _root(number: int, degree: int) -> int:
    """Returns the integer root, rounded down. Exact, as floating-point powers differ between machines."""
    root = round(2 ** (math.log2(number) / degree))
    while root**degree > number:
        root -= 1
    while (root + 1) ** degree <= number:
        root += 1
    return root


def _effective_rate(rate: int, segment_length: int) -> int:
    """Returns the rate, or a smaller one that selects the same positions: any rate beyond the segment selects one.

    Positions are computed in int32, which a huge rate would overflow.
    """
    return min(rate, max(segment_length, 2**20))


def _offset(rule: Offsets, head: int, rate: int, num_heads: int) -> int:
    if rule == "mod":
        return head % rate
    return head // -(-num_heads // rate) if rule == "block" else 0


def _covered_pairs(branches: tuple[Branch, ...], num_heads: int, length: int) -> int:
    """Counts the (position, head) pairs that at least one branch selects."""
    num_same: Counter[tuple[tuple[int, int, int], ...]] = Counter()  # heads with the same (w, r, o) triples
    for offsets in zip(*(b.offset_table(num_heads).tolist() for b in branches), strict=True):
        num_same[tuple((b.segment_length, b.rate, o) for b, o in zip(branches, offsets, strict=True) if o >= 0)] += 1
    return sum(heads * _covered(selections, length) for selections, heads in num_same.items())


def _covered(selections: tuple[tuple[int, int, int], ...], length: int) -> int:
    """Counts the positions that any of these (w, r, o) triples selects.

    The selection is periodic in the least common multiple of the segment lengths; positions are enumerated in windows
    of bounded size.
    """
    if any(r == 1 for _, r, _ in selections):
        return length
    period = math.lcm(*(w for w, _, _ in selections))
    if period < length:
        whole, rest = divmod(length, period)
        return whole * _covered(selections, period) + (_covered(selections, rest) if rest else 0)
    total = 0
    for start in range(0, length, 1 << 20):
        p = np.arange(start, min(start + (1 << 20), length))
        is_selected = np.zeros(p.shape, bool)
        for w, r, o in selections:
            is_selected |= (p % w) % r == o
        total += int(is_selected.sum())
    return total
