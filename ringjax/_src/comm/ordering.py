"""Orders the communication of branches on CPU devices.

XLA runs independent operations of a CPU device concurrently. Two collectives of one computation start in the order of
the program, but a loop only *starts* in that order: while it runs, collectives after it start too. Devices then reach
the collectives inside and outside of the loop in different orders, and as these share one rendezvous, the program hangs
or aborts. Only a data dependency orders a loop and a collective; `lax.optimization_barrier` is gone before scheduling.

On other platforms `after` is lowered to the identity, so that messages of several branches may be in flight at once.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.vma import varying_axes

Tree = TypeVar("Tree")


def after(tree: Tree, done: object, axis_name: AxisName | None) -> Tree:
    """Returns `tree`; on CPU devices its smallest array depends on `done`.

    A loop with collectives that depends on all arrays of the result starts when the communication that `done` depends
    on is over.

    Args:
        tree: A tree of arrays.
        done: A tree of arrays. Only one element of a large array is read, so each must be the result of one operation.
        axis_name: The mesh axis of the ring, or None to return `tree` unchanged.
    """
    finished = [x if x.size < _SMALL else x.reshape(-1)[:1] for x in jax.tree.leaves(done)]
    leaves, structure = jax.tree.flatten(tree)
    if axis_name is None or not leaves or not finished:
        return tree
    which = min(range(len(leaves)), key=lambda i: leaves[i].size)

    def on_cpu(x: Array, finished: list[Array]) -> Array:
        count = sum((y != 0).any().astype(jnp.int32) for y in finished)
        never = lax.axis_index(axis_name) + count < 0  # on no device, which the compiler does not know
        return jnp.where(never, jnp.astype(count, x.dtype), x)

    axes = varying_axes(lax.axis_index(axis_name)).union(*map(varying_axes, finished))
    missing = tuple(sorted(axes - varying_axes(leaves[which])))
    given = lax.pcast(leaves[which], missing, to="varying") if missing else leaves[which]
    leaves[which] = lax.platform_dependent(given, finished, cpu=on_cpu, default=lambda x, _: x)
    return jax.tree.unflatten(structure, leaves)


_SMALL = 2**16  # elements; reading them all costs little
