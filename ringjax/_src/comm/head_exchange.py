"""All-to-all over heads: trades a shard of the sequence with all heads for a longer stretch with some of the heads.

This is the exchange of [DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509). 4 devices with 4 heads, before and after
(``s0h1``: shard 0 of the sequence, head 1):

    device 0    s0h0 s0h1 s0h2 s0h3        s0h0 s1h0 s2h0 s3h0
    device 1    s1h0 s1h1 s1h2 s1h3        s0h1 s1h1 s2h1 s3h1
    device 2    s2h0 s2h1 s2h2 s2h3   →    s0h2 s1h2 s2h2 s3h2
    device 3    s3h0 s3h1 s3h2 s3h3        s0h3 s1h3 s2h3 s3h3

If the devices do not divide the key/value heads, each head goes to several devices, which share its query heads.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ringjax._src.comm.ring_comm import RingComm
from ringjax._src.indexing import quotient, remainder


class HeadParts(NamedTuple):
    """Into how many parts an exchange cuts the heads; their product is the number of devices."""

    kv: int  # parts of the key/value heads
    query: int  # parts of the query heads of a key/value head, each of which needs a copy of its keys and values


def head_parts(devices: int, kv_heads: int, q_per_kv: int) -> HeadParts | None:
    """Returns how to share heads evenly with the fewest copies of keys and values, or None if that is impossible.

    Example:
        >>> head_parts(4, kv_heads=8, q_per_kv=1), head_parts(4, kv_heads=2, q_per_kv=2)
        (HeadParts(kv=4, query=1), HeadParts(kv=2, query=2))
        >>> head_parts(4, kv_heads=2, q_per_kv=1)
    """
    kv = math.gcd(devices, kv_heads)
    return None if q_per_kv % (devices // kv) else HeadParts(kv, devices // kv)


class NamedAxes(NamedTuple):
    """An array and a letter for each of its axes.

    ``k`` key/value heads, ``g`` query heads per key/value head, ``c`` chunks of the device, ``n`` rows of a chunk (the
    next axis after ``c``); other letters are not exchanged. Arrays without ``g`` are copied to all devices that share a
    key/value head, and their gradients are summed.
    """

    array: Array
    axes: str


@dataclasses.dataclass(frozen=True)
class HeadExchange:
    """Exchanges heads within groups of neighboring devices."""

    comm: RingComm  # the groups
    parts: HeadParts  # how the heads are shared

    def kv_part(self) -> Array:
        """Returns which part of the key/value heads this device receives."""
        return quotient(self._member(), self.parts.query)

    def query_part(self) -> Array:
        """Returns which part of the query heads of each key/value head this device receives."""
        return remainder(self._member(), self.parts.query)

    def to_heads(self, *given: NamedAxes) -> list[Array]:
        """Returns arrays with the rows of all devices, in sequence order, for the heads of this device."""
        received = self._exchange([self._split_heads(x) for x in given])
        return [self._join_rows(x._replace(array=y)) for x, y in zip(given, received, strict=True)]

    def to_rows(self, *given: NamedAxes) -> list[Array]:
        """Inverts `to_heads`; copies of one key/value head are summed."""
        received = self._exchange([self._split_rows(x) for x in given])
        return [self._join_heads(x._replace(array=y)) for x, y in zip(given, received, strict=True)]

    def gather_rows(self, given: NamedAxes) -> Array:
        """Returns an array without heads with the rows of all devices, in sequence order."""
        return self._join_rows(given._replace(array=self.comm.all_gather(given.array)))

    def _member(self) -> Array:
        return remainder(self.comm.device(), self.comm.ring_devices)

    def _exchange(self, arrays: list[Array]) -> list[Array]:
        """Exchanges arrays (devices, ...); those of one dtype travel in one message."""
        received = dict[int, Array]()
        for dtype in dict.fromkeys(x.dtype for x in arrays):
            same = [i for i, x in enumerate(arrays) if x.dtype == dtype]
            flat = [arrays[i].reshape(self.comm.ring_devices, -1) for i in same]
            message = self.comm.all_to_all(jnp.concatenate(flat, axis=1) if len(flat) > 1 else flat[0])
            ends = [sum(x.shape[1] for x in flat[: i + 1]) for i in range(len(flat) - 1)]
            received |= zip(same, jnp.split(message, ends, axis=1), strict=True)
        return [received[i].reshape(x.shape) for i, x in enumerate(arrays)]

    def _split_heads(self, given: NamedAxes) -> Array:
        """Moves the parts of the heads to a new leading axis, one entry per device."""
        (x, axes), (kv, query) = given, self.parts
        k, shape = axes.index("k"), list(given.array.shape)
        if "g" not in axes:
            x = jnp.moveaxis(x.reshape(*shape[:k], kv, -1, *shape[k + 1 :]), k, 0)
            x = jnp.broadcast_to(x[:, None], (kv, query, *x.shape[1:]))
        else:
            g = axes.index("g")
            shape[g : g + 1], shape[k : k + 1] = (query, shape[g] // query), (kv, shape[k] // kv)
            x = jnp.moveaxis(x.reshape(shape), (k, g + 1), (0, 1))
        return x.reshape(kv * query, *x.shape[2:])

    def _join_heads(self, given: NamedAxes) -> Array:
        """Inverts `_split_heads`."""
        (x, axes), (kv, query) = given, self.parts
        k = axes.index("k")
        x = x.reshape(kv, query, *x.shape[1:])
        if "g" not in axes:
            x = jnp.moveaxis(x.sum(axis=1) if query > 1 else x[:, 0], 0, k)
        else:
            g = axes.index("g")
            x = jnp.moveaxis(x, (0, 1), (k, g + 1))
            x = x.reshape(*x.shape[: g + 1], -1, *x.shape[g + 3 :])
        return x.reshape(*x.shape[:k], -1, *x.shape[k + 2 :])

    def _join_rows(self, given: NamedAxes) -> Array:
        """Joins the rows of the devices, on the leading axis, in sequence order."""
        x, axes = given
        n = axes.index("n")
        x = self._reverse_back(jnp.moveaxis(x, 0, n), n)
        return x.reshape(*x.shape[:n], -1, *x.shape[n + 2 :])

    def _split_rows(self, given: NamedAxes) -> Array:
        """Inverts `_join_rows`."""
        x, axes = given
        n = axes.index("n")
        x = x.reshape(*x.shape[:n], self.comm.ring_devices, -1, *x.shape[n + 1 :])
        return jnp.moveaxis(self._reverse_back(x, n), n, 0)

    def _reverse_back(self, x: Array, n: int) -> Array:
        """Reverses the order of the devices, axis `n`, in the second chunk, axis `n - 1`: see the zigzag layout."""
        if x.shape[n - 1] == 1:
            return x
        front, back = jnp.split(x, 2, axis=n - 1)
        return jnp.concatenate([front, jnp.flip(back, axis=n)], axis=n - 1)
