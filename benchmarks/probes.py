"""What is measured inside a JAX worker, beyond races: programs, precision, tables, messages."""

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
from jax_worker import Contender, pattern_of, ringjax_on, with_gradient
from jax_worker import ring as ring_contender
from workloads import Case

import ringjax as rj
from ringjax.cli.hardware import DEVICES
from ringjax.cli.running import hop_bandwidth, ring_mesh

# what devices call themselves
KINDS = {
    "v5 lite": "v5e",
    "v5e": "v5e",
    "v5p": "v5p",
    "v5": "v5p",
    "v6": "v6e",
    "a100": "a100",
    "h100": "h100",
    "b200": "b200",
}


def seconds(function, *arguments) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - begin


def matmul_rate(size: int = 2048) -> float:
    """GFLOP/s of a square matrix multiply: the best of some."""
    matrix = jnp.ones((size, size))
    multiply = jax.jit(lambda a: a @ a)
    seconds(multiply, matrix)
    return 2 * size**3 / min(seconds(multiply, matrix) for _ in range(5)) / 1e9


def planned(case: dict, size: int, **options) -> rj.Plan:
    c = Case.from_dict(case)
    return rj.plan(
        pattern_of(c),
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
    """Bytes that a device sends, by the plan."""
    branches = planned(case, size, **options).branches
    return sum(b.sent(b.forward) + (b.sent(b.backward) if grad else 0) for b in branches)


def compile_facts(case: dict, size: int) -> dict:
    """Seconds to trace and to compile the gradient, and how long the program is."""
    c = Case.from_dict(case)
    attention, placement = ring_contender(c, size) if size > 1 else (ringjax_on(c), None)
    sharding = placement and jax.NamedSharding(placement.mesh, placement.spec)
    arrays = [jax.ShapeDtypeStruct(c.shape, c.dtype, sharding=sharding) for _ in range(4)]
    rj.pattern_cache_clear()
    begin = time.perf_counter()
    lowered = with_gradient(attention, True).lower(*arrays)
    traced = time.perf_counter()
    program = lowered.compile()
    text = len(program.as_text())
    return {"trace_s": traced - begin, "compile_s": time.perf_counter() - traced, "program_kB": text / 1e3}


def half_errors(case: dict, size: int, seeds: int) -> dict:
    """Relative error of bfloat16, output and gradients together, against float32: Frobenius norms, mean of seeds."""
    c = Case.from_dict(case)
    attention, placement = ring_contender(c, size) if size > 1 else (ringjax_on(c), None)
    program, reference = with_gradient(attention, True), with_gradient(ringjax_on(c), True)
    take = placement.take if placement else lambda x: np.asarray(x.astype(jnp.float32))
    put = placement.put if placement else lambda x, dtype: jnp.asarray(x).astype(dtype)
    errors = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        host = [
            np.asarray(jnp.asarray(rng.standard_normal(c.shape, np.float32), jnp.bfloat16), np.float32)
            for _ in range(4)
        ]
        got = [take(x) for x in program(*(put(x, jnp.bfloat16) for x in host))]
        expected = [np.asarray(x) for x in reference(*map(jnp.asarray, host))]
        errors.append([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, expected, strict=True)])
    mean = np.mean(errors, axis=0)
    return {"out": float(mean[0]), "gradients": float(mean[1:].max())}


def cache_times(case: dict, repeats: int) -> dict:
    """Seconds to trace an attention and its gradient with an empty pattern cache and with a filled one."""
    c = Case.from_dict(case)
    arrays = [jax.ShapeDtypeStruct(c.shape, c.dtype) for _ in range(4)]

    def trace() -> float:
        program = with_gradient(ringjax_on(c), True)  # a new function, so that JAX traces it anew
        begin = time.perf_counter()
        program.lower(*arrays)
        return time.perf_counter() - begin

    trace()
    cold, warm = [], []
    for _ in range(repeats):
        rj.pattern_cache_clear()
        cold.append(trace())
        warm.append(trace())
    info = rj.pattern_cache_info()
    found = {"cold_s": statistics.median(cold), "warm_s": statistics.median(warm)}
    return {**found, "hits": info.hits, "misses": info.misses, "bytes": info.bytes}


