"""Command-line arguments: sizes, patterns, and the attention that they describe."""

from __future__ import annotations

import argparse
import dataclasses
import fractions
import functools
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any, get_args

from ringjax._src.comm.devices import ACCELERATORS, DeviceModel, Platform
from ringjax._src.comm.layout import layout_named
from ringjax._src.comm.ring_comm import STRATEGIES, StrategyName
from ringjax._src.pattern import Branch, Coverage, DilationPattern, Heads, Mixing, Offsets, Padding
from ringjax._src.planning.plan import Plan, plan

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
LAYOUTS = ("contiguous", "zigzag")
_COUNT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_NUMBER = re.compile(r"([0-9]{1,3}(?:[,_][0-9]{3})+|[0-9]{1,40})(\.[0-9]{1,20})?\s*([A-Za-z]*)")
# Limits that keep planning within seconds and numbers within 64 bits, far above any real model.
MOST_TOKENS = 2**31 - 1  # positions are 32-bit integers
MOST_HEADS = 1024
MOST_DEVICES = 2**16
MOST_CPU_DEVICES = 256  # simulated on one machine
_MOST_BRANCHES = 16
_MOST_CHUNK_HEADS = 2**22  # chunks of the ring times heads
_MOST_MEMORY = 10**18
_MOST_SECONDS = 86400.0
# Fields of `PlanOptions` that `ringjax.plan` takes as they are.
_SIZES = ["seq_len", "num_heads", "head_dim", "stored_length", "num_kv_heads", "batch", "layout", "is_causal", "dtype"]
_SIZES += ["strategy", "has_segment_ids", "has_sinks", "ring_size", "inner_devices", "head_shards"]


class InvalidValueError(argparse.ArgumentTypeError, ValueError):
    """The value of an option is invalid; `argparse` shows the message."""


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
        raise InvalidValueError(f"must be a number of seconds from 0 to {_MOST_SECONDS:.0f}, got {text!r}")
    return seconds


def _parse(text: str, units: dict[str, int], wanted: str, most: int) -> int:
    found = _NUMBER.fullmatch(text.strip())
    value = fractions.Fraction()  # exact, unlike a float
    if found:
        digits, decimals, unit = found.groups()
        value = fractions.Fraction(re.sub("[,_]", "", digits) + (decimals or "")) * units.get(unit.upper(), 0)
    if value < 1 or value.denominator != 1:
        raise InvalidValueError(f"must be {wanted}, got {text!r}")
    if value > most:
        raise InvalidValueError(f"must be at most {most:,}, got {text!r}")
    return int(value)


