"""Counts the collectives that a compiled program executes, loop iterations included."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from ringjax._src.aot.schedule import COLLECTIVES, Instruction, Program, entry_of, first_array, parse

_DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "s32": "int32", "u16": "uint16"}
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")


class Sent(NamedTuple):
    """A collective with an operand of a certain size."""

    op: str
    dtype: str
    bytes: int


def executed(text: str) -> Counter[Sent]:
    """Counts how often a device executes each collective of `compiled.as_text()`; each operand counts once.

    Raises:
        ValueError: If the trip count of a loop with collectives is unknown, or a collective is inside a conditional.
    """
    return _count(entry_of(text), parse(text))


def _count(name: str, program: Program) -> Counter[Sent]:
    total: Counter[Sent] = Counter()
    by_name = {x.name: x for x in program[name]}
    for x in program[name]:
        loop = _LOOP.search(x.rest) if x.opcode == "while" else None
        if loop:
            inside = _count(loop[2], program)
            trips = _trips(x, program[loop[1]]) if inside else 0
            total.update({sent: number * trips for sent, number in inside.items()})
        elif x.opcode == "conditional":
            if any(_count(callee, program) for callee in x.callees):
                raise ValueError(f"`text` must have no collective inside a conditional, got {x.name!r}.")
        elif not x.opcode.endswith(("-done", "-update")):
            for callee in x.callees:
                total += _count(callee, program)
        op = x.opcode.removesuffix("-start")
        if op in COLLECTIVES:
            sent = [_sent(op, by_name[operand].shape) for operand in x.operands]
            if op == "all-to-all":  # compilers split its operand, one part per device
                sent = [sent[0]._replace(bytes=sum(part.bytes for part in sent))]
            total.update(sent)
    return total


def _trips(loop: Instruction, condition: list[Instruction]) -> int:
    """Returns the trip count of a loop: as annotated by the compiler, or the bound of a counter that starts at 0."""
    known = _TRIPS.search(loop.rest)
    if known:
        return int(known[1])
    by_name = {x.name: x for x in condition}
    root = next(x for x in condition if x.is_root)
    bounds = [by_name[name].literal for name in root.operands if by_name[name].opcode == "constant"]
    if root.opcode != "compare" or "direction=LT" not in root.rest or len(bounds) != 1:
        raise ValueError(f"`text` must have the trip count of every loop with collectives, got {loop.name!r}.")
    return int(bounds[0])


def _sent(op: str, shape: str) -> Sent:
    dtype, size = first_array(shape)
    return Sent(op, _DTYPES.get(dtype, dtype), size)
