"""Time per token and bytes of a decoding cache, at 32,768 and at 1,048,576 tokens of context.

Measured inside a worker for `decode.py`. Three caches of the same heads: ours for segments of 2048, 8192 and 32768
(rates 1, 4, 16), ours for a pattern that reaches over the whole context, and a dense cache, whose every token attends
over every other. All run the same loop: some tokens in one `lax.scan`, the cache donated, repeats interleaved, the
median taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import ringjax as rj

CONTEXTS = (32_768, 1_048_576)
HEADS, DIM = 8, 64
NEAR = rj.DilationPattern((2048, 8192, 32768), (1, 4, 16))


class Dense(NamedTuple):
    """Keys and values (K, T, H) of all tokens, and how many there are."""

    keys: Array
    values: Array
    length: Array


def dense_step(cache: Dense, query: Array, key: Array, value: Array) -> tuple[Array, Dense]:
    """Causal attention of one token (1, 1, N, H) over all before it and itself."""
    q, k, v = (x[0].transpose(1, 0, 2) for x in (query, key, value))  # (N, 1, H)
    keys, values = (
        lax.dynamic_update_slice(x, new, (0, cache.length, 0)) for x, new in ((cache.keys, k), (cache.values, v))
    )
    scores = (keys @ q.transpose(0, 2, 1))[..., 0] * DIM**-0.5
    is_there = jnp.arange(keys.shape[1]) <= cache.length
    weights = jax.nn.softmax(jnp.where(is_there[None], scores, -jnp.inf), axis=-1)
    out = (weights[:, None] @ values).transpose(1, 0, 2)[None]
    return out, Dense(keys, values, cache.length + 1)


def dense_cache(context: int) -> Dense:
    rows = (HEADS, context, DIM)
    return Dense(jnp.full(rows, 0.01), jnp.full(rows, 1.0), jnp.int32(context // 2))


def our_cache(pattern: rj.DilationPattern, context: int) -> rj.DecodeCache:
    """A cache in the middle of its context, as if it had been filled there."""
    cache = rj.init_cache(pattern, 1, HEADS, DIM, context)
    keys = tuple(jax.random.normal(jax.random.key(2), k.shape) for k in cache.keys)
    return rj.DecodeCache(keys, tuple(x + 1 for x in keys), jnp.full(1, context // 2, jnp.int32), pattern, context)


class Loop:
    """Tokens after tokens on one cache, which is donated and comes back."""

    def __init__(self, step: Callable, cache, tokens: int) -> None:
        def run(cache, new):
            def one(cache, x):
                out, cache = step(cache, x, x, x)
                return cache, out

            return lax.scan(one, cache, new)

        self.new = jax.random.normal(jax.random.key(1), (tokens, 1, 1, HEADS, DIM))
        self.nbytes = sum(x.nbytes for x in jax.tree.leaves(cache))
        self.run = jax.jit(run, donate_argnums=0).lower(cache, self.new).compile()
        self.temporary = self.run.memory_analysis().temp_size_in_bytes
        self.cache, _ = jax.block_until_ready(self.run(cache, self.new))

    def __call__(self) -> float:
        """Seconds per token."""

        begin = time.perf_counter()
        self.cache, _ = jax.block_until_ready(self.run(self.cache, self.new))
        return (time.perf_counter() - begin) / len(self.new)


def check() -> None:
    """The two loops are what they say: a cache of one dense branch is the dense cache."""
    pattern = rj.DilationPattern((64,), (1,))
    new = jax.random.normal(jax.random.key(0), (40, 1, 1, HEADS, DIM))
    ours, dense = rj.init_cache(pattern, 1, HEADS, DIM, 64), dense_cache(64)._replace(length=jnp.int32(0))
    _, a = lax.scan(lambda c, x: rj.decode_step(c, x, x, x)[::-1], ours, new)
    _, b = lax.scan(lambda c, x: dense_step(c, x, x, x)[::-1], dense, new)
    assert np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-5


def figures(repeats: int) -> list[dict]:
    """Seconds per token and bytes of every cache at every context."""
    check()
    reach = rj.DilationPattern.geometric(1024, 1_048_576, 4)
    loops: dict[tuple[str, int], Loop] = {}
    for context in CONTEXTS:
        loops["segments to 32,768", context] = Loop(rj.decode_step, our_cache(NEAR, context), 256)
        loops["segments to 1,048,576", context] = Loop(rj.decode_step, our_cache(reach, context), 256)
        loops["dense", context] = Loop(dense_step, dense_cache(context), 8 if context < 100_000 else 1)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in loops}
    for _ in range(repeats):
        for key, loop in loops.items():
            times[key].append(loop())
    return [
        {"cache": name, "context": context, "seconds": statistics.median(times[name, context]), "bytes": loop.nbytes}
        for (name, context), loop in loops.items()
    ]