def parse_pattern(text: str, seq_len: int, **options: Any) -> DilationPattern:  # noqa: ANN401
    """Parses a pattern: ``"longnet"``, ``"auto"`` (chosen by length), or segments/rates such as ``"2K/1,16K/4,T/16"``.

    Args:
        text: The pattern, where T is the whole sequence.
        seq_len: Length of the sequence.
        **options: `offsets`, `heads`, `mixing` and `padding` of `DilationPattern`.

    Example:
        >>> parse_pattern("2K/1,T/16", seq_len=65536)
        DilationPattern(2048/1, 65536/16)
    """
    if text == "longnet":
        return DilationPattern.longnet(**options)
    if text == "auto":
        return DilationPattern.for_length(seq_len, **options)
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
    return DilationPattern(lengths, rates, **options)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """An attention on a ring of devices, as described on the command line; the fields match those of `ringjax.plan`.

    Example:
        >>> options = PlanOptions(seq_len=65536, num_heads=8, head_dim=64, ring_size=4, pattern_text="2K/1,T/16")
        >>> options.plan().branches[1].where
        'all_to_all'
    """

    seq_len: int
    num_heads: int = 16
    head_dim: int = 128
    pattern_text: str = "longnet"
    ring_size: int = 1
    inner_devices: int | None = None
    num_kv_heads: int | None = None
    batch: int = 1
    layout: str = "contiguous"
    strategy: StrategyName = "auto"
    is_causal: bool = False
    dtype: str = "bfloat16"
    stored_length: int | None = None
    has_segment_ids: bool = False
    has_sinks: bool = False
    head_shards: int = 1
    memory: int | None = None
    device: str | None = None
    offsets: Offsets = "mod"
    heads: Heads = "all"
    mixing: Mixing = "exact"
    padding: Padding = "masked"

    @property
    def pattern(self) -> DilationPattern:
        """The pattern at this sequence length."""
        options = {"offsets": self.offsets, "heads": self.heads, "mixing": self.mixing, "padding": self.padding}
        return parse_pattern(self.pattern_text, self.seq_len, **options)

    @property
    def hardware(self) -> DeviceModel | None:
        """The figures of `device`, or None."""
        return None if self.device is None else ACCELERATORS.get(self.device)

    @property
    def platform(self) -> Platform:
        """The platform that runs the program; CPU if no device is given."""
        return "cpu" if self.hardware is None else self.hardware.platform

    @property
    def memory_limit(self) -> int | None:
        """Memory of a device in bytes: `memory` if given, otherwise that of `device`."""
        return self.memory if self.memory or self.hardware is None else self.hardware.memory_bytes

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches of the pattern at this sequence length."""
        return self.pattern.branches(self.kv_heads, self.seq_len)

    @property
    def variants(self) -> Iterator[PlanOptions]:
        """The job with every layout and strategy that its ring and its heads allow."""
        is_ring = self.ring_size > 1
        for layout in LAYOUTS if is_ring else LAYOUTS[:1]:
            for strategy in STRATEGIES if is_ring else STRATEGIES[:1]:
                is_whole = (self.stored_length or 0) % layout_named(layout).multiple(self.ring_size) == 0
                stored = self.stored_length if is_whole else None
                other = dataclasses.replace(self, layout=layout, strategy=strategy, stored_length=stored)
                if not strategy.startswith("all_to_all") or _allows_exchange(other):
                    yield other

    def coverage(self, most: int) -> Coverage:
        """Returns the coverage, counted over at most `most` positions."""
        countable = 2**28 // (self.kv_heads * len(self.pattern.segment_lengths))  # within seconds
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.pattern.coverage(self.kv_heads, min(self.seq_len, most, countable))

    def plan(self) -> Plan:
        """Returns the plan; it has no memory limit, which depends on the platform.

        Raises:
            ValueError: If the sizes are inconsistent, or the job is too large to plan.
        """
        if self.has_sinks and self.mixing == "detached":
            raise ValueError("--sinks must not be given with --mixing detached")
        chunks = layout_named(self.layout).multiple(self.ring_size)
        stored = self.stored_length or -(-self.seq_len // chunks) * chunks
        if stored > MOST_TOKENS:
            raise ValueError(f"--seq-len must be at most {MOST_TOKENS:,} with padding, got {self.seq_len}")
        if chunks * self.kv_heads > _MOST_CHUNK_HEADS:
            raise ValueError(
                f"--ring times --kv-heads must be at most {_MOST_CHUNK_HEADS // 2:,}, "
                f"got {self.ring_size} times {self.kv_heads}"
            )
        sizes = {name: getattr(self, name) for name in _SIZES}
        return plan(self.pattern, device=self.device or "tpu", **sizes)


def _allows_exchange(job: PlanOptions) -> bool:
    try:
        job.plan()
    except ValueError:
        return False
    return True


def _option(field: str, about: str, most: int | None = None, **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    if most is not None:
        settings["type"] = functools.partial(parse_count, most=most)
    return {"dest": field, "help": about + (" (%(default)s)" if "default" in settings else ""), **settings}


_PATTERNS = "longnet, auto (by length), or segments/rates: 2K/1,16K/4,T/16, where T is the sequence"
# The options of all commands by name; the destination of those that describe an attention is a field of `PlanOptions`.
OPTIONS: dict[str, dict[str, Any]] = {
    "seq-len": _option("seq_len", "sequence length: 65536, 256K, 1M", MOST_TOKENS, default="1M", metavar="T"),
    "heads": _option("num_heads", "query heads", MOST_HEADS, default="16", metavar="N"),
    "kv-heads": _option("num_kv_heads", "key/value heads (same as --heads)", MOST_HEADS, metavar="K"),
    "head-dim": _option("head_dim", "head dimension", 2**16, default="128", metavar="H"),
    "batch": _option("batch", "sequences per device", 2**20, default="1", metavar="B"),
    "pattern": _option("pattern_text", _PATTERNS, default="longnet", metavar="PATTERN"),
    "offsets": _option("offsets", "offset rule", choices=get_args(Offsets), default="mod"),
    "branch-heads": _option("heads", "heads per branch", choices=get_args(Heads), default="all"),
    "mixing": _option("mixing", "how branches are combined", choices=get_args(Mixing), default="exact"),
    "padding": _option("padding", "what fills up short segments", choices=get_args(Padding), default="masked"),
    "causal": _option("is_causal", "causal attention", action="store_true"),
    "dtype": _option("dtype", "dtype of the arrays", choices=DTYPES, default="bf16"),
    "ring": _option("ring_size", "devices that share the sequence", MOST_DEVICES, default="1", metavar="P"),
    "inner-devices": _option("inner_devices", "how many of these are in a machine", MOST_DEVICES, metavar="D"),
    "segment-ids": _option("has_segment_ids", "the sequence packs several documents", action="store_true"),
    "sinks": _option("has_sinks", "an attention sink per head, not with --mixing detached", action="store_true"),
    "layout": _option("layout", "sequence layout (zigzag if causal and keys rotate, else contiguous)", choices=LAYOUTS),
    "strategy": _option("strategy", "how devices share segments", choices=STRATEGIES, default="auto"),
    "stored-length": _option("stored_length", "padded length", MOST_TOKENS, metavar="T"),
    "head-shards": _option("head_shards", "devices that share the heads", MOST_HEADS, default="1", metavar="S"),
    "memory": _option("memory", "memory per device: 80GB, 16GiB (that of --device)", type=parse_bytes),
    "device": _option("device", "device for the memory limit and the time estimate", choices=ACCELERATORS),
    "cpu-devices": _option("cpu_devices", "simulate N CPU devices on this machine", MOST_CPU_DEVICES, metavar="N"),
}


def add_options(parser: argparse._ActionsContainer, *names: str, **defaults: str) -> None:
    """Adds options by name; `defaults` replace those of `OPTIONS`, by field."""
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    parser.set_defaults(**defaults)


def add_job_arguments(parser: argparse.ArgumentParser, *without: str, **defaults: str) -> None:
    """Adds the options that describe an attention, without some; `defaults` replace those of `OPTIONS`, by field."""
    omitted = {"inner-devices", "head-shards", "memory", "device", "cpu-devices", *without}
    names = (name for name in OPTIONS if name not in omitted)
    add_options(parser.add_argument_group("attention"), *names, **defaults)


def job_of(options: argparse.Namespace, **changes: Any) -> PlanOptions:  # noqa: ANN401
    """Returns the job described by parsed options."""
    fields = {f.name for f in dataclasses.fields(PlanOptions)}
    given = {name: value for name, value in vars(options).items() if name in fields}
    given |= {"dtype": DTYPES[options.dtype], **changes}
    given["layout"] = given.get("layout") or _default_layout(PlanOptions(**{**given, "layout": "contiguous"}))
    return PlanOptions(**given)


def _default_layout(job: PlanOptions) -> str:
    """Returns "zigzag" for causal attention that rotates or gathers keys, or whose ring is not known yet."""
    if not job.is_causal:
        return "contiguous"
    try:
        ways = {branch.where for branch in job.plan().branches} if job.ring_size > 1 else {"ring"}
    except ValueError:
        return "zigzag"  # reported when the job is planned
    return "contiguous" if ways <= {"local", "all_to_all"} else "zigzag"
