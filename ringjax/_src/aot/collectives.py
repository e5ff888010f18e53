"""Counts the collectives that a compiled program executes, loop iterations included."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from ringjax._src.aot.schedule import COLLECTIVES, Program, entry_of, first_array, parse, trip_count

_DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "s32": "int32", "u16": "uint16"}
_LOOP = re.compile(r"\bbody=%?([\w.\-]+)")


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
            inside = _count(loop[1], program)
            trips = trip_count(x, program) if inside else 0
            if trips is None:
                raise ValueError(f"`text` must have the trip count of every loop with collectives, got {x.name!r}.")
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


def _sent(op: str, shape: str) -> Sent:
    dtype, size = first_array(shape)
    return Sent(op, _DTYPES.get(dtype, dtype), size)
