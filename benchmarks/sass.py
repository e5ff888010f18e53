"""Instructions of a CUDA kernel: the hot loop, from a listing of ``nvdisasm -c``.

A kernel of attention spends its time in an innermost loop with matrix instructions. With a causal mask there are two:
one for blocks that need no mask, and a longer one for those that do.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

_MATRIX = ("HMMA", "HGMMA", "UTCHMMA")  # Ampere, Hopper, Blackwell
_SPILLS = ("LDL", "STL")  # loads and stores of local memory
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([^;]*);")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a kernel.

    Attributes:
        opcodes: How often each opcode, without modifiers, occurs between the first and the last instruction.
    """

    opcodes: Counter[str]

    @property
    def instructions(self) -> int:
        """Number of instructions that a warp issues per iteration."""
        return self.opcodes.total()

    @property
    def matrix_instructions(self) -> int:
        """Number of matrix instructions."""
        return sum(self.opcodes[name] for name in _MATRIX)

    @property
    def spills(self) -> int:
        """Number of instructions that spill or reload registers."""
        return sum(self.opcodes[name] for name in _SPILLS)


def hot_loop(listing: str) -> Loop:
    """Returns the shortest of the innermost loops with the most matrix instructions.

    Jumps back from waits that the compiler moves behind the end of a kernel look like loops too. They are longer.

    Raises:
        ValueError: If no loop has a matrix instruction.
    """
    loops = innermost_loops(listing)
    if not loops:
        raise ValueError(f"`listing` must contain a loop with one of {', '.join(_MATRIX)}.")
    most = max(loop.matrix_instructions for loop in loops)
    return min((x for x in loops if x.matrix_instructions == most), key=lambda loop: loop.instructions)


def innermost_loops(listing: str) -> list[Loop]:
    """Returns the loops with matrix instructions that contain no other such loop, in order."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[str, int]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif instruction := _INSTRUCTION.match(line):
            target = _TARGET.search(instruction[2])
            if instruction[1] == "BRA" and target:
                branches.append((target[1], len(opcodes)))
            opcodes.append(instruction[1])
    spans = {(labels[name], last) for name, last in branches if name in labels and labels[name] <= last}
    spans = {(first, last) for first, last in spans if any(x in _MATRIX for x in opcodes[first : last + 1])}
    inner = [x for x in spans if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in spans)]
    return [Loop(Counter(opcodes[first : last + 1])) for first, last in sorted(inner)]
