"""Analyzes how a scheduled program (`compiled.as_text()`) overlaps communication with computation.

A compiled program is a list of computations, each of which lists its instructions in execution order. An asynchronous
message is a pair of instructions, start and done. The instructions between them hide the message; an adjacent pair, or
a synchronous message, is not hidden.

    %body {                                            a hop loop: it forwards what the last iteration received
      %payload = get-tuple-element(%carry)
      %start = collective-permute-start(%payload)      ┐
      %part = custom-call(%query, %payload)            │ a kernel in between
      %arrived = collective-permute-done(%start)       ┘
      ROOT %next = tuple(%arrived, %part)
    }
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from typing import Literal

COLLECTIVES = ("collective-permute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all")
KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "mosaic_gpu_v2")
Work = Literal["kernel", "dots", "nothing"]

_OPENING = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_CALLEES = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INDEX = re.compile(r"\bindex=(\d+)")
_KERNEL_NAME = re.compile(r', name = "([^"]*)"')
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_VMEM = re.compile(r'"used_scoped_memory_configs":(\[[^\]]*\])')
_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_IN_BACKWARD = re.compile(r'op_name="[^"]*_bwd/')
_ASYNC_CALLS = ("async-start", "call-start")  # the second: SparseCores of a TPU execute the computation
_MOVES = ("copy", "bitcast", "copy-start", "copy-done")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    operands: tuple[str, ...]
    callees: tuple[str, ...]
    target: str  # of a custom call
    shape: str
    rest: str  # attributes
    is_root: bool  # whether it is the result of the computation
    literal: str = ""  # of a constant


Program = dict[str, list[Instruction]]


@dataclasses.dataclass(frozen=True)
class SentMessage:
    """A collective."""

    op: str  # such as "collective-permute"
    name: str  # of the instruction
    computation: str  # that contains it
    is_async: bool
    in_hop_loop: bool  # whether it is in a loop that forwards what it receives
    between: Work  # the heaviest computation between start and done
    names: tuple[str, ...]  # of the kernels, loops and fusions between start and done
    bytes: int  # of the message
    number: int  # of times that it is sent
    beside_loop: bool  # whether a loop is between start and done: rows are packed, merged or added, or a kernel runs
    started: int  # position of the start in the computation
    ended: int  # position of the done, or of the start if it is synchronous
    pairs: frozenset[tuple[int, int]]  # source and target devices of a permute
    is_backward: bool  # whether it belongs to the backward pass of a branch


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A call of a kernel."""

    name: str
    computation: str  # that calls it
    vmem_bytes: int | None  # vector memory allocated by the TPU compiler, if known
    flops: int | None  # the cost estimate that the TPU scheduler uses, if known


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The messages and kernels of a scheduled program."""

    messages: tuple[SentMessage, ...]
    kernels: tuple[Kernel, ...]
    copied_bytes: int  # of the payload, copied before it is sent, in one iteration of each hop loop

    @property
    def permutes(self) -> tuple[SentMessage, ...]:
        """The collective permutes."""
        return tuple(message for message in self.messages if message.op == "collective-permute")

    @property
    def exchanges(self) -> tuple[SentMessage, ...]:
        """The all-to-alls."""
        return tuple(message for message in self.messages if message.op == "all-to-all")

    @property
    def in_hop_loops(self) -> tuple[SentMessage, ...]:
        """The messages in hop loops."""
        return tuple(permute for permute in self.permutes if permute.in_hop_loop)

    @property
    def num_async(self) -> int:
        """Number of asynchronous permutes."""
        return sum(permute.is_async for permute in self.permutes)

    def hidden(self, by: tuple[Work, ...] = ("kernel",)) -> tuple[SentMessage, ...]:
        """Returns the asynchronous messages of hop loops that overlap with such work."""
        return tuple(permute for permute in self.in_hop_loops if permute.is_async and permute.between in by)

    def sends_both_ways(self, *, is_backward: bool) -> bool:
        """Returns whether permutes in opposite directions are in flight at once: both start before either is done."""
        found = [x for x in self.permutes if x.is_backward == is_backward and x.pairs]
        return any(
            x.computation == y.computation
            and y.started < x.started < y.ended
            and x.pairs == {(target, source) for source, target in y.pairs}
            for x in found
            for y in found
        )

    @property
    def vmem_bytes(self) -> int | None:
        """The largest vector memory of a kernel, or None if unknown."""
        return max((kernel.vmem_bytes for kernel in self.kernels if kernel.vmem_bytes is not None), default=None)


def schedule(text: str) -> Schedule:
    """Analyzes the output of `compiled.as_text()`.

    Raises:
        ValueError: If the program is not scheduled, so that the order of instructions has no meaning.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("`text` must be a scheduled program, with is_scheduled=true in its first line.")
    program = parse(text)
    instructions = [x for lines in program.values() for x in lines]
    called_async = {name for x in instructions if x.opcode in _ASYNC_CALLS for name in x.callees}
    bodies = {name for x in instructions if x.opcode == "while" for name in _BODY.findall(x.rest)}
    numbers = _executions(entry_of(text), program)
    messages, kernels, copied = [], [], 0
    for name, lines in program.items():
        kernels += [
            Kernel(_kernel_name(x), name, _vmem(x.rest), _number(_FLOPS, x.rest)) for x in lines if x.target in KERNELS
        ]
        if name in called_async:
            continue
        sent = [(at, x, op) for at, x in enumerate(lines) if (op := _sent_by(x, program))]
        permuted = [x for _, x, op in sent if op == "collective-permute"]
        copies = [_copies(operand, lines, program) for x in permuted for operand in x.operands]
        carried = [size for size in copies if size is not None]
        is_hop_loop = bool(carried) and name in bodies
        found = [_message(op, at, name, program, is_hop_loop) for at, _, op in sent]
        messages += [dataclasses.replace(x, number=numbers.get(name, 1)) for x in found]
        copied += sum(carried) if is_hop_loop else 0
    return Schedule(tuple(messages), tuple(kernels), copied)


