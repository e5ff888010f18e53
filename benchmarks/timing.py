"""What the benchmarks share: programs made once, repeats interleaved, medians."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np


def with_gradient(attention: Callable, grad: bool) -> Callable:
    """A function of q, k, v and a cotangent: the output, and with `grad` the three gradients."""

    def both(q, k, v, g):
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(g)

    return jax.jit(both if grad else lambda q, k, v, g: (attention(q, k, v),))


def timed(f: Callable, *args) -> float:
    """Seconds until all results are there."""
    begin = time.perf_counter()
    jax.block_until_ready(f(*args))
    return time.perf_counter() - begin


def interleaved(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of each contender; every repeat runs all of them once, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, measure in contenders.items():
            times[name].append(measure())
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def largest_error(ours: Sequence, theirs: Sequence) -> float:
    """``max|a - b| / max(1, max|b|)`` over all pairs."""
    errors = [
        np.abs(np.asarray(a) - np.asarray(b)).max() / max(1.0, np.abs(np.asarray(b)).max())
        for a, b in zip(ours, theirs, strict=True)
    ]
    return float(max(errors))


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(statistics.fmean(map(math.log, ratios)))
