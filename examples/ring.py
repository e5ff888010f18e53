"""Causal dilated attention on many devices: the plan, the output and its gradient.

Without accelerators it simulates 8 CPU devices. Run it with `make ring`.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj

LENGTH, HEADS, DIM = 16_384, 8, 64
PATTERN = rj.DilationPattern(segment_lengths=(1024, 4096, 16384), dilation_rates=(1, 4, 16))


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((jax.device_count(),), ("ring",))
    p = mesh.shape["ring"]
    ring = rj.Ring(mesh)
    sizes = {"seq_len": LENGTH, "num_heads": HEADS, "head_dim": DIM, "ring_size": p}
    print(rj.plan(PATTERN, is_causal=True, device=ring.device(), **sizes))

    whole = jax.random.normal(jax.random.key(0), (4, 1, LENGTH, HEADS, DIM))
    query, key, value, cotangent = (jax.device_put(x, jax.NamedSharding(mesh, ring.spec())) for x in whole)

    @jax.jit
    def attention_and_gradient(query, key, value, cotangent):
        attention = lambda q, k, v: rj.dilated_attention(q, k, v, PATTERN, is_causal=True, ring=ring)  # noqa: E731
        out, pull = jax.vjp(attention, query, key, value)
        return out, pull(cotangent)

    jax.block_until_ready(attention_and_gradient(query, key, value, cotangent))
    begin = time.perf_counter()
    out, gradients = jax.block_until_ready(attention_and_gradient(query, key, value, cotangent))
    seconds = time.perf_counter() - begin
    print(f"\nforward and backward of {LENGTH:,} tokens on {p} {jax.default_backend()} devices: {seconds:.2f} s")
    print(f"output and gradients stay sharded: {out.sharding.spec}, {gradients[0].sharding.spec}")

    rows = np.array([0, 1, 5000, 9999, LENGTH - 1])
    expected = rj.reference_attention(*whole[:3], PATTERN, is_causal=True, rows=rows)
    found = np.asarray(out)[:, rows]
    error = float(jnp.abs(found - expected).max())
    print(f"largest difference from the dense reference on {len(rows)} rows: {error:.1e}")
    if not error < 1e-5:
        raise SystemExit("the ring and the dense reference differ")


if __name__ == "__main__":
    main()
