"""Measurements that run inside a JAX worker: program size, precision, caching, memory budgets and communication."""

from __future__ import annotations

import re
import resource
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax_worker import Program, make_pattern, ringjax_attention, with_grad
from jax_worker import ring as build_ring
from workloads import Case

import ringjax as rj
from ringjax._src.comm.devices import DEVICES, known_device
from ringjax.cli.running import hop_bandwidth, ring_mesh


def timed(function, *arguments) -> float:
    """Returns the seconds of one call."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def matmul_rate(size: int = 2048) -> float:
    """Returns the GFLOP/s of a square matrix multiply, the best of five."""
    matrix = jnp.ones((size, size))
    multiply = jax.jit(lambda a: a @ a)
    timed(multiply, matrix)
    return 2 * size**3 / min(timed(multiply, matrix) for _ in range(5)) / 1e9


def make_plan(case: dict, size: int, **options) -> rj.Plan:
    c = Case.from_dict(case)
    return rj.plan(
        make_pattern(c),
        seq_len=c.length,
        num_heads=c.heads,
        head_dim=c.dim,
        batch=c.batch,
        dtype=c.dtype,
        ring_size=size,
        is_causal=c.causal,
        layout="zigzag" if c.causal else "contiguous",
        **options,
    )


def sent_bytes(case: dict, size: int, grad: bool, **options) -> int:
    """Returns the bytes each device sends according to the plan."""
    branches = make_plan(case, size, **options).branches
    return sum(b.sent(b.forward) + (b.sent(b.backward) if grad else 0) for b in branches)


def compile_times(case: dict, size: int) -> dict:
    """Measures tracing and compilation of the gradient, and the length of the compiled program."""
    c = Case.from_dict(case)
    attention, placement = build_ring(c, size) if size > 1 else (ringjax_attention(c), None)
    sharding = placement and jax.NamedSharding(placement.mesh, placement.spec)
    arrays = [jax.ShapeDtypeStruct(c.shape, c.dtype, sharding=sharding) for _ in range(4)]
    rj.pattern_cache_clear()
    start = time.perf_counter()
    lowered = with_grad(attention, True).lower(*arrays)
    traced = time.perf_counter()
    program = lowered.compile()
    hlo_length = len(program.as_text())
    return {"trace_s": traced - start, "compile_s": time.perf_counter() - traced, "hlo_kB": hlo_length / 1e3}


def bfloat16_errors(case: dict, size: int, seeds: int) -> dict:
    """Returns the relative errors of bfloat16 outputs and gradients against float32, in Frobenius norm, over seeds."""
    c = Case.from_dict(case)
    attention, placement = build_ring(c, size) if size > 1 else (ringjax_attention(c), None)
    program, reference = with_grad(attention, True), with_grad(ringjax_attention(c), True)
    fetch = placement.fetch if placement else lambda x: np.asarray(x.astype(jnp.float32))
    put = placement.put if placement else lambda x, dtype: jnp.asarray(x).astype(dtype)
    errors = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        inputs = [
            np.asarray(jnp.asarray(rng.standard_normal(c.shape, np.float32), jnp.bfloat16), np.float32)
            for _ in range(4)
        ]
        actual = [fetch(x) for x in program(*(put(x, jnp.bfloat16) for x in inputs))]
        expected = [np.asarray(x) for x in reference(*map(jnp.asarray, inputs))]
        errors.append([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(actual, expected, strict=True)])
    mean = np.mean(errors, axis=0)
    return {"out": float(mean[0]), "gradients": float(mean[1:].max())}


def cache_times(case: dict, repeats: int) -> dict:
    """Measures tracing of the gradient with an empty and with a warm pattern cache."""
    c = Case.from_dict(case)
    arrays = [jax.ShapeDtypeStruct(c.shape, c.dtype) for _ in range(4)]

    def trace() -> float:
        program = with_grad(ringjax_attention(c), True)  # a new function, so that JAX traces it again
        start = time.perf_counter()
        program.lower(*arrays)
        return time.perf_counter() - start

    trace()
    cold, warm = [], []
    for _ in range(repeats):
        rj.pattern_cache_clear()
        cold.append(trace())
        warm.append(trace())
    info = rj.pattern_cache_info()
    times = {"cold_s": statistics.median(cold), "warm_s": statistics.median(warm)}
    return {**times, "hits": info.hits, "misses": info.misses, "bytes": info.bytes}


def memory_budgets(case: dict, size: int, fractions: list[float]) -> list[dict]:
    """Plans the case with shrinking memory budgets and returns the memory of the compiled gradients."""
    c = Case.from_dict(case)
    unconstrained = make_plan(case, size).memory().gradient
    rows = []
    for fraction in fractions:
        budget = int(fraction * unconstrained)
        try:
            plan = make_plan(case, size, memory_budget=budget)
        except ValueError as error:
            needed = int(re.search(r"at least (\d+) bytes", str(error))[1])
            rows.append({"budget": budget, "where": f"rejected: needs {needed / 2**20:.1f} MiB", "bytes": None})
            continue
        mesh = ring_mesh(jax.devices()[:size])
        ring = rj.Ring(mesh, layout="zigzag" if c.causal else "contiguous", memory_budget=budget)
        sharding = jax.NamedSharding(mesh, ring.spec())
        arrays = [jax.ShapeDtypeStruct(c.shape, c.dtype, sharding=sharding) for _ in range(4)]
        m = with_grad(ringjax_attention(c, ring), True).lower(*arrays).compile().memory_analysis()
        total = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
        rows.append({"budget": budget, "where": ", ".join(b.where for b in plan.branches), "bytes": total})
    return rows


def utilization(case: dict, size: int, grad: bool, repeats: int) -> dict:
    """Measures the fraction of peak FLOP/s, the bandwidth of a hop and the fraction of communication that is hidden.

    Exposed communication is measured against the same program with `ppermute` replaced by the identity (its results
    are wrong and ignored). The time of communication alone is its bytes divided by the measured bandwidth of a hop.
    """
    c = Case.from_dict(case)
    options = {"size": size, "strategy": "ring"}
    program = Program("ring", c, grad, options)
    with mock.patch.object(lax, "ppermute", lambda x, *_, **__: x):
        without_comm = Program("ring", c, grad, options)
    times = [(program.run(), without_comm.run()) for _ in range(repeats + 1)][1:]
    seconds, compute_seconds = (statistics.median(series) for series in zip(*times, strict=True))
    device = DEVICES.get(known_device(jax.devices()[0].device_kind) or "")
    peak = size * device.flops(c.dtype) if device else matmul_rate() * 1e9
    result = {
        "seconds": seconds,
        "utilization": c.flops(grad) / seconds / peak,
        "peak": device.name if device else "a matrix multiply",
    }
    if size > 1:
        bandwidth = hop_bandwidth(program.placement.mesh, 2**22 if device is None else 2**26, budget=1.0)
        comm = sent_bytes(case, size, grad, strategy="ring") / bandwidth
        exposed = seconds - compute_seconds
        result |= {"hop_GB_per_s": bandwidth / 1e9, "comm_s": comm, "exposed_s": exposed}
        noise = max(max(series) - min(series) for series in zip(*times, strict=True))
        result["hidden"] = min(1.0, max(0.0, 1 - exposed / comm)) if comm > noise else "below noise"
    return result


def full_run(case: dict, repeats: int) -> dict:
    """Runs forward and backward; measures the process's peak memory and the error of some rows against the oracle."""
    c = Case.from_dict(case)
    arrays = [jax.random.normal(jax.random.key(i), c.shape, c.dtype) for i in range(4)]
    start = time.perf_counter()
    program = with_grad(ringjax_attention(c), True).lower(*arrays).compile()
    compile_s = time.perf_counter() - start
    results = jax.block_until_ready(program(*arrays))  # warm-up: the first run also pays for page faults
    times = [timed(program, *arrays) for _ in range(repeats)]
    assert all(bool(jnp.isfinite(x).all()) for x in results)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    rows = jnp.array([0, 1, 1023, c.length // 2, c.length - 1])
    expected = rj.reference_attention(*arrays[:3], make_pattern(c), is_causal=c.causal, rows=rows)
    error = float(abs(results[0][:, rows] - expected).max())
    assert error < (2e-6 if c.dtype == "float32" else 4e-2), error
    return {
        "seconds": statistics.median(times),
        "compile_s": compile_s,
        "temp_ratio": program.memory_analysis().temp_size_in_bytes / sum(x.nbytes for x in arrays[:3]),
        "hlo_kB": len(program.as_text()) / 1e3,
        "peak_bytes": peak,
        "error": error,
    }
