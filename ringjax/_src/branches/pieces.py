"""The order in which a branch sends its heads: in *pieces*, to save memory.

A piece passes through three stages: its rows are sent, a device attends to what has arrived, and the results return to
the devices of the rows. `in_turn` completes a piece before it starts the next. `pipelined` sends the next piece and
returns the previous one while a device attends, so that messages overlap with computation. With 4 pieces:

    step    sends   attends   returns
    start   0
    0       1       0
    1       2       1         0
    2       3       2         1
    3               3         2
    end                       3

Steps 1 to `num - 2` are one loop: the program does not grow with the number of pieces. On CPU
devices, overlapping saves no time, and collectives must be ordered (see `ordering.py`). There the stages of a step
follow one another, in the order that holds the fewest rows: return, attend, send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array

from ringjax._src.branches.protocol import InFlight
from ringjax._src.comm.ordering import after
from ringjax._src.comm.ring_comm import AxisName, scan_range

State = TypeVar("State")
Found = Any  # results of one piece


class Stages(NamedTuple):
    """What is done with one piece.

    Attributes:
        send: Sends the rows of piece `i`: ``(i, done) -> in_flight``. On CPU devices it first waits for `done`.
        attend: Computes with what has arrived: ``(i, in_flight) -> found``.
        collect: Returns the results to the devices of the rows and adds them to the state:
            ``(i, found, state) -> state``.
    """

    send: Callable[[Array, object], InFlight]
    attend: Callable[[Array, InFlight], Found]
    collect: Callable[[Array, Found, Any], Any]


def in_turn(stages: Stages, num: int, state: State) -> State:
    """Sends, attends to and collects one piece after the other."""

    def step(state: State, i: Array) -> State:
        return stages.collect(i, stages.attend(i, stages.send(i, None)), state)

    return scan_range(step, state, 0, num)


def pipelined(stages: Stages, num: int, arrived: InFlight, state: State, hop_axis: AxisName | None) -> State:
    """Attends to each piece while the next one is sent and the previous one returns.

    Args:
        stages: What is done with one piece.
        num: Number of pieces.
        arrived: Piece 0, as sent.
        state: Where results are collected.
        hop_axis: The mesh axis of the ring if `attend` has hops, which CPU devices must order; else None.
    """

    def attend_and_send(i: Array, arrived: InFlight, state: State) -> tuple[InFlight, Found]:
        found = stages.attend(i, after(arrived, state, hop_axis))
        return stages.send(i + 1, found), found

    def step(carry: tuple[InFlight, Found, State], i: Array) -> tuple[InFlight, Found, State]:
        arrived, found, state = carry
        state = stages.collect(i - 1, found, state)
        return *attend_and_send(i, arrived, state), state

    first, last = jnp.int32(0), jnp.int32(num - 1)
    if num > 1:
        arrived, found = attend_and_send(first, arrived, state)
        arrived, found, state = scan_range(step, (arrived, found, state), 1, num - 1)
        state = stages.collect(last - 1, found, state)
    found = stages.attend(last, after(arrived, state, hop_axis))
    return stages.collect(last, found, state)
