"""Reads the schedules of TPU kernels that libtpu dumps: cycles of each region, used slots, and sizes of DMAs.

With `DUMP_FLAGS` in the environment variable LIBTPU_INIT_ARGS, the compiler writes, for every kernel, a tree of regions
with the cycles that they span, and a table with one line per cycle that counts the instructions of every kind. Both
include the cycles in which the kernel waits for a unit, but not those in which it waits for memory.

    $region161 // loop_body                  one grid step: every region below runs in it or is skipped
      $region84 // pred_region               begin of an outer block: no matrix multiplication
      $region88 // pred_region               block step, with mask: matrix multiplications
      $region92 // pred_region               block step, without mask
      $region96 // pred_region               end of an outer block
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

DUMP_FLAGS = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
GRANULE = 32  # bytes, the unit of DMA sizes

_REGIONS = "post-bundle-packing-post-ra.txt"
_SLOTS = "pre-delay_hlo-static-per-bundle-utilization.txt"
_REGION = re.compile(r"^\s*\$region(\d+): #\{.*?\}(?: parent=(\d+))?(?: // (\w+))?")
_RANGE = re.compile(r"^\s*// region range: \[(\d+), (\d+)\)")
_DMA = re.compile(r"= dma\.(hbm_to_vmem|vmem_to_hbm)\b.*?/\*size_in_granules=\*/(\d+)")
_LEAST_CYCLES = 32  # shorter regions start a DMA or skip one


@dataclasses.dataclass(frozen=True)
class Dma:
    """One instruction that copies between HBM and VMEM; most run only in some grid steps."""

    direction: str  # "hbm_to_vmem" or "vmem_to_hbm"
    bytes: int


@dataclasses.dataclass(frozen=True)
class Region:
    """A range of cycles of a kernel, which runs as a whole or is skipped."""

    number: int
    parent: int | None
    kind: str  # such as "pred_region" or "loop_body"
    first: int  # first cycle
    end: int  # last cycle + 1
    slots: dict[str, int]  # instructions by kind of unit, such as "MXU"

    @property
    def cycles(self) -> int:
        """Number of cycles."""
        return self.end - self.first


@dataclasses.dataclass(frozen=True)
class KernelSchedule:
    """The schedule of one kernel."""

    name: str
    regions: tuple[Region, ...]
    capacity: dict[str, int]  # instructions per cycle by kind of unit
    dmas: tuple[Dma, ...]

    @property
    def steps(self) -> tuple[Region, ...]:
        """The block steps: the smallest conditional regions with matrix multiplications, longest first."""
        return tuple(sorted((x for x in self._leaves if x.slots.get("MXU")), key=lambda x: -x.cycles))

    @property
    def edges(self) -> tuple[Region, ...]:
        """The begin and end of outer blocks: the smallest conditional regions without matrix multiplications."""
        return tuple(x for x in self._leaves if not x.slots.get("MXU"))

    @property
    def overhead(self) -> int:
        """Cycles of a grid step outside of block steps and edges."""
        (body,) = (x for x in self.regions if x.kind == "loop_body" and x.cycles == self._loop_cycles)
        return body.cycles - sum(x.cycles for x in self._leaves)

    @property
    def _loop_cycles(self) -> int:
        return max(x.cycles for x in self.regions if x.kind == "loop_body")

    @property
    def _leaves(self) -> list[Region]:
        large = [x for x in self.regions if x.kind == "pred_region" and x.cycles >= _LEAST_CYCLES]
        return [x for x in large if not any(y is not x and x.first <= y.first and y.end <= x.end for y in large)]

    def utilization(self, region: Region) -> dict[str, float]:
        """Returns the share of used slots in a region, by kind of unit."""
        return {unit: region.slots[unit] / (size * region.cycles) for unit, size in self.capacity.items()}


def read_kernels(folder: pathlib.Path, name: str) -> list[KernelSchedule]:
    """Reads the schedules of all dumped kernels whose name contains `name`, in the order in which they were compiled.

    Raises:
        ValueError: If the dump of a kernel is not as expected, which may be so after an update of the compiler.
    """
    found = []
    for path in sorted(folder.glob(f"*-{_REGIONS}"), key=lambda x: x.stat().st_mtime):
        stem = re.sub(rf"-\d+-{_REGIONS}$", "", path.name)
        if name not in stem:
            continue
        (slots,) = folder.glob(f"{stem}-*-{_SLOTS}")
        found.append(parse_kernel(re.sub(r"^\d+-", "", stem), path.read_text(), slots.read_text()))
    return found


def parse_kernel(name: str, regions: str, slots: str) -> KernelSchedule:
    """Parses the two dumps of a kernel: its regions, and the instructions of every cycle."""
    capacity, cycles = _parse_slots(slots)
    headers: list[tuple[int, int | None, str]] = []
    parsed: dict[int, Region] = {}
    dmas = []
    for line in regions.splitlines():
        if header := _REGION.match(line):
            headers.append((int(header[1]), int(header[2]) if header[2] else None, header[3] or ""))
        elif span := _RANGE.match(line):
            number, parent, kind = headers[-1]
            first, end = int(span[1]), int(span[2])
            used = {unit: sum(cycle[i] for cycle in cycles[first:end]) for i, unit in enumerate(capacity)}
            parsed[number] = Region(number, parent, kind, first, end, used)
        elif "shalt.err" not in line and (copied := _DMA.search(line)):
            dmas.append(Dma(copied[1], int(copied[2]) * GRANULE))
    total = max((x.end for x in parsed.values()), default=0)
    if not parsed or not 0 <= len(cycles) - total <= 1:  # one more cycle may follow the regions
        raise ValueError(f"`regions` of {name!r} must span the {len(cycles)} cycles of `slots`, got {total}.")
    return KernelSchedule(name, tuple(parsed.values()), capacity, tuple(dmas))


def _parse_slots(text: str) -> tuple[dict[str, int], list[list[int]]]:
    """Parses the units with their number of slots, and the used slots of every cycle."""
    _, names, sizes, _, *lines = text.splitlines()
    units = [name.strip() for name in names.split(",")]
    cycles = [[int(used) for used in line.split()] for line in lines if line.strip()]
    if any(len(cycle) != len(units) for cycle in cycles):
        raise ValueError(f"`slots` must count {len(units)} kinds of units in every line.")
    return dict(zip(units, map(int, sizes.split()), strict=True)), cycles
