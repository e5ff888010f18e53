"""Command-line arguments: sizes, patterns, and the attention that they describe."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import fractions
import functools
import itertools
import math
import re
from typing import Any, NoReturn, get_args

from ringjax._src.aot.compile import Workload
from ringjax._src.comm.layout import layout_named
from ringjax._src.comm.ring_comm import STRATEGIES, StrategyName
from ringjax._src.pattern import DilationPattern, Heads, Mixing, Offsets
from ringjax._src.planning.plan import Plan, plan
from ringjax.cli.errors import usage_error
from ringjax.cli.hardware import DEVICES, Device, Platform

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
LAYOUTS = ("contiguous", "zigzag")
_COUNT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_NUMBER = re.compile(r"([0-9]{1,3}(?:[,_][0-9]{3})+|[0-9]{1,40})(\.[0-9]{1,20})?\s*([A-Za-z]*)")
# Limits that keep planning within seconds and numbers within 64 bits, far above any real workload.
MOST_TOKENS = 2**31 - 1  # positions are 32-bit integers
MOST_HEADS = 1024
MOST_DEVICES = 2**16
MOST_CPU_DEVICES = 256  # simulated on one machine
_MOST_BRANCHES = 16
_MOST_CHUNK_HEADS = 2**22  # chunks of the ring times heads
_MOST_MEMORY = 10**18
_MOST_SECONDS = 86400.0


def parse_count(text: str, most: int = MOST_TOKENS) -> int:
    """Parses a count of tokens or devices; K, M and G are powers of 1024.

    Example:
        >>> parse_count("256K"), parse_count("1M"), parse_count("100000")
        (262144, 1048576, 100000)
    """
    return _parse(text, _COUNT, "a whole number such as 65536, 256K or 1M", most)


def parse_bytes(text: str) -> int:
    """Parses an amount of memory; a GB is 10**9 bytes, a GiB is 2**30 bytes.

    Example:
        >>> parse_bytes("80GB"), parse_bytes("16GiB")
        (80000000000, 17179869184)
    """
    return _parse(text, _BYTES, "an amount of memory such as 80GB or 16GiB", _MOST_MEMORY)


def parse_seconds(text: str) -> float:
    """Parses a duration in seconds, at most one day.

    Example:
        >>> parse_seconds("0.5")
        0.5
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ValueError(f"must be a number of seconds from 0 to {_MOST_SECONDS:.0f}, got {text!r}")
    return seconds


def _parse(text: str, units: dict[str, int], wanted: str, most: int) -> int:
    found = _NUMBER.fullmatch(text.strip())
    value = fractions.Fraction()  # exact, unlike a float
    if found:
        digits, decimals, unit = found.groups()
        value = fractions.Fraction(re.sub("[,_]", "", digits) + (decimals or "")) * units.get(unit.upper(), 0)
    if value < 1 or value.denominator != 1:
        raise ValueError(f"must be {wanted}, got {text!r}")
    if value > most:
        raise ValueError(f"must be at most {most:,}, got {text!r}")
    return int(value)


def parse_pattern(
    text: str, seq_len: int, *, offsets: Offsets = "mod", heads: Heads = "all", mixing: Mixing = "exact"
) -> DilationPattern:
    """Parses a pattern: ``"longnet"``, ``"auto"`` (chosen by length), or segments/rates such as ``"2K/1,16K/4,T/16"``.

    Args:
        text: The pattern, where T is the whole sequence.
        seq_len: Length of the sequence.
        offsets: As for `DilationPattern`.
        heads: As for `DilationPattern`.
        mixing: As for `DilationPattern`.

    Example:
        >>> parse_pattern("2K/1,T/16", seq_len=65536)
        DilationPattern(2048/1, 65536/16)
    """
    if text == "longnet":
        return DilationPattern.longnet(offsets=offsets, heads=heads, mixing=mixing)
    if text == "auto":
        return DilationPattern.for_length(seq_len, offsets=offsets, heads=heads, mixing=mixing)
    pairs = [pair.split("/") for pair in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"--pattern must be longnet, auto, or segments/rates such as 2K/1,16K/4,T/16 (T: the whole sequence), "
            f"got {text!r}"
        )
    if len(pairs) > _MOST_BRANCHES:
        raise ValueError(f"--pattern must have at most {_MOST_BRANCHES} branches, got {len(pairs)}")
    try:
        lengths = tuple(seq_len if w.strip() == "T" else parse_count(w) for w, _ in pairs)
        rates = tuple(parse_count(r) for _, r in pairs)
    except ValueError as error:
        raise ValueError(f"--pattern {text!r}: each segment length and rate {error}") from None
    return DilationPattern(lengths, rates, offsets=offsets, heads=heads, mixing=mixing)