def budgets(case: dict, size: int, shares: list[float]) -> list[dict]:
    """What a plan does with less and less memory, and what the compiled gradient takes."""
    c = Case.from_dict(case)
    free = planned(case, size).memory().gradient
    rows = []
    for share in shares:
        budget = int(share * free)
        try:
            plan = planned(case, size, memory_budget=budget)
        except ValueError as problem:
            needed = int(re.search(r"at least (\d+) bytes", str(problem))[1])
            rows.append({"budget": budget, "where": f"refused: {needed / 2**20:.1f} MiB needed", "bytes": None})
            continue
        mesh = ring_mesh(jax.devices()[:size])
        ring = rj.Ring(mesh, layout="zigzag" if c.causal else "contiguous", memory_budget=budget)
        sharding = jax.NamedSharding(mesh, ring.spec())
        arrays = [jax.ShapeDtypeStruct(c.shape, c.dtype, sharding=sharding) for _ in range(4)]
        m = with_gradient(ringjax_on(c, ring), True).lower(*arrays).compile().memory_analysis()
        held = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
        rows.append({"budget": budget, "where": ", ".join(b.where for b in plan.branches), "bytes": held})
    return rows


def utilisation(case: dict, size: int, grad: bool, repeats: int) -> dict:
    """How well the devices are used: share of their peak, bandwidth of a hop, share of the messages that work hides.

    The same program without its messages (each device keeps what it would send; the results are wrong and not looked
    at) tells what the messages cost; their own time is their bytes over the bandwidth of a hop alone.
    """
    c = Case.from_dict(case)
    options = {"size": size, "strategy": "ring"}
    whole = Contender("ring", c, grad, options)
    with mock.patch.object(lax, "ppermute", lambda x, *_, **__: x):
        silent = Contender("ring", c, grad, options)
    times: dict[str, list[float]] = {"whole": [], "silent": []}
    for _ in range(repeats + 1):
        times["whole"].append(whole.run())
        times["silent"].append(silent.run())
    took, without = (statistics.median(times[name][1:]) for name in ("whole", "silent"))
    kind = jax.devices()[0].device_kind.lower()
    name = next((DEVICES[x] for word, x in KINDS.items() if word in kind), None)
    peak = size * name.flops(c.dtype) if name else matmul_rate() * 1e9
    sent = sent_bytes(case, size, grad, strategy="ring")
    found = {
        "seconds": took,
        "utilisation": c.flops(grad) / took / peak,
        "peak": name.name if name else "a matrix multiply",
    }
    if size > 1:
        bandwidth = hop_bandwidth(whole.placement.mesh, 2**22 if name is None else 2**26, budget=1.0)
        alone = sent / bandwidth
        found |= {"hop_GB_per_s": bandwidth / 1e9, "messages_s": alone, "exposed_s": took - without}
        noise = max(max(times[name][1:]) - min(times[name][1:]) for name in ("whole", "silent"))
        share = min(1.0, max(0.0, 1 - (took - without) / alone)) if alone else None
        found["hidden"] = share if alone > noise else "below the noise"
    return found


def whole_run(case: dict, repeats: int) -> dict:
    """Forward and backward, with the peak memory of this process and the error of some rows against the oracle."""
    c = Case.from_dict(case)
    arrays = [jax.random.normal(jax.random.key(i), c.shape, c.dtype) for i in range(4)]
    begin = time.perf_counter()
    program = with_gradient(ringjax_on(c), True).lower(*arrays).compile()
    compiled = time.perf_counter() - begin
    results = jax.block_until_ready(
        program(*arrays)
    )  # the first run also pays for memory that was never touched before
    times = [seconds(program, *arrays) for _ in range(repeats)]
    assert all(bool(jnp.isfinite(x).all()) for x in results)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    rows = jnp.array([0, 1, 1023, c.length // 2, c.length - 1])
    expected = rj.reference_attention(*arrays[:3], pattern_of(c), is_causal=c.causal, rows=rows)
    error = float(abs(results[0][:, rows] - expected).max())
    assert error < (2e-6 if c.dtype == "float32" else 4e-2), error
    return {
        "seconds": statistics.median(times),
        "compile_s": compiled,
        "temp": program.memory_analysis().temp_size_in_bytes / sum(x.nbytes for x in arrays[:3]),
        "program_kB": len(program.as_text()) / 1e3,
        "peak": peak,
        "error": error,
    }
