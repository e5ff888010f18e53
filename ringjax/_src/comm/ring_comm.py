"""Communication within groups of devices that share a segment: rotation along a ring, all-gather, reduce-scatter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringjax._src.indexing import remainder

AxisName = str | tuple[str, ...]
StrategyName = Literal["auto", "ring", "all_gather"]
STRATEGIES: list[StrategyName] = ["auto", "ring", "all_gather"]  # what `Ring(strategy=...)` accepts

Tree = TypeVar("Tree")
State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class RingComm:
    """Groups of neighboring devices on a mesh axis, each of which forms a ring.

    Attributes:
        axis_name: The mesh axis, or tuple of axes.
        axis_size: Number of devices along it.
        ring_devices: Number of devices of a ring.
    """

    axis_name: AxisName
    axis_size: int
    ring_devices: int

    def device(self) -> Array:
        """Returns the index of this device on the mesh axis."""
        return lax.axis_index(self.axis_name)

    def source(self, hop: Array | int) -> Array:
        """Returns the device whose payload is here after this many hops."""
        me = self.device()
        first = me - remainder(me, self.ring_devices)
        return first + remainder(me - first + self.ring_devices - hop, self.ring_devices)

    def rotate(self, tree: Tree) -> Tree:
        """Sends arrays to the next device of the ring."""
        size = self.ring_devices
        neighbors = [(i, i - i % size + (i + 1) % size) for i in range(self.axis_size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, neighbors), tree)

    def all_gather(self, tree: Tree) -> Tree:
        """Gathers the arrays of all devices of the ring along a new leading axis."""
        gather = lambda x: lax.all_gather(x, self.axis_name, axis_index_groups=self._groups())  # noqa: E731
        return jax.tree.map(gather, tree)

    def reduce_scatter(self, tree: Tree) -> Tree:
        """Sums arrays over the devices of the ring; each device gets its entry of the leading axis."""
        scatter = lambda x: lax.psum_scatter(x, self.axis_name, axis_index_groups=self._groups())  # noqa: E731
        return jax.tree.map(scatter, tree)

    def _groups(self) -> list[list[int]]:
        return [list(range(i, i + self.ring_devices)) for i in range(0, self.axis_size, self.ring_devices)]


def scan_hops(step: Callable[[State, Array], State], state: State, first: int, end: int) -> State:
    """Runs `step` on the hops from `first` to `end - 1`."""
    if end <= first:
        return state
    return lax.scan(lambda state, hop: (step(state, hop), None), state, jnp.arange(first, end, dtype=jnp.int32))[0]