@dataclasses.dataclass(frozen=True)
class Job:
    """An attention on a ring of devices, as described on the command line; the fields match those of `ringjax.plan`.

    Example:
        >>> Job(seq_len=65536, num_heads=8, head_dim=64, ring_size=4, pattern_text="2K/1,T/16").plan().branches[1].hops
        3
    """

    seq_len: int
    num_heads: int = 16
    head_dim: int = 128
    pattern_text: str = "longnet"
    ring_size: int = 1
    num_kv_heads: int | None = None
    batch: int = 1
    layout: str = "contiguous"
    strategy: StrategyName = "auto"
    is_causal: bool = False
    dtype: str = "bfloat16"
    stored_length: int | None = None
    has_segment_ids: bool = False
    head_shards: int = 1
    memory: int | None = None
    device: str | None = None
    offsets: Offsets = "mod"
    heads: Heads = "all"
    mixing: Mixing = "exact"

    @property
    def pattern(self) -> DilationPattern:
        """The pattern at this sequence length."""
        options: dict[str, Any] = {"offsets": self.offsets, "heads": self.heads, "mixing": self.mixing}
        return parse_pattern(self.pattern_text, self.seq_len, **options)

    @property
    def hardware(self) -> Device | None:
        """The figures of `device`, or None."""
        return None if self.device is None else DEVICES[self.device]

    @property
    def platform(self) -> Platform:
        """The platform that runs the program; CPU if no device is given."""
        return "cpu" if self.hardware is None else self.hardware.platform

    @property
    def memory_limit(self) -> int | None:
        """Memory of a device in bytes: `memory` if given, otherwise that of `device`."""
        return self.memory if self.memory or self.hardware is None else self.hardware.memory_bytes

    @property
    def workload(self) -> Workload:
        """The job as a workload for ahead-of-time compilation."""
        return Workload(
            self.pattern,
            self.seq_len,
            self.num_heads,
            self.head_dim,
            num_kv_heads=self.num_kv_heads,
            batch=self.batch,
            dtype=self.dtype,
            is_causal=self.is_causal,
            layout=self.layout,
            strategy=self.strategy,
            stored_length=self.plan().request.stored_length,
            has_segment_ids=self.has_segment_ids,
        )

    def plan(self) -> Plan:
        """Returns the plan; it has no memory limit, which depends on the platform.

        Raises:
            ValueError: If the sizes are inconsistent, or the job is too large to plan.
        """
        chunks = layout_named(self.layout).multiple(self.ring_size)
        stored = self.stored_length or -(-self.seq_len // chunks) * chunks
        if stored > MOST_TOKENS:
            raise ValueError(f"--seq-len must be at most {MOST_TOKENS:,} with padding, got {self.seq_len}")
        heads = self.num_kv_heads or self.num_heads
        if chunks * heads > _MOST_CHUNK_HEADS:
            raise ValueError(
                f"--ring times --kv-heads must be at most {_MOST_CHUNK_HEADS // 2:,}, "
                f"got {self.ring_size} times {heads}"
            )
        return plan(
            self.pattern,
            seq_len=self.seq_len,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            ring_size=self.ring_size,
            stored_length=self.stored_length,
            num_kv_heads=self.num_kv_heads,
            batch=self.batch,
            layout=self.layout,
            is_causal=self.is_causal,
            dtype=self.dtype,
            strategy=self.strategy,
            has_segment_ids=self.has_segment_ids,
            head_shards=self.head_shards,
        )


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors on one line and suggests options for misspelled ones."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # noqa: ANN401
        """Parses arguments; reports unknown ones here, where the options of the subcommand are known."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            close = [difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.7) for word in words]
            hint = f"; did you mean {' and '.join(itertools.chain(*close))}?" if any(close) else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Prints the error with a pointer to `--help` and exits."""
        self.exit(usage_error(self.prog, message))


def checked(parse: Any) -> Any:  # noqa: ANN401 - what argparse takes for a type
    """Returns an `argparse` type whose errors show the message of `parse`."""

    def typed(text: str) -> Any:  # noqa: ANN401
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def count(most: int = MOST_TOKENS) -> Any:  # noqa: ANN401
    """Returns an `argparse` type for counts."""
    return checked(functools.partial(parse_count, most=most))


amount, duration = checked(parse_bytes), checked(parse_seconds)


def add_job_arguments(
    parser: argparse.ArgumentParser, *, seq_len: str, ring: str | None = "1", is_tuned: bool = False, **defaults: str
) -> None:
    """Adds the options that describe an attention.

    Args:
        parser: The parser to extend.
        seq_len: Default sequence length.
        ring: Default ring size, or None to omit the option.
        is_tuned: Whether to omit the options that `ringjax tune` chooses itself or does not measure.
        **defaults: Other defaults.
    """
    given = {"heads": "16", "head-dim": "128", "pattern": "longnet", "dtype": "bf16", **defaults}
    group = parser.add_argument_group("attention")
    group.add_argument(
        "--seq-len", type=count(), default=seq_len, metavar="T", help="sequence length: 65536, 256K, 1M (%(default)s)"
    )
    group.add_argument(
        "--heads", type=count(MOST_HEADS), default=given["heads"], metavar="N", help="query heads (%(default)s)"
    )
    group.add_argument("--kv-heads", type=count(MOST_HEADS), metavar="K", help="key/value heads (same as --heads)")
    group.add_argument(
        "--head-dim", type=count(2**16), default=given["head-dim"], metavar="H", help="head dimension (%(default)s)"
    )
    group.add_argument(
        "--batch", type=count(2**20), default="1", metavar="B", help="sequences per device (%(default)s)"
    )
    group.add_argument(
        "--pattern",
        default=given["pattern"],
        help="longnet, auto (by length), or segments/rates: 2K/1,16K/4,T/16, where T is the sequence (%(default)s)",
    )
    group.add_argument("--offsets", choices=get_args(Offsets), default="mod", help="offset rule (%(default)s)")
    group.add_argument("--branch-heads", choices=get_args(Heads), default="all", help="heads per branch (%(default)s)")
    group.add_argument(
        "--mixing", choices=get_args(Mixing), default="exact", help="how branches are combined (%(default)s)"
    )
    group.add_argument("--causal", action="store_true", help="causal attention")
    group.add_argument("--dtype", choices=DTYPES, default=given["dtype"], help="dtype of the arrays (%(default)s)")
    if ring is not None:
        group.add_argument(
            "--ring",
            type=count(MOST_DEVICES),
            default=ring,
            metavar="P",
            help="devices that share the sequence (%(default)s)",
        )
    if is_tuned:
        return
    group.add_argument("--segment-ids", action="store_true", help="the sequence packs several documents")
    group.add_argument("--layout", choices=LAYOUTS, help="sequence layout (zigzag if causal, else contiguous)")
    group.add_argument(
        "--strategy", choices=STRATEGIES, default="auto", help="how keys and values are exchanged (%(default)s)"
    )
    group.add_argument("--stored-length", type=count(), metavar="T", help="padded length")


def job_of(options: argparse.Namespace, **changes: Any) -> Job:  # noqa: ANN401
    """Returns the job described by parsed options."""
    named = {
        "seq_len": options.seq_len,
        "num_heads": options.heads,
        "head_dim": options.head_dim,
        "pattern_text": options.pattern,
        "ring_size": getattr(options, "ring", 1),
        "num_kv_heads": options.kv_heads,
        "batch": options.batch,
        "layout": getattr(options, "layout", None) or ("zigzag" if options.causal else "contiguous"),
        "strategy": getattr(options, "strategy", "auto"),
        "is_causal": options.causal,
        "dtype": DTYPES[options.dtype],
        "stored_length": getattr(options, "stored_length", None),
        "has_segment_ids": getattr(options, "segment_ids", False),
        "head_shards": getattr(options, "head_shards", 1),
        "memory": getattr(options, "memory", None),
        "device": getattr(options, "device", None),
        "offsets": options.offsets,
        "heads": options.branch_heads,
        "mixing": options.mixing,
    }
    return Job(**{**named, **changes})
