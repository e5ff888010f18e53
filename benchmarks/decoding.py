"""Measures time per token and size of decoding caches, at contexts of 32,768 and 1,048,576 tokens.

Runs inside a worker for `decode.py`. There are three caches with the same heads: ringjax with segments 2048, 8192 and
32768 (rates 1, 4, 16), ringjax with segments up to the whole context, and a dense cache, where each token attends to
all previous ones. All run the same loop, a `lax.scan` over tokens with a donated cache; repeats are interleaved.
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
FIXED = rj.DilationPattern((2048, 8192, 32768), (1, 4, 16))


class DenseCache(NamedTuple):
    """Keys and values (K, T, H) of all tokens, and the number of tokens so far."""

    keys: Array
    values: Array
    length: Array


def dense_step(cache: DenseCache, query: Array, key: Array, value: Array) -> tuple[Array, DenseCache]:
    """Computes causal attention of one token (1, 1, N, H) and appends it to the cache."""
    q, k, v = (x[0].transpose(1, 0, 2) for x in (query, key, value))  # (N, 1, H)
    keys, values = (
        lax.dynamic_update_slice(x, new, (0, cache.length, 0)) for x, new in ((cache.keys, k), (cache.values, v))
    )
    scores = (keys @ q.transpose(0, 2, 1))[..., 0] * DIM**-0.5
    is_valid = jnp.arange(keys.shape[1]) <= cache.length
    weights = jax.nn.softmax(jnp.where(is_valid[None], scores, -jnp.inf), axis=-1)
    out = (weights[:, None] @ values).transpose(1, 0, 2)[None]
    return out, DenseCache(keys, values, cache.length + 1)


def dense_cache(context: int) -> DenseCache:
    """Returns a half-full dense cache."""
    shape = (HEADS, context, DIM)
    return DenseCache(jnp.full(shape, 0.01), jnp.full(shape, 1.0), jnp.int32(context // 2))


def ringjax_cache(pattern: rj.DilationPattern, context: int) -> rj.DecodeCache:
    """Returns a cache at the middle of its context, filled with random keys and values."""
    cache = rj.init_cache(pattern, 1, HEADS, DIM, context)
    keys = tuple(jax.random.normal(jax.random.key(2), k.shape) for k in cache.keys)
    return rj.DecodeCache(keys, tuple(x + 1 for x in keys), jnp.full(1, context // 2, jnp.int32), pattern, context)


class DecodeLoop:
    """Decodes a fixed number of tokens per call, donating the cache."""

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
        """Decodes the tokens and returns the seconds per token."""
        start = time.perf_counter()
        self.cache, _ = jax.block_until_ready(self.run(self.cache, self.new))
        return (time.perf_counter() - start) / len(self.new)


def check_equivalence() -> None:
    """Checks that a ringjax cache with a single dense branch gives the same outputs as the dense cache."""
    pattern = rj.DilationPattern((64,), (1,))
    new = jax.random.normal(jax.random.key(0), (40, 1, 1, HEADS, DIM))
    ours, dense = rj.init_cache(pattern, 1, HEADS, DIM, 64), dense_cache(64)._replace(length=jnp.int32(0))
    _, a = lax.scan(lambda c, x: rj.decode_step(c, x, x, x)[::-1], ours, new)
    _, b = lax.scan(lambda c, x: dense_step(c, x, x, x)[::-1], dense, new)
    assert np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-5


def measure(repeats: int) -> list[dict]:
    """Returns seconds per token and bytes of every cache at every context."""
    check_equivalence()
    growing = rj.DilationPattern.geometric(1024, 1_048_576, 4)
    loops: dict[tuple[str, int], DecodeLoop] = {}
    for context in CONTEXTS:
        loops["segments up to 32,768", context] = DecodeLoop(rj.decode_step, ringjax_cache(FIXED, context), 256)
        loops["segments up to 1,048,576", context] = DecodeLoop(rj.decode_step, ringjax_cache(growing, context), 256)
        loops["dense", context] = DecodeLoop(dense_step, dense_cache(context), 8 if context < 100_000 else 1)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in loops}
    for _ in range(repeats):
        for key, loop in loops.items():
            times[key].append(loop())
    return [
        {"cache": name, "context": context, "seconds": statistics.median(times[name, context]), "bytes": loop.nbytes}
        for (name, context), loop in loops.items()
    ]
