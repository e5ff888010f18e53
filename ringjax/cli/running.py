"""Runs, checks and times attention on the available devices."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax._src.api import dilated_attention
from ringjax._src.comm.layout import to_layout
from ringjax._src.comm.mesh import Ring
from ringjax._src.pattern import DilationPattern
from ringjax._src.reference import reference_attention

Attention = Callable[..., Array]


def ring_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh of all devices (or those given) with one axis, ``"ring"``, ordered by their links."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), ("ring",), devices=devices, axis_types=(AxisType.Auto,))


def random_arrays(length: int, heads: int, dim: int, kv_heads: int | None = None, batch: int = 1) -> list[np.ndarray]:
    """Returns a float32 query, key, value and cotangent, identical in every process."""
    rng = np.random.default_rng(0)
    counts = (heads, kv_heads or heads, kv_heads or heads, heads)
    return [rng.standard_normal((batch, length, n, dim), np.float32) for n in counts]


def on_devices(x: np.ndarray, dtype: Any, ring: Ring) -> Array:  # noqa: ANN401 - what numpy takes for a dtype
    """Shards an array over a ring in its layout; each process provides the shards of its devices."""
    assert isinstance(ring.mesh, Mesh)
    stored = np.asarray(to_layout(x, ring.layout, ring.size("axis_name"))).astype(dtype)
    sharding = NamedSharding(ring.mesh, ring.spec())
    return jax.make_array_from_callback(stored.shape, sharding, lambda index: stored[index])


def with_gradient(attention: Attention) -> Callable[..., tuple[Array, ...]]:
    """Returns a compiled function from query, key, value and cotangent to the output and three gradients."""

    @jax.jit
    def both(query: Array, key: Array, value: Array, cotangent: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(attention, query, key, value)
        return out, *pull(cotangent)

    return both


def attention_on(ring: Ring | None, pattern: DilationPattern, is_causal: bool, **options: Any) -> Attention:  # noqa: ANN401
    """Returns `dilated_attention` as a function of query, key and value."""
    return functools.partial(dilated_attention, pattern=pattern, is_causal=is_causal, ring=ring, **options)


def error_against_reference(
    ring: Ring, pattern: DilationPattern, arrays: Sequence[np.ndarray], is_causal: bool
) -> float:
    """Returns the largest error of output and gradients, ``max|x - ref| / max(1, max|ref|)``, in float32."""
    reference = with_gradient(functools.partial(reference_attention, pattern=pattern, is_causal=is_causal))
    largest = jax.jit(lambda x, y: jnp.max(jnp.abs(x - y)) / jnp.maximum(1.0, jnp.max(jnp.abs(y))))
    with jax.default_matmul_precision("highest"):
        expected = [np.asarray(x) for x in reference(*arrays)]
        got = with_gradient(attention_on(ring, pattern, is_causal))(*(on_devices(x, x.dtype, ring) for x in arrays))
        return max(float(largest(x, on_devices(y, y.dtype, ring))) for x, y in zip(got, expected, strict=True))


def median_seconds(function: Callable[..., Any], *arguments: Any, budget: float, least: int = 2) -> float:  # noqa: ANN401
    """Returns the median time of a function, called at least `least` times and for about `budget` seconds.

    Every process calls it equally often, as decided by the first one: otherwise one would wait for the others forever.
    """

    def timed() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        return time.perf_counter() - begin

    timed()  # compiles
    count = max(least, int(min(1000, budget / max(timed(), 1e-6))))
    if jax.process_count() > 1:
        count = int(multihost_utils.broadcast_one_to_all(np.int32(count)))
    return statistics.median([timed() for _ in range(count)])


def hop_bandwidth(mesh: Mesh, message_bytes: int, budget: float, hops: int = 8) -> float:
    """Measures the bytes per second that each device sends to the next while all devices send."""
    size = mesh.shape["ring"]
    neighbors = [(i, (i + 1) % size) for i in range(size)]
    spec = PartitionSpec("ring")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def rotate(x: Array) -> Array:
        return lax.fori_loop(0, hops, lambda _, x: lax.ppermute(x, "ring", neighbors), x)

    row = np.zeros((size, message_bytes // 4), np.float32)
    message = jax.make_array_from_callback(row.shape, NamedSharding(mesh, spec), lambda index: row[index])
    return message_bytes * hops / median_seconds(rotate, message, budget=budget)