def parse(text: str) -> Program:
    """Parses the computations of a program and their instructions, in order."""
    program: Program = {}
    lines: list[Instruction] | None = None
    for line in text.splitlines():
        opening = _OPENING.match(line)
        if opening and not line.startswith(" "):
            lines = program[opening[1]] = []
        elif line == "}":
            lines = None
        elif lines is not None and (found := _instruction(line)):
            lines.append(found)
    return program


def entry_of(text: str) -> str:
    """Returns the name of the entry computation of a program."""
    found = re.search(r"^ENTRY %?([\w.\-]+) \(", text, re.MULTILINE)
    if not found:
        raise ValueError("`text` must be a program with an ENTRY computation.")
    return found[1]


def trip_count(loop: Instruction, program: Program) -> int | None:
    """Returns the trip count of a loop: as annotated by the compiler, or the bound of a counter that starts at 0."""
    known = _TRIPS.search(loop.rest)
    if known:
        return int(known[1])
    by_name = {x.name: x for name in _CONDITION.findall(loop.rest) for x in program.get(name, [])}
    root = next((x for x in by_name.values() if x.is_root), None)
    if root is None:
        return None
    bounds = [by_name[name].literal for name in root.operands if by_name[name].opcode == "constant"]
    if root.opcode != "compare" or "direction=LT" not in root.rest or len(bounds) != 1:
        return None
    return int(bounds[0])


def _executions(name: str, program: Program) -> Counter[str]:
    """Counts how often a computation executes those that it calls; a loop with an unknown trip count counts once."""
    total = Counter({name: 1})
    for x in program[name]:
        times = trip_count(x, program) or 1 if x.opcode == "while" else 1
        for callee in x.callees:
            if callee in program:
                total.update({inner: times * num for inner, num in _executions(callee, program).items()})
    return total


def _instruction(line: str) -> Instruction | None:
    named = _NAME.match(line)
    if not named:
        return None
    shape_end = _end_of_shape(line, named.end())
    opcode = _OPCODE.match(line, shape_end)
    if not opcode:
        return None
    end = _closing(line, opcode.end() - 1)
    operands, rest = line[opcode.end() : end], line[end + 1 :]
    callees = _CALLEES.findall(rest)
    for branches in _BRANCHES.findall(rest):
        callees += [branch.strip().lstrip("%") for branch in branches.split(",")]
    target = _TARGET.search(rest) if opcode[1] == "custom-call" else None
    return Instruction(
        name=named[2],
        opcode=opcode[1],
        operands=tuple(re.findall(r"%([\w.\-]+)", operands)),
        callees=tuple(callees),
        target=target[1] if target else "",
        shape=line[named.end() : shape_end],
        rest=rest,
        is_root=named[1] is not None,
        literal=operands if opcode[1] == "constant" else "",
    )


def _end_of_shape(line: str, start: int) -> int:
    """Returns the end of a type: a tuple in parentheses, or one word."""
    if line[start] == "(":
        return _closing(line, start) + 1
    space = line.find(" ", start)
    return len(line) if space < 0 else space


