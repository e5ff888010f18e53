"""Communication within groups of devices that share a segment: rotation along a ring, all-gather, all-to-all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringjax._src.indexing import quotient, remainder

AxisName = str | tuple[str, ...]
StrategyName = Literal["auto", "ring", "all_gather", "all_to_all", "all_to_all_ring"]
STRATEGIES: list[StrategyName] = ["auto"]  # what `Ring(strategy=...)` accepts; `branches/registry.py` adds the others

Tree = TypeVar("Tree")
State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class RingComm:
    """Groups of devices on a mesh axis, each of which forms a ring. Collectives other than `rotate` need stride 1.

    The members of a ring are `stride` devices apart. 8 devices in rings of 2 with stride 2, which form 4 teams:

        device  0  1  2  3  4  5  6  7
        team    0  0  1  1  2  2  3  3
        ring    a  b  a  b  c  d  c  d
    """

    axis_name: AxisName  # the mesh axis, or tuple of axes
    axis_size: int  # number of devices along it
    ring_devices: int  # number of devices of a ring
    stride: int = 1  # number of neighboring devices that form a team, which has one member in each of `stride` rings

    def device(self) -> Array:
        """Returns the index of this device on the mesh axis, or of its team."""
        return quotient(lax.axis_index(self.axis_name), self.stride)

    def source(self, hop: Array | int) -> Array:
        """Returns the device (or team) whose payload is here after this many hops."""
        me = self.device()
        first = me - remainder(me, self.ring_devices)
        return first + remainder(me - first + self.ring_devices - hop, self.ring_devices)

    def rotate(self, tree: Tree, hops: int = 1) -> Tree:
        """Sends arrays to the device that is this many hops ahead on the ring, or behind if negative."""

        def target(i: int) -> int:
            team, member = divmod(i, self.stride)
            first = team - team % self.ring_devices
            return (first + (team + hops) % self.ring_devices) * self.stride + member

        pairs = [(i, target(i)) for i in range(self.axis_size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), tree)

    def all_to_all(self, x: Array) -> Array:
        """Sends entry ``j`` of the leading axis to device ``j`` of the group; returns what the devices sent here."""
        groups = self._groups() if self.ring_devices < self.axis_size else None
        return lax.all_to_all(x, self.axis_name, 0, 0, axis_index_groups=groups, tiled=True)

    def all_gather(self, tree: Tree) -> Tree:
        """Gathers the arrays of all devices of the ring along a new leading axis."""
        gather = lambda x: lax.all_gather(x, self.axis_name, axis_index_groups=self._groups())  # noqa: E731
        return jax.tree.map(gather, tree)

    def reduce_scatter(self, tree: Tree) -> Tree:
        """Sums arrays over the devices of the ring; each device gets its entry of the leading axis."""
        scatter = lambda x: lax.psum_scatter(x, self.axis_name, axis_index_groups=self._groups())  # noqa: E731
        return jax.tree.map(scatter, tree)

    def _groups(self) -> list[list[int]]:
        assert self.stride == 1
        return [list(range(i, i + self.ring_devices)) for i in range(0, self.axis_size, self.ring_devices)]


def scan_range(step: Callable[[State, Array], State], state: State, first: int, end: int) -> State:
    """Runs `step` on the numbers from `first` to `end - 1`: hops, rounds or pieces."""
    if end <= first:
        return state
    return lax.scan(lambda state, i: (step(state, i), None), state, jnp.arange(first, end, dtype=jnp.int32))[0]
