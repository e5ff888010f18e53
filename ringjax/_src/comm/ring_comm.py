"""A cargo that goes round a ring of devices while each of them works on what it has: the hop schedules.

`Circle` says which devices form a ring and how a cargo moves: hop by hop (`"ring"`) or at once (`"all_gather"`).
A *visit* is what a device does with the cargo of one device. Both schedules make each device visit every cargo of its
group exactly once, its own first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

AxisName = str | tuple[str, ...]
Strategy = Literal["ring", "all_gather"]
StrategyName = Literal["auto", "ring", "all_gather"]  # what a caller may ask for
STRATEGIES = get_args(StrategyName)
Tree = Any
State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class Circle:
    """Groups of neighboring devices on a mesh axis, each a ring of its own.

    Attributes:
        axis_name: The mesh axis, or several, taken together.
        axis_size: Devices on it.
        group: Devices of a ring, at least 2.
        strategy: How a cargo moves.
        is_uniform: Whether a device's own cargo is visited like those of others; the program is then smaller.
    """

    axis_name: AxisName
    axis_size: int
    group: int
    strategy: Strategy
    is_uniform: bool = False

    def begin(self, cargo: Tree) -> Tree:
        """Sends the cargo off for the first time; what it returns goes to `visit_all` or `sum_all`."""
        if self.is_uniform and self.strategy == "ring":
            return cargo
        if self.strategy == "ring":
            return self._rotate(cargo)
        gather = lambda x: lax.all_gather(x, self.axis_name, axis_index_groups=self._groups())  # noqa: E731
        return jax.tree.map(gather, cargo)

    def visit_all(self, cargo: Tree, begun: Tree, state: State, visit: Callable[..., State]) -> State:
        """Runs ``state = visit(state, cargo, device, is_own)`` on every cargo of the group."""
        me = lax.axis_index(self.axis_name)
        first = 0 if self.is_uniform else 1
        if first:
            state = visit(state, cargo, me, True)
        if self.strategy == "all_gather":
            pick = lambda state, hop: visit(state, self._picked(begun, me, hop), self._source(me, hop), False)  # noqa: E731
            return self._scan(pick, state, first, self.group)

        def step(carry: tuple[Tree, State], hop: Array) -> tuple[Tree, State]:
            arrived, state = carry
            coming = self._rotate(arrived)  # before the work, so that both go on at once
            return coming, visit(state, arrived, self._source(me, hop), False)

        arrived, state = self._scan(step, (begun, state), first, self.group - 1)
        return visit(state, arrived, self._source(me, self.group - 1), False)

    def sum_all(
        self, cargo: Tree, begun: Tree, sums: Tree, state: State, visit: Callable[..., tuple[State, Tree]]
    ) -> tuple[State, Tree]:
        """Like `visit_all`, with sums that belong to each cargo and end on the device that it came from.

        Args:
            cargo: What each device starts with.
            begun: What `begin` made of it.
            sums: Zeros of the shape that the sums have.
            state: Stays on the device.
            visit: ``state, added = visit(state, sums, cargo, device, is_own)``, which adds to the sums it is given.

        Returns:
            The state, and the sums of the device's own cargo.
        """
        me = lax.axis_index(self.axis_name)
        if self.strategy == "all_gather":
            return self._sum_gathered(cargo, begun, sums, state, visit)
        if self.is_uniform:
            return self._sum_uniform(begun, sums, state, visit)
        state, own = visit(state, sums, cargo, me, True)
        begun, own = lax.optimization_barrier((begun, own))  # else XLA may send both together, after this work

        def add(travelling: Tree, arrived: Tree, state: State, hop: Array | int) -> tuple[Tree, State]:
            coming = self._rotate(travelling)  # one hop behind the cargo, while this device computes its share
            state, share = visit(state, sums, arrived, self._source(me, hop), False)
            return jax.tree.map(jnp.add, coming, share), state

        def step(carry: tuple[Tree, Tree, State], hop: Array) -> tuple[Tree, Tree, State]:
            arrived, travelling, state = carry
            coming = self._rotate(arrived)
            travelling, state = add(travelling, arrived, state, hop)
            return coming, travelling, state

        arrived, travelling, state = self._scan(step, (begun, own, state), 1, self.group - 1)
        travelling, state = add(travelling, arrived, state, self.group - 1)
        return state, self._rotate(travelling)

    def _sum_uniform(
        self, cargo: Tree, sums: Tree, state: State, visit: Callable[..., tuple[State, Tree]]
    ) -> tuple[State, Tree]:
        """The sums move on with their cargo."""
        me = lax.axis_index(self.axis_name)

        def add(travelling: Tree, arrived: Tree, state: State, hop: Array | int) -> tuple[Tree, State]:
            state, share = visit(state, sums, arrived, self._source(me, hop), False)
            return self._rotate(jax.tree.map(jnp.add, travelling, share)), state

        def step(carry: tuple[Tree, Tree, State], hop: Array) -> tuple[Tree, Tree, State]:
            arrived, travelling, state = carry
            coming = self._rotate(arrived)
            return coming, *add(travelling, arrived, state, hop)

        arrived, travelling, state = self._scan(step, (cargo, sums, state), 0, self.group - 1)
        travelling, state = add(travelling, arrived, state, self.group - 1)
        return state, travelling

    def _sum_gathered(
        self, cargo: Tree, begun: Tree, sums: Tree, state: State, visit: Callable[..., tuple[State, Tree]]
    ) -> tuple[State, Tree]:
        """Each device sums for all of its group, and what belongs together is added up at the end."""
        me = lax.axis_index(self.axis_name)
        every = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(self.group, *x.shape)), sums)

        def put(every: Tree, share: Tree, source: Array) -> Tree:
            place = lambda a, x: lax.dynamic_update_index_in_dim(a, x, source % self.group, axis=0)  # noqa: E731
            return jax.tree.map(place, every, share)

        def step(carry: tuple[Tree, State], hop: Array) -> tuple[Tree, State]:
            every, state = carry
            source = self._source(me, hop)
            state, share = visit(state, sums, self._picked(begun, me, hop), source, False)
            return put(every, share, source), state

        if not self.is_uniform:
            state, own = visit(state, sums, cargo, me, True)
            every = put(every, own, me)
        every, state = self._scan(step, (every, state), 0 if self.is_uniform else 1, self.group)
        scatter = lambda x: lax.psum_scatter(x, self.axis_name, axis_index_groups=self._groups())  # noqa: E731
        return state, jax.tree.map(scatter, every)

    def _scan(self, step: Callable[[State, Array], State], state: State, first: int, end: int) -> State:
        """Runs `step` on the hops from `first` up to `end`."""
        hops = jnp.arange(first, end, dtype=jnp.int32)
        return lax.scan(lambda state, hop: (step(state, hop), None), state, hops)[0] if end > first else state

    def _source(self, me: Array, hop: Array | int) -> Array:
        """The device whose cargo is here after so many hops."""
        return me - me % self.group + (me - hop) % self.group

    def _picked(self, gathered: Tree, me: Array, hop: Array) -> Tree:
        index = self._source(me, hop) % self.group
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), gathered)

    def _rotate(self, tree: Tree) -> Tree:
        neighbors = [(i, i - i % self.group + (i + 1) % self.group) for i in range(self.axis_size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, neighbors), tree)

    def _groups(self) -> list[list[int]]:
        return [list(range(i, i + self.group)) for i in range(0, self.axis_size, self.group)]
