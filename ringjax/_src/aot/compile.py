"""Attention on a ring of devices that are not there, compiled by the compiler of those devices.

Compilers come with packages of their own: `libtpu` (with ``jax[tpu]``) for TPUs, `jax-cuda12-plugin` and
`jax-cuda12-pjrt` for GPUs. They need no device, only some variables (`ENVIRONMENT`) that are set before JAX starts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ringjax._src.aot.targets import CpuTarget, CudaTarget, Target, TpuTarget
from ringjax._src.api import dilated_attention
from ringjax._src.comm.mesh import Ring
from ringjax._src.comm.ring_comm import StrategyName
from ringjax._src.pattern import DilationPattern

# Without these, the TPU compiler looks for the machine that it would run on, for minutes.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """An attention and its arrays: (batch, seq_len, num_heads, head_dim), fewer `num_kv_heads` for grouped queries.

    With `stored_length` the arrays are that long, and the sequence is padded.
    """

    pattern: DilationPattern
    seq_len: int
    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    is_causal: bool = True
    layout: str = "zigzag"
    implementation: Literal["xla", "pallas"] | None = None
    strategy: StrategyName = "auto"
    stored_length: int | None = None
    has_segment_ids: bool = False


class CompiledProgram(NamedTuple):
    """A compiled program, and the seconds that compiling took."""

    compiled: jax.stages.Compiled
    seconds: float


def compile_for(target: Target, workload: Workload, is_gradient: bool, dump_to: str | None = None) -> CompiledProgram:
    """Compiles a workload for all devices of a target, as one ring.

    Args:
        target: The devices.
        workload: What they compute.
        is_gradient: Whether to take the gradients with respect to query, key and value too.
        dump_to: Folder for what the compiler has to show, PTX among it, or None.

    Returns:
        The program and the time it took.

    Raises:
        RuntimeError: If the compiler is not installed, or refuses: `jax.errors.JaxRuntimeError` where the program
            needs more memory than there is.
    """
    mesh = ring_mesh(target)
    program = lowered(mesh, workload, is_gradient)
    begin = time.perf_counter()
    options: dict[str, str | bool] = dict(target.options)
    if dump_to:
        options |= {"xla_dump_to": dump_to, "xla_dump_emitter_re": "ptx"}
    compiled = program.compile(compiler_options=options)
    return CompiledProgram(compiled, time.perf_counter() - begin)


def ring_mesh(target: Target) -> Mesh:
    """All devices of a target on one axis, ``"ring"``; on TPUs each is wired to the next, and the last to the first."""
    if isinstance(target, CpuTarget):
        return Mesh(np.array(jax.devices("cpu")[: target.devices]), ("ring",))
    if isinstance(target, CudaTarget):
        described = topologies.get_topology_desc(
            platform="cuda", topology=target.topology, target_config=target.description()
        )
        return Mesh(np.array(described.devices), ("ring",))
    described = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    at = {_place(device, target): device for device in described.devices}
    return Mesh(np.array([at[place] for place in neighbor_cycle(target.grid)]), ("ring",))


def _place(device: Any, target: TpuTarget) -> tuple[int, ...]:  # noqa: ANN401 - devices of TPUs only have coordinates
    return tuple(device.coords[: len(target.grid)])


def neighbor_cycle(grid: Sequence[int]) -> list[tuple[int, ...]]:
    """A closed walk through a grid that visits every place once and moves by one step along one axis.

    Args:
        grid: Places along each axis.

    Returns:
        The places in order; the last is one step from the first. (A line of places has no such walk; it is returned
        from end to end.)

    Raises:
        ValueError: If there is no such walk because the number of places is odd.

    Example:
        >>> neighbor_cycle((2, 3))
        [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]
    """
    axes = [axis for axis, size in enumerate(grid) if size > 1]
    if len(axes) < 2:
        places = _snake([grid[axis] for axis in axes])
    else:
        *rows, columns = (grid[axis] for axis in axes)
        lines = _snake(rows)  # neighbors in this list are neighbors in the grid: two axes are left
        if len(lines) % 2 == 0:
            places = [(*lines[row], column) for row, column in _cycle(len(lines), columns)]
        elif columns % 2 == 0:
            places = [(*lines[row], column) for column, row in _cycle(columns, len(lines))]
        else:
            raise ValueError(f"`grid` must have an even number of places, got {tuple(grid)}.")
    return [tuple(place[axes.index(axis)] if axis in axes else 0 for axis in range(len(grid))) for place in places]


def _cycle(rows: int, columns: int) -> list[tuple[int, int]]:
    """Along the first row, through the other rows to and fro without the first column, and back in that column."""
    there = [(0, column) for column in range(columns)]
    for row in range(1, rows):
        across = range(columns - 1, 0, -1) if row % 2 else range(1, columns)
        there += [(row, column) for column in across]
    return there + [(row, 0) for row in range(rows - 1, 0, -1)]


def _snake(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """All places, each one step from the one before."""
    places: list[tuple[int, ...]] = [()]
    for size in sizes:
        steps = range(size)
        places = [
            (*place, step) for i, place in enumerate(places) for step in (steps if i % 2 == 0 else reversed(steps))
        ]
    return places


def lowered(mesh: Mesh, workload: Workload, is_gradient: bool) -> jax.stages.Lowered:
    """A workload on the ``"ring"`` axis of a mesh, lowered: the attention, or also its gradients for a cotangent."""
    ring = Ring(mesh, layout=workload.layout, strategy=workload.strategy)
    length = workload.stored_length or workload.seq_len

    def attention(query: Array, key: Array, value: Array, *ids: Array) -> Array:
        return dilated_attention(
            query,
            key,
            value,
            workload.pattern,
            is_causal=workload.is_causal,
            segment_ids=ids[0] if ids else None,
            seq_len=workload.seq_len,
            ring=ring,
            implementation=workload.implementation,
        )

    def gradient(
        query: Array, key: Array, value: Array, cotangent: Array, *ids: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        out, pull = jax.vjp(lambda *x: attention(*x, *ids), query, key, value)
        return out, pull(cotangent)

    def shaped(*rest: int, dtype: str = workload.dtype) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(*ring.spec()[: 2 + len(rest)])
        return jax.ShapeDtypeStruct((workload.batch, length, *rest), dtype, sharding=NamedSharding(mesh, spec))

    query = shaped(workload.num_heads, workload.head_dim)
    key = shaped(workload.num_kv_heads or workload.num_heads, workload.head_dim)
    ids = [shaped(dtype="int32")] if workload.has_segment_ids else []
    given = (query, key, key, query) if is_gradient else (query, key, key)
    return jax.jit(gradient if is_gradient else attention).lower(*given, *ids)
