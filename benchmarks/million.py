"""One million tokens forward and backward on this machine, and time per token against 65,536 tokens.

The pattern `geometric(1024, T, 4)` has segments up to the whole sequence and (nearly) constant work per token:
1024 keys in the first branch, a quarter of that in the next, and so on. Each length runs in a process of its own, so
that the peak memory is its own.

    python benchmarks/million.py            # `make million`
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

LENGTHS = (65_536, 1_048_576)
HEADS, DIM = 4, 64


def measure(length: int, causal: bool, repeats: int) -> dict[str, float]:
    import jax  # noqa: PLC0415

    import ringjax as rj  # noqa: PLC0415

    pattern = rj.DilationPattern.geometric(1024, length, 4)
    q, k, v, g = (jax.random.normal(jax.random.key(i), (1, length, HEADS, DIM)) for i in range(4))

    def both(q, k, v, g):
        out, pull = jax.vjp(lambda q, k, v: rj.dilated_attention(q, k, v, pattern, is_causal=causal), q, k, v)
        return out, *pull(g)

    begin = time.perf_counter()
    compiled = jax.jit(both).lower(q, k, v, g).compile()
    compile_seconds = time.perf_counter() - begin
    times = []
    jax.block_until_ready(compiled(q, k, v, g))  # the first run also pays for memory that was never touched before
    for _ in range(repeats):
        begin = time.perf_counter()
        results = jax.block_until_ready(compiled(q, k, v, g))
        times.append(time.perf_counter() - begin)
    assert all(bool(jax.numpy.isfinite(x).all()) for x in results)
    # the first and the last rows against the dense oracle, output only: the scores of a few rows
    rows = jax.numpy.array([0, 1, 1023, length // 2, length - 1])
    expected = rj.reference_attention(q, k, v, pattern, is_causal=causal, rows=rows)
    error = float(abs(results[0][:, rows] - expected).max())
    assert error < 2e-6, error
    return {
        "length": length,
        "branches": len(pattern.segment_lengths),
        "compile_s": compile_seconds,
        "run_s": statistics.median(times),
        "us_per_token": statistics.median(times) / length * 1e6,
        "temp_over_qkv": compiled.memory_analysis().temp_size_in_bytes / (3 * q.nbytes),
        "program_kB": len(compiled.as_text()) / 1e3,
        "peak_GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="at one million tokens; sixteen times as many at 65,536")
    parser.add_argument("--worker", nargs=3, metavar=("LENGTH", "CAUSAL", "REPEATS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        length, causal, repeats = map(int, options.worker)
        print(json.dumps(measure(length, bool(causal), repeats)))
        return
    print(f"(1, T, {HEADS}, {DIM}) float32, forward and backward, DilationPattern.geometric(1024, T, 4)")
    for causal in (True, False):
        results = []
        for length in LENGTHS:
            repeats = options.repeats * (LENGTHS[-1] // length)
            command = [sys.executable, __file__, "--worker", str(length), str(int(causal)), str(repeats)]
            results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
            r = results[-1]
            print(
                f"{'causal' if causal else 'full':>6} {length:>9,} tokens: {r['run_s']:7.2f} s, "
                f"{r['us_per_token']:6.2f} us per token, compile {r['compile_s']:.1f} s, "
                f"program {r['program_kB']:.0f} kB, temporaries {r['temp_over_qkv']:.2f} of q+k+v, "
                f"peak {r['peak_GiB']:.1f} GiB, error {r['error']:.0e}",
                flush=True,
            )
        print(f"       time per token, 1M over 64K: {results[1]['us_per_token'] / results[0]['us_per_token']:.3f}")


if __name__ == "__main__":
    main()
