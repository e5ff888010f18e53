"""Parameters of layers and models on explicit meshes.

For the gradient of a projection of sharded activations, JAX requires that the kernel is replicated over their mesh
axes. Users may shard parameters over these axes to save memory (FSDP), or not place them on the mesh at all.
"""

from __future__ import annotations

from typing import TypeVar

import jax
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ringjax._src.comm.axes import explicit_axes, reshard_explicit
from ringjax._src.comm.mesh import Ring

Module = TypeVar("Module", bound=nnx.Module)


def explicit_mesh(ring: Ring | None, x: Array) -> Mesh | AbstractMesh | None:
    """Returns the mesh of a ring, or else that of the activations `x`, if it has explicit axes."""
    mesh = jax.typeof(x).sharding.mesh if ring is None else ring.resolve()
    return mesh if not mesh.empty and explicit_axes(mesh) else None


def on_mesh(module: Module, ring: Ring | None, x: Array) -> Module:
    """Returns a module whose parameters are replicated over an explicit mesh, except over the axis of the heads.

    Args:
        module: The module, which is returned unchanged on other meshes.
        ring: The ring, or None.
        x: The input of the module.
    """
    if explicit_mesh(ring, x) is None:
        return module
    graph, state = nnx.split(module)
    specs = nnx.get_partition_spec(state)
    return nnx.merge(graph, jax.tree.map(lambda p, spec: param_on_mesh(p, spec, ring, x), state, specs))


def param_on_mesh(param: Array, spec: PartitionSpec, ring: Ring | None, x: Array) -> Array:
    """Shards a parameter over an explicit mesh by `spec`, ignoring an entry for stacked layers."""
    mesh = explicit_mesh(ring, x)
    if mesh is None:
        return param
    return reshard_explicit(param, mesh, PartitionSpec(*spec[max(0, len(spec) - param.ndim) :]))
