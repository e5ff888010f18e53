"""Ahead-of-time compilation of attention on a ring, without access to the devices.

The compilers are part of separate packages: `libtpu` (with ``jax[tpu]``) for TPUs, `jax-cuda12-plugin` and
`jax-cuda12-pjrt` for GPUs. They need no device, only the variables of `ENVIRONMENT` before JAX is initialized.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ringjax._src.aot.targets import CpuTarget, CudaTarget, Target
from ringjax._src.api import dilated_attention
from ringjax._src.comm.mesh import Ring
from ringjax._src.planning.spec import AttentionSpec

# Without these variables, the TPU compiler spends minutes looking for a TPU host.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables that the compilers need, to be set before JAX is initialized."""


class CompiledProgram(NamedTuple):
    """A compiled program and its compile time in seconds."""

    compiled: jax.stages.Compiled
    seconds: float


def compile_for(
    target: Target, spec: AttentionSpec, is_gradient: bool, dump_to: str | None = None, *, has_segment_ids: bool = False
) -> CompiledProgram:
    """Compiles an attention call, optionally with its gradients, for a ring of all devices of a target.

    The compiler dumps its files, including PTX, to the directory `dump_to`, if given.

    Raises:
        RuntimeError: If the compiler is not installed, or compilation fails; `jax.errors.JaxRuntimeError` if the
            program needs more memory than a device has.
    """
    program = lowered(ring_mesh(target), spec, is_gradient, has_segment_ids)
    options: dict[str, str | bool] = dict(target.options)
    if dump_to:
        options |= {"xla_dump_to": dump_to, "xla_dump_emitter_re": "ptx"}
    begin = time.perf_counter()
    compiled = program.compile(compiler_options=options)
    return CompiledProgram(compiled, time.perf_counter() - begin)


def ring_mesh(target: Target) -> Mesh:
    """Returns a mesh of all devices of a target with one axis, ``"ring"``.

    On TPUs, consecutive devices are neighbors in the grid, and so are the last and the first.

    Args:
        target: The devices.

    Returns:
        The mesh.

    Raises:
        RuntimeError: If the compiler of the target is not installed.
        ValueError: If the number of chips of a TPU grid is odd.

    Example:
        >>> from ringjax.aot import ring_mesh, target_named
        >>> dict(ring_mesh(target_named("cpu:1")).shape)
        {'ring': 1}
    """
    if isinstance(target, CpuTarget):
        devices: Any = jax.devices("cpu")[: target.devices]
    elif isinstance(target, CudaTarget):
        options = {"topology": target.topology, "target_config": target.description()}
        devices = topologies.get_topology_desc(platform="cuda", **options).devices
    else:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices
        by_coordinates = {tuple(device.coords[: len(target.grid)]): device for device in devices}
        devices = [by_coordinates[point] for point in neighbor_cycle(target.grid)]
    return Mesh(np.array(devices), ("ring",))


def neighbor_cycle(grid: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns a Hamiltonian cycle through a grid: through every point once, in steps along one axis.

    Args:
        grid: Size of each axis.

    Returns:
        The points in order; the last is one step from the first. (A one-dimensional grid has no cycle, and is returned
        from end to end.)

    Raises:
        ValueError: If the grid has no cycle because its number of points is odd.

    Example:
        >>> from ringjax.aot import neighbor_cycle
        >>> neighbor_cycle((2, 3))
        [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]
    """
    axes = [axis for axis, size in enumerate(grid) if size > 1]
    if len(axes) < 2:
        points = _snake([grid[axis] for axis in axes])
    else:
        *outer, columns = (grid[axis] for axis in axes)
        lines = _snake(outer)  # neighbors in this list are neighbors in the grid, which reduces the problem to 2D
        if len(lines) % 2 == 0:
            points = [(*lines[row], column) for row, column in _cycle(len(lines), columns)]
        elif columns % 2 == 0:
            points = [(*lines[row], column) for column, row in _cycle(columns, len(lines))]
        else:
            raise ValueError(f"`grid` must have an even number of points, got {tuple(grid)}.")
    return [tuple(point[axes.index(axis)] if axis in axes else 0 for axis in range(len(grid))) for point in points]


def _cycle(rows: int, columns: int) -> list[tuple[int, int]]:
    """Follows the first row, snakes through the other rows without the first column, and returns in that column."""
    path = [(0, column) for column in range(columns)]
    for row in range(1, rows):
        across = range(columns - 1, 0, -1) if row % 2 else range(1, columns)
        path += [(row, column) for column in across]
    return path + [(row, 0) for row in range(rows - 1, 0, -1)]


def _snake(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns all points of a grid, each one step from the previous one."""
    points: list[tuple[int, ...]] = [()]
    for size in sizes:
        steps = range(size)
        points = [
            (*point, step) for i, point in enumerate(points) for step in (steps if i % 2 == 0 else reversed(steps))
        ]
    return points


def lowered(mesh: Mesh, spec: AttentionSpec, is_gradient: bool, has_segment_ids: bool = False) -> jax.stages.Lowered:
    """Lowers an attention call, optionally with its gradients, on the ``"ring"`` axis of a mesh.

    Args:
        mesh: A mesh with this axis only.
        spec: The spec of a plan for a ring of this size.
        is_gradient: Whether to compute gradients.
        has_segment_ids: Whether the caller passes segment ids; padding needs none.

    Raises:
        ValueError: If the spec is not one of a ring over all devices of the mesh.
    """
    if spec.ring_size != mesh.size or spec.head_shards > 1 or spec.inner_devices is not None:
        raise ValueError(
            f"`spec` must describe a ring of {mesh.size} devices over one mesh axis, got a ring of {spec.ring_size}, "
            f"heads sharded over {spec.head_shards} devices and inner_devices={spec.inner_devices}."
        )
    options = {"layout": spec.layout, "strategy": spec.strategy, "memory_budget": spec.memory_budget}
    ring = Ring(mesh, **options)  # type: ignore[arg-type]

    def attention(query: Array, key: Array, value: Array, sinks: Array | None, *ids: Array) -> Array:
        return dilated_attention(
            query,
            key,
            value,
            spec.pattern,
            is_causal=spec.is_causal,
            segment_ids=ids[0] if ids else None,
            seq_len=spec.seq_len,
            sink_logits=sinks,
            ring=ring,
            implementation=spec.implementation,  # type: ignore[arg-type]
            block_sizes=spec.block_sizes,
        )

    def gradient(
        query: Array, key: Array, value: Array, sinks: Array | None, cotangent: Array, *ids: Array
    ) -> tuple[Array, tuple[Array | None, ...]]:
        out, pull = jax.vjp(lambda *x: attention(*x, *ids), query, key, value, sinks)
        return out, pull(cotangent)

    def shaped(*rest: int, dtype: str = spec.dtype) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*ring.spec()[: 2 + len(rest)]))
        return jax.ShapeDtypeStruct((spec.batch, spec.stored_length, *rest), dtype, sharding=sharding)

    num_heads = spec.kv_heads * spec.q_per_kv
    query, key = shaped(num_heads, spec.head_dim), shaped(spec.kv_heads, spec.head_dim)
    ids = [shaped(dtype="int32")] if has_segment_ids else []
    replicated = NamedSharding(mesh, PartitionSpec())
    sinks = jax.ShapeDtypeStruct((num_heads,), "float32", sharding=replicated) if spec.has_sinks else None
    given = (query, key, key, sinks, query) if is_gradient else (query, key, key, sinks)
    return jax.jit(gradient if is_gradient else attention).lower(*given, *ids)
