"""Time per token and bytes of a decoding cache, at 32,768 and at 1,048,576 tokens of context.

Three caches of the same heads: ours for segments of 2048, 8192 and 32768 (rates 1, 4, 16), ours for a pattern that
reaches over the whole context, and a dense cache, whose every token attends over every other. All run the same loop:
some tokens in one `lax.scan`, the cache donated, repeats interleaved, the median taken.

    python benchmarks/decode.py            # `make bench-decode`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import timing
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

        def advance() -> Array:
            self.cache, out = self.run(self.cache, self.new)
            return out

        return timing.timed(advance) / len(self.new)


def check() -> None:
    """The two loops are what they say: a cache of one dense branch is the dense cache."""
    pattern = rj.DilationPattern((64,), (1,))
    new = jax.random.normal(jax.random.key(0), (40, 1, 1, HEADS, DIM))
    ours, dense = rj.init_cache(pattern, 1, HEADS, DIM, 64), dense_cache(64)._replace(length=jnp.int32(0))
    _, a = lax.scan(lambda c, x: rj.decode_step(c, x, x, x)[::-1], ours, new)
    _, b = lax.scan(lambda c, x: dense_step(c, x, x, x)[::-1], dense, new)
    assert timing.largest_error([a], [b]) < 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    check()
    rows = {}
    for context in CONTEXTS:
        rows[f"segments to 32768 at {context}"] = Loop(rj.decode_step, our_cache(NEAR, context), 256)
        reach = rj.DilationPattern.geometric(1024, 1_048_576, 4)
        rows[f"segments to 1048576 at {context}"] = Loop(rj.decode_step, our_cache(reach, context), 256)
        rows[f"dense at {context}"] = Loop(dense_step, dense_cache(context), 8 if context < 100_000 else 1)
    seconds = timing.interleaved(rows, options.repeats)
    print(f"{'cache':32} {'ms per token':>12} {'cache MiB':>10} {'temporary MiB':>14}")
    for name, loop in rows.items():
        print(f"{name:32} {seconds[name] * 1e3:12.3f} {loop.nbytes / 2**20:10.2f} {loop.temporary / 2**20:14.2f}")
    short, long = CONTEXTS
    print(f"\n{'from ' + str(short) + ' to ' + str(long):32} {'time':>8} {'memory':>8}")
    for name in ("segments to 32768", "segments to 1048576", "dense"):
        a, b = f"{name} at {short}", f"{name} at {long}"
        print(f"{name:32} {seconds[b] / seconds[a]:8.2f} {rows[b].nbytes / rows[a].nbytes:8.2f}")
    print(f"\n{'dense over ours':32} {'time':>8} {'memory':>8}")
    for context in CONTEXTS:
        for name in ("segments to 32768", "segments to 1048576"):
            a, b = f"{name} at {context}", f"dense at {context}"
            print(f"{a:32} {seconds[b] / seconds[a]:8.1f} {rows[b].nbytes / rows[a].nbytes:8.1f}")


if __name__ == "__main__":
    main()
