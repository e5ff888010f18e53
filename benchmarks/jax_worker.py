"""A worker that runs ringjax (one device, head-sharded, ring) and the JAX baselines."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from types import SimpleNamespace

# on busy cores a device may wait long for the others without being stuck
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=600")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from serving import PeakMemory, apply_limits, make_inputs, serve, subsample
from workloads import Case

import ringjax as rj


def with_grad(attention, grad: bool):
    """Returns a jitted function of (q, k, v, cotangent) that computes the output and, with `grad`, the gradients."""

    def both(q, k, v, g):
        out, vjp = jax.vjp(attention, q, k, v)
        return out, *vjp(g)

    return jax.jit(both if grad else lambda q, k, v, g: (attention(q, k, v),))


def make_pattern(case: Case) -> rj.DilationPattern:
    return rj.DilationPattern(case.segment_lengths, case.dilation_rates, heads="split" if case.split_heads else "all")


class Placement:
    """Places arrays on one device or on a mesh, in the given sequence layout."""

    def __init__(self, mesh: Mesh | None = None, spec: PartitionSpec | None = None, layout="contiguous", size=1):
        self.mesh, self.spec, self.layout, self.size = mesh, spec, layout, size

    def put(self, x: np.ndarray, dtype) -> jax.Array:
        """Converts a host array to the layout and moves it to the devices."""
        x = np.asarray(rj.to_layout(x, self.layout, self.size)).astype(dtype)
        return jnp.asarray(x) if self.mesh is None else jax.device_put(x, NamedSharding(self.mesh, self.spec))

    def fetch(self, x: jax.Array) -> np.ndarray:
        """Returns a device array on the host, in token order and as float32."""
        return np.asarray(rj.from_layout(np.asarray(x.astype(jnp.float32)), self.layout, self.size))


def ringjax_attention(case: Case, ring: rj.Ring | None = None, implementation: str | None = None):
    options = {"is_causal": case.causal, "ring": ring, "implementation": implementation}
    return functools.partial(rj.dilated_attention, pattern=make_pattern(case), **options)


def one_device(case: Case, implementation: str | None = None, **_):
    """Builds ringjax on one device."""
    return ringjax_attention(case, implementation=implementation), Placement()


def dense(case: Case, **_):
    """Builds dense attention as provided by JAX."""
    return functools.partial(jax.nn.dot_product_attention, is_causal=case.causal), Placement()


def heads(case: Case, size: int, **_):
    """Builds ringjax with the heads sharded over the devices, which needs no communication."""
    mesh = Mesh(np.array(jax.devices()[:size]).reshape(1, size), ("ring", "heads"))
    return ringjax_attention(case, rj.Ring(mesh, head_axis="heads")), Placement(
        mesh, PartitionSpec(None, "ring", "heads")
    )


def ring(case: Case, size: int, strategy: str = "auto", **_):
    """Builds ringjax with the sequence sharded over a ring."""
    mesh = Mesh(np.array(jax.devices()[:size]), ("ring",))
    rotates = strategy in ("ring", "all_gather", "all_to_all_ring")
    layout = "zigzag" if case.causal and rotates else "contiguous"
    ring = rj.Ring(mesh, layout=layout, strategy=strategy)
    return ringjax_attention(case, ring), Placement(mesh, PartitionSpec(None, "ring"), layout, size)


def ringattention(case: Case, size: int, folder: str, **_):
    """Builds dense causal Ring Attention (https://arxiv.org/abs/2310.01889) by ringattention 0.1.2."""
    sys.path.insert(0, folder)
    if not hasattr(jax.lib, "xla_bridge"):  # removed from JAX, but still used by ringattention
        jax.lib.xla_bridge = SimpleNamespace(get_backend=lambda: SimpleNamespace(platform="cpu"))
    attention = importlib.import_module("ringattention.ringattention_jax").ring_attention
    mesh, spec = Mesh(np.array(jax.devices()[:size]), ("ring",)), PartitionSpec(None, "ring")
    blocks = {
        "causal_block_size": 1,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": 512,
        "key_chunk_size": 512,
        "dtype": jnp.dtype(case.dtype),
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": False,
    }
    local = lambda q, k, v: attention(q, k, v, None, None, None, "ring", True, blocks)  # noqa: E731
    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return sharded, Placement(mesh, spec)


BUILDERS = {"one device": one_device, "dense": dense, "heads": heads, "ring": ring, "ringattention": ringattention}


class Program:
    """A compiled program together with its inputs."""

    def __init__(self, kind: str, case: Case, grad: bool, options: dict):
        attention, self.placement = BUILDERS[kind](case, **options)
        self.grad = grad
        self.args = [self.placement.put(x, jnp.dtype(case.dtype)) for x in make_inputs(case)]
        start = time.perf_counter()
        self.compiled = with_grad(attention, grad).lower(*self.args).compile()
        self.compile_s = time.perf_counter() - start

    def run(self) -> float:
        """Runs the program once and returns the seconds it took."""
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.args))
        return time.perf_counter() - start

    def info(self) -> dict:
        """Returns compile time and memory of the compiled program."""
        m = self.compiled.memory_analysis()
        parts = (m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes)
        return {"compile_s": self.compile_s, "device_bytes": sum(parts), "temp_bytes": parts[-1]}


def info() -> dict:
    devices = jax.devices()
    versions = {"jax": jax.__version__, "ringjax": rj.__version__}
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "versions": versions,
    }


def main() -> None:
    apply_limits()
    if sys.argv[1] != "devices":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    programs: dict[str, Program] = {}

    def prepare(key: str, kind: str, case: dict, grad: bool, path: str | None = None, **options: object) -> dict:
        programs[key] = program = Program(kind, Case.from_dict(case), grad, options)
        start = time.perf_counter()
        outputs = jax.block_until_ready(program.compiled(*program.args))
        seconds = time.perf_counter() - start
        if path:
            np.savez(path, *(subsample(program.placement.fetch(x)) for x in outputs))
        return {"first_s": seconds, **program.info()}

    def memory(key: str) -> dict:
        inputs = sum(x.nbytes for x in programs[key].args[: 4 if programs[key].grad else 3])
        with PeakMemory() as peak:
            programs[key].run()
        return {"bytes": inputs + peak.bytes}

    def call(function: str, **arguments: object) -> dict:
        """Calls `module:function` of this folder."""
        module, name = function.split(":")
        return {"result": getattr(importlib.import_module(module), name)(**arguments)}

    serve(
        {
            "info": info,
            "prepare": prepare,
            "run": lambda key: {"seconds": programs[key].run()},
            "memory": memory,
            "drop": lambda key: {"dropped": programs.pop(key, None) is not None},
            "call": call,
        }
    )


if __name__ == "__main__":
    main()