def _closing(line: str, start: int) -> int:
    """Returns the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[at], 0)
        if depth == 0:
            return at
    return len(line)


def _sent_by(x: Instruction, program: Program) -> str:
    """Returns the collective that an instruction starts, or an empty string."""
    if x.opcode in _ASYNC_CALLS:
        return next((y.opcode for name in x.callees for y in program.get(name, []) if y.opcode in COLLECTIVES), "")
    op = x.opcode.removesuffix("-start")
    return op if op in COLLECTIVES else ""


def _message(op: str, at: int, computation: str, program: Program, in_hop_loop: bool) -> SentMessage:
    lines = program[computation]
    start = lines[at]
    updates = [i for i, x in enumerate(lines) if x.opcode == "call-update" and start.name in x.operands]
    begin, given = (updates[0], lines[updates[0]]) if updates else (at, start)  # operands may be given after the start
    is_pair = start.opcode.endswith("-start") and '"is_sync":true' not in start.rest
    ends = [i for i, x in enumerate(lines) if x.opcode.endswith("-done") and given.name in x.operands]
    between = lines[begin + 1 : ends[0]] if is_pair and ends else []
    work = [_work(x, program) for x in between]
    names = tuple(x.name for x, kind in zip(between, work, strict=True) if kind != "nothing")
    sent = set(given.operands) - {start.name}
    size = sum(first_array(x.shape)[1] for x in lines if x.name in sent)
    ended = ends[0] if is_pair and ends else begin
    given_in = [start, *(x for name in start.callees for x in program.get(name, []) if x.opcode == op)]
    attributes = " ".join(x.rest for x in given_in)
    listed = _PAIRS.search(attributes)
    return SentMessage(
        op=op,
        name=start.name,
        computation=computation,
        is_async=is_pair,
        in_hop_loop=in_hop_loop,
        between=_heaviest(work),
        names=names,
        bytes=size,
        number=1,
        beside_loop=any(x.opcode == "while" for x in between),
        started=begin,
        ended=ended,
        pairs=frozenset((int(a), int(b)) for a, b in _PAIR.findall(listed[1] if listed else "")),
        is_backward=_IN_BACKWARD.search(attributes) is not None,
    )


def _work(x: Instruction, program: Program) -> Work:
    """Returns the heaviest work of an instruction, including the computations that it calls."""
    if x.opcode == "custom-call":
        return "kernel" if x.target in KERNELS else "dots" if x.target.startswith("__cublas") else "nothing"
    if x.opcode in ("dot", "convolution"):
        return "dots"
    return _heaviest([_work(y, program) for name in x.callees for y in program.get(name, [])])


def _heaviest(work: list[Work]) -> Work:
    return "kernel" if "kernel" in work else "dots" if "dots" in work else "nothing"


def _copies(name: str, lines: list[Instruction], program: Program) -> int | None:
    """Returns the bytes of a loop carry that are copied before it is sent; None if the operand is not a loop carry."""
    by_name = {line.name: line for line in lines}
    copied = 0
    while name in by_name:
        x = by_name[name]
        if x.opcode == "parameter":
            return copied
        if x.opcode == "get-tuple-element":
            name = _element(x, by_name, program)
        elif x.opcode in _MOVES:
            copied += first_array(x.shape)[1] if x.opcode in ("copy", "copy-start") else 0
            name = x.operands[0]
        else:
            return None
    return None


def _element(x: Instruction, by_name: dict[str, Instruction], program: Program) -> str:
    """Traces a tuple element back through barriers and loops that do not change it, and returns its name."""
    index, whole = _number(_INDEX, x.rest) or 0, by_name[x.operands[0]]
    while whole.opcode == "opt-barrier" or (whole.opcode == "while" and _is_unchanged(whole, index, program)):
        whole = by_name[whole.operands[0]]
    return whole.operands[index] if whole.opcode == "tuple" else whole.name


def _is_unchanged(loop: Instruction, index: int, program: Program) -> bool:
    """Returns whether a loop leaves an element of its carry unchanged."""
    (body,) = (program.get(name, []) for name in _BODY.findall(loop.rest))
    by_name = {line.name: line for line in body}
    for root in (line for line in body if line.is_root and line.opcode == "tuple"):
        last = by_name.get(root.operands[index])
        if last and last.opcode == "get-tuple-element" and (_number(_INDEX, last.rest) or 0) == index:
            return by_name[last.operands[0]].opcode == "parameter"
    return False


def _kernel_name(x: Instruction) -> str:
    """Returns the name of a kernel: from its configuration on GPUs, from the instruction on TPUs."""
    named = _KERNEL_NAME.search(x.rest)
    return named[1] if named else re.sub(r"\.\d+.*", "", x.name)


def first_array(shape: str) -> tuple[str, int]:
    """Returns the dtype and the bytes of the first array in a type; no bytes if it has none."""
    found = _SHAPE.search(shape)
    if not found:
        return "", 0
    bits = re.search(r"\d+", found[1])
    elements = math.prod(int(dim) for dim in found[2].split(",") if dim)
    return found[1], elements * (int(bits[0]) if bits else 8) // 8


def _vmem(rest: str) -> int | None:
    """Returns the bytes of vector memory (space 1) that a kernel uses, from the configuration of the compiler."""
    found = _VMEM.search(rest)
    if not found:
        return None
    sizes = [int(config["size"]) for config in json.loads(found[1]) if config.get("memory_space") == "1"]
    return sum(sizes) if sizes else None


def _number(pattern: re.Pattern[str], rest: str) -> int | None:
    found = pattern.search(rest)
    return int(found[1]) if found else None
